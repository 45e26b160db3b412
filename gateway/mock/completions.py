"""Respond to OpenAI's older completions: `POST /v1/completions`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.mock import openai_stream, tokens
from gateway.mock.chat import FINGERPRINT, StreamOptions
from gateway.mock.openai_stream import StreamChunk
from gateway.mock.replies import ModelInput, Reply, chunked, decide
from gateway.mock.wire import JsonObject, Limit, MockResponse, MockUsage, Number, Stream, Whole, check_model, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.mock.provider import MockExchange

#: The default of the real API.
DEFAULT_MAX_TOKENS: Final = 16


class CompletionRequest(msgspec.Struct):
    """The fields of a completion request that the mock provider uses. A list of numbers is one prompt of token ids."""

    model: str
    prompt: str | list[str | int | list[int]] = "<|endoftext|>"
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: Limit | None = DEFAULT_MAX_TOKENS
    n: Number | None = None
    echo: bool | None = None


def respond(exchange: MockExchange) -> MockResponse:
    """Respond to a completion request with `n` choices for each prompt."""
    body = decode(exchange.request.body, CompletionRequest)
    behaviour = exchange.behaviour
    openai_stream.check_stream_options(
        present=body.stream_options is not msgspec.UNSET,
        stream=bool(body.stream),
        refuse=behaviour.refuse_stream_options,
    )
    check_model(body.model)
    prompts = inputs(body.prompt)
    replies = list(_replies(exchange, body, prompts))
    usage = exchange.settle(MockUsage(sum(map(input_tokens, prompts)), sum(reply.output_tokens for reply in replies)))
    base: JsonObject = {
        "id": f"cmpl-mock{exchange.number}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": FINGERPRINT,
    }
    if not body.stream:
        choices = [_choice(index, reply.text, reply.finish_reason) for index, reply in enumerate(replies)]
        whole: JsonObject = {**base, "choices": choices}
        request_id = f"req_mock{exchange.number}"
        return Whole(openai_stream.with_usage(whole, usage, behaviour.usage, request_id), body.model, usage)
    options = body.stream_options
    wants_usage = isinstance(options, StreamOptions) and bool(options.include_usage)
    steps = list(_steps(replies, behaviour.chunks))
    return Stream(openai_stream.frames(base, steps, usage, behaviour.usage, wants_usage=wants_usage), body.model, usage)


def inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return the inputs of a request as a list, each as text or as token ids."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids:
        return [ids]
    return [item for item in given if not isinstance(item, int)]


def input_tokens(item: str | list[int]) -> int:
    """Return the tokens of one input."""
    return tokens.count(item) if isinstance(item, str) else len(item)


def _replies(exchange: MockExchange, body: CompletionRequest, prompts: list[str | list[int]]) -> Iterator[Reply]:
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else f"{len(prompt)} token ids"
        model_input = ModelInput(user_text=text, max_tokens=body.max_tokens)
        for index in range(body.n or 1):
            reply = decide(model_input, exchange.turn, exchange.behaviour, index)
            if body.echo:
                # The echoed prompt was not generated, so it is not counted as output.
                reply = Reply(text + reply.text, (), reply.finish_reason, reply.output_tokens)
            yield reply


def _steps(replies: list[Reply], chunks: int | None) -> Iterator[StreamChunk]:
    for index, reply in enumerate(replies):
        for part in chunked(reply.text, chunks):
            yield StreamChunk(_choice(index, part, None), "content")
        yield StreamChunk(_choice(index, "", reply.finish_reason), "finish")


def _choice(index: int, text: str, finish_reason: str | None) -> JsonObject:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
