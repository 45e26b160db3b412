"""Read the accounts of a call before it, hold what it may cost, and settle it once.

`gateway.budget.reservation` reads accounts and places holds. This module is the part of a call that uses it, also
while the store is unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from gateway.background.settlement import BackgroundSettlement
from gateway.budget.reservation import Budgets
from gateway.call.observers import notify
from gateway.call.recent_models import RecentModels
from gateway.call.record import RecordBuilder, text_estimate
from gateway.call.state import CallState
from gateway.call.types import TakenHold
from gateway.core.errors import (
    BudgetFault,
    GatewayError,
    GatewayFault,
    NotMetered,
    PriceUnknown,
    StoreDamaged,
    StoreUnavailable,
)
from gateway.core.ledger.arithmetic import MOST, NOTHING, Amount, Claim
from gateway.core.ledger.charging import (
    STREAM_STEP,
    CallNeed,
    ChargedAccounts,
    TokenRate,
    dearest,
    limits_output,
    output_room,
    rate_of,
)
from gateway.core.ledger.refusals import Allowance, allowance
from gateway.core.plan import Plan
from gateway.core.ports import Observer, ReadBody, Sessions
from gateway.core.record import PENDING, CallRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.stored import CallEnd
from gateway.core.usage import Totals
from gateway.dialects.audio import asks_for_more_than_text
from gateway.dialects.base import Call
from gateway.dialects.limits import default_limit, minimum_output, output_limit, responses_asked, service_tier
from gateway.steps.enforcement import Steps, StepTransition
from gateway.stores.leases import Lease
from gateway.stores.settler import Settler

logger = logging.getLogger("gateway")

#: factor on an estimate that counts only texts and not the fields around them
_UNCOUNTED_MARGIN: Final = 1.25
#: For a body that the gateway does not read: bytes per reserved token, and the maximum for a form or a file.
_UNREAD_BYTES: Final = 4
_UNREAD_MOST: Final = 16_384
#: what may precede the first character of JSON: white space, byte order marks, the zero bytes of UTF-16 and UTF-32
_BEFORE_JSON: Final = b" \t\r\n\0\xff\xfe\xef\xbb\xbf"
#: the values that ask for a cache of one hour (Anthropic's `ttl`) or of 12 hours (OpenAI's), in every JSON spelling
_LONG_CACHE: Final = re.compile(rb'"(?:1|\\u0031)(?:2|\\u0032)?(?:h|\\u0068)"')
#: A stream that brings this many tokens beyond its hold arrives in one piece: between two checks come fewer.
_ONE_PIECE: Final = 2 * STREAM_STEP


class Accounts:
    """Read, reserve and settle the accounts of calls. One instance serves all calls."""

    def __init__(
        self,
        *,
        store: Sessions,
        read_body: ReadBody,
        settler: Settler,
        budgets: Budgets,
        records: RecordBuilder,
        facts: Callable[[Route], ModelFacts],
        steps: Steps,
        observers: Sequence[Observer],
        fetched: BackgroundSettlement,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._read_body = read_body
        self._fetched = fetched
        self._steps = steps
        self._settler = settler
        self._budgets = budgets
        self._records = records
        self._facts = facts
        self._listeners = [one.record for one in observers]
        #: Models whose streams arrive in one piece, made before they are sent. A hold that grows with the response
        #: would not bound them.
        self._in_one_piece = RecentModels(clock)

    # --- before the call ---------------------------------------------------------------------------------------

    async def open(self, state: CallState) -> None:
        """Read what the session remembers, and the balances of the accounts that the call is charged to.

        Raises:
            InvalidRequest: the session cannot have the parent that the call names.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: the store is unavailable, and `store.on_failure` is not `open`.
        """
        caller, directives = state.incoming.caller, state.incoming.directives
        state.budget.charged = ChargedAccounts(
            caller.namespace, caller.budget, state.session, declared=directives.budget
        )
        if not self._settler.is_unavailable:
            try:
                await self._read(state, directives.parent)
            except StoreDamaged as error:
                # What the account may spend is unknown until it is repaired, so `on_failure: open` does not apply.
                self._settler.mark_unavailable(error)
                raise
            except StoreUnavailable as error:
                self._settler.mark_unavailable(error)
            else:
                return
        self._open_stale(state)

    async def look(self, state: CallState) -> None:
        """Read the accounts of a call that was refused before they were read, so that its client learns what is left.

        The parent and the budget that the call declares are ignored. Does nothing if the store cannot be read.
        """
        caller = state.incoming.caller
        if state.budget.charged.namespace or self._settler.is_unavailable:
            return
        state.budget.charged = ChargedAccounts(caller.namespace, caller.budget, state.session)
        with contextlib.suppress(StoreUnavailable):
            await self._read(state, None)

    async def _read(self, state: CallState, named: str | None) -> None:
        session, call = state.session, state.call
        if session is None:
            state.budget.accounts = await self._budgets.book(state.budget.charged)
            return
        is_stream = call is not None and call.stream
        begun = await self._budgets.opening(session, state.budget.charged, named, with_totals=is_stream)
        opening, state.budget.charged, state.budget.accounts = begun
        state.context.remembered, state.budget.totals_before = opening.remembered, opening.totals

    def _open_stale(self, state: CallState) -> None:
        """Use the balances that this worker read last.

        Raises:
            StoreUnavailable: the store is unavailable, and `store.on_failure` is not `open`.
        """
        self._settler.check()
        charged, session = state.budget.charged, state.session
        if session is not None and not charged.parents:
            parents = self._budgets.parents_as_seen(session, state.incoming.directives.parent)
            charged = replace(charged, parents=parents)
        state.budget.accounts = self._budgets.stale_book(charged)
        state.notes["store"] = "unavailable: the budget is as last read"

    async def hold(self, state: CallState, call: Call) -> None:
        """Reserve what the call may cost, before it is sent.

        Raises:
            BudgetFault: too little is left.
            NotMetered: the gateway will not see what the call costs.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: the store is unavailable, and `store.on_failure` is not `open`.
        """
        if not state.budget.accounts.claims:
            return
        self._check_deferred(state)
        if state.budget.accounts.budgets:
            await self._read_body(len(call.body), lambda: _read_for_hold(state, call))
        # The store may have made the hold even if the call ends before its reply.
        state.budget.is_holding = True
        try:
            state.budget.hold = await self._first_of(state, call)
        except StoreDamaged as error:
            state.budget.is_holding = False
            self._settler.mark_unavailable(error)
            raise
        except StoreUnavailable as error:
            # The store may have made the hold all the same. The record of the call gives it back, even of a refused
            # one.
            self._settler.mark_unavailable(error)
            self._open_stale(state)
            state.budget.hold = await self._reserve(state, call)
        except GatewayError:
            state.budget.is_holding = False
            raise
        state.budget.accounts = state.budget.hold.accounts

    @staticmethod
    def check_held(state: CallState) -> None:
        """Refuse a call that needs more than was reserved for it. A retry starts from what is known now.

        Raises:
            StoreUnavailable: the request has become larger than the hold.
        """
        taken, plan = state.budget.hold, state.context.plan
        if taken is None or taken.hold is None or plan is None or not limits_output(state.budget.accounts.budgets):
            return
        tokens, held = plan.safe_tokens + plan.context.kept, taken.hold.fixed.tokens
        if tokens > held:
            raise StoreUnavailable(
                f"The full texts of the tool results could not be stored. With them the request has {tokens:,} "
                f"tokens, and {held:,} are reserved. Try again shortly."
            )

    def _check_deferred(self, state: CallState) -> None:
        """Refuse a call that is billed after its response (a batch) if tokens or USD are limited."""
        if not limits_output(state.budget.accounts.budgets) or self._budgets.policy.deferred:
            return
        if state.is_billed_later and not state.is_fetched_later:
            raise NotMetered(
                "This request is billed after its response, so the budget of its session or client key cannot cover "
                "it. Use a client key without a budget in tokens or USD, ask for a response that is not deferred, or "
                "set budget.deferred: forward."
            )

    async def _first_of(self, state: CallState, call: Call) -> TakenHold:
        """Reserve enough for every route that the call may still take; if that is refused, for the current one only.

        In the second case the call loses its fallbacks.
        """
        try:
            return await self._reserve(state, call)
        except (BudgetFault, PriceUnknown):
            routes, end = state.routing.routes, state.routing.routes.index(state.routing.route) + 1
            if len(routes) == end:
                raise
        state.routing.routes = routes[:end]
        try:
            taken = await self._reserve(state, call)
        except (BudgetFault, PriceUnknown):
            # With shorter tool results there may be room for all routes.
            state.routing.routes = routes
            raise
        left_out = ", ".join(f"{route.provider}/{route.model}" for route in routes[end:])
        state.notes["left_out"] = f"{left_out}: too little budget is left for them"
        return taken

    def _reserve(self, state: CallState, call: Call) -> Awaitable[TakenHold]:
        need, orphaned = partial(self._need, state, call), partial(self._records.build_orphaned, state)
        call_id, is_stream = state.incoming.call_id, call.stream
        return self._budgets.reserve(state.budget.accounts, call_id, need, orphaned, is_stream=is_stream)

    def _need(self, state: CallState, call: Call) -> CallNeed:
        """Return what the call may use at most, on any of its remaining routes."""
        plan, wire, fields = state.context.plan, state.incoming.endpoint.wire, call.fields
        # The routes before the current one have failed.
        ahead = state.routing.routes[state.routing.routes.index(state.routing.route) :]
        known = [self._facts(route) for route in ahead]
        asked = state.output_limit(fields, wire) if wire is not None else output_limit(fields, None)
        asked = asked or default_limit(fields, wire)
        asked = min(asked, MOST) if asked is not None else None
        tokens, expected = _uncounted(state, call) if plan is None else (plan.safe_tokens, plan.context.tokens)
        # Summaries of tool results are made after the hold, and may be longer than the extracts that they replace.
        tokens += state.context.shown.extra_tokens if state.context.shown is not None else 0
        can_end = call.stream and wire is not None and not asks_for_more_than_text(fields)
        can_end = can_end and not state.is_fetched_later
        kept = state.kept_by(*ahead)
        # The expected tokens of a plan include what the provider keeps; its safe tokens do not.
        expected += kept if plan is None else 0
        outputs = [facts.output for facts in known]
        rates = self._rates(state, call, ahead, tokens + kept)
        return CallNeed(
            tokens + kept,
            output=asked,
            model_output=max((one for one in outputs if one is not None), default=None) if all(outputs) else None,
            # A limit that the gateway cannot lower is reserved completely.
            least_output=minimum_output(fields, wire) if wire is not None else asked or 0,
            choices=responses_asked(fields, wire),
            has_output=wire is not None or asked is not None,
            rate=dearest(rates),
            is_priced=all(rate is not None for rate in rates) or not state.incoming.endpoint.estimated,
            model=state.routing.route.model,
            can_grow=can_end
            and all(facts.reasoning is False for facts in known)
            and not any(route in self._in_one_piece for route in ahead),
            can_end=can_end,
            completes_without_client=state.is_fetched_later,
            # Without `kept`: a provider that needs room for the response drops some of what it keeps of earlier turns.
            room=_room(plan, [facts.window for facts in known], tokens),
            expected=expected,
        )

    def _rates(self, state: CallState, call: Call, ahead: Sequence[Route], tokens: int) -> list[TokenRate | None]:
        """Return the token rate of each model that may respond, by the gateway's choice or the provider's."""
        tier, caches_1h = service_tier(call.fields), state.budget.caches_long
        prices = [self._facts(route).price for route in (*ahead, *state.routing.instead(*ahead))]
        return [rate_of(price, tokens, tier, caches_1h=caches_1h) for price in prices]

    async def deliver(self, state: CallState) -> None:
        """Make sure that the call is charged even if this worker dies; called before each part of the response."""
        taken = state.budget.hold
        if taken is None:
            return
        lease, sent = taken.lease, state.response.bytes_sent
        # While the store is unavailable, this worker counts the hold itself, and `Leases` writes it later.
        if taken.hold is None and not lease.is_known and not self._settler.is_unavailable:
            await self._take(taken)
        if not lease.is_known or sent >= lease.save_at:
            await self._budgets.note(lease, sent)

    async def _take(self, taken: TakenHold) -> None:
        """Write a hold that was postponed."""
        try:
            if await self._budgets.deliver(taken):
                return
        except StoreUnavailable as error:
            self._settler.mark_unavailable(error)
            return
        # The record at the end of the call corrects this one.
        record = self._budgets.orphaned(taken)
        if record is not None:
            await self._settler.settle(record)

    async def is_over(self, state: CallState) -> bool:
        """Return whether a stream must end now, because its hold is used up. The caller waits with passing it on."""
        if state.budget.hold is None:
            return False
        lease = state.budget.hold.lease
        if lease.is_bounded and state.response.bytes_sent - lease.checked_at >= lease.check_bytes:
            await self._budgets.look(lease)
            lease.schedule_check(state.response.bytes_sent, lease.delivered())
        return lease.is_over

    @staticmethod
    def lease_of(state: CallState) -> Lease:
        """Return the lease whose `free_until` says how much may be passed on without `deliver` and `is_over`."""
        return state.budget.hold.lease if state.budget.hold is not None else Lease("", 0.0, 0, save_at=sys.maxsize)

    @staticmethod
    def bytes_at_once(state: CallState) -> int | None:
        """Return how many bytes of a stream may be passed on before `is_over` is asked again; None for all."""
        taken = state.budget.hold
        return taken.lease.check_bytes if taken is not None and taken.lease.is_bounded else None

    # --- after it ----------------------------------------------------------------------------------------------

    async def settle(self, state: CallState) -> Totals | None:
        """Write the record and its charge, once. An interrupted settlement can be repeated."""
        if state.settlement.is_settled:
            return state.settlement.totals
        going = None
        if state.settlement.record is None:
            await self._read_for_record(state)
            # Only the first time: after an interrupted settlement it is unknown whether the session's step changed.
            state.settlement.record = self._record(state)
            self._note_one_piece(state, state.settlement.record)
            going = self._going(state, state.settlement.record)
        record = state.settlement.record
        # A call that the gateway itself could not serve is not recorded, but its hold must be released. A pending call
        # is recorded even without a session: otherwise its usage would never be counted.
        is_recorded = record.session is not None or record.outcome == PENDING
        if state.budget.is_holding or (is_recorded and not isinstance(state.response.fault, GatewayFault)):
            claims = self._budgets.to_read(state.budget.accounts)
            record = await self._fetched.before(state, record)
            closing = await self._written(state, record, going, claims)
            self._give_back(state, record.spent)
            if closing is not None:
                state.settlement.totals = closing.totals
            if claims or state.budget.accounts.is_stale:
                state.budget.accounts = self._budgets.again(
                    state.budget.accounts, closing.balances if closing is not None else None
                )
        if await self._fetched.looked_back(state):
            with self._fetched.whatever():
                state.settlement.totals = await self.totals_now(state)
        self.end(state)
        await self._fetched.after(state, record)
        return state.settlement.totals

    async def _read_for_record(self, state: CallState) -> None:
        """Read the texts of a large body in a thread, if the call's record needs them."""
        call = state.call
        if call is None or not self._records.needs_texts(state):
            return
        try:
            await self._read_body(len(call.body), lambda: text_estimate(state))
        except asyncio.CancelledError:
            # The call must be settled now: its length is charged.
            state.budget.text_tokens = ceil(len(call.body) / _UNREAD_BYTES)

    def _note_one_piece(self, state: CallState, record: CallRecord) -> None:
        """Note a stream that brought far more than was reserved, because it could not have been ended in time."""
        taken, charge = state.budget.hold, record.charge
        if taken is None or charge is None or taken.final_response_tokens is not None or taken.hold is None:
            return
        if charge.usage.output_tokens > taken.lease.tokens + _ONE_PIECE:
            self._in_one_piece.add(state.routing.route)

    def _record(self, state: CallState) -> CallRecord:
        """Return the call's record; if its usage cannot be read, the one of `RecordBuilder.build_unreadable`."""
        try:
            return self._records.build(state)
        except Exception:
            logger.exception("the usage of call %s cannot be read", state.incoming.call_id)
            return self._records.build_unreadable(state)

    def _going(self, state: CallState, record: CallRecord) -> StepTransition | None:
        try:
            return self._steps.transition(state, record)
        except Exception:
            # The position of a session in its steps is guidance, and no reason to lose a charge.
            logger.exception("the step transition of call %s cannot be determined", record.call_id)
            return None

    def end(self, state: CallState) -> None:
        """Release what this worker keeps of the call, and notify the observers; only the first time.

        This includes a call whose settlement was interrupted: the settler writes its record as soon as it can. If a
        call has no record, its hold ends with its lease, and is settled as that of a worker that died.
        """
        if state.settlement.is_settled:
            return
        record = state.settlement.record
        self._give_back(state, record.spent if record is not None else NOTHING)
        if record is None:
            return
        state.settlement.is_settled = True
        # The charge of a pending call is reported once, when it is known.
        reported = record if record.outcome != PENDING else replace(record, charge=None)
        # The totals belong to the session whose response was fetched, not to the request that fetched it.
        totals = state.settlement.totals if state.settlement.fetched is None else None
        notify(self._listeners, reported, totals, self.allowance(state))

    def _give_back(self, state: CallState, spent: Amount) -> None:
        taken, state.budget.hold = state.budget.hold, None
        if taken is not None:
            self._budgets.close(taken, spent)

    async def _written(
        self, state: CallState, record: CallRecord, going: StepTransition | None, claims: Sequence[Claim]
    ) -> CallEnd | None:
        """Write the record together with the session's new position in its steps. See `Settler.close`."""
        if going is not None:
            try:
                closing = await self._settler.close_with(record, going, claims)
            except StoreUnavailable as error:
                self._steps.apply_unstored(state, going, error)
            else:
                state.settlement.record = self._steps.accept_transition(state, going)
                return closing
        return await self._settler.close(record, claims)

    # --- at any time -------------------------------------------------------------------------------------------

    async def totals_now(self, state: CallState) -> Totals | None:
        """Return the session's totals, including this call only if it was settled; None if they are unknown."""
        if state.session is None or self._settler.is_unavailable:
            return None
        with contextlib.suppress(StoreUnavailable):
            return await self._store.totals(state.session)
        return None

    def allowance(self, state: CallState) -> Allowance | None:
        """Return what the call's accounts have left, by the balances as last read."""
        budgets = state.budget.accounts.budgets
        return allowance(budgets, self._budgets.policy.warn_at) if budgets else None


