"""Steps on models whose thinking is bound to the tool list: system messages withdraw disallowed tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gateway.core.conversation.message import encode, outline_of
from gateway.mock import CLAUDE_RULES, Behaviour, MockProvider, MockServer, Turn
from tests.conftest import StartGateway
from tests.support.agents import TOOLS, play
from tests.support.gateways import GatewayThread

TURNS = 40
BUDGET = 12_000
#: The model uses these tools in turn, and each step allows only the next tool.
ORDER = ("read", "search", "edit", "run")
STEPS: list[dict[str, Any]] = [
    *(
        {"name": name, "conditions": [{"sequence_match": [before]}], "available_tools": {"allowed": [name]}}
        for before, name in zip(ORDER, [*ORDER[1:], ORDER[0]], strict=True)
    ),
    {"name": "begin", "is_default": True, "available_tools": {"allowed": [ORDER[0]]}},
]
BETA = "mid-conversation-tool-changes-2026-07-01"


@pytest.fixture
def claude(mock: MockProvider) -> Iterator[MockProvider]:
    """Yield the built-in provider with today's rules of Claude models."""
    mock.claude = CLAUDE_RULES
    yield mock
    mock.claude = ()


def bodies(provider: MockProvider, status: int = 200) -> list[dict[str, Any]]:
    """Return the bodies of the calls to which the provider responded with this status."""
    return [json.loads(call.body) for call in provider.calls if call.status == status and call.path == "/v1/messages"]


def offered(body: Mapping[str, Any]) -> list[str]:
    """Return the tools that the model may call at the end of a request."""
    found = [tool["name"] for tool in body["tools"]]
    for message in body["messages"]:
        for block in message["content"] if message["role"] == "system" else ():
            name = block["tool"]["name"]
            found = [one for one in found if one != name] + [name] * (block["type"] == "tool_addition")
    return found


def notes_of_last(gateway: GatewayThread, session: str) -> dict[str, str]:
    """Return the notes of a session's last call."""
    notes: dict[str, str] = gateway.web.get(f"/api/sessions/{session}/calls").json["calls"][0]["notes"]
    return notes


def in_turn(start: int, count: int) -> list[list[str]]:
    return [[ORDER[number % len(ORDER)]] for number in range(start, start + count)]


@pytest.mark.parametrize("model", ["claude-fable-5-2", "claude-sonnet-5-5", "claude-haiku-5-5"])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({}, {"stream": True, "caches": True}),
        ({"context.budget": BUDGET}, {}),
        ({}, {"headers": {"x-session-budget-tokens": "900000"}}),
    ],
    ids=["untrimmed", "streamed", "context budget", "session budget"],
)
def test_each_call_offers_the_tools_of_its_step_with_unchanged_list_and_thinking(
    settings: Mapping[str, object], options: Mapping[str, Any], model: str, *, gateway_server: StartGateway,
    mock_server: MockServer, claude: MockProvider,
) -> None:  # fmt: skip
    gateway = gateway_server(mock_server.url, steps=STEPS, **settings)
    session = play(gateway.base_url, claude, TURNS, model=model, names=ORDER, **options)
    assert (session.errors, bodies(claude, 400)) == ([], [])
    sent = bodies(claude)
    assert [offered(body) for body in sent] == in_turn(0, TURNS)
    assert {json.dumps(body["tools"]) for body in sent} == {json.dumps(TOOLS)}
    if not settings:
        assert all("thinking=" not in headers["x-context-trimmed"] for headers in session.headers)
        for before, after in pairwise(plain(body) for body in sent):
            # Earlier messages are unchanged, so the provider's prompt cache remains valid.
            assert after[: len(before)] == before


def plain(body: Mapping[str, Any]) -> list[bytes]:
    """Return the messages of a request as bytes, without cache marks."""
    return [outline_of(encode(message)).identity for message in body["messages"]]


