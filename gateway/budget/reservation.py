"""Reserve budget for a call: read its accounts, take a hold, extend it and give it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.call.types import CallAccounts, TakenHold
from gateway.core.agent_use import parents_of
from gateway.core.bounded import BoundedDict
from gateway.core.calling_agent import MAIN, CallingAgent
from gateway.core.errors import InvalidRequest, PriceUnknown, StoreDamaged, StoreUnavailable
from gateway.core.http.gateway_headers import PARENT
from gateway.core.ledger.arithmetic import Amount, Balance, Claim, Granted, Hold, Limits, Refused
from gateway.core.ledger.charging import AgentName, BudgetPolicy, ChargedAccounts, claims_of, limits_output
from gateway.core.ledger.output_limit import CallNeed, hold_for, limit_of_hold, longest_text
from gateway.core.ledger.refusals import refusal
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Sessions
from gateway.core.record import CallRecord
from gateway.core.session import Remembered
from gateway.core.stored import CallStart, OpenHold
from gateway.core.usage import Totals
from gateway.stores.fallback import FallbackStore
from gateway.stores.leases import Lease, Leases

#: maximum number of parents that the calls of a session, or of a subagent, are charged to
MOST_PARENTS: Final = 8
#: maximum number of sessions whose parents are remembered
_MOST_SEEN: Final = 4_096
#: the parent of each session that was just read; None if it has none
Parents = Mapping[SessionKey, str | None]
_NOTHING_READ: Final[Parents] = {}
#: what the store knows of a call's session, whose accounts are charged, and their balances
OpenedAccounts = tuple[CallStart, ChargedAccounts, CallAccounts]
#: of a call without a session, or while the store is unavailable
_NOTHING_KNOWN: Final = CallStart(Remembered(), (), None)


class Budgets:
    """Reserve budgets for calls. One instance serves all calls under one configuration."""

    def __init__(self, store: FallbackStore, leases: Leases, policy: BudgetPolicy, wall: Callable[[], float]) -> None:
        self.policy = policy
        self._store = store
        self._leases = leases
        self._wall = wall
        #: the parents of sessions as last read, from the nearest up
        self._above = BoundedDict[SessionKey, tuple[SessionKey, ...]](_MOST_SEEN)
        #: the subagents above nested ones as last read, by session and id, from the nearest up
        self._agents_above = BoundedDict[tuple[SessionKey, str], tuple[AgentName, ...]](_MOST_SEEN)

    async def parents(
        self, session: SessionKey, known: str | None, named: str | None, read: Parents = _NOTHING_READ
    ) -> tuple[SessionKey, ...]:
        """Return the parents of a session, from the nearest up, and store a parent that is named for the first time.

        Args:
            session: the session of the call.
            known: its parent as stored; None if it has none.
            named: its parent as the call names it; None if it names none.
            read: see `sessions_above`.

        Raises:
            InvalidRequest: the session has another parent already, is its own parent, or has too many parents.
        """
        if known is not None and named is not None and known != named:
            raise InvalidRequest(
                f'Session "{session.id}" already has the parent "{known}", so it cannot have "{named}". '
                "Name the same parent, or start a new session.",
                param=PARENT.decode(),
            )
        if known is not None or named is None:
            found, next_one = await sessions_above(self._store, session, known, read)
            if next_one is not None and next_one not in (session, *found):
                # The chain has grown at its top. Its topmost sessions would not be charged, and escape their budgets.
                raise InvalidRequest(
                    f'Session "{session.id}" now has {len(found) + 1} parents or more, and a call is charged to at '
                    f"most {MOST_PARENTS}. Start a new session below one with fewer than {MOST_PARENTS} parents.",
                    param=PARENT.decode(),
                )
            return found
        await self._above_with(session, named, read)
        kept = await self._store.update(session, lambda kept: kept.with_parent(named))
        if kept.parent != named:
            return await self.parents(session, kept.parent, named)  # another call was faster, and its parent stays
        try:
            # Check again: a session above may have received this one as its parent in the meantime.
            return await self._above_with(session, named)
        except InvalidRequest:
            await self._store.update(session, lambda kept: kept.without_parent(named))
            raise

    async def _above_with(
        self, session: SessionKey, named: str, read: Parents = _NOTHING_READ
    ) -> tuple[SessionKey, ...]:
        """Return the parents that a session has once it has this parent.

        Raises:
            InvalidRequest: the parents would form a circle, or there would be too many.
        """
        found, next_one = await sessions_above(self._store, session, named, read)
        if next_one is None:
            return found
        refused = f'Session "{session.id}" cannot have the parent "{named}"'
        if next_one in (session, *found):
            why = f"{refused}: the parents would form a circle. Name another parent"
        else:
            why = (
                f"{refused}: it would have {len(found) + 1} parents or more, and a call is charged to at most "
                f"{MOST_PARENTS}. Name a parent that has fewer than {MOST_PARENTS} parents"
            )
        raise InvalidRequest(f"{why}, or send no {PARENT.decode()}.", param=PARENT.decode())

    async def open(
        self, session: SessionKey | None, charged: ChargedAccounts, named: str | None, *, with_totals: bool
    ) -> OpenedAccounts:
        """Read the accounts of a call like `read`. While the store is unavailable, return them as last read.

        Raises:
            InvalidRequest: see `parents`.
            StoreDamaged: an account cannot be read. What it may spend is unknown until it is repaired.
            StoreUnavailable: the store is unavailable, and no calls are accepted without it.
        """
        try:
            return await self.read(session, charged, named, with_totals=with_totals)
        except StoreDamaged:
            raise
        except StoreUnavailable:
            self._store.availability.check_accepts_without_store()
        if session is not None:
            agents = self._nested_as_seen(session, charged.agents)
            charged = replace(charged, parents=self.parents_as_seen(session, named), agents=agents)
        return _NOTHING_KNOWN, charged, self.stale_accounts(charged)

    async def read(
        self, session: SessionKey | None, charged: ChargedAccounts, named: str | None, *, with_totals: bool
    ) -> OpenedAccounts:
        """Return what the session remembers, whose accounts are charged, and the balances of these accounts.

        Args:
            session: the session of the call, if it has one.
            charged: whose accounts are charged, as far as the call says.
            named: the parent of the session, as the call names it.
            with_totals: read the session's totals too.

        Raises:
            InvalidRequest: see `parents`.
            StoreUnavailable: the accounts cannot be read.
        """
        if session is None:
            return _NOTHING_KNOWN, charged, await self.read_accounts(charged)
        if len(charged.agents) > 1:
            charged = replace(charged, agents=await self._nested(session, *charged.agents[:2]))
        if named is not None or (self._above and session in self._above):
            begun = await self._below(session, charged, named, with_totals=with_totals)
            if begun is not None:
                return begun
        claims = claims_of(self.policy, charged)
        is_declared = not charged.declared.is_none
        asked = [claim.undeclared for claim in claims] if is_declared else claims
        found = await self._store.open_call(session, asked, with_totals=with_totals)
        known = found.remembered.state.parent
        if known is None and named is None:
            balances = _lowered(claims, found.balances) if is_declared else found.balances
            return found, charged, CallAccounts.of(claims, balances)
        charged = replace(charged, parents=await self._above_now(session, known, named, _NOTHING_READ))
        return found, charged, await self.read_accounts(charged)

    async def _below(
        self, session: SessionKey, charged: ChargedAccounts, named: str | None, *, with_totals: bool
    ) -> OpenedAccounts | None:
        """Read a session that probably has parents, with one request to the store. See `read`.

        The parents are known only after the session was read. Therefore the parents as last read, or the named one, are
        read at the same time. Returns None if one of them cannot be read, because it may not be a parent at all.
        """
        likely = self._above.get(session) or (SessionKey(session.namespace, named or ""),)
        claims = claims_of(self.policy, replace(charged, parents=likely))
        try:
            found = await self._store.open_call(
                session, [claim.undeclared for claim in claims], with_totals=with_totals, above=likely
            )
        except StoreDamaged:
            return None
        read = dict(zip(likely, found.parents, strict=True))
        parents = await self._above_now(session, found.remembered.state.parent, named, read)
        charged = replace(charged, parents=parents)
        if parents != likely:
            return found, charged, await self.read_accounts(charged)
        return found, charged, CallAccounts.of(claims, _lowered(claims, found.balances))

    async def _above_now(
        self, session: SessionKey, known: str | None, named: str | None, read: Parents
    ) -> tuple[SessionKey, ...]:
        parents = await self.parents(session, known, named, read)
        if parents:
            self._above[session] = parents
        else:
            self._above.pop(session, None)
        return parents

    async def _nested(self, session: SessionKey, agent: AgentName, parent: AgentName) -> tuple[AgentName, ...]:
        """Return a nested subagent and those above it, from the nearest up.

        An agent above that has made no call as a subagent is not charged: it may be the main agent under another name.

        Args:
            session: the session of the call.
            agent: the subagent that makes the call.
            parent: the agent that has started it, as the call names it.
        """
        above = self._agents_above.get((session, agent.id), ())
        if not above or above[0].id != parent.id:
            known = {one.id: one for one in await self._store.agents(session)}
            names = parents_of(agent.id, parent.id, known, MOST_PARENTS)
            above = tuple([AgentName(name, known[name].type) for name in names if name in known])
            if above:
                self._agents_above[session, agent.id] = above
        return (agent, *above)

    def _nested_as_seen(self, session: SessionKey, agents: tuple[AgentName, ...]) -> tuple[AgentName, ...]:
        """Return a subagent and those above it as this worker last read them."""
        above = self._agents_above.get((session, agents[0].id), ()) if len(agents) > 1 else ()
        return (*agents[:1], *(above if above and above[0].id == agents[1].id else ()))

    def parents_as_seen(self, session: SessionKey, named: str | None) -> tuple[SessionKey, ...]:
        """Return the parents of a session as this worker last read them. For the time while the store is unavailable.

        `named`: the parent as the call names it. If the worker does not know the session with this parent, the parent
        and the parents of that one are returned.
        """
        seen = self._above.get(session, ())
        if named is None or (seen and seen[0].id == named):
            return seen
        parent = SessionKey(session.namespace, named)
        above = dict.fromkeys((parent, *self._above.get(parent, ())))
        above.pop(session, None)
        return tuple(above)[:MOST_PARENTS]

    async def read_accounts(self, charged: ChargedAccounts) -> CallAccounts:
        """Return the accounts of a call with their current balances."""
        claims = claims_of(self.policy, charged)
        return CallAccounts.of(claims, await self._balances(claims))

    async def _balances(self, claims: Sequence[Claim]) -> tuple[Balance, ...]:
        return _lowered(claims, await self._store.balances([claim.undeclared for claim in claims]))

    def stale_accounts(self, charged: ChargedAccounts) -> CallAccounts:
        """Return the accounts of a call with the balances that this worker read last."""
        return self._as_last_read(claims_of(self.policy, charged))

    def without_store(self, accounts: CallAccounts) -> CallAccounts:
        """Return the same accounts with the balances that this worker read last, as the store became unavailable.

        Raises:
            StoreUnavailable: no calls are accepted without the store.
        """
        self._store.availability.check_accepts_without_store()
        return self._as_last_read(accounts.claims)

    def _as_last_read(self, claims: Sequence[Claim]) -> CallAccounts:
        known = self._store.stale.claims(claims)
        return CallAccounts.of(known, self._store.stale.balances(known), is_stale=True)

    async def totals(self, session: SessionKey) -> Totals:
        """Return the current totals of a session.

        Raises:
            StoreUnavailable: they are unknown.
        """
        return await self._store.totals(session)

    @staticmethod
    def claims_to_read(accounts: CallAccounts) -> Sequence[Claim]:
        """Return the accounts to read when the call is settled, so that its client learns what is left after it."""
        if accounts.is_stale or not accounts.budgets:
            return ()
        return [claim.undeclared for claim in accounts.claims]

    def after_call(self, accounts: CallAccounts, granted: Sequence[Balance] | None) -> CallAccounts:
        """Return the accounts after the call. `granted`: the balances of `claims_to_read`; None if they are unknown."""
        if accounts.is_stale:
            return self._as_last_read(accounts.claims)
        if not granted:
            return accounts
        self._store.stale.remember(granted)
        return CallAccounts.of(accounts.claims, _lowered(accounts.claims, granted))

    async def reserve(
        self,
        accounts: CallAccounts,
        call_id: str,
        need_of: Callable[[], CallNeed],
        orphaned: Callable[[CallNeed], CallRecord],
        *,
        is_stream: bool,
    ) -> TakenHold:
        """Reserve what a call needs. `orphaned`: makes the record to write if its worker dies.

        Without a limit, a hold only ensures that the call is charged if its worker dies, and most calls end too soon
        for that to be worth a write. `Leases` writes the hold of a call that lasts, and `deliver` writes it before a
        part of the response is sent. While the store is unavailable, the hold of a stream is counted at once, in the
        worker's own view of the accounts.

        Raises:
            BudgetExhausted, BudgetBusy, RateLimited: too little is left.
            PriceUnknown: a budget in USD is in force, and the price of the model is unknown.
            StoreUnavailable: nothing was reserved.
        """
        if not (is_stream and accounts.is_stale) and all(balance.limits.is_none for balance in accounts.balances):
            return self._unlimited(accounts, call_id, need_of, orphaned)
        need = need_of()
        if accounts.is_stale:
            # The hold cannot be extended while the response arrives.
            need = replace(need, can_grow=False)
        self._check_price(accounts, need)
        opened, lease_s = self._opened(accounts, call_id, need, orphaned), self._leases.lease_s
        if accounts.is_stale:
            outcome = self._store.stale.reserve(opened.hold)
        else:
            outcome = await self._store.reserve(opened, lease_s)
        if isinstance(outcome, Refused):
            claim = next(claim for claim in accounts.claims if claim.key == outcome.balance.key)
            raise refusal(outcome, claim, self.policy, self._wall())
        return self._granted(accounts, opened, lease_s, outcome, need)

    def _unlimited(
        self,
        accounts: CallAccounts,
        call_id: str,
        need_of: Callable[[], CallNeed],
        orphaned: Callable[[CallNeed], CallRecord],
    ) -> TakenHold:
        """Return a hold that is not written yet, see `reserve`."""
        lease = Lease(
            call_id, self._leases.lease_s, 0, pending=lambda: self._opened(accounts, call_id, need_of(), orphaned)
        )
        return TakenHold(None, 0, self._leases.open(lease), None, accounts)

    def _granted(
        self, accounts: CallAccounts, opened: OpenHold, lease_s: float, granted: Granted, need: CallNeed
    ) -> TakenHold:
        """Return the hold as the call keeps it, and keep its lease alive, or write it once the store is available."""
        hold, after = (
            opened.hold,
            CallAccounts.of(accounts.claims, granted.balances, is_stale=accounts.is_stale),
        )
        grows = need.grows and bool(after.budgets)
        lease = Lease(hold.id, lease_s, granted.units * need.choices, need.step if grows else 0, need.choices)
        lease.check_bytes = lease.least_check_bytes
        lease.opened = replace(opened, units=granted.units)
        if need.can_end and not grows and limits_output(after.budgets):
            lease.end_tokens = longest_text(lease.tokens)
        if accounts.is_stale:
            lease.pending = lambda: _as_granted(opened, granted.units)
            lease.on_taken = lambda outcome: self._store.stale.drop_hold(hold.id, outcome.balances)
        else:
            self._store.stale.update_usage(granted.balances)
        self._leases.open(lease)
        limit = limit_of_hold(hold, granted, need)
        return TakenHold(hold, granted.units, lease, limit, after)

    def _check_price(self, accounts: CallAccounts, need: CallNeed) -> None:
        if not need.is_priced and any(balance.limits.nano_usd is not None for balance in accounts.budgets):
            raise PriceUnknown(
                f'A budget in USD is in force, and the price of "{need.model}" in this service tier is unknown. Set it '
                "in gateway.yaml under models (match, provider, price: {input, output} in USD per million tokens), or "
                "call a model with a known price.",
                param="model",
            )

    def _opened(
        self, accounts: CallAccounts, call_id: str, need: CallNeed, orphaned: Callable[[CallNeed], CallRecord]
    ) -> OpenHold:
        hold = hold_for(call_id, accounts.claims, accounts.balances, need, clamp=self.policy.clamp)
        goes_on = need.completes_without_client and limits_output(accounts.budgets)
        unit_usd = need.rate.output if need.rate is not None else None
        return OpenHold(hold, orphaned(need), unit_usd=unit_usd, goes_on=goes_on)

    async def deliver(self, taken: TakenHold) -> bool:
        """Write the hold if that was postponed, before a part of the response is sent; return whether one is written.

        Raises:
            StoreUnavailable: the hold cannot be written.
        """
        return await self._leases.take(taken.lease)

    @staticmethod
    def orphaned(taken: TakenHold) -> CallRecord | None:
        """Return the record to write at once for a call without a hold, so that it is charged if its worker dies.

        None if the hold was written, or this record was made before.
        """
        pending, taken.lease.pending = taken.lease.pending, None
        return pending().as_orphaned() if pending is not None else None

    async def save_progress(self, lease: Lease, sent: int) -> None:
        """Note the bytes that were sent. See `Leases.save_progress`."""
        await self._leases.save_progress(lease, sent)

    async def check(self, lease: Lease) -> None:
        """Check the tokens that were delivered. See `Leases.check`."""
        await self._leases.check(lease)

    def close(self, taken: TakenHold, spent: Amount) -> None:
        """Release the hold of a call that was settled. `spent`: what the call did cost."""
        self._leases.close(taken.lease.id)
        # Without effect, unless only this worker knows the hold.
        self._store.stale.settle(taken.lease.id, spent)


def named_agents(agent: CallingAgent | None) -> tuple[AgentName, ...]:
    """Return the subagent that makes a call, and the one that has started it; empty for the main agent."""
    if agent is None or not agent.is_subagent:
        return ()
    own = AgentName(agent.id, agent.type)
    return (own, AgentName(agent.parent)) if agent.parent not in (None, MAIN) else (own,)


def _lowered(claims: Sequence[Claim], balances: Sequence[Balance]) -> tuple[Balance, ...]:
    """Return the balances lowered to the budget that the call declares."""
    return tuple([balance.lowered(claim.declared) for balance, claim in zip(balances, claims, strict=True)])


def _as_granted(opened: OpenHold, units: int) -> OpenHold:
    """Return the hold of a running call for all that it was granted, only within the limits of an operator.

    Its request was counted by the rate limit when it was made.
    """
    hold = opened.hold
    claims = [Claim(one.key, Limits(window=one.configured.window)) for one in hold.claims if one.key.kind != "rate"]
    return replace(opened, hold=Hold(hold.id, tuple(claims), hold.amount(units)))


async def sessions_above(
    store: Sessions, session: SessionKey, parent: str | None, read: Parents = _NOTHING_READ
) -> tuple[tuple[SessionKey, ...], SessionKey | None]:
    """Return the chain of parents, as far as it is charged, and the next parent after it; None if there is none.

    `read`: the parents of some sessions, which are not read again.
    """
    found: list[SessionKey] = []
    while parent is not None:
        key = SessionKey(session.namespace, parent)
        if key == session or key in found or len(found) == MOST_PARENTS:
            return tuple(found), key
        found.append(key)
        parent = read[key] if key in read else (await store.remembered(key)).state.parent
    return tuple(found), None
