"""Test refusals of Claude models, and the fallback models of a request."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, Billed, MockProvider, Turn
from tests.mock.conftest import Http, Reply
from tests.support.thinking import BETA

PATH = "/v1/messages"
FIRST, SECOND = "server-side-fallback-2026-06-01", "server-side-fallback-2026-07-01"
MODEL = "claude-fable-5-1"
OPUS = {"model": "claude-opus-4-8"}

Json = dict[str, Any]


class Caller:
    def __init__(self, web: Http) -> None:
        self._web = web
        self.betas = [SECOND, BETA]
        self.messages: list[Any] = [{"role": "user", "content": "hi"}]

    def send(self, model: str = MODEL, **fields: object) -> Reply:
        body = {"model": model, "max_tokens": 500, "messages": self.messages, **fields}
        return self._web.send("POST", PATH, body, {"anthropic-beta": ",".join(self.betas)})

    def take(self, content: list[Json]) -> None:
        self.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]


@pytest.fixture
def caller(web: Http, provider: MockProvider) -> Caller:
    provider.claude = CLAUDE_RULES
    return Caller(web)


def refused(answer: Reply) -> str:
    assert answer.status == 400, answer.json
    return str(answer.json["error"]["message"])


@pytest.mark.parametrize("fields", [{}, {"fallbacks": "default"}], ids=["not asked for", "a model without them"])
def test_a_refusal_without_a_fallback_stays_one(fields: Json, caller: Caller, provider: MockProvider) -> None:
    model = "claude-sonnet-5-5" if fields else MODEL
    provider.push(Turn(refusals=("cyber",)))
    answer = caller.send(model, **fields).json
    assert (answer["content"], answer["stop_reason"]) == ([], "refusal")
    assert answer["stop_details"] == {"type": "refusal", "category": "cyber", "explanation": None}
    assert answer["usage"]["input_tokens"] == 5
    assert provider.billed() == Billed()


@pytest.mark.parametrize("category", ["bio", "frontier_llm", "reasoning_extraction"])
def test_refusals_of_some_categories_are_billed(category: str, caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(refusals=(category,)))
    caller.send()
    assert provider.billed() == Billed(5, 0, 5, 1)


@pytest.mark.parametrize("fallbacks", ["default", [OPUS], [OPUS, {"model": "claude-opus-5"}]])
def test_the_next_model_answers_after_a_refusal(fallbacks: object, caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(text="yes", thinking=("I think",), refusals=("bio",)))
    answer = caller.send(fallbacks=fallbacks, thinking={"type": "adaptive"}).json
    mark, thinking, text = answer["content"]
    assert mark == {
        "type": "fallback", "from": {"model": MODEL}, "to": OPUS, "trigger": {"type": "refusal", "category": "bio"},
    }  # fmt: skip
    assert (thinking["type"], text["text"], answer["model"]) == ("thinking", "yes", "claude-opus-4-8")
    assert (answer["stop_reason"], "stop_details" in answer) == ("end_turn", False)
    first, second = answer["usage"]["iterations"]
    assert (first["type"], first["model"], first["output_tokens"]) == ("message", MODEL, 0)
    assert (second["type"], second["model"], second["output_tokens"]) == ("fallback_message", "claude-opus-4-8", 3)
    assert answer["usage"]["output_tokens"] == 3
    assert provider.billed_by_model() == {MODEL: Billed(5, 0, 5, 1), "claude-opus-4-8": Billed(5, 3, 8, 1)}
    assert provider.billed() == Billed(10, 3, 13, 1)


def test_if_all_models_refuse_the_last_refusal_is_the_response(caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(refusals=("cyber", None)))
    answer = caller.send(fallbacks=[OPUS]).json
    assert (answer["model"], answer["stop_reason"]) == ("claude-opus-4-8", "refusal")
    assert [one["type"] for one in answer["usage"]["iterations"]] == ["message", "fallback_message"]
    assert provider.billed() == Billed()


def test_a_stream_names_the_model_that_answers(caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(text="yes", refusals=("cyber",)))
    events = caller.send(fallbacks=[OPUS], stream=True).events
    assert events[0]["message"]["model"] == "claude-opus-4-8"
    assert events[1]["content_block"]["type"] == "fallback"
    assert [event["type"] for event in events[1:5]] == [
        "content_block_start", "ping", "content_block_stop", "content_block_start",
    ]  # fmt: skip
    assert [one["type"] for one in events[-2]["usage"]["iterations"]] == ["message", "fallback_message"]


def blocks_of(events: list[Json]) -> list[Json]:
    """Return the content blocks of a stream, built from its deltas."""
    found = [dict(event["content_block"]) for event in events if event["type"] == "content_block_start"]
    for event in events:
        if event["type"] == "content_block_delta":
            key, text = next((key, text) for key, text in event["delta"].items() if key != "type")
            found[event["index"]][key] = found[event["index"]].get(key, "") + text
    return found


def test_a_stream_goes_on_after_a_refusal_in_the_middle(caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(text="more", thinking=("I think",), refused_text="some words", refusals=("cyber",)))
    events = caller.send(fallbacks=[{"model": "claude-opus-5"}], stream=True).events
    assert events[0]["message"]["model"] == MODEL
    content = blocks_of(events)
    assert [block["type"] for block in content] == ["text", "fallback", "thinking", "text"]
    assert content[0]["text"] == "some words"
    assert events[-2]["input_transformations"] == []
    assert provider.billed_by_model() == {MODEL: Billed(5, 2, 7, 1), "claude-opus-5": Billed(5, 3, 8, 1)}
    # The thinking was created after that text. It stays valid with the text and the fallback block before it.
    caller.take(content)
    assert caller.send().json["input_transformations"] == []
    caller.messages[1]["content"] = content[1:]
    assert "bound to a different conversation" in refused(caller.send())


def test_a_whole_response_begins_again_after_a_refusal_in_the_middle(caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(text="more", refused_text="some words", refusals=("cyber",)))
    answer = caller.send(fallbacks=[{"model": "claude-opus-4-8", "thinking": {"type": "disabled"}}]).json
    assert [block["type"] for block in answer["content"]] == ["fallback", "text"]
    assert provider.billed_by_model()[MODEL] == Billed(5, 2, 7, 1)


def test_thinking_of_the_model_that_refuses_is_dropped_for_the_other(caller: Caller, provider: MockProvider) -> None:
    caller.take(caller.send().json["content"])
    provider.push(Turn(text="yes", thinking=("I think",), refusals=("cyber",)))
    answer = caller.send(fallbacks=[OPUS]).json
    (dropped,) = answer["input_transformations"]
    assert (dropped["path"], dropped["reason"]) == ("messages.1.content.0", "model_binding_mismatch")
    first, second = answer["usage"]["iterations"]
    assert second["input_tokens"] < first["input_tokens"]
    # The first model reads the thinking of the other model.
    caller.take(answer["content"])
    assert caller.send().json["input_transformations"] == []


def test_thinking_before_a_fallback_block_is_not_read(caller: Caller, provider: MockProvider) -> None:
    provider.push(Turn(text="no", thinking=("hm",)), Turn(text="yes", thinking=("I think",), refusals=("cyber",)))
    declined = caller.send().json["content"][0]
    answer = caller.send(fallbacks=[{"model": "claude-opus-5"}]).json
    caller.take([declined, *answer["content"]])
    assert caller.send().json["input_transformations"] == []
    caller.messages[1]["content"].pop(1)
    assert caller.send().status == 400


LISTS: list[tuple[object, str]] = [
    ([], "fallbacks: "),
    ([OPUS] * 4, "fallbacks: "),
    ([OPUS, OPUS], "listed more than once"),
    ([{"model": MODEL}], "listed more than once"),
    ([{"model": "claude-sonnet-5-5"}], "is not a permitted fallback of 'claude-fable-5-1'"),
    ([{"model": "claude-opus-4-7"}], "is not a permitted fallback"),
    ([{"model": "gpt-6"}], "is not a permitted fallback"),
    ([{**OPUS, "tools": []}], "fallbacks: "),
    ([{**OPUS, "speed": "slow"}], "fallbacks: "),
    ([{"max_tokens": 9}], "fallbacks: "),
    ([{**OPUS, "thinking": {"type": "between_tools"}}], '"thinking.type.between_tools" is not supported'),
    ("other", "fallbacks: Input should be a valid list"),
]


@pytest.mark.parametrize(("fallbacks", "words"), LISTS)
def test_fallbacks_are_checked(fallbacks: object, words: str, caller: Caller) -> None:
    assert words in refused(caller.send(fallbacks=fallbacks))


def test_a_model_without_fallbacks_refuses_a_list(caller: Caller) -> None:
    for model in ("claude-sonnet-5", "claude-haiku-5-5"):
        assert refused(caller.send(model, fallbacks=[OPUS])) == f"'{model}' does not support the `fallbacks` parameter"


def test_the_first_version_of_the_beta_takes_a_plain_list_only(caller: Caller) -> None:
    caller.betas = [FIRST]
    assert caller.send(fallbacks=[{**OPUS, "max_tokens": 9, "thinking": {"type": "disabled"}}]).status == 200
    assert refused(caller.send(fallbacks="default")) == "fallbacks: Input should be a valid list"
    assert refused(caller.send(fallbacks=[{**OPUS, "speed": "fast"}])) == (
        "fallbacks.0.speed: Extra inputs are not permitted"
    )
    caller.betas = []
    assert refused(caller.send(fallbacks=[OPUS])) == "fallbacks: Extra inputs are not permitted"


@pytest.mark.parametrize(
    ("entry", "fields", "kinds"),
    [
        ({}, {}, ["fallback", "text"]),
        ({}, {"thinking": {"type": "adaptive"}}, ["fallback", "thinking", "text"]),
        ({"thinking": {"type": "adaptive"}}, {}, ["fallback", "thinking", "text"]),
        ({"thinking": None}, {"thinking": {"type": "adaptive"}}, ["fallback", "text"]),
    ],
)
def test_an_attempt_has_its_own_thinking_or_that_of_the_request(
    entry: Json, fields: Json, kinds: list[str], caller: Caller, provider: MockProvider
) -> None:
    provider.push(Turn(text="yes", refusals=("cyber",)))
    answer = caller.send(fallbacks=[{**OPUS, **entry}], **fields).json
    assert [block["type"] for block in answer["content"]] == kinds


def test_an_attempt_has_its_own_limit_and_output_settings(caller: Caller, provider: MockProvider) -> None:
    caller.betas.append("task-budgets-2026-03-13")
    small = {"output_config": {"task_budget": {"type": "tokens", "total": 9}}}
    assert "must be at least 20,000" in refused(caller.send(fallbacks=[{**OPUS, **small}]))
    provider.push(Turn(text="one two three", refusals=("cyber",)))
    answer = caller.send(fallbacks=[{**OPUS, "max_tokens": 2}]).json
    assert (answer["content"][-1]["text"], answer["stop_reason"]) == ("one two", "max_tokens")


def test_a_provider_without_rules_refuses_too(web: Http, provider: MockProvider) -> None:
    provider.push(Turn(refusals=(None,)))
    answer = Caller(web).send("mock-small").json
    assert (answer["stop_reason"], answer["content"], provider.billed()) == ("refusal", [], Billed())
