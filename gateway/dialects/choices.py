"""Read responses of choices, which chat and completions share, and ask for the usage of their streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import encode
from gateway.core.errors import GatewayError
from gateway.core.values import dataclass
from gateway.dialects import openai_errors
from gateway.dialects.alike import TextFrame
from gateway.dialects.base import MAX_TOOLS, Call, EventReader, ParsedResponse, Verdict
from gateway.dialects.fields import UNREADABLE, Fields, decode, decode_answer
from gateway.dialects.response_state import ResponseState
from gateway.dialects.stream_batch import BatchReader
from gateway.dialects.texts import texts_of_fields

#: what every chunk with a choice holds, written compact or as Python's json does
_MARK: Final = b'"choices":[{'
_SPACED_MARK: Final = b'"choices": [{'
#: the text of a chunk; one with more escapes is not used to recognize the chunks that are alike
_CONTENT: Final = re.compile(rb'"content": ?"([^"\\]*(?:\\.[^"\\]*){0,1000})"')
#: events at the beginning of many that are parsed in any case, and those at the end that may be others than the rest
_FIRST: Final = 4
_LAST: Final = 4
#: the number of a choice, which some hosts write as a text
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
    #: Moonshot's, beside or in the place of that of the chunk
    usage: Any = None


class _Payload(msgspec.Struct, gc=False):
    """A whole answer or one chunk of a stream, as far as it is read."""

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
    """What differs between the formats. `piece`: a choice of a chunk in which nothing new is said."""

    chunk: str
    piece: Mapping[str, object]


CHAT_FORM: Final = ChoicesFormat("chat.completion.chunk", {"delta": {}})
COMPLETIONS_FORM: Final = ChoicesFormat("text_completion", {"text": "", "logprobs": None})


def asks_for_usage(fields: Fields) -> bool:
    """Whether the client itself asks for usage in the stream."""
    raw = fields.get("stream_options")
    options = decode(raw) if raw is not None else None
    return isinstance(options, dict) and options.get("include_usage") is True


class ChoicesDialect:
    """What a `Dialect` of chat and one of completions do alike."""

    _form: ChoicesFormat
    #: the fields of a request that hold texts
    _text_fields: Sequence[str]

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """See `Dialect.usage_option`."""
        if not call.stream or call.usage_asked:
            return {}
        options = decode(call.fields.get("stream_options", b"null"))
        return {"stream_options": {**(options if isinstance(options, dict) else {}), "include_usage": True}}

    def input_text(self, call: Call) -> Iterator[str]:
        """See `Dialect.input_text`."""
        return texts_of_fields(call.fields, self._text_fields)

    def answer(self, body: bytes) -> ParsedResponse:
        """See `Dialect.answer`. A whole answer is read as if it were a chunk."""
        reader = ChoicesReader(self._form, drop_usage=False)
        reader.read(body)
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """See `Dialect.reader`."""
        del call, input_tokens
        return ChoicesReader(self._form, drop_usage=drop_usage)

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """See `Dialect.error`."""
        del request_id
        return openai_errors.body(fault)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """See `Dialect.error_event`."""
        del request_id, number
        return openai_errors.event(fault)


class ChoicesReader(BatchReader[_Payload]):
    """Reads the chunks of one stream.

    Of several choices (`n`) the first is the one that a conversation goes on with: the tools and the end of an answer
    are those of the choice with the lowest index. All of them are weighed.
    """

    decoder = msgspec.json.Decoder(list[_Payload])

    def __init__(self, form: ChoicesFormat, *, drop_usage: bool) -> None:
        self._form = form
        self._drop_usage = drop_usage
        self._gathered = ResponseState()
        self._id: Any = None
        self._created: Any = None
        #: indices, as they were sent, of the choices that have begun and not ended
        self._running: dict[int | str, None] = {}
        #: the lowest index so far
        self._first: int | None = None
        #: a chunk in which nothing is said but a text, and what stands around that text
        self._plain: tuple[_Payload, TextFrame] | None = None

    def plain_prefix(self, region: bytes) -> int:
        """See `EventReader.plain_prefix`. Neither the end mark nor a usage chunk has a choice in its list."""
        mark = _MARK if _MARK in region else _SPACED_MARK
        last = region.rfind(mark)
        end = region.find(b"\n\n", last) + 2
        if last < 0 or end < last or b"\r" in region or b"[DONE]" in region[:end]:
            return 0
        found = region.count(mark)
        # As many lists of choices as events, and no other ones that could stand in for a missing one.
        return end if found == region.count(b"\n\n", 0, end) == region.count(b'"choices"', 0, end) else 0

    def read(self, data: bytes) -> Verdict:
        """See `EventReader.read`."""
        if data == b"[DONE]":
            return Verdict.LAST
        payload = _decode_payload(data)
        return self._take(payload) if payload is not None else Verdict.PASS

    def read_all(self, events: Sequence[bytes]) -> None:
        """See `EventReader.read_all`."""
        if self._plain is None and len(events) > _FIRST:
            super().read_all(events[:_FIRST])
            events = events[_FIRST:]
        super().read_all(events[self._count_alike(events) :])

    def _count_alike(self, events: Sequence[bytes]) -> int:
        """Weigh the texts of the chunks at the beginning that say nothing else; how many these are."""
        if self._plain is None or self._text_alone(self._plain[0]) is None:
            return 0
        frame, all_ = self._plain[1], len(events)
        end = next((end for end in range(all_, max(0, all_ - _LAST), -1) if frame.holds(events[end - 1])), 0)
        texts = frame.texts(events[:end])
        if texts is None:
            return 0
        self._gathered.count_tokens("".join(texts))
        return end

    def read_decoded(self, events: Sequence[bytes], decoded: Sequence[_Payload]) -> None:
        """See `BatchReader.read_decoded`. Texts are weighed in one go as well."""
        said, plain = [], None
        for number, payload in enumerate(decoded):
            text = self._text_alone(payload)
            if text is None:
                self._take(payload)
            else:
                said.append(text)
                plain = number
        self._gathered.count_tokens("".join(said))
        if plain is not None:
            self._look_around(events[plain], said[-1])

    def _look_around(self, event: bytes, text: str) -> None:
        """Note what stands around the text of a chunk that says nothing else."""
        found = _CONTENT.search(event)
        if found is None:
            return
        start, end = found.span(1)
        payload = _decode_payload(b"%bx%b" % (event[:end], event[end:]))
        # Else it was another text that was found.
        if payload is not None and self._text_alone(payload) == text + "x":
            self._plain = payload, TextFrame.around(event, start, end)

    def _text_alone(self, payload: _Payload) -> str | None:
        """The text of a chunk in which a choice goes on and nothing else is said; None for any other."""
        choices, gathered = payload.choices, self._gathered
        if not choices or len(choices) > 1 or self._id is None or gathered.model is None:
            return None
        if payload.service_tier not in (None, gathered.service_tier):
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
        is_all = part.reasoning_content is part.reasoning is part.refusal is part.function_call is part.audio is None
        return part.content if is_all else None

    def _take(self, payload: _Payload) -> Verdict:
        if payload.choices:
            for choice in payload.choices:
                self._choice(choice)
        usage = self._gathered.usage
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
        self._gathered.head(payload.model, payload.service_tier)
        if payload.error is not None:
            self._gathered.failed(payload.error)

    def _choice(self, choice: _Choice) -> None:
        gathered, index = self._gathered, choice.index
        if choice.usage is not None:
            gathered.usage.add(choice.usage)
        number, name = (index, index) if type(index) is int else (0, str(index))
        if self._first is None or number < self._first:
            self._first = number
        if isinstance(choice.finish_reason, str):
            if number == self._first or gathered.finish_reason is None:
                gathered.finish_reason = choice.finish_reason
            self._running.pop(name, None)
        elif len(self._running) < MAX_TOOLS:
            self._running[name] = None
        part = choice.delta or choice.message
        if part is None:
            gathered.count_tokens(choice.text)
            return
        gathered.count_tokens(part.content)
        # Some hosts send the same reasoning under two names.
        gathered.count_tokens(part.reasoning if part.reasoning_content is None else part.reasoning_content)
        gathered.count_tokens(part.refusal)
        if isinstance(part.audio, dict):
            gathered.count_audio(part.audio.get("data"), part.audio.get("transcript"))
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
        self._gathered.count_tokens(function.get("arguments"))
        self._gathered.count_tokens(function.get("input"))
        index = tool_call.get("index", position)
        # Two calls under one index (some hosts number every call 0) are told apart by their ids, or by being complete.
        arguments = function.get("arguments", function.get("input"))
        self._gathered.tool(function.get("name"), f"{choice}/{index}", tool_call.get("id"), choice, arguments=arguments)

    def answer(self) -> ParsedResponse:
        """See `EventReader.answer`."""
        return self._gathered.answer(self._first or 0)

    def next_number(self) -> int:
        """See `EventReader.next_number`. Chunks have none."""
        return 0

    def cut_short(self) -> bytes:
        """See `EventReader.cut_short`. A stream whose choices have all ended only lacks its end mark."""
        gathered = self._gathered
        running = self._running or ({0: None} if gathered.finish_reason is None else {})
        if not running:
            return b"data: [DONE]\n\n"
        gathered.finish_reason = "length"
        numbers = [int(index) if _INDEX.fullmatch(str(index)) else 0 for index in running]
        chunk = {
            "id": self._id if isinstance(self._id, str) else None,
            "object": self._form.chunk,
            "created": self._created if isinstance(self._created, int) else None,
            "model": gathered.model,
            "choices": [{"index": number, **self._form.piece, "finish_reason": "length"} for number in numbers],
        }
        return b"data: " + encode(chunk) + b"\n\ndata: [DONE]\n\n"


def _decode_payload(data: bytes) -> _Payload | None:
    try:
        return _PAYLOAD_DECODER.decode(data)
    except UNREADABLE:
        pass
    # A part of it is not of the documented type, or a number no double holds: read what can be read.
    value = decode_answer(data)
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
