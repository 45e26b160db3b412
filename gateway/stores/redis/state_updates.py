"""Update the state of a session if its version has not changed (optimistic locking).

A change is applied to the state that this worker saw last. If another worker has changed it since, the server returns
its current state, and the change is applied to that. Changes of a session in one worker take turns.
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
from gateway.core.stored import CallEnd, StepEnding
from gateway.core.usage import Totals
from gateway.stores import states
from gateway.stores.redis import values
from gateway.stores.redis.keys import tag_of
from gateway.stores.redis.link import Link
from gateway.stores.redis.per_server import LedgerOperations, LedgerScripts, Settlement
from gateway.stores.redis.values import StateUpdate, StoredState
from gateway.stores.redis.write_combiner import WriteCombiner

#: tries of a change until it fails with a conflict, if other workers were faster each time
TRIES: Final = 12
#: seconds by which the longest pause grows from one try to the next
_PAUSE_S: Final = 0.004
#: Tries of a settlement that use the last known state. Later tries read the state again.
_WITH_LAST_STATE: Final = 2
#: states that stay known
_MOST_STATES: Final = 256
#: the ending of a call, and the accounts to read after it
_Work = tuple[StepEnding, Sequence[Claim]]
#: Versions are Unix times in microseconds, or a little more. Only an older release has smaller ones.
_FIRST_VERSION: Final = 10**15


class StateUpdates:
    """Changes the states of sessions, alone or together with the settlement of a call."""

    def __init__(self, link: Link, scripts: LedgerScripts, ledger: LedgerOperations) -> None:
        self._link = link
        self._scripts = scripts
        self._ledger = ledger
        self._changes = WriteCombiner[SessionKey, Change](self._change_in_turn)
        self._endings = WriteCombiner[SessionKey, _Work](self._end_in_turn)
        #: Changes and settlements of a session take turns. Otherwise many calls would always be faster than a change.
        self._turns = WeakValueDictionary[SessionKey, asyncio.Lock]()
        self._last_states = _LastStates()

    def remember(self, session: SessionKey, stored: StoredState) -> None:
        """Remember the state that a server returned."""
        self._last_states.put(session, stored)

    async def settle(self, record: CallRecord, ending: StepEnding | None, claims: Sequence[Claim]) -> CallEnd:
        """See `Store.settle_and_read`."""
        session = record.session
        if ending is None or session is None:
            return await self._settle(record, claims)
        work, call_end = (ending, claims), None
        if session not in self._changes and session not in self._endings:
            stored = self._last_states.get(session) or await self._look_up(session)
            call_end = await self._end(session, work, stored)
        # Another worker was faster, or changes of this worker are waiting: join their queue.
        return call_end or await self._endings.add(session, work)

    async def update(self, session: SessionKey, change: Change) -> SessionState:
        """See `Store.update`."""
        state: SessionState = await self._changes.add(session, change)
        return state

    async def drain(self) -> None:
        """Wait until all changes are written."""
        await self._changes.drain()
        await self._endings.drain()

    async def _settle(self, record: CallRecord, claims: Sequence[Claim]) -> CallEnd:
        done = await self._ledger.settle(record, None, claims)
        return (
            done.call_end if isinstance(done, Settlement) else CallEnd(Totals())
        )  # pragma: no branch  # it changes no state

    async def _end(self, session: SessionKey, work: _Work, stored: StoredState) -> CallEnd | None:
        """Settle a call with an ending that starts from this state; return None if the state has changed since."""
        (ending, claims), state = work, states.read(stored.value)
        steps, record = ending(state.steps)
        value = None if steps is state.steps else states.written(state.with_steps(steps))
        done = await self._ledger.settle(record, StateUpdate(stored.version, value), claims)
        if isinstance(done, StoredState):
            self._last_states.put(session, done)
            return None
        if value is not None and done.version is not None:
            self._last_states.put(session, StoredState(done.version, value))
        return done.call_end

    def _turn(self, session: SessionKey) -> asyncio.Lock:
        lock = self._turns.get(session)
        if lock is None:
            lock = self._turns[session] = asyncio.Lock()
        return lock

    async def _change_in_turn(self, session: SessionKey, changes: Sequence[Change]) -> Sequence[Any]:
        async with self._turn(session):
            return await self._change(session, changes)

    async def _end_in_turn(self, session: SessionKey, works: Sequence[_Work]) -> Sequence[CallEnd | Exception]:
        results = list[CallEnd | Exception]()
        unavailable: Exception | None = None
        for work in works:
            if unavailable is None:
                async with self._turn(session):
                    result = await self._try_to_end(session, work)
                # Each of the others would run into the same timeout.
                unavailable = result if _is_unavailable(result) else None
            results.append(unavailable or result)
        return results

    async def _try_to_end(self, session: SessionKey, work: _Work) -> CallEnd | Exception:
        try:
            for number in range(TRIES):
                # After a pause, other workers have probably changed the state again.
                last = self._last_states.get(session) if number < _WITH_LAST_STATE else None
                call_end = await self._end(session, work, last or await self._look_up(session))
                if call_end is not None:
                    return call_end
                await pause(number)
        except Exception as error:  # noqa: BLE001  # raised again in the waiting caller
            return error
        return _conflict(session)

    async def _look_up(self, session: SessionKey) -> StoredState:
        [fields] = await self._link.call(("HMGET", self._name(session), "v", "s"))
        return self._last_states.put(session, StoredState.of(*fields))

    def _name(self, session: SessionKey) -> str:
        return self._scripts.keys.state(tag_of(session.namespace, session.id))

    async def _change(self, session: SessionKey, changes: Sequence[Change]) -> Sequence[SessionState | Exception]:
        name, last = self._name(session), self._last_states.get(session)
        stored = last or await self._look_up(session)
        for number in range(TRIES):
            state, results = _apply_all(states.read(stored.value), changes)
            if all(isinstance(result, Exception) for result in results):
                if stored is not last:
                    return results
                # The server may have a newer state, with which the changes do not fail.
                stored = await self._look_up(session)
                continue
            arguments, value = self._scripts.basic() | values.compared(stored.version), states.written(state)
            swap = self._scripts.call("swap", (name,), arguments, value)
            reply, *_ = await self._link.call(swap, *self._scripts.list_accounts([session.account]))
            done, version, *rest = reply
            was_last = stored is last
            stored = self._last_states.put(session, StoredState.of(version, value if done else rest[0]))
            if done:
                return results
            if not was_last:
                await pause(number + 1)
                stored = await self._look_up(session)
        raise _conflict(session)


class _LastStates:
    """The states that this worker saw last. They may be out of date: the server compares their versions."""

    def __init__(self) -> None:
        self._states = BoundedDict[SessionKey, StoredState](_MOST_STATES)

    def get(self, session: SessionKey) -> StoredState | None:
        return self._states.get(session)

    def put(self, session: SessionKey, stored: StoredState) -> StoredState:
        if 0 < stored.version < _FIRST_VERSION:
            # An older release counts versions from one, and starts at one again after a session was deleted. So such
            # a version may also belong to another state.
            self._states.pop(session, None)
        else:
            self._states[session] = stored
        return stored


async def pause(number: int) -> None:
    """Wait before another try, longer for each lost one."""
    await asyncio.sleep(random.random() * _PAUSE_S * number)  # noqa: S311  # only spreads them


def _is_unavailable(result: object) -> TypeGuard[StoreUnavailable]:
    return isinstance(result, StoreUnavailable) and not isinstance(result, StoreConflict | StoreDamaged)


def _conflict(session: SessionKey) -> StoreConflict:
    return StoreConflict(f'Too many changes of session "{session.id}" at once. Try again shortly.')


def _apply_all(state: SessionState, changes: Sequence[Change]) -> tuple[SessionState, list[SessionState | Exception]]:
    """Apply changes one after the other; a change that fails has no effect. Return the last state and all results."""
    results: list[SessionState | Exception] = []
    for change in changes:
        try:
            state = change(state)
            results.append(state)
        except Exception as error:  # noqa: BLE001  # raised again in the caller that made the change
            results.append(error)
    return state, results
