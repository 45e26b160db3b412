"""What is found by looking through sessions: by a part of their names, by what they cost, and the newest calls of all.

Stores keep sessions in the order of their last calls and of their tokens. All else is looked for here, among a bounded
number of sessions, those called last first.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Sequence
from decimal import Decimal
from typing import Final, Literal, get_args

from gateway.core.errors import InvalidRequest
from gateway.core.namespaces import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.stored import Page, SessionView
from gateway.core.values import dataclass
from gateway.stores.cursor import Cursor

Sort = Literal["recent", "tokens", "cost"]
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
#: sessions that one request looks through: about 0.2 s of a SQLite store
MOST: Final = 10_000
_PAGE: Final = 1_000
_CALLS_PAGE: Final = 200
#: records of a session that are read at once, where the newest of all sessions are looked for
_RECORDS_PAGE: Final = 20
_PICO: Final = Decimal(10) ** 12


@dataclass(frozen=True, slots=True)
class Wanted:
    """A page of sessions of one namespace (None: of all). `part`: of the names they have for whoever asks."""

    namespace: str | None
    limit: int
    cursor: str | None = None
    sort: Sort = "recent"
    part: str = ""

    def is_met(self, view: SessionView) -> bool:
        """Whether the session has the part in its name."""
        return self.part.lower() in view.key.shown(self.namespace).lower()


async def find_sessions(store: Store, wanted: Wanted, most: int = MOST) -> Page:
    """The page. Its cursor may stand where nothing was found yet: looking goes on from there."""
    if wanted.sort == "cost":
        return await _by_cost(store, wanted, most)
    if not wanted.part:
        return await store.sessions(wanted.namespace, wanted.limit, wanted.cursor, wanted.sort)
    return await _by_name(store, wanted, most)


async def _by_name(store: Store, wanted: Wanted, most: int) -> Page:
    found: list[SessionView] = []
    cursor = wanted.cursor
    async for page in _pages(store, wanted, cursor, most):
        for view in page.sessions:
            if not wanted.is_met(view):
                continue
            if len(found) == wanted.limit:
                return Page(found, str(Cursor.of(found[-1], wanted.sort)))
            found.append(view)
        cursor = page.cursor
    return Page(found, cursor)


async def _by_cost(store: Store, wanted: Wanted, most: int) -> Page:
    """The dearest of the `most` sessions called last."""
    after = Cursor.parse(wanted.cursor) if wanted.cursor else None
    pages = [page async for page in _pages(store, wanted, None, most)]
    rows = [(_cost(view), view) for page in pages for view in page.sessions if wanted.is_met(view)]
    rows = sorted((row for row in rows if after is None or row[0] < after), key=lambda row: row[0], reverse=True)
    more = str(rows[wanted.limit - 1][0]) if len(rows) > wanted.limit else None
    return Page([view for _, view in rows[: wanted.limit]], more)


def _cost(view: SessionView) -> Cursor:
    return Cursor(int(view.totals.cost_usd * _PICO), view.key.namespace, view.key.id)


async def _pages(store: Store, wanted: Wanted, cursor: str | None, most: int) -> AsyncIterator[Page]:
    """Pages of all sessions, until there are no more or enough were looked at."""
    looked_at, sort = 0, "tokens" if wanted.sort == "tokens" else "recent"
    while True:
        page = await store.sessions(wanted.namespace, min(_PAGE, most), cursor, sort)
        yield page
        cursor, looked_at = page.cursor, looked_at + len(page.sessions)
        if cursor is None or looked_at >= most:
            return
        # A store in memory answers without waiting for anything: the calls under way have their turn.
        await asyncio.sleep(0)


async def newest_calls(store: Store, namespace: str | None, limit: int) -> Sequence[CallRecord]:
    """The newest records of all sessions of a namespace (None: of all), newest first.

    Of each session at most one page is read beyond its records that are among the newest found so far.
    """
    found: list[CallRecord] = []  # oldest first
    cursor: str | None = None
    while True:
        page = await store.sessions(namespace, _CALLS_PAGE, cursor, "recent")
        for view in page.sessions:
            if len(found) == limit and found[0].started_at >= view.last_call_at:
                return found[::-1]
            await _add_newest(store, view.key, found, limit)
        cursor = page.cursor
        if cursor is None:
            return found[::-1]
        await asyncio.sleep(0)


async def _add_newest(store: Store, session: SessionKey, found: list[CallRecord], limit: int) -> None:
    """Add those of a session that are among the newest `limit` of all found."""
    size, before = min(limit, _RECORDS_PAGE), None
    while True:
        records = await store.calls(session, size, before)
        for record in records:
            insort(found, record, key=_by_id)
        del found[:-limit]
        if len(records) < size or (len(found) == limit and records[-1].call_id < found[0].call_id):
            return
        before = records[-1].call_id


def _by_id(record: CallRecord) -> str:
    return record.call_id


def sort_of(text: str | None) -> Sort:
    """The order that was asked for.

    Raises:
        InvalidRequest: it is none.
    """
    for sort in SORTS:
        if text in (sort, None):
            return sort
    raise InvalidRequest(f'"sort" is one of {", ".join(SORTS)}.', param="sort")