def _read_for_hold(state: CallState, call: Call) -> None:
    """Read from the body what the hold depends on."""
    if state.context.plan is None:
        text_estimate(state)
    if any(balance.limits.nano_usd is not None for balance in state.budget.accounts.budgets):
        state.budget.caches_long = _LONG_CACHE.search(call.body) is not None


def _room(plan: Plan | None, windows: Sequence[int | None], tokens: int) -> int | None:
    """Return what the widest context window leaves for the response; None if a window is unknown.

    `windows`: of the routes, the current one first. Its provider may have reported another window, see `Plan.window`.
    """
    first = plan.window if plan is not None else windows[0]
    rooms = [output_room(window, tokens) for window in (first, *windows[1:])]
    return max((room for room in rooms if room is not None), default=None) if all(rooms) else None


def _uncounted(state: CallState, call: Call) -> tuple[int, int]:
    """Return the input tokens to reserve for a call that is not counted exactly, and the expected input tokens.

    Both are 0 without a budget, because reading megabytes takes time.
    """
    if not state.budget.accounts.budgets:
        return 0, 0
    if not call.fields and state.incoming.endpoint.estimated:
        unread = _unread(call.body)
        return unread, unread
    expected = text_estimate(state)
    tokens = ceil(expected * _UNCOUNTED_MARGIN)
    # In a conversation that is too long to be counted, brackets and numbers are billed as well as texts.
    if state.incoming.endpoint.wire is not None:
        tokens = max(tokens, ceil(len(call.body) / _UNREAD_BYTES))
    return tokens, expected


def _unread(body: bytes) -> int:
    """Return the tokens to reserve for a body that the gateway does not read: all of it if it may be JSON text."""
    tokens = ceil(len(body) / _UNREAD_BYTES)
    return tokens if body.lstrip(_BEFORE_JSON).startswith(b"{") else min(tokens, _UNREAD_MOST)
