from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TextIO

import pytest

import gateway
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.trimming.report import MessageOutcome, MessageOutcomes
from gateway.core.usage import Charge, Totals, Usage
from gateway.telemetry import log
from tests.support.timing import assert_ends, in_time

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
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
Pipe = tuple[int, TextIO]
FAILED = replace(CALL, status=502, outcome="upstream_failed", error_code="upstream_unreachable", charge=None)


def test_text_line_of_a_call() -> None:
    assert log.text_line(CALL, TOTALS) == (
        "chat gpt-5.1 · session 7f3c · used 7,951+212 · session 63,410 tok, $0.103200 · 1.9 s"
    )


def test_text_line_shows_errors_and_unknown_values() -> None:
    assert log.text_line(FAILED, None) == (
        "chat gpt-5.1 · session 7f3c · upstream_failed 502 upstream_unreachable · 1.9 s"
    )
    guessed = replace(CALL, charge=replace(CHARGE, source="estimated", cost_usd=None), session=None, model="")
    assert log.text_line(guessed, replace(TOTALS, unpriced_calls=1)) == "chat - · used 7,951+212 (estimated) · 1.9 s"
    assert "$" not in log.text_line(CALL, replace(TOTALS, unpriced_calls=1))


def test_text_line_shows_remaining_budget_tokens() -> None:
    assert log.text_line(CALL, TOTALS, Allowance(100_000, 36_590)).endswith(
        "· session 63,410 tok, $0.103200 · 36,590 of 100,000 left · 1.9 s"
    )
    assert "left" not in log.text_line(CALL, TOTALS, Allowance(limit_usd="1.000000", remaining_usd="0.500000"))


def test_json_line_of_a_call() -> None:
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
        "context_tokens": None,
        "context_tokens_original": None,
        "trimmed": None,
        "session_total_tokens": 63410,
        "overhead_ms": 1.23,
        "duration_ms": 1940.0,
    }
    nothing = json.loads(log.json_line(replace(FAILED, session=None), None))
    assert nothing["input_tokens"] is None
    assert nothing["session"] is None
    assert nothing["session_total_tokens"] is None


TRIMMED = replace(
    CALL,
    context=ContextRecord(
        tokens=7_960,
        original_tokens=18_204,
        source="exact",
        budget=8_000,
        conversation_tokens=5_000,
        tool_tokens=2_960,
        key="k",
        estimate=7_960,
        trimmed={"dedupe": 3, "condense": 12},
        message_fates=MessageOutcomes.of([MessageOutcome("user", 10, 10, "kept")] * 41),
    ),
)


def test_text_line_shows_trimmed_messages() -> None:
    assert "· 41 items 18,204→7,960 tok (dedupe 3, condense 12) ·" in log.text_line(TRIMMED, TOTALS)
    machine = json.loads(log.json_line(TRIMMED, TOTALS))
    assert (machine["context_tokens"], machine["context_tokens_original"]) == (7_960, 18_204)
    assert machine["trimmed"] == {"dedupe": 3, "condense": 12}


def test_text_line_shows_shadow_trimming() -> None:
    assert TRIMMED.context is not None
    shadow = replace(TRIMMED, context=replace(TRIMMED.context, shadow=True, tokens=18_204))
    assert "· 41 items 18,204 tok (shadow: dedupe 3, condense 12) ·" in log.text_line(shadow, TOTALS)


@pytest.mark.parametrize("as_json", [True, False])
def test_each_call_is_logged_as_one_line(as_json: bool) -> None:
    stream = io.StringIO()
    observer = log.CallLog(stream, as_json=as_json)
    observer.record(CALL, TOTALS)
    observer.record(FAILED, None)
    log.flush(60)
    assert stream.getvalue().count("\n") == 2
    assert all(json.loads(line) for line in stream.getvalue().splitlines() if as_json)


def test_only_calls_that_failed_or_were_refused_may_be_logged() -> None:
    stream = io.StringIO()
    observer = log.CallLog(stream, as_json=True, failures_only=True)
    left = replace(CALL, outcome="client_left", status=499)
    passed_on = replace(CALL, outcome="provider_error", status=429)
    broken = replace(CALL, outcome="upstream_broken")
    refused = replace(CALL, outcome="refused", status=400)
    for call in (CALL, replace(CALL, outcome="pending"), FAILED, left, passed_on, broken, refused):
        observer.record(call, TOTALS)
    log.flush(60)
    outcomes = [json.loads(line)["outcome"] for line in stream.getvalue().splitlines()]
    assert outcomes == ["upstream_failed", "provider_error", "upstream_broken", "refused"]


@pytest.mark.parametrize("as_json", [True, False])
def test_early_refusals_are_limited_to_ten_lines_per_minute_and_code(as_json: bool) -> None:
    stream, now = io.StringIO(), [0.0]
    observer = log.CallLog(stream, as_json=as_json, failures_only=True, clock=lambda: now[0])
    unknown = replace(
        FAILED, outcome="refused", status=401, error_code="invalid_api_key", notes={"credential": "3f2a9c01"}
    )
    for _ in range(1_010):
        observer.refused(unknown)
    observer.refused(replace(unknown, error_code="forbidden", notes={}))
    now[0] = 60.0
    observer.refused(unknown)
    log.flush(60)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 12
    if as_json:
        found = [json.loads(line) for line in lines]
        assert [one["left_out"] for one in found] == [0] * 11 + [1_000]
        assert [one["credential"] for one in found[9:]] == ["3f2a9c01", None, "3f2a9c01"]
        assert "credential" not in json.loads(log.json_line(FAILED, None))
    else:
        assert "refused 401 invalid_api_key · key with hash 3f2a9c01 ·" in lines[0]
        assert lines[-1].endswith("1,000 more before it not logged")


