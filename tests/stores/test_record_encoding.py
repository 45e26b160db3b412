"""Encoded records: they are read as they were written, are small, and JSON of earlier versions is read as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gateway.core.counting.calibration import LastTurn
from gateway.core.counting.context import ToolResultTokens
from gateway.core.ledger.arithmetic import AccountKey, Amount, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallError, CallRecord, ContextRecord, ThinkingRecord
from gateway.core.usage import Charge, Usage
from gateway.stores import record_encoding
from gateway.stores.damage import UNREADABLE
from gateway.stores.record_encoding import decode_record, encode_record

KEY = SessionKey("alice", "agent-7f3a")
CONTEXT = ContextRecord(4_230, 4_230, "learned", 100_000, 2_100, 2_130, "openai\ngpt-5-mini\nchat\n", 4_180)
RECORD = CallRecord(
    call_id="01a1e081916900001b591932cf04840d", request_id="01a1e081916900001b591932cf04840d", session=KEY,
    derived_session=False, started_at=1_794_767_950.185767, dialect="chat", operation="chat", provider="openai",
    model="gpt-5-mini", response_model="gpt-5-mini-2025-08-07", stream=True, status=200, outcome="ok", error_code=None,
    finish_reason="tool_calls", tools=("search", "read_file"),
    charge=Charge(Usage(9_026, 1_509, 10_535, 1_000, 0, 64), "provider", Decimal("1.13579520")),
    overhead_s=0.0021, first_byte_s=0.412, duration_s=3.1, request_bytes=18_204, response_bytes=22_118,
    context=CONTEXT, accounts=(AccountKey("key", "alice"), KEY.account), spent=Amount(4_522, 1_234_560, 1),
)  # fmt: skip
FULL = replace(
    RECORD, request_id="r", error_code="x", error=CallError("no", {"limit": 3}), declared=Limits(tokens=5),
    notes={"fallback": "a"}, mode="raw", step="plan", kept="k", answer="a" * 32, labels={"tag": "x"},
    accounts=(AccountKey("session", "alice", "parent"), *RECORD.accounts), first_byte_s=None,
    context=replace(
        CONTEXT, frames=3, before=LastTurn("k", 1, 2, 3, 4), trimmed={"drop": 2}, saved={"drop": 9}, shadow=True,
        tool_weights={"search": ToolResultTokens(3, 4)}, thinking=ThinkingRecord(2, 1, "trim"), margin=7, kept=8,
        beyond=9, newest=10,
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        FULL,
        replace(RECORD, session=None),
        replace(FULL, session=None),
        replace(RECORD, charge=None, context=None),
    ],
)
def test_a_record_is_read_as_it_was_written(record: CallRecord) -> None:
    assert decode_record(encode_record(record), record.call_id, record.session) == record


def test_an_ordinary_record_takes_a_seventh_of_its_json() -> None:
    assert len(encode_record(RECORD)) < 195
    assert len(encode_record(RECORD)) < len(msgspec.json.encode(RECORD)) / 7


def test_a_long_record_is_compressed() -> None:
    record = replace(RECORD, error=CallError("the budget is used up, ask for more. " * 25))
    assert len(encode_record(record)) < 300
    assert decode_record(encode_record(record), record.call_id, KEY) == record


def test_json_of_an_earlier_version_is_read() -> None:
    value = msgspec.json.decode(msgspec.json.encode(FULL))
    del value["labels"]
    assert decode_record(msgspec.json.encode(value), "", None) == replace(FULL, labels={})


@given(some.floats(0, 4e9), some.floats(0, 1e6), some.none() | some.floats(0, 1e6))
def test_times_are_exact(started_at: float, duration_s: float, first_byte_s: float | None) -> None:
    record = replace(RECORD, started_at=started_at, duration_s=duration_s, first_byte_s=first_byte_s)
    assert decode_record(encode_record(record), record.call_id, KEY) == record


@given(some.integers(0, 2**53), some.integers(0, 2**53), some.decimals(0, 10**9, allow_nan=False, places=12))
def test_amounts_are_exact(tokens: int, more: int, cost: Decimal) -> None:
    charge = Charge(Usage(tokens, more, tokens + more, tokens), "mixed", cost)
    record = replace(RECORD, charge=charge, spent=Amount(tokens, more, 1))
    assert decode_record(encode_record(record), record.call_id, KEY) == record


def test_every_field_has_a_place_in_the_format() -> None:
    # A new field goes to the end of the list in the module.
    kinds: tuple[tuple[type, tuple[str, ...], set[str]], ...] = (
        (CallRecord, record_encoding._FIELDS, {"call_id"}),
        (ContextRecord, record_encoding._CONTEXT, set()),
        (Usage, record_encoding._USAGE, set()),
    )
    for kind, names, others in kinds:
        assert {*names} == {field.name for field in fields(kind)} - others
        assert len(names) == len({*names})


def test_the_format_of_stored_records_does_not_change() -> None:
    value = bytes.fromhex(STORED)
    assert decode_record(value, RECORD.call_id, KEY) == RECORD


@pytest.mark.parametrize("change", [lambda value: b"\x03" + value[1:], lambda value: value[:9], lambda _: b""])
def test_a_damaged_record_is_an_error_that_stores_expect(change: Callable[[bytes], Any]) -> None:
    with pytest.raises(UNREADABLE):
        decode_record(change(encode_record(RECORD)), RECORD.call_id, KEY)


#: `RECORD` as the first version with this format wrote it
STORED = (
    "01dc0022c0c0c2cf00066054fa200527000005aa6770742d352d6d696e6991ab2d323032352d30382d3037c3ccc810c01e92"
    "a6736561726368a9726561645f66696c659399cd2342cd05e5cd2927cd03e8004000000026aa312e3133353739353230cd08"
    "34ce00064960ce002f4d60cd471ccd566680dc0014cd1086cd1086a76c6561726e6564ce000186a0cd0834cd085291a56368"
    "61740acd1054c0c08080c2c080000000c00092000193cd11aace0012d68001c0c0a0c090c0c0c080"
)
