"""Check LangChain's ChatOpenAI and OpenAIEmbeddings. Environment: langchain-openai."""

from __future__ import annotations

from typing import Any

import openai
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MODEL,
    NO_BUDGET,
    SLOW,
    TOTALS,
    WRONG_KEY,
    check_totals,
    failure,
    fault,
    run,
    settled,
)
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr


class Weather(BaseModel):
    """The weather of a city."""

    city: str


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(**settings: Any) -> ChatOpenAI:
    headers = {"x-session-id": "langchain", **settings.pop("headers", {})}
    defaults = {"model": MODEL, "api_key": KEY, "max_retries": 0, "include_response_headers": True}
    return ChatOpenAI(base_url=f"{GATEWAY}/v1", default_headers=headers, **{**defaults, **settings})


ASK = "What is the weather?"
SAID = "You said: What is the weather?"


def chat() -> None:
    answer = model().invoke(ASK)
    assert answer.text == SAID
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] > 0


def chat_stream() -> None:
    chunks = list(model(stream_usage=True).stream(ASK))
    assert "".join(chunk.text for chunk in chunks) == SAID
    assert any(chunk.usage_metadata for chunk in chunks)


async def chat_async() -> None:
    assert (await model().ainvoke(ASK)).text == SAID


def round_trip(bound: Any) -> None:
    question = HumanMessage(ASK)
    first = bound.invoke([question])
    (call,) = first.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert bound.invoke([question, first, result]).text == "The tool answered: sunny in sample city"


def chat_tools() -> None:
    round_trip(model().bind_tools([weather]))


def chat_structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert model().with_structured_output(Weather, method=method).invoke(ASK) == Weather(city="sample city")


def responses() -> None:
    assert model(use_responses_api=True).invoke(ASK).text == SAID


def responses_stream() -> None:
    assert "".join(chunk.text for chunk in model(use_responses_api=True).stream(ASK)) == SAID


def responses_tools() -> None:
    round_trip(model(use_responses_api=True).bind_tools([weather]))


def embeddings() -> None:
    embedder = OpenAIEmbeddings(
        model="mock-embedding", api_key=SecretStr(KEY), base_url=f"{GATEWAY}/v1", check_embedding_ctx_length=False
    )
    assert [len(row) for row in embedder.embed_documents(["one", "two"])] == [64, 64]


def headers() -> None:
    check_totals(model().invoke(ASK).response_metadata["headers"][TOTALS])


def errors_401() -> None:
    failure(lambda: model(api_key=WRONG_KEY).invoke(ASK), openai.AuthenticationError)


def errors_404() -> None:
    error = failure(lambda: model(model=FORBIDDEN_MODEL).invoke(ASK), openai.NotFoundError)
    assert error.code == "model_not_found"


def errors_429() -> None:
    failure(lambda: model(headers=fault(429)).invoke(ASK), openai.RateLimitError)


def errors_400() -> None:
    failure(lambda: model(headers=fault(400)).invoke(ASK), openai.BadRequestError)
    poor = {**NO_BUDGET, "x-session-id": "poor"}
    error = failure(lambda: model(headers=poor).invoke(ASK), openai.BadRequestError)
    assert error.code == "budget_exhausted"


def cancel() -> None:
    stream: Any = model(headers=SLOW).stream(ASK)
    next(stream)
    next(stream)
    stream.close()
    settled()


run(
    chat,
    chat_stream,
    chat_async,
    chat_tools,
    chat_structured,
    responses,
    responses_stream,
    responses_tools,
    embeddings,
    headers,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
)
