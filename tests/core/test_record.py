"""What a record tells of its call beside what stands in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.core.counting.calibration import LastTurn
from gateway.core.record import ORPHANED, CallRecord, ContextRecord
from gateway.core.usage import Charge, Usage, UsageSource

CONTEXT = ContextRecord(100, 300, "calibrated", 150, 100, 0, "k", 90)
RECORD = CallRecord(
    call_id="c", request_id="c", session=None, derived_session=False, started_at=0.0, dialect="chat",
    operation="chat", provider="p", model="m", response_model=None, stream=False, status=200, outcome="ok",
    error_code=None, finish_reason=None, tools=("find",), charge=Charge(Usage.of(110, 1), "provider"),
    overhead_s=0.0, first_byte_s=None, duration_s=0.0, request_bytes=0, response_bytes=0, context=CONTEXT,
)  # fmt: skip


def test_a_margin_is_no_part_of_what_remains_and_less_than_nothing_remains_of_no_budget() -> None:
    assert replace(CONTEXT, margin=20).remaining == 30
    assert replace(CONTEXT, margin=60).remaining == 0
    assert replace(CONTEXT, budget=None).remaining is None


def test_a_shadow_saves_nothing() -> None:
    assert (RECORD.saved_tokens, replace(RECORD, context=replace(CONTEXT, shadow=True)).saved_tokens) == (200, 0)
    assert replace(RECORD, context=None).saved_tokens == 0


def test_a_session_remembers_by_how_much_its_estimate_was_off() -> None:
    assert RECORD.last_turn == LastTurn("k", 20)


def test_what_a_provider_dropped_of_what_it_keeps_makes_no_request_lighter() -> None:
    assert replace(CONTEXT, kept=1_000).reported(1_095) == LastTurn("k", 5)
    assert replace(CONTEXT, kept=1_000).reported(400) == LastTurn("k", 0)


@pytest.mark.parametrize(("tokens", "source"), [(0, "provider"), (110, "estimated"), (110, "mixed")])
def test_only_what_the_provider_said_teaches_and_no_request_weighs_nothing(tokens: int, source: UsageSource) -> None:
    taught = replace(
        RECORD, charge=Charge(Usage.of(tokens, 1), source), context=replace(CONTEXT, before=LastTurn("k", 1))
    )
    assert (taught.last_turn, taught.request_tokens) == (None, 0)


def test_a_surprise_is_one_only_where_something_was_expected() -> None:
    tokens = CONTEXT.tokens + 10
    assert CONTEXT.surprise(tokens) is None
    assert replace(CONTEXT, before=LastTurn("k", 10)).surprise(tokens) == 10


def test_passes_beyond_the_first_are_no_part_of_what_the_request_weighed() -> None:
    context = replace(CONTEXT, before=LastTurn("k", 10), beyond=80)
    record = replace(RECORD, charge=Charge(Usage.of(190, 1), "provider"), context=context)
    assert (record.request_tokens, context.surprise(record.request_tokens)) == (110, 10)
    assert record.last_turn == LastTurn("k", 20)
    unknown = replace(record, context=replace(context, beyond=190))
    assert (unknown.request_tokens, unknown.last_turn) == (0, None)


def test_the_tools_of_a_call_count_unless_its_own_record_may_yet_come() -> None:
    assert RECORD.counted_tools == ("find",)
    assert replace(RECORD, outcome=ORPHANED).counted_tools == replace(RECORD, charge=None).counted_tools == ()
