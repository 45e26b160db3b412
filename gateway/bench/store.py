"""Measure the cost of reserving and settling a call on a SQLite store."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.core.ids import call_id
from gateway.core.ledger.arithmetic import Amount, Claim, Hold, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.stored import OpenHold
from gateway.stores.sqlite import SqliteStore

_LIMIT: Final = Limits(tokens=10**12)
_LEASE_S: Final = 180.0
_TIMEOUT_S: Final = 5.0
_RUNS: Final = 5


async def record_of(file: Path, session: SessionKey) -> CallRecord | None:
    """Return the newest record of a session, or None."""
    store = SqliteStore(file, timeout_s=_TIMEOUT_S)
    try:
        return next(iter(await store.calls(session, 1)), None)
    finally:
        await store.aclose()


async def pair_us(file: Path, record: CallRecord, pairs: int) -> float:
    """Return the CPU time in µs for one hold and its settlement: the median of five runs.

    `record`: the template for the record of each call. `file`: the store to create.
    """
    store = SqliteStore(file, timeout_s=_TIMEOUT_S)
    try:
        await _hold_and_settle(store, record, range(pairs))
        times = []
        for run in range(1, _RUNS + 1):
            began = time.process_time()
            await _hold_and_settle(store, record, range(run * pairs, (run + 1) * pairs))
            times.append((time.process_time() - began) / pairs * 1e6)
        return statistics.median(times)
    finally:
        await store.aclose()


async def _hold_and_settle(store: SqliteStore, record: CallRecord, numbers: range) -> None:
    claim = Claim(record.accounts[-1], _LIMIT)
    for number in numbers:
        name = call_id(int(time.time() * 1000), number.to_bytes(10, "big"))
        settled = replace(record, call_id=name, request_id=name)
        fixed, unit = Amount(max(1, record.spent.tokens), record.spent.nano_usd, 1), Amount(1, 1)
        hold = Hold(name, (claim,), fixed, unit, least=1, most=2_048)
        await store.reserve(OpenHold(hold, settled), _LEASE_S)
        await store.settle(settled)