def test_another_worker_sends_the_same_tool_changes(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    headers = {"x-session-id": "shared"}
    one = gateway_server(mock_server.url, steps=STEPS)
    session = play(one.base_url, claude, 6, names=ORDER, headers=headers)
    one.stop()
    other = gateway_server(mock_server.url, folder=one.folder, steps=STEPS)
    names = [*ORDER[2:], *ORDER[:2]]
    more = play(other.base_url, claude, 4, names=names, headers=headers, messages=session.messages)
    assert (more.errors, bodies(claude, 400)) == ([], [])
    assert [offered(body) for body in bodies(claude)[6:]] == in_turn(6, 4)


def test_a_session_without_steps_is_offered_all_tools_again(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    headers = {"x-session-id": "shared"}
    one = gateway_server(mock_server.url, steps=STEPS)
    session = play(one.base_url, claude, 5, names=ORDER, headers=headers)
    one.stop()
    other = gateway_server(mock_server.url, folder=one.folder)
    more = play(other.base_url, claude, 3, headers=headers, messages=session.messages)
    assert (more.errors, bodies(claude, 400)) == ([], [])
    assert [sorted(offered(body)) for body in bodies(claude)[5:]] == [sorted(ORDER)] * 3


def test_a_user_message_after_a_failed_call_moves_the_tool_change(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=STEPS)
    headers = {"x-session-id": "s"}
    session = play(gateway.base_url, claude, 2, names=ORDER, headers=headers)
    claude.behaviour = Behaviour(status=529)
    failed = play(gateway.base_url, claude, 1, names=ORDER[2:], headers=headers, messages=[*session.messages])
    assert failed.statuses == [529]
    claude.behaviour = Behaviour()
    messages = [*session.messages, {"role": "user", "content": "Go on."}]
    more = play(gateway.base_url, claude, 2, names=ORDER[2:], headers=headers, messages=messages)
    assert (more.errors, bodies(claude, 400)) == ([], [])
    assert [offered(body) for body in bodies(claude)[-2:]] == in_turn(2, 2)


def test_a_host_without_support_for_tool_changes_is_learned_once(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    claude.claude = tuple(replace(rules, tool_changes=False) for rules in CLAUDE_RULES)
    gateway = gateway_server(mock_server.url, steps=STEPS)
    session = play(gateway.base_url, claude, 6, names=ORDER, headers={"x-session-id": "s"})
    assert (session.errors, len(bodies(claude, 400))) == ([], 1)
    assert [offered(body) for body in bodies(claude)] == [list(ORDER)] * 6
    notes = [call["notes"] for call in gateway.web.get("/api/sessions/s/calls").json["calls"]]
    assert notes[-1]["tool_changes"] == "the provider refused system messages that withdraw tools"
    assert all(note["step_tools"].startswith("offered although not due or not allowed: ") for note in notes)


def test_a_tool_change_with_too_many_names_is_not_made_and_noted(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    more = [{**TOOLS[0], "name": f"tool_{number}_".ljust(120, "x")} for number in range(150)]
    rest = {"name": "rest", "conditions": [{"sequence_match": ["run"]}], "available_tools": {"allowed": ["tool_*"]}}
    gateway = gateway_server(mock_server.url, steps=[*STEPS, rest])
    tools = {"tools": [*TOOLS, *more]}
    session = play(gateway.base_url, claude, 1, names=ORDER, headers={"x-session-id": "s"}, body=tools)
    assert (session.errors, bodies(claude, 400)) == ([], [])
    assert offered(bodies(claude)[0]) == [tool["name"] for tool in tools["tools"]]
    assert notes_of_last(gateway, "s")["tool_changes"] == (
        "tools unchanged: the names of those to withdraw are too long"
    )


def test_a_conversation_that_ends_with_an_assistant_message_keeps_its_tools(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=STEPS)
    begun = [{"role": "user", "content": "Repair it."}, {"role": "assistant", "content": "I begin with"}]
    play(gateway.base_url, claude, 1, names=ORDER, headers={"x-session-id": "s"}, messages=begun)
    assert len(claude.calls) == 1
    assert offered(json.loads(claude.calls[0].body)) == list(ORDER)
    assert notes_of_last(gateway, "s")["tool_changes"] == ("tools unchanged: they can change only after a user message")


def test_tool_changes_of_the_client_are_kept(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=STEPS)
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "run"}}
    own: list[dict[str, Any]] = [
        {"role": "user", "content": "Repair it."},
        {"role": "system", "content": [removal]},
    ]
    session = play(gateway.base_url, claude, 3, names=ORDER, messages=own, headers={"anthropic-beta": BETA})
    assert session.errors == []
    assert [offered(body) for body in bodies(claude)] == [["read", "search", "edit"]] * 3


def test_two_conversations_of_a_session_have_separate_tool_changes(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=STEPS)
    headers = {"x-session-id": "s"}
    one = play(gateway.base_url, claude, 3, names=ORDER, headers=headers)
    other = [{"role": "user", "content": "Another task."}]
    two = play(gateway.base_url, claude, 2, names=ORDER[3:], headers=headers, messages=other)
    more = play(gateway.base_url, claude, 2, names=ORDER, headers=headers, messages=one.messages)
    assert (two.errors, more.errors, bodies(claude, 400)) == ([], [], [])
    assert offered(bodies(claude)[3]) == ["run"]
    assert offered(bodies(claude)[5]) == ["read"]


def test_a_tool_change_before_a_trimmed_thinking_only_response_stays_valid(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, steps=STEPS, **{"context.budget": BUDGET})
    claude.push(Turn(text="", thinking=("I think, and am cut short.",), tool_calls=()))
    session = play(gateway.base_url, claude, 30, names=ORDER)
    assert (session.errors, bodies(claude, 400)) == ([], [])
    assert any("thinking=" in headers["x-context-trimmed"] for headers in session.headers)
    assert [offered(body) for body in bodies(claude)] == [["read"], *in_turn(0, 29)]
