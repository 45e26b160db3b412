"""Check the official anthropic SDK for Python. Environment: anthropic."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MISSING_MODEL,
    MODEL,
    NO_BUDGET,
    ONCE_KEY,
    SLOW,
    TOTALS,
    WEATHER_SCHEMA,
    WRONG_KEY,
    check_totals,
    failure,
    fault,
    run,
    settled,
)
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


def client(key: str = KEY) -> Anthropic:
    return Anthropic(base_url=GATEWAY, api_key=key, max_retries=0, default_headers={"x-session-id": "anthropic-python"})


ASK: Any = [{"role": "user", "content": "What is the weather?"}]
TOOL: Any = {"name": "weather", "input_schema": WEATHER_SCHEMA}
CALL: Any = {"model": MODEL, "max_tokens": 100, "messages": ASK}


def messages() -> None:
    answer = client().messages.create(**CALL)
    assert answer.content[0].text == "You said: What is the weather?"
    assert answer.usage.input_tokens > 0


def messages_stream() -> None:
    with client().messages.stream(**CALL) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "You said: What is the weather?"
    assert final.usage.output_tokens > 0


def messages_tools() -> None:
    first = client().messages.create(**CALL, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    call = first.content[0]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
    follow: Any = {**CALL, "messages": [*ASK, {"role": "assistant", "content": first.content}, result]}
    assert client().messages.create(**follow, tools=[TOOL]).content[0].text == "The tool answered: sunny"


def messages_tools_stream() -> None:
    with client().messages.stream(**CALL, tools=[TOOL]) as stream:
        call = stream.get_final_message().content[0]
    assert call.type == "tool_use"
    assert call.input == {"city": "sample city"}


def messages_structured() -> None:
    answer = client().messages.parse(**CALL, output_format=Weather)
    assert answer.parsed_output == Weather(city="sample city")


def count_tokens() -> None:
    assert client().messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 0


def models() -> None:
    assert MODEL in [model.id for model in client().models.list()]


def headers() -> None:
    raw = client().messages.with_raw_response.create(**CALL)
    check_totals(raw.headers[TOTALS])
    assert raw.headers["x-session-id"] == "anthropic-python"
    with client().messages.with_streaming_response.create(**CALL, stream=True) as stream:
        check_totals(stream.headers[TOTALS])


def errors_401() -> None:
    failure(lambda: client(WRONG_KEY).messages.create(**CALL), anthropic.AuthenticationError)


def errors_404() -> None:
    for model in (FORBIDDEN_MODEL, MISSING_MODEL):
        error = failure(lambda: client().messages.create(**{**CALL, "model": model}), anthropic.NotFoundError)  # noqa: B023
        assert error.body["error"]["type"] == "not_found_error"


def errors_429() -> None:
    kind = anthropic.RateLimitError
    failure(lambda: client().messages.create(**CALL, extra_headers=fault(429)), kind)
    client(ONCE_KEY).messages.create(**CALL)
    error = failure(lambda: client(ONCE_KEY).messages.create(**CALL), kind)
    assert error.body["error"]["type"] == "rate_limit_error"
    assert int(error.response.headers["retry-after"]) > 0


def errors_400() -> None:
    kind = anthropic.BadRequestError
    failure(lambda: client().messages.create(**CALL, extra_headers=fault(400)), kind)
    poor = {**NO_BUDGET, "x-session-id": "poor"}
    error = failure(lambda: client().messages.create(**CALL, extra_headers=poor), kind)
    assert error.body["error"]["code"] == "budget_exhausted"


def cancel() -> None:
    with client().messages.create(**CALL, stream=True, extra_headers=SLOW) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                break
    settled()


run(
    messages,
    messages_stream,
    messages_tools,
    messages_tools_stream,
    messages_structured,
    count_tokens,
    models,
    headers,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
)
