"""Check OpenAI's Agents SDK on responses and on chat. Environment: openai-agents."""

from __future__ import annotations

from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import FORBIDDEN_MODEL, GATEWAY, KEY, MODEL, NO_BUDGET, SLOW, WRONG_KEY, failure, fault, run, settled
from openai import AsyncOpenAI
from pydantic import BaseModel

ASK = "What is the weather?"
SAID = "You said: What is the weather?"

set_tracing_disabled(disabled=True)


class Weather(BaseModel):
    city: str


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def client(key: str = KEY, **headers: str) -> AsyncOpenAI:
    named = {"x-session-id": "openai-agents", **headers}
    return AsyncOpenAI(base_url=f"{GATEWAY}/v1", api_key=key, max_retries=0, default_headers=named)


def agent(kind: Any, name: str = MODEL, key: str = KEY, headers: dict[str, str] | None = None, **more: Any) -> Any:
    return Agent(name="A", model=kind(model=name, openai_client=client(key, **(headers or {}))), **more)


async def whole(kind: Any) -> None:
    result = await Runner.run(agent(kind), ASK)
    assert result.final_output == SAID
    assert result.context_wrapper.usage.total_tokens > 0


async def streamed(kind: Any) -> None:
    result = Runner.run_streamed(agent(kind), ASK)
    events = [event async for event in result.stream_events()]
    assert len(events) > 5
    assert result.final_output == SAID


async def with_tools(kind: Any) -> None:
    result = await Runner.run(agent(kind, tools=[weather]), ASK)
    assert result.final_output == "The tool answered: sunny in sample city"


async def structured(kind: Any) -> None:
    result = await Runner.run(agent(kind, output_type=Weather), ASK)
    assert result.final_output == Weather(city="sample city")


async def chat() -> None:
    await whole(OpenAIChatCompletionsModel)


async def chat_stream() -> None:
    await streamed(OpenAIChatCompletionsModel)


async def chat_tools() -> None:
    await with_tools(OpenAIChatCompletionsModel)


async def chat_structured() -> None:
    await structured(OpenAIChatCompletionsModel)


async def responses() -> None:
    await whole(OpenAIResponsesModel)


async def responses_stream() -> None:
    await streamed(OpenAIResponsesModel)


async def responses_tools() -> None:
    await with_tools(OpenAIResponsesModel)


async def responses_structured() -> None:
    await structured(OpenAIResponsesModel)


async def responses_websocket() -> None:
    await streamed(OpenAIResponsesWSModel)
    await with_tools(OpenAIResponsesWSModel)


def refused(kind: type[Exception], **more: Any) -> Any:
    return failure(lambda: Runner.run_sync(agent(OpenAIResponsesModel, **more), ASK), kind)


def errors_401() -> None:
    refused(openai.AuthenticationError, key=WRONG_KEY)


def errors_404() -> None:
    assert refused(openai.NotFoundError, name=FORBIDDEN_MODEL).code == "model_not_found"


def errors_429() -> None:
    refused(openai.RateLimitError, headers=fault(429))


def errors_400() -> None:
    refused(openai.BadRequestError, headers=fault(400))
    poor = {**NO_BUDGET, "x-session-id": "poor"}
    assert refused(openai.BadRequestError, headers=poor).code == "budget_exhausted"


async def cancel() -> None:
    result = Runner.run_streamed(agent(OpenAIResponsesModel, headers=SLOW), ASK)
    seen = 0
    async for event in result.stream_events():
        if event.type == "raw_response_event":
            seen += 1
        if seen == 8:
            result.cancel()
    assert seen < 20, seen
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
    responses_websocket,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
)