def test_line_feed_in_a_name_does_not_break_the_line() -> None:
    call = replace(CALL, model="a\nevent: forged", session=SessionKey("a", "s"))
    assert "\n" not in log.json_line(call, TOTALS)


def test_log_messages_are_json_with_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("gateway", logging.ERROR, "f", 1, "call %s failed", ("x",), sys.exc_info())
    line = json.loads(log.JsonFormatter().format(record))
    assert (line["event"], line["level"], line["message"]) == ("log", "error", "call x failed")
    assert "ValueError: why" in line["exception"]
    plain = logging.LogRecord("gateway", logging.INFO, "f", 1, "hello", (), None)
    assert "exception" not in json.loads(log.JsonFormatter().format(plain))


def test_configuring_twice_does_not_repeat_messages(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("gateway")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        log.configure(as_json=True, level="info")
        log.configure(as_json=False, level="warning")
        logger.info("not this")
        logger.warning("this")
        log.flush(60)
        assert re.fullmatch(rf"{TIME} WARNING this\n", capsys.readouterr().err)
    finally:
        logger.handlers[:], logger.propagate, level = before
        logger.setLevel(level)


# --- a reader that does not read ----------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Yield the reading end and the writing end of a pipe."""
    reader, writer = os.pipe()
    stream = open(writer, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    yield reader, stream
    os.close(reader)
    with contextlib.suppress(OSError):
        stream.close()


def test_calls_do_not_wait_for_a_pipe_without_reader(pipe: Pipe) -> None:
    reader, stream = pipe
    observer = log.CallLog(stream, as_json=True)

    def record() -> None:
        for _ in range(20_000):
            observer.record(CALL, TOTALS)

    assert_ends(record)
    with in_time(at_least=0.9):
        assert_ends(log.flush)  # it waits for a second

    counts = {"call": 0, "dropped": 0}

    def read() -> None:
        with open(reader, encoding="utf-8", closefd=False) as lines:
            for line in lines:
                found = json.loads(line)
                if found["event"] != "log":
                    counts["call"] += 1
                    continue
                told = re.fullmatch(
                    r"(\d+) log lines were dropped: the reader of the log is too slow", found["message"]
                )
                assert told is not None, found
                assert found["level"] == "warning"
                # On a slow machine, some lines may be written in between. Each gap then has its own message.
                counts["dropped"] += int(told[1])
                if sum(counts.values()) == 20_000:
                    return

    assert_ends(read)
    assert sum(counts.values()) == 20_000, counts
    assert counts["call"] >= 10_000


def test_log_messages_do_not_wait_for_a_pipe_without_reader(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stream = pipe
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("gateway")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        log.configure(as_json=False, level="info")

        def complain() -> None:
            for _ in range(3_000):
                logger.warning("m" * 100)

        assert_ends(complain)
    finally:
        logger.handlers[:], logger.propagate, level = before
        logger.setLevel(level)


def test_lines_and_messages_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.getLogger("gateway")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        log.configure(as_json=False, level="info")
        observer = log.CallLog(stream, as_json=False)
        for number in range(50):
            logger.info("message %d", number)
            observer.record(replace(CALL, model=f"m{number}"), None)
        log.flush(60)
    finally:
        logger.handlers[:], logger.propagate, level = before
        logger.setLevel(level)
    lines = stream.getvalue().splitlines()
    assert all(re.match(rf"{TIME} ", line) for line in lines)
    assert [line.split(" ", 1)[1] for line in lines[::2]] == [f"INFO message {number}" for number in range(50)]
    assert [line.split()[2] for line in lines[1::2]] == [f"m{number}" for number in range(50)]


def test_one_stream_has_one_writer_thread() -> None:
    stream = io.StringIO()
    before = threading.active_count()
    observers = [log.CallLog(stream, as_json=False) for _ in range(5)]
    for observer in observers:
        observer.record(CALL, None)
    assert threading.active_count() <= before + 1
    log.flush(60)
    assert stream.getvalue().count("\n") == 5


def test_writer_continues_after_a_closed_stream() -> None:
    stream = io.StringIO()
    observer = log.CallLog(stream, as_json=False)
    log.flush(60)
    for _ in range(2):
        observer.record(CALL, None)
        log.flush(60)
    assert stream.getvalue().count("\n") == 2


def test_writer_continues_after_its_reader_left(pipe: Pipe) -> None:
    reader, stream = pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), reader)  # the reading end is gone, its number is not
    observer = log.CallLog(stream, as_json=True)
    for _ in range(2):
        observer.record(CALL, TOTALS)
        with in_time():
            log.flush(60)


CHILD = """
import logging, sys
from gateway.telemetry import log
log.configure(as_json=False, level="info")
for number in range(int(sys.argv[1])):
    logging.getLogger("gateway").info("line %06d %s", number, "x" * 200)
"""


def child(lines: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(gateway.__file__).parent.parent)}
    command = [sys.executable, "-c", CHILD, str(lines)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def test_queued_lines_are_written_when_the_process_ends() -> None:
    with child(200) as process:  # as many as a pipe holds
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert process.wait(60) == 0
    assert [line.split()[3] for line in lines] == [f"{number:06}" for number in range(200)]


def test_process_can_end_while_its_log_is_not_read() -> None:
    with child(5_000) as process:
        assert process.wait(60) == 0
