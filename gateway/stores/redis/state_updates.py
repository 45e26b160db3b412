"""Update the state of a session, if its version has not changed.

A change is made of the state as this worker saw it last. Where somebody else was faster, the server answers with the
state that it has, and the change is made of that. Changes of a session in one worker take turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final, TypeGuard
from weakref import WeakValueDictionary

from gateway.core.bounded import BoundedDict
from gateway.core.errors import StoreConflict, StoreDamaged, StoreUnavailable
from gateway.core.ledger.arithmetic import Claim
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord
from gateway.core.session import Change, SessionState
from gateway.core.stored import CallClosing, Ending
from gateway.core.usage import Totals
from gateway.stores import states
from gateway.stores.redis import values
from gateway.stores.redis.folding import Folding
from gateway.stores.redis.keys import Keys, tag_of
from gateway.stores.redis.link import Link
from gateway.stores.redis.per_server import LedgerScripts, LedgerVerbs, Settlement
from gateway.stores.redis.scripts import Scripts
from gateway.stores.redis.values import StateUpdate, StoredState

#: tries until a change is given up, as somebody else was faster each time
TRIES: Final = 12
#: seconds by which the longest pause grows from one try to the next
_PAUSE_S: Final = 0.004
#: first tries of a call that ends, which go by the state as it was seen last; for later ones it is looked up
_BY_LAST_SEEN: Final = 2
#: states that stay known
_SEEN: Final = 256
#: how a call ends, and the accounts to read after it
_Work = tuple[Ending, Sequence[Claim]]
#: versions are times of day in microseconds, or a little more; only an older release has smaller ones
_FIRST_VERSION: Final = 10**15


class StateUpdates:
    """Changes of states, and calls that end in one."""

    def __init__(self, link: Link, keys: Keys, scripts: Scripts, clerk: LedgerScripts, books: LedgerVerbs) -> None:
        self._link = link
        self._keys = keys
        self._verb = scripts.call
        self._clerk = clerk
        self._books = books
        self._changes = Folding[SessionKey, Change](self._change_in_turn)
        self._endings = Folding[SessionKey, _Work](self._end_in_turn)
        #: Both queues of a session take turns, or many calls would always be faster than a change.
        self._turns = WeakValueDictionary[SessionKey, asyncio.Lock]()
        self._kept = _Seen()

    def saw(self, session: SessionKey, kept: StoredState) -> None:
        """Remember what a server was seen to have."""
        self._kept.put(session, kept)

    async def settle(self, record: CallRecord, ending: Ending | None, claims: Sequence[Claim]) -> CallClosing:
        """See `Store.closing`."""
        session = record.session
        if ending is None or session is None:
            return await self._settle(record, claims)
        work, closing = (ending, claims), None
        if session not in self._changes and session not in self._endings:
            kept = self._kept.get(session) or await self._look_up(session)
            closing = await self._end(session, work, kept)
        # Somebody else was faster, or others of this worker wait already: those of this worker take turns.
        return closing or await self._endings.add(session, work)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        state: SessionState = await self._changes.add(session, change)
        return state

    async def drain(self) -> None:
        """Until nothing waits to be written."""
        await self._changes.drain()
        await self._endings.drain()

    async def _settle(self, record: CallRecord, claims: Sequence[Claim]) -> CallClosing:
        done = await self._books.settle(record, None, claims)
        return (
            done.closing if isinstance(done, Settlement) else CallClosing(Totals())
        )  # pragma: no branch  # it moves nothing

    async def _end(self, session: SessionKey, work: _Work, kept: StoredState) -> CallClosing | None:
        """Settle a call that ends in this state; None where its session is in another one by now."""
        (ending, claims), state = work, states.read(kept.value)
        steps, record = ending(state.steps)
        value = None if steps is state.steps else states.written(state.with_steps(steps))
        done = await self._books.settle(record, StateUpdate(kept.version, value), claims)
        if isinstance(done, StoredState):
            self._kept.put(session, done)
            return None
        if value is not None and done.version is not None:
            self._kept.put(session, StoredState(done.version, value))
        return done.closing

    def _turn(self, session: SessionKey) -> asyncio.Lock:
        lock = self._turns.get(session)
        if lock is None:
            lock = self._turns[session] = asyncio.Lock()
        return lock

    async def _change_in_turn(self, session: SessionKey, changes: Sequence[Change]) -> Sequence[Any]:
        async with self._turn(session):
            return await self._change(session, changes)

    async def _end_in_turn(self, session: SessionKey, works: Sequence[_Work]) -> Sequence[CallClosing | Exception]:
        results = list[CallClosing | Exception]()
        away: Exception | None = None
        for work in works:
            if away is None:
                async with self._turn(session):
                    result = await self._ended(session, work)
                # Each of the others would wait for an absent store anew.
                away = result if _is_unavailable(result) else None
            results.append(away or result)
        return results

    async def _ended(self, session: SessionKey, work: _Work) -> CallClosing | Exception:
        try:
            for number in range(TRIES):
                # After a pause others have been faster again.
                kept = (self._kept.get(session) if number < _BY_LAST_SEEN else None) or await self._look_up(session)
                closing = await self._end(session, work, kept)
                if closing is not None:
                    return closing
                await pause(number)
        except Exception as error:  # noqa: BLE001  # given to the one who waits for it
            return error
        return _conflict(session)

    async def _look_up(self, session: SessionKey) -> StoredState:
        [found] = await self._link.call(("HMGET", self._name(session), "v", "s"))
        return self._kept.put(session, StoredState.of(*found))

    def _name(self, session: SessionKey) -> str:
        return self._keys.state(tag_of(session.namespace, session.id))

    async def _change(self, session: SessionKey, changes: Sequence[Change]) -> Sequence[SessionState | Exception]:
        name, seen = self._name(session), self._kept.get(session)
        kept = seen or await self._look_up(session)
        for number in range(TRIES):
            state, results = _in_turn(states.read(kept.value), changes)
            if all(isinstance(result, Exception) for result in results):
                if kept is not seen:
                    return results
                # The server may have another state by now, at which they do not fail.
                kept = await self._look_up(session)
                continue
            arguments, value = self._clerk.basic() | values.compared(kept.version), states.written(state)
            swap = self._verb("swap", (name,), arguments, value)
            [(done, version, *rest), *_] = await self._link.call(swap, *self._clerk.noticed([session.account]))
            is_seen, kept = kept is seen, self._kept.put(session, StoredState.of(version, value if done else rest[0]))
            if done:
                return results
            if not is_seen:
                await pause(number + 1)
                kept = await self._look_up(session)
        raise _conflict(session)


class _Seen:
    """States as they were seen last: a guess, which a server holds against what it has."""

    def __init__(self) -> None:
        self._kept = BoundedDict[SessionKey, StoredState](_SEEN)

    def get(self, session: SessionKey) -> StoredState | None:
        return self._kept.get(session)

    def put(self, session: SessionKey, kept: StoredState) -> StoredState:
        if 0 < kept.version < _FIRST_VERSION:
            # An older release counts from one, and again from one for a session that was deleted: such a version may be
            # that of another state.
            self._kept.pop(session, None)
            return kept
        self._kept[session] = kept
        return kept


async def pause(number: int) -> None:
    """Wait a little longer each time that somebody else was faster."""
    await asyncio.sleep(random.random() * _PAUSE_S * number)  # noqa: S311  # only spreads them


def _is_unavailable(result: object) -> TypeGuard[StoreUnavailable]:
    return isinstance(result, StoreUnavailable) and not isinstance(result, StoreConflict | StoreDamaged)


def _conflict(session: SessionKey) -> StoreConflict:
    return StoreConflict(f'Too many changes of session "{session.id}" at once. Try again shortly.')


def _in_turn(state: SessionState, changes: Sequence[Change]) -> tuple[SessionState, list[SessionState | Exception]]:
    """Each change on the one before; one that fails changes nothing."""
    results: list[SessionState | Exception] = []
    for change in changes:
        try:
            state = change(state)
            results.append(state)
        except Exception as error:  # noqa: BLE001  # a caller's own, and given to it
            results.append(error)
    return state, results
