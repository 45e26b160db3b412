"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from gateway.core.errors import GatewayError
from gateway.core.message import encode, text_parts
from gateway.dialects import openai_errors
from gateway.dialects.base import Answer, Call, EventReader
from gateway.dialects.choices import CHAT_FORM, ChoicesReader, asks_for_usage, read_whole, usage_wish
from gateway.dialects.fields import decode, flag_field, join, messages_field, model_field, read_fields
from gateway.dialects.opening import opening_items
from gateway.dialects.texts import texts_of_fields

_TEXT_FIELDS: Final = (
    *("messages", "tools", "functions", "response_format"),
    *("prediction", "documents", "chat_template"),
)


class OpenAIChat:
    """The chat dialect."""

    name = "chat"

    def read(self, body: bytes) -> Call:
        """See `Dialect.read`."""
        fields = read_fields(body)
        model = model_field(fields)
        messages_field(fields)
        return Call(
            operation="chat",
            model=model,
            stream=flag_field(fields, "stream"),
            body=body,
            fields=fields,
            usage_asked=asks_for_usage(fields),
        )

    def write(
        self,
        call: Call,
        model: str,
        *,
        ask_usage: bool,
        messages: Sequence[bytes] | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> bytes:
        """See `Dialect.write`. `ask_usage` sets `stream_options.include_usage` on a stream that lacks it."""
        wanted = {**(changes or {}), **(usage_wish(call) if ask_usage else {})}
        if messages is not None:
            wanted["messages"] = join(messages)
        return call.written(model, wanted)

    def opening(self, call: Call) -> list[str] | None:
        """See `Dialect.opening`."""
        return opening_items(call.fields["messages"])

    def input_text(self, call: Call) -> Iterator[str]:
        """See `Dialect.input_text`."""
        return texts_of_fields(call.fields, _TEXT_FIELDS)

    def answer(self, body: bytes) -> Answer:
        """See `Dialect.answer`."""
        return read_whole(body, CHAT_FORM)

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """See `Dialect.reader`."""
        del call, input_tokens
        return ChoicesReader(CHAT_FORM, drop_usage=drop_usage)

    def error(self, fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
        """See `Dialect.error`."""
        del request_id
        return openai_errors.body(fault, details)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """See `Dialect.error_event`."""
        del request_id, number
        return openai_errors.event(fault)


def completion_request(model: str, messages: Sequence[Mapping[str, object]], limit: tuple[str, int]) -> bytes:
    """The body of a plain chat call of our own. `limit`: the field that bounds the answer, and its tokens."""
    return encode({"model": model, "messages": messages, limit[0]: limit[1]})


def completion_text(body: bytes) -> str | None:
    """The text of a whole answer; None where there is none, or the model or its provider would not give it."""
    value = decode(body)
    choices = value.get("choices") if isinstance(value, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("finish_reason") == "content_filter":
        return None
    message = choice.get("message")
    if not isinstance(message, dict) or message.get("refusal"):
        return None
    # Half a surrogate pair has no place in a body that is to be sent on.
    text = text_parts(message.get("content")).encode("utf-8", "replace").decode().strip()
    return text or None
