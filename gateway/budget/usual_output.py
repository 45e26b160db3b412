"""Remember how long responses without an output limit were, by model and session, to reserve less for a stream.

The lengths of a model are saved in the store, for all workers. Those of a session stay in memory: after a restart, the
lengths of its model are used until enough responses of the session have been seen again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gateway.call.recent_models import RecentModels
from gateway.call.state import CallState
from gateway.core.bounded import BoundedDict
from gateway.core.ledger.charging import limits_output
from gateway.core.ledger.output_limit import USUAL_LEAST
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.usual_output import (
    LEAST_FLOW_S,
    LEAST_OF_MODEL,
    LEAST_OF_SESSION,
    MAX_LENGTHS,
    usual_output,
)
from gateway.core.record import CallRecord
from gateway.core.routing import Route
from gateway.stores.learner import Learner

#: maximum number of pairs of a session and a model whose lengths are remembered
_MAX_SESSIONS: Final = 4_096
#: outcomes of streams whose length says what others need
_TEACHING: Final = ("ok", "budget_end")

_Key = tuple[SessionKey, str, str]


class UsualOutput:
    """The usual output of models, in all sessions and in one. One instance serves all calls.

    Args:
        learner: saves the lengths of models.
        clock: returns monotonic seconds.
    """

    def __init__(self, learner: Learner, clock: Callable[[], float]) -> None:
        self._learner = learner
        self._clock = clock
        self._in_sessions = BoundedDict[_Key, tuple[int, ...]](_MAX_SESSIONS)
        #: Models whose streams arrive in one piece, so that they cannot be ended when they exceed their hold.
        self._in_one_piece = RecentModels(clock)

    async def of(self, session: SessionKey | None, routes: Sequence[Route]) -> int | None:
        """Return the usual output tokens of a call on any of these routes, the next one first; None if unknown.

        A fallback is seldom used, so its own usual output may be unknown. The next route's is then a good guess, as
        the conversation is the same.
        """
        if any(route in self._in_one_piece for route in routes):
            return None
        usual = [await self._of_route(session, route) for route in routes]
        return max(filter(None, usual)) if usual[0] is not None else None

    async def _of_route(self, session: SessionKey | None, route: Route) -> int | None:
        known = self._in_sessions.get((session, route.provider, route.model), ()) if session is not None else ()
        of_session = usual_output(known, LEAST_OF_SESSION)
        if of_session is not None:
            return of_session
        return usual_output(await self._learner.outputs(route.provider, route.model), LEAST_OF_MODEL)

    def note(self, state: CallState, record: CallRecord) -> None:
        """Remember the length of a stream without a limit whose hold can grow.

        A stream that its budget ended would have been longer, so twice its length is remembered.
        A stream that ended before the first check of its hold does not show whether it arrived in one piece.
        """
        charge, seen_at = record.charge, state.budget.output_seen_at
        if charge is None or record.outcome not in _TEACHING or not _is_growing_stream(state):
            return
        is_complete = record.outcome == "ok"
        route, tokens = state.routing.route, charge.usage.output_tokens * (1 if is_complete else 2)
        if seen_at is None or self._clock() - seen_at < LEAST_FLOW_S:
            if tokens > USUAL_LEAST:
                self._in_one_piece.add(route)
            return
        if tokens > 0 and (charge.source == "provider" or not is_complete):
            self._learner.report_output(route.provider, route.model, tokens)
            if state.session is not None:
                key = (state.session, route.provider, route.model)
                self._in_sessions[key] = (*self._in_sessions.get(key, ()), tokens)[-MAX_LENGTHS:]


def _is_growing_stream(state: CallState) -> bool:
    """Return whether the response is a single stream without a limit, whose hold can grow."""
    lease = state.budget.hold.lease if state.budget.hold is not None else None
    is_single = lease is not None and lease.step > 0 and lease.responses == 1
    return is_single and state.response.is_event_stream and limits_output(state.budget.accounts.budgets)
