"""Anthropic messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.mock import tokens
from gateway.mock.claude import NO_THOUGHTS, enforce
from gateway.mock.prompts import extra_tokens, last_text, read_messages, schema_of, text_of
from gateway.mock.replies import Ask, Reply, Tool, chunked, decide
from gateway.mock.windows import check_message
from gateway.mock.wire import (
    Answer,
    Frame,
    JsonObject,
    Limit,
    Stream,
    Usage,
    Whole,
    check_model,
    decode,
    named_frame,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.mock.provider import Exchange
    from gateway.mock.schemas import Schema

#: Stop reasons by finish reason in chat's words.
_STOP_REASONS: Final = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
#: How a content block is streamed: type and key of its deltas, the fields that are empty at first, the field they fill.
_STREAMED: Final[dict[str, tuple[str, str, JsonObject, str]]] = {
    "text": ("text_delta", "text", {"text": ""}, "text"),
    "thinking": ("thinking_delta", "thinking", {"thinking": "", "signature": ""}, "thinking"),
    "tool_use": ("input_json_delta", "partial_json", {"input": {}}, "input"),
}


class CountRequest(msgspec.Struct):
    """What has tokens in a message request."""

    model: str
    messages: list[msgspec.Raw]
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None


class MessageRequest(CountRequest, kw_only=True):
    """The fields of a message request that matter here."""

    max_tokens: Limit
    stream: bool | None = None
    tool_choice: JsonObject | None = None
    output_config: JsonObject | None = None


def answer(exchange: Exchange) -> Answer:
    """Answer a message request."""
    body = decode(exchange.request.body, MessageRequest)
    check_model(body.model)
    messages, sizes = read_messages(body.messages)
    claude = enforce(exchange, body.model, messages)
    sizes = claude.sizes() if claude else sizes
    prompt, beside = sum(size for _, size in sizes), _beside(body)
    check_message(exchange, body.model, prompt + beside)
    thoughts = claude.think(exchange, body.max_tokens) if claude else NO_THOUGHTS
    ask = replace(_ask(body, messages), max_tokens=body.max_tokens - thoughts.tokens)
    reply = decide(ask, exchange.turn, exchange.behaviour)
    reply = replace(reply, output_tokens=reply.output_tokens + thoughts.tokens)
    cached = exchange.provider.cached_tokens(body.model, sizes) if _caches(exchange) else 0
    counted = Usage(prompt + beside, reply.output_tokens, cached)
    usage = exchange.settle(counted)
    # What is marked for caching and was not read from there is written to it.
    written = prompt - cached if _caches(exchange) and usage is counted else 0
    shape = _Shape(
        exchange,
        body.model,
        reply,
        usage,
        written=written,
        transformations=claude.transformations if claude else None,
        thinking=thoughts.blocks,
    )
    if body.stream:
        return Stream(list(shape.frames()), body.model, usage)
    return Whole(shape.message(), body.model, usage)


def count_input(exchange: Exchange) -> Answer:
    """Count the input of a message request; bills nothing."""
    body = decode(exchange.request.body, CountRequest)
    check_model(body.model)
    messages, sizes = read_messages(body.messages)
    claude = enforce(exchange, body.model, messages, counts_only=True)
    sizes = claude.sizes() if claude else sizes
    counted = Usage(sum(size for _, size in sizes) + _beside(body), 0)
    return Whole({"input_tokens": exchange.settle(counted).input}, body.model)


def _caches(exchange: Exchange) -> bool:
    """Whether anything in the request is marked for caching; this API caches nothing unasked."""
    return b'"cache_control"' in exchange.request.body


def _beside(body: CountRequest) -> int:
    """Tokens of what goes with the messages."""
    system = tokens.count_json(body.system) + tokens.MESSAGE_TOKENS if body.system else 0
    return system + extra_tokens(body.tools)


def _ask(body: MessageRequest, messages: list[JsonObject]) -> Ask:
    choice = body.tool_choice or {}
    kind = choice.get("type")
    offered = [tool for tool in body.tools or [] if "input_schema" in tool]
    return Ask(
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
    """The text of the first tool result in `message`; None where there is none."""
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            return text_of(block.get("content"))
    return None


def _schema(output_config: JsonObject) -> Schema | None:
    wanted = output_config.get("format")
    return schema_of(wanted.get("schema")) if isinstance(wanted, dict) else None


class _Shape:
    """One message in its wire format: at once, or as the events that build it up."""

    def __init__(
        self,
        exchange: Exchange,
        model: str,
        reply: Reply,
        usage: Usage,
        *,
        written: int,
        transformations: list[JsonObject] | None,
        thinking: tuple[JsonObject, ...],
    ) -> None:
        self._exchange = exchange
        self._model = model
        self._reply = reply
        self._usage = usage
        self._written = written
        self._transformations = transformations
        self._thinking = thinking

    def message(self) -> JsonObject:
        """The message when all of it is there."""
        return self._message(self._blocks(), self._stop_reason, self._usage.output)

    def frames(self) -> Iterator[Frame]:
        """The events of a stream, in the API's order."""
        yield named_frame({"type": "message_start", "message": self._message([], None, 1)})
        for index, block in enumerate(self._blocks()):
            yield from self._block(index, block)
        delta = {"stop_reason": self._stop_reason, "stop_sequence": None}
        closing: JsonObject = {"type": "message_delta", "delta": delta}
        if self._exchange.show_usage:
            closing["usage"] = self._final_usage()
        yield named_frame(closing)
        yield named_frame({"type": "message_stop"}, "done")

    @property
    def _stop_reason(self) -> str:
        return _STOP_REASONS.get(self._reply.finish_reason, self._reply.finish_reason)

    def _message(self, content: list[JsonObject], stop_reason: str | None, output: int) -> JsonObject:
        message: JsonObject = {
            "id": f"msg_mock{self._exchange.number}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
        }
        if self._exchange.show_usage:
            message["usage"] = self._usage_json(output)
        if self._transformations is not None:
            message["input_transformations"] = self._transformations
        return message

    def _usage_json(self, output: int) -> JsonObject:
        """Usage as this API splits it: `input_tokens` excludes what was read from or written to the cache."""
        usage = self._usage
        return {
            "input_tokens": usage.input - usage.cached - self._written,
            "cache_creation_input_tokens": self._written,
            "cache_read_input_tokens": usage.cached,
            "cache_creation": {"ephemeral_5m_input_tokens": self._written, "ephemeral_1h_input_tokens": 0},
            "output_tokens": output,
            "service_tier": "standard",
        }

    def _final_usage(self) -> JsonObject:
        """Usage of `message_delta`: the output, and with any other placement than the API's the input once more."""
        if self._exchange.behaviour.usage == "trailing":
            return {"output_tokens": self._usage.output}
        return self._usage_json(self._usage.output)

    def _blocks(self) -> list[JsonObject]:
        found = list(self._thinking)
        if self._reply.text or not (found or self._reply.tool_calls):
            found.append({"type": "text", "text": self._reply.text})
        for index, call in enumerate(self._reply.tool_calls):
            name = f"toolu_mock{self._exchange.number}_{index}"
            found.append(
                {"type": "tool_use", "id": name, "name": call.name, "input": msgspec.json.decode(call.arguments)}
            )
        return found

    def _block(self, index: int, block: JsonObject) -> Iterator[Frame]:
        """The events of one content block; the API pings after the first one opens."""
        kind, key, opened, whole = _STREAMED[str(block["type"])]
        yield named_frame({"type": "content_block_start", "index": index, "content_block": {**block, **opened}})
        if index == 0:
            yield named_frame({"type": "ping"})
        content = block[whole]
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        for part in chunked(text, self._exchange.behaviour.chunks):
            delta = {"type": kind, key: part}
            yield named_frame({"type": "content_block_delta", "index": index, "delta": delta}, "content")
        if "signature" in block:
            signed = {"type": "signature_delta", "signature": block["signature"]}
            yield named_frame({"type": "content_block_delta", "index": index, "delta": signed})
        yield named_frame({"type": "content_block_stop", "index": index})
