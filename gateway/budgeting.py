"""Budgets on the way of a call: its accounts read, its hold taken, its end told to whoever keeps the hold alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.core.errors import InvalidRequest, PriceUnknown
from gateway.core.ledger import Claim, Refused, Standing
from gateway.core.ports import CallRecord, OpenHold, SessionKey, Store
from gateway.core.spending import (
    STREAM_STEP,
    BudgetPolicy,
    Charged,
    Need,
    claims_of,
    hold_for,
    is_limited,
    limit_to_set,
    refusal,
)
from gateway.stores.leases import Lease, Leases

#: of agents that call agents
_MOST_PARENTS = 8


@dataclass(frozen=True, slots=True)
class Book:
    """The accounts of a call, and how they stood when they were read."""

    claims: tuple[Claim, ...] = ()
    standings: tuple[Standing, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """A hold. `limit`: of the answer, to be sent with the call; None: as the call has it."""

    lease: Lease
    limit: int | None
    book: Book


class Budgets:
    """What calls may spend. Shared by all calls under one configuration."""

    def __init__(self, store: Store, leases: Leases, policy: BudgetPolicy, wall: Callable[[], float]) -> None:
        self.policy = policy
        self._store = store
        self._leases = leases
        self._wall = wall

    async def parents(self, session: SessionKey, known: str | None, named: str | None) -> tuple[SessionKey, ...]:
        """The sessions that called for this one, from the nearest up; `named`: as this call says, the first time.

        Raises:
            InvalidRequest: the session has another parent already, is its own, or there are too many.
        """
        if known is not None and named is not None and known != named:
            raise InvalidRequest(
                f'Session "{session.id}" was called for by "{known}" before, not by "{named}". '
                "A session has one parent; name the same one, or start a new session.",
                param="x-parent-session-id",
            )
        found: list[SessionKey] = []
        parent = known or named
        while parent is not None:
            key = SessionKey(session.namespace, parent)
            if key == session or key in found or len(found) == _MOST_PARENTS:
                raise InvalidRequest(
                    f'Session "{session.id}" cannot be called for by "{named or known}": '
                    f"that would be a circle, or more than {_MOST_PARENTS} sessions above each other.",
                    param="x-parent-session-id",
                )
            found.append(key)
            parent = (await self._store.remembered(key)).state.parent
        if known is None and named is not None:
            await self._store.update(session, lambda state: state.with_parent(named))
        return tuple(found)

    async def book(self, charged: Charged) -> Book:
        """The accounts of a call as they stand."""
        claims = claims_of(self.policy, charged)
        return Book(claims, await self._store.standings(claims))

    async def now(self, claims: Sequence[Claim]) -> tuple[Standing, ...]:
        """How the accounts stand now."""
        return await self._store.standings(claims)

    async def reserve(self, book: Book, need: Need, lost: CallRecord) -> Taken:
        """Hold what a call needs; `lost`: the record to write should nobody settle it.

        Raises:
            BudgetExhausted, BudgetBusy, RateLimited: there is too little left.
            PriceUnknown: a budget in USD is in force, and nobody knows the price.
            StoreUnavailable: nothing is held.
        """
        if not need.is_priced and is_limited(book.standings, "nano_usd"):
            raise PriceUnknown(
                f'A budget in USD is in force and the price of "{lost.model}" is not known. '
                "Name it in gateway.yaml under models (match, provider, price: {input, output} in USD per million "
                "tokens), or call a model whose price is known.",
                param="model",
            )
        hold = hold_for(lost.call_id, book.claims, book.standings, need, clamp=self.policy.clamp)
        unit_usd = need.rate.output if need.rate is not None else None
        outcome = await self._store.reserve(OpenHold(hold, lost, unit_usd=unit_usd), self._leases.lease_s)
        if isinstance(outcome, Refused):
            claim = next(claim for claim in book.claims if claim.key == outcome.standing.key)
            raise refusal(outcome, claim, self.policy, self._wall())
        grows = need.can_grow and need.output is None and is_limited(outcome.standings)
        lease = Lease(hold.id, outcome.units * need.answers, STREAM_STEP if grows else 0, need.answers)
        return Taken(self._leases.open(lease), limit_to_set(hold, outcome, need), Book(book.claims, outcome.standings))

    def close(self, lease: Lease) -> None:
        """The call is being settled."""
        self._leases.close(lease.id)
