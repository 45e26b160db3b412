"""Show and set the steps of sessions with /api, in a running gateway."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import Reply, Web

ALICE, BOB, ADMIN = "alice-key-0123456789", "bob-key-0123456789", "admin-key-0123456789"
WRITER = {
    "steps": [
        {"name": "work", "is_default": True, "description": "anything"},
        {"name": "review", "conditions": [{"tool_used": "write"}], "sequence": [["read", "look"], "comment"]},
    ]
}
STEPS = [{"name": "start", "sequence": ["search", "write"]}]


@pytest.fixture
def own(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url, steps=STEPS, agents={"writer": WRITER})


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def patch(web: Web, session: str, **body: Any) -> Reply:
    return web.send("PATCH", f"/api/sessions/{session}", body)


def test_session_shows_its_steps(own: GatewayThread, session: str) -> None:
    own.web.chat(session, tools=tools("search", "write"))
    found = own.web.get(f"/api/sessions/{session}").json
    assert found["active_step"] == "start"
    assert found["steps"] == {
        "default": {
            "active_step": "start",
            "description": "",
            "sequence_index": 1,
            "sequence": [["search"], ["write"]],
            "due": ["write"],
            "is_set": False,
            "recent_tools": ["search"],
        }
    }


def test_a_session_without_steps_shows_none(gateway: GatewayThread, session: str) -> None:
    gateway.web.chat(session)
    found = gateway.web.get(f"/api/sessions/{session}").json
    assert (found["active_step"], found["steps"]) == (None, {})
    reply = patch(gateway.web, session, active_step="review")
    assert (reply.status, reply.error["message"]) == (400, "No steps are configured, so none can be set.")


def test_a_step_is_set_and_its_sequence_begins(own: GatewayThread, session: str) -> None:
    own.web.chat(session)
    reply = patch(own.web, session, active_step="review", agent="writer")
    assert reply.status == 200
    assert reply.json["active_step"] == "review"
    writer = reply.json["steps"]["writer"]
    assert (writer["sequence_index"], writer["due"], writer["is_set"]) == (0, ["read", "look"], True)
    called = own.web.post(
        "/v1/chat/completions",
        {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}], "tools": tools("read", "comment")},
        {"x-session-id": session, "x-session-agent": "writer"},
    )
    assert (called.header("x-session-step"), called.header("x-session-sequence-index")) == ("review", "1")


def test_index_in_the_sequence_of_a_step_is_set(own: GatewayThread, session: str) -> None:
    reply = patch(own.web, session, active_step="review", sequence_index=1, agent="writer")
    assert reply.status == 200
    writer = reply.json["steps"]["writer"]
    assert (writer["sequence_index"], writer["due"], writer["is_set"]) == (1, ["comment"], True)
    called = own.web.post(
        "/v1/chat/completions",
        {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}], "tools": tools("read", "comment")},
        {"x-session-id": session, "x-session-agent": "writer"},
    )
    # After its last entry the step is complete, and its conditions no longer match.
    assert called.header("x-session-step") == "work"


def test_null_selects_the_step_by_conditions(own: GatewayThread, session: str) -> None:
    patch(own.web, session, active_step="review", agent="writer")
    reply = patch(own.web, session, active_step=None, agent="writer")
    assert (reply.status, reply.json["active_step"]) == (200, None)
    called = own.web.post(
        "/v1/chat/completions",
        {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]},
        {"x-session-id": session, "x-session-agent": "writer"},
    )
    assert called.header("x-session-step") == "work"
    assert called.header("x-session-sequence-index") is None


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"active_step": "nothing"}, "active_step", 'a step of the agent "default": start.'),
        ({"active_step": "review"}, "active_step", 'a step of the agent "default": start.'),
        ({"active_step": 5}, "active_step", "start."),
        ({"active_step": ["start"]}, "active_step", "start."),
        ({"active_step": "start", "agent": "editor"}, "agent", "steps: default, writer."),
        ({"active_step": "start", "agent": None}, "agent", "steps: default, writer."),
        ({"active_step": "start", "agent": {}}, "agent", "steps: default, writer."),
        ({"agent": "writer"}, None, "active_step"),
        ({"sequence_index": 1}, None, "active_step"),
        ({"active_step": "start", "sequence_index": 2}, "sequence_index", "The sequence has 2, so send 0 to 1."),
        ({"active_step": "start", "sequence_index": -1}, "sequence_index", "The sequence has 2, so send 0 to 1."),
        ({"active_step": "start", "sequence_index": True}, "sequence_index", "The sequence has 2, so send 0 to 1."),
        ({"active_step": "start", "sequence_index": "1"}, "sequence_index", "The sequence has 2, so send 0 to 1."),
        ({"active_step": None, "sequence_index": 0}, "sequence_index", "The step has no sequence."),
        (
            {"active_step": "work", "sequence_index": 0, "agent": "writer"},
            "sequence_index",
            "The step has no sequence.",
        ),
    ],
)
def test_invalid_steps_are_refused_with_a_clear_error(
    own: GatewayThread, session: str, body: Any, param: str | None, says: str
) -> None:
    reply = patch(own.web, session, **body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert says in reply.error["message"]
    own.web.chat(session)
    assert own.web.get(f"/api/sessions/{session}").json["active_step"] == "start"


def test_setting_a_step_needs_the_admin_key_and_other_keys_see_nothing_of_it(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, session: str
) -> None:
    keys = [{"name": "alice", "key": ALICE}, {"name": "bob", "key": BOB}]
    own = gateway_server(mock_server.url, **{"steps": STEPS, "auth.keys": keys, "auth.admin_key": ADMIN})
    alice, bob, admin = (Web(own.url, {"authorization": f"Bearer {key}"}) for key in (ALICE, BOB, ADMIN))
    alice.chat(session, tools=tools("search"))
    assert patch(alice, session, active_step="start").status == 403
    assert bob.get(f"/api/sessions/{session}").status == 404
    assert alice.get(f"/api/sessions/{session}").json["steps"]["default"]["sequence_index"] == 1
    # Another key's session of the same name is another session.
    assert bob.chat(session, tools=tools("search")).header("x-session-sequence-index") == "1"
    reply = patch(admin, f"alice/{session}", active_step="start")
    assert (reply.status, reply.json["steps"]["default"]["sequence_index"]) == (200, 0)
    assert alice.get(f"/api/sessions/{session}").json["steps"]["default"]["sequence_index"] == 0
    assert bob.get(f"/api/sessions/{session}").json["steps"]["default"]["sequence_index"] == 1


def test_step_and_budget_are_changed_together_or_not_at_all(own: GatewayThread, session: str) -> None:
    reply = patch(own.web, session, active_step="start", budget={"tokens": 5000})
    assert (reply.status, reply.json["budget"]["tokens"], reply.json["active_step"]) == (200, 5000, "start")
    reply = patch(own.web, session, active_step="nothing", budget={"tokens": 1})
    assert reply.status == 400
    own.web.chat(session)
    assert own.web.get(f"/api/sessions/{session}").json["budget"]["tokens"] == 5000
    reply = patch(own.web, session, active_step=None, budget={"tokens": "many"})
    assert reply.status == 400
    assert own.web.get(f"/api/sessions/{session}").json["steps"]["default"]["is_set"]


def test_deleting_a_session_deletes_its_steps(own: GatewayThread, session: str) -> None:
    own.web.chat(session, tools=tools("search"))
    own.web.send("DELETE", f"/api/sessions/{session}")
    again = own.web.chat(session)
    assert again.header("x-session-sequence-index") == "0"


def test_a_reset_keeps_the_steps_and_answers_as_a_change_does(own: GatewayThread, session: str) -> None:
    own.web.chat(session, tools=tools("search", "write"))
    changed = patch(own.web, session, budget={"tokens": 5_000}).json
    reset = own.web.post(f"/api/sessions/{session}/reset").json
    assert list(reset) == list(changed)
    assert (reset["calls"], changed["calls"]) == (0, 1)
    assert reset["active_step"] == changed["active_step"] == "start"
    assert reset["steps"] == changed["steps"]
    assert reset["steps"]["default"]["recent_tools"] == ["search"]


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_choices_only_the_first_uses_tools(own: GatewayThread, session: str, stream: bool) -> None:
    own.web.chat(session, tools=tools("search", "write"), n=3, stream=stream)
    found = own.web.get(f"/api/sessions/{session}").json
    assert found["steps"]["default"]["recent_tools"] == found["recent_tools"] == ["search"]
    assert found["tools"]["search"]["calls"] == 1
    (record,) = own.web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert record["tools"] == ["search"]
