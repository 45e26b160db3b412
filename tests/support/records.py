"""Write call records straight into a store, without making the calls: thousands per second."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import count
from pathlib import Path

from gateway.core.ids import call_id
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.usage import Charge, Usage
from gateway.stores.sqlite import SqliteStore

_numbers = count()


def record(session: str, at: float, *, model: str = "mock-large", cost: str = "0.001") -> CallRecord:
    """Return the record of a successful call."""
    number = next(_numbers)
    charge = Charge(Usage.of(1000, 10), "provider", Decimal(cost))
    return CallRecord(
        call_id(int(at * 1000), number.to_bytes(8, "big")), f"r{number}", SessionKey("default", session), False, at,
        "chat", "chat", "upstream", model, None, False, 200, "ok", None, "stop", (), charge,
        0.001, 0.1, 0.2, 10, 10,
    )  # fmt: skip


def settle(file: Path, records: Sequence[CallRecord]) -> None:
    """Write the records from another thread: with a browser, the event loop of the browser runs in this thread."""

    async def write() -> None:
        store = SqliteStore(file, timeout_s=5)
        for first in range(0, len(records), 250):
            await asyncio.gather(*(store.settle(one) for one in records[first : first + 250]))
        await store.aclose()

    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: asyncio.run(write())).result()
