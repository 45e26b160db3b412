"""Compare each store with the pure arithmetic: after the same operations in any order, both have the same balances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from gateway.core.calling_agent import CallingAgent
from gateway.core.ids import call_id
from gateway.core.ledger import arithmetic as ledger
from gateway.core.ledger.arithmetic import (
    EMPTY,
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Dimension,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
)
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, CallRecord
from gateway.core.session import Places, SessionState
from gateway.core.steps import StepState
from gateway.core.stored import OpenHold, StepEnding
from gateway.core.tools import ToolUse
from gateway.core.usage import Charge, Totals, Usage
from tests.stores.files import Clock, Time
from tests.support.timing import LIMIT_S

pytestmark = pytest.mark.long

T = TypeVar("T")
OpenStore = Callable[[Clock, Time], Awaitable[Store]]

#: Jumps of the clock are tens of seconds, and no lease or window ends on one: a server's clock goes on by itself.
LEASE_S = 25.0
JUMPS_S = st.sampled_from([10.0, 20.0, 30.0, 60.0])
SESSIONS = [SessionKey("alice", "s"), SessionKey("alice", "t"), SessionKey("bob", "s")]
KEY = AccountKey("key", "alice")
RATE = AccountKey("rate", "alice")
AGENTS = [CallingAgent("a", None, "T"), CallingAgent("b", "a")]
CLAIMS = [
    *(Claim(AccountKey("agent", one.namespace, f"{one.id}/a"), Limits(40)) for one in SESSIONS),
    *(Claim(one.account, Limits(60, 80)) for one in SESSIONS),
    *(Claim(one.account, Limits(60, 80), closing_share=0.25) for one in SESSIONS),
    Claim(KEY, Limits(100, 100, 9, window=95.0)),
    Claim(RATE, Limits(calls=4, window=45.0)),
]
DECIDED: st.SearchStrategy[Mapping[Dimension, int | None] | None] = st.none() | st.dictionaries(
    st.sampled_from(ledger.DIMENSIONS), st.none() | st.integers(0, 200)
)
small = st.integers(0, 12)
TOOLS = st.lists(st.sampled_from(["search", "read", "write"]), max_size=3).map(tuple)
spendings = st.builds(Amount, st.integers(0, 40), st.integers(0, 40), st.just(1))


@dataclass
class Leased:
    """A hold in the reference."""

    opened: OpenHold
    renewed: Moment


@dataclass
class Reference:
    """What a store has to keep, in dicts; every sum is the ledger's."""

    accounts: dict[AccountKey, Account] = field(default_factory=dict)
    holds: dict[str, Leased] = field(default_factory=dict)
    settled: dict[str, CallRecord] = field(default_factory=dict)
    totals: dict[SessionKey, Totals] = field(default_factory=dict)
    #: of the subagents of each session, by their ids
    agents: dict[SessionKey, dict[str, Totals]] = field(default_factory=dict)
    tools: dict[SessionKey, ToolUse] = field(default_factory=dict)
    #: how often the end of a call, or anybody else, has moved a session's state
    steps: dict[SessionKey, int] = field(default_factory=dict)
    resets: dict[SessionKey, int] = field(default_factory=dict)
    #: of orphaned calls: resets of their session, and budget periods of their accounts, when they were charged
    assumed: dict[str, tuple[int, ledger.Periods]] = field(default_factory=dict)
    #: of each session: the costs of calls whose own records came after its last reset
    spent: dict[AccountKey, Amount] = field(default_factory=dict)

    def balances(self, claims: Sequence[Claim], now: Moment) -> tuple[Balance, ...]:
        return tuple(ledger.balance_of(self.accounts.get(one.key, EMPTY), one, now) for one in claims)

    def reserve(self, opened: OpenHold, now: Moment) -> Granted | Refused:
        hold = opened.hold
        if hold.id in self.holds:
            return Granted(self.holds[hold.id].opened.units, self.balances(hold.claims, now))
        if hold.id in self.settled:
            return Granted(hold.least, self.balances(hold.claims, now))
        outcome = ledger.reserve(self.accounts, hold, now)
        if isinstance(outcome, Refused):
            return outcome
        granted, changes = outcome
        self.accounts |= changes
        self.holds[hold.id] = Leased(replace(opened, units=granted.units), now)
        return granted

    def extend(self, hold_id: str, units: int, now: Moment) -> Granted | None:
        leased = self.holds.get(hold_id)
        if leased is None:
            return None
        granted, changes = ledger.extend(self.accounts, leased.opened.hold, units, now)
        self.accounts |= changes
        leased.opened = replace(leased.opened, units=leased.opened.units + granted.units)
        return granted

    def renew(self, noted: Mapping[str, int], now: Moment) -> frozenset[str]:
        for hold_id, tokens in noted.items():
            if hold_id in self.holds:
                opened = self.holds[hold_id].opened
                self.holds[hold_id] = Leased(replace(opened, noted=max(tokens, opened.noted)), now)
        return frozenset(noted.keys() - self.holds.keys())

    def overdue(self, now: Moment) -> dict[str, OpenHold]:
        over = (one.opened for one in self.holds.values() if ledger.is_lease_over(one.renewed, LEASE_S, now))
        return {one.hold.id: one for one in over}

    def settle(self, record: CallRecord, *, steps: bool = False) -> Totals:
        known = self.settled.get(record.call_id)
        totals = self.totals.get(record.session, Totals()) if record.session else Totals()
        if known is not None and not _replaces(record, known):
            return totals
        if steps and record.session is not None:
            self.steps[record.session] = self.steps.get(record.session, 0) + 1
        self.settled[record.call_id] = record
        leased = self.holds.pop(record.call_id, None)
        if leased is not None:
            hold = leased.opened.hold
            keys = [claim.key for claim in hold.claims]
            self.accounts |= ledger.settle(self.accounts, keys, hold.amount(leased.opened.units), NOTHING)
        wrong = known.spent if known is not None else NOTHING
        resets, trim_decisions = self.assumed.pop(record.call_id, (0, {}))
        ended = record.call_id
        self.accounts |= ledger.correct(self.accounts, record.accounts, wrong, record.spent, trim_decisions, ended)
        now = self.resets.get(record.session, 0) if record.session else 0
        if record.outcome == ORPHANED:
            self.assumed[record.call_id] = now, ledger.periods(self.accounts, record.accounts)
        else:
            self.spent |= {key: self.spent.get(key, NOTHING).plus(record.spent) for key in record.accounts}
        if record.session is None:
            return Totals()
        if known is not None and known.charge is not None and resets == now:
            totals = totals.without(known.charge)
        if record.charge is not None:
            totals = totals.add(record.charge)
            if record.outcome != ORPHANED:
                self.tools[record.session] = self.tools.get(record.session, ToolUse()).with_calls(record.tools)
        self.totals[record.session] = totals
        if record.agent is not None:
            agents = self.agents.setdefault(record.session, {})
            own = agents.get(record.agent.id, Totals())
            if known is not None and known.charge is not None and resets == now:
                own = own.without(known.charge)
            agents[record.agent.id] = own.add(record.charge) if record.charge is not None else own
        return totals

    def accounts_of(self, session: SessionKey) -> list[AccountKey]:
        """The accounts of a session and of its subagents, as far as there are any."""
        return [key for key in self.accounts if key.kind in ("session", "agent") and _session_of(key) == session]

    def reset(self, session: SessionKey) -> None:
        for key in self.accounts_of(session):
            self.accounts[key] = ledger.with_new_period(self.accounts[key])
        self.agents.pop(session, None)
        self.totals[session] = Totals()
        self.tools.pop(session, None)
        self.resets[session] = self.resets.get(session, 0) + 1
        self.spent.pop(session.account, None)

    def delete(self, session: SessionKey) -> None:
        for key in self.accounts_of(session):
            self.accounts[key] = ledger.after_deletion(self.accounts[key])
        self.agents.pop(session, None)
        self.totals.pop(session, None)
        self.tools.pop(session, None)
        self.steps.pop(session, None)
        for name, (_, trim_decisions) in self.assumed.items():
            if self.settled[name].session == session:
                self.assumed[name] = -1, trim_decisions  # nothing is to be taken from its new totals
        self.spent.pop(session.account, None)


