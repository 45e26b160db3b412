"""Read and write /v1/messages (Anthropic)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import msgspec

from gateway.core.errors import GatewayError
from gateway.dialects import anthropic_errors
from gateway.dialects.base import MAX_TOOLS, Call, EventReader, ParsedResponse, Verdict, length_before, named_event
from gateway.dialects.fields import decode_response, flag_field, messages_field, model_field, read_fields
from gateway.dialects.limits import anthropic_tier
from gateway.dialects.opening import identifying_text, identifying_texts
from gateway.dialects.response_state import ResponseState
from gateway.dialects.stream_batch import BatchReader, runs_of_kind
from gateway.dialects.texts import texts_of_fields

_TEXT_FIELDS: Final = ("system", "messages", "tools")
#: the fields of a block's delta with text other than thinking; `content`: of a compaction
_DELTA_TEXTS: Final = ("text", "partial_json", "content")
#: the fields that decide the price, which the end of a stream may repeat
_PRICED: Final = frozenset({"speed", "inference_geo"})
#: the block between the output of a model that refused and the output of the next model
_FALLBACK: Final = "fallback"
#: the block with the provider's summary of the conversation
_COMPACTION: Final = "compaction"
#: tools of the client, of Anthropic's servers, and of MCP servers
_TOOL_BLOCKS: Final = ("tool_use", "server_tool_use", "mcp_tool_use")
#: The last event, and the end mark of some hosts, have one of these. Text in a response may have them too.
_LAST_MARKS: Final = (b"message_stop", b"[DONE]")
_DELTA: Final = "content_block_delta"


class _Part(msgspec.Struct, gc=False, frozen=True):
    text: str | None = None
    partial_json: str | None = None
    content: str | None = None
    thinking: str | None = None
    signature: str | None = None


class _Event(msgspec.Struct, gc=False):
    """Fields of an event that are read from a text delta."""

    type: str | None = None
    delta: _Part = _Part()


#: The token estimate of a signature depends on the thinking before it.
_TYPE_AND_SIGNATURE: Final = attrgetter("type", "delta.signature")


class AnthropicMessages:
    """Dialect of Anthropic's Messages API."""

    name = "messages"

    def read(self, body: bytes) -> Call:
        """Read a request body. Every stream reports its usage, so the gateway need not ask for it."""
        fields = read_fields(body)
        model = model_field(fields)
        messages_field(fields)
        return Call("chat", model, stream=flag_field(fields, "stream"), body=body, fields=fields, usage_asked=True)

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """Return the fields that make a stream report its usage."""
        del call
        return {}

    def opening(self, call: Call) -> list[str] | None:
        """Return the texts that identify the conversation."""
        system = [identifying_text(call.fields["system"])] if "system" in call.fields else []
        return [*system, *identifying_texts(call.fields["messages"])]

    def input_text(self, call: Call) -> Iterator[str]:
        """Yield the texts of the request."""
        return texts_of_fields(call.fields, _TEXT_FIELDS)

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response."""
        reader = MessagesReader()
        reader.whole(decode_response(body))
        return reader.answer()

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for one stream. No event has only usage, so nothing is dropped."""
        del drop_usage, input_tokens
        return MessagesReader(call.model)

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """Return the error body."""
        return anthropic_errors.body(fault, request_id)

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """Return the error as the last event of a stream."""
        del number
        return anthropic_errors.event(fault, request_id)


