"""Context edits and task budgets of a Claude model: what is refused, what is cleared, and what is billed."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, ToolCall, Turn
from tests.mock.conftest import Http, Reply
from tests.support.thinking import BETA

PATH = "/v1/messages"
EDITING, BUDGETS = "context-management-2025-06-27", "task-budgets-2026-03-13"
TOOL = {"name": "lookup", "input_schema": {"type": "object", "properties": {}}}
OTHER = {**TOOL, "name": "other"}
RESULT = "a b c " * 40

Json = dict[str, Any]


class Agent:
    def __init__(self, web: Http, model: str = "claude-opus-5-5") -> None:
        self._web = web
        self.model = model
        self.betas = [EDITING, BETA]
        self.messages: list[Any] = [{"role": "user", "content": "find it"}]

    def send(self, path: str = PATH, **fields: object) -> Reply:
        body = {"model": self.model, "max_tokens": 500, "tools": [TOOL, OTHER], "messages": self.messages}
        return self._web.send("POST", path, {**body, **fields}, {"anthropic-beta": ",".join(self.betas)})

    def edited(self, *edits: Json, **fields: Any) -> Reply:
        return self.send(context_management={"edits": edits}, **fields)


@pytest.fixture
def agent(web: Http, provider: MockProvider) -> Agent:
    """An agent after five tool calls, each with thinking."""
    provider.claude = CLAUDE_RULES
    made = Agent(web)
    for number in range(5):
        name = "other" if number == 0 else "lookup"
        call = ToolCall(name, '{"path": "some long path"}')
        provider.push(Turn(text="", thinking=("I think of it",), tool_calls=(call,)))
        answer = made.send().json
        made.messages.append({"role": "assistant", "content": answer["content"]})
        result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": RESULT}
        made.messages.append({"role": "user", "content": [result]})
    return made


def uses(**fields: object) -> Json:
    return {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100}, **fields}


def keep(value: int) -> Json:
    return {"keep": {"type": "tool_uses", "value": value}}


THINKING = "clear_thinking_20251015"


def refused(answer: Reply) -> str:
    assert answer.status == 400, answer.json
    return str(answer.json["error"]["message"])


@pytest.mark.parametrize(
    ("edit", "cleared"),
    [
        (uses(), 2),
        (uses(**keep(0)), 5),
        (uses(**keep(1)), 4),
        (uses(**keep(5)), 0),
        (uses(trigger={"type": "input_tokens", "value": 100_000}), 0),
        (uses(trigger={"type": "tool_uses", "value": 4}), 2),
        (uses(trigger={"type": "tool_uses", "value": 5}), 0),
        (uses(exclude_tools=["other"]), 1),
        (uses(clear_at_least={"type": "input_tokens", "value": 100}), 2),
        (uses(clear_at_least={"type": "input_tokens", "value": 10_000}), 0),
    ],
)
def test_old_tool_results_are_cleared_before_tokens_are_counted(edit: Json, cleared: int, agent: Agent) -> None:
    whole = agent.send().json["usage"]["input_tokens"]
    answer = agent.edited(edit).json
    applied = answer["context_management"]["applied_edits"]
    assert [one["cleared_tool_uses"] for one in applied] == [cleared] * bool(cleared)
    tokens = sum(one["cleared_input_tokens"] for one in applied)
    assert answer["usage"]["input_tokens"] == whole - tokens
    assert (tokens > 100) is (cleared > 0)
    counted = agent.edited(edit, path=f"{PATH}/count_tokens").json
    assert counted == {"input_tokens": whole - tokens, "context_management": {"original_input_tokens": whole}}


def test_inputs_of_tools_are_cleared_where_that_is_asked_for(agent: Agent) -> None:
    def tokens(**fields: object) -> int:
        (applied,) = agent.edited(uses(**keep(0), **fields)).json["context_management"]["applied_edits"]
        found: int = applied["cleared_input_tokens"]
        return found

    results, named, all_inputs = tokens(), tokens(clear_tool_inputs=["other"]), tokens(clear_tool_inputs=True)
    assert results < named < all_inputs


def test_old_thinking_is_cleared(agent: Agent) -> None:
    edit = {"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}
    whole = agent.send().json["usage"]["input_tokens"]
    answer = agent.edited(edit, uses()).json
    thinking, results = answer["context_management"]["applied_edits"]
    assert (thinking["cleared_thinking_turns"], results["cleared_tool_uses"]) == (3, 2)
    cleared = thinking["cleared_input_tokens"] + results["cleared_input_tokens"]
    assert answer["usage"]["input_tokens"] == whole - cleared


@pytest.mark.parametrize("kept", ["all", {"type": "all"}, None])
def test_all_thinking_is_kept_by_request_or_by_default_of_the_model(agent: Agent, kept: object) -> None:
    edit = {"type": THINKING, **({"keep": kept} if kept else {})}
    assert agent.edited(edit).json["context_management"] == {"applied_edits": []}


def test_haiku_keeps_the_thinking_of_the_last_response(agent: Agent) -> None:
    agent.model = "claude-haiku-5-5"
    # It does not read the thinking of another model.
    assert agent.edited({"type": THINKING}).json["context_management"] == {"applied_edits": []}
    agent.messages = agent.messages[:1]
    for _ in range(2):
        content = agent.send(tool_choice={"type": "none"}).json["content"]
        agent.messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    (applied,) = agent.edited({"type": THINKING}).json["context_management"]["applied_edits"]
    assert applied["cleared_thinking_turns"] == 1


def test_clearing_does_not_invalidate_thinking(agent: Agent) -> None:
    edits = ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 1}}, uses(**keep(0)))
    for context_management in (None, {"edits": edits}, None):
        answer = agent.send(context_management=context_management).json
        assert answer["input_transformations"] == []
        agent.messages.append({"role": "assistant", "content": answer["content"]})
        agent.messages.append({"role": "user", "content": "go on"})


def test_a_stream_reports_the_edits_at_its_end(agent: Agent) -> None:
    events = agent.edited(uses(), stream=True).events
    (applied,) = events[-2]["context_management"]["applied_edits"]
    assert (events[-2]["type"], applied["cleared_tool_uses"]) == ("message_delta", 2)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([uses(), {"type": THINKING}], "`clear_thinking_20251015` must be the first strategy"),
        ([{"type": "clear_all"}], "Input tag 'clear_all' found using 'type' does not match"),
        ([{"type": "compact_20260112"}], "Input tag 'compact_20260112' found"),
        ([uses(keep=3)], "context_management: "),
        ([uses(keeps=3)], "context_management: "),
        ([uses(trigger={"type": "input_tokens", "value": 0})], "context_management: "),
        ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}], "context_management: "),
        ([{"type": THINKING, "keep": "some"}], "context_management: "),
    ],
)
def test_edits_are_checked(edits: list[Json], words: str, agent: Agent) -> None:
    assert words in refused(agent.edited(*edits))
    assert words in refused(agent.edited(*edits, path=f"{PATH}/count_tokens"))


def test_edits_need_their_beta_and_clearing_thinking_needs_thinking(agent: Agent) -> None:
    agent.model = "claude-opus-4-8"
    assert refused(agent.edited({"type": THINKING})) == (
        "`clear_thinking_20251015` strategy requires `thinking` to be enabled or adaptive"
    )
    agent.betas = ["compact-2026-01-12"]
    assert agent.edited(uses()).status == 200
    agent.betas = []
    assert refused(agent.edited(uses())) == "context_management: Extra inputs are not permitted"


# Task budgets.


def budget(**fields: object) -> Json:
    return {"output_config": {"task_budget": {"type": "tokens", "total": 20_000, **fields}}}


@pytest.mark.parametrize("fields", [{}, {"remaining": 0}, {"remaining": 9_000}, {"total": 128_000}])
def test_a_task_budget_changes_no_thinking(fields: Json, agent: Agent) -> None:
    agent.betas.append(BUDGETS)
    assert agent.send(**budget(**fields)).json["input_transformations"] == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"total": 19_999}, "`task_budget.total` must be at least 20,000 tokens for this model"),
        ({"total": "many"}, "output_config.task_budget: "),
        ({"type": "minutes"}, "output_config.task_budget: "),
        ({"remaining": -1}, "output_config.task_budget: "),
        ({"left": 1}, "output_config.task_budget: "),
    ],
)
def test_a_task_budget_is_checked(fields: Json, words: str, agent: Agent) -> None:
    agent.betas.append(BUDGETS)
    assert words in refused(agent.send(**budget(**fields)))
    assert words in refused(agent.send(path=f"{PATH}/count_tokens", **budget(**fields)))


def test_a_task_budget_needs_its_beta_and_a_model_that_has_them(agent: Agent) -> None:
    assert refused(agent.send(**budget())) == "output_config.task_budget: Extra inputs are not permitted"
    agent.betas.append(BUDGETS)
    agent.model = "claude-haiku-5-5"
    assert refused(agent.send(**budget())) == "output_config.task_budget: This model does not support task budgets."
