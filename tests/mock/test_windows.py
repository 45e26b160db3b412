from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest
import yaml

from gateway.dialects.length_error import LengthError, length_error
from gateway.mock import MODEL_WINDOWS, Behaviour

if TYPE_CHECKING:
    from gateway.mock import MockProvider, MockServer
    from tests.mock.conftest import Http, Reply

LONG = [{"role": "user", "content": "one two three four five six"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
#: path -> a body whose input the provider counts as 10 tokens
BODIES: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"model": "m", "messages": LONG},
    "/v1/responses": {"model": "m", "input": LONG},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": LONG},
}


def send(web: Http, path: str, mock: str, **fields: object) -> Reply:
    return web.send("POST", path, {**BODIES[path], **fields}, {"x-mock": mock})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_input_over_the_window_is_refused_and_costs_nothing(
    path: str, stream: bool, web: Http, provider: MockProvider
) -> None:
    assert send(web, path, "window=10", stream=stream).status == 200
    assert provider.billed().input_tokens == 10
    refusal = send(web, path, "window=9", stream=stream)
    assert refusal.status == 400
    assert length_error(400, refusal.body) == LengthError(9, 10, of_input=path == "/v1/responses")
    assert (provider.billed().calls, provider.calls[-1].status, provider.calls[-1].billed) == (1, 400, None)


def test_each_api_has_its_own_error_message(web: Http) -> None:
    chat, response, message = (send(web, path, "window=9") for path in BODIES)
    assert chat.json == {
        "error": {
            "message": "This model's maximum context length is 9 tokens. However, your messages resulted in 10 tokens. "
            "Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert response.json == {
        "error": {
            "message": "Input tokens exceed the configured limit of 9 tokens. Your messages resulted in 10 tokens. Please "
            "reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "input",
            "code": "context_length_exceeded",
        }
    }
    assert message.json["type"] == "error"
    assert message.json["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 10 tokens > 9 maximum",
    }


def test_sdks_recognize_the_error(server: MockServer, provider: MockProvider) -> None:
    provider.behaviour = Behaviour(window=1)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "context_length_exceeded"
    with (
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as other,
        pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5 tokens > 1 maximum"),
    ):
        other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])


def test_everything_that_is_billed_as_input_counts(web: Http) -> None:
    tool = web.chat("window=1", tools=[TOOL])
    assert length_error(400, tool.body) == LengthError(1, web.chat("", tools=[TOOL]).json["usage"]["prompt_tokens"])
    assert "in the functions). Please reduce the length of the messages or functions." in tool.json["error"]["message"]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b c"}'}}]
    turns: list[dict[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "one two"},
    ]
    counts = [web.chat("", messages=turns[:end]).json["usage"]["prompt_tokens"] for end in range(1, len(turns) + 1)]
    assert counts == sorted(set(counts))
    assert web.chat(f"window={counts[-1]}", messages=turns).status == 200
    assert web.chat(f"window={counts[-1] - 1}", messages=turns).status == 400
    for path, field in (("/v1/responses", "instructions"), ("/v1/messages", "system")):
        assert send(web, path, "window=10").status == 200
        assert send(web, path, "window=10", **{field: "be brief"}).status == 400


def test_fixed_usage_does_not_change_the_window_check(web: Http) -> None:
    assert web.chat("window=9;tokens=10/1").status == 200
    assert web.chat("window=1;tokens=0/1").status == 400


def test_a_refused_prompt_is_not_cached(web: Http) -> None:
    messages = [{"role": "user", "content": "word " * 100}]
    assert web.chat("window=9", messages=messages).status == 400
    details = web.chat("", messages=messages).json["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 0


def test_counting_is_never_refused(web: Http) -> None:
    for path, key in (("/v1/responses", "input"), ("/v1/messages", "messages")):
        suffix = "/input_tokens" if key == "input" else "/count_tokens"
        answer = web.send("POST", path + suffix, {"model": "m", key: LONG}, {"x-mock": "window=1"})
        assert (answer.status, answer.json["input_tokens"]) == (200, 10)


@pytest.mark.parametrize("path", BODIES)
def test_only_listed_models_have_a_window(path: str, web: Http, provider: MockProvider) -> None:
    key = "input" if path == "/v1/responses" else "messages"

    def ask(model: str, words: int, mock: str = "") -> int:
        # A message has 4 tokens in addition to its words.
        body = {**BODIES[path], "model": model, key: [{"role": "user", "content": "w " * (words - 4)}]}
        return web.send("POST", path, body, {"x-mock": mock}).status

    assert ask("mock-small", 130_000) == 200
    provider.windows = MODEL_WINDOWS
    for model, window in MODEL_WINDOWS.items():
        assert (ask(model, window), ask(model, window + 1)) == (200, 400)
        assert ask(model, window + 1, f"window={window + 1}") == 200
    assert ask("m", 130_000) == 200


def test_windows_equal_those_in_the_model_catalog() -> None:
    known = yaml.safe_load((Path(__file__).parents[2] / "config" / "models.yaml").read_text("utf-8"))
    assert {name: known[f"mock/{name}"]["window"] for name in MODEL_WINDOWS} == MODEL_WINDOWS
