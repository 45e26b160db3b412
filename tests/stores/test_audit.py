"""The audit log in each kind of store."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.audit import MOST_CHANGES, AuditEntry
from gateway.core.ports import Store
from gateway.core.session import SessionState
from gateway.stores.sqlite import SqliteStore
from tests.stores.files import PATIENT_S, Clock
from tests.stores.test_contract import KEY, soon

DAY_S = 86_400.0
ENTRY = AuditEntry(
    time.time(), "session.budget", "alice/s", "admin key", "192.0.2.1", {"tokens": 100, "usd": "1.5"}, {"tokens": 200}
)


async def add(store: Store, *targets: str) -> None:
    for target in targets:
        await soon(store.record_change(replace(ENTRY, target=target)))


async def targets(store: Store, limit: int, target: str = "") -> list[list[str]]:
    """Return the targets on each page."""
    pages, cursor = list[list[str]](), None
    while not pages or cursor is not None:
        page = await soon(store.changes(limit, cursor, target))
        pages.append([entry.target for entry in page.entries])
        cursor = page.cursor
        assert len(pages) < 100, "the pages do not end"
    return pages


async def test_an_empty_log_has_one_empty_page(store: Store) -> None:
    assert await targets(store, 5) == [[]]


async def test_an_entry_is_read_as_it_was_written(store: Store) -> None:
    entries = [ENTRY, replace(ENTRY, action="session.delete", target="ä/\0;", old=None, new=[1, "ü", None, 2.5, True])]
    for entry in entries:
        await soon(store.record_change(entry))
    assert [*(await soon(store.changes(10))).entries] == entries[::-1]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
async def test_pages_are_newest_first_and_hold_each_entry_once(store: Store, limit: int) -> None:
    names = [f"s{number}" for number in range(7)]
    await add(store, *names)
    pages = await targets(store, limit)
    assert [name for page in pages for name in page] == names[::-1]
    assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1)
    assert pages[-1]


async def test_entries_are_found_by_a_part_of_their_target(store: Store) -> None:
    await add(store, "alice/a", "bob", "alice/b", "bob/alice", "carol")
    assert await targets(store, 2, "alice") == [["bob/alice", "alice/b"], ["alice/a"]]
    assert await targets(store, 9, "bob") == [["bob/alice", "bob"]]
    assert await targets(store, 9, "%") == await targets(store, 9, "*") == [[]]


async def test_only_the_newest_entries_are_kept(store: Store) -> None:
    for _ in range(MOST_CHANGES // 100):
        await add(store, *["old"] * 100)
    await add(store, "new", "newer")
    found = [name for page in await targets(store, 1_000) for name in page]
    assert (len(found), found[:2]) == (MOST_CHANGES, ["newer", "new"])
    assert await targets(store, 5, "new") == [["newer", "new"]], "a search reads more than one chunk"


async def test_old_entries_are_deleted_and_newer_ones_stay(store: Store, clock: Clock) -> None:
    await add(store, "a", "b")
    clock.time = time.time() + 364 * DAY_S
    await soon(store.expire(0))
    assert await targets(store, 5) == [["b", "a"]]
    clock.time += 2 * DAY_S
    await soon(store.expire(0))
    assert await targets(store, 5) == [[]]
    await add(store, "c")
    assert await targets(store, 5) == [["c"]]


async def test_a_value_that_is_too_long_is_shortened(store: Store) -> None:
    await soon(store.record_change(replace(ENTRY, old=["x" * 100_000], new=["y" * 3_000])))
    [entry] = (await soon(store.changes(1))).entries
    assert entry.old.startswith('["xxx')
    assert entry.old.endswith("… (100,004 characters)")
    assert len(entry.old) < 5_000
    assert entry.new == ["y" * 3_000]


async def test_deleting_and_expiring_sessions_deletes_no_entry(store: Store) -> None:
    await soon(store.update(KEY, lambda _: SessionState()))
    await add(store, "alice/s")
    await soon(store.delete(KEY))
    await soon(store.expire(time.time() + DAY_S))
    assert await targets(store, 5) == [["alice/s"]]


async def test_a_file_keeps_entries_and_shows_one_that_is_damaged(path: Path) -> None:
    store = SqliteStore(path, timeout_s=PATIENT_S)
    await add(store, "a", "b", "c")
    await store._in_thread(lambda db: db.execute("UPDATE changes SET value = x'7b' WHERE target = 'b'"))
    await store.aclose()
    store = SqliteStore(path, timeout_s=PATIENT_S)
    try:
        assert [entry.action for entry in (await store.changes(5)).entries] == [
            ENTRY.action,
            "unreadable",
            ENTRY.action,
        ]
    finally:
        await store.aclose()
