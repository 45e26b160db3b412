"""What every store must do with accounts and holds, whatever it is made of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, TypeVar

import pytest

from gateway.core.counting.calibration import LastTurn
from gateway.core.ledger.arithmetic import (
    MOST,
    NO_LIMITS,
    NOTHING,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    Limits,
    Refused,
)
from gateway.core.ledger.charging import ALL_KEYS
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.windows import CalendarWindow
from gateway.core.ports import Store
from gateway.core.record import ORPHANED, PENDING, CallRecord, ContextRecord
from gateway.core.session import Remembered, SessionState
from gateway.core.stored import CallEnd, CallStart, OpenHold
from gateway.core.usage import Charge, Totals, Usage
from tests.stores.conftest import OpenStore
from tests.stores.files import Clock, Time
from tests.support.timing import LIMIT_S

T = TypeVar("T")
MakeRecord = Callable[..., CallRecord]

SESSION = SessionKey("alice", "s")
S = SESSION.account
PARENT = AccountKey("session", "alice", "parent")
KEY = AccountKey("key", "alice")
RATE = AccountKey("rate", "alice")
LEASE_S = 30.0
TEN = Amount(10)


async def soon(work: Awaitable[T]) -> T:
    """A store that never answers fails the test instead of stopping it."""
    return await asyncio.wait_for(work, LIMIT_S)


def claim(key: AccountKey = S, tokens: int | None = None, *, declared: Limits = NO_LIMITS, **limits: Any) -> Claim:
    return Claim(key, Limits(tokens, **limits), declared)


Make = Callable[..., OpenHold]


@pytest.fixture
def hold(record: MakeRecord) -> Make:
    """Make a hold, of 10 tokens and no unit by default; its id is that of the record that settles it."""

    def make(*claims: Claim, fixed: Amount = TEN, session: str | None = "s", **fields: Any) -> OpenHold:
        keys = tuple(one.key for one in claims)
        orphaned = record(
            session, outcome=ORPHANED, accounts=keys, spent=fixed, charge=Charge(Usage.of(7, 0), "estimated")
        )
        named = {name: fields.pop(name) for name in ("unit", "least", "most", "id") if name in fields}
        return OpenHold(Hold(named.pop("id", orphaned.call_id), claims, fixed, **named), orphaned, **fields)

    return make


def spends(opened: OpenHold, spent: Amount, **fields: Any) -> CallRecord:
    """The record that settles a hold."""
    tokens = Charge(Usage.of(spent.tokens, 0), "provider", Decimal(0))
    changed = {"outcome": "ok", "charge": tokens, "spent": spent, **fields}
    return replace(opened.orphaned, **changed)


async def balance_of(store: Store, of: Claim | AccountKey = S) -> Balance:
    [found] = await soon(store.balances([of if isinstance(of, Claim) else Claim(of)]))
    return found


async def used_and_held(store: Store, of: Claim | AccountKey = S) -> tuple[Amount, Amount]:
    found = await balance_of(store, of)
    return found.used, found.held


async def take(store: Store, opened: OpenHold, lease_s: float = LEASE_S) -> Granted | Refused:
    return await soon(store.reserve(opened, lease_s))


async def granted(store: Store, opened: OpenHold, lease_s: float = LEASE_S) -> int:
    """Units of a hold that is granted."""
    outcome = await take(store, opened, lease_s)
    assert isinstance(outcome, Granted), outcome
    return outcome.units


async def refused(store: Store, opened: OpenHold) -> Refused:
    outcome = await take(store, opened)
    assert isinstance(outcome, Refused), outcome
    return outcome


async def overdue(store: Store, limit: int = 100) -> list[str]:
    return sorted(one.hold.id for one in await soon(store.overdue_holds(limit)))


# --- reserving ----------------------------------------------------------------------------------------------------------


async def test_unused_account_has_nothing_used_and_its_limits(store: Store) -> None:
    limits = Limits(100, 200, 3)
    found = await soon(store.balances([Claim(S, limits), Claim(KEY), Claim(RATE, Limits(calls=5, window=60))]))
    assert found[0] == Balance(S, limits, NOTHING, NOTHING)
    assert found[1] == Balance(KEY, NO_LIMITS, NOTHING, NOTHING)
    assert found[2] == Balance(RATE, Limits(calls=5, window=60), NOTHING, NOTHING, 60)
    assert await soon(store.balances([])) == ()


@pytest.mark.parametrize("with_totals", [False, True])
async def test_what_a_call_begins_with_is_what_three_looks_give(
    store: Store, hold: Make, moments: Time, with_totals: bool
) -> None:
    claims = [Claim(RATE, Limits(calls=5, window=600)), claim(KEY, 1_000), claim(PARENT), claim(S, 100)]
    nothing = await soon(store.open_call(SESSION, claims, with_totals=with_totals))
    assert nothing == CallStart(Remembered(), await soon(store.balances(claims)), Totals() if with_totals else None), (
        "an unknown session"
    )
    await store.update(SESSION, lambda state: state.with_parent("parent"))
    await granted(store, hold(*claims, fixed=Amount(10, 20, 1)))
    context = ContextRecord(6, 9, "exact", None, 6, 0, "k", 5)
    await soon(store.settle(spends(hold(*claims), Amount(7, 3, 1), context=context)))
    await store.override_limits(S, {"tokens": 50})
    await store.override_limits(PARENT, {"calls": 2})
    for asked in (claims, claims[:1], claims[-1:], []):
        found = await soon(store.open_call(SESSION, asked, with_totals=with_totals))
        balance = await soon(store.balances(asked))
        assert found.remembered == await store.remembered(SESSION)
        assert found.remembered == Remembered(SessionState(parent="parent"), LastTurn("k", 2))
        assert found.totals == (await store.totals(SESSION) if with_totals else None)
        assert [replace(one, resets_s=None) for one in found.balances] == [
            replace(one, resets_s=None) for one in balance
        ]
        assert [one.resets_s is None for one in found.balances] == [one.resets_s is None for one in balance]
    found = await soon(store.open_call(SESSION, claims, with_totals=with_totals))
    assert found.balances[0].resets_s == pytest.approx(600, abs=5)
    assert [one.used for one in found.balances[1:]] == [Amount(7, 3, 1)] * 3
    assert [one.held for one in found.balances[1:]] == [Amount(10, 20, 1)] * 3
    assert found.balances[-1].limits.tokens == 50
    others = [SESSION, SessionKey("alice", "parent"), SessionKey("bob", "s")]
    assert found.parents == ()
    assert (await soon(store.open_call(SESSION, [], with_totals=with_totals, above=others))).parents == (
        "parent",
        None,
        None,
    )


async def test_what_a_call_begins_with_is_of_its_own_session_and_client_key(store: Store, hold: Make) -> None:
    await soon(store.settle(spends(hold(claim(S)), Amount(7))))
    for other in (SessionKey("alice", "t"), SessionKey("bob", "s")):
        found = await soon(store.open_call(other, [claim(other.account, 9)], with_totals=True))
        assert found == CallStart(Remembered(), (Balance(other.account, Limits(9), NOTHING, NOTHING),), Totals())


async def test_a_hold_is_on_every_account_of_a_call_and_the_answer_says_how_they_stand(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 1_000), fixed=Amount(10, 20, 1))
    outcome = await take(store, opened)
    assert isinstance(outcome, Granted)
    assert [one.key for one in outcome.balances] == [S, KEY]
    assert [one.held for one in outcome.balances] == [Amount(10, 20, 1)] * 2
    assert [one.limits.tokens for one in outcome.balances] == [100, 1_000]
    assert await used_and_held(store, S) == (NOTHING, Amount(10, 20, 1))
    assert await used_and_held(store, KEY) == (NOTHING, Amount(10, 20, 1))


@pytest.mark.parametrize("dimension", ["tokens", "nano_usd", "calls"])
async def test_a_hold_is_granted_up_to_the_limit_and_not_one_further(store: Store, hold: Make, dimension: str) -> None:
    limits = Limits(**{dimension: 20})
    for _ in range(2):
        await granted(store, hold(Claim(S, limits), fixed=Amount(10, 10, 10)))
    outcome = await refused(store, hold(Claim(S, limits), fixed=Amount(1, 1, 1)))
    assert (outcome.dimension, outcome.needed, outcome.balance.left(outcome.dimension)) == (dimension, 1, 0)
    assert await used_and_held(store) == (NOTHING, Amount(20, 20, 20))


async def test_a_hold_of_nothing_in_the_limited_dimension_is_granted(store: Store, hold: Make) -> None:
    await granted(store, hold(claim(S, 0), fixed=Amount(0, 5, 1)))
    assert (await balance_of(store)).held == Amount(0, 5, 1)


async def test_a_hold_of_nothing_is_granted_where_more_than_the_limit_is_used(store: Store, hold: Make) -> None:
    """A call that costs nothing may go on where the money is spent."""
    first = hold(claim(S), fixed=Amount(0, 5, 1))
    await granted(store, first)
    await soon(store.settle(spends(first, Amount(0, 8, 1))))
    broke = claim(S, nano_usd=7)
    await granted(store, hold(broke, fixed=Amount(5, 0, 1)))
    assert (await refused(store, hold(broke, fixed=Amount(5, 1, 1)))).dimension == "nano_usd"


async def test_what_calls_under_way_hold_is_busy_and_what_was_spent_is_exhausted(store: Store, hold: Make) -> None:
    first = hold(claim(S, 20), fixed=Amount(15))
    await granted(store, first)
    assert (await refused(store, hold(claim(S, 20)))).is_busy
    await soon(store.settle(spends(first, Amount(11))))
    outcome = await refused(store, hold(claim(S, 20)))
    assert not outcome.is_busy
    assert outcome.balance == Balance(S, Limits(20), Amount(11), NOTHING)


async def test_call_that_fits_only_without_other_holds_is_busy(store: Store, hold: Make) -> None:
    spent = hold(claim(S), fixed=Amount(10, 10, 10))
    await granted(store, spent)
    await soon(store.settle(spends(spent, Amount(10, 10, 10))))
    await granted(store, hold(claim(S), fixed=Amount(1, 1, 1)))
    for name in Amount._fields:
        for limit, is_busy in ((20, True), (19, False)):
            one = Claim(S, Limits(**{name: limit}))
            outcome = await refused(store, hold(one, fixed=Amount(10, 10, 10)))
            assert (outcome.dimension, outcome.is_busy) == (name, is_busy)


async def test_keys_of_a_group_are_refused_by_what_they_spend_together(store: Store, hold: Make) -> None:
    every_key = claim(ALL_KEYS, 100)
    group, other = claim(AccountKey("group", "research"), 50), claim(AccountKey("group", "sales"), 90)
    first = hold(every_key, group, claim(KEY, 40), fixed=Amount(30))
    await granted(store, first)
    busy = await refused(store, hold(every_key, group, claim(AccountKey("key", "bob"), 40), fixed=Amount(30)))
    assert (busy.balance.key, busy.is_busy) == (group.key, True)
    await store.settle(spends(first, Amount(45)))
    spent = await refused(store, hold(every_key, group, claim(AccountKey("key", "bob"), 40), fixed=Amount(30)))
    assert (spent.balance.key, spent.is_busy, spent.balance.used.tokens) == (group.key, False, 45)
    await store.expire(10.0**9)
    whole = await refused(store, hold(every_key, other, claim(AccountKey("key", "eve"), 90), fixed=Amount(60)))
    assert (whole.balance.key, whole.balance.used.tokens) == (ALL_KEYS, 45)
    await granted(store, hold(every_key, other, claim(AccountKey("key", "eve"), 90), fixed=Amount(55)))


async def test_a_refusal_takes_nothing_on_any_account(store: Store, hold: Make) -> None:
    claims = [claim(S, 100), claim(KEY, 5), claim(RATE, calls=1, window=60)]
    for order in (claims, claims[::-1], [claims[1], claims[2], claims[0]]):
        outcome = await refused(store, hold(*order))
        assert outcome.balance.key == KEY
    for one in claims:
        assert await used_and_held(store, one) == (NOTHING, NOTHING)
    assert await overdue(store) == []
    assert await soon(store.extend("nobody", 5)) is None


async def test_the_first_account_of_a_call_that_refuses_is_named(store: Store, hold: Make) -> None:
    assert (await refused(store, hold(claim(S, 100), claim(KEY, 1), claim(PARENT, 1)))).balance.key == KEY


async def test_what_will_not_come_back_is_named_before_what_may(store: Store, hold: Make) -> None:
    """A client that is asked to retry must be able to succeed."""
    await granted(store, hold(claim(KEY, 100), fixed=Amount(90)))
    spent = hold(claim(S))
    await granted(store, spent)
    await soon(store.settle(spends(spent, Amount(50, 0, 1))))
    rate = claim(RATE, calls=0, window=60)
    for ahead in ([claim(KEY, 100)], [claim(KEY, 20)], [rate], [rate, claim(KEY, 100), claim(PARENT, 100)]):
        for within in ({"calls": 1}, {"tokens": 55}):
            outcome = await refused(store, hold(*ahead, Claim(S, Limits(**within)), fixed=Amount(20, 0, 1)))
            assert (outcome.balance.key, outcome.is_busy) == (S, False)
        outcome = await refused(store, hold(*ahead, claim(S, 100), fixed=Amount(20, 0, 1)))
        assert outcome.balance.key == ahead[0].key
    held = hold(claim(S))
    await granted(store, held)
    outcome = await refused(store, hold(Claim(S, Limits(65, calls=1)), fixed=Amount(10, 0, 1)))
    assert (outcome.dimension, outcome.is_busy) == ("calls", False), "of one account as well"


async def test_units_are_as_many_as_the_narrowest_account_and_dimension_have_left(store: Store, hold: Make) -> None:
    restrict = [claim(S, 1_000), claim(PARENT, 500, nano_usd=10_000), claim(KEY, nano_usd=2_099)]
    opened = hold(*restrict, fixed=Amount(10, 100, 1), unit=Amount(1, 10), least=1, most=10_000)
    assert await granted(store, opened) == 199
    for one in restrict:
        assert await used_and_held(store, one) == (NOTHING, Amount(209, 2_090, 1))


@pytest.mark.parametrize("dimension", Amount._fields)
async def test_units_are_as_many_as_what_was_used_leaves(store: Store, hold: Make, dimension: str) -> None:
    spent = hold(claim(S), fixed=Amount(5, 5, 5))
    await granted(store, spent)
    await soon(store.settle(spends(spent, Amount(5, 5, 5))))
    limited = Claim(S, Limits(**{dimension: 20}))
    assert await granted(store, hold(limited, fixed=Amount(3, 3, 3), unit=Amount(1, 1, 1), most=100)) == 12


async def test_units_are_no_more_than_asked_and_a_call_that_cannot_have_the_least_is_refused(
    store: Store, hold: Make
) -> None:
    assert await granted(store, hold(claim(S, 100), unit=Amount(1), least=5, most=20)) == 20
    assert await granted(store, hold(claim(S, 100), unit=Amount(2), least=5, most=20)) == 20
    outcome = await refused(store, hold(claim(S, 100), unit=Amount(2), least=6, most=20))
    assert (outcome.needed, outcome.balance.left("tokens"), outcome.is_busy) == (22, 20, True)
    assert await granted(store, hold(claim(S, 100), unit=Amount(2), least=5, most=20)) == 5


async def test_where_nothing_is_limited_all_that_is_asked_is_held(store: Store, hold: Make) -> None:
    assert await granted(store, hold(claim(S), unit=Amount(3, 7), most=10**9)) == 10**9
    assert (await balance_of(store)).held == Amount(10 + 3 * 10**9, 7 * 10**9)


async def test_the_same_hold_again_is_one_hold(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100), unit=Amount(1), most=50)
    first, second = await take(store, opened), await take(store, opened)
    assert first == second
    assert isinstance(first, Granted)
    assert first.units == 50
    assert (await balance_of(store)).held == Amount(60)


async def test_a_hold_that_comes_after_its_call_was_settled_takes_nothing(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100), claim(RATE, calls=9, window=60), least=3, most=5, unit=Amount(1))
    await soon(store.settle(spends(opened, Amount(4))))
    await take(store, opened)
    assert await used_and_held(store, S) == (Amount(4), NOTHING)
    assert await used_and_held(store, KEY) == (Amount(4), NOTHING)
    assert await used_and_held(store, claim(RATE, calls=9, window=60)) == (NOTHING, NOTHING)
    assert await soon(store.extend(opened.hold.id, 5)) is None


@pytest.mark.parametrize("charge", [Charge(Usage.of(1, 1), "provider"), None], ids=["charged", "not charged"])
async def test_a_hold_that_comes_after_its_call_was_taken_for_lost_takes_nothing(
    store: Store, hold: Make, charge: Charge | None
) -> None:
    opened = hold(claim(S, 100))
    await soon(store.settle(replace(opened.as_orphaned(), charge=charge)))
    await take(store, opened)
    assert await used_and_held(store) == (Amount(10), NOTHING)


async def test_accounts_of_one_name_and_another_kind_or_spelling_are_others(store: Store, hold: Make) -> None:
    await granted(store, hold(claim(S, 10), session=None))
    others = [
        AccountKey("session", "alice", "S"),
        AccountKey("session", "", "alice/s"),
        AccountKey("session", "alice/s", ""),
        AccountKey("key", "alice", ""),
        AccountKey("key", "alice/s", ""),
        AccountKey("rate", "alice", ""),
        AccountKey("key", "alice", "s"),
        AccountKey("group", "alice"),
        AccountKey("all", "alice"),
        AccountKey("session", "alice", "s:a"),
        AccountKey("session", "alice}", "{s"),
    ]
    for other in others:
        assert await used_and_held(store, other) == (NOTHING, NOTHING)
    await granted(store, hold(*(claim(other, 10) for other in others if other.kind != "rate"), session=None))
    assert await used_and_held(store, S) == (NOTHING, Amount(10))


async def test_the_largest_amounts_are_counted_exactly(store: Store, hold: Make) -> None:
    opened = hold(claim(S, MOST), fixed=Amount(MOST - 10, MOST - 1), unit=Amount(3), most=9)
    assert await granted(store, opened) == 3
    assert (await balance_of(store)).held == Amount(MOST - 1, MOST - 1)
    assert await granted(store, hold(claim(S, MOST), fixed=Amount(1))) == 0
    await refused(store, hold(claim(S, MOST), fixed=Amount(1)))
    await soon(store.settle(spends(opened, Amount(MOST - 1, MOST - 1))))
    assert await used_and_held(store) == (Amount(MOST - 1, MOST - 1), Amount(1))


async def test_units_are_divided_exactly_where_no_double_could(store: Store, hold: Make) -> None:
    for most, unit in ((MOST - 1, 3), (MOST - 2, 7), (2**52 + 1, 2**26 + 1), (MOST - 1, MOST - 1)):
        key = AccountKey("session", "alice", f"{most}-{unit}")
        opened = hold(claim(key, most), fixed=NOTHING, unit=Amount(unit), most=MOST)
        assert await granted(store, opened) == most // unit
        assert (await balance_of(store, key)).held == Amount(most // unit * unit)


async def test_a_sum_stops_at_what_can_be_counted_and_never_turns(store: Store, hold: Make) -> None:
    for _ in range(3):
        opened = hold(claim(S), fixed=Amount(MOST, MOST, MOST))
        await granted(store, opened)
        await soon(store.settle(spends(opened, Amount(MOST, MOST, MOST))))
    assert await used_and_held(store) == (Amount(MOST, MOST, MOST), NOTHING)


# --- settling -----------------------------------------------------------------------------------------------------------


async def test_settling_gives_the_hold_back_and_charges_what_was_spent_more_or_less(store: Store, hold: Make) -> None:
    used = 0
    for spent in (3, 10, 25):
        opened = hold(claim(S, 100), claim(KEY, 100))
        await granted(store, opened)
        await soon(store.settle(spends(opened, Amount(spent, spent, 1))))
        used += spent
        for key in (S, KEY):
            found = await balance_of(store, key)
            assert (found.used.tokens, found.held) == (used, NOTHING)


async def test_an_overspent_account_grants_nothing_more(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    await granted(store, opened)
    await soon(store.settle(spends(opened, Amount(150))))
    outcome = await refused(store, hold(claim(S, 100), fixed=Amount(1)))
    assert (outcome.balance.left("tokens"), outcome.balance.used_fraction) == (0, 1.5)


async def test_what_a_call_ends_with_is_its_totals_and_how_its_accounts_stand_then(store: Store, hold: Make) -> None:
    claims = [Claim(RATE, Limits(calls=5, window=600)), claim(KEY, 1_000), claim(PARENT), claim(S, 100)]
    opened = hold(*claims)
    await granted(store, opened)
    for _ in range(2):
        found = await soon(store.settle_and_read(spends(opened, Amount(7, 3, 1)), None, claims))
        assert found.totals == await store.totals(SESSION)
        assert found.totals.calls == 1
        assert found.balances is not None
        assert [one.key for one in found.balances] == [RATE, KEY, PARENT, S]
        assert [one.used for one in found.balances[1:]] == [Amount(7, 3, 1)] * 3
        assert [one.held for one in found.balances] == [NOTHING] * 4
        assert [one.limits.tokens for one in found.balances] == [None, 1_000, None, 100]
    assert await soon(store.settle_and_read(spends(opened, TEN), None, ())) == CallEnd(found.totals, ())


async def test_settling_again_gives_back_and_charges_once(store: Store, hold: Make) -> None:
    opened, other = hold(claim(S, 100)), hold(claim(S, 100))
    await granted(store, other)
    await granted(store, opened)
    for spent in (5, 5, 9):
        await soon(store.settle(spends(opened, Amount(spent))))
    assert await used_and_held(store) == (Amount(5), Amount(10))
    assert (await store.totals(SESSION)).total_tokens == 5


async def test_a_call_without_a_hold_is_charged_to_its_accounts_once(store: Store, record: MakeRecord) -> None:
    call = record(accounts=(S, PARENT, KEY, RATE), spent=Amount(7, 8, 1))
    for _ in range(2):
        await soon(store.settle(call))
    for key in (S, PARENT, KEY):
        assert await used_and_held(store, key) == (Amount(7, 8, 1), NOTHING)
    assert await used_and_held(store, RATE) == (NOTHING, NOTHING)


@pytest.mark.parametrize("session", ["s", None])
async def test_a_call_without_a_charge_gives_its_hold_back(store: Store, hold: Make, session: str | None) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100), session=session)
    await granted(store, opened)
    await soon(store.settle(spends(opened, NOTHING, charge=None, outcome="provider_error")))
    for key in (S, KEY):
        assert await used_and_held(store, key) == (NOTHING, NOTHING)
    assert await soon(store.extend(opened.hold.id, 1)) is None


async def test_a_hold_is_given_back_on_all_its_accounts_whatever_the_record_names(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    # What another call holds on the account that the record names is not given back.
    await granted(store, hold(claim(PARENT, 100), fixed=Amount(30)))
    await soon(store.settle(spends(opened, Amount(4), accounts=(PARENT,))))
    assert [await used_and_held(store, key) for key in (S, KEY, PARENT)] == [
        (NOTHING, NOTHING),
        (NOTHING, NOTHING),
        (Amount(4), Amount(30)),
    ]


async def test_a_call_without_a_session_is_charged_to_its_accounts(store: Store, hold: Make) -> None:
    opened = hold(claim(KEY, 100), session=None)
    await granted(store, opened)
    assert await soon(store.settle(spends(opened, Amount(4)))) == Totals()
    assert await used_and_held(store, KEY) == (Amount(4), NOTHING)


# --- extending ----------------------------------------------------------------------------------------------------------


async def test_a_hold_is_extended_by_what_is_left_and_all_of_it_is_given_back(store: Store, hold: Make) -> None:
    claims = (claim(S, 100), claim(KEY, nano_usd=300))
    opened = hold(*claims, fixed=Amount(10, 20), unit=Amount(1, 5), most=20)
    assert await granted(store, opened) == 20
    outcome = await soon(store.extend(opened.hold.id, 30))
    assert outcome is not None
    assert (outcome.units, [one.held for one in outcome.balances]) == (30, [Amount(60, 270)] * 2)
    for units in (6, 0):
        outcome = await soon(store.extend(opened.hold.id, 30))
        assert outcome is not None
        assert outcome.units == units
    await soon(store.settle(spends(opened, Amount(66, 300))))
    for key in (S, KEY):
        assert await used_and_held(store, key) == (Amount(66, 300), NOTHING)


@pytest.mark.parametrize("dimension", Amount._fields)
async def test_an_extension_goes_up_to_the_limit_and_not_one_further(store: Store, hold: Make, dimension: str) -> None:
    limited = Claim(S, Limits(**{dimension: 20}))
    opened = hold(limited, fixed=Amount(10, 10, 10), unit=Amount(1, 1, 1), most=2)
    assert await granted(store, opened) == 2
    for units in (8, 0):
        outcome = await soon(store.extend(opened.hold.id, 100))
        assert outcome is not None
        assert outcome.units == units


async def test_calls_give_back_what_they_held_and_nothing_of_what_others_hold(store: Store, hold: Make) -> None:
    await granted(store, hold(claim(S), claim(KEY), fixed=Amount(100)))
    restrict = (claim(S, 1_000), claim(KEY, 150))
    cut, grown = (hold(*restrict, unit=Amount(1), most=most) for most in (15, 5))
    assert (await granted(store, cut), await granted(store, grown)) == (15, 5)
    extended = await soon(store.extend(grown.hold.id, 100))
    assert extended is not None
    assert extended.units == 10, "the account of the client key has no more"
    too_much = hold(*restrict)
    await refused(store, too_much)
    assert [(await used_and_held(store, key))[1].tokens for key in (S, KEY)] == [150, 150]
    for ended in (too_much, grown, cut):
        await soon(store.settle(spends(ended, NOTHING, outcome="refused", charge=None)))
    assert [await used_and_held(store, key) for key in (S, KEY)] == [(NOTHING, Amount(100))] * 2
    assert await granted(store, hold(*restrict, unit=Amount(1), most=100)) == 40


async def test_there_is_nothing_to_extend_for_an_unknown_a_refused_or_a_settled_hold(store: Store, hold: Make) -> None:
    refused_hold, settled = hold(claim(KEY, 1)), hold(claim(S))
    await refused(store, refused_hold)
    await granted(store, settled)
    await soon(store.settle(spends(settled, NOTHING)))
    for name in ("unknown", refused_hold.hold.id, settled.hold.id):
        assert await soon(store.extend(name, 5)) is None
    assert (await balance_of(store)).held == NOTHING


async def test_an_extension_holds_nothing_on_the_count_of_requests(store: Store, hold: Make) -> None:
    rate = claim(RATE, calls=5, window=60)
    opened = hold(claim(S, 100), rate, fixed=Amount(1, 0, 1), unit=Amount(1, 0), most=1)
    await granted(store, opened)
    await soon(store.extend(opened.hold.id, 10))
    assert await used_and_held(store, rate) == (Amount(calls=1), NOTHING)
    assert (await balance_of(store, S)).held == Amount(12, 0, 1)


# --- leases -------------------------------------------------------------------------------------------------------------


async def test_a_hold_is_overdue_when_its_lease_has_ended_and_stays_until_it_is_settled(
    store: Store, hold: Make, moments: Time
) -> None:
    opened = hold(claim(S, 100), unit=Amount(1), most=5, unit_usd=Decimal("0.0000001"))
    await granted(store, opened)
    moments.go_on(LEASE_S - 2)
    assert await overdue(store) == []
    moments.go_on(4)
    for _ in range(2):
        assert await soon(store.overdue_holds(10)) == [replace(opened, units=5)]
    assert (await balance_of(store)).held == Amount(15)
    await soon(store.settle(opened.as_orphaned()))
    assert await overdue(store) == []
    assert await used_and_held(store) == (Amount(10), NOTHING)


async def test_a_renewed_hold_is_not_overdue_and_knows_what_was_delivered(
    store: Store, hold: Make, moments: Time
) -> None:
    one, two, other = (hold(claim(S), session=session) for session in ("s", "t", None))
    for opened in (one, two, other):
        await granted(store, opened)
    moments.go_on(LEASE_S - 2)
    assert await soon(store.renew({one.hold.id: 40, two.hold.id: 0, "unknown": 9})) == {"unknown"}
    moments.go_on(4)
    assert await overdue(store) == [other.hold.id]
    await soon(store.renew({one.hold.id: 30}))
    moments.go_on(LEASE_S + 2)
    found = {opened.hold.id: opened.noted for opened in await soon(store.overdue_holds(10))}
    assert found == {one.hold.id: 40, two.hold.id: 0, other.hold.id: 0}
    assert await soon(store.renew({})) == set()
    await soon(store.settle(one.as_orphaned()))
    assert await soon(store.renew({one.hold.id: 50, two.hold.id: 0})) == {one.hold.id}, "it was settled as left"


async def test_the_lease_of_a_hold_is_its_own(store: Store, hold: Make, moments: Time) -> None:
    short, long = hold(claim(S)), hold(claim(S))
    await granted(store, short, 10)
    await granted(store, long, 100)
    moments.go_on(50)
    assert await overdue(store) == [short.hold.id]
    moments.go_on(60)
    assert await overdue(store) == sorted([short.hold.id, long.hold.id])


async def test_no_more_overdue_holds_than_asked_for_come_at_once_over_all_sessions(
    store: Store, hold: Make, moments: Time
) -> None:
    opened = [hold(claim(AccountKey("session", "alice", f"s{number}")), session=f"s{number}") for number in range(6)]
    await asyncio.gather(*(granted(store, one) for one in opened))
    moments.go_on(LEASE_S + 2)
    seen = set[str]()
    while found := await soon(store.overdue_holds(2)):
        assert len(found) <= 2
        assert not seen & {one.hold.id for one in found}
        seen |= {one.hold.id for one in found}
        for one in found:
            await soon(store.settle(one.as_orphaned()))
    assert seen == {one.hold.id for one in opened}


async def test_what_a_lost_call_had_delivered_is_charged(store: Store, hold: Make, moments: Time) -> None:
    opened = hold(claim(S, 1_000), unit=Amount(1), most=100, unit_usd=Decimal("0.000001"))
    await granted(store, opened)
    await soon(store.renew({opened.hold.id: 42}))
    moments.go_on(LEASE_S + 2)
    [found] = await soon(store.overdue_holds(10))
    totals = await soon(store.settle(found.as_orphaned()))
    assert (totals.input_tokens, totals.output_tokens, totals.estimated_calls) == (7, 42, 1)
    assert await used_and_held(store) == (Amount(52, 42_000), NOTHING)


async def test_an_orphaned_call_may_be_charged_less_than_its_hold(store: Store, hold: Make, moments: Time) -> None:
    opened = hold(claim(S, 1_000), claim(KEY, 1_000), fixed=Amount(90, 9, 1))
    opened = replace(opened, orphaned=replace(opened.orphaned, spent=Amount(70, 7, 1)))
    await granted(store, opened)
    moments.go_on(LEASE_S + 2)
    [found] = await soon(store.overdue_holds(10))
    assert found.hold.fixed == Amount(90, 9, 1)
    await soon(store.settle(found.as_orphaned()))
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(70, 7, 1), NOTHING)


async def test_a_clock_that_was_set_back_or_ahead_neither_ends_nor_prolongs_a_lease(
    embedded: Store, hold: Make, moments: Time
) -> None:
    opened = hold(claim(S))
    await granted(embedded, opened)
    for wall in (10**9, -(10**9)):
        moments.wall += wall
        assert await overdue(embedded) == []
    moments.wall -= 10**6
    moments.mono += LEASE_S + 1
    assert await overdue(embedded) == [opened.hold.id]


@pytest.mark.parametrize(("boot", "mono"), [("second boot", 10**6), ("second boot", 1.0), ("first boot", 1.0)])
async def test_a_hold_of_an_earlier_boot_has_no_owner_any_more(
    embedded: Store, hold: Make, moments: Time, boot: str, mono: float
) -> None:
    opened = hold(claim(S))
    await granted(embedded, opened)
    moments.boot, moments.mono = boot, mono
    assert await overdue(embedded) == [opened.hold.id]
    await soon(embedded.renew({opened.hold.id: 1}))
    assert await overdue(embedded) == []


async def test_an_account_that_a_record_names_twice_is_charged_once(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    for one in (opened, hold(claim(S))):
        await soon(store.settle(spends(one, Amount(3, 1, 1), accounts=(S, KEY, S))))
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(6, 2, 2), NOTHING)


async def test_no_sum_of_an_account_passes_the_most_that_can_be_counted(store: Store, hold: Make) -> None:
    for _ in range(2):
        await soon(store.settle(spends(hold(claim(S)), Amount(MOST - 1, MOST, 1), charge=None)))
    assert await used_and_held(store) == (Amount(MOST, MOST, 2), NOTHING)


# --- lost and found -----------------------------------------------------------------------------------------------------


async def test_the_record_of_a_call_that_was_taken_for_lost_takes_the_place_of_what_was_written(
    store: Store, hold: Make, moments: Time
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    moments.go_on(LEASE_S + 2)
    await soon(store.settle(spends(hold(claim(S)), Amount(5))))
    await soon(store.settle(opened.as_orphaned()))
    real = spends(opened, Amount(33, 5, 1))
    totals = await soon(store.settle(real))
    assert (totals.calls, totals.total_tokens, totals.estimated_calls, totals.estimated_tokens) == (2, 38, 0, 0)
    assert await store.totals(SESSION) == totals
    assert await used_and_held(store, S) == (Amount(38, 5, 1), NOTHING)
    assert await used_and_held(store, KEY) == (Amount(33, 5, 1), NOTHING)
    assert await store.call("alice", opened.hold.id) == real
    assert [one.outcome for one in await store.calls(SESSION, 10)] == ["ok", "ok"]
    for late in (real, opened.as_orphaned(), spends(opened, Amount(90))):
        assert await soon(store.settle(late)) == totals
    assert await used_and_held(store, KEY) == (Amount(33, 5, 1), NOTHING)
    assert await store.call("alice", opened.hold.id) == real


async def test_a_call_that_was_settled_is_not_lost(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    await granted(store, opened)
    real = spends(opened, Amount(3))
    totals = await soon(store.settle(real))
    assert await soon(store.settle(opened.as_orphaned())) == totals
    assert await used_and_held(store) == (Amount(3), NOTHING)
    assert await store.call("alice", opened.hold.id) == real


async def test_of_two_records_of_a_lost_call_the_one_that_knows_of_more_counts_once(
    store: Store, hold: Make, moments: Time
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    moments.go_on(LEASE_S + 2)
    less, more, most = (replace(opened, noted=noted).as_orphaned() for noted in (3, 20, 50))
    await soon(store.settle(more))
    totals = await store.totals(SESSION)
    assert (totals.calls, totals.total_tokens, totals.estimated_tokens) == (1, 27, 27)
    assert await soon(store.settle(less)) == totals
    for _ in range(2):
        totals = await soon(store.settle(most))
        assert (totals.calls, totals.total_tokens, totals.estimated_calls, totals.estimated_tokens) == (1, 57, 1, 57)
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(60), NOTHING)
    assert await store.call("alice", opened.hold.id) == most
    real = spends(opened, Amount(33, 5, 1))
    for late in (real, most, replace(opened, noted=90).as_orphaned()):
        totals = await soon(store.settle(late))
        assert (totals.calls, totals.total_tokens, totals.estimated_calls) == (1, 33, 0)
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(33, 5, 1), NOTHING)


async def test_what_a_lost_call_is_known_to_have_brought_after_a_reset_takes_nothing_from_others(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100))
    await soon(store.settle(opened.as_orphaned()))
    assert await store.reset(SESSION)
    await soon(store.settle(spends(hold(claim(S)), Amount(5))))
    await soon(store.settle(replace(opened, noted=20).as_orphaned()))
    assert await used_and_held(store) == (Amount(35), NOTHING)
    await soon(store.settle(spends(opened, Amount(33))))
    assert await used_and_held(store) == (Amount(38), NOTHING)


async def test_a_lost_call_that_cost_nothing_after_all_is_taken_back(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    await granted(store, opened)
    await soon(store.settle(opened.as_orphaned()))
    totals = await soon(store.settle(spends(opened, NOTHING, charge=None, outcome="provider_error")))
    assert totals == Totals()
    assert await used_and_held(store) == (NOTHING, NOTHING)


async def test_a_lost_call_of_unknown_cost_is_charged_when_its_record_comes(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    await granted(store, opened)
    await soon(store.settle(replace(opened.as_orphaned(), charge=None, spent=NOTHING)))
    totals = await soon(store.settle(spends(opened, Amount(6))))
    assert (totals.calls, totals.total_tokens) == (1, 6)
    assert await store.totals(SESSION) == totals
    assert await used_and_held(store) == (Amount(6), NOTHING)


async def test_a_correction_after_a_reset_leaves_no_total_below_zero(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    await soon(store.settle(opened.as_orphaned()))
    assert await store.reset(SESSION)
    totals = await soon(store.settle(spends(opened, Amount(3))))
    assert (totals.calls, totals.total_tokens, totals.estimated_calls, totals.estimated_tokens) == (1, 3, 0, 0)
    assert await store.totals(SESSION) == totals
    assert await used_and_held(store) == (Amount(3), NOTHING)


async def test_a_correction_after_a_reset_takes_nothing_from_what_others_have_used_since(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await soon(store.settle(opened.as_orphaned()))
    assert await store.reset(SESSION)
    await soon(store.settle(spends(hold(claim(S), claim(KEY)), Amount(20, 5, 1))))
    totals = await soon(store.settle(spends(opened, Amount(3, 0, 1))))
    assert await used_and_held(store, S) == (Amount(23, 5, 2), NOTHING)
    assert await used_and_held(store, KEY) == (Amount(23, 5, 2), NOTHING), "it was not reset: 10 was assumed, 3 it is"
    assert (totals.calls, totals.total_tokens, totals.estimated_calls, totals.estimated_tokens) == (2, 23, 0, 0)


async def test_a_correction_after_a_parent_was_deleted_takes_nothing_from_what_others_have_used_since(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100), claim(PARENT, 100))
    await soon(store.settle(opened.as_orphaned()))
    await store.delete(SessionKey("alice", "parent"))
    await soon(store.settle(spends(hold(claim(S), claim(PARENT)), Amount(20))))
    await soon(store.settle(spends(opened, Amount(3))))
    assert await used_and_held(store, PARENT) == (Amount(23), NOTHING)
    assert await used_and_held(store, S) == (Amount(23), NOTHING)


async def test_a_call_that_is_settled_again_after_its_session_was_deleted_is_charged_once(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    await soon(store.settle(spends(opened, Amount(7))))
    assert await store.delete(SESSION)
    for again in (spends(opened, Amount(7)), opened.as_orphaned()):
        assert await soon(store.settle(again)) == Totals()
    assert await granted(store, opened) == 0
    assert await used_and_held(store, KEY) == (Amount(7), NOTHING)
    assert await used_and_held(store, S) == (NOTHING, NOTHING)
    assert await store.session(SESSION) is None
    assert await store.call(None, opened.hold.id) is None
    assert list(await store.calls(SESSION, 9)) == []


async def test_a_correction_after_its_session_was_deleted_takes_back_what_others_were_charged_for_it(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await soon(store.settle(opened.as_orphaned()))
    assert await store.delete(SESSION)
    await soon(store.settle(spends(hold(claim(S), claim(KEY)), Amount(20))))
    for _ in range(2):
        totals = await soon(store.settle(spends(opened, Amount(3))))
        assert (totals.calls, totals.total_tokens) == (2, 23)
        assert await used_and_held(store, S) == (Amount(23), NOTHING)
        assert await used_and_held(store, KEY) == (Amount(23), NOTHING), "10 was assumed, 3 it is"
    assert await store.call(None, opened.hold.id) == spends(opened, Amount(3))


async def test_a_correction_in_a_new_window_takes_nothing_from_what_others_have_used_in_it(
    store: Store, hold: Make, moments: Time
) -> None:
    hourly = claim(KEY, 100, window=3_600)
    opened, other = hold(claim(S), hourly), hold(claim(S), hourly)
    await granted(store, opened)
    moments.go_on(3_000)
    await soon(store.settle(opened.as_orphaned()))
    moments.go_on(1_000)
    await granted(store, other)
    await soon(store.settle(spends(other, Amount(20))))
    await soon(store.settle(spends(opened, Amount(3))))
    assert await used_and_held(store, hourly) == (Amount(23), NOTHING)
    assert await used_and_held(store, S) == (Amount(23), NOTHING)


async def test_what_is_assumed_after_a_reset_is_taken_back(store: Store, hold: Make) -> None:
    await soon(store.settle(spends(hold(claim(S), claim(PARENT)), Amount(50))))
    opened = hold(claim(S, 100), claim(PARENT))
    for name in ("s", "parent"):
        await store.reset(SessionKey("alice", name))
    await soon(store.settle(opened.as_orphaned()))
    await soon(store.settle(spends(hold(claim(S), claim(PARENT)), Amount(20))))
    totals = await soon(store.settle(spends(opened, Amount(3))))
    for key in (S, PARENT):
        assert await used_and_held(store, key) == (Amount(23), NOTHING)
    assert (totals.calls, totals.total_tokens) == (2, 23)


async def test_a_lost_call_without_a_session_is_corrected_on_its_accounts(store: Store, hold: Make) -> None:
    opened = hold(claim(KEY, 100), session=None)
    await granted(store, opened)
    await soon(store.settle(opened.as_orphaned()))
    assert await soon(store.settle(spends(opened, Amount(2)))) == Totals()
    assert await used_and_held(store, KEY) == (Amount(2), NOTHING)
    found = await store.call(None, opened.hold.id)
    assert found is not None
    assert found.outcome == "ok"


async def test_what_a_pending_call_has_cost_takes_the_place_of_all_that_was_held_for_it(
    store: Store, hold: Make, moments: Time
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100), fixed=Amount(60, 0, 1))
    await granted(store, opened)
    pending = replace(opened.orphaned, outcome=PENDING)
    totals = await soon(store.settle(pending))
    assert (totals.total_tokens, totals.estimated_tokens) == (7, 7)
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(60, 0, 1), NOTHING)
    moments.go_on(10 * LEASE_S)
    assert await store.overdue_holds(9) == [], "it is no hold any more, and does not end"
    assert await soon(store.settle(pending)) == totals
    real = spends(opened, Amount(33, 5, 1), tools=("search",))
    totals = await soon(store.settle(real))
    assert (totals.calls, totals.total_tokens, totals.estimated_tokens) == (1, 33, 0)
    for late in (real, pending, opened.as_orphaned(), spends(opened, Amount(90))):
        assert await soon(store.settle(late)) == totals
    assert await used_and_held(store, S) == await used_and_held(store, KEY) == (Amount(33, 5, 1), NOTHING)
    assert await store.call("alice", opened.hold.id) == real
    view = await store.session(SESSION)
    assert view is not None
    assert view.tools.recent == ("search",)


async def test_a_call_that_was_taken_for_lost_is_corrected_by_what_it_cost_not_by_what_it_may_have(
    store: Store, hold: Make
) -> None:
    opened = hold(claim(S, 100))
    await soon(store.settle(opened.as_orphaned()))
    await soon(store.settle(replace(opened.orphaned, outcome=PENDING, spent=Amount(90))))
    assert await used_and_held(store) == (TEN, NOTHING)
    await soon(store.settle(spends(opened, Amount(33))))
    assert await used_and_held(store) == (Amount(33), NOTHING)


# --- windows and rates --------------------------------------------------------------------------------------------------


async def test_budget_window_restarts_with_the_next_hold_and_keeps_open_holds(
    store: Store, hold: Make, moments: Time
) -> None:
    hourly = claim(KEY, 100, window=3_600)
    first, long = hold(hourly, session=None, fixed=Amount(60)), hold(hourly, session=None, fixed=Amount(30))
    await granted(store, first)
    await granted(store, long)
    await soon(store.settle(spends(first, Amount(60))))
    moments.go_on(3_590)
    assert not (await refused(store, hold(hourly, fixed=Amount(50)))).is_busy
    assert await used_and_held(store, hourly) == (Amount(60), Amount(30))
    moments.go_on(20)
    assert await used_and_held(store, hourly) == (NOTHING, Amount(30))
    await granted(store, hold(hourly, fixed=Amount(70)))
    assert (await refused(store, hold(hourly, fixed=Amount(50)))).is_busy
    await soon(store.settle(spends(long, Amount(30))))
    assert await used_and_held(store, hourly) == (Amount(30), Amount(70))


async def test_a_standing_says_how_long_its_window_still_lasts(store: Store, hold: Make, moments: Time) -> None:
    hourly = claim(KEY, 100, window=3_600)
    assert (await balance_of(store, hourly)).resets_s == 3_600
    await granted(store, hold(hourly))
    moments.go_on(600)
    assert (await balance_of(store, hourly)).resets_s == pytest.approx(3_000, abs=2)
    moments.go_on(9_000)
    assert (await balance_of(store, hourly)).resets_s == pytest.approx(3_600, abs=2)
    assert (await balance_of(store, KEY)).resets_s is None


async def test_a_window_by_days_ends_at_midnight_on_every_store(
    store: Store, hold: Make, moments: Time, clock: Clock
) -> None:
    daily = claim(KEY, 100, window=CalendarWindow("day"))

    def go_on(seconds: float) -> None:
        moments.go_on(seconds)
        clock.time = time.time() + moments.passed  # of the server of a Redis

    go_on(0)
    left = (await balance_of(store, daily)).resets_s or 0
    assert 0 < left <= 86_400
    go_on(left + 3_600)
    opened = hold(daily, fixed=Amount(60))
    await granted(store, opened)
    await store.settle(spends(opened, Amount(60)))
    go_on(22 * 3_600)
    assert not (await refused(store, hold(daily, fixed=Amount(60)))).is_busy
    kept = hold(daily, fixed=Amount(30))
    await granted(store, kept)
    go_on(2 * 3_600)
    assert await used_and_held(store, daily) == (NOTHING, Amount(30))
    await granted(store, hold(daily, fixed=Amount(60)))
    await store.settle(spends(kept, Amount(25)))
    assert (await balance_of(store, daily)).used == Amount(25)


async def test_a_worker_whose_clock_is_ahead_of_the_server_begins_a_day_once(
    open_redis: OpenStore, hold: Make, moments: Time, clock: Clock
) -> None:
    store, daily = await open_redis(clock, moments), claim(KEY, 100, window=CalendarWindow("day"))
    clock.time = time.time()
    first = hold(daily, fixed=Amount(60))
    await granted(store, first)
    await store.settle(spends(first, Amount(60)))
    left = (await balance_of(store, daily)).resets_s or 0
    clock.time += left + 1  # after midnight, which is ahead of the server
    second = hold(daily, fixed=Amount(70))
    await granted(store, second)
    await store.settle(spends(second, Amount(70)))
    for now in (clock.time, clock.time - 2, clock.time):
        clock.time = now
        assert not (await refused(store, hold(daily, fixed=Amount(40)))).is_busy
    moments.go_on(left + 1)
    assert (await balance_of(store, daily)).used == Amount(70)
    await store.aclose()


async def test_a_clock_that_was_set_does_not_end_a_window_early(embedded: Store, hold: Make, moments: Time) -> None:
    hourly = claim(KEY, 10, window=3_600)
    await granted(embedded, hold(hourly))
    for wall in (10**9, -(10**9), -(10**6)):
        moments.wall += wall
        assert (await refused(embedded, hold(hourly))).is_busy
    moments.mono += 3_601
    await used_and_held(embedded, hourly)
    assert await used_and_held(embedded, hourly) == (NOTHING, Amount(10))


async def test_after_a_boot_a_window_goes_by_the_time_of_day(embedded: Store, hold: Make, moments: Time) -> None:
    hourly = claim(KEY, 10, window=3_600)
    opened = hold(hourly)
    await granted(embedded, opened)
    await soon(embedded.settle(spends(opened, Amount(10))))
    moments.boot, moments.mono = "second boot", 1.0
    moments.wall += 3_000
    assert (await balance_of(embedded, hourly)).used == Amount(10)
    moments.wall += 700
    assert (await balance_of(embedded, hourly)).used == NOTHING


async def test_requests_count_when_they_are_made_and_never_come_back_before_their_minute_ends(
    store: Store, hold: Make, moments: Time
) -> None:
    rate = claim(RATE, calls=2, window=60)
    for number in range(2):
        opened = hold(claim(S), rate, fixed=Amount(10, 0, 1))
        await granted(store, opened)
        charge = None if number else Charge(Usage.of(1, 1), "provider")
        await soon(store.settle(spends(opened, NOTHING, charge=charge)))
    outcome = await refused(store, hold(claim(S), rate, fixed=Amount(10, 0, 1)))
    assert (outcome.balance.key, outcome.dimension, outcome.is_busy) == (RATE, "calls", False)
    assert outcome.balance.resets_s == pytest.approx(60, abs=2)
    assert await used_and_held(store, rate) == (Amount(calls=2), NOTHING)
    assert await used_and_held(store, S) == (NOTHING, NOTHING)
    moments.go_on(61)
    await granted(store, hold(claim(S), rate, fixed=Amount(10, 0, 1)))
    assert await used_and_held(store, rate) == (Amount(calls=1), NOTHING)


# --- limits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [({"tokens": 500}, 500), ({"tokens": None}, None), ({"calls": 9}, 100), ({"tokens": 7}, 7), ({"tokens": 0}, 0)],
)
async def test_an_operators_decision_stands_in_place_of_the_configured_limit(
    store: Store, hold: Make, limits: Mapping[Any, int | None], allowed: int | None
) -> None:
    await soon(store.override_limits(S, limits))
    assert (await balance_of(store, claim(S, 100))).limits.tokens == allowed
    if allowed is not None:
        await refused(store, hold(claim(S, 100), fixed=Amount(allowed + 1)))
    opened = hold(claim(S, 100), fixed=Amount(10**6 if allowed is None else allowed))
    await granted(store, opened)
    await soon(store.settle(spends(opened, opened.hold.fixed)))
    await soon(store.override_limits(S, None))
    assert await balance_of(store, claim(S, 100)) == Balance(S, Limits(100), opened.hold.fixed, NOTHING)


async def test_a_decision_changes_what_it_names_and_nothing_else_of_the_account(store: Store, hold: Make) -> None:
    opened = hold(claim(KEY, 100, nano_usd=5), fixed=Amount(10))
    await granted(store, opened)
    await soon(store.override_limits(KEY, {"tokens": 200, "calls": None}))
    await soon(store.override_limits(KEY, {"nano_usd": 9}))
    configured = claim(KEY, 100, nano_usd=5, calls=3)
    assert await balance_of(store, configured) == Balance(KEY, Limits(200, 9, None), NOTHING, Amount(10))
    await soon(store.override_limits(KEY, {"calls": 1, "tokens": None}))
    assert (await balance_of(store, configured)).limits == Limits(None, 9, 1)


async def test_what_a_call_declares_only_ever_lowers_its_limit(store: Store, hold: Make) -> None:
    low, high = Limits(tokens=50), Limits(tokens=10**9)
    assert (await balance_of(store, claim(S, 100, declared=low))).limits.tokens == 50
    assert (await balance_of(store, claim(S, 100, declared=high))).limits.tokens == 100
    assert (await balance_of(store, claim(S, declared=low))).limits.tokens == 50
    await refused(store, hold(claim(S, 100, declared=high), fixed=Amount(101)))
    await refused(store, hold(claim(S, 100, declared=low), fixed=Amount(51)))
    await refused(store, hold(claim(S, declared=low), fixed=Amount(51)))
    await soon(store.override_limits(S, {"tokens": None}))
    await refused(store, hold(claim(S, 100, declared=low), fixed=Amount(51)))
    await granted(store, hold(claim(S, 100, declared=high), fixed=Amount(101)))


# --- reset, delete, expire ----------------------------------------------------------------------------------------------


async def test_a_reset_sets_what_is_used_to_nothing_and_leaves_what_is_held_and_decided(
    store: Store, hold: Make
) -> None:
    done, running = hold(claim(S, 100), claim(KEY, 100)), hold(claim(S, 100))
    await granted(store, done)
    await granted(store, running)
    await soon(store.override_limits(S, {"tokens": 70}))
    await soon(store.settle(spends(done, Amount(60))))
    assert await store.reset(SESSION)
    assert await balance_of(store, claim(S, 100)) == Balance(S, Limits(70), NOTHING, Amount(10))
    assert await used_and_held(store, KEY) == (Amount(60), NOTHING)
    await soon(store.settle(spends(running, Amount(4))))
    assert await used_and_held(store) == (Amount(4), NOTHING)


async def test_a_deleted_session_has_used_nothing_and_what_its_calls_under_way_hold_stays_held(
    store: Store, hold: Make
) -> None:
    done, running = hold(claim(S, 100), claim(KEY, 100)), hold(claim(S, 100), claim(KEY, 100))
    await granted(store, done)
    await granted(store, running)
    await soon(store.override_limits(S, {"tokens": 70}))
    await soon(store.settle(spends(done, Amount(60))))
    assert await store.delete(SESSION)
    assert await balance_of(store, claim(S, 100)) == Balance(S, Limits(100), NOTHING, Amount(10))
    assert await used_and_held(store, KEY) == (Amount(60), Amount(10))
    await soon(store.settle(spends(running, Amount(4))))
    assert await used_and_held(store, S) == (Amount(4), NOTHING)
    assert await used_and_held(store, KEY) == (Amount(64), NOTHING)


async def test_a_call_from_before_a_deletion_gives_its_own_back_and_nothing_of_what_others_hold(
    store: Store, hold: Make
) -> None:
    before, after = hold(claim(S, 25)), hold(claim(S, 25))
    await granted(store, before)
    await store.delete(SESSION)
    await granted(store, after)
    assert (await refused(store, hold(claim(S, 25)))).is_busy
    await soon(store.settle(spends(before, Amount(8))))
    assert await used_and_held(store) == (Amount(8), Amount(10))
    assert (await refused(store, hold(claim(S, 25)))).is_busy
    await soon(store.settle(spends(after, Amount(8))))
    assert await used_and_held(store) == (Amount(16), NOTHING)


async def test_what_calls_under_way_hold_does_not_expire(store: Store, hold: Make, clock: Clock, moments: Time) -> None:
    done, long, child = hold(claim(S, 100)), hold(claim(S, 100)), hold(claim(PARENT, 100), session="child")
    for opened in (done, long, child):
        await granted(store, opened)
    await soon(store.settle(spends(done, Amount(60))))
    clock.time = 10_000.0
    moments.go_on(9_000)
    assert await store.expire(5_000.0) == 1
    assert (await balance_of(store, S)).held == TEN
    assert (await balance_of(store, PARENT)).held == TEN
    await soon(store.settle(spends(long, Amount(4))))
    assert (await balance_of(store, S)).held == NOTHING


async def test_the_account_of_a_session_expires_with_it_and_that_of_a_client_key_never(
    store: Store, hold: Make, clock: Clock, moments: Time
) -> None:
    opened = hold(claim(S, 100), claim(KEY, 100))
    await granted(store, opened)
    await soon(store.settle(spends(opened, Amount(60))))
    await soon(store.override_limits(KEY, {"tokens": 70}))
    clock.time = 10_000.0
    moments.go_on(9_000)
    assert await store.expire(5_000.0) == 1
    assert await used_and_held(store, S) == (NOTHING, NOTHING)
    assert await balance_of(store, claim(KEY, 100)) == Balance(KEY, Limits(70), Amount(60), NOTHING)


@pytest.mark.parametrize("calls_itself", [True, False])
async def test_who_is_above_a_session_is_known_for_as_long_as_others_are_charged_to_it(
    store: Store, hold: Make, clock: Clock, moments: Time, calls_itself: bool
) -> None:
    await store.update(SESSION, lambda state: state.with_parent("parent"))
    if calls_itself:
        await soon(store.settle(spends(hold(claim(S), claim(PARENT)), Amount(5))))
    clock.time = 10_000.0
    moments.go_on(9_000)
    child = hold(claim(S), claim(PARENT), session="child")
    await granted(store, child)
    await soon(store.settle(spends(child, Amount(7), started_at=9_990.0)))
    assert await store.expire(5_000.0) == calls_itself
    assert (await store.remembered(SESSION)).state.parent == "parent"
    clock.time = 20_000.0
    moments.go_on(10_000)
    await store.expire(15_000.0)
    assert (await store.remembered(SESSION)).state.parent is None
    assert await used_and_held(store, S) == (NOTHING, NOTHING)


async def test_the_account_of_a_session_that_never_called_expires_alone(
    store: Store, hold: Make, clock: Clock, moments: Time, record: MakeRecord
) -> None:
    await soon(store.settle(record(at=6_000.0, accounts=(S,), spent=Amount(5))))
    await soon(store.override_limits(PARENT, {"tokens": 70}))
    assert await store.expire(999.0) == 0
    assert (await balance_of(store, claim(PARENT, 100))).limits.tokens == 70
    clock.time = 10_000.0
    moments.go_on(9_000)
    assert await store.expire(5_000.0) == 0
    assert (await balance_of(store, claim(PARENT, 100))).limits.tokens == 100
    assert (await balance_of(store)).used == Amount(5)


# --- many at once -------------------------------------------------------------------------------------------------------


async def test_sixty_four_calls_at_once_hold_no_more_than_the_limit_and_end_exactly(store: Store, hold: Make) -> None:
    opened = [hold(claim(S, 200), claim(KEY, 10_000), claim(RATE, calls=10**6, window=60)) for _ in range(64)]
    outcomes = await soon(asyncio.gather(*(store.reserve(one, LEASE_S) for one in opened)))
    taken = [one for one, outcome in zip(opened, outcomes, strict=True) if isinstance(outcome, Granted)]
    assert len(taken) == 20
    assert await used_and_held(store, KEY) == (NOTHING, Amount(200))
    records = [spends(one, Amount(3, 1, 1)) for one in taken]
    await soon(asyncio.gather(*(store.settle(one) for one in [*records, *records])))
    for key in (S, KEY):
        assert await used_and_held(store, key) == (Amount(60, 20, 20), NOTHING)
    assert (await store.totals(SESSION)).calls == 20


async def test_calls_from_beginning_to_end_at_once_are_never_off_by_one(
    store: Store, hold: Make, moments: Time
) -> None:
    limit = 60 * 13

    async def call(number: int) -> int:
        key = AccountKey("session", "alice", f"s{number % 3}")
        opened = hold(claim(key), claim(KEY, limit), fixed=Amount(10, 1, 1), unit=Amount(1), most=3, session=key.id)
        outcome = await store.reserve(opened, LEASE_S)
        if isinstance(outcome, Refused):
            # Each spends more than it holds, and where accounts lie apart they are looked at once more, a little later.
            assert outcome.is_busy == (outcome.balance.used.tokens + 10 <= limit)
            return 0
        assert all(one.held.tokens + one.used.tokens <= limit for one in outcome.balances if one.key == KEY)
        await asyncio.sleep(0)
        await asyncio.gather(store.extend(opened.hold.id, 2), store.renew({opened.hold.id: number}))
        await asyncio.gather(*(store.settle(spends(opened, Amount(number, 1, 1))) for _ in range(2)))
        return number

    spent = sum(await soon(asyncio.gather(*(call(number) for number in range(64)))))
    found = await balance_of(store, KEY)
    assert (found.used.tokens, found.held) == (spent, NOTHING)
    sessions = [await balance_of(store, AccountKey("session", "alice", f"s{number}")) for number in range(3)]
    assert sum(one.used.tokens for one in sessions) == spent
    assert [one.held for one in sessions] == [NOTHING] * 3
    totals = [await store.totals(SessionKey("alice", f"s{number}")) for number in range(3)]
    assert sum(one.total_tokens for one in totals) == spent
    moments.go_on(LEASE_S + 2)
    assert await overdue(store) == []


async def test_a_reservation_whose_caller_is_cancelled_can_be_given_back(store: Store, hold: Make) -> None:
    opened = hold(claim(S, 100))
    task = asyncio.create_task(store.reserve(opened, LEASE_S))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await soon(store.settle(spends(opened, NOTHING, charge=None, outcome="client_left")))
    await asyncio.sleep(0.05)
    assert await used_and_held(store) == (NOTHING, NOTHING)


# --- the closing call -----------------------------------------------------------------------------------------------------

#: what a normal call and the closing call of a session claim
NORMAL = Claim(S, Limits(100), closing_share=0.2)
CLOSING = replace(NORMAL, is_closing=True)


async def test_of_calls_at_once_one_is_the_closing_call(store: Store, hold: Make) -> None:
    outcomes = await asyncio.gather(*(take(store, hold(CLOSING)) for _ in range(24)))
    assert [type(one) for one in outcomes].count(Granted) == 1
    refusals = [one for one in outcomes if isinstance(one, Refused)]
    assert {(one.is_busy, one.balance.is_closed_to("")) for one in refusals} == {(False, True)}
    assert (await balance_of(store, NORMAL)).held == TEN
    assert (await refused(store, hold(NORMAL, fixed=Amount(1)))).balance.closing


async def test_what_is_kept_is_granted_to_the_closing_call_only(store: Store, hold: Make) -> None:
    fields = {"unit": Amount(1), "least": 1, "most": 500}
    normal = hold(NORMAL, **fields)
    assert await granted(store, normal) == 70
    assert (await refused(store, hold(NORMAL))).is_busy
    assert await granted(store, hold(CLOSING, fixed=Amount(5), **fields)) == 15
    extension = await soon(store.extend(normal.hold.id, 5))
    assert extension is not None
    assert extension.units == 0


async def test_a_closing_call_that_cost_nothing_gives_the_right_back(store: Store, hold: Make) -> None:
    first, other = hold(CLOSING), hold(Claim(S))
    await granted(store, first)
    await granted(store, other)
    await soon(store.settle(spends(other, NOTHING, charge=None)))
    assert (await balance_of(store, NORMAL)).closing, "another call has failed"
    await soon(store.settle(spends(first, NOTHING, charge=None)))
    assert not (await balance_of(store, NORMAL)).closing
    await granted(store, hold(CLOSING))


@pytest.mark.parametrize("ends", ["ok", "orphaned"])
async def test_a_closing_call_that_cost_something_uses_the_right_up(store: Store, hold: Make, ends: str) -> None:
    closing = hold(CLOSING)
    await granted(store, closing)
    used = Amount(3, 0, 1)
    await soon(store.settle(spends(closing, used) if ends == "ok" else closing.as_orphaned()))
    await refused(store, hold(CLOSING))
    await refused(store, hold(NORMAL, fixed=Amount(1)))


async def test_the_same_closing_call_again_is_one(store: Store, hold: Make) -> None:
    closing = hold(CLOSING)
    assert await granted(store, closing) == await granted(store, closing)


@pytest.mark.parametrize("change", ["limits", "reset", "delete"])
async def test_a_session_is_open_again_after_a_change(store: Store, hold: Make, change: str) -> None:
    closing = hold(CLOSING)
    await granted(store, closing)
    await soon(store.settle(spends(closing, Amount(10, 0, 1))))
    if change == "limits":
        await soon(store.override_limits(S, {"tokens": 200}))
    else:
        await soon(store.reset(SESSION) if change == "reset" else store.delete(SESSION))
    assert not (await balance_of(store, NORMAL)).closing
    await granted(store, hold(NORMAL))


async def test_a_new_window_opens_a_session_again(store: Store, hold: Make, moments: Time) -> None:
    closing = hold(replace(CLOSING, configured=Limits(100, window=60.0)))
    await granted(store, closing)
    await soon(store.settle(spends(closing, Amount(10, 0, 1))))
    moments.go_on(61.0)
    await granted(store, hold(replace(NORMAL, configured=Limits(100, window=60.0))))


async def test_a_closing_call_that_another_account_refuses_takes_no_right(store: Store, hold: Make) -> None:
    full = claim(KEY, 5)
    await refused(store, hold(CLOSING, full))
    await refused(store, hold(full, CLOSING))
    assert not (await balance_of(store, NORMAL)).closing
    await granted(store, hold(CLOSING))
