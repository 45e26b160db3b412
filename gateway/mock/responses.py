"""Respond to OpenAI's Responses API: `POST /v1/responses`, `/compact`, `/input_tokens` and background responses.

A background response is billed when it is requested. It is queued at first, in progress at the first fetch, and
finished from the second fetch on.
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from gateway.mock import openai_stream, response_rules, tokens
from gateway.mock.prompts import ANY_OBJECT, extra_tokens, last_text, read_messages, schema_of, text_of
from gateway.mock.replies import ModelInput, Reply, Tool, chunked, decide, tool_choice_of
from gateway.mock.strict import NO_RULES, StrictRules, rules_of, seal, unseal
from gateway.mock.windows import check_response
from gateway.mock.wire import (
    ApiError,
    JsonObject,
    Limit,
    MockResponse,
    MockUsage,
    SentEvent,
    Stream,
    Whole,
    check_model,
    decode,
    named_frame,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.mock.provider import MockExchange
    from gateway.mock.schemas import Schema
    from gateway.mock.turns import ToolCall

_RUNNING: Final = ("queued", "in_progress")
#: type of the item that requests a compaction
_TRIGGER: Final = "compaction_trigger"
#: output tokens of a compaction
_COMPACTION_TOKENS: Final = 20
#: reasons why a response is incomplete, by finish reason of the chat API
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponseRequest(msgspec.Struct):
    """The fields of a Responses request that the mock provider uses."""

    model: str
    input: str | list[msgspec.Raw] = ""
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Limit | None = None
    text: JsonObject | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: str | JsonObject | None = None
    metadata: JsonObject | None = None
    temperature: float | None = None
    top_p: float | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[str] | None = None


def respond(exchange: MockExchange) -> MockResponse:
    """Respond to a Responses request."""
    body = decode(exchange.request.body, ResponseRequest)
    openai_stream.check_tool_choice(body.tool_choice, refuse=exchange.behaviour.refuse_allowed_tools)
    check_model(body.model)
    items, sizes = _items(body)
    conversation = _stored(exchange, body) + sum(size for _, size in sizes)
    prompt = conversation + _overhead(body)
    check_response(exchange, body.model, prompt)
    rules = rules_of(exchange.provider.strict, body.model)
    if rules is not NO_RULES:
        response_rules.check(rules, exchange.provider, decode(exchange.request.body, JsonObject), items)
    if items and items[-1].get("type") == _TRIGGER and exchange.behaviour.compaction != "ignored":
        return _compacted(exchange, body, prompt, len(items) - 1)
    model_input = _model_input(body, items)
    reply = response_rules.with_reasoning(rules, model_input, decide(model_input, exchange.turn, exchange.behaviour))
    counted = MockUsage(
        input=prompt,
        output=reply.output_tokens,
        cached=exchange.provider.cached_tokens(body.model, sizes),
        reasoning=reply.reasoning_tokens,
    )
    usage = exchange.settle(counted)
    _store(exchange, body, conversation + reply.output_tokens)
    shape = _Shape(exchange, body, reply, usage, form=_Form.of(rules, body))
    if body.background:
        exchange.provider.keep(_response_id(exchange), shape.running("in_progress"), shape.finished())
    if body.stream:
        return Stream(list(shape.frames()), body.model, usage)
    return Whole(shape.running("queued") if body.background else shape.finished(), body.model, usage)


def compact(exchange: MockExchange) -> MockResponse:
    """Respond to a compaction request with the output that replaces the conversation."""
    if exchange.behaviour.compaction != "made":
        raise ApiError(404, "Invalid URL (POST /v1/responses/compact)")
    body = decode(exchange.request.body, ResponseRequest)
    check_model(body.model)
    _, sizes = _items(body)
    usage = exchange.settle(MockUsage(sum(size for _, size in sizes) + _overhead(body), _COMPACTION_TOKENS))
    content: JsonObject = {
        "id": _response_id(exchange),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [_compaction(exchange)],
        "usage": _usage_json(usage),
    }
    return Whole(content, body.model, usage)


def _compacted(exchange: MockExchange, body: ResponseRequest, prompt: int, place: int) -> MockResponse:
    """Respond to a request that ends with a compaction trigger, which is the input item number `place`."""
    if exchange.behaviour.compaction == "refused":
        raise ApiError(400, f"Invalid value: '{_TRIGGER}'.", param=f"input[{place}]", code="invalid_value")
    usage = exchange.settle(MockUsage(prompt, _COMPACTION_TOKENS))
    shape = _Shape(exchange, body, Reply("", (), "stop", _COMPACTION_TOKENS), usage, compaction=_compaction(exchange))
    if body.stream:
        return Stream(list(shape.frames()), body.model, usage)
    return Whole(shape.finished(), body.model, usage)


def _compaction(exchange: MockExchange) -> JsonObject:
    name = f"cmp_mock{exchange.number}"
    return {"id": name, "type": "compaction", "encrypted_content": seal("compaction", name)}


def fetch(exchange: MockExchange) -> MockResponse:
    """Return the present state of a background response. A path that ends with `/cancel` cancels it."""
    _, _, _, name, *action = exchange.request.path.split("/")
    response = exchange.provider.fetch(name, cancel=bool(action))
    if response is None:
        raise ApiError(404, f"Response with id '{name}' not found.", param="id")
    if "stream=true" not in exchange.request.query:
        return Whole(response)
    last = {"type": f"response.{response['status']}", "sequence_number": 9, "response": response}
    return Stream([named_frame(last, "done")])


def count_input(exchange: MockExchange) -> MockResponse:
    """Count the input tokens of a Responses request. Nothing is billed."""
    body = decode(exchange.request.body, ResponseRequest)
    check_model(body.model)
    _, sizes = _items(body)
    prompt = _stored(exchange, body) + sum(size for _, size in sizes) + _overhead(body)
    usage = exchange.settle(MockUsage(prompt, 0))
    return Whole({"object": "response.input_tokens", "input_tokens": usage.input}, body.model)


def _items(body: ResponseRequest) -> tuple[list[JsonObject], list[tuple[bytes, int]]]:
    """Return the items of the input, and the raw JSON and tokens of each. A string is one user message."""
    if isinstance(body.input, str):
        size = tokens.count(body.input) + tokens.MESSAGE_TOKENS
        return [{"role": "user", "content": body.input}], [(body.input.encode(), size)]
    items, sizes = read_messages(body.input)
    for item in items:
        if item.get("type") == "compaction" and unseal(str(item.get("encrypted_content"))) is None:
            raise ApiError(400, "The encrypted content could not be verified.", code="invalid_encrypted_content")
    return items, sizes


def _overhead(body: ResponseRequest) -> int:
    """Return the tokens of instructions, tools and text format, which are not stored with a conversation."""
    system = tokens.count(body.instructions) + tokens.MESSAGE_TOKENS if body.instructions else 0
    return system + extra_tokens(body.tools, body.text)


def _stored(exchange: MockExchange, body: ResponseRequest) -> int:
    """Return the tokens of the stored response or conversation that the request continues; 0 if its id is unknown."""
    provider = exchange.provider
    return provider.stored_tokens(body.previous_response_id) or provider.stored_tokens(_conversation(body))


def _store(exchange: MockExchange, body: ResponseRequest, size: int) -> None:
    """Store the tokens up to this response, for requests that continue it."""
    conversation = _conversation(body)
    if body.store is not False:
        exchange.provider.store(_response_id(exchange), size)
    if conversation is not None:
        exchange.provider.store(conversation, size)


def _conversation(body: ResponseRequest) -> str | None:
    """Return the id of the conversation that the request continues, or None."""
    conversation = body.conversation
    name = conversation.get("id") if isinstance(conversation, dict) else conversation
    return name if isinstance(name, str) else None


def _response_id(exchange: MockExchange) -> str:
    return f"resp_mock{exchange.number}"


def _model_input(body: ResponseRequest, items: list[JsonObject]) -> ModelInput:
    last = items[-1] if items else {}
    chosen = body.tool_choice
    named = chosen.get("name") if isinstance(chosen, dict) and chosen.get("type") == "function" else None
    offered = [tool for tool in body.tools or [] if tool.get("type") == "function"]
    choice, tools = tool_choice_of(
        chosen, tuple(Tool(str(tool.get("name")), schema_of(tool.get("parameters"))) for tool in offered)
    )
    return ModelInput(
        user_text=last_text(items),
        tool_result=text_of(last.get("output")) if last.get("type") == "function_call_output" else None,
        tools=tools,
        choice=choice,
        named=named if isinstance(named, str) else None,
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body.text or {}),
        max_tokens=body.max_output_tokens,
    )


def _schema(text: JsonObject) -> Schema | None:
    schema_format = text.get("format")
    if not isinstance(schema_format, dict):
        return None
    if schema_format.get("type") == "json_object":
        return ANY_OBJECT
    return schema_of(schema_format.get("schema")) if schema_format.get("type") == "json_schema" else None


def _usage_json(usage: MockUsage) -> JsonObject:
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.total,
    }


class _Form(NamedTuple):
    """Parts of a response that the rules of its model add."""

    reasoning: bool
    """The response starts with a reasoning item."""
    ciphertext: bool
    """The reasoning item has `encrypted_content`."""
    phases: bool
    """The message has a `phase`."""

    @classmethod
    def of(cls, rules: StrictRules, body: ResponseRequest) -> _Form:
        """Return the form of the response to a request."""
        return cls(
            reasoning=rules.reasoning_items,
            ciphertext="reasoning.encrypted_content" in (body.include or ()),
            phases=rules.phases,
        )


_PLAIN: Final = _Form(reasoning=False, ciphertext=False, phases=False)


class _Shape:
    """Render one response: as a whole, or as the events of a stream."""

    def __init__(
        self,
        exchange: MockExchange,
        body: ResponseRequest,
        reply: Reply,
        usage: MockUsage,
        *,
        form: _Form = _PLAIN,
        compaction: JsonObject | None = None,
    ) -> None:
        self._form = form
        self._exchange = exchange
        self._body = body
        self._reply = reply
        self._usage = usage
        self._compaction = compaction
        self._created = int(time.time())
        self._numbers = count()

    def finished(self) -> JsonObject:
        """Return the finished response."""
        response = self._response(self._status, [item for item, _ in self._outputs(self._status)])
        return {**response, "completed_at": self._created} if self._status == "completed" else response

    def running(self, status: str) -> JsonObject:
        """Return the response while it is running."""
        return self._response(status, [])

    def frames(self) -> Iterator[SentEvent]:
        """Yield the events of a stream, in the order of the API."""
        started = self._response("in_progress", [])
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        finished = self._outputs(self._status)
        for index, (item, call) in enumerate(self._outputs("in_progress")):
            yield self._event("response.output_item.added", output_index=index, item=item)
            if call:
                yield from self._arguments(index, call)
            elif item["type"] == "message":
                yield from self._text(index)
            yield self._event("response.output_item.done", output_index=index, item=finished[index][0])
        last = self._event(f"response.{self._status}", response=self.finished())
        yield SentEvent(last.data, "done")

    @property
    def _status(self) -> str:
        return "incomplete" if self._reply.finish_reason in _INCOMPLETE else "completed"

    def _event(self, kind: str, **fields: object) -> SentEvent:
        delta = kind.endswith(".delta")
        event: JsonObject = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return named_frame(event, "content" if delta else "meta")

    def _response(self, status: str, output: list[JsonObject]) -> JsonObject:
        """Return the response object with this status. Usage is added only when the response has ended."""
        body = self._body
        has_ended = status not in _RUNNING
        conversation = _conversation(body)
        incomplete = {"reason": _INCOMPLETE[self._reply.finish_reason]} if status == "incomplete" else None
        return {
            "id": _response_id(self._exchange),
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": body.background is True,
            "conversation": {"id": conversation} if conversation is not None else None,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": _usage_json(self._usage) if has_ended and self._exchange.shows_usage else None,
            "user": None,
            "metadata": body.metadata or {},
        }

    def _outputs(self, status: str) -> list[tuple[JsonObject, ToolCall | None]]:
        """Return the output items with this status, each with its tool call or None.

        While in progress, the items have no content.
        """
        if self._compaction is not None:
            return [(self._compaction, None)]
        is_running, form, number = status == "in_progress", self._form, self._exchange.number
        outputs: list[tuple[JsonObject, ToolCall | None]] = []
        if form.reasoning:
            item = response_rules.reasoning_item(number, is_sealed=form.ciphertext, is_done=not is_running)
            outputs.append((item, None))
        if self._reply.text or not self._reply.tool_calls:
            content = [] if is_running else [_part(self._reply.text)]
            phase = {"phase": "commentary" if self._reply.tool_calls else "final_answer"} if form.phases else {}
            item = {"type": "message", "status": status, "role": "assistant", "content": content, **phase}
            outputs.append(({"id": self._id("msg", len(outputs)), **item}, None))
        for call in self._reply.tool_calls:
            index = len(outputs)
            item = {
                "id": self._id("fc", index),
                "type": "function_call",
                "status": status,
                "arguments": "" if is_running else call.arguments,
                "call_id": self._id("call", index),
                "name": call.name,
            }
            outputs.append((item, call))
        return outputs

    def _id(self, prefix: str, index: int) -> str:
        return f"{prefix}_mock{self._exchange.number}_{index}"

    def _text(self, index: int) -> Iterator[SentEvent]:
        place = {"item_id": self._id("msg", index), "output_index": index, "content_index": 0}
        text = self._reply.text
        yield self._event("response.content_part.added", **place, part=_part(""))
        for part in chunked(text, self._exchange.behaviour.chunks):
            yield self._event("response.output_text.delta", **place, delta=part, logprobs=[])
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))

    def _arguments(self, index: int, call: ToolCall) -> Iterator[SentEvent]:
        place = {"item_id": self._id("fc", index), "output_index": index}
        for part in chunked(call.arguments, self._exchange.behaviour.chunks):
            yield self._event("response.function_call_arguments.delta", **place, delta=part)
        done = {"name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **place, **done)


def _part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
