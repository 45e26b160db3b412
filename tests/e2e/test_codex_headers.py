"""The headers of Codex name the session, also for subagents, and all of them are forwarded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.mock import MockProvider
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import SSE_HEAD, Connection
from tests.support.web import Web

PATH = "/v1/responses"
BODY = {"model": "mock-small", "input": "hi"}


def of(session: str, thread: str, **more: str) -> dict[str, str]:
    return {"session-id": session, "thread-id": thread, "x-codex-window-id": f"{thread}:0", **more}


def metadata(session: str, thread: str) -> dict[str, Any]:
    return {**BODY, "client_metadata": {"session_id": session, "thread_id": thread, "x-codex-window-id": "w"}}


def calls(web: Web, session: str) -> int:
    found = web.get(f"/api/sessions/{session}")
    return int(found.json["calls"]) if found.status == 200 else 0


def test_a_thread_and_its_subagents_are_one_session(web: Web, mock: MockProvider, session: str) -> None:
    helper = {"x-codex-parent-thread-id": session, "x-openai-subagent": "review"}
    assert web.post(PATH, BODY, of(session, session)).status == 200
    assert web.post(PATH, BODY, of(session, f"{session}-helper", **helper)).status == 200
    assert calls(web, session) == 2
    assert calls(web, f"{session}-helper") == 0
    assert all(mock.calls[-1].header(name) == value for name, value in helper.items())


def test_threads_of_two_sessions_are_separate_sessions(web: Web, mock: MockProvider, session: str) -> None:
    del mock
    for name in (f"{session}-a", f"{session}-b"):
        web.post(PATH, BODY, of(name, name))
    assert (calls(web, f"{session}-a"), calls(web, f"{session}-b")) == (1, 1)


def test_a_thread_id_names_the_session_if_there_is_no_session_id(web: Web, mock: MockProvider, session: str) -> None:
    del mock
    web.post(PATH, BODY, {"thread-id": session})
    assert calls(web, session) == 1


@pytest.mark.parametrize("parent", ["", "another"])
def test_client_metadata_names_the_session_if_there_are_no_headers(
    web: Web, mock: MockProvider, session: str, parent: str
) -> None:
    del mock
    body = metadata(session, f"{session}-helper")
    web.post(PATH, {**body, "prompt_cache_key": parent or session})
    assert calls(web, session) == 1


def test_the_turn_state_header_is_forwarded_in_both_directions(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    states: list[str | None] = []

    def script(connection: Connection) -> None:
        states.append(connection.request.header("x-codex-turn-state"))
        head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nx-codex-turn-state: sticky-7\r\n\r\n")
        response: dict[str, Any] = {
            "id": "resp_1",
            "object": "response",
            "status": "completed",
            "output": [],
            "usage": None,
        }
        event = {"type": "response.completed", "sequence_number": 0, "response": response}
        connection.send(head + b"data: " + json.dumps(event).encode() + b"\n\n")

    gateway: GatewayThread = gateway_server(f"{byte_server(script).url}/v1")
    first = gateway.web.post(PATH, {**BODY, "stream": True}, of("s", "s"))
    assert first.header("x-codex-turn-state") == "sticky-7"
    gateway.web.post(PATH, {**BODY, "stream": True}, of("s", "s", **{"x-codex-turn-state": "sticky-7"}))
    assert states == [None, "sticky-7"]
