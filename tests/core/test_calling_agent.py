"""The agent of a session that makes a call is read from what clients send, and odd values are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.calling_agent import REQUEST_CLASSES, CallingAgent, calling_agent

MAIN = CallingAgent()
AGENT = "a5d0f1c2"
ROOT, THREAD = "0199a213-81c0-7800-8aa1-bbab2a035a53", "0199a214-2b1f-7d3e-9c55-1f2e3d4c5b6a"
TURN = json.dumps({"turn_id": "t1", "request_kind": "{}"})


def read(metadata: object = None, **headers: str) -> CallingAgent | None:
    """Read the agent from headers, whose names are written with underscores."""
    named = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}
    return calling_agent(named, metadata)


def turn(kind: str) -> str:
    return json.dumps({"turn_id": "t1", "request_kind": kind, "workspaces": {"/work": {}}})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"user_agent": "curl/8"},
        {"x_session_agent": "writer"},
        {"session_id": ROOT, "thread_id": ROOT},
        {"x_claude_code_session_id": ROOT},
        {"x_interaction_type": "conversation-agent", "x_initiator": "agent"},
        {"session_id": ROOT, "thread_id": ROOT, "x_codex_turn_metadata": turn("turn")},
    ],
)
def test_a_client_that_names_no_agent_has_none(headers: dict[str, str]) -> None:
    assert read(**headers) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x_agent_id": "researcher-1"}, CallingAgent("researcher-1", None, None, "subagent")),
        (
            {"x_agent_id": "researcher-1", "x_agent_type": "researcher"},
            CallingAgent("researcher-1", None, "researcher", "subagent"),
        ),
        ({"x_agent_type": "researcher"}, CallingAgent("researcher", None, "researcher", "subagent")),
        ({"x_agent_id": "main", "x_agent_type": "boss"}, MAIN),
    ],
)
def test_own_agents(headers: dict[str, str], expected: CallingAgent) -> None:
    assert read(**headers) == expected


def claude(**more: str) -> CallingAgent | None:
    return read(x_claude_code_session_id=ROOT, **{f"x_claude_code_{name}": value for name, value in more.items()})


def test_claude_code_without_hint_headers() -> None:
    assert claude(agent_id=AGENT) == CallingAgent(AGENT, None, None, "subagent")
    assert claude(agent_id="b1", parent_agent_id=AGENT) == CallingAgent("b1", AGENT, None, "subagent")


def test_claude_code_with_hint_headers() -> None:
    assert claude(request_class="main") == MAIN
    assert claude(request_class="auxiliary") == CallingAgent(request_class="auxiliary")
    assert claude(request_class="compaction", compaction="auto") == CallingAgent(request_class="compaction")
    assert claude(compaction="manual") == CallingAgent(request_class="compaction")
    explore = claude(agent_id=AGENT, agent_type="Explore", request_class="subagent")
    assert explore == CallingAgent(AGENT, None, "Explore", "subagent")
    workflow = claude(agent_id=AGENT, agent_type="custom", request_class="workflow")
    assert workflow == CallingAgent(AGENT, None, "custom", "workflow")
    compacting = claude(agent_id=AGENT, agent_type="Explore", request_class="compaction", compaction="auto")
    assert compacting == CallingAgent(AGENT, None, "Explore", "compaction")


def codex(thread: str = THREAD, **more: str) -> CallingAgent | None:
    return read(session_id=ROOT, thread_id=thread, x_codex_window_id=f"{thread}:0", **more)


def test_codex_subagents() -> None:
    spawned = codex(x_openai_subagent="collab_spawn", x_codex_parent_thread_id=ROOT)
    assert spawned == CallingAgent(THREAD, "main", "collab_spawn", "subagent")
    nested = codex(x_openai_subagent="collab_spawn", x_codex_parent_thread_id="other")
    assert nested == CallingAgent(THREAD, "other", "collab_spawn", "subagent")
    assert codex(x_openai_subagent="review") == CallingAgent(THREAD, None, "review", "subagent")
    assert codex(ROOT, x_openai_subagent="review") == CallingAgent("review", None, "review", "subagent")
    memory = codex(ROOT, x_openai_subagent="memory_consolidation")
    assert memory == CallingAgent("memory_consolidation", None, "memory_consolidation", "auxiliary")


@pytest.mark.parametrize(
    ("kind", "expected"), [("compaction", "compaction"), ("prewarm", "auxiliary"), ("memory", "auxiliary")]
)
def test_codex_request_kinds(kind: str, expected: Any) -> None:
    assert codex(ROOT, x_codex_turn_metadata=turn(kind)) == CallingAgent(request_class=expected)
    spawned = codex(x_openai_subagent="collab_spawn", x_codex_parent_thread_id=ROOT, x_codex_turn_metadata=turn(kind))
    assert spawned == CallingAgent(THREAD, "main", "collab_spawn", expected)


def test_codex_compacts_its_own_thread() -> None:
    assert codex(ROOT, x_openai_subagent="compact") == CallingAgent(request_class="compaction")
    spawned = codex(x_openai_subagent="compact", x_codex_parent_thread_id=ROOT)
    assert spawned == CallingAgent(THREAD, "main", None, "compaction")


def test_codex_names_the_agent_in_the_body_over_a_websocket() -> None:
    metadata = {
        "session_id": ROOT,
        "thread_id": THREAD,
        "x-codex-parent-thread-id": ROOT,
        "x-openai-subagent": "collab_spawn",
        "x-codex-turn-metadata": turn("compaction"),
    }
    expected = CallingAgent(THREAD, "main", "collab_spawn", "compaction")
    assert read(metadata) == expected
    assert read(metadata, session_id=ROOT, thread_id=ROOT) == expected


def test_copilot_and_opencode() -> None:
    assert read(x_interaction_type="conversation-subagent") == CallingAgent("subagent", None, None, "subagent")
    assert read(x_interaction_type="conversation-background") == CallingAgent(request_class="auxiliary")
    assert read(x_session_id="child", x_parent_session_id="parent") == CallingAgent(request_class="subagent")


@pytest.mark.parametrize("value", ["", " ", "a/b", "..", "a\tb", "a" * 256, "<script>", "ä", "…", 'a"b', "a,b"])
def test_bad_values_are_ignored(value: str) -> None:
    raw = value.encode("utf-8")
    for name in (
        b"x-agent-id",
        b"x-agent-type",
        b"x-claude-code-agent-id",
        b"x-claude-code-agent-type",
        b"x-claude-code-request-class",
        b"x-codex-parent-thread-id",
        b"x-openai-subagent",
        b"x-codex-turn-metadata",
        b"x-interaction-type",
    ):
        assert calling_agent({name: raw}, None) is None, name
    found = calling_agent({b"x-claude-code-agent-id": b"ok", b"x-claude-code-parent-agent-id": raw}, None)
    assert found == CallingAgent("ok", None, None, "subagent")


@pytest.mark.parametrize(
    "metadata",
    [
        None, [], "x", 1, {}, {"thread_id": 5}, {"x-openai-subagent": {}}, {"x-codex-turn-metadata": "{"},
        {"x-codex-turn-metadata": "[" * 100_000}, {"x-codex-turn-metadata": "[1]"}, {"request_kind": [1]},
        {"x-codex-turn-metadata": json.dumps({"request_kind": {"a": 1}})}, {"x-codex-parent-thread-id": "a/b"},
        {"user": "someone", "purpose": "test"},
    ],
)  # fmt: skip
def test_odd_metadata_is_ignored(metadata: object) -> None:
    assert read(metadata) is None


def test_an_agent_is_not_its_own_parent() -> None:
    assert claude(agent_id=AGENT, parent_agent_id=AGENT) == CallingAgent(AGENT, None, None, "subagent")


def test_a_nested_agent_without_a_valid_id_is_a_subagent() -> None:
    assert claude(agent_id="a/b", parent_agent_id=AGENT) == CallingAgent("subagent", AGENT, None, "subagent")


def test_only_some_classes_are_of_subagents() -> None:
    found = [name for name in REQUEST_CLASSES if CallingAgent(request_class=name).is_subagent]
    assert found == ["subagent", "workflow"]
    assert CallingAgent("a", request_class="compaction").is_subagent
