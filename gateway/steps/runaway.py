"""Warn and stop agents that run away: apply the rules of `core/runaway.py` to each call.

What repeats is read from the messages of the request, so any worker finds it. The session only remembers when its work
began, if a limit in seconds is set, and which work was stopped or resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from gateway.call.observers import notify
from gateway.call.state import CallState
from gateway.context.planner import Planner
from gateway.core.counting.request import ITEMS
from gateway.core.errors import SessionStopped, StoreUnavailable
from gateway.core.ports import Observer, Sessions
from gateway.core.runaway import (
    NO_ROUNDS,
    ROUND_MESSAGES,
    Finding,
    ReadRounds,
    RoundReader,
    RunawayAlert,
    RunawayPolicy,
    WorkState,
    finding_json,
    findings,
    lowest_limits,
    overtime,
    rounds_until_alarm,
)
from gateway.core.session import SessionState
from gateway.core.times import Clocks
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.contents import Contents
from gateway.dialects.rounds import read_rounds
from gateway.dialects.server_state import continued_from

#: Bytes of messages that are read in the event loop. Reading more would block other calls.
_INLINE_BYTES: Final = 64 * 1024
_BETWEEN: Final = b", \t\r\n"
_NOT_REFUSED: Final = "not refused, because the store is unavailable: the session may have been resumed"


class RunawayGuard:
    """Apply the limits of `runaway:`, `budget.seconds` and `max_seconds` of steps, for all calls."""

    def __init__(
        self,
        policy: RunawayPolicy,
        *,
        store: Sessions,
        planner: Planner,
        observers: Sequence[Observer],
        clocks: Clocks,
    ) -> None:
        self._policy = policy
        self._least = policy.least_messages
        self._lowest = lowest_limits(policy)
        self._has_clock = policy.has_clock
        self._store = store
        self._planner = planner
        self._listeners = [observer.warned for observer in observers if type(observer).warned is not Observer.warned]
        self._clocks = clocks

    async def check(self, state: CallState, call: Call) -> None:
        """Note what the rules find in a call.

        Raises:
            SessionStopped: a limit for refusals is reached.
        """
        incoming, least = state.incoming, self._least
        wire = incoming.endpoint.wire
        if least is None or wire not in VIEWED or incoming.purpose is not None or state.context.compaction is not None:
            return
        contents = state.steps.contents or await self._planner.contents(call, wire)
        if contents is None:
            return
        # A huge body is read again when it is planned: many may wait for that, and would use too much memory.
        state.steps.contents = None if self._planner.is_huge(call) else contents
        rounds = await self._rounds(contents) if contents.size >= least else None
        if rounds is None:
            return
        name = self._name(state, call, rounds)
        work = state.context.remembered.state.works.get(name)
        if self._has_clock:
            work = await self._with_clock(state, name, work)
        found = self._findings(state, rounds, work)
        if found and not state.is_compaction:
            await self._act(state, found, rounds, (name, work))

    async def _rounds(self, contents: Contents) -> RoundReader | None:
        """Return the rounds in a request, or None if no rule can find something in them.

        Most calls read nothing: while the last round was new, it takes some more rounds to a threshold.
        """
        start, size = contents.cached_prefix, contents.size
        known = start.rounds if start is not None else None
        if known is None:
            first, before = 0, NO_ROUNDS
        elif known.policy is self._policy and size < known.next_at:
            contents.keep_rounds(known)
            return None
        else:
            first, before = known.size, known.rounds
        array = _array_from(contents, first)
        if len(array) <= _INLINE_BYTES:
            open_rounds, rounds = read_rounds(contents.wire, array, before)
        else:
            open_rounds, rounds = await asyncio.to_thread(read_rounds, contents.wire, array, before)
        missing = 0 if self._has_clock else rounds_until_alarm(rounds, self._lowest)
        next_at = size + ROUND_MESSAGES * missing
        contents.keep_rounds(ReadRounds(open_rounds, max(first, size - 1), next_at, self._policy))
        return rounds if missing <= 0 else None

    @staticmethod
    def _name(state: CallState, call: Call, rounds: RoundReader) -> str:
        """Return the name of the work in the session's state.

        A request that continues a response at the provider may not have the user message: it continues the newest work.
        """
        if rounds.work:
            return f"{rounds.work:08x}"
        works = state.context.remembered.state.works
        if works and continued_from(call.fields, state.incoming.endpoint.wire):
            return next(reversed(list(works)))
        return ""

    async def _with_clock(self, state: CallState, name: str, work: WorkState | None) -> WorkState | None:
        """Return the work with the times when it and its step began; None if no session remembers them."""
        if state.stored_session is None:
            return None
        step, now = state.steps.step, self._clocks.wall()
        step_name = step.name if step is not None else None
        begun = (work or WorkState(now, step_name, now)).in_step(step_name, now)
        if begun is not work:
            await self._remember(state, name, begun, instead_of=work)
        return begun

    def _findings(self, state: CallState, rounds: RoundReader, work: WorkState | None) -> list[Finding]:
        found = list(findings(rounds, self._policy, work.lifted if work is not None else 0))
        if work is not None and self._has_clock:
            step = state.steps.step
            limit = step.max_seconds if step is not None else None
            found += overtime(work, self._policy, limit, self._clocks.wall())
        return found

    async def _act(
        self, state: CallState, found: list[Finding], rounds: RoundReader, known: tuple[str, WorkState | None]
    ) -> None:
        """Note what was found, remember it, notify the observers, and refuse the call if a limit is reached.

        `known`: the name of the work, and its state.

        Raises:
            SessionStopped: a limit for refusals is reached.
        """
        name, work = known
        may_refuse = state.session is None or state.stored_session is not None
        stop = next((one for one in found if one.action == "refuse"), None) if may_refuse else None
        state.steps.warnings = tuple(found)
        state.notes["runaway"] = "; ".join([f"{one.text}, {one.key}: {one.limit}" for one in found])
        if not may_refuse and any(one.action == "refuse" for one in found):
            state.notes["runaway"] += f"; {_NOT_REFUSED}"
        after = _after(work, found, stop, rounds, self._clocks.wall())
        if after is not None and after != work:
            await self._remember(state, name, after, instead_of=work)
        was_stopped = work is not None and work.stopped is not None
        for one in found:
            if not was_stopped and (one.is_first or one is stop):
                alert = RunawayAlert(state.session, state.incoming.call_id, one, self._clocks.wall())
                notify(self._listeners, alert)
        if stop is not None:
            raise SessionStopped(_refusal_text(state, stop), finding_json(stop))

    async def _remember(self, state: CallState, name: str, work: WorkState, instead_of: WorkState | None) -> None:
        """Store the state of a work, unless another call or a person has changed it in the meantime."""
        session = state.stored_session
        if session is None:
            return

        def change(kept: SessionState) -> SessionState:
            return kept.with_work(name, work) if kept.works.get(name) == instead_of else kept

        try:
            await self._store.update(session, change)
        except StoreUnavailable:
            state.notes["runaway_state"] = "not stored: the store is unavailable"


def _array_from(contents: Contents, first: int) -> bytes:
    """Return the messages from this one on as an array. A text instead of messages is one user message."""
    if contents.array is None:
        return b'[{"role":"user","content":%b}]' % contents.fields[ITEMS[contents.wire]]
    start = contents.cached_prefix
    if start is None:
        return contents.rest
    # The cached text ends after a message, and the rest begins with a comma if there is more.
    known = start.text[start.bounds[2 * first] :] if first < len(start.keys) else b""
    rest = contents.rest if known else contents.rest.lstrip(_BETWEEN)
    return b"[%b%b" % (known, rest)


def _after(
    work: WorkState | None, found: Sequence[Finding], stop: Finding | None, rounds: RoundReader, now: float
) -> WorkState | None:
    """Return the state of a work after these findings; None if there is nothing to remember."""
    seconds = [one.kind for one in found if one.kind in ("seconds", "step_seconds") and one.is_first]
    if not seconds and stop is None:
        return work
    after = work or WorkState(now, None, now)
    after = replace(after, warned=(*after.warned, *seconds))
    return after if stop is None else replace(after, stopped=stop.kind, rounds=rounds.number)


def _refusal_text(state: CallState, stop: Finding) -> str:
    who = f'Session "{state.session.id}"' if state.session is not None else "This conversation"
    resume = f", or resume the session: POST /api/sessions/{state.session.id}/resume" if state.session else ""
    return f"{who} is stopped: {stop.text} (limit {stop.limit:,}, {stop.key}). Send a new user message{resume}."
