from __future__ import annotations

from gateway.core.routing import Route
from gateway.refusals import Refusals


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def route(number: int) -> Route:
    return Route("p", f"model-{number}")


def test_a_refusal_is_remembered_for_an_hour_by_provider_and_model() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.add(route(1))
    assert route(1) in refusals
    assert route(2) not in refusals
    assert Route("q", "model-1") not in refusals
    clock.now = 3599.0
    assert route(1) in refusals
    clock.now = 3600.0
    assert route(1) not in refusals


def test_the_memory_of_refusals_is_bounded_and_the_oldest_give_way() -> None:
    refusals = Refusals(Clock())
    for number in range(3000):
        refusals.add(route(number))
    remembered = [route(number) in refusals for number in range(3000)]
    assert sum(remembered) == 1024
    assert remembered[-1]
    assert not remembered[0]


def test_one_that_is_refused_again_takes_no_second_place() -> None:
    refusals = Refusals(Clock())
    for number in range(1024):
        refusals.add(route(number))
    refusals.add(route(1023))
    assert route(0) in refusals
