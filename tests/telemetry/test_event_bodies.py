"""Bodies of webhook requests in all formats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.ledger.arithmetic import AccountKey, Amount
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.thresholds import BudgetAlert
from gateway.telemetry.event_bodies import Event, body_of, budget_event

AT = 1_795_240_174.0
ALERT = BudgetAlert(
    "budget_1",
    AT,
    AccountKey("session", "alice", "report-42"),
    80,
    "tokens",
    Amount(166_200, 5_000_000, 12),
    (200_000, 25_000_000, None),
    AT + 3_600,
)


def event(**changes: Any) -> Event:
    return budget_event(replace(ALERT, **changes), SessionKey.shown)


def text(name: str, data: Event) -> str:
    return body_of("text", name, data, AT).decode()


def test_event_has_all_fields_of_a_budget() -> None:
    assert json.loads(body_of("event", "on_budget", event(), AT)) == {
        "type": "on_budget",
        "timestamp": "2026-11-21T05:49:34.000Z",
        "data": {
            "account": "session",
            "name": "alice/report-42",
            "threshold": 80,
            "unit": "tokens",
            "used_fraction": 0.831,
            "used": {"tokens": 166_200, "usd": "0.005000", "calls": 12},
            "limit": {"tokens": 200_000, "usd": "0.025000", "calls": None},
            "resets_at": "2026-11-21T06:49:34.000Z",
            "at": "2026-11-21T05:49:34.000Z",
        },
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            (
                "The budget of session alice/report-42 has reached 80 %: 166,200 of 200,000 tokens used (83.1%). "
                "It refills at 2026-11-21T06:49:34.000Z.\n"
            ),
        ),
        (
            {"account": AccountKey("key", "alice"), "unit": "nano_usd", "resets_at": None},
            "The budget of client key alice has reached 80 %: $0.005000 of $0.025000 used (20.0%).\n",
        ),
        (
            {"account": AccountKey("group", "research"), "unit": "nano_usd", "resets_at": None},
            "The budget of group of client keys research has reached 80 %: $0.005000 of $0.025000 used (20.0%).\n",
        ),
        (
            {"account": AccountKey("all", "all"), "unit": "nano_usd", "resets_at": None},
            "The budget of all client keys together has reached 80 %: $0.005000 of $0.025000 used (20.0%).\n",
        ),
    ],
)
def test_text_of_a_budget_is_one_line(changes: dict[str, Any], expected: str) -> None:
    assert text("on_budget", event(**changes)) == expected


def test_slack_message_is_escaped_and_has_no_markup() -> None:
    hostile = event(account=AccountKey("session", "alice", "<!channel> & co"))
    message = json.loads(body_of("slack", "on_budget", hostile, AT))
    assert message.keys() == {"text"}
    assert "session alice/&lt;!channel&gt; &amp; co has reached 80 %" in message["text"]


@pytest.mark.parametrize("name", ["a\r\nBcc: all@example.com", "a\u2028b\x00\x1b[31m", "\ud800"])
def test_names_cannot_add_lines(name: str) -> None:
    line = text("on_budget", event(account=AccountKey("session", "alice", name)))
    assert line.count("\n") == 1
    assert "\r" not in line
    assert "\x1b" not in line


def test_long_names_are_cut() -> None:
    assert len(text("on_budget", event(account=AccountKey("session", "alice", "x" * 10_000)))) < 500


USAGE = {"input_tokens": 812, "output_tokens": 96, "total_tokens": 908}
CALL: Event = {
    "request_id": "01a1",
    "session": "alice/s",
    "outcome": "ok",
    "error_code": None,
    "status": 200,
    "provider": "openai",
    "model": "gpt-5.1",
    "usage": USAGE,
    "cost_usd": "0.001975",
}


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        (
            "on_finish",
            CALL,
            (
                "Call 01a1 of session alice/s ended: ok, status 200, openai/gpt-5.1, 812 input and 96 output tokens, "
                "$0.001975.\n"
            ),
        ),
        (
            "on_finish",
            {**CALL, "session": None, "usage": None, "cost_usd": None, "outcome": "refused", "error_code": "budget"},
            "Call 01a1 of no session ended: refused (budget), status 200, openai/gpt-5.1.\n",
        ),
        (
            "on_usage",
            {**CALL, "totals": {"total_tokens": 4_740}},
            "A call of session alice/s used 908 tokens of openai/gpt-5.1, $0.001975. Total: 4,740 tokens.\n",
        ),
        (
            "on_usage",
            {**CALL, "totals": None, "cost_usd": None},
            "A call of session alice/s used 908 tokens of openai/gpt-5.1.\n",
        ),
        (
            "on_runaway",
            {
                "session": "a/s",
                "action": "warn",
                "text": "the same call (read\nit) was repeated",
                "setting": "runaway.loop.warn",
                "limit": 4,
            },
            "Session a/s has a warning: the same call (read it) was repeated (runaway.loop.warn: 4).\n",
        ),
        (
            "on_step",
            {"session": "alice/s", "step_before": None, "step": "review", "index": 1},
            "Session alice/s moved from step none to review (index 1).\n",
        ),
    ],
)
def test_text_of_other_events_is_one_line(name: str, data: Event, expected: str) -> None:
    assert text(name, data) == expected
