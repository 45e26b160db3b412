"""Settle a call once: write its record and its charge, and notify the observers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from gateway.background.settlement import BackgroundSettlement
from gateway.budget.accounts import Accounts
from gateway.call.observers import notify
from gateway.call.record import RecordBuilder, text_estimate
from gateway.call.state import CallState
from gateway.core.errors import GatewayFault, StoreUnavailable
from gateway.core.ledger.arithmetic import NOTHING
from gateway.core.ports import Observer, ReadBody
from gateway.core.record import CallRecord
from gateway.core.stored import CallEnd
from gateway.core.usage import Totals
from gateway.steps.enforcement import Steps, StepTransition
from gateway.stores.settler import Settler

logger = logging.getLogger("gateway")

#: bytes per charged token of a body that could not be read
_UNREAD_BYTES: Final = 4


class CallSettlement:
    """Settle calls. One instance serves all calls."""

    def __init__(
        self,
        *,
        accounts: Accounts,
        settler: Settler,
        records: RecordBuilder,
        steps: Steps,
        background: BackgroundSettlement,
        observers: Sequence[Observer],
        read_body: ReadBody,
    ) -> None:
        self._accounts = accounts
        self._settler = settler
        self._records = records
        self._steps = steps
        self._background = background
        self._listeners = [one.record for one in observers]
        self._read_body = read_body

    async def settle(self, state: CallState) -> Totals | None:
        """Write the record and its charge, once. An interrupted settlement can be repeated."""
        if state.settlement.is_settled:
            return state.settlement.totals
        transition = None
        if state.settlement.record is None:
            await self._read_for_record(state)
            # Only the first time: after an interrupted settlement it is unknown whether the session's step changed.
            state.settlement.record = self._record(state)
            self._accounts.learn(state, state.settlement.record)
            transition = self._transition(state, state.settlement.record)
        record = state.settlement.record
        if self._background.concerns(state, record):
            write = partial(self._write, state, transition=transition)
            await self._background.settle(state, record, write, partial(self.end, state))
        else:
            await self._write(state, record, transition)
            self.end(state)
        return state.settlement.totals

    async def _write(self, state: CallState, record: CallRecord, transition: StepTransition | None) -> None:
        """Write the record, release the hold, and update what the accounts have left."""
        # A call that the gateway itself could not serve is not recorded, but its hold must be released. A pending call
        # is recorded even without a session: otherwise its usage would never be counted.
        is_recorded = record.session is not None or record.is_pending
        if not (state.budget.is_holding or (is_recorded and not isinstance(state.response.fault, GatewayFault))):
            return
        end = await self._write_with_step(state, record, transition)
        self._accounts.release(state, record.spent)
        if end is not None:
            state.settlement.totals = end.totals
        self._accounts.refresh(state, end.balances if end is not None else None)

    async def _read_for_record(self, state: CallState) -> None:
        """Read the texts of a large body in a thread, if the call's record needs them."""
        call = state.call
        if call is None or not self._records.needs_texts(state):
            return
        try:
            await self._read_body(len(call.body), lambda: text_estimate(state))
        except asyncio.CancelledError:
            # The call must be settled now. Its tokens are estimated from the length of the body.
            state.budget.text_tokens = ceil(len(call.body) / _UNREAD_BYTES)

    def _record(self, state: CallState) -> CallRecord:
        """Return the call's record; if its usage cannot be read, the one of `RecordBuilder.build_unreadable`."""
        try:
            return self._records.build(state)
        except Exception:
            logger.exception("the usage of call %s cannot be read", state.incoming.call_id)
            return self._records.build_unreadable(state)

    def _transition(self, state: CallState, record: CallRecord) -> StepTransition | None:
        try:
            return self._steps.transition(state, record)
        except Exception:
            # The charge is more important than the step of the session.
            logger.exception("the step transition of call %s cannot be determined", record.call_id)
            return None

    async def _write_with_step(
        self, state: CallState, record: CallRecord, transition: StepTransition | None
    ) -> CallEnd | None:
        """Write the record together with the session's new position in its steps. See `Settler.settle_and_read`."""
        claims = self._accounts.claims_to_read(state)
        if transition is not None:
            try:
                call_end = await self._settler.settle_with_step(record, transition, claims)
            except StoreUnavailable as error:
                self._steps.apply_unstored(state, transition, error)
            else:
                state.settlement.record = self._steps.accept_transition(state, transition)
                return call_end
        return await self._settler.settle_and_read(record, claims)

    def end(self, state: CallState) -> None:
        """Release what this worker keeps of the call, and notify the observers; only the first time.

        This is also done for a call whose settlement was interrupted: the settler writes its record later. A call
        without a record is settled when the lease of its hold ends, like a call of a worker that died.
        """
        if state.settlement.is_settled:
            return
        record = state.settlement.record
        self._accounts.release(state, record.spent if record is not None else NOTHING)
        if record is None:
            return
        state.settlement.is_settled = True
        # The charge of a pending call is reported once, when it is known.
        reported = replace(record, charge=None) if record.is_pending else record
        # The totals belong to the session whose response was fetched, not to the request that fetched it.
        totals = state.settlement.totals if state.settlement.fetched is None else None
        notify(self._listeners, reported, totals, self._accounts.allowance(state))