def _session_of(key: AccountKey) -> SessionKey:
    return SessionKey(key.namespace, key.session_id)


def _replaces(record: CallRecord, known: CallRecord) -> bool:
    return known.outcome == ORPHANED and (record.outcome != ORPHANED or record.spent.tokens > known.spent.tokens)


def alike(said: object, expected: object) -> bool:
    """The same balances, except for the time that has passed on a server's clock."""
    if isinstance(said, tuple) and isinstance(expected, tuple) and not isinstance(said, Amount):
        return len(said) == len(expected) and all(map(alike, said, expected))
    if isinstance(said, Balance) and isinstance(expected, Balance):
        near = said.resets_s == expected.resets_s or abs((said.resets_s or 0) - (expected.resets_s or 0)) < 4
        return near and replace(said, resets_s=None) == replace(expected, resets_s=None)
    if isinstance(said, Granted) and isinstance(expected, Granted):
        return said.units == expected.units and alike(said.balances, expected.balances)
    if isinstance(said, Refused) and isinstance(expected, Refused):
        rest = (said.dimension, said.needed, said.is_busy) == (expected.dimension, expected.needed, expected.is_busy)
        return rest and alike(said.balance, expected.balance)
    return said == expected


class LedgerMachine(RuleBasedStateMachine):
    """Calls of three sessions and two client keys, in any order, and everything that may befall them."""

    def __init__(self, open_store: OpenStore, *, own_clock: bool) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.moments = Time()
        self.own_clock = own_clock
        self.reference = Reference()
        self.calls: list[OpenHold] = []
        self.store = self.run(_made(open_store, self.moments))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, LIMIT_S))

    def teardown(self) -> None:
        self.run(_all(self.store.aclose()))
        self.runner.close()

    def call(self, number: int) -> OpenHold:
        """One of the calls made so far; mostly one of the last."""
        return self.calls[-1 - number % len(self.calls)]

    @rule(
        session=st.sampled_from([*SESSIONS, None]),
        parent=st.sampled_from([*SESSIONS, None]),
        fixed=st.builds(Amount, small, small, st.just(1)),
        unit=st.builds(Amount, st.integers(0, 3), st.integers(0, 3), st.just(0)),
        units=st.tuples(small, small),
        declared=st.none() | st.integers(0, 80),
        keys=st.sampled_from([(), (KEY,), (KEY, RATE), (RATE,)]),
        agent=st.sampled_from([None, *AGENTS]),
        is_closing=st.booleans(),
    )
    def reserve(
        self,
        *,
        session: SessionKey | None,
        parent: SessionKey | None,
        fixed: Amount,
        unit: Amount,
        units: tuple[int, int],
        declared: int | None,
        keys: tuple[AccountKey, ...],
        agent: CallingAgent | None = None,
        is_closing: bool = False,
    ) -> None:
        own = session.account if session is not None else None
        accounts = tuple(dict.fromkeys([*(one.account for one in (session, parent) if one), *keys]))
        if session is not None and agent is not None:
            # A subagent's calls are charged to its parent as well.
            accounts = (*accounts, AccountKey("agent", session.namespace, f"{session.id}/a"))
        claims = tuple(
            replace(one, declared=Limits(declared), is_closing=is_closing and key == own)
            if one.key.kind == "session"
            else one
            for key in accounts
            for one in CLAIMS
            if one.key == key
        )
        name = call_id(1_000_000, len(self.calls).to_bytes(10, "big"))
        hold = Hold(name, claims, fixed, unit, units[0], sum(units))
        charge = Charge(Usage.of(3, 0), "estimated", Decimal("0.001"))
        record = replace(_record(name, session, charge, accounts, fixed), agent=agent)
        opened = OpenHold(hold, record, unit_usd=Decimal("0.000000001"))
        self.calls.append(opened)
        self.offer(opened)

    def offer(self, opened: OpenHold) -> None:
        expected = self.reference.reserve(opened, self.moments())
        said = self.run(_all(self.store.reserve(opened, LEASE_S)))
        assert alike(said, expected), (said, expected)

    @precondition(lambda self: self.calls)
    @rule(number=small)
    def reserve_again(self, number: int) -> None:
        self.offer(self.call(number))

    @precondition(lambda self: self.calls)
    @rule(number=small, units=small)
    def extend(self, number: int, units: int) -> None:
        name = self.call(number).hold.id
        expected = self.reference.extend(name, units, self.moments())
        said = self.run(_all(self.store.extend(name, units)))
        assert alike(said, expected), (said, expected)

    @precondition(lambda self: self.calls)
    @rule(numbers=st.dictionaries(small, small, max_size=4))
    def renew(self, numbers: dict[int, int]) -> None:
        noted = {self.call(number).hold.id: tokens for number, tokens in numbers.items()}
        gone = self.reference.renew(noted, self.moments())
        assert self.run(_all(self.store.renew(noted))) == gone

    @precondition(lambda self: self.calls)
    @rule(number=small, spent=spendings, charged=st.booleans(), tools=TOOLS, steps=st.booleans())
    def settle(
        self, number: int, spent: Amount, charged: bool, tools: tuple[str, ...] = (), *, steps: bool = False
    ) -> None:
        self.offer_record(replace(self.settled(number, spent, charged), tools=tools), steps=steps)

    @precondition(lambda self: self.calls)
    @rule(number=small, noted=small)
    def settle_as_lost(self, number: int, noted: int) -> None:
        self.offer_record(replace(self.call(number), noted=noted).as_orphaned())

    @precondition(lambda self: self.calls)
    @rule(numbers=st.lists(small, min_size=2, max_size=4), spent=spendings, tools=TOOLS, steps=st.booleans())
    def settle_at_once(self, numbers: list[int], spent: Amount, tools: tuple[str, ...], steps: bool) -> None:
        records = [replace(self.settled(number, spent, True), tools=tools) for number in numbers]
        for one in records:
            self.reference.settle(one, steps=steps)
        self.run(_all(*(self.store.settle(one, _ending(one) if steps else None) for one in records)))

    @rule(session=st.sampled_from(SESSIONS))
    def update(self, session: SessionKey) -> None:
        """Another call, on any worker, makes a step."""
        self.reference.steps[session] = self.reference.steps.get(session, 0) + 1
        self.run(_all(self.store.update(session, _stepped)))

    def settled(self, number: int, spent: Amount, charged: bool) -> CallRecord:
        charge = Charge(Usage.of(spent.tokens, 1), "provider", Decimal("0.25")) if charged else None
        return replace(self.call(number).orphaned, outcome="ok", charge=charge, spent=spent if charged else NOTHING)

    def offer_record(self, record: CallRecord, *, steps: bool = False) -> None:
        expected = self.reference.settle(record, steps=steps)
        said = self.run(_all(self.store.settle(record, _ending(record) if steps else None)))
        assert said == expected

    @rule(
        session=st.sampled_from(SESSIONS),
        parent=st.sampled_from([*SESSIONS, None]),
        spent=spendings,
        between=st.sampled_from(["reset", "delete", "time"]),
    )
    def settle_late(self, session: SessionKey, parent: SessionKey | None, spent: Amount, between: str) -> None:
        """A call is orphaned, its accounts are reset, another call uses them; then the call's own record comes."""
        for _ in range(2):
            self.reserve(
                session=session,
                parent=parent,
                fixed=Amount(5, 5, 1),
                unit=NOTHING,
                units=(0, 0),
                declared=None,
                keys=(KEY,),
            )
        self.settle_as_lost(0, 2)
        for one in {session, parent} - {None}:
            {"reset": self.reset, "delete": self.delete, "time": lambda _: self.time_passes(60.0)}[between](one)
        self.settle(1, spent, True)
        self.settle(0, Amount(1, 1, 1), True)

    @rule()
    def sweep(self) -> None:
        expected = self.reference.overdue(self.moments())
        said = self.run(_all(self.store.overdue_holds(1_000)))
        assert {one.hold.id: one for one in said} == expected
        for one in said:
            self.offer_record(one.as_orphaned())

    @rule(seconds=JUMPS_S)
    def time_passes(self, seconds: float) -> None:
        self.moments.go_on(seconds)

    @precondition(lambda self: self.own_clock)
    @rule(seconds=st.sampled_from([-(10.0**9), -100.0, 100.0, 10.0**9]))
    def the_clock_is_set(self, seconds: float) -> None:
        self.moments.wall += seconds

    @precondition(lambda self: self.own_clock)
    @rule(mono=st.sampled_from([1.0, 10.0**6]))
    def the_machine_starts_anew(self, mono: float) -> None:
        self.moments.boot += "+"
        self.moments.mono = mono

    @rule(claim=st.sampled_from(CLAIMS[:-1]), limits=DECIDED)
    def decide(self, claim: Claim, limits: Mapping[Dimension, int | None] | None) -> None:
        account = self.reference.accounts.get(claim.key, EMPTY)
        decided = {**account.overrides, **limits} if limits is not None else {}
        self.reference.accounts[claim.key] = replace(account, overrides=decided)
        self.run(_all(self.store.override_limits(claim.key, limits)))

    @rule(session=st.sampled_from(SESSIONS))
    def reset(self, session: SessionKey) -> None:
        self.reference.reset(session)
        self.run(_all(self.store.reset(session)))

    @rule(session=st.sampled_from(SESSIONS))
    def delete(self, session: SessionKey) -> None:
        self.reference.delete(session)
        self.run(_all(self.store.delete(session)))

    def held(self, key: AccountKey) -> Amount:
        """By all open holds on an account."""
        holds = (one.opened for one in self.reference.holds.values())
        amounts = [one.hold.amount(one.units) for one in holds if key in [claim.key for claim in one.hold.claims]]
        return Amount(*map(sum, zip(NOTHING, *amounts, strict=True)))

    @invariant()
    def both_say_the_same(self) -> None:
        expected = self.reference.balances(CLAIMS, self.moments())
        said = self.run(_all(self.store.balances(CLAIMS)))
        assert alike(said, expected), (said, expected)
        for balance in said:
            key = balance.key
            if key.kind != "rate":
                assert balance.held == self.held(key), "neither more nor less than the open holds"
            if key.kind == "session":
                assert _covers(balance.used, self.reference.spent.get(key, NOTHING)), "nobody else's was taken back"
        for session in SESSIONS:
            totals = self.run(_all(self.store.totals(session)))
            assert totals == self.reference.totals.get(session, Totals())
            agents = {one.id: one.totals for one in self.run(_all(self.store.agents(session)))}
            assert agents == self.reference.agents.get(session, {})
            opening = self.run(_all(self.store.open_call(session, CLAIMS, with_totals=True)))
            assert opening.totals == totals
            assert alike(opening.balances, self.reference.balances(CLAIMS, self.moments()))
            view = self.run(_all(self.store.session(session)))
            assert (view.tools if view else ToolUse()) == self.reference.tools.get(session, ToolUse())
            assert _steps(opening.remembered.state) == self.reference.steps.get(session, 0)


