"""Test the settings `steps:` and `agents:`: accepted forms, and the message for each mistake."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Settings, load, matcher
from gateway.config.policies import agents_of
from gateway.core.errors import ConfigError
from gateway.core.steps import (
    Agent,
    BudgetBelow,
    ConditionFacts,
    MessageMatches,
    NotRecentlyUsed,
    SequenceMatch,
    StepState,
    TokensAbove,
    ToolUsed,
)

EVALUATION = Path(__file__).parent.parent.parent / "config/steps/evaluation.yaml"


def settings(tmp_path: Path, **keys: Any) -> Settings:
    file = tmp_path / "gateway.yaml"
    file.write_text(yaml.safe_dump(keys), "utf-8")
    return load(file, environment={}).settings


def callable_now(agent: Agent, state: StepState, offered: tuple[str, ...]) -> tuple[str, ...]:
    step = agent.step(state)
    assert step is not None
    return step.callable(offered, agent.due(state))


def problems(tmp_path: Path, **keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, **keys)
    return caught.value.problems


def test_without_steps_there_is_no_agent(tmp_path: Path) -> None:
    assert agents_of(settings(tmp_path)) == {}


def test_every_key_of_a_step_reaches_the_rules(tmp_path: Path) -> None:
    step = {
        "name": "review",
        "description": "look again",
        "is_default": True,
        "conditions": [
            {"tool_used": "write_*", "tokens_above": 5},
            {"tool_used": {"tools": ["a", "b"], "window": 3}},
            {"not_recently_used": {"tools": "publish", "window": 8}},
            {"sequence_match": ["a", ["b", "c"]]},
            {"message_matches": "(?i)review"},
            {"budget_below": 0.2},
        ],
        "available_tools": {"allowed": ["read_*", "comment"], "denied": ["read_secret"]},
        "sequence": ["read_*", ["comment", "read_x"]],
        "enforce": "require",
        "context_budget": 1000,
        "model": "gpt-4.1-mini",
        "max_output_tokens": 50,
    }
    agent = agents_of(settings(tmp_path, steps=[step]))["default"]
    (made,) = agent.steps
    assert (made.name, made.description, made.is_default, made.enforce) == ("review", "look again", True, "require")
    assert (made.allowed, made.denied) == (("read_*", "comment"), ("read_secret",))
    assert made.sequence == (("read_*",), ("comment", "read_x"))
    assert (made.context_budget, made.model, made.max_output_tokens) == (1000, "gpt-4.1-mini", 50)
    used, tokens, windowed, unused, sequence, message, budget = made.conditions
    assert (used, windowed) == (ToolUsed(("write_*",)), ToolUsed(("a", "b"), 3))
    assert (tokens, unused) == (TokensAbove(5), NotRecentlyUsed(("publish",), 8))
    assert (sequence, budget) == (SequenceMatch((("a",), ("b", "c"))), BudgetBelow(0.2))
    assert isinstance(message, MessageMatches)
    assert (message.is_match("please REVIEW it"), message.is_match("no")) == (True, False)


def test_a_step_needs_no_more_than_a_name(tmp_path: Path) -> None:
    (step,) = agents_of(settings(tmp_path, steps=[{"name": "s"}]))["default"].steps
    assert (step.allowed, step.sequence, step.conditions, step.enforce) == (None, (), (), "filter")


def test_an_agent_has_its_steps_in_place_or_in_a_file_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps/writer.yaml").write_text("steps: [{name: from_file}]")
    agents = {"writer": "steps/writer.yaml", "editor": {"steps": [{"name": "in_place"}]}, "full": str(EVALUATION)}
    found = agents_of(settings(tmp_path, agents=agents, steps=[{"name": "all"}]))
    assert {name: agent.steps[0].name for name, agent in found.items()} == {
        "default": "all", "writer": "from_file", "editor": "in_place", "full": "work"
    }  # fmt: skip


def test_a_file_of_an_agent_may_name_variables(tmp_path: Path) -> None:
    (tmp_path / "writer.yaml").write_text("steps: [{name: s, model: '${MODEL}'}]")
    file = tmp_path / "gateway.yaml"
    file.write_text("agents: {writer: writer.yaml}")
    found = load(file, environment={"MODEL": "gpt-4.1"}).settings
    assert found.agents["writer"].steps[0].model == "gpt-4.1"


def test_the_file_of_an_agent_may_be_named_by_a_variable_or_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "writer.yaml").write_text("steps: [{name: from_file}]")
    file = tmp_path / "gateway.yaml"
    file.write_text("agents: {writer: '${FOLDER}/writer.yaml'}")
    assert load(file, environment={"FOLDER": str(tmp_path)}).settings.agents["writer"].steps[0].name == "from_file"
    file.write_text("{}")
    named = load(file, environment={"GATEWAY_AGENTS": "{writer: writer.yaml}"}).settings
    assert named.agents["writer"].steps[0].name == "from_file"


def test_a_missing_file_of_an_agent_hides_no_other_problem(tmp_path: Path) -> None:
    found = problems(tmp_path, agents={"writer": "writer.yaml", "editor": "editor.yaml"}, store={"timeout_ms": 0})
    assert [one.partition(":")[0] for one in sorted(found)] == ["agents.editor", "agents.writer", "store.timeout_ms"]
    assert all("cannot be read: No such file" in one for one in found if one.startswith("agents"))


def test_the_agent_of_a_route_is_one_that_exists(tmp_path: Path) -> None:
    route = {"match": "m", "provider": "openai", "agent": "writer"}
    assert settings(tmp_path, models=[route], agents={"writer": {"steps": [{"name": "s"}]}}).models[0].agent == "writer"
    (problem,) = problems(tmp_path, models=[route], agents={"write": {"steps": [{"name": "s"}]}})
    assert problem.startswith("models[0].agent: unknown agent")
    assert "write" in problem


@pytest.mark.parametrize(
    ("keys", "path", "says"),
    [
        ({"steps": [{}]}, "steps[0].name", "required"),
        ({"steps": [{"name": "two words"}]}, "steps[0].name", "A-Z"),
        ({"steps": [{"name": "bad\r\nheader"}]}, "steps[0].name", "A-Z"),
        ({"steps": [{"name": "s", "sequnce": []}]}, "steps[0].sequnce", "sequence"),
        ({"steps": [{"name": "s"}, {"name": "s"}]}, "steps", "two steps have the name s"),
        ({"steps": [{"name": "a", "is_default": True}, {"name": "b", "is_default": True}]}, "steps", "default"),
        ({"steps": [{"name": "a"}, {"name": "b"}]}, "steps", "the step a has no conditions"),
        ({"steps": [{"name": f"s{n}", "conditions": [{"tool_used": "x"}]} for n in range(65)]}, "steps", "64"),
        ({"steps": [{"name": "s", "enforce": "forbid"}]}, "steps[0].enforce", "observe"),
        ({"steps": [{"name": "s", "conditions": [{}]}]}, "steps[0].conditions[0]", "name one of"),
        ({"steps": [{"name": "s", "conditions": [{"tool_used": []}]}]}, "steps[0].conditions[0].tool_used.tools", "1"),
        ({"steps": [{"name": "s", "conditions": [{"tool_used": {"tools": "x", "window": 65}}]}]},
         "steps[0].conditions[0].tool_used.window", "64"),
        ({"steps": [{"name": "s", "conditions": [{"message_matches": "("}]}]},
         "steps[0].conditions[0].message_matches", "not a valid regular expression"),
        ({"steps": [{"name": "s", "conditions": [{"budget_below": 20}]}]},
         "steps[0].conditions[0].budget_below", "1"),
        ({"steps": [{"name": "s", "sequence": [[]]}]}, "steps[0].sequence", "an entry names no tool"),
        ({"steps": [{"name": "s", "sequence": ["a", ["b", ""]]}]}, "steps[0].sequence", "an entry names no tool"),
        ({"steps": [{"name": "s", "conditions": [{"sequence_match": [[]]}]}]},
         "steps[0].conditions[0].sequence_match", "an entry names no tool"),
        ({"steps": [{"name": "s", "sequence": ["x"], "available_tools": {"allowed": ["y"]}}]},
         "steps[0]", "its sequence has x"),
        ({"steps": [{"name": "s", "sequence": [["x", "y"]], "available_tools": {"denied": ["*"]}}]},
         "steps[0]", "its sequence has x or y"),
        ({"steps": [{"name": "s", "model": "nobody/has-it"}], "default_provider": None}, "steps[0].model", "nobody"),
        ({"agents": {"a b": {"steps": [{"name": "s"}]}}}, "agents", "A-Z"),
        ({"agents": {"default": {"steps": [{"name": "s"}]}}}, "agents", "put its steps under `steps:`"),
        ({"agents": {"a": {"steps": []}}}, "agents.a.steps", "1"),
        ({"agents": {"a": {}}}, "agents.a.steps", "required"),
        ({"agents": {"a": 5}}, "agents.a", ""),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_path(tmp_path: Path, keys: Mapping[str, Any], path: str, says: str) -> None:
    found = problems(tmp_path, **keys)
    assert any(one.startswith(f"{path}:") and says in one for one in found), found


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"steps": [{"name": "s", "sequense": ["a"]}]}, "steps[0].sequense: unknown key (did you mean sequence?)"),
        ({"agents": {"a": {"stps": []}}}, "agents.a.stps: unknown key (did you mean steps?)"),
        (
            {"steps": [{"name": "s", "conditions": [{"tool_used": {"tools": "a", "windw": 3}}]}]},
            "steps[0].conditions[0].tool_used.windw: unknown key (did you mean window?)",
        ),
    ],
)  # fmt: skip
def test_a_misspelled_key_of_a_step_is_told_what_was_meant(tmp_path: Path, keys: Mapping[str, Any], says: str) -> None:
    assert says in problems(tmp_path, **keys)


@pytest.mark.parametrize("text", ["", "- a", "steps: 5", "steps: [{}]", "a: {b"])
def test_a_mistake_in_the_file_of_an_agent_is_named_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "writer.yaml").write_text(text)
    found = problems(tmp_path, agents={"writer": "writer.yaml"})
    assert any("writer" in one for one in found)
    (tmp_path / "writer.yaml").unlink()
    (problem,) = problems(tmp_path, agents={"writer": "writer.yaml"})
    assert "writer.yaml" in problem


def test_overlapping_tool_patterns_are_not_refused(tmp_path: Path) -> None:
    step = {"name": "s", "sequence": ["read_*"], "available_tools": {"allowed": ["read_draft"]}}
    assert settings(tmp_path, steps=[step]).steps[0].sequence == (("read_*",),)


def test_a_pattern_is_looked_for_at_the_end_of_a_long_message_and_not_for_long() -> None:
    assert matcher("end$")("x" * 100_000 + "the end")
    assert not matcher("^start")("start" + "x" * 100_000)
    slow = matcher(r"(a|aa)+$")
    began = time.monotonic()
    assert not any(slow("a" * 5000 + "b") for _ in range(1000))
    assert time.monotonic() - began < 5, "what took too long once is not looked for again"


def test_the_example_has_the_steps_it_says() -> None:
    agents = load(None, environment={}, search=False, flags={"agents.writer": yaml.safe_load(EVALUATION.read_text())})
    (agent,) = agents_of(agents.settings).values()
    assert [step.name for step in agent.steps] == ["work", "critique", "debate", "reflect"]


def test_the_example_in_the_document_does_what_it_says(tmp_path: Path) -> None:
    text = (EVALUATION.parent.parent.parent / "docs/concepts/steps.md").read_text("utf-8")
    written = text.partition("```yaml\n")[2].partition("```")[0]
    agent = agents_of(settings(tmp_path, **yaml.safe_load(written)))["default"]
    state = agent.with_active_step(StepState(), ConditionFacts())
    offered = ("read_page", "write_page", "comment", "approve", "publish", "search")
    seen = []
    for tool in ("write_page", "read_page", "approve", "publish", "write_page", "read_page", "comment"):
        assert tool in callable_now(agent, state, offered)
        state = agent.after_tools(state, [tool], ConditionFacts()).state
        seen.append((state.active, agent.finished_entries(state), callable_now(agent, state, offered)))
    assert seen[:4] == [
        ("review", 0, ("read_page",)),
        ("review", 1, ("comment", "approve")),
        ("publish", 0, ("publish",)),
        ("work", None, ("read_page", "write_page", "comment", "search")),
    ]
    assert seen[-1][0] == "work"
