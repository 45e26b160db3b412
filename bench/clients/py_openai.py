"""Check the official openai SDK for Python. Environment: openai."""

from __future__ import annotations

from typing import Any

import openai
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MISSING_MODEL,
    MODEL,
    NO_BUDGET,
    ONCE_KEY,
    SLOW,
    SLOW_CHUNKS,
    TOTALS,
    WEATHER_SCHEMA,
    WRONG_KEY,
    check_totals,
    failure,
    fault,
    run,
    settled,
)
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: str


def client(key: str = KEY) -> OpenAI:
    return OpenAI(
        base_url=f"{GATEWAY}/v1", api_key=key, max_retries=0, default_headers={"x-session-id": "openai-python"}
    )


ASK: Any = [{"role": "user", "content": "What is the weather?"}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": WEATHER_SCHEMA, "strict": True}


def chat() -> None:
    answer = client().chat.completions.create(model=MODEL, messages=ASK)
    assert answer.choices[0].message.content == "You said: What is the weather?"
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0


def chat_stream() -> None:
    chunks = list(
        client().chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "You said: What is the weather?"
    assert chunks[-1].usage is not None


def responses() -> None:
    answer = client().responses.create(model=MODEL, input="What is the weather?")
    assert answer.output_text == "You said: What is the weather?"
    assert answer.usage is not None


def responses_stream() -> None:
    with client().responses.stream(model=MODEL, input="What is the weather?") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "You said: What is the weather?"
    assert final.usage is not None


def chat_tools() -> None:
    first = client().chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL]).choices[0].message
    assert first.tool_calls
    call: Any = first.tool_calls[0]
    assert call.function.name == "weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK, first.model_dump(exclude_none=True), result]
    second = client().chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "The tool answered: sunny"


def chat_tools_stream() -> None:
    with client().chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.arguments == '{"city":"sample city"}'


def responses_tools() -> None:
    first = client().responses.create(model=MODEL, input=ASK, tools=[RESPONSES_TOOL])
    call = first.output[0]
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items: Any = [*ASK, call.model_dump(exclude_none=True), result]
    second = client().responses.create(model=MODEL, input=items, tools=[RESPONSES_TOOL])
    assert second.output_text == "The tool answered: sunny"


def responses_background() -> None:
    answer = client().responses.create(model=MODEL, input="What is the weather?", background=True)
    assert answer.status == "queued"
    while answer.status in {"queued", "in_progress"}:
        raw = client().responses.with_raw_response.retrieve(answer.id)
        answer = raw.parse()
    assert answer.output_text == "You said: What is the weather?"
    assert raw.headers["x-session-usage-source"] == "provider"


def responses_websocket() -> None:
    """Check two turns with a tool; only the connection remembers the first response."""
    fields: Any = {"model": MODEL, "tools": [RESPONSES_TOOL], "store": False}
    with client().responses.connect(extra_headers={"x-session-id": "openai-python"}) as connection:

        def ended(**more: Any) -> Any:
            connection.response.create(**fields, **more)
            return next(event for event in connection if event.type in ("response.completed", "error"))

        first = ended(input=ASK).response
        result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
        second = ended(input=[result], previous_response_id=first.id)
        assert second.response.output_text == "The tool answered: sunny"
        check_totals(second.to_dict()["headers"][TOTALS])
    settled()


def chat_structured() -> None:
    answer = client().chat.completions.parse(model=MODEL, messages=ASK, response_format=Weather)
    assert answer.choices[0].message.parsed == Weather(city="sample city")


def responses_structured() -> None:
    answer = client().responses.parse(model=MODEL, input=ASK, text_format=Weather)
    assert answer.output_parsed == Weather(city="sample city")


def completions() -> None:
    answer = client().completions.create(model=MODEL, prompt="Once")
    assert answer.choices[0].text
    chunks = list(client().completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == answer.choices[0].text


def embeddings() -> None:
    answer = client().embeddings.create(model="mock-embedding", input=["one", "two"])
    assert [len(row.embedding) for row in answer.data] == [64, 64]
    assert answer.usage.total_tokens > 0


def models() -> None:
    assert MODEL in [model.id for model in client().models.list()]


def headers() -> None:
    raw = client().chat.completions.with_raw_response.create(model=MODEL, messages=ASK)
    check_totals(raw.headers[TOTALS])
    assert raw.headers["x-session-id"] == "openai-python"
    assert raw.parse().choices
    check_totals(client().responses.with_raw_response.create(model=MODEL, input="hi").headers[TOTALS])
    embedded = client().embeddings.with_raw_response.create(model="mock-embedding", input="hi")
    check_totals(embedded.headers[TOTALS])
    with client().chat.completions.with_streaming_response.create(model=MODEL, messages=ASK, stream=True) as stream:
        check_totals(stream.headers[TOTALS])


def errors_401() -> None:
    error = failure(
        lambda: client(WRONG_KEY).chat.completions.create(model=MODEL, messages=ASK), openai.AuthenticationError
    )
    assert error.code == "invalid_api_key"
    error = failure(lambda: client(WRONG_KEY).responses.create(model=MODEL, input="hi"), openai.AuthenticationError)
    assert error.code == "invalid_api_key"


def errors_404() -> None:
    for model in (FORBIDDEN_MODEL, MISSING_MODEL):
        error = failure(lambda: client().chat.completions.create(model=model, messages=ASK), openai.NotFoundError)  # noqa: B023
        assert error.code == "model_not_found"
        error = failure(lambda: client().responses.create(model=model, input="hi"), openai.NotFoundError)  # noqa: B023
        assert error.code == "model_not_found"


def errors_429() -> None:
    kind = openai.RateLimitError
    failure(lambda: client().chat.completions.create(model=MODEL, messages=ASK, extra_headers=fault(429)), kind)
    client(ONCE_KEY).chat.completions.create(model=MODEL, messages=ASK)
    error = failure(lambda: client(ONCE_KEY).chat.completions.create(model=MODEL, messages=ASK), kind)
    assert error.code == "rate_limit_exceeded"
    assert int(error.response.headers["retry-after"]) > 0


def errors_400() -> None:
    kind = openai.BadRequestError
    failure(lambda: client().chat.completions.create(model=MODEL, messages=ASK, extra_headers=fault(400)), kind)
    poor = {**NO_BUDGET, "x-session-id": "poor"}
    error = failure(lambda: client().chat.completions.create(model=MODEL, messages=ASK, extra_headers=poor), kind)
    assert error.code == "budget_exhausted"
    error = failure(lambda: client().responses.create(model=MODEL, input="hi", extra_headers=poor), kind)
    assert error.code == "budget_exhausted"


def cancel() -> None:
    with client().chat.completions.create(model=MODEL, messages=ASK, stream=True, extra_headers=SLOW) as stream:
        seen = [next(stream) for _ in range(4)]
    assert len(seen) < SLOW_CHUNKS
    settled()


def cancel_responses() -> None:
    with client().responses.create(model=MODEL, input="hi", stream=True, extra_headers=SLOW) as stream:
        seen = [next(stream) for _ in range(8)]
    assert seen[-1].type == "response.output_text.delta"
    settled()


run(
    chat,
    chat_stream,
    chat_tools,
    chat_tools_stream,
    chat_structured,
    responses,
    responses_stream,
    responses_tools,
    responses_background,
    responses_websocket,
    responses_structured,
    completions,
    embeddings,
    models,
    headers,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
    cancel_responses,
)
