"""Respond to Anthropic messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from gateway.mock import tokens
from gateway.mock.cache_marks import has_cache_mark, without_cache_marks
from gateway.mock.claude import NO_THINKING, ClaudeCall, enforce, overhead_of
from gateway.mock.claude_rules import BILLED_REFUSALS
from gateway.mock.compactions import summary_of
from gateway.mock.message_shape import BuiltMessage, MessageRenderer, Pass, PassKind
from gateway.mock.prompts import last_text, read_messages, schema_of, text_of
from gateway.mock.replies import ModelInput, Reply, Tool, decide
from gateway.mock.tool_changes import withdrawn_tools
from gateway.mock.windows import check_message
from gateway.mock.wire import JsonObject, Limit, MockResponse, MockUsage, Stream, Whole, check_model, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.mock.provider import MockExchange
    from gateway.mock.schemas import Schema

#: Stop reasons by finish reason of the chat API.
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class CountRequest(msgspec.Struct):
    """The fields of a message request that contain input tokens."""

    model: str
    messages: list[msgspec.Raw]
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None


class MessageRequest(CountRequest, kw_only=True):
    """The fields of a message request that the mock provider uses."""

    max_tokens: Limit
    stream: bool | None = None
    tool_choice: JsonObject | None = None
    output_config: JsonObject | None = None


class _Prompt(NamedTuple):
    """Input tokens of a model: all of them, those read from the cache, and those written to the cache."""

    tokens: int
    cached: int
    written: int

    def used(self, output: int) -> MockUsage:
        """Return the usage of a pass over this prompt with so many output tokens."""
        return MockUsage(self.tokens, output, self.cached)


def respond(exchange: MockExchange) -> MockResponse:
    """Respond to a message request."""
    body = decode(exchange.request.body, MessageRequest)
    check_model(body.model)
    messages, sizes = read_messages(body.messages)
    calls = enforce(exchange, body.model, messages)
    if calls and calls[0].controls.compaction is not None:
        built = _summarize(exchange, body, calls[0])
    else:
        built = _Attempts(exchange, body, messages, sizes).build(calls)
    renderer = MessageRenderer(exchange, built)
    if body.stream:
        return Stream(list(renderer.frames()), built.model, built.billed, built.shares)
    return Whole(renderer.message(), built.model, built.billed, shares=built.shares)


def count_input(exchange: MockExchange) -> MockResponse:
    """Count the input tokens of a message request. Nothing is billed."""
    body = decode(exchange.request.body, CountRequest)
    check_model(body.model)
    messages, sizes = read_messages(body.messages)
    calls = enforce(exchange, body.model, messages, counts_only=True)
    overhead = overhead_of(body.system, body.tools)
    sizes = calls[0].sizes() if calls else sizes
    counted: JsonObject = {"input_tokens": exchange.settle(MockUsage(_total(sizes) + overhead, 0)).input}
    if calls and calls[0].applied is not None:
        counted["context_management"] = {"original_input_tokens": calls[0].original_tokens + overhead}
    return Whole(counted, body.model)


class _Attempts:
    """The attempts of one or more models to respond to a request."""

    def __init__(
        self,
        exchange: MockExchange,
        body: MessageRequest,
        messages: list[JsonObject],
        sizes: list[tuple[bytes, int]],
    ) -> None:
        self._exchange = exchange
        self._body = body
        self._messages = messages
        self._sizes = sizes
        self._passes: list[Pass] = []
        self._blocks: list[JsonObject] = []

    def build(self, calls: Sequence[ClaudeCall]) -> BuiltMessage:
        """Return the response. `calls`: the request for each model; empty for a model without rules."""
        turn = self._exchange.turn
        refusals = turn.refusals if turn else ()
        # Only a stream contains the text before a refusal. Without a stream, the next model starts from the beginning.
        partial = turn.refused_text if turn and self._body.stream and refusals and len(calls) > 1 else ""
        for number, call in enumerate(calls or [None]):
            if partial and number and call is not None:
                call.continue_from(partial)
            if number >= len(refusals):
                return self._finished(self._respond(call, is_fallback=number > 0), partial)
            self._refuse(call, refusals[number], is_first=number == 0)
            if number + 1 < len(calls):
                self._hand_over(calls[number].model, calls[number + 1].model, refusals[number])
        last = calls[-1] if calls else None
        category = refusals[max(0, len(calls) - 1)]
        return self._finished(self._response(last, "refusal", category=category), partial)

    def _finished(self, built: BuiltMessage, partial: str) -> BuiltMessage:
        lists_passes = len(self._passes) > 1 or any(item.kind != "message" for item in self._passes)
        first = self._body.model if partial else ""
        return replace(built, lists_passes=lists_passes, partial=partial, first_model=first)

    def _response(self, call: ClaudeCall | None, stop_reason: str, *, category: str | None = None) -> BuiltMessage:
        return BuiltMessage(
            model=call.model if call else self._body.model,
            stop_reason=stop_reason,
            blocks=tuple(self._blocks),
            passes=tuple(self._passes),
            category=category,
            applied_edits=call.applied if call else None,
            transformations=call.transformations if call else None,
        )

    def _refuse(self, call: ClaudeCall | None, category: str | None, *, is_first: bool) -> None:
        turn = self._exchange.turn
        output = tokens.count(turn.refused_text) if turn and is_first else 0
        billed = call.terms.rules.billed_refusals if call else BILLED_REFUSALS
        prompt = self._prompt(call)
        self._passes.append(
            Pass(
                "message" if is_first else "fallback_message",
                call.model if call else self._body.model,
                prompt.used(output),
                prompt.written,
                is_billed=output > 0 or category in billed,
            )
        )

    def _hand_over(self, model: str, other: str, category: str | None) -> None:
        trigger = {"type": "refusal", "category": category}
        block: JsonObject = {"type": "fallback", "from": {"model": model}, "to": {"model": other}, "trigger": trigger}
        self._blocks.append(block)

    def _respond(self, call: ClaudeCall | None, *, is_fallback: bool) -> BuiltMessage:
        prompt = self._prompt(call)
        if call and call.compact and prompt.tokens >= call.compact.threshold:
            block, after = call.summarized()
            self._blocks.append(block)
            self._passes.append(Pass("compaction", call.model, prompt.used(tokens.count(str(block["content"])))))
            if call.compact.pause_after_compaction:
                return self._response(call, "compaction")
            call, prompt = after, self._prompt(after)
        limit = call.max_tokens if call and call.max_tokens is not None else self._body.max_tokens
        thoughts = call.think(self._exchange, limit) if call else NO_THINKING
        model_input = replace(_model_input(self._body, self._messages), max_tokens=limit - thoughts.tokens)
        reply = decide(model_input, self._exchange.turn, self._exchange.behaviour)
        counted = prompt.used(reply.output_tokens + thoughts.tokens)
        usage = self._exchange.settle(counted)
        kind: PassKind = "fallback_message" if is_fallback else "message"
        model = call.model if call else self._body.model
        self._passes.append(Pass(kind, model, usage, prompt.written if usage is counted else 0))
        self._blocks += [*thoughts.blocks, *_blocks(reply, self._exchange.number, is_empty=not thoughts.blocks)]
        return self._response(call, _STOP_REASONS.get(reply.finish_reason, reply.finish_reason))

    def _prompt(self, call: ClaudeCall | None) -> _Prompt:
        overhead = overhead_of(self._body.system, self._body.tools)
        if call is None:
            return _read(self._exchange, self._body.model, self._messages, self._sizes, overhead)
        return _read(self._exchange, call.model, call.messages, call.sizes(), overhead)


def _summarize(exchange: MockExchange, body: MessageRequest, call: ClaudeCall) -> BuiltMessage:
    """Respond to a compaction request with a signed block, or with no content if the model wrote no summary."""
    turn = exchange.turn
    prompt = _read(exchange, call.model, call.messages, call.sizes(), overhead_of(body.system, body.tools))
    summary = turn.text if turn and turn.text is not None else summary_of(call.messages)
    text, is_cut = tokens.truncate(summary, body.max_tokens)
    stop_reason = "compaction"
    if turn and turn.refusals:
        stop_reason, text = "refusal", ""
    elif turn and turn.tool_calls:
        stop_reason = "tool_use"
    elif is_cut:
        stop_reason = "max_tokens"
    elif not text:
        stop_reason = "end_turn"
    usage = exchange.settle(prompt.used(tokens.count(text)))
    category = turn.refusals[0] if turn and turn.refusals else None
    is_billed = stop_reason != "refusal" or category in call.terms.rules.billed_refusals
    return BuiltMessage(
        model=call.model,
        stop_reason=stop_reason,
        blocks=(call.signed(text),) if stop_reason == "compaction" else (),
        passes=(Pass("compaction", call.model, usage, prompt.written, is_billed=is_billed),),
        lists_passes=True,
        category=category,
        transformations=call.transformations,
    )


def _read(
    exchange: MockExchange,
    model: str,
    messages: Sequence[JsonObject],
    sizes: Sequence[tuple[bytes, int]],
    overhead: int,
) -> _Prompt:
    """Return the prompt and what of it is cached: this API caches it only up to messages that have a cache mark."""
    total = _total(sizes)
    check_message(exchange, model, total + overhead)
    marked = [index for index, message in enumerate(messages) if has_cache_mark(message)]
    if not marked:
        return _Prompt(total + overhead, 0, 0)
    parts = [(without_cache_marks(message), size) for message, (_, size) in zip(messages, sizes, strict=True)]
    cached = exchange.provider.cached_tokens(model, parts, marked)
    # The part up to the last mark that was not read from the cache is written to it.
    return _Prompt(total + overhead, cached, _total(sizes[: marked[-1] + 1]) - cached)


def _total(sizes: Sequence[tuple[bytes, int]]) -> int:
    return sum(size for _, size in sizes)


def _model_input(body: MessageRequest, messages: list[JsonObject]) -> ModelInput:
    choice = body.tool_choice or {}
    kind = choice.get("type")
    withdrawn = withdrawn_tools(messages)
    offered = [tool for tool in body.tools or [] if "input_schema" in tool and tool.get("name") not in withdrawn]
    return ModelInput(
        user_text=last_text(messages),
        tool_result=_tool_result(messages[-1]) if messages else None,
        tools=tuple(Tool(str(tool.get("name")), schema_of(tool["input_schema"])) for tool in offered),
        choice="none" if kind == "none" else "required" if kind == "any" else "auto",
        named=str(choice.get("name")) if kind == "tool" else None,
        parallel=not choice.get("disable_parallel_tool_use"),
        schema=_schema(body.output_config or {}),
        max_tokens=body.max_tokens,
    )


def _tool_result(message: JsonObject) -> str | None:
    """Return the text of the first tool result in a message, or None."""
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            return text_of(block.get("content"))
    return None


def _schema(output_config: JsonObject) -> Schema | None:
    schema_format = output_config.get("format")
    return schema_of(schema_format.get("schema")) if isinstance(schema_format, dict) else None


def _blocks(reply: Reply, number: int, *, is_empty: bool) -> list[JsonObject]:
    """Return the content blocks of a reply. `is_empty`: no block precedes them, so at least one must be returned."""
    blocks: list[JsonObject] = []
    if reply.text or (is_empty and not reply.tool_calls):
        blocks.append({"type": "text", "text": reply.text})
    for index, call in enumerate(reply.tool_calls):
        name = f"toolu_mock{number}_{index}"
        blocks.append({"type": "tool_use", "id": name, "name": call.name, "input": msgspec.json.decode(call.arguments)})
    return blocks
