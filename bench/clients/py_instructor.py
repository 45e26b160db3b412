"""Check instructor: structured output with retries, on chat and responses. Environment: instructor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import instructor
import openai
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MODEL,
    NO_BUDGET,
    SLOW,
    WRONG_KEY,
    fault,
    run,
    settled,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "What is the weather?"}]


class Weather(BaseModel):
    city: str


def client(
    mode: instructor.Mode = instructor.Mode.TOOLS, key: str = KEY, headers: Mapping[str, str] = MappingProxyType({})
) -> Any:
    named = {"x-session-id": "instructor", **headers}
    raw = OpenAI(base_url=f"{GATEWAY}/v1", api_key=key, max_retries=0, default_headers=named)
    return instructor.from_openai(raw, mode=mode)


def create(of: Any, model: str = MODEL) -> Any:
    return of.create(model=model, messages=ASK, response_model=Weather, max_retries=1)


def chat_tools() -> None:
    weather, completion = client().create_with_completion(model=MODEL, messages=ASK, response_model=Weather)
    assert weather.city == "sample city"
    assert completion.usage.total_tokens > 0


def chat_structured() -> None:
    assert create(client(instructor.Mode.JSON_SCHEMA)).city == "sample city"


def chat_stream() -> None:
    partial = list(client().create_partial(model=MODEL, messages=ASK, response_model=Weather))
    assert partial[-1].city == "sample city"
    assert len(partial) > 1


def responses_tools() -> None:
    assert create(client(instructor.Mode.RESPONSES_TOOLS)).city == "sample city"


def refusal(kind: type[Exception], of: Any, model: str = MODEL) -> Any:
    """Return the SDK's exception, which instructor wraps after its own retries."""
    try:
        result = create(of, model)
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, kind):
            found = found.__cause__
        if found is not None:
            return found
        raise
    raise AssertionError(f"no {kind.__name__} but {result!r}")


def errors_401() -> None:
    refusal(openai.AuthenticationError, client(key=WRONG_KEY))


def errors_404() -> None:
    assert refusal(openai.NotFoundError, client(), FORBIDDEN_MODEL).code == "model_not_found"


def errors_429() -> None:
    refusal(openai.RateLimitError, client(headers=fault(429)))


def errors_400() -> None:
    refusal(openai.BadRequestError, client(headers=fault(400)))
    poor = client(headers={**NO_BUDGET, "x-session-id": "poor"})
    assert refusal(openai.BadRequestError, poor).code == "budget_exhausted"


async def cancel() -> None:
    """Cancel the task, because create_partial returns its list only after the stream."""
    named = {"x-session-id": "instructor", **SLOW}
    raw = AsyncOpenAI(base_url=f"{GATEWAY}/v1", api_key=KEY, max_retries=0, default_headers=named)
    partial = instructor.from_openai(raw).create_partial(model=MODEL, messages=ASK, response_model=Weather)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            async for _ in partial:
                pass
            raise AssertionError("the stream was over before it could be cancelled")
    settled()


run(chat_tools, chat_structured, chat_stream, responses_tools, errors_401, errors_404, errors_429, errors_400, cancel)
