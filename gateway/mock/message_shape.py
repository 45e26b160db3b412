"""Render one response of the Messages API: at once, or as the events of a stream."""

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

#: How a content block is streamed: type and key of its deltas, the fields that are empty at first, the field they fill.
_STREAMED: Final[dict[str, tuple[str, str, JsonObject, str]]] = {
    "text": ("text_delta", "text", {"text": ""}, "text"),
    "thinking": ("thinking_delta", "thinking", {"thinking": "", "signature": ""}, "thinking"),
    "tool_use": ("input_json_delta", "partial_json", {"input": {}}, "input"),
    "compaction": ("compaction_delta", "content", {"content": None}, "content"),
}
NOTHING: Final = MockUsage(0, 0)
PassKind = Literal["message", "fallback_message", "compaction"]


class Pass(NamedTuple):
    """One pass of a model over the prompt, which is billed by itself."""

    kind: PassKind
    model: str
    usage: MockUsage
    written: int = 0
    """Input tokens that were written to the cache."""
    is_billed: bool = True


@dataclass(frozen=True, slots=True)
class BuiltMessage:
    """A response, before it has a wire format."""

    model: str
    """The model that produced it."""
    stop_reason: str
    blocks: tuple[JsonObject, ...]
    passes: tuple[Pass, ...]
    """All passes, in order; the last one produced the response."""
    lists_passes: bool = False
    """The usage lists the passes."""
    partial: str = ""
    """What the first model said before it refused; only a stream has it."""
    first_model: str = ""
    """The model that a stream begins with; empty: the one that produced the response."""
    category: str | None = None
    """The category of a refusal."""
    applied_edits: list[JsonObject] | None = None
    transformations: list[JsonObject] | None = None

    @property
    def served(self) -> Pass:
        """Return the pass that produced the response; one of no tokens if that was a compaction."""
        last = self.passes[-1]
        return Pass(last.kind, last.model, NOTHING) if last.kind == "compaction" else last

    @property
    def shares(self) -> tuple[Share, ...]:
        """Return what each model bills."""
        found: dict[str, MockUsage] = {}
        for one in self.passes:
            if one.is_billed:
                found[one.model] = found.get(one.model, NOTHING).plus(one.usage)
        return tuple(Share(model, usage) for model, usage in found.items())

    @property
    def billed(self) -> MockUsage | None:
        """Return what is billed in all; None: nothing."""
        shares = [share.usage for share in self.shares]
        return reduce(MockUsage.plus, shares) if shares else None


class Shape:
    """One message in its wire format."""

    def __init__(self, exchange: MockExchange, made: BuiltMessage) -> None:
        self._exchange = exchange
        self._made = made

    def message(self) -> JsonObject:
        """Return the message when all of it is there."""
        made = self._made
        usage = self._usage() if self._exchange.show_usage else None
        message = self._message(made.model, list(made.blocks), usage)
        return {**message, "stop_reason": made.stop_reason, **self._details(), **self._edits()}

    def frames(self) -> Iterator[SentEvent]:
        """Yield the events of a stream, in the API's order."""
        made = self._made
        is_first = made.partial or made.passes[0].kind == "compaction"
        begun = _usage_json(made.passes[0] if is_first else made.served, 1) if self._exchange.show_usage else None
        message = self._message(made.first_model or made.model, [], begun)
        yield named_frame({"type": "message_start", "message": message})
        partial: list[JsonObject] = [{"type": "text", "text": made.partial}] if made.partial else []
        for index, block in enumerate([*partial, *made.blocks]):
            yield from self._block(index, block)
        delta = {"stop_reason": made.stop_reason, "stop_sequence": None, **self._details()}
        closing: JsonObject = {"type": "message_delta", "delta": delta}
        if self._exchange.show_usage:
            closing["usage"] = self._final_usage()
        closing |= self._edits()
        if made.partial and made.transformations is not None:
            closing["input_transformations"] = made.transformations
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
        if self._made.transformations is not None:
            message["input_transformations"] = self._made.transformations
        return message

    def _details(self) -> JsonObject:
        if self._made.stop_reason != "refusal":
            return {}
        return {"stop_details": {"type": "refusal", "category": self._made.category, "explanation": None}}

    def _edits(self) -> JsonObject:
        applied = self._made.applied_edits
        return {} if applied is None else {"context_management": {"applied_edits": applied}}

    def _usage(self) -> JsonObject:
        served = self._made.served
        usage = _usage_json(served, served.usage.output)
        if self._made.lists_passes:
            usage["iterations"] = [_pass_json(one) for one in self._made.passes]
        return usage

    def _final_usage(self) -> JsonObject:
        """Return the usage of `message_delta`: the output, and the input where there were several passes.

        With any other placement than the API's, the input comes once more.
        """
        if self._exchange.behaviour.usage == "trailing" and not self._made.lists_passes:
            return {"output_tokens": self._made.served.usage.output}
        return self._usage()

    def _block(self, index: int, block: JsonObject) -> Iterator[SentEvent]:
        """Yield the events of one content block; the API pings after the first one opens."""
        begun, parts = self._parts(block)
        yield named_frame({"type": "content_block_start", "index": index, "content_block": begun})
        if index == 0:
            yield named_frame({"type": "ping"})
        for delta in parts:
            yield named_frame({"type": "content_block_delta", "index": index, "delta": delta}, "content")
        if "signature" in block and block["type"] == "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            yield named_frame({"type": "content_block_delta", "index": index, "delta": signed})
        yield named_frame({"type": "content_block_stop", "index": index})

    def _parts(self, block: JsonObject) -> tuple[JsonObject, list[JsonObject]]:
        """Return a block as it begins, and its deltas. A signed compaction and a fallback come whole."""
        kind = str(block["type"])
        if kind not in _STREAMED or (kind == "compaction" and "signature" in block):
            return block, []
        delta, key, opened, whole = _STREAMED[kind]
        content = block[whole]
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        pieces = [text] if kind == "compaction" else chunked(text, self._exchange.behaviour.chunks)
        return {**block, **opened}, [{"type": delta, key: part} for part in pieces]


def _usage_json(of: Pass, output: int) -> JsonObject:
    """Return usage as this API splits it: `input_tokens` excludes what was read from or written to the cache."""
    return {
        "input_tokens": of.usage.input - of.usage.cached - of.written,
        "cache_creation_input_tokens": of.written,
        "cache_read_input_tokens": of.usage.cached,
        "cache_creation": {"ephemeral_5m_input_tokens": of.written, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
        "service_tier": "standard",
    }


def _pass_json(of: Pass) -> JsonObject:
    fields = _usage_json(of, of.usage.output)
    del fields["service_tier"]
    # A compaction names no model: it is made by the one that was asked for.
    named = {} if of.kind == "compaction" else {"model": of.model}
    return {"type": of.kind, **named, **fields}
