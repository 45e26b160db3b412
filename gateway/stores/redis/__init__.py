"""Store in Redis 6.2 or newer, or Valkey: one server, sentinels or a cluster.

Each verb is a Lua script that runs in one step, by the server's clock, and has effect once per id. Every request has a
deadline; whatever goes wrong is StoreUnavailable. Redis itself forgets what it has not yet put on disk when its machine
loses power: with `appendonly yes` and `appendfsync everysec` up to a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.core.counting.calibration import LastTurn
from gateway.core.errors import StoreConflict, StoreUnavailable
from gateway.core.ledger.arithmetic import DIMENSIONS, AccountKey, Balance, Claim, Dimension, Granted, Refused
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.redis_url import parse
from gateway.core.session import Change, Remembered, SessionState
from gateway.core.stored import (
    CallClosing,
    CallOpening,
    Ending,
    LatestCalls,
    Lesson,
    OpenHold,
    Page,
    SessionView,
    Sort,
    StoredKey,
)
from gateway.core.usage import Totals
from gateway.stores import clock, states
from gateway.stores.compressed import Compressed, decompressed
from gateway.stores.cursor import Cursor
from gateway.stores.damage import Refusing, UnreadKeys, UnreadSessions
from gateway.stores.redis import values
from gateway.stores.redis.cluster import ClusterLink
from gateway.stores.redis.folding import Folding
from gateway.stores.redis.keys import NAMESAKES, Keys, session_of, tag_of
from gateway.stores.redis.link import Link, SingleLink
from gateway.stores.redis.lists import Lists, SessionList
from gateway.stores.redis.per_server import LedgerScripts, LedgerVerbs, PerServerLedger
from gateway.stores.redis.per_slot import PerSlotLedger
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.settings import warn_of_loss
from gateway.stores.redis.state_updates import TRIES, StateUpdates, pause
from gateway.stores.redis.values import StoredState

#: Keys live this many seconds longer than what they hold is kept, or up to an hour less (see `live` in prelude.lua),
#: so that the hourly clearing comes first.
_GRACE_S: Final = 10_800.0
#: fields of a session: its last turn, and what it remembers of what its provider keeps
_LAST_TURN: Final = ("last_key", "residual", "frames", "kept")


class RedisStore:
    """See the module. Construct it where an event loop runs.

    Args:
        url: see `gateway.core.redis_url`.
        timeout_s: how long a request may take, from when it is sent.
        ttl_s: seconds for which sessions are kept; a server that no gateway clears any more forgets them by itself.
        prefix: of all keys, so that several gateways can share a server.
        connections: at most, to each server; each has many requests under way.
        now: gives the time of day, for what is called old.
        moment: gives seconds of a clock that nobody sets, against which the server's is held.
        ahead_s: by how much the server's clock is taken to be ahead; for tests alone.

    Raises:
        ValueError: the URL is none of a Redis.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.25,
        ttl_s: float = 30 * 86_400,
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
        self._is_looked_at = False
        self._unread_keys = UnreadKeys()
        self._unread_sessions = UnreadSessions()
        self._keys = Keys(prefix)
        self._verb = scripts.call
        open_node = partial(SingleLink, scripts=scripts, timeout_s=timeout_s, connections=connections)
        is_cluster = address.kind == "cluster"
        self._link: Link = ClusterLink(address, open_node, timeout_s) if is_cluster else open_node(address)
        self._clerk = LedgerScripts(self._keys, scripts, ttl_s + _GRACE_S, now)
        books = PerSlotLedger if is_cluster else PerServerLedger
        self._books: LedgerVerbs = books(self._link, self._clerk, moment)
        self._lists = Lists(self._link, self._clerk, self._unread_sessions)
        self._moves = StateUpdates(self._link, self._keys, scripts, self._clerk, self._books)
        self._lessons = Folding[str, Mapping[str, Lesson]](self._teach)

    # --- budgets ------------------------------------------------------------------------------------------------------

    async def settle(self, record: CallRecord, ending: Ending | None = None) -> Totals:
        """See `Store.settle`."""
        return (await self.closing(record, ending, ())).totals

    async def closing(self, record: CallRecord, ending: Ending | None, claims: Sequence[Claim]) -> CallClosing:
        """See `Store.closing`."""
        with Refusing(record.call_id):
            return await self._moves.settle(record, ending, claims)

    async def reserve(self, opened: OpenHold, lease_s: float) -> Granted | Refused:
        """See `Store.reserve`."""
        return await self._books.reserve(opened, lease_s)

    async def extend(self, hold_id: str, units: int) -> Granted | None:
        """See `Store.extend`."""
        return await self._books.extend(hold_id, units)

    async def renew(self, noted: Mapping[str, int]) -> frozenset[str]:
        """See `Store.renew`."""
        return await self._books.renew(noted)

    async def overdue(self, limit: int) -> Sequence[OpenHold]:
        """See `Store.overdue`."""
        # Every gateway that serves asks this first, and no command of an operator asks it.
        await self._look()
        return await self._books.overdue(limit)

    async def balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        """See `Store.balances`."""
        asked = self._books.ask_balances(claims)
        return self._books.balances(claims, await self._link.call(*asked)) if asked else ()

    async def opening(
        self, session: SessionKey, claims: Sequence[Claim], *, with_totals: bool, above: Sequence[SessionKey] = ()
    ) -> CallOpening:
        """See `Store.opening`."""
        tag = _tag(session)
        asked = self._books.ask_balances(claims)
        (version, state), (key, residual, frames, kept, *sums), *replies = await self._link.call(
            ("HMGET", self._keys.state(tag), "v", "s"),
            ("HMGET", self._keys.session(tag), *_LAST_TURN, *(values.TOTALS if with_totals else ())),
            *asked,
            *[("HGET", self._keys.state(_tag(one)), "s") for one in above],
        )
        if state is not None:
            self._moves.saw(session, StoredState.of(version, state))
        balance = self._books.balances(claims, replies[: len(asked)])
        remembered = _remembered(state, key, residual, frames, kept)
        parents = tuple([states.read(one).parent for one in replies[len(asked) :]])
        return CallOpening(remembered, balance, values.totals(sums) if with_totals else None, parents)

    async def decide(self, account: AccountKey, limits: Mapping[Dimension, int | None] | None) -> None:
        """See `Store.decide`."""
        arguments = self._clerk.basic() | {"kind": account.kind}
        if limits is not None:
            fields = {name: f"d{number}" for number, name in enumerate(DIMENSIONS, 1)}
            arguments["limits"] = [(fields[name], -1 if one is None else one) for name, one in limits.items()]
        await self._each(
            self._verb("decide", (self._keys.account(account),), arguments), *self._clerk.noticed([account])
        )

    async def _each(self, *commands: Command) -> None:
        """Commands whose keys may lie on different servers."""
        for command in commands:
            await self._link.call(command)

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def totals(self, session: SessionKey) -> Totals:
        """See `Store.totals`."""
        [row] = await self._link.call(("HMGET", self._keys.session(_tag(session)), *values.TOTALS))
        return values.totals(row)

    async def session(self, session: SessionKey) -> SessionView | None:
        """See `Store.session`."""
        return await self._lists.session(session)

    async def remembered(self, session: SessionKey) -> Remembered:
        """See `Store.remembered`."""
        tag = _tag(session)
        state, last = await self._link.call(
            ("HGET", self._keys.state(tag), "s"), ("HMGET", self._keys.session(tag), *_LAST_TURN)
        )
        return _remembered(state, *last)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        return await self._moves.update(session, change)

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
            arguments = self._clerk.basic() | {"names": list(new), "was": [one is not None for one in was]}
            compressed = (*(one or b"" for one in was), *new.values())
            keys = (self._keys.lessons, self._keys.lesson_times)
            [(done, *rest)] = await self._link.call(self._verb("teach", keys, arguments, *compressed))
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
        looks: list[Command] = []
        for handle in handles:
            # The names by which a text is found are to live as long as it is kept from now on.
            living = [("PEXPIRE", name, self._clerk.ttl_ms) for name in self._names(session, handle)]
            looks += [("HEXISTS", texts, f"={handle}"), *living]
        replies = iter(await self._link.call(*looks))
        missing, nameless = list[str](), list[str]()
        for handle, (is_there, *named) in zip(handles, zip(replies, replies, replies, strict=True), strict=True):
            if not is_there:
                missing.append(handle)
            elif not all(named):
                nameless.append(handle)
        if nameless:
            await self._link.call(*self._leads(session, nameless))
        return missing

    def _names(self, session: SessionKey, handle: str) -> tuple[str, str]:
        """The names under which a handle is looked for: over all namespaces, and in its own."""
        return self._keys.handled(None, handle), self._keys.handled(session.namespace, handle)

    def _leads(self, session: SessionKey, handles: Iterable[str]) -> list[Command]:
        """The verbs that make the names of handles lead to their session."""
        arguments = {"place": _tag(session), "most": NAMESAKES, "ttl": self._clerk.ttl_ms}
        names = [name for handle in handles for name in self._names(session, handle)]
        return [self._verb("name", (name,), arguments) for name in names]

    async def results_size(self, session: SessionKey) -> int:
        """See `Store.results_size`."""
        [size] = await self._link.call(("HGET", self._keys.results(_tag(session)), "size"))
        return int(size or 0)

    async def keep_results(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Sequence[str]:
        """See `Store.keep_results`."""
        keep = await asyncio.to_thread(self._keeping, session, texts, most)
        # A text that is kept without its names gets them when it is looked for: see `missing_results`.
        names = [*self._leads(session, texts), *self._clerk.noticed([session.account])]
        *_, refused = await self._link.call(*names, keep)
        return [handle.decode() for handle in refused]

    def _keeping(self, session: SessionKey, texts: Mapping[str, str], most: int) -> Command:
        compressed = [*map(Compressed.of, texts.values())]
        sizes = [one.size for one in compressed]
        arguments = self._clerk.basic() | {"handles": list(texts), "sizes": sizes, "most": most}
        name = self._keys.results(_tag(session))
        return self._verb("keep_results", (name,), arguments, *(one.text for one in compressed))

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
            with self._unread_sessions.passed_over(tag):
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

    async def newest(self, namespace: str | None, limit: int) -> Sequence[CallRecord]:
        """See `Store.newest`."""
        return await self._lists.newest(namespace, limit)

    async def calls(self, session: SessionKey, limit: int, before: str | None = None) -> Sequence[CallRecord]:
        """See `Store.calls`."""
        return await self._lists.calls(session, limit, before)

    async def call(self, namespace: str | None, request_id: str) -> CallRecord | None:
        """See `Store.call`."""
        return await self._lists.call(namespace, request_id)

    async def answered(self, namespace: str, answer: str) -> CallRecord | None:
        """See `Store.answered`."""
        return await self._lists.answered(namespace, answer)

    async def latest(self, after: int | None, limit: int) -> LatestCalls:
        """See `Store.latest`."""
        return await self._lists.latest(after, limit)

    async def reset(self, session: SessionKey) -> bool:
        """See `Store.reset`."""
        return await self._lists.reset(session)

    async def delete(self, session: SessionKey) -> bool:
        """See `Store.delete`."""
        return await self._lists.forget(session)

    async def expire(self, before: float) -> int:
        """See `Store.expire`."""
        return await self._lists.expire(before)

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._link.call(("SET", self._keys.ping, "", "PX", 1_000))
        await self._look()

    async def _look(self) -> None:
        """Once: whether the servers are set so that they keep what they are given."""
        if not self._is_looked_at:
            # One server of many may be away; the others have their work to do, and the next look is soon.
            with contextlib.suppress(StoreUnavailable):
                await warn_of_loss(self._link, self._shown)
                self._is_looked_at = True

    async def aclose(self) -> None:
        """See `Store.aclose`. What is still waiting to be written is written."""
        await self._moves.drain()
        await self._lessons.drain()
        await self._link.aclose()


def _remembered(
    state: bytes | None, key: bytes | None, residual: bytes | None, frames: bytes | None, kept: bytes | None
) -> Remembered:
    last = None
    if key is not None and residual is not None:
        # An older version kept no frames.
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
        except Exception as error:  # noqa: BLE001  # a caller's own, and given to it
            results.append(error)
        else:
            new |= taught
            results.append(taught)
    return new, results


if TYPE_CHECKING:
    _: type[Store] = RedisStore
