"""Test which requests to Claude models are refused, apart from the thinking that they send back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider
from gateway.mock.claude_rules import rules_of
from tests.mock.conftest import Http, Reply
from tests.support.thinking import BETA, without_thinking

PATH = "/v1/messages"
TOOL = {"name": "lookup", "input_schema": {"type": "object", "properties": {}}}
NEW = ("fable-5-2", "mythos-5-2", "mythos-5-1", "fable-5-1", "opus-5-5", "sonnet-5-5", "haiku-5-5")
ADVICE = ' is not supported for this model. Use "thinking.type.adaptive" and "output_config.effort" to control thinking behavior.'
PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."
EXTRA = ": Extra inputs are not permitted"


@pytest.fixture
def claude(web: Http, provider: MockProvider) -> Http:
    provider.claude = CLAUDE_RULES
    return web


def send(web: Http, model: str, path: str = PATH, *, headers: dict[str, str] | None = None, **fields: object) -> Reply:
    body = {"model": f"claude-{model}", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **fields}
    return web.send("POST", path, {"max_tokens": 100, **body}, headers)


def outcome(answer: Reply) -> Any:
    """Return the error's text, or the types of the content blocks."""
    return (
        [block["type"] for block in answer.json["content"]] if answer.status == 200 else answer.json["error"]["message"]
    )


FORCED = 'tool_choice: type "tool" and "any" are not supported for this model.'
BUSY = "Thinking may not be enabled when tool_choice forces tool use."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "lookup"}])
@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        *((model, FORCED) for model in NEW[:-1]),
        *((model, ["tool_use"]) for model in ("haiku-5-5", "opus-5", "sonnet-5", "fable-5", "opus-4-8")),
    ],
)
def test_forcing_a_tool(model: str, choice: dict[str, str], wanted: Any, claude: Http) -> None:
    assert outcome(send(claude, model, tool_choice=choice)) == wanted
    counted = send(claude, model, f"{PATH}/count_tokens", tool_choice=choice)
    assert (counted.status == 200) == (wanted != FORCED)
    for kind in ("auto", "none"):
        assert send(claude, model, tool_choice={"type": kind}).status == 200


def test_an_older_model_does_not_think_and_call_a_forced_tool(claude: Http) -> None:
    fields: dict[str, Any] = {"tool_choice": {"type": "any"}, "thinking": {"type": "adaptive"}}
    assert outcome(send(claude, "opus-4-8", **fields)) == BUSY
    assert outcome(send(claude, "haiku-5-5", **fields)) == ["tool_use"]


@pytest.mark.parametrize("model", [*NEW, "opus-5", "sonnet-5", "fable-5", "opus-4-8"])
def test_a_response_cannot_be_prefilled(model: str, claude: Http) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "You"}]
    assert outcome(send(claude, model, messages=messages)) == PREFILL
    assert send(claude, model, f"{PATH}/count_tokens", messages=messages).status == 200
    assert send(claude, model, messages=[*messages, {"role": "system", "content": "now"}]).status == 200


def test_an_older_model_takes_a_prefilled_response(claude: Http) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "You"}]
    assert send(claude, "haiku-4-5", messages=messages).status == 200


@pytest.mark.parametrize(
    ("model", "fields", "refused"),
    [
        ("opus-5-5", {"temperature": 1, "top_p": 1}, ""),
        ("opus-5-5", {"temperature": 0.7}, "temperature"),
        ("opus-5-5", {"temperature": 0}, "temperature"),
        ("opus-5-5", {"top_p": 0.9}, "top_p"),
        ("opus-5-5", {"top_k": 40}, "top_k"),
        ("haiku-5-5", {"temperature": 1}, ""),
        ("haiku-5-5", {"top_p": 0.99}, ""),
        ("haiku-5-5", {"top_p": 1}, "top_p"),
        ("haiku-5-5", {"temperature": 0.5}, "temperature"),
        ("haiku-5-5", {"top_k": 1}, "top_k"),
        ("haiku-4-5", {"temperature": 0.5, "top_p": 0.5, "top_k": 3}, ""),
        *((model, {"temperature": 0.5}, "temperature") for model in NEW),
    ],
)
def test_sampling_parameters(model: str, fields: Any, refused: str, claude: Http) -> None:
    answer = send(claude, model, **fields)
    assert answer.status == (400 if refused else 200)
    if refused:
        assert outcome(answer) == f"`{refused}` is deprecated for this model."


