"""Store in Redis 6.2 or newer, or Valkey: one server, sentinels or a cluster.

Each write is a Lua script that runs atomically, uses the server's clock, and has effect once per id. Every request has
a deadline, and every failure is raised as StoreUnavailable. If the server's machine loses power, Redis loses what it
has not synced to disk: up to a second with `appendonly yes` and `appendfsync everysec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.core.agent_use import AgentUse
from gateway.core.audit import AuditEntry, AuditPage
from gateway.core.counting.calibration import LastTurn
from gateway.core.errors import StoreConflict, StoreUnavailable
from gateway.core.ledger.arithmetic import DIMENSIONS, AccountKey, Balance, Claim, Dimension, Granted, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.redis_url import parse
from gateway.core.retention import DEFAULT_RETENTION, Retention
from gateway.core.rollup import UsageQuery, UsageRow
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.stored import (
    CallEnd,
    CallStart,
    KeyChange,
    LatestCalls,
    Lesson,
    OpenHold,
    Page,
    SessionView,
    Sort,
    StepEnding,
    StoredKey,
)
from gateway.core.usage import Totals
from gateway.stores import clock, states
from gateway.stores.compressed import Compressed, decompressed
from gateway.stores.cursor import Cursor
from gateway.stores.damage import Refusing, UnreadKeys, UnreadSessions, decode_key
from gateway.stores.redis import values
from gateway.stores.redis.audit import RedisAuditLog
from gateway.stores.redis.cluster import ClusterLink
from gateway.stores.redis.keys import NAMESAKES, Keys, session_of, tag_of
from gateway.stores.redis.link import Link, SingleLink
from gateway.stores.redis.lists import Lists, SessionList
from gateway.stores.redis.per_server import LedgerOperations, LedgerScripts, PerServerLedger
from gateway.stores.redis.per_slot import PerSlotLedger
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.settings import warn_of_loss
from gateway.stores.redis.state_updates import TRIES, StateUpdates, pause
from gateway.stores.redis.values import StoredState
from gateway.stores.redis.write_combiner import WriteCombiner

#: fields of a session: its last turn, and content that its provider stores
_LAST_TURN: Final = ("last_key", "residual", "frames", "kept")


class RedisStore:
    """A `Store` in Redis or Valkey. Create it while an event loop runs.

    Args:
        url: see `gateway.core.redis_url`.
        timeout_s: deadline of a request, from the moment it is sent.
        retention: how long data is kept. The server drops it by itself if no gateway runs any more.
        prefix: of all keys, so that several gateways can share a server.
        connections: most connections to each server. Each carries many requests at once.
        now: returns Unix seconds, for the age of sessions.
        moment: returns seconds of a monotonic clock, with which the server's clock is compared.
        ahead_s: seconds added to the server's clock, for tests only.

    Raises:
        ValueError: the URL is not one of Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.25,
        retention: Retention = DEFAULT_RETENTION,
        prefix: str = "gateway:",
        connections: int = 4,
        now: Callable[[], float] = time.time,
        moment: Callable[[], float] = lambda: clock.now().mono,
        ahead_s: Callable[[], float] | None = None,
    ) -> None:
        address = parse(url)
        scripts = Scripts(ahead_s)
        self._now = now
        self._shown = address.shown
        self._are_settings_checked = False
        self._unread_keys = UnreadKeys()
        self._unread_sessions = UnreadSessions()
        self._keys = Keys(prefix)
        self._script = scripts.call
        open_node = partial(SingleLink, scripts=scripts, timeout_s=timeout_s, connections=connections)
        is_cluster = address.kind == "cluster"
        self._link: Link = ClusterLink(address, open_node, timeout_s) if is_cluster else open_node(address)
        self._scripts = LedgerScripts(self._keys, scripts, now, retention)
        ledger = PerSlotLedger if is_cluster else PerServerLedger
        self._ledger: LedgerOperations = ledger(self._link, self._scripts, moment)
        self._lists = Lists(self._link, self._scripts, self._unread_sessions, self._ledger.usage_tags)
        self._updates = StateUpdates(self._link, self._scripts, self._ledger)
        self._audit = RedisAuditLog(self._link, self._keys.audit)
        self._lessons = WriteCombiner[str, Mapping[str, Lesson]](self._teach)

    # --- budgets ------------------------------------------------------------------------------------------------------

    async def settle(self, record: CallRecord, ending: StepEnding | None = None) -> Totals:
        """See `Store.settle`."""
        return (await self.settle_and_read(record, ending, ())).totals

    async def settle_and_read(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """See `Store.settle_and_read`."""
        with Refusing(record.call_id):
            return await self._updates.settle(record, ending, claims)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        return await self._ledger.reserve(opened, lease_s)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        return await self._ledger.extend(hold_id, units)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        return await self._ledger.renew(noted)

    async def overdue_holds(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue_holds`."""
        # Every serving gateway calls this first, and no command of an operator calls it.
        await self._check_settings()
        return await self._ledger.overdue(limit)

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        asked = self._ledger.ask_balances(claims)
        return self._ledger.balances(claims, await self._link.call(*asked)) if asked else ()

    async def open_call(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallStart:
        """See `Store.open_call`."""
        tag = _tag(session)
        asked = self._ledger.ask_balances(claims)
        (version, state), (key, residual, frames, kept, *sums), *replies = await self._link.call(
            ("HMGET", self._keys.state(tag), "v", "s"),
            ("HMGET", self._keys.session(tag), *_LAST_TURN, *(values.TOTALS if with_totals else ())),
            *asked,
            *[("HGET", self._keys.state(_tag(one)), "s") for one in above],
        )
        if state is not None:
            self._updates.remember(session, StoredState.of(version, state))
        balances = self._ledger.balances(claims, replies[: len(asked)])
        remembered = _remembered(state, key, residual, frames, kept)
        parents = tuple([states.read(one).parent for one in replies[len(asked) :]])
        return CallStart(remembered, balances, values.totals(sums) if with_totals else None, parents)

    async def override_limits(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Store.override_limits`."""
        arguments = self._scripts.basic() | {"kind": account.kind}
        if limits is not None:
            fields = {name: f"d{number}" for number, name in enumerate(DIMENSIONS, 1)}
            arguments["limits"] = [(fields[name], -1 if one is None else one) for name, one in limits.items()]
        # One after the other: their keys may be on different servers.
        await self._link.call(self._script("decide", (self._keys.account(account),), arguments))
        for command in self._scripts.list_accounts([account]):
            await self._link.call(command)

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        [row] = await self._link.call(("HMGET", self._keys.session(_tag(session)), *values.TOTALS))
        return values.totals(row)

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        return await self._lists.session(session)

    async def agents(self, session: SessionKey) -> Sequence[AgentUse]:
        """See `Store.agents`."""
        [fields] = await self._link.call(("HGETALL", self._keys.agents(_tag(session))))
        return values.agent_uses(fields)

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Store.remembered`."""
        tag = _tag(session)
        state, last = await self._link.call(
            ("HGET", self._keys.state(tag), "s"), ("HMGET", self._keys.session(tag), *_LAST_TURN)
        )
        return _remembered(state, *last)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        return await self._updates.update(session, change)

    # --- lessons ------------------------------------------------------------------------------------------------------

    async def learned(self, key: str) -> bytes | None:
        """See `Store.learned`."""
        [value] = await self._link.call(("HGET", self._keys.lessons, key))
        return value if isinstance(value, bytes) else None

    async def learn(self, lessons: Mapping[str, Lesson]) -> Mapping[str, bytes]:
        """See `Store.learn`."""
        known: Mapping[str, bytes] = await self._lessons.add("", lessons) if lessons else {}
        return known

    async def _teach(
        self, _: str, lessons: Sequence[Mapping[str, Lesson]]
    ) -> Sequence[Mapping[str, bytes] | Exception]:
        names = list({name: None for some in lessons for name in some})
        [known] = await self._link.call(("HMGET", self._keys.lessons, *names))
        for number in range(TRIES):
            old = dict(zip(names, known, strict=True))
            new, results = _taught(old, lessons)
            if not new:
                return results
            was = [old[name] for name in new]
            arguments = self._scripts.basic() | {"names": list(new), "was": [one is not None for one in was]}
            contents = (*(one or b"" for one in was), *new.values())
            keys = (self._keys.lessons, self._keys.lesson_times)
            [(done, *rest)] = await self._link.call(self._script("teach", keys, arguments, *contents))
            if done:
                return results
            old |= dict(zip(new, rest[0], strict=True))
            known = list(old.values())
            await pause(number + 1)
        raise StoreConflict("Too many lessons at once. Try again shortly.")

    # --- tool results and client keys ---------------------------------------------------------------------------------

    async def missing_results(self, session: SessionKey, handles: Sequence[str]) -> Sequence[str]:
        """See `Store.missing_results`."""
        if not handles:
            return []
        texts = self._keys.results(_tag(session))
        lookups: list[Command] = []
        for handle in handles:
            # Extend the life of the keys that lead to a text to that of the text.
            extended = [("PEXPIRE", name, self._scripts.ttl_ms) for name in self._names(session, handle)]
            lookups += [("HEXISTS", texts, f"={handle}"), *extended]
        replies = iter(await self._link.call(*lookups))
        missing, unlisted = list[str](), list[str]()
        for handle, (exists, *listed) in zip(handles, zip(replies, replies, replies, strict=True), strict=True):
            if not exists:
                missing.append(handle)
            elif not all(listed):
                unlisted.append(handle)
        if unlisted:
            await self._link.call(*self._list_handles(session, unlisted))
        return missing

    def _names(self, session: SessionKey, handle: str) -> tuple[str, str]:
        """Return the keys that lead from a handle to sessions: of all namespaces, and of the session's namespace."""
        return self._keys.handled(None, handle), self._keys.handled(session.namespace, handle)

    def _list_handles(self, session: SessionKey, handles: Iterable[str]) -> list[Command]:
        """Return the commands that make handles lead to their session."""
        arguments = {"place": _tag(session), "most": NAMESAKES, "ttl": self._scripts.ttl_ms}
        names = [name for handle in handles for name in self._names(session, handle)]
        return [self._script("name", (name,), arguments) for name in names]

    async def results_size(self, session: SessionKey) -> int:
        """See `Store.results_size`."""
        [size] = await self._link.call(("HGET", self._keys.results(_tag(session)), "size"))
        return int(size or 0)

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """See `Store.keep_results`."""
        keep = await asyncio.to_thread(self._keep_command, session, texts, most)
        # If a text is kept and its handle is not listed, `missing_results` lists it later.
        lists = [*self._list_handles(session, texts), *self._scripts.list_accounts([session.account])]
        *_, refused = await self._link.call(*lists, keep)
        return [handle.decode() for handle in refused]

    def _keep_command(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Command:
        compressed = [*map(Compressed.of, texts.values())]
        sizes = [one.size for one in compressed]
        arguments = self._scripts.basic() | {"handles": list(texts), "sizes": sizes, "most": most}
        name = self._keys.results(_tag(session))
        return self._script("keep_results", (name,), arguments, *(one.text for one in compressed))

    async def results(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        """See `Store.results`."""
        if not handles:
            return {}
        fields = [f"={handle}" for handle in handles]
        [texts] = await self._link.call(("HMGET", self._keys.results(_tag(session)), *fields))
        return {handle: decompressed(text) for handle, text in zip(handles, texts, strict=True) if text is not None}

    async def result(self, namespace: str | None, handle: str) -> str | None:
        """See `Store.result`."""
        [tags] = await self._link.call(("ZRANGE", self._keys.handled(namespace, handle), 0, -1))
        for tag in map(bytes.decode, tags):
            with self._unread_sessions.skip_damaged(tag):
                [text] = await self._link.call(("HGET", self._keys.results(tag), f"={handle}"))
                if text is not None and session_of(tag) is not None:
                    return decompressed(text)
        return None

    async def keys(self) -> Sequence[StoredKey]:
        """See `Store.keys`."""
        [rows] = await self._link.call(("HGETALL", self._keys.client_keys))
        names = (name.decode("utf-8", "replace") for name in rows[::2])
        return self._unread_keys.read([*zip(names, rows[1::2], strict=True)])

    async def add_key(self, key: StoredKey) -> bool:
        """See `Store.add_key`."""
        value = values.encode_json(key)
        [added] = await self._link.call(("HSETNX", self._keys.client_keys, key.name, value))
        return bool(added)

    async def change_key(self, name: str, change: KeyChange) -> StoredKey | None:
        """See `Store.change_key`."""
        for number in range(TRIES):
            [value] = await self._link.call(("HGET", self._keys.client_keys, name))
            if value is None:
                return None
            changed = change(decode_key(name, value))
            new = values.encode_json(changed)
            [done] = await self._link.call(
                self._script("swap_key", (self._keys.client_keys,), {"name": name}, value, new)
            )
            if done:
                return changed
            await pause(number + 1)
        raise StoreConflict(f'Too many changes of the client key "{name}" at once. Try again shortly.')

    async def revoke_key(self, name: str) -> bool:
        """See `Store.revoke_key`."""
        [revoked] = await self._link.call(("HDEL", self._keys.client_keys, name))
        return bool(revoked)

    # --- lists --------------------------------------------------------------------------------------------------------

    async def sessions(
        self, namespace: str | None, limit: int, cursor: str | None, sort: Sort, *, part: str = ""
    ) -> Page:
        """See `Store.sessions`."""
        after = Cursor.parse(cursor) if cursor else None
        return await self._lists.page(SessionList(namespace, sort, part), limit, after)

    async def session_counts(self, namespaces: Sequence[str]) -> Sequence[int]:
        """See `Store.session_counts`."""
        if not namespaces:
            return []
        return await self._link.call(*[("ZCARD", self._keys.sorted_list(one, "recent")) for one in namespaces])

    async def newest_calls(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """See `Store.newest_calls`."""
        return await self._lists.newest(namespace, limit)

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        return await self._lists.calls(session, limit, before)

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""
        return await self._lists.call(namespace, request_id)

    async def call_of_response(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.call_of_response`."""
        return await self._lists.answered(namespace, answer)

    def each_call(self, since: float) -> AsyncIterator[CallRecord]:
        """See `Store.each_call`."""
        return self._lists.each_call(since)

    async def settled_after(self, after: int | None, limit: int) -> LatestCalls:
        """See `Store.settled_after`."""
        return await self._lists.latest(after, limit)

    async def usage(self, query: UsageQuery) -> Sequence[UsageRow]:
        """See `Store.usage`."""
        return await self._lists.usage(query)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        return await self._lists.reset(session)

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        return await self._lists.forget(session)

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        deleted = await self._lists.expire(before)
        await self._audit.forget(self._now() - self._scripts.retention.changes_s)
        return deleted

    async def record_change(self, entry: AuditEntry) -> None:
        """See `Store.record_change`."""
        await self._audit.add(entry)

    async def changes(self, limit: int, cursor: str | None = None, target: str = "") -> AuditPage:
        """See `Store.changes`."""
        return await self._audit.page(limit, cursor, target)

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._link.call(("SET", self._keys.ping, "", "PX", 1_000))
        await self._check_settings()

    async def _check_settings(self) -> None:
        """Warn once of server settings that can lose data."""
        if not self._are_settings_checked:
            # One server of many may be unavailable. The others still work, and the next check comes soon.
            with contextlib.suppress(StoreUnavailable):
                await warn_of_loss(self._link, self._shown)
                self._are_settings_checked = True

    async def aclose(self) -> None:
        """See `Store.aclose`. Waiting changes are written first."""
        await self._updates.drain()
        await self._lessons.drain()
        await self._link.aclose()


def _remembered(
    state: bytes | None, key: bytes | None, residual: bytes | None, frames: bytes | None, kept: bytes | None
) -> Remembered:
    last = None
    if key is not None and residual is not None:
        # An older version stored no frames.
        last = LastTurn(key.decode(), int(residual), *map(int, (frames or b"").split()))
    return Remembered(states.read(state), last, (kept or b"").decode("ascii", "replace"))


def _tag(session: SessionKey) -> str:
    return tag_of(session.namespace, session.id)


def _taught(
    known: Mapping[str, bytes | None], lessons: Sequence[Mapping[str, Lesson]]
) -> tuple[dict[str, bytes], list[Mapping[str, bytes] | Exception]]:
    new: dict[str, bytes] = {}
    results: list[Mapping[str, bytes] | Exception] = []
    for some in lessons:
        try:
            taught = {name: lesson(new.get(name, known[name])) for name, lesson in some.items()}
        except Exception as error:  # noqa: BLE001  # raised again in the caller that made the lesson
            results.append(error)
        else:
            new |= taught
            results.append(taught)
    return new, results


if TYPE_CHECKING:
    _: type[Store] = RedisStore
