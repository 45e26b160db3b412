"""Respond to OpenAI chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.mock import chat_rules, openai_stream
from gateway.mock.openai_stream import StreamChunk
from gateway.mock.prompts import ANY_OBJECT, extra_tokens, last_text, read_messages, schema_of, text_of
from gateway.mock.replies import ModelInput, Reply, Tool, chunked, decide, tool_choice_of
from gateway.mock.strict import NO_RULES, StrictRules, rules_of
from gateway.mock.windows import check_chat
from gateway.mock.wire import JsonObject, Limit, MockResponse, MockUsage, Number, Stream, Whole, check_model, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.mock.provider import MockExchange
    from gateway.mock.schemas import Schema

FINGERPRINT: Final = "fp_mock"


class StreamOptions(msgspec.Struct):
    """`stream_options` of chat and completions."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a chat request that the mock provider uses."""

    model: str
    messages: list[msgspec.Raw]
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Number | None = None
    response_format: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None


def respond(exchange: MockExchange) -> MockResponse:
    """Respond to a chat request."""
    body = decode(exchange.request.body, ChatRequest)
    behaviour = exchange.behaviour
    openai_stream.check_stream_options(
        present=body.stream_options is not msgspec.UNSET,
        stream=bool(body.stream),
        refuse=behaviour.refuse_stream_options,
    )
    openai_stream.check_tool_choice(body.tool_choice, refuse=behaviour.refuse_allowed_tools)
    check_model(body.model)
    messages, sizes = read_messages(body.messages)
    prompt, overhead = sum(size for _, size in sizes), extra_tokens(body.tools, body.response_format)
    check_chat(exchange, body.model, prompt, overhead)
    rules = rules_of(exchange.provider.strict, body.model)
    fields = decode(exchange.request.body, JsonObject) if rules is not NO_RULES else {}
    chat_rules.check(rules, body.model, fields, messages)
    model_input = _model_input(body, messages)
    decided = [decide(model_input, exchange.turn, behaviour, index) for index in range(body.n or 1)]
    replies = [chat_rules.with_reasoning(rules, fields, model_input, reply) for reply in decided]
    counted = MockUsage(
        input=prompt + overhead,
        output=sum(reply.output_tokens for reply in replies),
        cached=exchange.provider.cached_tokens(body.model, sizes),
        reasoning=sum(reply.reasoning_tokens for reply in replies),
    )
    usage = exchange.settle(counted)
    if not body.stream:
        return Whole(_whole(exchange, body.model, rules, replies, usage), body.model, usage)
    options = body.stream_options
    wants_usage = isinstance(options, StreamOptions) and bool(options.include_usage)
    steps = _steps(exchange, body.model, rules, replies)
    base = _base(exchange, body.model, "chat.completion.chunk")
    return Stream(openai_stream.frames(base, steps, usage, behaviour.usage, wants_usage=wants_usage), body.model, usage)


def _model_input(body: ChatRequest, messages: list[JsonObject]) -> ModelInput:
    last = messages[-1] if messages else {}
    chosen = body.tool_choice
    choice, tools = tool_choice_of(chosen, tuple(_tools(body.tools or [])))
    return ModelInput(
        user_text=last_text(messages),
        tool_result=text_of(last.get("content")) if last.get("role") in ("tool", "function") else None,
        tools=tools,
        choice=choice,
        named=_function_name(chosen),
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body.response_format or {}),
        max_tokens=body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens,
    )


def _tools(offered: list[JsonObject]) -> Iterator[Tool]:
    for tool in offered:
        function = tool.get("function")
        if isinstance(function, dict):
            yield Tool(str(function.get("name")), schema_of(function.get("parameters")))


def _function_name(choice: object) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else None


def _schema(response_format: JsonObject) -> Schema | None:
    if response_format.get("type") == "json_object":
        return ANY_OBJECT
    schema_format = response_format.get("json_schema")
    return schema_of(schema_format.get("schema")) if isinstance(schema_format, dict) else None


def _base(exchange: MockExchange, model: str, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-mock{exchange.number}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "service_tier": "default",
        "system_fingerprint": FINGERPRINT,
    }


def _calls(exchange: MockExchange, model: str, rules: StrictRules, reply: Reply, choice: int) -> list[JsonObject]:
    number = exchange.number
    return [
        {
            "id": chat_rules.call_id(rules, number, choice, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
            **chat_rules.signature(rules, model, number, index),
        }
        for index, call in enumerate(reply.tool_calls)
    ]


def _whole(
    exchange: MockExchange, model: str, rules: StrictRules, replies: list[Reply], usage: MockUsage
) -> JsonObject:
    choices = [
        {
            "index": index,
            "message": _message(reply, _calls(exchange, model, rules, reply, index)),
            "logprobs": None,
            "finish_reason": reply.finish_reason,
        }
        for index, reply in enumerate(replies)
    ]
    body = {**_base(exchange, model, "chat.completion"), "choices": choices}
    return openai_stream.with_usage(body, usage, exchange.behaviour.usage, f"req_mock{exchange.number}")


def _message(reply: Reply, calls: list[JsonObject]) -> JsonObject:
    message: JsonObject = {
        "role": "assistant",
        "content": reply.text if reply.text or not reply.tool_calls else None,
        "refusal": None,
        "annotations": [],
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _steps(exchange: MockExchange, model: str, rules: StrictRules, replies: list[Reply]) -> list[StreamChunk]:
    """Return the chunks of all choices, interleaved: the first chunk of each choice, then the second of each."""
    choices = [
        _choice_steps(exchange, reply, index, _calls(exchange, model, rules, reply, index))
        for index, reply in enumerate(replies)
    ]
    rows = chain.from_iterable(zip_longest(*choices))
    return [step for step in rows if step is not None]


def _choice_steps(exchange: MockExchange, reply: Reply, choice: int, calls: list[JsonObject]) -> Iterator[StreamChunk]:
    first: JsonObject = {"role": "assistant", "content": None if reply.tool_calls else "", "refusal": None}
    yield StreamChunk(_delta(choice, first), "meta")
    for part in chunked(reply.reasoning, None) if reply.reasoning else ():
        yield StreamChunk(_delta(choice, {"reasoning_content": part}), "meta")
    if reply.text:
        for part in chunked(reply.text, exchange.behaviour.chunks):
            yield StreamChunk(_delta(choice, {"content": part}), "content")
    for index, (call, whole) in enumerate(zip(reply.tool_calls, calls, strict=True)):
        opening: JsonObject = {"index": index, **whole, "function": {"name": call.name, "arguments": ""}}
        yield StreamChunk(_delta(choice, {"tool_calls": [opening]}), "meta")
        for part in chunked(call.arguments, exchange.behaviour.chunks):
            yield StreamChunk(
                _delta(choice, {"tool_calls": [{"index": index, "function": {"arguments": part}}]}), "content"
            )
    yield StreamChunk(_delta(choice, {}, reply.finish_reason), "finish")


def _delta(choice: int, delta: JsonObject, finish_reason: str | None = None) -> JsonObject:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
