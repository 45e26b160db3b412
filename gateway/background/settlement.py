"""Settle a background call when its response is fetched.

`background/index.py` finds such a call again. This module settles it once and notifies the observers of calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
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

    def __init__(self, settler: Settler, background: BackgroundIndex, observers: Sequence[Observer]) -> None:
        self._settler = settler
        self._background = background
        self._listeners = [one.record for one in observers]

    async def begun(self, state: CallState) -> bool:
        """Make sure that a background call can be found, before a part of its stream is passed on.

        The client may leave, or this worker may die, before the stream has ended, and the rest may be fetched. While
        the store is unavailable, the note waits for the settlement. Returns False if the id of the response is not
        known yet.
        """
        if self._settler.is_unavailable:
            return True
        try:
            return await self._background.begun(state)
        except StoreUnavailable as error:
            self._settler.mark_unavailable(error)
            return True

    async def before(self, state: CallState, record: CallRecord) -> CallRecord:
        """Return the record to settle a call with, so that its response can be fetched later."""
        if not record.is_pending:
            if state.settlement.is_findable:
                await self._mark_notified(state)
            return record
        # The note is written together with the record, also if that has to wait for the store.
        return record if state.settlement.is_findable else replace(record, lesson=self._background.note(state))

    async def _mark_notified(self, state: CallState) -> None:
        """Note that observers learn the cost when the call is settled, and not again when its response is fetched."""
        answer_id = response_so_far(state).id
        if answer_id is not None and not self._settler.is_unavailable:
            with contextlib.suppress(StoreUnavailable):
                await self._background.is_first(answer_id)

    async def after(self, state: CallState, record: CallRecord) -> None:
        """Settle a pending call by its response if that was fetched in the meantime.

        Its stream broke off, or its client left, before the call was settled.
        """
        if record.is_pending and state.settlement.is_findable and not self._settler.is_unavailable:
            with self.whatever():
                await self._settle(record)

    async def looked_back(self, state: CallState) -> bool:
        """Settle the earlier call whose response this call fetched; return whether both have the same client key.

        If that fails, the response is passed on all the same.
        """
        answer_id, answer = state.incoming.endpoint.fetched_id, state.response.parsed
        if answer_id is None or answer is None or self._settler.is_unavailable:
            return False
        record: CallRecord | None = None
        with self.whatever():
            record = await self._settle_earlier(FetchedResponse(state.routing.route.provider, answer_id, answer))
        session = record.session if record is not None else None
        if session is None or session.namespace != state.incoming.caller.namespace:
            return False
        state.settlement.fetched, state.session = record, session
        return True

    async def orphaned(self, record: CallRecord) -> None:
        """Settle a call whose worker died; if its response was fetched before, by the usage of that response.

        Raises:
            StoreUnavailable: the call stays settled as orphaned until its response is fetched again.
        """
        if await self._settler.settle(record) is not None:
            await self._settle(record)

    async def _settle(self, begun: CallRecord) -> None:
        """Settle a call again that was just settled as orphaned or pending, if its response was fetched before."""
        made = await self._background.made(begun.call_id)
        if made is not None:
            await self._settle_earlier(made)

    async def _settle_earlier(self, made: FetchedResponse) -> CallRecord | None:
        """Settle the background call that a complete response belongs to; return its record, or None."""
        record, is_told = await self._background.ended(made.provider, made.answer_id, made.answer)
        if record is not None and not is_told:
            # If another worker has settled it in the meantime, this changes nothing.
            totals = await self._settler.settle(record)
            if totals is None or await self._background.is_first(made.answer_id):
                notify(self._listeners, record, totals)
        return record

    @contextlib.contextmanager
    def whatever(self) -> Iterator[None]:
        """Log errors of settling a call by its response, and continue. The call stays charged as it was."""
        try:
            yield
        except StoreUnavailable as error:
            self._settler.mark_unavailable(error)
        except Exception:
            logger.exception("a fetched response did not settle its call")
