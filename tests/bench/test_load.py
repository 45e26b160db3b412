"""Test the calls of the bench: bodies, clients, and detection of wrong responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.bench.load import Load, TimedResponse, Workload, problem
from gateway.mock import MockProvider, MockServer
from tests.conftest import closed_port
from tests.support.gateways import GatewayThread

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def whole(
    text: str = "right", tokens: int = 7, *, finish: str | None = "stop", reported: int | None = None
) -> TimedResponse:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    body = {"choices": [choice], "usage": {"prompt_tokens": tokens, "completion_tokens": 2}}
    head = {"x-token-usage": json.dumps({"promptTokens": reported or tokens, "completionTokens": 2})}
    return TimedResponse(200, head, json.dumps(body).encode(), 0.001)


def stream(*words: str, done: bool = True, usage: bool = True, reported: int | None = 7) -> TimedResponse:
    events: list[Any] = [{"choices": [{"delta": {"content": word}}]} for word in words]
    if usage:
        events.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    lines = [f"data: {json.dumps(event)}" for event in events]
    if reported is not None:
        lines.append(f': x-token-usage: {{"promptTokens": {reported}, "completionTokens": 2}}')
    return TimedResponse(200, STREAM, "\n\n".join([*lines, *(["data: [DONE]"] if done else [])]).encode(), 0.001)


def test_the_right_answer_is_no_problem() -> None:
    assert problem(whole(), whole(), is_trimmed=False) is None
    assert problem(stream("a", "b"), stream("a", "b", reported=None), is_trimmed=False) is None
    assert problem(whole(tokens=5), whole(tokens=7), is_trimmed=True) is None


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (whole("wrong"), "instead of"),
        (whole(tokens=8), "instead of"),
        (whole(finish=None), "is missing"),
        (whole(reported=6), "the gateway reported the usage"),
        (TimedResponse(502, {}, b"bad gateway", 0.001), "status 502: bad gateway"),
        (TimedResponse(0, {}, b"no answer", 0.001), "status 0: no answer"),
        (TimedResponse(200, {}, b"<html>", 0.001), "Expecting value"),
        (TimedResponse(200, {}, b'{"choices": []}', 0.001), "not enough values"),
        (TimedResponse(200, {}, b"{}", 0.001), "not a chat response"),
    ],
)
def test_a_wrong_answer_is_seen(seen: TimedResponse, said: str) -> None:
    assert said in (problem(seen, whole(), is_trimmed=False) or "")


@pytest.mark.parametrize(
    "seen",
    [
        stream("a"),
        stream("ab"),
        stream("b", "a"),
        stream("a", "b", done=False),
        stream("a", "b", usage=False),
        stream("a", "b", reported=6),
        stream("a", "b", reported=None),
    ],
    ids=["shorter", "other pieces", "another order", "no end", "no usage", "other totals", "no totals"],
)
def test_a_wrong_stream_is_seen(seen: TimedResponse) -> None:
    assert problem(seen, stream("a", "b", reported=None), is_trimmed=False)


def test_missing_trim_is_reported() -> None:
    assert problem(whole(), whole(), is_trimmed=True) == "the request was not trimmed"


def test_requests_are_reproducible_and_distinct() -> None:
    workload = Workload("small", 2, 3)
    bodies = [workload.body(client, call) for client in range(2) for call in range(3)]
    assert len(set(bodies)) == 6
    assert bodies == [Workload("small", 2, 3).body(client, call) for client in range(2) for call in range(3)]


def test_session_continues_after_its_last_call() -> None:
    workload = Workload("long", 1, 2, history=4)
    first, second = (json.loads(workload.body(0, call))["messages"] for call in range(2))
    assert second[: len(first)] == first
    assert [message["role"] for message in second[len(first) :]] == ["assistant", "user"]


@pytest.mark.parametrize(
    "workload",
    [
        Workload("small", 2, 2, warm_up=1),
        Workload("stream", 2, 2, warm_up=1, chunks=5, interval_s=0.001),
        Workload("long", 1, 2, warm_up=1, history=6),
        Workload("cut", 1, 2, warm_up=1, history=20, headers={"x-context-budget": "1500"}, is_trimmed=True),
    ],
    ids=lambda workload: workload.name,
)
def test_responses_through_gateway_equal_direct_ones(
    workload: Workload, gateway: GatewayThread, mock_server: MockServer, mock: MockProvider, session: str
) -> None:
    with Load(mock_server.url, session, workload) as load:
        direct = [*load.warm_up(), *load.run()]
    with Load(gateway.url, session, workload) as load:
        through = [*load.warm_up(), *load.run()]
    pairs = [pair for one, its_own in zip(through, direct, strict=True) for pair in zip(one, its_own, strict=True)]
    assert len(pairs) == workload.clients * 3
    assert [problem(*pair, is_trimmed=workload.is_trimmed) for pair in pairs] == [None] * len(pairs)


def test_client_without_server_gives_up() -> None:
    with Load(f"http://127.0.0.1:{closed_port()}", "nobody", Workload("small", 2, 5)) as load:
        seen = load.run()
    assert [[one.status for one in of_client] for of_client in seen] == [[0], [0]]