def test_haiku_takes_one_sampling_parameter(claude: Http) -> None:
    assert outcome(send(claude, "haiku-5-5", temperature=1, top_p=0.99)) == (
        "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    )


THOUGHT = ["thinking", "tool_use"]
PLAIN = ["tool_use"]
#: model -> result of these values of `thinking.type`: not set, adaptive, enabled, between_tools, disabled
MODES: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    **dict.fromkeys(NEW[:5], (THOUGHT, THOUGHT, 400, 400, 400)),
    "sonnet-5-5": (THOUGHT, THOUGHT, 400, PLAIN, 400),
    "haiku-5-5": (THOUGHT, THOUGHT, 400, 400, PLAIN),
    "opus-5": (THOUGHT, THOUGHT, 400, 400, PLAIN),
    "sonnet-5": (THOUGHT, THOUGHT, 400, 400, PLAIN),
    "fable-5": (THOUGHT, THOUGHT, 400, 400, 400),
    "opus-4-8": (PLAIN, THOUGHT, 400, 400, PLAIN),
    "haiku-4-5": (PLAIN, THOUGHT, THOUGHT, 400, PLAIN),
}


@pytest.mark.parametrize("model", MODES)
def test_the_modes_of_thinking(model: str, claude: Http) -> None:
    for mode, wanted in zip((None, "adaptive", "enabled", "between_tools", "disabled"), MODES[model], strict=True):
        budget = {"budget_tokens": 1024} if mode == "enabled" else {}
        fields: Any = {"thinking": {"type": mode, **budget}} if mode else {}
        found = outcome(send(claude, model, **fields))
        assert found == (f'"thinking.type.{mode}"{ADVICE}' if wanted == 400 else wanted), mode
        counted = send(claude, model, f"{PATH}/count_tokens", **fields)
        assert (counted.status == 400) == (wanted == 400)


@pytest.mark.parametrize(("model", "mode"), [("sonnet-5-5", "between_tools"), ("haiku-5-5", "disabled"), ("opus-5", "disabled")])  # fmt: skip
def test_a_high_effort_needs_thinking(model: str, mode: str, claude: Http) -> None:
    for effort, status in (("low", 200), ("high", 200), ("xhigh", 400), ("max", 400)):
        answer = send(claude, model, thinking={"type": mode}, output_config={"effort": effort})
        assert answer.status == status
        assert send(claude, model, output_config={"effort": effort}).status == 200


def test_between_tools_thinks_after_a_tool_result_only(claude: Http) -> None:
    fields: dict[str, Any] = {"thinking": {"type": "between_tools"}}
    content = send(claude, "sonnet-5-5", **fields).json["content"]
    result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "found"}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    assert outcome(send(claude, "sonnet-5-5", messages=messages, **fields)) == ["thinking", "text"]


BINDING = {"prefix_mismatch_behavior": "drop_block"}


