"""/v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.message import encode, text_parts
from gateway.dialects import openai_errors
from gateway.dialects.base import MAX_TOOLS, Answer, Call, EventReader, Verdict
from gateway.dialects.fields import decode, flag_field, join, read_fields, string_field, write_fields
from gateway.dialects.opening import opening_items
from gateway.dialects.reported import UsageReader
from gateway.dialects.texts import texts

_TEXT_FIELDS: Final = ("messages", "tools", "functions", "response_format")
#: what every chunk with a choice holds, written compact or as Python's json does
_MARK: Final = b'"choices":[{'
_SPACED_MARK: Final = b'"choices": [{'
#: parts of a message or delta that are billed as output
_OUTPUT_FIELDS: Final = ("content", "reasoning_content", "reasoning", "refusal")


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: Any = None
    index: Any = 0


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


class OpenAIChat:
    """The chat dialect."""

    name = "chat"

    def read(self, body: bytes) -> Call:
        """See `Dialect.read`."""
        fields = read_fields(body)
        model = string_field(fields, "model")
        if not model:
            raise InvalidRequest('The field "model" is missing. Name the model to call.', param="model")
        messages = fields.get("messages")
        if messages is None or memoryview(messages)[0] != ord("["):
            raise InvalidRequest('The field "messages" must be an array of messages.', param="messages")
        return Call(
            operation="chat",
            model=model,
            stream=flag_field(fields, "stream"),
            body=body,
            fields=fields,
            usage_asked=_asks_for_usage(fields),
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
        changes = dict(changes or {})
        if messages is not None:
            changes["messages"] = join(messages)
        if model != call.model:
            changes["model"] = model
        if ask_usage and call.stream and not call.usage_asked:
            options = decode(call.fields.get("stream_options", b"null"))
            changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return write_fields(call.fields, changes) if changes else call.body

    def opening(self, call: Call) -> list[str] | None:
        """See `Dialect.opening`."""
        return opening_items(call.fields["messages"])

    def input_text(self, call: Call) -> Iterator[str]:
        """See `Dialect.input_text`."""
        for name in _TEXT_FIELDS:
            if name in call.fields:
                yield from texts(call.fields[name])

    def answer(self, body: bytes) -> Answer:
        """See `Dialect.answer`."""
        reader = ChatReader(drop_usage=False)
        reader.read(body)
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool) -> EventReader:
        """See `Dialect.reader`."""
        del call
        return ChatReader(drop_usage=drop_usage)

    def error(self, fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
        """See `Dialect.error`."""
        del request_id
        return openai_errors.body(fault, details)

    def error_event(self, fault: GatewayError, request_id: str) -> bytes:
        """See `Dialect.error_event`."""
        return b"data: " + self.error(fault, request_id) + b"\n\n"


class ChatReader:
    """Reads chat chunks, or one whole answer as if it were a chunk."""

    def __init__(self, *, drop_usage: bool) -> None:
        self._drop_usage = drop_usage
        self._usage = UsageReader()
        self._model: str | None = None
        self._finish_reason: str | None = None
        self._service_tier: str | None = None
        self._tools: dict[tuple[Any, Any], str] = {}
        self._output = 0.0
        self._error = False
        self._id: Any = None
        self._created: Any = None
        #: choices that have begun and not ended
        self._running: dict[str, None] = {}

    def plain_prefix(self, region: bytes) -> int:
        """See `EventReader.plain_prefix`. Neither the end mark nor a usage chunk has a choice in its list."""
        mark = _MARK
        last = region.rfind(mark)
        if last < 0:
            mark = _SPACED_MARK
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
        if payload is None:
            return Verdict.PASS
        if payload.choices:
            for choice in payload.choices:
                self._choice(choice)
        if payload.x_groq is not None and isinstance(payload.x_groq, dict):
            self._usage.add(payload.x_groq.get("usage"))
        if payload.usage is not None:
            self._usage.add(payload.usage)
        self._head(payload)
        if self._drop_usage and not payload.choices and isinstance(payload.usage, dict) and payload.error is None:
            return Verdict.DROP
        return Verdict.PASS

    def _head(self, payload: _Payload) -> None:
        if self._id is None:
            self._id, self._created = payload.id, payload.created
        if self._model is None and isinstance(payload.model, str) and payload.model:
            self._model = payload.model
        if isinstance(payload.service_tier, str):
            self._service_tier = payload.service_tier
        if payload.error is not None:
            self._error = True

    def _choice(self, choice: _Choice) -> None:
        if isinstance(choice.finish_reason, str):
            self._finish_reason = choice.finish_reason
            self._running.pop(str(choice.index), None)
        elif len(self._running) < MAX_TOOLS:
            self._running[str(choice.index)] = None
        part = choice.delta or choice.message
        if part is None:
            return
        if type(part.content) is str:
            self._output += estimate_tokens(part.content)
        else:
            self._weigh(part.content)
        self._weigh(part.reasoning_content)
        # Some hosts send the same reasoning under two names.
        if part.reasoning_content is None:
            self._weigh(part.reasoning)
        self._weigh(part.refusal)
        if isinstance(part.tool_calls, list):
            for position, tool_call in enumerate(part.tool_calls):
                self._tool_call(choice.index, position, tool_call)

    def _weigh(self, value: Any) -> None:
        if value is not None:
            self._output += sum(map(estimate_tokens, texts(value)))

    def _tool_call(self, choice: Any, position: int, tool_call: Any) -> None:
        function = tool_call.get("function") if isinstance(tool_call, dict) else None
        if not isinstance(function, dict):
            return
        self._weigh(function.get("arguments"))
        name = function.get("name")
        if isinstance(name, str) and name:
            self._weigh(name)
            index = tool_call.get("index", position)
            key = (str(choice), str(index))
            # Two calls under one index (some hosts number every call 0) are told apart by their ids.
            if key in self._tools and tool_call.get("id"):
                key = (str(choice), f"{index}/{len(self._tools)}")
            if len(self._tools) < MAX_TOOLS:
                self._tools.setdefault(key, name[:256])

    def answer(self) -> Answer:
        """See `EventReader.answer`."""
        return Answer(
            usage=self._usage.reported(),
            model=self._model,
            finish_reason=self._finish_reason,
            service_tier=self._service_tier,
            tools=tuple(self._tools.values()),
            output_estimate=int(self._output + 0.999),
            error=self._error,
        )

    def cut_short(self) -> bytes:
        """See `EventReader.cut_short`."""
        choices = [
            {"index": int(index) if index.isdecimal() else 0, "delta": {}, "finish_reason": "length"}
            for index in self._running or ("0",)
        ]
        self._finish_reason = "length"
        chunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return b"data: " + msgspec.json.encode(chunk) + b"\n\ndata: [DONE]\n\n"


def _decode_payload(data: bytes) -> _Payload | None:
    try:
        return _PAYLOAD_DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    # A part of it is not of the documented type, or a number no double holds: read what can be read.
    value = decode(data)
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
    delta = (
        _Delta(**{name: part.get(name) for name in (*_OUTPUT_FIELDS, "tool_calls")}) if isinstance(part, dict) else None
    )
    return _Choice(delta=delta, finish_reason=item.get("finish_reason"), index=item.get("index", 0))


def _asks_for_usage(fields: Mapping[str, msgspec.Raw]) -> bool:
    raw = fields.get("stream_options")
    options = decode(raw) if raw is not None else None
    return isinstance(options, dict) and options.get("include_usage") is True


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