def _steps(state: SessionState) -> int:
    return state.steps["a"].index if state.steps else 0


def _stepped(state: SessionState) -> SessionState:
    return state.with_step("a", StepState("s", _steps(state) + 1))


def _ending(record: CallRecord) -> StepEnding:
    def end(places: Places) -> tuple[Places, CallRecord]:
        before = SessionState(steps=places)
        return _stepped(before).steps, replace(record, notes={"steps": str(_steps(before))})

    return end


def _covers(amount: Amount, part: Amount) -> bool:
    return all(one >= other for one, other in zip(amount, part, strict=True))


async def _made(open_store: OpenStore, moments: Time) -> Store:
    return await open_store(Clock(), moments)


async def _all(*works: Awaitable[Any]) -> Any:
    """The result of one, or those of several at once."""
    return await works[0] if len(works) == 1 else await asyncio.gather(*works)


def _record(
    name: str, session: SessionKey | None, charge: Charge, accounts: tuple[AccountKey, ...], spent: Amount
) -> CallRecord:
    return CallRecord(
        name, name, session, False, 1_000.0, "chat", "chat", "openai", "m", None, True, 0, ORPHANED, None,
        None, (), charge, 0.0, None, 0.0, 0, 0, accounts=accounts, spent=spent,
    )  # fmt: skip


def run_machine(open_store: OpenStore, *, examples: int, own_clock: bool) -> None:
    class Machine(LedgerMachine):
        def __init__(self) -> None:
            super().__init__(open_store, own_clock=own_clock)

    checks = list(HealthCheck)
    # Not made smaller: against a server that takes minutes. A failing run can be repeated by its seed.
    phases = (Phase.explicit, Phase.generate)
    bounded = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=checks, phases=phases
    )
    run_state_machine_as_test(Machine, settings=bounded)


def test_a_store_of_this_machine_and_the_pure_arithmetic_say_the_same(open_embedded: OpenStore) -> None:
    run_machine(open_embedded, examples=60, own_clock=True)


def test_a_redis_and_the_pure_arithmetic_say_the_same(open_redis: OpenStore) -> None:
    run_machine(open_redis, examples=40, own_clock=False)
