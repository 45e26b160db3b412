"""While the store is unavailable, a worker spends at most what was left when it last read the balances."""

from __future__ import annotations

import logging

import pytest

from gateway.core.ledger.arithmetic import (
    NO_LIMITS,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
)
from gateway.stores.stale_accounts import StaleAccounts

KEY = AccountKey("session", "alice", "s")
OTHER = AccountKey("session", "alice", "other")
ALICE = AccountKey("key", "alice")
RATE = AccountKey("rate", "alice")
CLAIM = Claim(KEY, Limits(tokens=100))


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> Moment:
        return Moment(self.seconds, self.seconds)


def hold(tokens: int, claim: Claim = CLAIM, number: int = 1) -> Hold:
    return Hold(f"h{number}", (claim,), Amount(tokens, 0, 1))


def test_last_known_usage_and_holds_count_as_spent() -> None:
    stale = StaleAccounts()
    stale.remember([Balance(KEY, CLAIM.configured, Amount(50), Amount(20))])
    assert isinstance(stale.reserve(hold(31)), Refused)
    assert isinstance(stale.reserve(hold(30)), Granted)
    assert isinstance(stale.reserve(hold(1, number=2)), Refused)


@pytest.mark.parametrize(
    ("key", "limits", "now", "is_said"),
    [
        (ALICE, Limits(tokens=1_000), Amount(), True),
        (ALICE, NO_LIMITS, Amount(), True),
        (ALICE, Limits(tokens=1_000), Amount(700, 0, 7), False),
        (ALICE, Limits(tokens=1_000, window=60), Amount(), False),
        (KEY, Limits(tokens=1_000), Amount(), False),
        (AccountKey("group", "alice"), Limits(tokens=1_000), Amount(), True),
    ],
    ids=["lost", "without a limit", "used", "in a window", "of a session", "of a group"],
)
def test_lost_account_of_a_client_key_is_logged_once(
    key: AccountKey, limits: Limits, now: Amount, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stale, seen = StaleAccounts(), Balance(key, limits, Amount(800, 0, 8), Amount())
    with caplog.at_level(logging.ERROR, "gateway"):
        stale.remember([Balance(key, limits, Amount(), Amount())])
        stale.remember([seen])
        assert caplog.records == []
        for _ in range(2):
            stale.remember([Balance(key, limits, now, Amount())])
    said = [*map(logging.LogRecord.getMessage, caplog.records)]
    assert len(said) == is_said
    assert not said or ' "alice" had used: 800 tokens in 8 calls' in said[0]
    assert not said or key != ALICE or 'client key "alice"' in said[0]


GONE = Balance(KEY, Limits(tokens=1_000), Amount(), Amount(), is_absent=True)
ORPHANED = Balance(KEY, Limits(tokens=1_000), Amount(), Amount(), is_absent=True, is_orphaned=True)
USED = Balance(KEY, Limits(tokens=1_000), Amount(800, 0, 8), Amount())


@pytest.mark.parametrize(
    ("told", "idle_s", "errors"),
    [
        ([GONE], 0, 0),
        ([USED, GONE, GONE], 0, 1),
        ([USED, Balance(KEY, Limits(tokens=1_000), Amount(), Amount())], 0, 0),
        ([USED, GONE], 7_200, 0),
        ([ORPHANED, ORPHANED], 0, 1),
        ([USED, ORPHANED, ORPHANED, USED, ORPHANED], 0, 2),
    ],
    ids=["new", "gone", "reset", "expired", "lost before this worker saw it", "lost twice"],
)
def test_lost_session_is_logged_once(
    told: list[Balance], idle_s: float, errors: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    stale = StaleAccounts(clock)
    with caplog.at_level(logging.ERROR, "gateway"):
        for balance in told:
            stale.remember([balance])
            clock.seconds += idle_s
    said = [*map(logging.LogRecord.getMessage, caplog.records)]
    assert len(said) == errors
    assert all('session "s" of "alice"' in text and "client key still holds" in text for text in said)
    assert told[0] is not USED or not said or "800 tokens in 8 calls" in said[0]


def test_unknown_session_has_its_configured_budget() -> None:
    stale = StaleAccounts()
    assert isinstance(stale.reserve(hold(100)), Granted)
    assert isinstance(stale.reserve(hold(1, number=2)), Refused)


def test_cost_of_a_call_replaces_its_hold() -> None:
    stale = StaleAccounts()
    first = hold(90)
    assert isinstance(stale.reserve(first), Granted)
    stale.settle(first.id, Amount(10, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 90


def test_limits_of_an_operator_stay_in_force() -> None:
    stale = StaleAccounts()
    stale.remember([Balance(KEY, Limits(tokens=500), Amount(), Amount())])
    (claim,) = stale.claims([CLAIM])
    assert isinstance(stale.reserve(hold(500, claim)), Granted)
    lower = stale.claims([Claim(KEY, Limits(tokens=100), Limits(tokens=7))])[0]
    assert lower.declared == Limits(tokens=7)


def test_declared_limit_applies_to_its_own_call_only() -> None:
    stale = StaleAccounts()
    stale.remember([Balance(KEY, CLAIM.configured, Amount(), Amount())])
    stale.update_usage(
        [Balance(KEY, Limits(tokens=7), Amount(), Amount(5)), Balance(OTHER, Limits(1), Amount(9), Amount())]
    )
    (claim,) = stale.claims([CLAIM])
    assert claim.configured == CLAIM.configured
    assert stale.balances([claim])[0].left("tokens") == 95
    assert stale.balances([Claim(OTHER, Limits(100))])[0].left("tokens") == 100, "nobody saw its limits"


def test_hold_unknown_to_the_store_counts_until_its_call_ends() -> None:
    stale, first = StaleAccounts(), hold(90)
    stale.reserve(first)
    stale.drop_spent()
    stale.remember([Balance(KEY, CLAIM.configured, Amount(2), Amount())])
    assert stale.balances([CLAIM])[0].left("tokens") == 8
    assert isinstance(stale.reserve(hold(9, number=2)), Refused), "the store is unavailable again"
    assert isinstance(stale.reserve(hold(8, number=3)), Granted)
    stale.settle(first.id, Amount(10, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 80


def test_cost_of_a_call_that_ended_after_the_outage_counts() -> None:
    stale, first = StaleAccounts(), hold(90)
    stale.reserve(first)
    stale.drop_spent()
    stale.settle(first.id, Amount(10, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 90
    stale.remember([Balance(KEY, CLAIM.configured, Amount(12), Amount())])
    assert stale.balances([CLAIM])[0].left("tokens") == 88


def test_hold_taken_by_the_store_counts_in_its_balances() -> None:
    stale, first, second = StaleAccounts(), hold(60), hold(30, number=2)
    stale.reserve(first)
    stale.drop_spent()
    stale.drop_hold(first.id, [Balance(KEY, NO_LIMITS, Amount(1), Amount(60))])
    assert stale.balances([CLAIM])[0].left("tokens") == 39
    stale.reserve(second)
    stale.settle(first.id, Amount(10, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 9, "the end of a call of another outage frees nothing of others"
    stale.settle(second.id, Amount(30, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 9


def test_hold_taken_before_the_next_outage_counts_as_spent() -> None:
    stale, first = StaleAccounts(), hold(60)
    stale.reserve(first)
    stale.drop_hold(first.id, [])
    assert stale.balances([CLAIM])[0].left("tokens") == 40
    stale.settle(first.id, Amount(10, 0, 1))
    assert stale.balances([CLAIM])[0].left("tokens") == 40


def test_requests_of_an_outage_count_for_the_rest_of_their_minute() -> None:
    clock = Clock()
    stale, claim = StaleAccounts(clock), Claim(RATE, Limits(calls=2, window=60))
    for number in range(2):
        assert isinstance(stale.reserve(hold(0, claim, number)), Granted)
        stale.settle(f"h{number}", Amount())
    stale.drop_spent()
    stale.remember([Balance(RATE, claim.configured, Amount(calls=1), Amount())])
    clock.seconds = 59
    assert isinstance(stale.reserve(hold(0, claim, 3)), Refused)
    clock.seconds = 61
    assert isinstance(stale.reserve(hold(0, claim, 4)), Granted)
    assert isinstance(stale.reserve(hold(0, claim, 5)), Refused)


def test_window_refills_during_an_outage() -> None:
    clock = Clock()
    stale, claim = StaleAccounts(clock), Claim(KEY, Limits(tokens=100, window=60))
    assert isinstance(stale.reserve(hold(100, claim)), Granted)
    stale.settle(hold(100, claim).id, Amount(100))
    assert isinstance(stale.reserve(hold(1, claim, 2)), Refused)
    clock.seconds = 61
    assert isinstance(stale.reserve(hold(100, claim, 3)), Granted)


def test_spending_of_an_outage_stays_if_the_next_one_starts_before_a_read() -> None:
    stale, first = StaleAccounts(), hold(90)
    stale.reserve(first)
    stale.settle(first.id, Amount(90, 0, 1))
    stale.drop_spent()
    assert isinstance(stale.reserve(hold(20, number=2)), Refused)
    assert isinstance(stale.reserve(hold(10, number=3)), Granted)


def spent(stale: StaleAccounts, number: int, limits: Limits = NO_LIMITS) -> Claim:
    """A session of its own that has spent 90 tokens."""
    claim = Claim(AccountKey("session", "alice", f"s{number}"), limits)
    one = hold(90, claim, number)
    assert isinstance(stale.reserve(one), Granted)
    stale.settle(one.id, Amount(90, 0, 1))
    return claim


def used(stale: StaleAccounts, claim: Claim) -> int:
    return stale.balances([claim])[0].used.tokens


def test_least_recently_used_sessions_without_limits_are_dropped_first() -> None:
    stale = StaleAccounts()
    first, second = spent(stale, -2), spent(stale, -1)
    spent(stale, -2)
    for number in range(19_999):
        last = spent(stale, number)
    assert [used(stale, claim) for claim in (first, second, last)] == [180, 0, 90]
    spent(stale, 20_000)
    assert used(stale, first) == 0


def test_accounts_with_holds_or_limits_are_never_dropped() -> None:
    stale = StaleAccounts()
    limited, declared = spent(stale, -1, Limits(tokens=100)), spent(stale, -2)
    lowered = Claim(declared.key, declared=Limits(tokens=200))
    assert isinstance(stale.reserve(hold(90, lowered, -3)), Granted)
    stale.settle("h-3", Amount(10))
    under_way = hold(90, Claim(OTHER), -4)
    assert isinstance(stale.reserve(under_way), Granted)
    for number in range(20_001):
        spent(stale, number)
    assert (used(stale, limited), used(stale, lowered)) == (90, 100)
    assert isinstance(stale.reserve(hold(11, limited, -5)), Refused)
    assert stale.balances([Claim(OTHER)])[0].held == Amount(90, 0, 1)
    stale.settle(under_way.id, Amount(7))
    assert used(stale, Claim(OTHER)) == 7


def test_a_session_that_is_used_again_is_not_forgotten_while_its_call_runs() -> None:
    stale = StaleAccounts()
    claim = spent(stale, -1)
    running = hold(90, claim, -2)
    assert isinstance(stale.reserve(running), Granted)
    for number in range(20_001):
        spent(stale, number)
    assert used(stale, claim) == 90
    stale.settle(running.id, Amount(5))
    assert used(stale, claim) == 95
