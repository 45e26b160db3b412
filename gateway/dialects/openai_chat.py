"""Read and write /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.conversation.message import encode, text_parts
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.choices import CHAT_FORM, ChoicesDialect, asks_for_usage
from gateway.dialects.fields import decode_answer, flag_field, messages_field, model_field, read_fields
from gateway.dialects.opening import opening_items

_LATER: Final = b'"request_id"'


class OpenAIChat(ChoicesDialect):
    """The chat dialect."""

    name = "chat"
    _form = CHAT_FORM
    _text_fields = (
        *("messages", "tools", "functions", "response_format"),
        *("prediction", "documents", "chat_template"),
    )

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

    def opening(self, call: Call) -> list[str] | None:
        """See `Dialect.opening`."""
        return opening_items(call.fields["messages"])

    def answer(self, body: bytes) -> ParsedResponse:
        """See `Dialect.answer`. One that is made later says under which id it is to be fetched (xAI)."""
        answer = super().answer(body)
        if answer.finish_reason is not None or _LATER not in body:
            return answer
        value = decode_answer(body)
        known = value.get("request_id") if isinstance(value, dict) else None
        return replace(answer, id=known) if isinstance(known, str) else answer


def completion_request(model: str, messages: Sequence[Mapping[str, object]], limit: tuple[str, int]) -> bytes:
    """The body of a plain chat call of our own. `limit`: the field that bounds the answer, and its tokens."""
    return encode({"model": model, "messages": messages, limit[0]: limit[1]})


def completion_text(body: bytes) -> str | None:
    """The text of a whole answer; None where there is none, or the model or its provider would not give it."""
    value = decode_answer(body)
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
