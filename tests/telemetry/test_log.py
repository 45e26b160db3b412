from __future__ import annotations

import io
import json
import logging
import sys
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.core.ports import CallRecord, SessionKey
from gateway.core.usage import Charge, Totals, Usage
from gateway.telemetry import log

CHARGE = Charge(Usage.of(7951, 212), "provider", Decimal("0.0032"))
TOTALS = Totals(calls=4, input_tokens=61200, output_tokens=2210, total_tokens=63410, cost_usd=Decimal("0.1032"))
CALL = CallRecord(
    call_id="01abc",
    request_id="mine",
    session=SessionKey("alice", "7f3c"),
    derived_session=False,
    started_at=1_795_000_000.0,
    dialect="chat",
    operation="chat",
    provider="openai",
    model="gpt-5.1",
    response_model="gpt-5.1-2026",
    stream=True,
    status=200,
    outcome="ok",
    error_code=None,
    finish_reason="stop",
    tools=("search",),
    charge=CHARGE,
    overhead_s=0.00123,
    first_byte_s=0.5,
    duration_s=1.94,
    request_bytes=10,
    response_bytes=20,
)
FAILED = replace(CALL, status=502, outcome="upstream_failed", error_code="upstream_unreachable", charge=None)


def test_a_line_for_people() -> None:
    assert log.text_line(CALL, TOTALS) == (
        "chat gpt-5.1 · session 7f3c · used 7,951+212 · session 63,410 tok, $0.103200 · 1.9 s"
    )


def test_a_line_for_people_says_what_went_wrong_and_what_is_not_known() -> None:
    assert log.text_line(FAILED, None) == (
        "chat gpt-5.1 · session 7f3c · upstream_failed 502 upstream_unreachable · 1.9 s"
    )
    guessed = replace(CALL, charge=replace(CHARGE, source="estimated", cost_usd=None), session=None, model="")
    assert log.text_line(guessed, replace(TOTALS, unpriced_calls=1)) == "chat - · used 7,951+212 (estimated) · 1.9 s"
    assert "$" not in log.text_line(CALL, replace(TOTALS, unpriced_calls=1))


def test_a_line_for_machines() -> None:
    assert json.loads(log.json_line(CALL, TOTALS)) == {
        "event": "call",
        "time": 1_795_000_000.0,
        "call_id": "01abc",
        "request_id": "mine",
        "namespace": "alice",
        "session": "7f3c",
        "operation": "chat",
        "provider": "openai",
        "model": "gpt-5.1",
        "stream": True,
        "status": 200,
        "outcome": "ok",
        "error_code": None,
        "input_tokens": 7951,
        "output_tokens": 212,
        "usage_source": "provider",
        "session_total_tokens": 63410,
        "overhead_ms": 1.23,
        "duration_ms": 1940.0,
    }
    nothing = json.loads(log.json_line(replace(FAILED, session=None), None))
    assert nothing["input_tokens"] is None
    assert nothing["session"] is None
    assert nothing["session_total_tokens"] is None


@pytest.mark.parametrize("as_json", [True, False])
def test_each_call_is_one_line(as_json: bool) -> None:
    stream = io.StringIO()
    observer = log.CallLog(stream, as_json=as_json)
    observer.record(CALL, TOTALS)
    observer.record(FAILED, None)
    assert stream.getvalue().count("\n") == 2
    assert all(json.loads(line) for line in stream.getvalue().splitlines() if as_json)


def test_calls_that_went_well_may_be_left_out() -> None:
    stream = io.StringIO()
    observer = log.CallLog(stream, as_json=True, failures_only=True)
    left = replace(CALL, outcome="client_left", status=499)
    passed_on = replace(CALL, outcome="provider_error", status=429)
    broken = replace(CALL, outcome="upstream_broken")
    for call in (CALL, FAILED, left, passed_on, broken):
        observer.record(call, TOTALS)
    outcomes = [json.loads(line)["outcome"] for line in stream.getvalue().splitlines()]
    assert outcomes == ["upstream_failed", "client_left", "provider_error", "upstream_broken"]


def test_a_name_with_a_line_end_stays_on_its_line() -> None:
    call = replace(CALL, model="a\nevent: forged", session=SessionKey("a", "s"))
    assert "\n" not in log.json_line(call, TOTALS)


def test_our_own_messages_are_json_with_their_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("gateway", logging.ERROR, "f", 1, "call %s failed", ("x",), sys.exc_info())
    line = json.loads(log.JsonFormatter().format(record))
    assert (line["event"], line["level"], line["message"]) == ("log", "error", "call x failed")
    assert "ValueError: why" in line["exception"]
    plain = logging.LogRecord("gateway", logging.INFO, "f", 1, "hello", (), None)
    assert "exception" not in json.loads(log.JsonFormatter().format(plain))


def test_configuring_twice_does_not_say_things_twice(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("gateway")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        log.configure(as_json=True, level="info")
        log.configure(as_json=False, level="warning")
        logger.info("not this")
        logger.warning("this")
        assert capsys.readouterr().err == "WARNING this\n"
    finally:
        logger.handlers[:], logger.propagate, level = before
        logger.setLevel(level)
