"""Settle a background call when its response is fetched.

`background/index.py` finds such a call again. This module settles it once and notifies the observers of calls.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gateway.background.index import BackgroundIndex, FetchedResponse
from gateway.call.observers import tell
from gateway.call.record import answer_of
from gateway.call.state import CallState
from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Observer
from gateway.core.record import PENDING, CallRecord
from gateway.stores.settler import Settler

logger = logging.getLogger("gateway")


class BackgroundSettlement:
    """Settles calls by answers that are fetched. Shared by all calls."""

    def __init__(self, settler: Settler, background: BackgroundIndex, observers: Sequence[Observer]) -> None:
        self._settler = settler
        self._background = background
        self._listeners = [one.record for one in observers]

    async def begun(self, state: CallState) -> bool:
        """Before a part of a stream goes out that is made in the background: see to it that its call can be found.

        Its client may leave, or this worker die, before it has ended, and the rest be fetched. While the store is away
        that has to wait for the settlement. False: its id is not known yet.
        """
        if self._settler.is_unavailable:
            return True
        try:
            return await self._background.begun(state)
        except StoreUnavailable as error:
            self._settler.away(error)
            return True

    async def before(self, state: CallState, record: CallRecord) -> CallRecord:
        """Before a call is settled: see to it that its answer can be fetched; the record to settle it with."""
        if record.outcome != PENDING:
            if state.settlement.is_findable:
                await self._told(state)
            return record
        # What notes it waits for the store with the record where it has to.
        return record if state.settlement.is_findable else replace(record, lesson=self._background.note(state))

    async def _told(self, state: CallState) -> None:
        """Observers hear what it took when it is settled, and not again when its answer is fetched."""
        answer_id = answer_of(state).id
        if answer_id is not None and not self._settler.is_unavailable:
            with contextlib.suppress(StoreUnavailable):
                await self._background.is_first(answer_id)

    async def after(self, state: CallState, record: CallRecord) -> None:
        """After it was settled: its stream broke off, or nobody waited for it, and its answer may have been fetched."""
        if record.outcome == PENDING and state.settlement.is_findable and not self._settler.is_unavailable:
            with self.whatever():
                await self._settle(record)

    async def looked_back(self, state: CallState) -> bool:
        """Settle the call whose answer was fetched by this one; whether it is of a session of whoever fetched it.

        Whatever comes of that, the answer itself goes on to whoever asked for it.
        """
        answer_id, answer = state.incoming.endpoint.fetches, state.response.parsed
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
        """Settle a call whose worker is gone; where its answer was fetched before that, by what it came to.

        Raises:
            StoreUnavailable: it is settled as lost, until its answer is fetched again.
        """
        if await self._settler.settle(record) is not None:
            await self._settle(record)

    async def _settle(self, begun: CallRecord) -> None:
        """Settle a call that was just settled as lost or pending by its answer, where that was fetched before."""
        made = await self._background.made(begun.call_id)
        if made is not None:
            await self._settle_earlier(made)

    async def _settle_earlier(self, made: FetchedResponse) -> CallRecord | None:
        """Settle the call whose answer was fetched, where that was made in the background and has ended; its record."""
        record, is_told = await self._background.ended(made.provider, made.answer_id, made.answer)
        if record is not None and not is_told:
            # Where others have settled it meanwhile, that changes nothing.
            totals = await self._settler.settle(record)
            if totals is None or await self._background.is_first(made.answer_id):
                tell(self._listeners, record, totals)
        return record

    @contextlib.contextmanager
    def whatever(self) -> Iterator[None]:
        """Go on whatever comes of settling a call by its answer, which then stays charged as it is."""
        try:
            yield
        except StoreUnavailable as error:
            self._settler.away(error)
        except Exception:
            logger.exception("the call whose answer was fetched is not settled by that")
