"""Test reading recorded calls: from a store, from the API, and from the log."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from gateway.core.ledger.session_key import SessionKey
from gateway.core.usage import Charge, Usage
from gateway.mock import MockServer
from gateway.replay.records import ReplayedCall, read_records, read_store
from gateway.stores.sqlite import SqliteStore
from gateway.telemetry.log import json_line
from tests.conftest import StartGateway

SHOWN: dict[str, Any] = {
    "request_id": "r1",
    "call_id": "c1",
    "session": "alice/s1",
    "started_at": "2026-11-21T10:00:00.500Z",
    "provider": "openai",
    "model": "gpt-4o",
    "stream": True,
    "usage": {"input_tokens": 100, "output_tokens": 10, "total_tokens": 115, "cache_read_tokens": 64},
    "usage_source": "mixed",
    "cost_usd": "0.001500",
    "context": {"tokens": 98, "original_tokens": 140, "shadow": False, "budget": 100},
}
LOGGED: dict[str, Any] = {
    "event": "call",
    "time": 1_795_255_200.5,
    "call_id": "c1",
    "request_id": "r1",
    "namespace": "alice",
    "session": "s1",
    "provider": "openai",
    "model": "gpt-4o",
    "stream": True,
    "input_tokens": 100,
    "output_tokens": 10,
    "usage_source": "mixed",
    "context_tokens": 98,
    "context_tokens_original": 140,
}


def read(*values: Any) -> tuple[list[ReplayedCall], list[tuple[int, str]]]:
    complaints: list[tuple[int, str]] = []
    lines = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    return list(read_records(lines, lambda line, what: complaints.append((line, what)))), complaints


def test_what_the_api_shows_is_read() -> None:
    [call], complaints = read(SHOWN)
    assert complaints == []
    assert call == ReplayedCall(
        call_id="c1",
        request_id="r1",
        session=SessionKey("alice", "s1"),
        at=1_795_255_200.5,
        provider="openai",
        model="gpt-4o",
        stream=True,
        charge=Charge(Usage(100, 10, 115, cache_read_tokens=64), "mixed", Decimal("0.001500")),
        original=140,
        sent=98,
    )


def test_a_page_of_calls_is_read() -> None:
    calls, complaints = read({"calls": [SHOWN, {**SHOWN, "call_id": "c2", "session": "s2"}], "cursor": None})
    assert complaints == []
    assert [call.call_id for call in calls] == ["c1", "c2"]
    assert calls[1].session == SessionKey("default", "s2")


def test_shadow_record_counts_as_sent_unchanged() -> None:
    [call], _ = read({**SHOWN, "context": {**SHOWN["context"], "shadow": True}})
    assert (call.original, call.sent) == (140, 140)


def test_a_call_that_was_not_charged_is_read() -> None:
    refused = {**SHOWN, "usage": None, "usage_source": None, "cost_usd": None, "context": None, "session": None}
    [call], complaints = read(refused)
    assert complaints == []
    assert (call.charge, call.original, call.session) == (None, None, None)


def test_log_is_read_and_other_events_are_skipped() -> None:
    [call], complaints = read({"event": "log", "level": "info", "message": "reloaded"}, LOGGED, b"", b"  \n")
    assert complaints == []
    assert call.session == SessionKey("alice", "s1")
    assert call.charge == Charge(Usage.of(100, 10), "mixed")
    assert (call.at, call.original, call.sent) == (1_795_255_200.5, 140, 98)
    assert not call.has_details


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"nonsense", "is not JSON: Expecting value (column 1)"),
        (b"\xff", "is not JSON: "),
        ([1], "is not a JSON object"),
        ({"model": "m", "messages": []}, "leave out --records"),
        ({"session": "s", "body": {"messages": []}}, "leave out --records"),
        ({}, "missing required field `call_id`"),
        ({**SHOWN, "provider": 5}, "Expected `str`, got `int` - at `$.provider`"),
        ({**SHOWN, "usage": {**SHOWN["usage"], "input_tokens": -1}}, "$.usage.input_tokens"),
        ({**SHOWN, "started_at": "yesterday"}, "$.started_at"),
        ({**SHOWN, "session": "a/b/c d"}, "has an impossible session name"),
        ({"event": "call", "call_id": "c1"}, "missing required field"),
        ({"calls": [SHOWN, 7]}, "Expected `object`, got `int`"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_line_without_record_is_reported_and_skipped(value: Any, said: str) -> None:
    calls, complaints = read({**SHOWN, "call_id": "before"}, value, {**SHOWN, "call_id": "after"})
    assert [call.call_id for call in calls] == ["before", "after"]
    [(line, what)] = complaints
    assert line == 2
    assert said in what


async def test_a_store_the_api_and_the_log_say_the_same_of_a_call(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    gateway = gateway_server(mock_server.url)
    for session in ("one", "two"):
        assert gateway.web.chat(session=session).status == 200
        assert gateway.web.chat(session=session, stream=True).status == 200
    pages = [gateway.web.get(f"/api/sessions/{session}/calls").body for session in ("one", "two")]
    gateway.stop()
    store = SqliteStore(gateway.store, timeout_s=5)
    try:
        stored = [call async for call in read_store(store, None)]
        only = [call async for call in read_store(store, [SessionKey("default", "two")])]
        logged = [json_line(record, None).encode() for record in await store.calls(SessionKey("default", "one"), 9)]
    finally:
        await store.aclose()
    shown, complaints = read(*pages)
    assert complaints == []
    assert len(stored) == 4
    assert [call.session for call in only] == [SessionKey("default", "two")] * 2
    assert {told(call) for call in shown} == {told(call) for call in stored}
    assert all(call.accounts for call in stored)
    assert sorted(call.at for call in shown) == pytest.approx(sorted(call.at for call in stored), abs=0.002)
    from_log = {(call.call_id, call.session, call.original) for call in read(*logged)[0]}
    assert from_log == {
        (call.call_id, call.session, call.original) for call in stored if call.session != only[0].session
    }


def told(call: ReplayedCall) -> tuple[Any, ...]:
    return (call.call_id, call.session, call.charge, call.original, call.sent, call.stream)
