"""Forward all other paths under /v1 unchanged, and meter them if the response has usage.

An answer is searched for a `usage` object at the places where providers put one. Its text is weighed where the known
APIs have it, since a model's answer that reports nothing is not free because it came from an unknown path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.dialects import anthropic_errors, openai_errors
from gateway.dialects.base import Call, EventReader, ParsedResponse, Verdict, plain_before
from gateway.dialects.contents import without_marks
from gateway.dialects.fields import decode_answer, flag_field, read_fields, string_field
from gateway.dialects.response_state import ResponseState
from gateway.dialects.texts import beyond, texts_of_fields

_TEXT_FIELDS: Final = ("messages", "input", "prompt", "system", "instructions", "tools", "query", "documents")
#: fields that steer a call or are kept with it: no model is shown what they say
_STEERING: Final = frozenset(
    {"model", "models", "provider", "metadata", "user", "stop", "stop_sequences", "logit_bias", "tool_choice"}
)
#: characters that all other fields may have together before they are weighed: switches and ids are shorter than that
_FEW_CHARACTERS: Final = 512
_END: Final = b"[DONE]"
#: where an event holds what a whole answer of the known APIs has at its top
_ENVELOPES: Final = ("response", "message", "x_groq")
#: where the text of a delta, or of a choice, stands in them
_DELTA_TEXTS: Final = ("content", "text", "thinking", "partial_json")
#: where whole answers of them have it: Messages, Responses
_WHOLE_TEXTS: Final = ("content", "output")
#: that of a transcription or a translation; a stream of one says at its end all of it again
_TRANSCRIPT: Final = "text"
#: where an answer or an event has sound or a picture, and where one of several pictures is
_MEDIA: Final = ("audio", "b64_json")
_PICTURE: Final = ("b64_json", "url")


class PassThrough:
    """A dialect that changes nothing but the model's name, where a route says so.

    `anthropic`: the client speaks Anthropic's API, so errors have that shape. `is_read`: requests of this path are
    weighed and held, so that one which cannot be read is refused. `is_empty`: a request with a body is refused, as it
    might be a call of a model that nobody weighs. `counts`: it is asked what a request of this format weighs; a
    client's marks of messages, which are ours, are taken out of that as they are out of the request itself.
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
        """Read a request body. A body that is no JSON object (a file, a form) has no fields and is not looked into."""
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
                # Forwarded unread, it would be a way round the budget.
                raise
            # What it means is the provider's to say; it gets the bytes as they came.
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
        """Yield the texts of the request. Any field may be one whose text is billed: they are the provider's to name."""
        yield from texts_of_fields(call.fields, _TEXT_FIELDS)
        others = call.fields.keys() - _STEERING.union(_TEXT_FIELDS)
        yield from beyond(_FEW_CHARACTERS, texts_of_fields(call.fields, others, unknown=True))

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
    """Reads events, or one whole answer as if it were an event."""

    def __init__(self) -> None:
        self._state = ResponseState()

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the leading events that can be read later."""
        return plain_before(region, (_END,))

    def read(self, data: bytes) -> Verdict:
        """Read one event."""
        if data == _END:
            return Verdict.LAST
        value = decode_answer(data)
        if not isinstance(value, dict):
            return Verdict.PASS
        self._envelope(value, input_side_only=False)
        for name in _ENVELOPES:
            inner = value.get(name)
            if isinstance(inner, dict):
                self._envelope(inner, input_side_only=value.get("type") == "message_start")
        self._said(value.get("delta"))
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._state.usage.add(choice.get("usage"))
                self._said(choice)
                self._said(choice.get("delta"))
                self._said(choice.get("message"))
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
        self._state.head(value.get("model"), value.get("service_tier"))

    def _said(self, part: object) -> None:
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
        """Return the number of the next event. Nothing is known of numbers here."""
        return 0

    def cut_short(self) -> bytes:
        """Return the events that end the stream at the output limit. None is known: these streams are never cut."""
        return b""


def _holds_media(value: Mapping[str, Any]) -> bool:
    data = value.get("data")
    first = data[0] if isinstance(data, list) and data else None
    is_picture = isinstance(first, dict) and any(isinstance(first.get(name), str) for name in _PICTURE)
    return is_picture or any(isinstance(value.get(name), str) for name in _MEDIA)
