"""While the store is away a worker spends what was left when it last looked, and no more."""

from __future__ import annotations

from gateway.core.ledger import (
    NO_LIMITS,
    AccountKey,
    Amount,
    Claim,
    Granted,
    Hold,
    Limits,
    Moment,
    Refused,
    Standing,
)
from gateway.stores.blind import Blind

KEY = AccountKey("session", "alice", "s")
OTHER = AccountKey("session", "alice", "other")
CLAIM = Claim(KEY, Limits(tokens=100))


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> Moment:
        return Moment(self.seconds, self.seconds)


def hold(tokens: int, claim: Claim = CLAIM, number: int = 1) -> Hold:
    return Hold(f"h{number}", (claim,), Amount(tokens, 0, 1))


def test_what_was_used_and_held_when_it_was_seen_is_gone() -> None:
    blind = Blind()
    blind.saw([Standing(KEY, CLAIM.configured, Amount(50), Amount(20))])
    assert isinstance(blind.reserve(hold(31)), Refused)
    assert isinstance(blind.reserve(hold(30)), Granted)
    assert isinstance(blind.reserve(hold(1, number=2)), Refused)


def test_a_session_nobody_saw_has_its_configured_budget() -> None:
    blind = Blind()
    assert isinstance(blind.reserve(hold(100)), Granted)
    assert isinstance(blind.reserve(hold(1, number=2)), Refused)


def test_what_a_call_cost_takes_the_place_of_its_hold() -> None:
    blind = Blind()
    first = hold(90)
    assert isinstance(blind.reserve(first), Granted)
    blind.settle(first, 0, Amount(10, 0, 1))
    assert blind.standings([CLAIM])[0].left("tokens") == 90


def test_limits_that_an_operator_set_hold_on() -> None:
    blind = Blind()
    blind.saw([Standing(KEY, Limits(tokens=500), Amount(), Amount())])
    (claim,) = blind.claims([CLAIM])
    assert isinstance(blind.reserve(hold(500, claim)), Granted)
    lower = blind.claims([Claim(KEY, Limits(tokens=100), Limits(tokens=7))])[0]
    assert lower.declared == Limits(tokens=7)


def test_what_one_call_declares_is_no_other_calls_limit() -> None:
    blind = Blind()
    blind.saw([Standing(KEY, CLAIM.configured, Amount(), Amount())])
    blind.saw_used(
        [Standing(KEY, Limits(tokens=7), Amount(), Amount(5)), Standing(OTHER, Limits(1), Amount(9), Amount())]
    )
    (claim,) = blind.claims([CLAIM])
    assert claim.configured == CLAIM.configured
    assert blind.standings([claim])[0].left("tokens") == 95
    assert blind.standings([Claim(OTHER, Limits(100))])[0].left("tokens") == 100, "nobody saw its limits"


def test_a_hold_that_was_open_when_the_store_came_back_counts_as_spent_until_the_store_says_otherwise() -> None:
    blind, first = Blind(), hold(90)
    blind.reserve(first)
    blind.forget()
    blind.settle(first, 0, Amount(10, 0, 1))
    assert blind.standings([CLAIM])[0].left("tokens") == 10
    blind.saw([Standing(KEY, CLAIM.configured, Amount(10), Amount())])
    assert blind.standings([CLAIM])[0].left("tokens") == 90


def test_a_window_refills_while_the_store_is_away() -> None:
    clock = Clock()
    blind, claim = Blind(clock), Claim(KEY, Limits(tokens=100, window_s=60))
    assert isinstance(blind.reserve(hold(100, claim)), Granted)
    blind.settle(hold(100, claim), 0, Amount(100))
    assert isinstance(blind.reserve(hold(1, claim, 2)), Refused)
    clock.seconds = 61
    assert isinstance(blind.reserve(hold(100, claim, 3)), Granted)


def test_what_was_spent_blindly_stays_spent_if_the_store_goes_again_before_it_was_read() -> None:
    blind, first = Blind(), hold(90)
    blind.reserve(first)
    blind.settle(first, 0, Amount(90, 0, 1))
    blind.forget()
    assert isinstance(blind.reserve(hold(20, number=2)), Refused)
    assert isinstance(blind.reserve(hold(10, number=3)), Granted)


def spent(blind: Blind, number: int, limits: Limits = NO_LIMITS) -> Claim:
    """A session of its own that has spent 90 tokens."""
    claim = Claim(AccountKey("session", "alice", f"s{number}"), limits)
    one = hold(90, claim, number)
    assert isinstance(blind.reserve(one), Granted)
    blind.settle(one, 0, Amount(90, 0, 1))
    return claim


def used(blind: Blind, claim: Claim) -> int:
    return blind.standings([claim])[0].used.tokens


def test_sessions_without_a_limit_are_forgotten_once_there_are_many_and_those_used_longest_ago_first() -> None:
    blind = Blind()
    first, second = spent(blind, -2), spent(blind, -1)
    spent(blind, -2)
    for number in range(19_999):
        last = spent(blind, number)
    assert [used(blind, claim) for claim in (first, second, last)] == [180, 0, 90]
    spent(blind, 20_000)
    assert used(blind, first) == 0


def test_what_is_held_or_limited_is_never_forgotten() -> None:
    blind = Blind()
    limited, declared = spent(blind, -1, Limits(tokens=100)), spent(blind, -2)
    lowered = Claim(declared.key, declared=Limits(tokens=200))
    assert isinstance(blind.reserve(hold(90, lowered, -3)), Granted)
    blind.settle(hold(90, lowered), 0, Amount(10))
    under_way = hold(90, Claim(OTHER), -4)
    assert isinstance(blind.reserve(under_way), Granted)
    for number in range(20_001):
        spent(blind, number)
    assert (used(blind, limited), used(blind, lowered)) == (90, 100)
    assert isinstance(blind.reserve(hold(11, limited, -5)), Refused)
    assert blind.standings([Claim(OTHER)])[0].held == Amount(90, 0, 1)
    blind.settle(under_way, 0, Amount(7))
    assert used(blind, Claim(OTHER)) == 7


def test_a_session_that_is_used_again_is_not_forgotten_while_its_call_runs() -> None:
    blind = Blind()
    claim = spent(blind, -1)
    running = hold(90, claim, -2)
    assert isinstance(blind.reserve(running), Granted)
    for number in range(20_001):
        spent(blind, number)
    assert used(blind, claim) == 90
    blind.settle(running, 0, Amount(5))
    assert used(blind, claim) == 95
