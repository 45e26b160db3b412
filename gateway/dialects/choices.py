"""Read responses with `choices`, which chat and completions share, and ask for the usage of their streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import encode
from gateway.core.errors import GatewayError
from gateway.core.values import dataclass
from gateway.dialects import openai_errors
from gateway.dialects.base import MAX_TOOLS, Call, EventReader, ParsedResponse, Verdict
from gateway.dialects.fields import UNREADABLE, Fields, decode, decode_response
from gateway.dialects.response_state import ResponseState
from gateway.dialects.stream_batch import BatchReader
from gateway.dialects.text_frame import TextFrame
from gateway.dialects.texts import texts_of_fields

#: the bytes in every chunk with a choice, written compact or with spaces as by Python's json
_MARK: Final = b'"choices":[{'
_SPACED_MARK: Final = b'"choices": [{'
#: line ends of one event with one line
_LINE_ENDS: Final = 2
#: The text of a chunk. A text with more escapes is not used to recognize similar chunks.
_CONTENT: Final = re.compile(rb'"content": ?"([^"\\]*(?:\\.[^"\\]*){0,1000})"')
#: the first events of a batch, which are always parsed, and the last events, which may differ from the rest
_FIRST: Final = 4
_LAST: Final = 4
#: the index of a choice, which some hosts send as a string
_INDEX: Final = re.compile(r"[0-9]{1,9}")


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None
    finish_reason: Any = None
    index: Any = 0
    #: Moonshot reports usage here, in addition to or instead of the chunk's own
    usage: Any = None


class _Payload(msgspec.Struct, gc=False):
    """Fields that are read of a whole response or of one chunk of a stream."""

    choices: list[_Choice] | None = None
    usage: Any = None
    x_groq: Any = None
    model: Any = None
    service_tier: Any = None
    error: Any = None
    id: Any = None
    created: Any = None


_PAYLOAD_DECODER: Final = msgspec.json.Decoder(_Payload)


@dataclass(frozen=True, slots=True)
class ChoicesFormat:
    """Differences between the two formats. `piece`: an empty choice of a chunk."""

    chunk: str
    piece: Mapping[str, object]


CHAT_FORM: Final = ChoicesFormat("chat.completion.chunk", {"delta": {}})
COMPLETIONS_FORM: Final = ChoicesFormat("text_completion", {"text": "", "logprobs": None})


def asks_for_usage(fields: Fields) -> bool:
    """Return True if the client itself asks for usage in the stream."""
    raw = fields.get("stream_options")
    options = decode(raw) if raw is not None else None
    return isinstance(options, dict) and options.get("include_usage") is True


class ChoicesDialect:
    """Common part of the dialects of chat and completions."""

    _form: ChoicesFormat
    #: the fields of a request that hold texts
    _text_fields: Sequence[str]

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """Return the fields that make a stream report its usage."""
        if not call.stream or call.usage_asked:
            return {}
        options = decode(call.fields.get("stream_options", b"null"))
        return {"stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}

    def input_text(self, call: Call) -> Iterator[str]:
        """Yield the texts of the request."""
        return texts_of_fields(call.fields, self._text_fields)

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response, as if it were a chunk."""
        reader = ChoicesReader(self._form, drop_usage=False)
        reader.read(body)
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for one stream."""
        del call, input_tokens
        return ChoicesReader(self._form, drop_usage=drop_usage)

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """Return the error body."""
        del request_id
        return openai_errors.body(fault)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """Return the error as the last event of a stream."""
        del request_id, number
        return openai_errors.event(fault)


class ChoicesReader(BatchReader[_Payload]):
    """Read the chunks of one stream.

    With several choices (`n`), the conversation continues with the first. The tools and the finish reason of a response
    are therefore those of the choice with the lowest index. The tokens of all choices are counted.
    """

    decoder = msgspec.json.Decoder(list[_Payload])

    def __init__(self, form: ChoicesFormat, *, drop_usage: bool) -> None:
        self._form = form
        self._drop_usage = drop_usage
        self._state = ResponseState()
        self._id: Any = None
        self._created: Any = None
        #: indices, as sent, of the choices that have begun and not ended
        self._running: dict[int | str, None] = {}
        #: the lowest index of a choice so far
        self._first: int | None = None
        #: a chunk with nothing but a text, and the bytes around that text
        self._plain: tuple[_Payload, TextFrame] | None = None

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the leading events that can be read later: all have a choice.

        Neither the end mark nor a usage chunk has a choice.
        """
        if region.endswith(b"\n\n") and region.count(b"\n") == _LINE_ENDS and b"\r" not in region:
            # A single event, as it usually arrives.
            is_plain = region.count(b'"choices"') == 1 and (_MARK in region or _SPACED_MARK in region)
            return len(region) if is_plain else 0
        mark = _MARK if _MARK in region else _SPACED_MARK
        last = region.rfind(mark)
        end = region.find(b"\n\n", last) + 2
        if last < 0 or end < last or b"\r" in region or b"[DONE]" in region[:end]:
            return 0
        marks = region.count(mark)
        # There must be one list of choices per event, and no other list that could hide a missing one.
        return end if marks == region.count(b"\n\n", 0, end) == region.count(b'"choices"', 0, end) else 0

    def read(self, data: bytes) -> Verdict:
        """Read one event."""
        if data == b"[DONE]":
            return Verdict.LAST
        payload = _decode_payload(data)
        return self._take(payload) if payload is not None else Verdict.PASS

    def read_all(self, events: Sequence[bytes]) -> None:
        """Read many events."""
        if self._plain is None and len(events) > _FIRST:
            super().read_all(events[:_FIRST])
            events = events[_FIRST:]
        super().read_all(events[self._count_alike(events) :])

    def _count_alike(self, events: Sequence[bytes]) -> int:
        """Count the tokens of the leading chunks that differ only in their text; return the number of these chunks."""
        if self._plain is None or self._text_alone(self._plain[0]) is None:
            return 0
        frame, all_ = self._plain[1], len(events)
        end = next((end for end in range(all_, max(0, all_ - _LAST), -1) if frame.matches(events[end - 1])), 0)
        texts = frame.texts(events[:end])
        if texts is None:
            return 0
        self._state.count_tokens("".join(texts))
        return end

    def read_decoded(self, events: Sequence[bytes], decoded: Sequence[_Payload]) -> None:
        """Read decoded chunks, and count the tokens of all their texts at once."""
        new_texts, plain = [], None
        for number, payload in enumerate(decoded):
            text = self._text_alone(payload)
            if text is None:
                self._take(payload)
            else:
                new_texts.append(text)
                plain = number
        self._state.count_tokens("".join(new_texts))
        if plain is not None:
            self._remember_frame(events[plain], new_texts[-1])

    def _remember_frame(self, event: bytes, text: str) -> None:
        """Remember the bytes around the text of a chunk that holds nothing else."""
        match = _CONTENT.search(event)
        if match is None:
            return
        start, end = match.span(1)
        payload = _decode_payload(b"%bx%b" % (event[:end], event[end:]))
        # If this fails, the search match another text.
        if payload is not None and self._text_alone(payload) == text + "x":
            self._plain = payload, TextFrame.around(event, start, end)

    def _text_alone(self, payload: _Payload) -> str | None:
        """Return the text of a chunk that only continues a running choice; None for any other chunk."""
        choices, state = payload.choices, self._state
        if not choices or len(choices) > 1 or self._id is None or state.model is None:
            return None
        if payload.service_tier not in (None, state.service_tier):
            return None
        choice = choices[0]
        part, index = choice.delta, choice.index
        if (
            choice.usage is not None
            or part is None
            or type(part.content) is not str
            or type(index) is not int
            or index not in self._running
        ):
            return None
        if not payload.usage is payload.x_groq is payload.error is choice.finish_reason is part.tool_calls is None:
            return None
        has_no_more = (
            part.reasoning_content is part.reasoning is part.refusal is part.function_call is part.audio is None
        )
        return part.content if has_no_more else None

    def _take(self, payload: _Payload) -> Verdict:
        if payload.choices:
            for choice in payload.choices:
                self._choice(choice)
        usage = self._state.usage
        if payload.x_groq is not None and isinstance(payload.x_groq, dict):
            usage.add(payload.x_groq.get("usage"))
        if payload.usage is not None:
            usage.add(payload.usage)
        self._head(payload)
        if self._drop_usage and not payload.choices and isinstance(payload.usage, dict) and payload.error is None:
            return Verdict.DROP
        return Verdict.PASS

    def _head(self, payload: _Payload) -> None:
        if self._id is None:
            self._id, self._created = payload.id, payload.created
        self._state.set_model_and_tier(payload.model, payload.service_tier)
        if payload.error is not None:
            self._state.failed(payload.error)

    def _choice(self, choice: _Choice) -> None:
        state, index = self._state, choice.index
        if choice.usage is not None:
            state.usage.add(choice.usage)
        number, name = (index, index) if type(index) is int else (0, str(index))
        if self._first is None or number < self._first:
            self._first = number
        if isinstance(choice.finish_reason, str):
            if number == self._first or state.finish_reason is None:
                state.finish_reason = choice.finish_reason
            self._running.pop(name, None)
        elif len(self._running) < MAX_TOOLS:
            self._running[name] = None
        part = choice.delta or choice.message
        if part is None:
            state.count_tokens(choice.text)
            return
        state.count_tokens(part.content)
        # Some hosts send the same reasoning under two names.
        state.count_tokens(part.reasoning if part.reasoning_content is None else part.reasoning_content)
        state.count_tokens(part.refusal)
        if isinstance(part.audio, dict):
            state.count_audio(part.audio.get("data"), part.audio.get("transcript"))
        if part.tool_calls is not None or part.function_call is not None:
            self._tools(number, part)

    def _tools(self, number: int, part: _Delta) -> None:
        if isinstance(part.tool_calls, list):
            for position, tool_call in enumerate(part.tool_calls):
                self._tool_call(number, position, tool_call)
        if isinstance(part.function_call, dict):
            self._tool_call(number, 0, {"function": part.function_call})

    def _tool_call(self, choice: int, position: int, tool_call: Any) -> None:
        function = tool_call.get("function") or tool_call.get("custom") if isinstance(tool_call, dict) else None
        if not isinstance(function, dict):
            return
        self._state.count_tokens(function.get("arguments"))
        self._state.count_tokens(function.get("input"))
        index = tool_call.get("index", position)
        # Some hosts number every call 0. Two calls with one index are distinguished by id, or because one is complete.
        arguments = function.get("arguments", function.get("input"))
        self._state.add_tool_call(
            function.get("name"), f"{choice}/{index}", tool_call.get("id"), choice, arguments=arguments
        )

    def answer(self) -> ParsedResponse:
        """Return what was read so far."""
        return self._state.answer(self._first or 0)

    def next_number(self) -> int:
        """Return 0: chunks have no numbers."""
        return 0

    def cut_short(self) -> bytes:
        """Return the events that end the stream at the output limit; only the end mark if all choices have ended."""
        state = self._state
        running = self._running or ({0: None} if state.finish_reason is None else {})
        if not running:
            return b"data: [DONE]\n\n"
        state.finish_reason = "length"
        numbers = [int(index) if _INDEX.fullmatch(str(index)) else 0 for index in running]
        chunk = {
            "id": self._id if isinstance(self._id, str) else None,
            "object": self._form.chunk,
            "created": self._created if isinstance(self._created, int) else None,
            "model": state.model,
            "choices": [{"index": number, **self._form.piece, "finish_reason": "length"} for number in numbers],
        }
        return b"data: " + encode(chunk) + b"\n\ndata: [DONE]\n\n"


def _decode_payload(data: bytes) -> _Payload | None:
    try:
        return _PAYLOAD_DECODER.decode(data)
    except UNREADABLE:
        pass
    # A field does not have the documented type, or a number does not fit a double: read what can be read.
    value = decode_response(data)
    if not isinstance(value, dict):
        return None
    raw_choices = value.get("choices")
    choices = [_lenient_choice(item) for item in raw_choices] if isinstance(raw_choices, list) else None
    known = {name: value.get(name) for name in ("usage", "x_groq", "model", "service_tier", "error", "id", "created")}
    return _Payload(choices=choices, **known)


def _lenient_choice(item: object) -> _Choice:
    if not isinstance(item, dict):
        return _Choice()
    part = item.get("delta") or item.get("message")
    delta = _Delta(**{name: part.get(name) for name in _Delta.__struct_fields__}) if isinstance(part, dict) else None
    named = {name: item.get(name) for name in ("text", "finish_reason", "usage")}
    return _Choice(delta=delta, index=item.get("index", 0), **named)
