"""Reserve budget for a call: read its accounts, take a hold, extend it and give it back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.call.types import CallAccounts, TakenHold
from gateway.core.errors import InvalidRequest, PriceUnknown, StoreDamaged
from gateway.core.http.gateway_headers import PARENT
from gateway.core.ledger.arithmetic import Amount, Balance, Claim, Granted, Hold, Limits, Refused
from gateway.core.ledger.charging import (
    STREAM_STEP,
    BudgetPolicy,
    CallNeed,
    ChargedAccounts,
    bounds_answers,
    claims_of,
    hold_for,
    limit_to_set,
    most_text,
)
from gateway.core.ledger.refusals import refusal
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Sessions, Store
from gateway.core.record import CallRecord
from gateway.core.stored import CallOpening, OpenHold
from gateway.stores.leases import Lease, Leases
from gateway.stores.stale_accounts import Blind

#: sessions above one that its calls are charged to: agents call agents
_MOST_PARENTS: Final = 8
#: sessions with a parent of which it is remembered who was above them
_MOST_SEEN: Final = 4_096
#: the parents of sessions as they were read just now; None: that one has none
Parents = Mapping[SessionKey, str | None]
_NOTHING_READ: Final[Parents] = {}


class Budgets:
    """What calls may spend. Shared by all calls under one configuration."""

    def __init__(
        self, store: Store, leases: Leases, blind: Blind, policy: BudgetPolicy, wall: Callable[[], float]
    ) -> None:
        self.policy = policy
        self._store = store
        self._leases = leases
        self._wall = wall
        self._blind = blind
        #: who was above sessions that have a parent, when they were seen last
        self._above = OrderedDict[SessionKey, tuple[SessionKey, ...]]()

    async def parents(
        self, session: SessionKey, known: str | None, named: str | None, read: Parents = _NOTHING_READ
    ) -> tuple[SessionKey, ...]:
        """The sessions that called for this one, from the nearest up; `named`: as this call says, the first time.

        `read`: see `sessions_above`.

        Raises:
            InvalidRequest: the session has another parent already, is its own, or there are too many above it.
        """
        if known is not None and named is not None and known != named:
            raise InvalidRequest(
                f'Session "{session.id}" was called for by "{known}" before, not by "{named}". '
                "A session has one parent; name the same one, or start a new session.",
                param=PARENT.decode(),
            )
        if known is not None or named is None:
            found, next_one = await sessions_above(self._store, session, known, read)
            if next_one is not None and next_one not in (session, *found):
                # It has grown at its top. Who is up there would not be charged, so that its budget were escaped.
                raise InvalidRequest(
                    f'{len(found) + 1} sessions or more are above session "{session.id}" by now, and a call is charged '
                    f"to at most {_MOST_PARENTS}. Start a new session, for a parent that has fewer than "
                    f"{_MOST_PARENTS} above itself.",
                    param=PARENT.decode(),
                )
            return found
        await self._above_with(session, named, read)
        state = await self._store.update(session, lambda state: state.with_parent(named))
        if state.parent != named:
            return await self.parents(session, state.parent, named)  # somebody was faster, and that one stays
        try:
            # Once more: those above may have got this one as their parent meanwhile.
            return await self._above_with(session, named)
        except InvalidRequest:
            await self._store.update(session, lambda state: state.without_parent(named))
            raise

    async def _above_with(
        self, session: SessionKey, named: str, read: Parents = _NOTHING_READ
    ) -> tuple[SessionKey, ...]:
        """Those above a session with a parent that it has not had until now.

        Raises:
            InvalidRequest: that would be a circle, or too many.
        """
        found, next_one = await sessions_above(self._store, session, named, read)
        if next_one is None:
            return found
        refused = f'Session "{session.id}" cannot be called for by "{named}"'
        if next_one in (session, *found):
            why = f'{refused}: that would be a circle. Name the session that called for "{session.id}"'
        else:
            why = (
                f"{refused}: {len(found) + 1} sessions or more would be above it, and a call is charged to at most "
                f"{_MOST_PARENTS}. Name a parent that has fewer than {_MOST_PARENTS} above itself"
            )
        raise InvalidRequest(f"{why}, or send no {PARENT.decode()}.", param=PARENT.decode())

    async def opening(
        self, session: SessionKey, charged: ChargedAccounts, named: str | None, *, with_totals: bool
    ) -> tuple[CallOpening, ChargedAccounts, CallAccounts]:
        """What a call of a session begins with, who is charged for it, and their accounts as they stand.

        `named`: its parent, as the call says.

        Raises:
            InvalidRequest: see `parents`.
        """
        if named is not None or (self._above and session in self._above):
            begun = await self._below(session, charged, named, with_totals=with_totals)
            if begun is not None:
                return begun
        claims = claims_of(self.policy, charged)
        found = await self._store.opening(session, [claim.undeclared for claim in claims], with_totals=with_totals)
        known = found.remembered.state.parent
        if known is None and named is None:
            return found, charged, CallAccounts.of(claims, self._seen(claims, found.balances))
        charged = replace(charged, parents=await self._above_now(session, known, named, _NOTHING_READ))
        return found, charged, await self.book(charged)

    async def _below(
        self, session: SessionKey, charged: ChargedAccounts, named: str | None, *, with_totals: bool
    ) -> tuple[CallOpening, ChargedAccounts, CallAccounts] | None:
        """See `opening`. Which sessions are above this one the store says only now.

        So those that were above it when this worker saw it last, or the one that is named, are read at the same time.
        None where one of them cannot be read: it may be none of those above.
        """
        likely = self._above.get(session) or (SessionKey(session.namespace, named or ""),)
        claims = claims_of(self.policy, replace(charged, parents=likely))
        try:
            found = await self._store.opening(
                session, [claim.undeclared for claim in claims], with_totals=with_totals, above=likely
            )
        except StoreDamaged:
            return None
        read = dict(zip(likely, found.parents, strict=True))
        parents = await self._above_now(session, found.remembered.state.parent, named, read)
        charged = replace(charged, parents=parents)
        if parents != likely:
            return found, charged, await self.book(charged)
        return found, charged, CallAccounts.of(claims, self._seen(claims, found.balances))

    async def _above_now(
        self, session: SessionKey, known: str | None, named: str | None, read: Parents
    ) -> tuple[SessionKey, ...]:
        parents = await self.parents(session, known, named, read)
        self._above.pop(session, None)
        if parents:
            self._above[session] = parents
        if len(self._above) > _MOST_SEEN:
            self._above.popitem(last=False)
        return parents

    def parents_as_seen(self, session: SessionKey, named: str | None) -> tuple[SessionKey, ...]:
        """The sessions above this one as this worker last saw them, while the store is away; `named`: as its call says.

        Of one that it has not seen with the parent that is named, that parent, and who was above that one.
        """
        seen = self._above.get(session, ())
        if named is None or (seen and seen[0].id == named):
            return seen
        parent = SessionKey(session.namespace, named)
        above = dict.fromkeys((parent, *self._above.get(parent, ())))
        above.pop(session, None)
        return tuple(above)[:_MOST_PARENTS]

    async def book(self, charged: ChargedAccounts) -> CallAccounts:
        """The accounts of a call as they stand."""
        claims = claims_of(self.policy, charged)
        return CallAccounts.of(claims, await self._balances(claims))

    async def _balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        return self._seen(claims, await self._store.balances([claim.undeclared for claim in claims]))

    def _seen(self, claims: Sequence[Claim], granted: Sequence[Balance]) -> tuple[Balance, ...]:
        """How accounts stand for a call, lowered to what it declares; without that, they are kept for `blind_book`."""
        self._blind.saw(granted)
        return tuple([balance.lowered(claim.declared) for balance, claim in zip(granted, claims, strict=True)])

    def blind_book(self, charged: ChargedAccounts) -> CallAccounts:
        """The accounts of a call as this worker last saw them, while the store is away."""
        claims = self._blind.claims(claims_of(self.policy, charged))
        return CallAccounts.of(claims, self._blind.balances(claims), is_blind=True)

    @staticmethod
    def to_read(book: CallAccounts) -> Sequence[Claim]:
        """What to read when a call of these accounts is settled, so that its client is told what is left after it."""
        if book.is_blind or not book.budgets:
            return ()
        return [claim.undeclared for claim in book.claims]

    def again(self, book: CallAccounts, granted: Sequence[Balance] | None) -> CallAccounts:
        """The accounts after the call. `granted`: how those stand that were to be read; None: nobody knows."""
        if book.is_blind:
            return CallAccounts.of(book.claims, self._blind.balances(book.claims), is_blind=True)
        return CallAccounts.of(book.claims, self._seen(book.claims, granted)) if granted else book

    async def reserve(
        self,
        book: CallAccounts,
        call_id: str,
        need_of: Callable[[], CallNeed],
        orphaned: Callable[[CallNeed], CallRecord],
        *,
        is_stream: bool,
    ) -> TakenHold:
        """Hold what a call needs; `orphaned`: the record to write should nobody settle it.

        Where nothing is limited, a hold would only see to it that a call is charged if its worker dies, and most calls
        end too soon for that to be worth a write. `Leases` takes the hold of a call that lasts, and `deliver` takes it
        before a part of the answer goes out. Only a stream is held at once while the store is away: that hold stands in
        this worker's own view of the accounts.

        Raises:
            BudgetExhausted, BudgetBusy, RateLimited: there is too little left.
            PriceUnknown: a budget in USD is in force, and nobody knows the price.
            StoreUnavailable: nothing is held.
        """
        if not (is_stream and book.is_blind) and all(balance.limits.is_none for balance in book.balances):
            return self._unlimited(book, call_id, need_of, orphaned)
        need = need_of()
        if book.is_blind:
            # There is nobody to ask for more while the answer comes.
            need = replace(need, can_grow=False)
        self._check_price(book, need)
        opened, lease_s = self._opened(book, call_id, need, orphaned), self._leases.lease_s
        if book.is_blind:
            outcome = self._blind.reserve(opened.hold)
        else:
            outcome = await self._store.reserve(opened, lease_s)
        if isinstance(outcome, Refused):
            claim = next(claim for claim in book.claims if claim.key == outcome.balance_of.key)
            raise refusal(outcome, claim, self.policy, self._wall())
        return self._granted(book, opened, lease_s, outcome, need)

    def _unlimited(
        self,
        book: CallAccounts,
        call_id: str,
        need_of: Callable[[], CallNeed],
        orphaned: Callable[[CallNeed], CallRecord],
    ) -> TakenHold:
        """Nothing is held yet, see `reserve`."""
        lease = Lease(
            call_id, self._leases.lease_s, 0, pending=lambda: self._opened(book, call_id, need_of(), orphaned)
        )
        return TakenHold(None, 0, self._leases.open(lease), None, book)

    def _granted(
        self, book: CallAccounts, opened: OpenHold, lease_s: float, granted: Granted, need: CallNeed
    ) -> TakenHold:
        """A granted hold as the call keeps it; from now on its lease is kept alive, or taken once the store is back."""
        hold, after = opened.hold, CallAccounts.of(book.claims, granted.balances, is_blind=book.is_blind)
        grows = need.can_grow and need.output is None and bool(after.budgets)
        lease = Lease(hold.id, lease_s, granted.units * need.answers, STREAM_STEP if grows else 0, need.answers)
        lease.opened = replace(opened, units=granted.units)
        if need.can_end and not grows and bounds_answers(after.budgets):
            lease.most = most_text(lease.tokens)
        if book.is_blind:
            lease.pending = lambda: _as_granted(opened, granted.units)
            lease.taken = lambda outcome: self._blind.handed_over(hold.id, outcome.balances)
        else:
            self._blind.saw_used(granted.balances)
        self._leases.open(lease)
        limit = limit_to_set(hold, granted, need)
        return TakenHold(hold, granted.units, lease, limit, after)

    def _check_price(self, book: CallAccounts, need: CallNeed) -> None:
        if not need.is_priced and any(balance.limits.nano_usd is not None for balance in book.budgets):
            raise PriceUnknown(
                f'A budget in USD is in force and the price of "{need.model}" is not known, or not in the '
                "service tier it is asked for. Name it in gateway.yaml under models (match, provider, price: {input, "
                "output} in USD per million tokens), or call a model whose price is known, in its standard tier.",
                param="model",
            )

    def _opened(
        self, book: CallAccounts, call_id: str, need: CallNeed, orphaned: Callable[[CallNeed], CallRecord]
    ) -> OpenHold:
        hold = hold_for(call_id, book.claims, book.balances, need, clamp=self.policy.clamp)
        goes_on = need.goes_on and bounds_answers(book.budgets)
        unit_usd = need.rate.output if need.rate is not None else None
        return OpenHold(hold, orphaned(need), unit_usd=unit_usd, goes_on=goes_on)

    async def deliver(self, taken: TakenHold) -> bool:
        """Before a part of the answer goes out: take the hold if that was put off; whether one is taken.

        Raises:
            StoreUnavailable: what is not held yet cannot be.
        """
        return await self._leases.take(taken.lease)

    @staticmethod
    def orphaned(taken: TakenHold) -> CallRecord | None:
        """The record to write at once for a call that cannot be held, so that it is charged if its worker dies.

        None where the hold was taken, or this record was made before.
        """
        pending, taken.lease.pending = taken.lease.pending, None
        return pending().as_orphaned() if pending is not None else None

    async def note(self, lease: Lease, come: int) -> None:
        """See `Leases.note`."""
        await self._leases.note(lease, come)

    async def look(self, lease: Lease) -> None:
        """See `Leases.look`."""
        await self._leases.look(lease)

    def close(self, taken: TakenHold, spent: Amount) -> None:
        """Let go of the hold of a call that was settled. `spent`: what it did cost."""
        self._leases.close(taken.lease.id)
        if taken.book.is_blind and taken.hold is not None:
            self._blind.settle(taken.hold.id, spent)


def _as_granted(opened: OpenHold, units: int) -> OpenHold:
    """The hold of a call that is under way: of all that it was granted, and within no limits but those of an operator.

    Its request was counted when it was made.
    """
    hold = opened.hold
    claims = [Claim(one.key, Limits(window_s=one.configured.window_s)) for one in hold.claims if one.key.kind != "rate"]
    return replace(opened, hold=Hold(hold.id, tuple(claims), hold.amount(units)))


async def sessions_above(
    store: Sessions, session: SessionKey, parent: str | None, read: Parents = _NOTHING_READ
) -> tuple[tuple[SessionKey, ...], SessionKey | None]:
    """The parent, its parent and so on, as many as are charged, and who would be the next one; None: nobody.

    `read`: the parents of some of them, for which the store is not asked again.
    """
    found: list[SessionKey] = []
    while parent is not None:
        key = SessionKey(session.namespace, parent)
        if key == session or key in found or len(found) == _MOST_PARENTS:
            return tuple(found), key
        found.append(key)
        parent = read[key] if key in read else (await store.remembered(key)).state.parent
    return tuple(found), None
