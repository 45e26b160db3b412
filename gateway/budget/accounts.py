"""Read the accounts of a call before it, hold what it may cost, and settle it once.

`gateway.budget.reservation` reads accounts and places holds. This module is the part of a call that uses it, also
while the store is unavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from gateway.background.settlement import BackgroundSettlement
from gateway.budget.reservation import Budgets
from gateway.call.observers import tell
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
    bounds_answers,
    dearest,
    rate_of,
    room_in,
)
from gateway.core.ledger.refusals import Allowance, allowance
from gateway.core.plan import Plan
from gateway.core.ports import Observer, ReadBody, Sessions
from gateway.core.record import PENDING, CallRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.stored import CallClosing
from gateway.core.usage import Totals
from gateway.dialects.audio import asks_for_more_than_text
from gateway.dialects.base import Call
from gateway.dialects.limits import answers_asked, default_limit, least_output, output_limit, service_tier
from gateway.steps.enforcement import Going, Steps
from gateway.stores.settler import Settler

logger = logging.getLogger("gateway")

#: factor on an estimate that counts only texts, not the fields around them
_UNCOUNTED_MARGIN: Final = 1.25
#: For a body that the gateway does not read: bytes that are held as one token, and the most tokens that are held for a
#: form or a file.
_UNREAD_BYTES: Final = 4
_UNREAD_MOST: Final = 16_384
#: what may stand before the first character of JSON: white space, byte order marks, the zero bytes of UTF-16 and UTF-32
_BEFORE_JSON: Final = b" \t\r\n\0\xff\xfe\xef\xbb\xbf"
#: the values that ask for a cache of one hour (Anthropic's `ttl`) or of 12 (OpenAI's), in each way JSON can write them
_LONG_CACHE: Final = re.compile(rb'"(?:1|\\u0031)(?:2|\\u0032)?(?:h|\\u0068)"')
#: tokens that a stream brings beyond its hold, by which it is known to come in one piece: a look brings fewer
_ONE_PIECE: Final = 2 * STREAM_STEP


class Accounts:
    """Keeps the accounts of calls. Shared by all calls."""

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
        #: Models whose streams came in one piece, made before they were sent: a hold that grows with the answer would
        #: bound none of them.
        self._in_one_piece = RecentModels(clock)

    # --- before the call ---------------------------------------------------------------------------------------

    async def open(self, progress: CallState) -> None:
        """Read what the session remembers, and how the accounts stand that the call is charged to.

        Raises:
            InvalidRequest: the session cannot have the parent that the call names.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: no calls are taken while the store is away.
        """
        caller, directives = progress.incoming.caller, progress.incoming.directives
        progress.charged = ChargedAccounts(
            caller.namespace, caller.budget, progress.session, declared=directives.budget
        )
        if not self._settler.is_unavailable:
            try:
                await self._read(progress, directives.parent)
            except StoreDamaged as error:
                # Nobody knows what it may spend until that is mended, be it for good: no case for `on_failure: open`.
                self._settler.away(error)
                raise
            except StoreUnavailable as error:
                self._settler.away(error)
            else:
                return
        self._open_blind(progress)

    async def look(self, progress: CallState) -> None:
        """Read the accounts of a call that was refused before they were read, to tell its client what is left.

        The parent and the budget that the call declares are ignored. Does nothing where the store cannot be read.
        """
        caller = progress.incoming.caller
        if progress.charged.namespace or self._settler.is_unavailable:
            return
        progress.charged = ChargedAccounts(caller.namespace, caller.budget, progress.session)
        with contextlib.suppress(StoreUnavailable):
            await self._read(progress, None)

    async def _read(self, progress: CallState, named: str | None) -> None:
        session, call = progress.session, progress.call
        if session is None:
            progress.book = await self._budgets.book(progress.charged)
            return
        is_stream = call is not None and call.stream
        begun = await self._budgets.opening(session, progress.charged, named, with_totals=is_stream)
        opening, progress.charged, progress.book = begun
        progress.remembered, progress.before = opening.remembered, opening.totals

    def _open_blind(self, progress: CallState) -> None:
        """Take the accounts as this worker last saw them.

        Raises:
            StoreUnavailable: no calls are taken while the store is away.
        """
        self._settler.check()
        charged, session = progress.charged, progress.session
        if session is not None and not charged.parents:
            parents = self._budgets.parents_as_seen(session, progress.incoming.directives.parent)
            charged = replace(charged, parents=parents)
        progress.book = self._budgets.blind_book(charged)
        progress.notes["store"] = "away: its budget is as it was last seen"

    async def hold(self, progress: CallState, call: Call) -> None:
        """Hold what the call may cost, before it is sent.

        Raises:
            BudgetFault: too little is left.
            NotMetered: nobody will see what it costs.
            StoreDamaged: one of the accounts cannot be read.
            StoreUnavailable: no calls are taken while the store is away.
        """
        if not progress.book.claims:
            return
        self._check_deferred(progress)
        if progress.book.budgets:
            await self._read_body(len(call.body), lambda: _read_for_hold(progress, call))
        # Should the call end before it hears that it was granted, there is a hold all the same.
        progress.is_holding = True
        try:
            progress.taken = await self._first_of(progress, call)
        except StoreDamaged as error:
            progress.is_holding = False
            self._settler.away(error)
            raise
        except StoreUnavailable as error:
            # It may have been granted all the same; even where the call is refused now, its record gives it back.
            self._settler.away(error)
            self._open_blind(progress)
            progress.taken = await self._reserve(progress, call)
        except GatewayError:
            progress.is_holding = False
            raise
        progress.book = progress.taken.book

    @staticmethod
    def check_held(progress: CallState) -> None:
        """Refuse a call that has become larger since it was held; the next try begins with what is known now.

        Raises:
            StoreUnavailable: it has.
        """
        taken, plan = progress.taken, progress.plan
        if taken is None or taken.hold is None or plan is None or not bounds_answers(progress.book.budgets):
            return
        weight, held = plan.safe_tokens + plan.context.kept, taken.hold.fixed.tokens
        if weight > held:
            raise StoreUnavailable(
                f"The full texts of its tool results could not be kept, and with them the request weighs {weight:,} "
                f"tokens, of which its budget holds {held:,}. Try again shortly."
            )

    def _check_deferred(self, progress: CallState) -> None:
        """Refuse a call that is billed after its answer (a batch) where tokens or USD are limited."""
        if not bounds_answers(progress.book.budgets) or self._budgets.policy.deferred:
            return
        if progress.is_billed_later and not progress.is_fetched_later:
            raise NotMetered(
                "What this request begins is billed after its answer, so that the budget of its session or client key "
                "cannot be held against it. Send it with a client key that has no budget in tokens or USD, ask for an "
                "answer that is not deferred, or set budget.deferred: forward."
            )

    async def _first_of(self, progress: CallState, call: Call) -> TakenHold:
        """Hold enough for every route that the call may yet take; if that is refused, for the current one only.

        Then the call has no fallbacks any more.
        """
        try:
            return await self._reserve(progress, call)
        except (BudgetFault, PriceUnknown):
            routes, end = progress.routes, progress.routes.index(progress.route) + 1
            if len(routes) == end:
                raise
        progress.routes = routes[:end]
        try:
            taken = await self._reserve(progress, call)
        except (BudgetFault, PriceUnknown):
            # With its tool results shown shorter there may be room for all of them.
            progress.routes = routes
            raise
        left_out = ", ".join(f"{route.provider}/{route.model}" for route in routes[end:])
        progress.notes["left_out"] = f"{left_out}: its budget could not be held for them"
        return taken

    def _reserve(self, progress: CallState, call: Call) -> Awaitable[TakenHold]:
        need, orphaned = partial(self._need, progress, call), partial(self._records.orphaned, progress)
        call_id, is_stream = progress.incoming.call_id, call.stream
        return self._budgets.reserve(progress.book, call_id, need, orphaned, is_stream=is_stream)

    def _need(self, progress: CallState, call: Call) -> CallNeed:
        """What the call may take at the most, wherever it goes in the end."""
        plan, wire, fields = progress.plan, progress.incoming.endpoint.wire, call.fields
        # The routes before the current one have failed.
        ahead = progress.routes[progress.routes.index(progress.route) :]
        known = [self._facts(route) for route in ahead]
        asked = progress.output_limit(fields, wire) if wire is not None else output_limit(fields, None)
        asked = asked or default_limit(fields, wire)
        asked = min(asked, MOST) if asked is not None else None
        tokens, expected = _uncounted(progress, call) if plan is None else (plan.safe_tokens, plan.context.tokens)
        # Summaries of tool results are made after the hold, and may be longer than what is shown until then.
        tokens += progress.showing.more if progress.showing is not None else 0
        can_end = call.stream and wire is not None and not asks_for_more_than_text(fields)
        can_end = can_end and not progress.is_fetched_later
        kept = progress.kept_by(*ahead)
        # The expected tokens of a plan include what the provider keeps; its safe tokens do not.
        expected += kept if plan is None else 0
        outputs = [facts.output for facts in known]
        rates = self._rates(progress, call, ahead, tokens + kept)
        return CallNeed(
            tokens + kept,
            output=asked,
            model_output=max((one for one in outputs if one is not None), default=None) if all(outputs) else None,
            # A limit that nobody here can lower is held whole.
            least_output=least_output(fields, wire) if wire is not None else asked or 0,
            answers=answers_asked(fields, wire),
            has_output=wire is not None or asked is not None,
            rate=dearest(rates),
            is_priced=all(rate is not None for rate in rates) or not progress.incoming.endpoint.estimated,
            model=progress.route.model,
            can_grow=can_end
            and all(facts.reasoning is False for facts in known)
            and not any(route in self._in_one_piece for route in ahead),
            can_end=can_end,
            goes_on=progress.is_fetched_later,
            # Without `kept`: a provider that needs room for the answer drops some of what it keeps of earlier turns.
            room=_room(plan, [facts.window for facts in known], tokens),
            expected=expected,
        )

    def _rates(self, progress: CallState, call: Call, ahead: Sequence[Route], tokens: int) -> list[TokenRate | None]:
        """What a token costs of each model that may answer, by the gateway's choice or the provider's."""
        tier, caches_1h = service_tier(call.fields), progress.caches_long
        prices = [self._facts(route).price for route in (*ahead, *progress.instead(*ahead))]
        return [rate_of(price, tokens, tier, caches_1h=caches_1h) for price in prices]

    async def deliver(self, progress: CallState) -> None:
        """Before a part of the answer goes out: see to it that the call is charged even if this worker dies."""
        taken = progress.taken
        if taken is None:
            return
        lease, come = taken.lease, progress.response_bytes
        # What is held while the store is away is counted by this worker, and `Leases` takes it once the store is back.
        if taken.hold is None and not lease.is_known and not self._settler.is_unavailable:
            await self._take(taken)
        if not lease.is_known or come >= lease.note_at:
            await self._budgets.note(lease, come)

    async def _take(self, taken: TakenHold) -> None:
        """Take a hold that was put off."""
        try:
            if await self._budgets.deliver(taken):
                return
        except StoreUnavailable as error:
            self._settler.away(error)
            return
        # The record that is written when the call has ended corrects this one.
        record = self._budgets.orphaned(taken)
        if record is not None:
            await self._settler.settle(record)

    async def is_over(self, progress: CallState) -> bool:
        """Whether a stream has to end now, as its hold is used up. The caller passes nothing on meanwhile."""
        if progress.taken is None:
            return False
        lease = progress.taken.lease
        if lease.is_bounded and progress.response_bytes - lease.looked_at >= lease.look_bytes:
            await self._budgets.look(lease)
            lease.looked(progress.response_bytes, lease.delivered())
        return lease.is_over

    @staticmethod
    def bytes_at_once(progress: CallState) -> int | None:
        """Return how many bytes of a stream may be passed on before `is_over` is asked again; None for all."""
        taken = progress.taken
        return taken.lease.look_bytes if taken is not None and taken.lease.is_bounded else None

    # --- after it ----------------------------------------------------------------------------------------------

    async def settle(self, progress: CallState) -> Totals | None:
        """Write the record and its charge. Safe to call again: an interrupted settlement is repeated as it was."""
        if progress.is_settled:
            return progress.totals
        going = None
        if progress.record is None:
            await self._read_for_record(progress)
            # Only the first time: if that settlement was interrupted, nobody knows whether the session's step moved.
            progress.record = self._record(progress)
            self._note_one_piece(progress, progress.record)
            going = self._going(progress, progress.record)
        record = progress.record
        # A call that the gateway itself could not serve is not recorded, but what was held must be given back. One that
        # is pending is recorded without a session, too: else nobody would hear what it took.
        is_recorded = record.session is not None or record.outcome == PENDING
        if progress.is_holding or (is_recorded and not isinstance(progress.fault, GatewayFault)):
            claims = self._budgets.to_read(progress.book)
            record = await self._fetched.before(progress, record)
            closing = await self._written(progress, record, going, claims)
            self._give_back(progress, record.spent)
            if closing is not None:
                progress.totals = closing.totals
            if claims or progress.book.is_blind:
                progress.book = self._budgets.again(progress.book, closing.balances if closing is not None else None)
        if await self._fetched.looked_back(progress):
            with self._fetched.whatever():
                progress.totals = await self.totals_now(progress)
        self.end(progress)
        await self._fetched.after(progress, record)
        return progress.totals

    async def _read_for_record(self, progress: CallState) -> None:
        """Read the texts of a large body in a thread, if the call's record needs them."""
        call = progress.call
        if call is None or not self._records.needs_texts(progress):
            return
        try:
            await self._read_body(len(call.body), lambda: text_estimate(progress))
        except asyncio.CancelledError:
            # The call must be settled all the same, and at once: it is charged by its length.
            progress.texts = ceil(len(call.body) / _UNREAD_BYTES)

    def _note_one_piece(self, progress: CallState, record: CallRecord) -> None:
        """Note a stream that brought far more than was held for it: nobody could have ended it in time."""
        taken, charge = progress.taken, record.charge
        if taken is None or charge is None or taken.whole is not None or taken.hold is None:
            return
        if charge.usage.output_tokens > taken.lease.tokens + _ONE_PIECE:
            self._in_one_piece.add(progress.route)

    def _record(self, progress: CallState) -> CallRecord:
        """The call's record; `RecordBuilder.unread` where reading its usage fails."""
        try:
            return self._records.of(progress)
        except Exception:
            logger.exception("what call %s used cannot be told", progress.incoming.call_id)
            return self._records.unread(progress)

    def _going(self, progress: CallState, record: CallRecord) -> Going | None:
        try:
            return self._steps.going(progress, record)
        except Exception:
            # Where a session is in its steps is guidance, and no reason to lose a charge.
            logger.exception("what call %s makes of its session's step cannot be told", record.call_id)
            return None

    def end(self, progress: CallState) -> None:
        """Release what this worker keeps of the call, and tell the observers; only the first time.

        Also for a call whose settlement was interrupted: the settler writes its record as soon as it can. If a call has
        no record, its hold ends with its lease, and is settled as that of a worker that is gone.
        """
        if progress.is_settled:
            return
        record = progress.record
        self._give_back(progress, record.spent if record is not None else NOTHING)
        if record is None:
            return
        progress.is_settled = True
        # What it takes is told when it is known, once.
        told = record if record.outcome != PENDING else replace(record, charge=None)
        # Those of the session whose answer was fetched are no part of the request that did so.
        totals = progress.totals if progress.fetched is None else None
        tell(self._listeners, told, totals, self.allowance(progress))

    def _give_back(self, progress: CallState, spent: Amount) -> None:
        taken, progress.taken = progress.taken, None
        if taken is not None:
            self._budgets.close(taken, spent)

    async def _written(
        self, progress: CallState, record: CallRecord, going: Going | None, claims: Sequence[Claim]
    ) -> CallClosing | None:
        """Write the record, and in the same step where its session is in its steps now; see `Settler.close`."""
        if going is not None:
            try:
                closing = await self._settler.close_with(record, going, claims)
            except StoreUnavailable as error:
                self._steps.unkept(progress, going, error)
            else:
                progress.record = self._steps.gone(progress, going)
                return closing
        return await self._settler.close(record, claims)

    # --- at any time -------------------------------------------------------------------------------------------

    async def totals_now(self, progress: CallState) -> Totals | None:
        """The session's totals, without this call unless it was settled; None where nobody knows them."""
        if progress.session is None or self._settler.is_unavailable:
            return None
        with contextlib.suppress(StoreUnavailable):
            return await self._store.totals(progress.session)
        return None

    def allowance(self, progress: CallState) -> Allowance | None:
        """What the call's accounts leave, as they stood when they were last read."""
        budgets = progress.book.budgets
        return allowance(budgets, self._budgets.policy.warn_at) if budgets else None


