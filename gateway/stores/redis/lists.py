"""List sessions and calls, and delete expired ones.

In a cluster the lists are on other servers than the sessions and are written after them. So they may be slightly out of
date, and name sessions or calls that are deleted. Each reader therefore reads the session itself, and removes deleted
ones from the list.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, NamedTuple

from gateway.core.ids import first_id_at
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.stored import MOST_SEARCHED, SORTS, LatestCalls, Page, SessionView, Settled, Sort
from gateway.core.tools import ToolUse
from gateway.stores.cursor import Cursor, Names
from gateway.stores.damage import UnreadRecords, UnreadSessions
from gateway.stores.redis import values
from gateway.stores.redis.keys import NAMESAKES, member_of, session_of, session_of_member, tag_of
from gateway.stores.redis.link import Link, call_each, undamaged
from gateway.stores.redis.per_server import LedgerScripts, home_of
from gateway.stores.redis.scripts import Command
from gateway.stores.rollups import is_of_key
from gateway.stores.sums import SUMS

#: sessions or calls to read in one round trip
_CHUNK: Final = 200
#: names to read in one round trip of a search by a part of a name
_SEARCH: Final = 1_000
#: hours or days of usage to read in one round trip
_PERIODS: Final = 50
#: least number of call ids to read at once
_LEAST_PAGE: Final = 100
#: records of one session to read at once in a search for the newest calls of all sessions
_RECORDS: Final = 20
#: The first member of a list that contains all calls. A list that is shortened to its maximum length loses this member
#: first, which shows that there are older calls.
_BEGIN: Final = b""
#: first digits of a call id, which are its time
_TIME_DIGITS: Final = 12
#: the fields of a session with its tokens and its cost
_TOKENS: Final = values.TOTALS[SUMS.index("total_tokens") :][:1]
_COST: Final = values.TOTALS[SUMS.index("cost_pico_usd") :][:1]
_NO_TOOLS: Final = ToolUse()


class SessionList(NamedTuple):
    """A request for sessions of a namespace (None: of all) that have `part` in their names (empty: all)."""

    namespace: str | None
    sort: Sort
    part: str = ""


class Lists:
    """Reads lists of sessions and calls, and deletes from them; see the module."""

    def __init__(  # made in one place
        self, link: Link, scripts: LedgerScripts, unread: UnreadSessions, usage_tags: Sequence[str]
    ) -> None:
        self._link = link
        self._keys = scripts.keys
        self._script = scripts.call
        self._ttl_ms = scripts.ttl_ms
        self._unread = UnreadRecords()
        self._unread_sessions = unread
        self._usage_tags = usage_tags
        self._retention = scripts.retention
        self._now = scripts.now

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        tag = tag_of(session.namespace, session.id)
        names = self._keys.tools(tag)
        row, calls, recent = await self._link.call(
            ("HMGET", self._keys.session(tag), *values.VIEW), ("HGETALL", names[0]), ("LRANGE", names[1], 0, -1)
        )
        return values.view(session, row, values.tool_use(calls, recent))

    async def _read_sessions(self, sessions: Sequence[SessionKey]) -> tuple[list[SessionView | None], list[SessionKey]]:
        """Return the views of sessions, with None for each that cannot be shown, and the sessions that do not exist."""
        tags = [tag_of(key.namespace, key.id) for key in sessions]
        rows = await call_each(self._link, [("HMGET", self._keys.session(tag), *values.VIEW) for tag in tags])
        views: list[SessionView | None] = [None] * len(sessions)
        deleted: list[SessionKey] = []
        for index, (key, tag, row) in enumerate(zip(sessions, tags, rows, strict=True)):
            with self._unread_sessions.skip_damaged(tag):
                views[index] = values.view(key, undamaged(row), _NO_TOOLS)
                if views[index] is None:
                    deleted.append(key)
        return views, deleted

    async def page(self, asked: SessionList, limit: int, after: Cursor | None) -> Page:
        """See `Store.sessions`."""
        if asked.sort == "cost":
            await self._rank_by_cost(asked.namespace)
        name, names = self._keys.sorted_list(asked.namespace, asked.sort), Names(asked.namespace, asked.part)
        found: list[tuple[SessionView, Cursor]] = []
        searched = 0
        while len(found) <= limit:
            # Reading thousands of replies at once would block the event loop.
            most = min(limit + 1 - len(found), _CHUNK)
            wanted = _SEARCH if asked.part else most
            rows = await self._rows(name, wanted, after)
            places = [place for place in rows if names.match(place)][:most]
            found += await self._shown(asked, places)
            searched += len(rows)
            if len(places) == most:
                after = places[-1]
            elif len(rows) < wanted:
                break
            else:
                after = rows[-1]
            if asked.part and searched >= MOST_SEARCHED and len(found) <= limit:
                return Page([view for view, _ in found], str(after))
        more = str(found[limit - 1][1]) if len(found) > limit else None
        return Page([view for view, _ in found[:limit]], more)

    async def _shown(self, asked: SessionList, places: Sequence[Cursor]) -> list[tuple[SessionView, Cursor]]:
        """Return the sessions that can be shown, with their places, and remove deleted ones from the list."""
        views, deleted = await self._read_sessions([place.key for place in places])
        name = self._keys.sorted_list(asked.namespace, asked.sort)
        await self._remove(name, [member_of(key).encode() for key in deleted])
        return [(view, place) for view, place in zip(views, places, strict=True) if view is not None]

    async def _rows(self, name: str, limit: int, after: Cursor | None) -> list[Cursor]:
        arguments: dict[str, Any] = {"limit": limit}
        if after is not None:
            arguments |= {"score": repr(float(after.value)), "member": member_of(after.key)}
        [reply] = await self._link.call(self._script("page", (name,), arguments))
        keys = map(session_of_member, reply[::2])
        return [Cursor(float(score), key.namespace, key.id) for key, score in zip(keys, reply[1::2], strict=True)]

    async def _rank_by_cost(self, namespace: str | None) -> None:
        """Add sessions to the list by cost that an older version listed only in other orders."""
        recent, by_cost = (self._keys.sorted_list(namespace, sort) for sort in ("recent", "cost"))
        listed, ranked = await self._link.call(("ZCARD", recent), ("ZCARD", by_cost))
        for begin in range(0, listed if ranked < listed else 0, _CHUNK):
            [members] = await self._link.call(("ZRANGE", recent, begin, begin + _CHUNK - 1))
            if not members:
                return
            [scores] = await self._link.call(("ZMSCORE", by_cost, *members))
            missing = [member for member, score in zip(members, scores, strict=True) if score is None]
            await self._add_costs(by_cost, missing)

    async def _add_costs(self, by_cost: str, members: Sequence[bytes]) -> None:
        """Add sessions by their costs, as they would be searched for each time otherwise.

        A deleted session is removed from all lists. One that cannot be read is added with a cost of zero.
        """
        keys = [session_of_member(member) for member in members]
        tags = [tag_of(key.namespace, key.id) for key in keys]
        replies = await call_each(self._link, [("HMGET", self._keys.session(tag), "created", *_COST) for tag in tags])
        for key, tag, reply in zip(keys, tags, replies, strict=True):
            is_deleted, cost = False, 0
            with self._unread_sessions.skip_damaged(tag):
                created, sum_of_costs = undamaged(reply)
                is_deleted, cost = created is None, int(sum_of_costs or 0)
            if is_deleted:
                await self._leave_lists(key)
            else:
                # NX: a call that was settled meanwhile has written a newer cost.
                await self._link.call(("ZADD", by_cost, "NX", cost, member_of(key)))
        await self._link.call(("PEXPIRE", by_cost, self._ttl_ms))

    async def _remove(self, name: str, members: Sequence[bytes]) -> None:
        if members:
            await self._link.call(("ZREM", name, *members))

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`. A record that cannot be read is replaced by an older one."""
        ids, records, _ = self._keys.calls(tag_of(session.namespace, session.id))
        [left] = await self._link.call(("HLEN", records))
        found: list[CallRecord] = []
        # Deleted calls leave ids without records.
        while len(found) < limit and left > 0:
            wanted = max(limit - len(found), _LEAST_PAGE)
            # All have the score 0, so they are in the order of their ids.
            end = "+" if before is None else f"({before}"
            [newest] = await self._link.call(("ZREVRANGEBYLEX", ids, end, "-", "LIMIT", 0, wanted))
            if not newest:
                break
            [rows] = await self._link.call(("HMGET", records, *newest))
            found += [
                one for at, row in zip(newest, rows, strict=True) if (one := self._read(at, row, session)) is not None
            ]
            left -= len([row for row in rows if row is not None])
            if len(newest) < wanted:
                break
            before = newest[-1].decode()
        return found[:limit]

    def _read(self, call_id: bytes, value: bytes | None, key: SessionKey | None) -> CallRecord | None:
        """Decode a record of a session; return None if it is deleted or cannot be read."""
        return self._unread.read(call_id.decode(), value, key) if value is not None else None

    async def newest(self, namespace: str | None, limit: int) -> list[CallRecord]:
        """See `Store.newest_calls`."""
        name, found, end, is_whole = self._keys.newest(namespace), list[CallRecord](), "+", False
        while len(found) < limit:
            wanted = min(max(limit - len(found), _LEAST_PAGE), _CHUNK)
            [members] = await self._link.call(("ZREVRANGEBYLEX", name, end, "-", "LIMIT", 0, wanted))
            is_whole = _BEGIN in members
            found += await self._listed(name, [member for member in members if member != _BEGIN])
            if is_whole or len(members) < wanted:
                break
            end = f"({members[-1].decode()}"
        if len(found) >= limit or is_whole:
            return found[:limit]
        return await self._list_newest(namespace, limit)

    async def _listed(self, name: str, members: Sequence[bytes]) -> list[CallRecord]:
        """Return the records of these members, and remove deleted calls from the list."""
        places = _places(members)
        replies = await call_each(self._link, [("HGET", self._keys.calls(tag)[1], call_id) for call_id, tag in places])
        records, deleted = list[CallRecord](), list[bytes]()
        for member, (call_id, tag), reply in zip(members, places, replies, strict=True):
            with self._unread_sessions.skip_damaged(tag):
                row = undamaged(reply)
                if row is None:
                    deleted.append(member)
                elif (record := self._unread.read(call_id, row, session_of(tag))) is not None:
                    records.append(record)
        await self._remove(name, deleted)
        return records

    async def _list_newest(self, namespace: str | None, limit: int) -> list[CallRecord]:
        """Find the newest calls among the sessions, and list them.

        This is needed once after an older version, which had no such list. It is also needed if so many calls were
        deleted with their sessions that the list has too few.
        """
        found, is_whole = await self._search_newest(namespace, limit)
        if found:
            name, members = self._keys.newest(namespace), [*map(_place, found), *([_BEGIN] if is_whole else [])]
            add: list[str | bytes | int] = ["ZADD", name]
            for member in members:
                add += [0, member]
            await self._link.call(tuple(add), ("PEXPIRE", name, self._ttl_ms))
        return found

    async def _search_newest(self, namespace: str | None, limit: int) -> tuple[list[CallRecord], bool]:
        """Return the newest calls, and True if there are no others. Sessions with the latest calls are read first."""
        found, after, is_whole = list[CallRecord](), None, True
        while rows := await self._rows(self._keys.sorted_list(namespace, "recent"), _CHUNK, after):
            oldest = found[-1].call_id if len(found) == limit else ""
            # No call of a session began after its last call had ended, so older sessions need not be read.
            keys = [place.key for place in rows if first_id_at(place.value + 0.001) > oldest]
            for records in await asyncio.gather(*(self._newer(key, oldest, limit) for key in keys)):
                found += records
            found.sort(key=lambda record: record.call_id, reverse=True)
            is_whole &= len(found) <= limit and not oldest
            del found[limit:]
            if len(keys) < len(rows):
                return found, False
            after = rows[-1]
        return found, is_whole

    async def _newer(self, session: SessionKey, oldest: str, limit: int) -> list[CallRecord]:
        """Return the newest calls of a session with ids from `oldest` on, about `limit` of them."""
        found, before = list[CallRecord](), None
        with self._unread_sessions.skip_damaged(tag_of(session.namespace, session.id)):
            while len(found) < limit:
                records = await self.calls(session, _RECORDS, before)
                found += [record for record in records if record.call_id >= oldest]
                if len(records) < _RECORDS or records[-1].call_id < oldest:
                    break
                before = records[-1].call_id
        return found

    async def call(self, namespace: str | None, name: str) -> CallRecord | None:
        """See `Store.call`."""
        [tag], [places] = (
            await self._link.call(("GET", self._keys.place(name))),
            await self._link.call(("ZREVRANGE", self._keys.named(namespace, name), 0, NAMESAKES - 1)),
        )
        candidates = [(name, tag.decode())] if tag is not None else []
        return await self._first(namespace, [*candidates, *_places(places)])

    async def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """See `Store.each_call`. The list of the oldest calls has the tags of all sessions."""
        cursor, first = 0, first_id_at(since)
        while True:
            [(next_cursor, found)] = await self._link.call(("ZSCAN", self._keys.oldest, cursor, "COUNT", _CHUNK))
            for tag in found[::2]:
                async for record in self._calls_under(tag.decode(), first):
                    yield record
            cursor = int(next_cursor)
            if not cursor:
                return

    async def _calls_under(self, tag: str, first: str) -> AsyncIterator[CallRecord]:
        """Yield the records under a tag with ids from `first` on, oldest first. Damaged ones are left out."""
        ids, records, _ = self._keys.calls(tag)
        begin = f"[{first}"
        while True:
            some, rows = list[bytes](), list[bytes | None]()
            with self._unread_sessions.skip_damaged(tag):
                [some] = await self._link.call(("ZRANGEBYLEX", ids, begin, "+", "LIMIT", 0, _LEAST_PAGE))
                [rows] = await self._link.call(("HMGET", records, *some)) if some else ([],)
            for at, row in zip(some, rows, strict=False):
                if (record := self._read(at, row, session_of(tag))) is not None:
                    yield record
            if len(some) < _LEAST_PAGE or not rows:
                return
            begin = f"({some[-1].decode()}"

    async def answered(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.call_of_response`."""
        [places] = await self._link.call(("ZREVRANGE", self._keys.answered(namespace, answer), 0, NAMESAKES - 1))
        return await self._first(namespace, _places(places))

    async def _first(self, namespace: str | None, candidates: Sequence[tuple[str, str]]) -> CallRecord | None:
        """Return the first record that exists among calls (id and tag) of sessions of a namespace (None: of any)."""
        for call_id, tag in candidates:
            session = session_of(tag)
            if namespace is not None and (session is None or session.namespace != namespace):
                continue
            with self._unread_sessions.skip_damaged(tag):
                [row] = await self._link.call(("HGET", self._keys.calls(tag)[1], call_id))
                if row is not None:
                    return self._unread.read(call_id, row, session)
        return None

    async def latest(self, after: int | None, limit: int) -> LatestCalls:
        """See `Store.settled_after`."""
        arguments = {"limit": limit} | ({} if after is None else {"after": after})
        [(cursor, missed, entries)] = await self._link.call(self._script("latest", self._keys.latest, arguments))
        noted = [values.noted(one) for one in entries]
        places = [("HGET", self._keys.calls(tag)[1], call_id) for call_id, tag, _ in noted]
        settled: list[Settled] = []
        for (call_id, tag, totals), reply in zip(noted, await call_each(self._link, places), strict=True):
            with self._unread_sessions.skip_damaged(tag):
                row = undamaged(reply)
                record = self._unread.read(call_id, row, session_of(tag)) if row is not None else None
                if record is not None:
                    settled.append(Settled(record, None if session_of(tag) is None else totals))
        return LatestCalls(settled, cursor, missed)

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """See `Store.usage`."""
        rows, numbers = list[UsageRow](), range(query.first, query.last + 1)
        for begin in range(0, len(numbers), _PERIODS):
            asked = [(number, tag) for number in numbers[begin : begin + _PERIODS] for tag in self._usage_tags]
            commands = [("HGETALL", self._keys.usage(tag, query.period, number)) for number, tag in asked]
            for (number, _), reply in zip(asked, await call_each(self._link, commands), strict=True):
                rows += [row for row in values.usage_rows(number, undamaged(reply)) if is_of_key(row.labels, query.key)]
        return rows

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        tag = tag_of(session.namespace, session.id)
        names = (
            self._keys.session(tag),
            self._keys.account(session.account),
            *self._keys.tools(tag),
            self._keys.agents(tag),
        )
        [found] = await self._link.call(self._script("reset", names, {}))
        if found:
            for scope in (None, session.namespace):
                for sort in ("tokens", "cost"):
                    await self._link.call(("ZADD", self._keys.sorted_list(scope, sort), 0, member_of(session)))
        return bool(found)

    async def forget(self, session: SessionKey, before: float | None = None) -> bool:
        """Delete a session with all its data, if its last call was before this time (None: in any case)."""
        tag = tag_of(session.namespace, session.id)
        arguments = {} if before is None else {"before": before}
        [found] = await self._link.call(self._script("forget", self._keys.all_of(tag), arguments))
        [exists] = await self._link.call(("EXISTS", self._keys.session(tag)))
        if not exists:
            await self._leave_lists(session)
            await self._link.call(("ZREM", self._keys.oldest, tag))
        return bool(found)

    async def _leave_lists(self, session: SessionKey) -> None:
        """Remove a deleted session from the lists. If a call was settled meanwhile, the session is listed again."""
        member = member_of(session)
        for scope in (None, session.namespace):
            for sort in SORTS:
                await self._remove(self._keys.sorted_list(scope, sort), [member.encode()])
        name = self._keys.session(tag_of(session.namespace, session.id))
        [scores] = await self._link.call(("HMGET", name, "last", *_TOKENS, *_COST))
        if scores[0] is None:
            return
        for scope in (None, session.namespace):
            for sort, score in zip(SORTS, scores, strict=True):
                # A call that is settled now writes a newer score.
                await self._link.call(("ZADD", self._keys.sorted_list(scope, sort), "NX", score or 0, member))

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        deleted = await self._expire_sessions(before)
        await self._expire_calls(self._retention.calls_before(before, self._now()))
        await self._expire_alone(before)
        names = (self._keys.lessons, self._keys.lesson_times)
        command = self._script("unlearn", names, {"before": before, "limit": _CHUNK})
        while (await self._link.call(command))[0]:
            pass
        return deleted

    async def _expire_sessions(self, before: float) -> int:
        deleted = 0
        name = self._keys.sorted_list(None, "recent")
        while members := await self._old(name, before):
            for member in members:
                deleted += await self.forget(session_of_member(member), before)
            # If a session was called again meanwhile, that call adds it again.
            await self._remove(name, members)
        return deleted

    async def _expire_calls(self, before: float) -> None:
        oldest_kept = first_id_at(before)
        while tags := await self._old(self._keys.oldest, int(before * 1000)):
            for tag in tags:
                oldest = None
                with self._unread_sessions.skip_damaged(tag.decode()):
                    command = self._script("forget_calls", self._keys.calls(tag.decode()), {"before": oldest_kept})
                    [oldest] = await self._link.call(command)
                entry: Command = ("ZREM", self._keys.oldest, tag)
                if oldest is not None:
                    entry = ("ZADD", self._keys.oldest, int(oldest[:_TIME_DIGITS], 16), tag)
                await self._link.call(entry)

    async def _expire_alone(self, before: float) -> None:
        while tags := await self._old(self._keys.alone, before):
            await self._remove(self._keys.alone, tags)
            for tag in tags:
                names = self._keys.all_of(tag.decode())[3:7]
                await self._link.call(self._script("forget_alone", names, {"before": before}))

    async def _old(self, name: str, before: float) -> list[bytes]:
        [found] = await self._link.call(("ZRANGEBYSCORE", name, "-inf", f"({before!r}", "LIMIT", 0, _CHUNK))
        return list(found)


def _places(members: Sequence[bytes]) -> list[tuple[str, str]]:
    """Decode members of a list of calls into call ids and the tags of their records."""
    return [(call_id, tag) for call_id, _, tag in (member.decode().partition("\n") for member in members)]


def _place(record: CallRecord) -> bytes:
    """Return the member of a call in lists of calls: its id, and the tag of its record."""
    return f"{record.call_id}\n{home_of(record)}".encode()
