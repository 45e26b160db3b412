"""Settle a background call when its response is fetched.

`background/index.py` finds such a call again. This module settles it once and notifies the observers of calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from gateway.background.index import BackgroundIndex, FetchedResponse
from gateway.call.observers import notify
from gateway.call.record import response_so_far
from gateway.call.state import CallState
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Observer
from gateway.core.record import CallRecord
from gateway.stores.settler import Settler

logger = logging.getLogger("gateway")


class BackgroundSettlement:
    """Settle calls when their responses are fetched. One instance serves all calls."""

    def __init__(self, settler: Settler, index: BackgroundIndex, observers: Sequence[Observer]) -> None:
        self._settler = settler
        self._index = index
        self._listeners = [one.record for one in observers]

    async def note_call(self, state: CallState) -> bool:
        """Make sure that a background call can be found, before a part of its stream is passed on.

        The client may leave, or this worker may die, before the stream has ended, and the rest may be fetched. While
        the store is unavailable, the note waits for the settlement. Returns False if the id of the response is not
        known yet.
        """
        try:
            return await self._index.note_call(state)
        except StoreUnavailable:
            return True

    @staticmethod
    def concerns(state: CallState, record: CallRecord) -> bool:
        """Return whether `settle` must settle the call: it can be fetched later, or it fetched an earlier response."""
        return record.is_pending or state.settlement.is_findable or state.incoming.endpoint.fetched_id is not None

    async def settle(
        self,
        state: CallState,
        record: CallRecord,
        write: Callable[[CallRecord], Awaitable[None]],
        notify_observers: Callable[[], None],
    ) -> None:
        """Settle a call, and the background call whose response it fetched.

        Args:
            state: the call.
            record: its record.
            write: writes the record. If the call is pending, the record that it gets has a note to find the call by.
            notify_observers: called when the record is written, before a pending call is settled by its response.
        """
        if record.is_pending:
            if not state.settlement.is_findable:
                # The note is written together with the record, also if that has to wait for the store.
                record = replace(record, lesson=self._index.note(state))
        elif state.settlement.is_findable:
            await self._mark_notified(state)
        await write(record)
        await self._settle_fetched(state)
        notify_observers()
        if record.is_pending and state.settlement.is_findable:
            # The stream broke off, or the client left. The response may have been fetched in the meantime.
            with _errors_logged():
                await self._settle_by_response(record)

    async def _mark_notified(self, state: CallState) -> None:
        """Note that observers learn the cost when the call is settled, and not again when its response is fetched."""
        answer_id = response_so_far(state).id
        if answer_id is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._index.claim_notification(answer_id)

    async def _settle_fetched(self, state: CallState) -> None:
        """Settle the earlier call whose response this call fetched. This call then shows that one's session.

        If that fails, the response is passed on all the same.
        """
        answer_id, answer = state.incoming.endpoint.fetched_id, state.response.parsed
        if answer_id is None or answer is None:
            return
        record: CallRecord | None = None
        with _errors_logged():
            record = await self._settle_earlier(FetchedResponse(state.routing.route.provider, answer_id, answer))
        session = record.session if record is not None else None
        if session is None or session.namespace != state.incoming.caller.namespace:
            return
        state.settlement.fetched, state.session, state.settlement.totals = record, session, None
        with _errors_logged():
            state.settlement.totals = await self._index.totals(session)

    async def settle_orphaned(self, record: CallRecord) -> None:
        """Settle a call whose worker died; if its response was fetched before, by the usage of that response.

        Raises:
            StoreUnavailable: the call stays settled as orphaned until its response is fetched again.
        """
        if await self._settler.settle(record) is not None:
            await self._settle_by_response(record)

    async def _settle_by_response(self, begun: CallRecord) -> None:
        """Settle a call again that was just settled as orphaned or pending, if its response was fetched before."""
        made = await self._index.fetched_response(begun.call_id)
        if made is not None:
            await self._settle_earlier(made)

    async def _settle_earlier(self, made: FetchedResponse) -> CallRecord | None:
        """Settle the background call that a complete response belongs to; return its record, or None."""
        record, is_told = await self._index.completed_call(made.provider, made.answer_id, made.answer)
        if record is not None and not is_told:
            # If another worker has settled it in the meantime, this changes nothing.
            totals = await self._settler.settle(record)
            if totals is None or await self._index.claim_notification(made.answer_id):
                notify(self._listeners, record, totals)
        return record


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """Log errors of settling a call by its response, and continue. The call stays charged as it was."""
    try:
        yield
    except StoreUnavailable:
        pass  # the store has reported it
    except Exception:
        logger.exception("a fetched response did not settle its call")
