"""Check pydantic-ai: agents on chat, responses and messages. Environment: pydantic-ai-slim[openai,anthropic]."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MODEL,
    NO_BUDGET,
    SLOW,
    WRONG_KEY,
    failure,
    fault,
    run,
    settled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.output import NativeOutput
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "What is the weather?"
SAID = "You said: What is the weather?"


class Weather(BaseModel):
    city: str


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def openai_provider(key: str = KEY, **headers: str) -> OpenAIProvider:
    named = {"x-session-id": "pydantic-ai", **headers}
    client = AsyncOpenAI(base_url=f"{GATEWAY}/v1", api_key=key, max_retries=0, default_headers=named)
    return OpenAIProvider(openai_client=client)


def chat_model(name: str = MODEL, key: str = KEY, **headers: str) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=openai_provider(key, **headers))


def responses_model() -> OpenAIResponsesModel:
    return OpenAIResponsesModel(MODEL, provider=openai_provider())


def messages_model() -> AnthropicModel:
    named = {"x-session-id": "pydantic-ai"}
    client = AsyncAnthropic(base_url=GATEWAY, api_key=KEY, max_retries=0, default_headers=named)
    return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))


async def whole(model: Any) -> None:
    result = await Agent(model).run(ASK)
    assert result.output == SAID


async def streamed(model: Any) -> None:
    async with Agent(model).run_stream(ASK) as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "".join(pieces) == SAID
    assert len(pieces) > 0


async def with_tools(model: Any) -> None:
    result = await Agent(model, tools=[weather]).run(ASK)
    assert result.output == "The tool answered: sunny in sample city"


async def structured(model: Any) -> None:
    result = await Agent(model, output_type=NativeOutput(Weather)).run(ASK)
    assert result.output == Weather(city="sample city")


async def chat() -> None:
    await whole(chat_model())


async def chat_stream() -> None:
    await streamed(chat_model())


async def chat_tools() -> None:
    await with_tools(chat_model())


async def chat_structured() -> None:
    await structured(chat_model())
    by_tool = await Agent(chat_model(), output_type=Weather).run(ASK)
    assert by_tool.output == Weather(city="sample city")


async def responses() -> None:
    await whole(responses_model())


async def responses_stream() -> None:
    await streamed(responses_model())


async def responses_tools() -> None:
    await with_tools(responses_model())


async def responses_structured() -> None:
    await structured(responses_model())


async def messages() -> None:
    await whole(messages_model())


async def messages_stream() -> None:
    await streamed(messages_model())


async def messages_tools() -> None:
    await with_tools(messages_model())


async def embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel("mock-embedding", provider=openai_provider()))
    result = await embedder.embed_documents(["one", "two"])
    assert [len(row) for row in result.embeddings] == [64, 64]


def status(model: Any) -> tuple[int, Any]:
    error = failure(lambda: Agent(model).run_sync(ASK), ModelHTTPError)
    return error.status_code, error.body


def errors_401() -> None:
    assert status(chat_model(key=WRONG_KEY))[0] == 401


def errors_404() -> None:
    code, body = status(chat_model(FORBIDDEN_MODEL))
    assert (code, body["code"]) == (404, "model_not_found")


def errors_429() -> None:
    assert status(chat_model(**fault(429)))[0] == 429


def errors_400() -> None:
    assert status(chat_model(**fault(400)))[0] == 400
    code, body = status(chat_model(**{**NO_BUDGET, "x-session-id": "poor"}))
    assert (code, body["code"]) == (400, "budget_exhausted")


async def cancel() -> None:
    async with Agent(chat_model(**SLOW)).run_stream(ASK) as result:
        async for _ in result.stream_text(delta=True, debounce_by=None):
            break
        await result.cancel()
    settled()


run(
    chat,
    chat_stream,
    chat_tools,
    chat_structured,
    responses,
    responses_stream,
    responses_tools,
    responses_structured,
    messages,
    messages_stream,
    messages_tools,
    embeddings,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
)