@pytest.mark.parametrize(
    ("model", "thinking", "has_beta", "refused"),
    [
        ("opus-5-5", {"type": "adaptive", "block_binding": BINDING}, True, ""),
        ("opus-5-5", {"type": "adaptive", "block_binding": {}}, True, ""),
        ("opus-5-5", {"type": "adaptive", "block_binding": None}, False, ""),
        ("opus-5-5", {"type": "adaptive", "block_binding": BINDING}, False, f"thinking.adaptive.block_binding{EXTRA}"),
        ("opus-5", {"type": "adaptive", "block_binding": BINDING}, True, ""),
        ("opus-5", {"type": "adaptive", "block_binding": BINDING}, False, f"thinking.adaptive.block_binding{EXTRA}"),
        ("haiku-4-5", {"type": "enabled", "budget_tokens": 1024, "block_binding": BINDING}, True, ""),
        ("haiku-5-5", {"type": "disabled", "block_binding": BINDING}, True, f"thinking.disabled.block_binding{EXTRA}"),
        (
            "sonnet-5-5",
            {"type": "between_tools", "block_binding": BINDING},
            True,
            f"thinking.between_tools.block_binding{EXTRA}",
        ),
        ("sonnet-5-5", {"type": "between_tools", "display": "omitted"}, True, f"thinking.between_tools.display{EXTRA}"),
        ("opus-5-5", {"type": "adaptive", "block_binding": 1}, True, "thinking.adaptive.block_binding: Input should be an object"),
        (
            "opus-5-5",
            {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop"}},
            True,
            "thinking.adaptive.block_binding.prefix_mismatch_behavior: Input should be 'error' or 'drop_block'",
        ),
        ("opus-5-5", {"type": "adaptive", "block_binding": {"other": 1}}, True, f"thinking.adaptive.block_binding.other{EXTRA}"),
    ],
)  # fmt: skip
def test_the_field_that_controls_the_check(
    model: str, thinking: dict[str, Any], has_beta: bool, refused: str, claude: Http
) -> None:
    headers = {"anthropic-beta": f"other-2025-01-01,{BETA}" if has_beta else "other-2025-01-01"}
    answer = send(claude, model, thinking=thinking, headers=headers)
    if refused:
        assert (answer.status, outcome(answer)) == (400, refused)
    else:
        assert (answer.status, answer.json.get("input_transformations")) == (200, [] if has_beta else None)


def test_an_open_tool_round_must_keep_its_thinking_where_the_rules_say_so(claude: Http, provider: MockProvider) -> None:
    content = send(claude, "opus-5-5").json["content"]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "found"}
    whole = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    ]
    stripped = without_thinking(whole)
    assert send(claude, "opus-5-5", messages=stripped).status == 200
    provider.claude = tuple(replace(rules, keeps_open_round=True) for rules in CLAUDE_RULES)
    assert send(claude, "opus-5-5", messages=whole).status == 200
    assert outcome(send(claude, "opus-5-5", messages=stripped)) == (
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` "
        "is enabled, a final `assistant` message must start with a thinking block (preceeding the lastmost set of "
        "`tool_use` and `tool_result` blocks)."
    )
    closed = [*stripped, {"role": "assistant", "content": "done"}, {"role": "user", "content": "more"}]
    assert send(claude, "opus-5-5", messages=closed).status == 200


def test_thinking_is_billed_as_output_within_the_limit(claude: Http) -> None:
    usage = send(claude, "opus-5-5", tools=[]).json["usage"]
    plain = send(claude, "opus-4-8", tools=[]).json["usage"]
    assert usage["output_tokens"] == plain["output_tokens"] + 5  # The, request, says, :, hi
    for limit in range(1, 12):
        answer = send(claude, "opus-5-5", max_tokens=limit, tools=[]).json
        assert answer["usage"]["output_tokens"] <= limit


def test_hidden_thinking_has_a_signature_and_is_billed(claude: Http) -> None:
    shown, hidden = (
        send(claude, "opus-5-5", thinking={"type": "adaptive", "display": display}).json
        for display in ("summarized", "omitted")
    )
    assert (bool(shown["content"][0]["thinking"]), hidden["content"][0]["thinking"]) == (True, "")
    assert shown["usage"] == hidden["usage"]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": hidden["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "found"}]},
    ]
    assert send(claude, "opus-5-5", messages=messages).status == 200
    events = send(claude, "opus-5-5", thinking={"type": "adaptive", "display": "omitted"}, stream=True).events
    kinds = [event["delta"]["type"] for event in events if event.get("index") == 0 and "delta" in event]
    assert kinds == ["signature_delta"]


def test_a_provider_without_rules_enforces_none(web: Http, provider: MockProvider) -> None:
    thinking = {"type": "thinking", "thinking": "x", "signature": "none of ours"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [thinking]}]
    answer = send(web, "opus-5-5", messages=messages, tool_choice={"type": "any"}, temperature=0)
    assert outcome(answer) == ["tool_use"]


def test_other_models_have_no_rules(claude: Http) -> None:
    answer = claude.send("POST", PATH, {"model": "mock-small", "max_tokens": 9, "messages": [], "temperature": 0})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("claude-opus-5-5", "opus-5-5"),
        ("anthropic/claude-opus-5.5", "opus-5-5"),
        ("us.anthropic.claude-opus-5-5-v1:0", "opus-5-5"),
        ("claude-opus-5-5-20260922", "opus-5-5"),
        ("claude-opus-5-5[1m]", "opus-5-5"),
        ("claude-opus-5", "opus-5"),
        ("claude-opus-5-20260701", "opus-5"),
        ("claude-opus-5@20260701", "opus-5"),
        ("claude-mythos-5-2", "fable-5-2"),
        ("claude-fable-5-20261109", "fable-5"),
        ("Claude-Fable-5.1", "fable-5-1"),
        ("claude-mythos-preview", "fable-5"),
        ("claude-opus-4-7", "opus-4-8"),
        ("claude-opus-4-6", "older"),
        ("claude-3-5-haiku-20241022", "older"),
        ("gpt-5.1", None),
        ("mock-small", None),
    ],
)
def test_the_rules_of_a_model_by_its_name(model: str, name: str | None) -> None:
    rules = rules_of(CLAUDE_RULES, model)
    assert (rules and rules.name) == name


def test_rules_refer_only_to_existing_rules() -> None:
    names = {rules.name for rules in CLAUDE_RULES}
    assert {read for rules in CLAUDE_RULES for read in rules.reads} <= names