class MessagesReader(BatchReader[_Event]):
    """Read the events of one stream, or one whole message. `model`: the requested model."""

    decoder = msgspec.json.Decoder(list[_Event])

    def __init__(self, model: str | None = None) -> None:
        self._asked_model = model
        self._state = ResponseState()
        self._has_begun = self._has_stopped = False
        #: indices of the blocks that have begun and not ended
        self._open: dict[int, None] = {}
        #: the last reported usage, of which some fields decide the price
        self._billed: dict[str, Any] = {}
        #: readable tokens of thinking in the current block
        self._thinking = 0.0

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the leading events that can be read later."""
        return length_before(region, _LAST_MARKS)

    def read(self, data: bytes) -> Verdict:
        """Read one event."""
        if data == b"[DONE]":
            return Verdict.LAST
        value = decode_response(data)
        if not isinstance(value, dict):
            return Verdict.PASS
        match value.get("type"):
            case "content_block_delta":
                self._delta(value.get("delta"))
            case "content_block_start":
                self._begin(value)
            case "content_block_stop":
                self._end(value.get("index"))
            case "message_start":
                self._start(value.get("message"))
            case "message_delta":
                self._message_delta(value)
            case "message_stop":
                return Verdict.LAST
            case kind:
                self._other(value, kind)
        return Verdict.PASS

    def read_decoded(self, events: Sequence[bytes], decoded: Sequence[_Event]) -> None:
        """Read decoded events. Nearly all are deltas."""
        for (kind, signature), batch, run in runs_of_kind(events, decoded, _TYPE_AND_SIGNATURE):
            if kind == _DELTA and signature is None:
                self._count_deltas([event.delta for event in run])
            else:
                for data in batch:
                    self.read(data)

    def _count_deltas(self, parts: Sequence[_Part]) -> None:
        """Count the tokens of the texts and the thinking in deltas."""
        texts, partial_json, contents, thoughts, _ = zip(*map(msgspec.structs.astuple, parts), strict=True)
        self._state.count_tokens("".join(filter(None, chain(texts, partial_json, contents))))
        self._thinking += self._state.count_tokens("".join(filter(None, thoughts)))

    def whole(self, message: Any) -> None:
        """Read a whole message."""
        if not isinstance(message, dict):
            return
        self._head(message, input_side_only=False)
        self._stopped(message)
        self._edited(message)
        content = message.get("content")
        for block in content if isinstance(content, list) else ():
            self._block(block, None)
        self._other(message, message.get("type"))

    def _other(self, value: dict[str, Any], kind: object) -> None:
        self._state.failed(kind == "error" or value.get("error"))

    def _head(self, message: dict[str, Any], *, input_side_only: bool) -> None:
        usage = message.get("usage")
        self._state.usage.add(usage, input_side_only=input_side_only)
        self._billed = usage if isinstance(usage, dict) else {}
        self._state.set_model_and_tier(message.get("model"), _tier(self._billed))

    def _start(self, message: Any) -> None:
        self._has_begun = True
        if isinstance(message, dict):
            self._head(message, input_side_only=True)

    def _message_delta(self, value: dict[str, Any]) -> None:
        usage, delta = value.get("usage"), value.get("delta")
        self._state.usage.add(usage)
        if isinstance(usage, dict) and not _PRICED.isdisjoint(usage):
            self._billed = {**self._billed, **usage}
            self._state.set_model_and_tier(None, _tier(self._billed))
        if isinstance(delta, dict):
            self._has_stopped = isinstance(delta.get("stop_reason"), str) or self._has_stopped
            self._stopped(delta)
        self._edited(value)

    def _edited(self, holder: dict[str, Any]) -> None:
        """Note it if the provider removed a part of the conversation."""
        management = holder.get("context_management")
        edits = management.get("applied_edits") if isinstance(management, dict) else None
        if isinstance(edits, list) and edits:
            self._state.usage.edited()

    def _stopped(self, holder: dict[str, Any]) -> None:
        """Note the stop reason, and the category of a refusal."""
        self._state.set_finish_reason(holder.get("stop_reason"))
        details = holder.get("stop_details")
        category = details.get("category") if isinstance(details, dict) else None
        if isinstance(category, str):
            self._state.refusal = category

    def _begin(self, value: dict[str, Any]) -> None:
        index = value.get("index")
        if type(index) is int and len(self._open) < MAX_TOOLS:
            self._open[index] = None
        self._block(value.get("content_block"), index)

    def _end(self, index: Any) -> None:
        if type(index) is int:
            self._open.pop(index, None)

    def _block(self, block: Any, index: Any) -> None:
        self._thinking = 0.0
        if not isinstance(block, dict):
            return
        if block.get("type") == _FALLBACK:
            self._handed_over(block)
        if block.get("type") == _COMPACTION:
            self._state.usage.edited()
        if block.get("type") in _TOOL_BLOCKS:
            key = str(index) if index is not None else None
            self._state.add_tool_call(block.get("name"), key, one_of=block.get("server_name"))
        self._state.count_tokens(block.get("text"))
        self._state.count_arguments(block.get("input"))
        content = block.get("content")
        # A compaction has text here. The results of a provider-run tool are a list, and not output of the model.
        if isinstance(content, str):
            self._state.count_tokens(content)
        self._think(block)
        self._state.count_opaque(block.get("data"))

    def _handed_over(self, block: dict[str, Any]) -> None:
        """Note that a model refused and another one continues."""
        trigger, to = block.get("trigger"), block.get("to")
        category = trigger.get("category") if isinstance(trigger, dict) else None
        self._state.declined(category, to.get("model") if isinstance(to, dict) else None)

    def _delta(self, delta: Any) -> None:
        if not isinstance(delta, dict):
            return
        for name in _DELTA_TEXTS:
            self._state.count_tokens(delta.get(name))
        self._think(delta)

    def _think(self, part: dict[str, Any]) -> None:
        """Count thinking. It is billed in full: if it is shortened or hidden, its signature contains all of it."""
        self._thinking += self._state.count_tokens(part.get("thinking"))
        self._state.count_opaque(part.get("signature"), already=self._thinking)

    def answer(self) -> ParsedResponse:
        """Return what was read so far."""
        return self._state.answer()

    def next_number(self) -> int:
        """Return 0: the events have no numbers."""
        return 0

    def cut_short(self) -> bytes:
        """Return the events that close open blocks and end the stream; with the usage known so far."""
        events: list[dict[str, object]] = [] if self._has_begun else [self._empty_start()]
        events += [{"type": "content_block_stop", "index": index} for index in self._open]
        if not self._has_stopped:
            self._state.set_finish_reason("max_tokens")
            stop = {"stop_reason": "max_tokens", "stop_sequence": None}
            events.append({"type": "message_delta", "delta": stop, "usage": {"output_tokens": self._output_tokens()}})
        events.append({"type": "message_stop"})
        return b"".join(map(named_event, events))

    def _output_tokens(self) -> int:
        reported = self._state.usage.reported()
        if reported is not None and reported.output_tokens is not None:
            return reported.output_tokens
        return self._state.output_estimate

    def _empty_start(self) -> dict[str, object]:
        message: dict[str, object] = {
            "id": "msg_none",
            "type": "message",
            "role": "assistant",
            "model": self._asked_model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return {"type": "message_start", "message": message}


def _tier(usage: Mapping[str, Any]) -> object:
    """Return the service tier that decides the price of a call; the place of inference affects it too.

    Anthropic's `priority` tier has no own price: it is capacity bought in advance, and tokens have the standard price.
    https://platform.claude.com/docs/en/api/service-tiers, https://platform.claude.com/docs/en/build-with-claude/fast-mode,
    https://platform.claude.com/docs/en/manage-claude/data-residency
    """
    tier = usage.get("service_tier")
    return anthropic_tier(usage) or (None if tier == "priority" else tier)
