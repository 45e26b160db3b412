"""What goes over sessions: their lists, their calls by name, and the forgetting of what is old.

In a cluster these keys lie elsewhere than the sessions and are written after them: they may be a moment behind, and
name what is gone. So whoever reads them looks at the session itself, and takes out what is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.core.ids import first_id_at
from gateway.core.namespaces import SessionKey
from gateway.core.record import CallRecord
from gateway.core.stored import Latest, Page, SessionView, Settled
from gateway.stores.cursor import Cursor
from gateway.stores.redis import values
from gateway.stores.redis.keys import Keys, member_of, session_of, session_of_member, tag_of
from gateway.stores.redis.link import Link, each, sound
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.unread import UnreadRecords, UnreadSessions

#: what is looked at in one round trip
_CHUNK: Final = 200
#: the last place among the calls that are kept under one request id
_NAMESAKES: Final = 31
#: ids that are read at once at the least
_LEAST_PAGE: Final = 100
#: digits of a call's id that are its time
_TIME_DIGITS: Final = 12


class Lists:
    """See the module."""

    def __init__(self, link: Link, keys: Keys, scripts: Scripts, unread: UnreadSessions) -> None:
        self._link = link
        self._keys = keys
        self._verb = scripts.call
        self._unread = UnreadRecords()
        self._unread_sessions = unread

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        row, calls, recent = await self._link.call(*self._asking(session))
        return values.view(session, row, values.tool_use(calls, recent))

    def _asking(self, session: SessionKey) -> list[Command]:
        tag = tag_of(session.namespace, session.id)
        calls, recent = self._keys.tools(tag)
        return [("HMGET", self._keys.session(tag), *values.VIEW), ("HGETALL", calls), ("LRANGE", recent, 0, -1)]

    async def _look(self, sessions: Sequence[SessionKey]) -> tuple[list[SessionView | None], list[SessionKey]]:
        """Sessions as they are now, None for what cannot be shown, and those of them that are not there any more."""
        found = await each(self._link, [command for key in sessions for command in self._asking(key)])
        views: list[SessionView | None] = [None] * len(sessions)
        gone: list[SessionKey] = []
        for at, key in enumerate(sessions):
            with self._unread_sessions.passed_over(tag_of(key.namespace, key.id)):
                row, calls, recent = map(sound, found[3 * at : 3 * at + 3])
                views[at] = values.view(key, row, values.tool_use(calls, recent))
                if views[at] is None:
                    gone.append(key)
        return views, gone

    async def page(self, namespace: str | None, limit: int, cursor: str | None, sort: str) -> Page:
        """See `Store.sessions`."""
        after = Cursor.parse(cursor) if cursor else None
        name = self._keys.sorted_list(namespace, sort)
        found: list[tuple[SessionView, Cursor]] = []
        while len(found) <= limit:
            # Reading thousands of replies in one go would keep calls out of the loop for as long.
            wanted = min(limit + 1 - len(found), _CHUNK)
            rows = await self._rows(name, wanted, after)
            keys = [session_of_member(member) for member, _ in rows]
            places = [Cursor(score, *key) for key, (_, score) in zip(_parts(keys), rows, strict=True)]
            views, gone = await self._look(keys)
            found += [(view, place) for view, place in zip(views, places, strict=True) if view is not None]
            await self._take_out(name, [member_of(key).encode() for key in gone])
            if len(rows) < wanted:
                break
            after = places[-1]
        more = str(found[limit - 1][1]) if len(found) > limit else None
        return Page([view for view, _ in found[:limit]], more)

    async def _rows(self, name: str, limit: int, after: Cursor | None) -> list[tuple[bytes, float]]:
        arguments: dict[str, Any] = {"limit": limit}
        if after is not None:
            member = member_of(SessionKey(after.namespace, after.id))
            arguments |= {"score": repr(float(after.value)), "member": member}
        [reply] = await self._link.call(self._verb("page", (name,), arguments))
        return [(member, float(score)) for member, score in zip(reply[::2], reply[1::2], strict=True)]

    async def _take_out(self, name: str, members: Sequence[bytes]) -> None:
        if members:
            await self._link.call(("ZREM", name, *members))

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`. In the place of each that cannot be read, an older one."""
        ids, records, _ = self._keys.calls(tag_of(session.namespace, session.id))
        [left] = await self._link.call(("HLEN", records))
        found: list[CallRecord] = []
        # Of calls that were deleted there are ids without records.
        while len(found) < limit and left > 0:
            wanted = max(limit - len(found), _LEAST_PAGE)
            # All have the score 0: they lie in the order of their ids.
            end = "+" if before is None else f"({before}"
            [newest] = await self._link.call(("ZREVRANGEBYLEX", ids, end, "-", "LIMIT", 0, wanted))
            if not newest:
                break
            [rows] = await self._link.call(("HMGET", records, *newest))
            found += [one for at, row in zip(newest, rows, strict=True) if (one := self._read(at, row)) is not None]
            left -= len([row for row in rows if row is not None])
            if len(newest) < wanted:
                break
            before = newest[-1].decode()
        return found[:limit]

    def _read(self, call_id: bytes, value: bytes | None) -> CallRecord | None:
        """A record; None where it is gone, or cannot be read."""
        return self._unread.read(call_id.decode(), value) if value is not None else None

    async def call(self, namespace: str | None, name: str) -> CallRecord | None:
        """See `Store.call`."""
        [tag], [places] = (
            await self._link.call(("GET", self._keys.place(name))),
            await self._link.call(("ZREVRANGE", self._keys.named(namespace, name), 0, _NAMESAKES)),
        )
        candidates = [(name, tag.decode())] if tag is not None else []
        return await self._first(namespace, [*candidates, *_places(places)])

    async def answered(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.answered`."""
        [places] = await self._link.call(("ZREVRANGE", self._keys.answered(namespace, answer), 0, _NAMESAKES))
        return await self._first(namespace, _places(places))

    async def _first(self, namespace: str | None, candidates: Sequence[tuple[str, str]]) -> CallRecord | None:
        """The first record that is there, of calls with their tags; only of sessions of a namespace (None: of any)."""
        for call_id, where in candidates:
            session = session_of(where)
            if namespace is not None and (session is None or session.namespace != namespace):
                continue
            with self._unread_sessions.passed_over(where):
                [row] = await self._link.call(("HGET", self._keys.calls(where)[1], call_id))
                if row is not None:
                    return self._unread.read(call_id, row)
        return None

    async def latest(self, after: int | None, limit: int) -> Latest:
        """See `Store.latest`."""
        arguments = {"limit": limit} | ({} if after is None else {"after": after})
        [(cursor, missed, entries)] = await self._link.call(self._verb("latest", self._keys.latest, arguments))
        noted = [values.noted(one) for one in entries]
        places = [("HGET", self._keys.calls(tag)[1], call_id) for call_id, tag, _ in noted]
        settled: list[Settled] = []
        for (call_id, tag, totals), reply in zip(noted, await each(self._link, places), strict=True):
            with self._unread_sessions.passed_over(tag):
                row = sound(reply)
                record = self._unread.read(call_id, row) if row is not None else None
                if record is not None:
                    settled.append(Settled(record, None if session_of(tag) is None else totals))
        return Latest(settled, cursor, missed)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        tag = tag_of(session.namespace, session.id)
        names = (self._keys.session(tag), self._keys.account(session.account), *self._keys.tools(tag))
        [found] = await self._link.call(self._verb("reset", names, {}))
        if found:
            for scope in (None, session.namespace):
                await self._link.call(("ZADD", self._keys.sorted_list(scope, "tokens"), 0, member_of(session)))
        return bool(found)

    async def forget(self, session: SessionKey, before: float | None = None) -> bool:
        """Forget a session with all that belongs to it, if it was called last before this time (None: in any case)."""
        tag = tag_of(session.namespace, session.id)
        arguments = {} if before is None else {"before": before}
        [found] = await self._link.call(self._verb("forget", self._keys.all_of(tag), arguments))
        [gone] = await self._link.call(("EXISTS", self._keys.session(tag)))
        if not gone:
            await self._leave_lists(session)
            await self._link.call(("ZREM", self._keys.oldest, tag))
        return bool(found)

    async def _leave_lists(self, session: SessionKey) -> None:
        for scope in (None, session.namespace):
            for sort in ("recent", "tokens"):
                await self._take_out(self._keys.sorted_list(scope, sort), [member_of(session).encode()])

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        gone = await self._expire_sessions(before)
        await self._expire_calls(before)
        await self._expire_alone(before)
        names = (self._keys.lessons, self._keys.lesson_times)
        verb = self._verb("unlearn", names, {"before": before, "limit": _CHUNK})
        while (await self._link.call(verb))[0]:
            pass
        return gone

    async def _expire_sessions(self, before: float) -> int:
        gone = 0
        name = self._keys.sorted_list(None, "recent")
        while members := await self._old(name, before):
            for member in members:
                gone += await self.forget(session_of_member(member), before)
            # One that was called again meanwhile is put back by that call.
            await self._take_out(name, members)
        return gone

    async def _expire_calls(self, before: float) -> None:
        oldest_kept = first_id_at(before)
        while tags := await self._old(self._keys.oldest, int(before * 1000)):
            for tag in tags:
                oldest = None
                with self._unread_sessions.passed_over(tag.decode()):
                    verb = self._verb("forget_calls", self._keys.calls(tag.decode()), {"before": oldest_kept})
                    [oldest] = await self._link.call(verb)
                entry: Command = ("ZREM", self._keys.oldest, tag)
                if oldest is not None:
                    entry = ("ZADD", self._keys.oldest, int(oldest[:_TIME_DIGITS], 16), tag)
                await self._link.call(entry)

    async def _expire_alone(self, before: float) -> None:
        while tags := await self._old(self._keys.alone, before):
            await self._take_out(self._keys.alone, tags)
            for tag in tags:
                names = self._keys.all_of(tag.decode())[3:7]
                await self._link.call(self._verb("forget_alone", names, {"before": before}))

    async def _old(self, name: str, before: float) -> list[bytes]:
        [found] = await self._link.call(("ZRANGEBYSCORE", name, "-inf", f"({before!r}", "LIMIT", 0, _CHUNK))
        return list(found)


def _parts(keys: Sequence[SessionKey]) -> list[tuple[str, str]]:
    return [(key.namespace, key.id) for key in keys]


def _places(members: Sequence[bytes]) -> list[tuple[str, str]]:
    """Calls and the tags that they lie under, of what a name leads to."""
    return [(call_id, tag) for call_id, _, tag in (member.decode().partition("\n") for member in members)]
