"""Render one response of the Messages API: as a whole, or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from gateway.mock.replies import chunked
from gateway.mock.wire import JsonObject, MockUsage, SentEvent, Share, named_frame

if TYPE_CHECKING:
    from gateway.mock.provider import MockExchange

#: How a content block is streamed: type and key of its deltas, its empty fields at the start, and the field that the
#: deltas fill.
_STREAMED: Final[dict[str, tuple[str, str, JsonObject, str]]] = {
    "text": ("text_delta", "text", {"text": ""}, "text"),
    "thinking": ("thinking_delta", "thinking", {"thinking": "", "signature": ""}, "thinking"),
    "tool_use": ("input_json_delta", "partial_json", {"input": {}}, "input"),
    "compaction": ("compaction_delta", "content", {"content": None}, "content"),
}
NOTHING: Final = MockUsage(0, 0)
PassKind = Literal["message", "fallback_message", "compaction"]


class Pass(NamedTuple):
    """One pass of a model over the prompt, which is billed separately."""

    kind: PassKind
    model: str
    usage: MockUsage
    written: int = 0
    """Input tokens that were written to the cache."""
    is_billed: bool = True


@dataclass(frozen=True, slots=True)
class BuiltMessage:
    """A response, before it is rendered in the wire format."""

    model: str
    """The model that produced it."""
    stop_reason: str
    blocks: tuple[JsonObject, ...]
    passes: tuple[Pass, ...]
    """All passes, in order; the last one produced the response."""
    lists_passes: bool = False
    """The usage contains a list of the passes."""
    partial: str = ""
    """The text of the first model before it refused; only a stream contains it."""
    first_model: str = ""
    """The model at the start of a stream; empty: the model that produced the response."""
    category: str | None = None
    """The category of a refusal."""
    applied_edits: list[JsonObject] | None = None
    transformations: list[JsonObject] | None = None

    @property
    def served(self) -> Pass:
        """Return the pass that produced the response; a pass without tokens if it was a compaction."""
        last = self.passes[-1]
        return Pass(last.kind, last.model, NOTHING) if last.kind == "compaction" else last

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what is billed for each model."""
        by_model: dict[str, MockUsage] = {}
        for item in self.passes:
            if item.is_billed:
                by_model[item.model] = by_model.get(item.model, NOTHING).plus(item.usage)
        return tuple(Share(model, usage) for model, usage in by_model.items())

    @property
    def billed(self) -> MockUsage | None:
        """Return what is billed in total, or None if nothing is."""
        shares = [share.usage for share in self.shares]
        return reduce(MockUsage.plus, shares) if shares else None


class MessageRenderer:
    """Render one message."""

    def __init__(self, exchange: MockExchange, built: BuiltMessage) -> None:
        self._exchange = exchange
        self._built = built

    def message(self) -> JsonObject:
        """Return the whole message."""
        built = self._built
        usage = self._usage() if self._exchange.shows_usage else None
        message = self._message(built.model, list(built.blocks), usage)
        return {**message, "stop_reason": built.stop_reason, **self._details(), **self._edits()}

    def frames(self) -> Iterator[SentEvent]:
        """Yield the events of a stream, in the order of the API."""
        built = self._built
        is_first = built.partial or built.passes[0].kind == "compaction"
        usage = _usage_json(built.passes[0] if is_first else built.served, 1) if self._exchange.shows_usage else None
        message = self._message(built.first_model or built.model, [], usage)
        yield named_frame({"type": "message_start", "message": message})
        partial: list[JsonObject] = [{"type": "text", "text": built.partial}] if built.partial else []
        for index, block in enumerate([*partial, *built.blocks]):
            yield from self._block(index, block)
        delta = {"stop_reason": built.stop_reason, "stop_sequence": None, **self._details()}
        closing: JsonObject = {"type": "message_delta", "delta": delta}
        if self._exchange.shows_usage:
            closing["usage"] = self._final_usage()
        closing |= self._edits()
        if built.partial and built.transformations is not None:
            closing["input_transformations"] = built.transformations
        yield named_frame(closing)
        yield named_frame({"type": "message_stop"}, "done")

    def _message(self, model: str, content: list[JsonObject], usage: JsonObject | None) -> JsonObject:
        message: JsonObject = {
            "id": f"msg_mock{self._exchange.number}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }
        if usage is not None:
            message["usage"] = usage
        if self._built.transformations is not None:
            message["input_transformations"] = self._built.transformations
        return message

    def _details(self) -> JsonObject:
        if self._built.stop_reason != "refusal":
            return {}
        return {"stop_details": {"type": "refusal", "category": self._built.category, "explanation": None}}

    def _edits(self) -> JsonObject:
        applied = self._built.applied_edits
        return {} if applied is None else {"context_management": {"applied_edits": applied}}

    def _usage(self) -> JsonObject:
        served = self._built.served
        usage = _usage_json(served, served.usage.output)
        if self._built.lists_passes:
            usage["iterations"] = [_pass_json(item) for item in self._built.passes]
        return usage

    def _final_usage(self) -> JsonObject:
        """Return the usage of `message_delta`: the output tokens, and everything else if passes are listed.

        If the behaviour names another placement than the API's, the input tokens are repeated too.
        """
        if self._exchange.behaviour.usage == "trailing" and not self._built.lists_passes:
            return {"output_tokens": self._built.served.usage.output}
        return self._usage()

    def _block(self, index: int, block: JsonObject) -> Iterator[SentEvent]:
        """Yield the events of one content block. The API sends a ping after the start of the first block."""
        started, parts = self._parts(block)
        yield named_frame({"type": "content_block_start", "index": index, "content_block": started})
        if index == 0:
            yield named_frame({"type": "ping"})
        for delta in parts:
            yield named_frame({"type": "content_block_delta", "index": index, "delta": delta}, "content")
        if "signature" in block and block["type"] == "thinking":
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield named_frame({"type": "content_block_delta", "index": index, "delta": signature})
        yield named_frame({"type": "content_block_stop", "index": index})

    def _parts(self, block: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
        """Return the block at its start, and its deltas. Signed compactions and fallbacks are sent without deltas."""
        kind = str(block["type"])
        if kind not in _STREAMED or (kind == "compaction" and "signature" in block):
            return block, []
        delta, key, empty, filled = _STREAMED[kind]
        content = block[filled]
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        pieces = [text] if kind == "compaction" else chunked(text, self._exchange.behaviour.chunks)
        return {**block, **empty}, [{"type": delta, key: part} for part in pieces]


def _usage_json(item: Pass, output: int) -> JsonObject:
    """Return usage in this API's format: `input_tokens` excludes tokens read from the cache or written to it."""
    return {
        "input_tokens": item.usage.input - item.usage.cached - item.written,
        "cache_creation_input_tokens": item.written,
        "cache_read_input_tokens": item.usage.cached,
        "cache_creation": {"ephemeral_5m_input_tokens": item.written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
        "service_tier": "standard",
    }


def _pass_json(item: Pass) -> JsonObject:
    fields = _usage_json(item, item.usage.output)
    del fields["service_tier"]
    # A compaction names no model, because the requested model always creates it.
    model = {} if item.kind == "compaction" else {"model": item.model}
    return {"type": item.kind, **model, **fields}
