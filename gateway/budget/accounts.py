"""Read the accounts of a call before it, hold what it may cost, and release the hold after it.

`gateway.budget.reservation` reads accounts and places holds. This module decides what a call needs.
`gateway.budget.settlement` settles it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import ceil
from typing import Final

from gateway.budget.reservation import Budgets, OpenedAccounts, named_agents
from gateway.budget.usual_output import UsualOutput
from gateway.call.recent_models import RecentModels
from gateway.call.record import RecordBuilder, text_estimate
from gateway.call.state import CallState
from gateway.call.types import TakenHold
from gateway.core.calling_agent import MAIN
from gateway.core.errors import (
    BudgetFault,
    GatewayError,
    NotMetered,
    PriceUnknown,
    StoreDamaged,
    StoreUnavailable,
)
from gateway.core.ledger.arithmetic import Amount, Balance, Claim
from gateway.core.ledger.charging import ChargedAccounts, TokenRate, dearest, limits_output, rate_of
from gateway.core.ledger.closing import ClosingPolicy
from gateway.core.ledger.output_limit import (
    LEAST_SUMMARY,
    STREAM_STEP,
    CallNeed,
    longest_output,
    output_to_reserve,
    widest_room,
)
from gateway.core.ledger.refusals import Allowance, allowance
from gateway.core.ports import ReadBody
from gateway.core.record import CallRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import Remembered
from gateway.core.usage import Totals
from gateway.dialects.audio import asks_for_more_than_text
from gateway.dialects.base import Call
from gateway.dialects.limits import responses_asked, service_tier
from gateway.stores.leases import Lease, SavedProgress
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
#: the note of a call whose accounts could not be read
_STALE: Final = "unavailable: the budget is as last read"
#: A stream that brings this many tokens beyond its hold arrives in one piece: between two checks come fewer.
_ONE_PIECE: Final = 2 * STREAM_STEP


class Accounts:
    """Read the accounts of calls, and hold what they may cost. One instance serves all calls."""

    def __init__(
        self,
        *,
        budgets: Budgets,
        records: RecordBuilder,
        settler: Settler,
        facts: Callable[[Route], ModelFacts],
        read_body: ReadBody,
        usual: UsualOutput,
        clock: Callable[[], float],
    ) -> None:
        self._budgets = budgets
        self._usual = usual
        self._clock = clock
        self._records = records
        self._settler = settler
        self._facts = facts
        self._read_body = read_body
        #: Models whose streams arrive in one piece, made before they are sent. A hold that grows with the response
        #: would not bound them.
        self._in_one_piece = RecentModels(clock)

    @property
    def closing(self) -> ClosingPolicy | None:
        """Return the settings of closing calls; None if there are none."""
        return self._budgets.policy.closing

    # --- before the call ---------------------------------------------------------------------------------------

    async def open(self, state: CallState) -> Remembered:
        """Read the balances of the accounts that the call is charged to; return what the session remembers.

        Raises:
            InvalidRequest: the session cannot have the parent that the call names.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: the store is unavailable, and `store.on_failure` is not `open`.
        """
        caller, directives = state.incoming.caller, state.incoming.directives
        agents = named_agents(state.agent) if self._budgets.policy.agents else ()
        is_of_main = state.agent is None or state.agent.id == MAIN
        state.budget.charged = ChargedAccounts(
            caller.namespace,
            caller.budget,
            state.session,
            declared=directives.budget,
            agents=agents,
            is_compaction=state.is_compaction and is_of_main,
        )
        return self._take_opened(
            state,
            await self._budgets.open(
                state.session, state.budget.charged, directives.parent, with_totals=_is_stream(state)
            ),
        )

    async def look(self, state: CallState) -> None:
        """Read the accounts of a call that was refused before they were read, so that its client learns what is left.

        The parent and the budget that the call declares are ignored. Does nothing if the store cannot be read.
        """
        caller = state.incoming.caller
        if state.budget.charged.namespace:
            return
        charged = ChargedAccounts(caller.namespace, caller.budget, state.session)
        with contextlib.suppress(StoreUnavailable):
            self._take_opened(
                state, await self._budgets.read(state.session, charged, None, with_totals=_is_stream(state))
            )

    @staticmethod
    def _take_opened(state: CallState, opened: OpenedAccounts) -> Remembered:
        """Keep the accounts of a call; return what its session remembers."""
        begun, state.budget.charged, state.budget.accounts = opened
        state.budget.totals_before = begun.totals
        if state.budget.accounts.is_stale:
            state.notes["store"] = _STALE
        return begun.remembered

    async def hold(self, state: CallState, call: Call) -> tuple[Route, ...]:
        """Reserve what the call may cost, before it is sent; return the routes that the reservation is enough for.

        Raises:
            BudgetFault: too little is left.
            NotMetered: the gateway will not see what the call costs.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: the store is unavailable, and `store.on_failure` is not `open`.
        """
        routes = state.routing.routes
        if not state.budget.accounts.claims:
            return routes
        self._check_deferred(state)
        if state.budget.accounts.budgets:
            await self._read_body(len(call.body), lambda: _read_for_hold(state, call))
            await self._read_usual_output(state, call)
        # The store may have made the hold even if the call ends before its reply.
        state.budget.is_holding = True
        try:
            state.budget.hold, routes = await self._first_of(state, call)
        except StoreDamaged:
            state.budget.is_holding = False
            raise
        except StoreUnavailable:
            # The store may have made the hold all the same. The record of the call gives it back, even of a refused
            # one.
            if state.budget.closing is not None:
                raise  # Another worker may make the closing call, and this one cannot know.
            state.budget.accounts = self._budgets.without_store(state.budget.accounts)
            state.notes["store"] = _STALE
            state.budget.hold = await self._reserve(state, call, routes)
        except GatewayError:
            state.budget.is_holding = False
            raise
        state.budget.accounts = state.budget.hold.accounts
        usual, lease = state.budget.usual_output, state.budget.hold.lease
        if usual is not None and 0 < lease.step < STREAM_STEP:
            state.notes["reserved"] = f"{lease.tokens:,} output tokens at first; usual are {usual:,}"
        return routes

    async def _read_usual_output(self, state: CallState, call: Call) -> None:
        """Read the usual output of a stream without a limit, which is reserved first if the hold can grow.

        With `budget.clamp_output: false`, calls are refused rather than shortened, so a stream reserves more at first.
        A summary of the whole conversation is longer than other responses.
        """
        asked = output_to_reserve(state.output_asked, state.step_output)
        is_limited = limits_output(state.budget.accounts.budgets)
        is_lowered = self._budgets.policy.clamp and not state.is_compaction
        if call.stream and asked is None and is_limited and is_lowered:
            routes = state.routing.routes
            ahead = routes[routes.index(state.routing.route) :]
            state.budget.usual_output = await self._usual.of(state.session, ahead)

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

    async def _first_of(self, state: CallState, call: Call) -> tuple[TakenHold, tuple[Route, ...]]:
        """Reserve enough for every route that the call may still take; if that is refused, for the current one only.

        In the second case the call loses its fallbacks.
        """
        routes = state.routing.routes
        try:
            return await self._reserve(state, call, routes), routes
        except (BudgetFault, PriceUnknown):
            end = routes.index(state.routing.route) + 1
            if len(routes) == end:
                raise
        taken = await self._reserve(state, call, routes[:end])
        left_out = ", ".join(f"{route.provider}/{route.model}" for route in routes[end:])
        state.notes["left_out"] = f"{left_out}: too little budget is left for them"
        return taken, routes[:end]

    def _reserve(self, state: CallState, call: Call, routes: tuple[Route, ...]) -> Awaitable[TakenHold]:
        need, orphaned = partial(self._need, state, call, routes), partial(self._records.build_orphaned, state)
        call_id, is_stream = state.incoming.call_id, call.stream
        return self._budgets.reserve(state.budget.accounts, call_id, need, orphaned, is_stream=is_stream)

    def _need(self, state: CallState, call: Call, routes: tuple[Route, ...]) -> CallNeed:
        """Return what the call may use at most, on any of these routes that has not failed yet."""
        plan, wire, fields = state.context.plan, state.incoming.endpoint.wire, call.fields
        ahead = routes[routes.index(state.routing.route) :]
        known = [self._facts(route) for route in ahead]
        output = output_to_reserve(state.output_asked, state.step_output)
        tokens, expected = _uncounted(state, call) if plan is None else (plan.safe_tokens, plan.context.tokens)
        # Summaries of tool results are made after the hold, and may be longer than the extracts that they replace.
        tokens += state.context.shown.extra_tokens if state.context.shown is not None else 0
        tokens, expected = tokens + state.closing_tokens, expected + state.closing_tokens
        can_end = call.stream and wire is not None and not asks_for_more_than_text(fields)
        can_end = can_end and not state.is_fetched_later
        kept = state.kept_by(*ahead)
        # The expected tokens of a plan include what the provider keeps; its safe tokens do not.
        expected += kept if plan is None else 0
        rates = self._rates(state, call, ahead, tokens + kept)
        windows = [facts.window for facts in known]
        choices = responses_asked(fields, wire)
        if plan is not None:
            # The provider of the current route may have reported another window.
            windows[0] = plan.window
        return CallNeed(
            tokens + kept,
            output=output,
            model_output=longest_output([facts.output for facts in known]),
            least_output=max(state.output_asked.least, LEAST_SUMMARY if state.is_client_compaction else 0),
            choices=choices,
            has_output=wire is not None or output is not None,
            rate=dearest(rates),
            is_priced=all(rate is not None for rate in rates) or not state.incoming.endpoint.estimated,
            model=state.routing.route.model,
            can_grow=can_end
            and state.budget.closing is None
            and all(facts.reasoning is False for facts in known)
            and not any(route in self._in_one_piece for route in ahead),
            can_end=can_end,
            completes_without_client=state.is_fetched_later,
            # Without `kept`: a provider that needs room for the response drops some of what it keeps of earlier turns.
            room=widest_room(windows, tokens),
            expected=expected,
            is_last=state.budget.closing is not None,
            usual_output=state.budget.usual_output if choices == 1 and state.budget.closing is None else None,
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
        if taken.hold is None and not lease.is_known:
            await self._take(taken)
        if not lease.is_known or sent >= lease.saved.next_at:
            await self._budgets.save_progress(lease, sent)

    async def _take(self, taken: TakenHold) -> None:
        """Write a hold that was postponed."""
        try:
            if await self._budgets.deliver(taken):
                return
        except StoreUnavailable:
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
            await self._budgets.check(lease)
            delivered = lease.delivered()
            lease.schedule_check(state.response.bytes_sent, delivered)
            if delivered and state.budget.output_seen_at is None:
                state.budget.output_seen_at = self._clock()
        return lease.is_over

    @staticmethod
    def lease_of(state: CallState) -> Lease:
        """Return the lease whose `free_until` says how much may be passed on without `deliver` and `is_over`."""
        if state.budget.hold is not None:
            return state.budget.hold.lease
        # Without a hold, nothing has to be saved or checked. A lease is mutable, so no two calls share one.
        return Lease("", 0.0, 0, saved=SavedProgress(next_at=sys.maxsize))

    @staticmethod
    def bytes_at_once(state: CallState) -> int | None:
        """Return how many bytes of a stream may be passed on before `is_over` is asked again; None for all."""
        taken = state.budget.hold
        return taken.lease.check_bytes if taken is not None and taken.lease.is_bounded else None

    # --- after it ----------------------------------------------------------------------------------------------

    def learn(self, state: CallState, record: CallRecord) -> None:
        """Remember how long the response was, and whether it came in one piece."""
        self._usual.note(state, record)
        self._note_stream_in_one_piece(state, record)

    def _note_stream_in_one_piece(self, state: CallState, record: CallRecord) -> None:
        """Note the route if its stream came in one piece, far longer than the hold, so that it could not be ended."""
        taken, charge = state.budget.hold, record.charge
        if taken is None or charge is None or taken.final_response_tokens is not None or taken.hold is None:
            return
        if charge.usage.output_tokens > taken.lease.tokens + _ONE_PIECE:
            self._in_one_piece.add(state.routing.route)

    def claims_to_read(self, state: CallState) -> Sequence[Claim]:
        """Return the accounts to read when the call is settled, see `Budgets.claims_to_read`."""
        return self._budgets.claims_to_read(state.budget.accounts)

    def refresh(self, state: CallState, balances: Sequence[Balance] | None) -> None:
        """Update what the accounts have left after the call. `balances`: of `claims_to_read`; None if unknown."""
        state.budget.accounts = self._budgets.after_call(state.budget.accounts, balances)

    def release(self, state: CallState, spent: Amount) -> None:
        """Release the hold of a call that is settled. `spent`: what the call did cost."""
        taken, state.budget.hold = state.budget.hold, None
        if taken is not None:
            self._budgets.close(taken, spent)

    # --- at any time -------------------------------------------------------------------------------------------

    async def totals_now(self, state: CallState) -> Totals | None:
        """Return the session's totals, including this call only if it was settled; None if they are unknown."""
        if state.session is None:
            return None
        with contextlib.suppress(StoreUnavailable):
            return await self._budgets.totals(state.session)
        return None

    def allowance(self, state: CallState) -> Allowance | None:
        """Return what the call's accounts have left, by the balances as last read."""
        budgets = state.budget.accounts.budgets
        return allowance(budgets, self._budgets.policy.warn_at) if budgets else None


def _is_stream(state: CallState) -> bool:
    return state.call is not None and state.call.stream


def _read_for_hold(state: CallState, call: Call) -> None:
    """Read from the body what the hold depends on."""
    if state.context.plan is None:
        text_estimate(state)
    if any(balance.limits.nano_usd is not None for balance in state.budget.accounts.budgets):
        state.budget.caches_long = _LONG_CACHE.search(call.body) is not None


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
