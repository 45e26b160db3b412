"""Test the values that are computed from a call record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.counting.calibration import LastTurn
from gateway.core.record import ORPHANED, CallRecord, ContextRecord
from gateway.core.usage import Charge, Usage, UsageSource
from tests.support.records import record

CONTEXT = ContextRecord(100, 300, "calibrated", 150, 100, 0, "k", 90)
RECORD = CallRecord(
    call_id="c", request_id="c", session=None, derived_session=False, started_at=0.0, dialect="chat",
    operation="chat", provider="p", model="m", response_model=None, stream=False, status=200, outcome="ok",
    error_code=None, finish_reason=None, tools=("find",), charge=Charge(Usage.of(110, 1), "provider"),
    overhead_s=0.0, first_byte_s=None, duration_s=0.0, request_bytes=0, response_bytes=0, context=CONTEXT,
)  # fmt: skip


def test_remaining_tokens_exclude_margin_and_are_not_negative() -> None:
    assert replace(CONTEXT, margin=20).remaining == 30
    assert replace(CONTEXT, margin=60).remaining == 0
    assert replace(CONTEXT, budget=None).remaining is None


def test_a_shadow_saves_nothing() -> None:
    assert (RECORD.saved_tokens, replace(RECORD, context=replace(CONTEXT, shadow=True)).saved_tokens) == (200, 0)
    assert replace(RECORD, context=None).saved_tokens == 0


def test_last_turn_is_the_error_of_the_estimate() -> None:
    assert RECORD.last_turn == LastTurn("k", 20)


def test_dropped_kept_tokens_do_not_lower_the_estimate() -> None:
    assert replace(CONTEXT, kept=1_000).reported(1_095) == LastTurn("k", 5)
    assert replace(CONTEXT, kept=1_000).reported(400) == LastTurn("k", 0)


@pytest.mark.parametrize(("tokens", "source"), [(0, "provider"), (110, "estimated"), (110, "mixed")])
def test_only_reported_nonzero_usage_teaches(tokens: int, source: UsageSource) -> None:
    taught = replace(
        RECORD, charge=Charge(Usage.of(tokens, 1), source), context=replace(CONTEXT, before=LastTurn("k", 1))
    )
    assert (taught.last_turn, taught.request_tokens) == (None, 0)


def test_surprise_needs_an_expectation() -> None:
    tokens = CONTEXT.tokens + 10
    assert CONTEXT.surprise(tokens) is None
    assert replace(CONTEXT, before=LastTurn("k", 10)).surprise(tokens) == 10


def test_further_passes_do_not_count_as_request_tokens() -> None:
    context = replace(CONTEXT, before=LastTurn("k", 10), beyond=80)
    record = replace(RECORD, charge=Charge(Usage.of(190, 1), "provider"), context=context)
    assert (record.request_tokens, context.surprise(record.request_tokens)) == (110, 10)
    assert record.last_turn == LastTurn("k", 20)
    unknown = replace(record, context=replace(context, beyond=190))
    assert (unknown.request_tokens, unknown.last_turn) == (0, None)


def test_tools_count_unless_record_is_provisional() -> None:
    assert RECORD.counted_tools == ("find",)
    assert replace(RECORD, outcome=ORPHANED).counted_tools == replace(RECORD, charge=None).counted_tools == ()


def test_what_code_reads_of_the_remarks_is_typed() -> None:
    plain = record("c", 1.0)
    assert (plain.retries, plain.has_fallen_back, plain.traceparent, plain.credential_hash) == (0, False, None, None)
    notes = {"retries": "2, the last after 503", "fallback": "a/b: 500", "traceparent": "00-1", "credential": "3f2a"}
    noted = replace(plain, notes=notes)
    assert (noted.retries, noted.has_fallen_back, noted.traceparent, noted.credential_hash) == (2, True, "00-1", "3f2a")
    assert replace(plain, notes={"retries": "several"}).retries == 1, "of another version"
