"""Forward all other paths under /v1 unchanged, and meter them if the response has usage.

A response is searched for `usage` in the places where providers put it. Without usage, the tokens of its text are
estimated, if the text is where the known APIs have it. A model response from an unknown path is not free either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.dialects import anthropic_errors, openai_errors
from gateway.dialects.base import Call, EventReader, ParsedResponse, Verdict, length_before
from gateway.dialects.contents import without_marks
from gateway.dialects.fields import decode_response, flag_field, read_fields, string_field
from gateway.dialects.response_state import ResponseState
from gateway.dialects.texts import texts_if_longer, texts_of_fields

_TEXT_FIELDS: Final = ("messages", "input", "prompt", "system", "instructions", "tools", "query", "documents")
#: fields that control a call or are stored with it: no model reads them
_STEERING: Final = frozenset(
    {"model", "models", "provider", "metadata", "user", "stop", "stop_sequences", "logit_bias", "tool_choice"}
)
#: Characters up to which the text of all other fields is ignored. Switches and ids are shorter.
_FEW_CHARACTERS: Final = 512
_END: Final = b"[DONE]"
#: fields of an event that hold the top level of a response in the known APIs
_ENVELOPES: Final = ("response", "message", "x_groq")
#: fields with text in a delta or in a choice
_DELTA_TEXTS: Final = ("content", "text", "thinking", "partial_json")
#: fields with text in whole responses of Messages and Responses
_WHOLE_TEXTS: Final = ("content", "output")
#: The text of a transcription or translation. The end of such a stream repeats all of it.
_TRANSCRIPT: Final = "text"
#: fields with audio or an image in a response or an event, and fields with one of several images
_MEDIA: Final = ("audio", "b64_json")
_IMAGE: Final = ("b64_json", "url")


class PassThrough:
    """Forward requests unchanged, except the model name if a route replaces it.

    Args:
        operation: the name of the operation in records.
        anthropic: the client uses Anthropic's API, so errors have that form.
        is_read: tokens of requests are counted and reserved, so a request that cannot be read is refused.
        is_empty: refuse a request with a body, which might be a call of a model that is not counted.
        counts: the provider is asked to count a request of this format. The client's `x_gateway` marks are removed
            from it, as they are from the request itself.
    """

    name = "passthrough"

    def __init__(
        self,
        operation: str,
        *,
        anthropic: bool = False,
        is_read: bool = False,
        is_empty: bool = False,
        counts: Wire | None = None,
    ) -> None:
        self._operation = operation
        self._is_read = is_read
        self._is_empty = is_empty
        self._anthropic = anthropic
        self._counts = counts

    def read(self, body: bytes) -> Call:
        """Read a request body. A body that is not a JSON object (a file, a form) has no fields and is not read."""
        if self._is_empty and body:
            raise InvalidRequest("A request of this path and method has no body. To call the model, send it by POST.")
        if not self._is_read and not body.lstrip(b" \t\r\n").startswith(b"{"):
            return Call(self._operation, None, stream=False, body=body, fields={})
        try:
            fields = read_fields(body)
            model = string_field(fields, "model")
            stream = flag_field(fields, "stream")
        except InvalidRequest:
            if self._is_read:
                # Forwarding it unread would bypass the budget.
                raise
            # The provider decides what it means, and gets the unchanged bytes.
            return Call(self._operation, None, stream=False, body=body, fields={})
        call = Call(self._operation, model, stream=stream, body=body, fields=fields, usage_asked=True)
        return call if self._counts is None else without_marks(call, self._counts)

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """Return the fields that make a stream report its usage."""
        del call
        return {}

    def opening(self, call: Call) -> list[str] | None:
        """Return the texts that identify the conversation."""
        del call
        return None

    def input_text(self, call: Call) -> Iterator[str]:
        """Yield the texts of the request. Any field may have billed text, because the provider defines the fields."""
        yield from texts_of_fields(call.fields, _TEXT_FIELDS)
        others = call.fields.keys() - _STEERING.union(_TEXT_FIELDS)
        yield from texts_if_longer(_FEW_CHARACTERS, texts_of_fields(call.fields, others, unknown=True))

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response."""
        reader = PassThroughReader()
        reader.read(body)
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for one stream."""
        del call, drop_usage, input_tokens
        return PassThroughReader()

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """Return the error body."""
        if self._anthropic:
            return anthropic_errors.body(fault, request_id)
        return openai_errors.body(fault)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """Return the error as the last event of a stream."""
        del number
        return anthropic_errors.event(fault, request_id) if self._anthropic else openai_errors.event(fault)


class PassThroughReader(EventReader):
    """Read events, or one whole response as if it were an event."""

    def __init__(self) -> None:
        self._state = ResponseState()

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the leading events that can be read later."""
        return length_before(region, (_END,))

    def read(self, data: bytes) -> Verdict:
        """Read one event."""
        if data == _END:
            return Verdict.LAST
        value = decode_response(data)
        if not isinstance(value, dict):
            return Verdict.PASS
        self._envelope(value, input_side_only=False)
        for name in _ENVELOPES:
            inner = value.get(name)
            if isinstance(inner, dict):
                self._envelope(inner, input_side_only=value.get("type") == "message_start")
        self._count_text(value.get("delta"))
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._state.usage.add(choice.get("usage"))
                self._count_text(choice)
                self._count_text(choice.get("delta"))
                self._count_text(choice.get("message"))
        self._whole(value)
        self._state.failed(value.get("error"))
        return Verdict.PASS

    def _whole(self, value: dict[str, Any]) -> None:
        for name in _WHOLE_TEXTS:
            self._state.count_tokens(value.get(name))
        if self._state.is_empty:
            self._state.count_tokens(value.get(_TRANSCRIPT))
        if _holds_media(value):
            self._state.is_seen = False

    def _envelope(self, value: dict[str, Any], *, input_side_only: bool) -> None:
        self._state.usage.add(value.get("usage"), input_side_only=input_side_only)
        self._state.set_model_and_tier(value.get("model"), value.get("service_tier"))

    def _count_text(self, part: object) -> None:
        if isinstance(part, str):
            self._state.count_tokens(part)
        elif isinstance(part, dict):
            for name in _DELTA_TEXTS:
                self._state.count_tokens(part.get(name))
            audio = part.get("audio")
            if isinstance(audio, dict):
                self._state.count_audio(audio.get("data"), audio.get("transcript"))

    def answer(self) -> ParsedResponse:
        """Return what was read so far."""
        return self._state.answer()

    def next_number(self) -> int:
        """Return 0: the numbering of the events is unknown."""
        return 0

    def cut_short(self) -> bytes:
        """Return nothing: the end of the format is unknown, and these streams are never ended early."""
        return b""


def _holds_media(value: Mapping[str, Any]) -> bool:
    data = value.get("data")
    first = data[0] if isinstance(data, list) and data else None
    is_picture = isinstance(first, dict) and any(isinstance(first.get(name), str) for name in _IMAGE)
    return is_picture or any(isinstance(value.get(name), str) for name in _MEDIA)
