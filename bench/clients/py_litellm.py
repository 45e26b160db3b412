"""Check litellm as a client. Environment: litellm."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import (
    FORBIDDEN_MODEL,
    GATEWAY,
    KEY,
    MODEL,
    NO_BUDGET,
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
from litellm.exceptions import AuthenticationError, BadRequestError, NotFoundError, RateLimitError

ASK: Any = [{"role": "user", "content": "What is the weather?"}]
SAID = "You said: What is the weather?"
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER_SCHEMA}}
NAMED = {"x-session-id": "litellm"}


def call(**fields: Any) -> Any:
    headers = {**NAMED, **fields.pop("headers", {})}
    defaults = {"model": f"openai/{MODEL}", "messages": ASK, "api_base": f"{GATEWAY}/v1", "api_key": KEY}
    return litellm.completion(**{**defaults, **fields}, max_retries=0, extra_headers=headers)


def chat() -> None:
    answer = call()
    assert answer.choices[0].message.content == SAID
    assert answer.usage.total_tokens > 0


def chat_stream() -> None:
    chunks = list(call(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def chat_tools() -> None:
    first = call(tools=[TOOL]).choices[0].message
    (asked,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": asked.id, "content": "sunny"}
    second = call(tools=[TOOL], messages=[*ASK, first.model_dump(exclude_none=True), result])
    assert second.choices[0].message.content == "The tool answered: sunny"


def chat_structured() -> None:
    schema = {"name": "weather", "schema": WEATHER_SCHEMA, "strict": True}
    answer = call(response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(answer.choices[0].message.content) == {"city": "sample city"}


def respond(**fields: Any) -> Any:
    return litellm.responses(
        model=f"openai/{MODEL}", input=ASK, api_base=f"{GATEWAY}/v1", api_key=KEY, extra_headers=NAMED, **fields
    )


def responses() -> None:
    assert respond().output[0].content[0].text == SAID


def responses_stream() -> None:
    pieces = [event.delta for event in respond(stream=True) if event.type == "response.output_text.delta"]
    assert "".join(pieces) == SAID


def messages() -> None:
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", messages=ASK, api_base=GATEWAY, api_key=KEY, max_tokens=100, extra_headers=NAMED
    )
    assert answer.choices[0].message.content == SAID


def messages_stream() -> None:
    chunks = litellm.completion(
        model=f"anthropic/{MODEL}",
        messages=ASK,
        api_base=GATEWAY,
        api_key=KEY,
        max_tokens=100,
        extra_headers=NAMED,
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID


def embeddings() -> None:
    answer = litellm.embedding(
        model="openai/mock-embedding", input=["one", "two"], api_base=f"{GATEWAY}/v1", api_key=KEY
    )
    assert [len(row["embedding"]) for row in answer.data] == [64, 64]


def headers() -> None:
    check_totals(call()._hidden_params["additional_headers"][f"llm_provider-{TOTALS}"])  # noqa: SLF001


def errors_401() -> None:
    failure(lambda: call(api_key=WRONG_KEY), AuthenticationError)


def errors_404() -> None:
    failure(lambda: call(model=f"openai/{FORBIDDEN_MODEL}"), NotFoundError)


def errors_429() -> None:
    failure(lambda: call(headers=fault(429)), RateLimitError)


def errors_400() -> None:
    failure(lambda: call(headers=fault(400)), BadRequestError)
    error = failure(lambda: call(headers={**NO_BUDGET, "x-session-id": "poor"}), BadRequestError)
    assert "tokens" in str(error)


def cancel() -> None:
    stream = call(stream=True, headers=SLOW)
    next(stream)
    next(stream)
    stream.completion_stream.close()
    settled()


run(
    chat,
    chat_stream,
    chat_tools,
    chat_structured,
    responses,
    responses_stream,
    messages,
    messages_stream,
    embeddings,
    headers,
    errors_401,
    errors_404,
    errors_429,
    errors_400,
    cancel,
)
