"""Budgets on the way of a call: its accounts read, its hold taken, its end told to whoever keeps the hold alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.allowance import refusal
from gateway.core.asked import PARENT
from gateway.core.errors import InvalidRequest, PriceUnknown
from gateway.core.ledger import Amount, Claim, Granted, Hold, Refused, Standing
from gateway.core.namespaces import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.spending import (
    STREAM_STEP,
    BudgetPolicy,
    Charged,
    Need,
    claims_of,
    hold_for,
    is_limited,
    limit_to_set,
)
from gateway.core.stored import OpenHold, Opening
from gateway.core.values import dataclass
from gateway.stores.blind import Blind
from gateway.stores.leases import Lease, Leases

#: sessions above one that its calls are charged to: agents call agents
_MOST_PARENTS: Final = 8


@dataclass(frozen=True, slots=True)
class Book:
    """The accounts of a call, and how they stood when they were read.

    `is_blind`: the store is away, and they stand as this worker last saw them.
    """

    claims: tuple[Claim, ...] = ()
    standings: tuple[Standing, ...] = ()
    is_blind: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What was held for a call.

    Attributes:
        hold: None where nothing is limited.
        units: tokens held for each answer, see `Hold`.
        lease: keeps the hold alive.
        limit: the output limit to send with the call; None where it needs none.
        book: the accounts after the hold.
    """

    hold: Hold | None
    units: int
    lease: Lease
    limit: int | None
    book: Book

    @property
    def whole(self) -> int | None:
        """Tokens held for each answer, where that is final; None where nothing is held, or the hold still grows."""
        return self.units if self.hold is not None and not self.lease.step else None


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

    async def parents(self, session: SessionKey, known: str | None, named: str | None) -> tuple[SessionKey, ...]:
        """The sessions that called for this one, from the nearest up; `named`: as this call says, the first time.

        Raises:
            InvalidRequest: the session has another parent already, is its own, or there are too many.
        """
        if known is not None and named is not None and known != named:
            raise InvalidRequest(
                f'Session "{session.id}" was called for by "{known}" before, not by "{named}". '
                "A session has one parent; name the same one, or start a new session.",
                param=PARENT.decode(),
            )
        if known is not None or named is None:
            found, _ = await sessions_above(self._store, session, known)
            return found
        await self._above_with(session, named)
        state = await self._store.update(session, lambda state: state.with_parent(named))
        if state.parent != named:
            return await self.parents(session, state.parent, named)  # somebody was faster, and that one stays
        try:
            # Once more: those above may have got this one as their parent meanwhile.
            return await self._above_with(session, named)
        except InvalidRequest:
            await self._store.update(session, lambda state: state.without_parent(named))
            raise

    async def _above_with(self, session: SessionKey, named: str) -> tuple[SessionKey, ...]:
        """Those above a session with a parent that it has not had until now.

        Raises:
            InvalidRequest: that would be a circle, or too many.
        """
        found, next_one = await sessions_above(self._store, session, named)
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

    async def opening(self, session: SessionKey, charged: Charged, *, with_totals: bool) -> tuple[Opening, Book]:
        """What a call of a session begins with, and its accounts as they stand."""
        claims = claims_of(self.policy, charged)
        found = await self._store.opening(session, [claim.undeclared for claim in claims], with_totals=with_totals)
        return found, Book(claims, self._seen(claims, found.standings))

    async def book(self, charged: Charged) -> Book:
        """The accounts of a call as they stand."""
        claims = claims_of(self.policy, charged)
        return Book(claims, await self._standings(claims))

    async def _standings(self, claims: Sequence[Claim]) -> tuple[Standing, ...]:
        return self._seen(claims, await self._store.standings([claim.undeclared for claim in claims]))

    def _seen(self, claims: Sequence[Claim], granted: Sequence[Standing]) -> tuple[Standing, ...]:
        """How accounts stand for a call, lowered to what it declares; without that, they are kept for `blind_book`."""
        self._blind.saw(granted)
        return tuple(stands.lowered(claim.declared) for stands, claim in zip(granted, claims, strict=True))

    def blind_book(self, charged: Charged) -> Book:
        """The accounts of a call as this worker last saw them, while the store is away."""
        claims = self._blind.claims(claims_of(self.policy, charged))
        return Book(claims, self._blind.standings(claims), is_blind=True)

    async def again(self, book: Book) -> Book:
        """How the accounts stand now."""
        if book.is_blind:
            return replace(book, standings=self._blind.standings(book.claims))
        return replace(book, standings=await self._standings(book.claims))

    async def reserve(
        self,
        book: Book,
        call_id: str,
        need_of: Callable[[], Need],
        lost: Callable[[Need], CallRecord],
        *,
        is_stream: bool,
    ) -> Taken:
        """Hold what a call needs; `lost`: the record to write should nobody settle it.

        Where nothing is limited, a hold would only see to it that a call is charged if its worker dies, and most calls
        end too soon for that to be worth a write. `Leases` takes the hold of a call that lasts, and `deliver` takes it
        before a part of the answer goes out. Only a stream is held at once while the store is away: that hold stands in
        this worker's own view of the accounts.

        Raises:
            BudgetExhausted, BudgetBusy, RateLimited: there is too little left.
            PriceUnknown: a budget in USD is in force, and nobody knows the price.
            StoreUnavailable: nothing is held.
        """
        if not (is_stream and book.is_blind) and all(stands.limits.is_none for stands in book.standings):
            return self._unlimited(book, call_id, need_of, lost)
        need = need_of()
        if book.is_blind:
            # There is nobody to ask for more while the answer comes.
            need = replace(need, can_grow=False)
        self._check_price(book, need)
        opened = self._opened(book, call_id, need, lost)
        if book.is_blind:
            outcome = self._blind.reserve(opened.hold)
        else:
            outcome = await self._store.reserve(opened, self._leases.lease_s)
        if isinstance(outcome, Refused):
            claim = next(claim for claim in book.claims if claim.key == outcome.standing.key)
            raise refusal(outcome, claim, self.policy, self._wall())
        return self._granted(book, opened.hold, outcome, need)

    def _unlimited(
        self, book: Book, call_id: str, need_of: Callable[[], Need], lost: Callable[[Need], CallRecord]
    ) -> Taken:
        """Nothing is held yet, see `reserve`."""
        lease = Lease(call_id, 0, pending=lambda: self._opened(book, call_id, need_of(), lost))
        return Taken(None, 0, lease if book.is_blind else self._leases.open(lease), None, book)

    def _granted(self, book: Book, hold: Hold, granted: Granted, need: Need) -> Taken:
        """A granted hold as the call keeps it; from now on its lease is kept alive."""
        grows = need.can_grow and need.output is None and is_limited(granted.standings)
        lease = Lease(hold.id, granted.units * need.answers, STREAM_STEP if grows else 0, need.answers)
        if not book.is_blind:
            self._leases.open(lease)
            self._blind.saw_used(granted.standings)
        limit = limit_to_set(hold, granted, need)
        return Taken(hold, granted.units, lease, limit, replace(book, standings=granted.standings))

    def _check_price(self, book: Book, need: Need) -> None:
        if not need.is_priced and is_limited(book.standings, "nano_usd"):
            raise PriceUnknown(
                f'A budget in USD is in force and the price of "{need.model}" is not known, or not in the '
                "service tier it is asked for. Name it in gateway.yaml under models (match, provider, price: {input, "
                "output} in USD per million tokens), or call a model whose price is known, in its standard tier.",
                param="model",
            )

    def _opened(self, book: Book, call_id: str, need: Need, lost: Callable[[Need], CallRecord]) -> OpenHold:
        hold = hold_for(call_id, book.claims, book.standings, need, clamp=self.policy.clamp)
        return OpenHold(hold, lost(need), unit_usd=need.rate.output if need.rate is not None else None)

    async def deliver(self, taken: Taken) -> bool:
        """Before a part of the answer goes out: take the hold if that was put off; whether one is taken.

        Raises:
            StoreUnavailable: what is not held yet cannot be.
        """
        return not taken.book.is_blind and await self._leases.take(taken.lease)

    @staticmethod
    def lost(taken: Taken) -> CallRecord | None:
        """The record to write at once for a call that cannot be held, so that it is charged if its worker dies.

        None where the hold was taken, or this record was made before.
        """
        pending, taken.lease.pending = taken.lease.pending, None
        return pending().as_lost() if pending is not None else None

    async def look(self, lease: Lease) -> None:
        """See `Leases.look`."""
        await self._leases.look(lease)

    def close(self, taken: Taken, spent: Amount) -> None:
        """Let go of the hold of a call that was settled. `spent`: what it did cost."""
        self._leases.close(taken.lease.id)
        if taken.book.is_blind and taken.hold is not None:
            self._blind.settle(taken.hold, taken.units, spent)


async def sessions_above(
    store: Store, session: SessionKey, parent: str | None
) -> tuple[tuple[SessionKey, ...], SessionKey | None]:
    """The parent, its parent and so on, as many as are charged, and who would be the next one; None: nobody.

    A chain may grow at its top after its lower sessions were used. Their calls are then charged to the nearest of those
    above only, and are not refused.
    """
    found: list[SessionKey] = []
    while parent is not None:
        key = SessionKey(session.namespace, parent)
        if key == session or key in found or len(found) == _MOST_PARENTS:
            return tuple(found), key
        found.append(key)
        parent = (await store.remembered(key)).state.parent
    return tuple(found), None