def _read_for_hold(progress: CallState, call: Call) -> None:
    """Read what a hold needs to know of the body."""
    if progress.plan is None:
        text_estimate(progress)
    if any(balance.limits.nano_usd is not None for balance in progress.book.budgets):
        progress.caches_long = _LONG_CACHE.search(call.body) is not None


def _room(plan: Plan | None, windows: Sequence[int | None], tokens: int) -> int | None:
    """What the windows of models leave for an answer, the widest of them; None where one is not known.

    `windows`: as listed, first of the model whose turn it is, whose provider may have said more.
    """
    first = plan.window if plan is not None else windows[0]
    rooms = [room_in(window, tokens) for window in (first, *windows[1:])]
    return max((room for room in rooms if room is not None), default=None) if all(rooms) else None


def _uncounted(progress: CallState, call: Call) -> tuple[int, int]:
    """Return the input tokens to hold for a call that is not counted exactly, and those it is expected to have.

    Both are 0 without a budget, as reading megabytes takes time.
    """
    if not progress.book.budgets:
        return 0, 0
    if not call.fields and progress.incoming.endpoint.estimated:
        unread = _unread(call.body)
        return unread, unread
    expected = text_estimate(progress)
    tokens = ceil(expected * _UNCOUNTED_MARGIN)
    # In a conversation that is too long to be counted, brackets and numbers are billed as well.
    if progress.incoming.endpoint.wire is not None:
        tokens = max(tokens, ceil(len(call.body) / _UNREAD_BYTES))
    return tokens, expected


def _unread(body: bytes) -> int:
    """Tokens to hold for a body that the gateway does not read: all of it where it may be JSON, which is text."""
    tokens = ceil(len(body) / _UNREAD_BYTES)
    return tokens if body.lstrip(_BEFORE_JSON).startswith(b"{") else min(tokens, _UNREAD_MOST)
