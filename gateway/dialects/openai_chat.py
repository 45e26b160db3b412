"""Read and write /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.conversation.message import encode, text_parts
from gateway.dialects.base import Call, ParsedResponse
from gateway.dialects.choices import CHAT_FORM, ChoicesDialect, asks_for_usage
from gateway.dialects.fields import decode_response, flag_field, messages_field, model_field, read_fields
from gateway.dialects.opening import identifying_texts

#: the field in which xAI names the id of a response that is generated later
_REQUEST_ID: Final = b'"request_id"'


class OpenAIChat(ChoicesDialect):
    """Dialect of chat completions."""

    name = "chat"
    _form = CHAT_FORM
    _text_fields = (
        *("messages", "tools", "functions", "response_format"),
        *("prediction", "documents", "chat_template"),
    )

    def read(self, body: bytes) -> Call:
        """Read a request body."""
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
        """Return the texts that identify the conversation."""
        return identifying_texts(call.fields["messages"])

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response. A deferred one (xAI) has the id by which it is fetched later."""
        response = super().answer(body)
        if response.finish_reason is not None or _REQUEST_ID not in body:
            return response
        value = decode_response(body)
        deferred_id = value.get("request_id") if isinstance(value, dict) else None
        return replace(response, id=deferred_id) if isinstance(deferred_id, str) else response


def completion_request(model: str, messages: Sequence[Mapping[str, object]], limit: tuple[str, int]) -> bytes:
    """Return the body of a chat call by the gateway itself. `limit`: the field of the output limit, and its tokens."""
    return encode({"model": model, "messages": messages, limit[0]: limit[1]})


def completion_text(body: bytes) -> str | None:
    """Return the text of a whole response; None if it has none, or if the model or provider refused."""
    value = decode_response(body)
    choices = value.get("choices") if isinstance(value, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or choice.get("finish_reason") == "content_filter":
        return None
    message = choice.get("message")
    if not isinstance(message, dict) or message.get("refusal"):
        return None
    # A lone surrogate cannot be written as UTF-8 into the next request.
    text = text_parts(message.get("content")).encode("utf-8", "replace").decode().strip()
    return text or None
