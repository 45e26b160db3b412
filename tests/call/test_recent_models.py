from __future__ import annotations

from gateway.call.recent_models import OutputRules, RecentModels
from gateway.core.routing import Route
from gateway.dialects.limit_error import NO_OUTPUT_RULE, OutputRule


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def route(number: int) -> Route:
    return Route("p", f"model-{number}")


def test_a_model_is_remembered_for_an_hour_by_provider_and_name() -> None:
    clock = Clock()
    seen = RecentModels(clock)
    seen.add(route(1))
    assert route(1) in seen
    assert route(2) not in seen
    assert Route("q", "model-1") not in seen
    clock.now = 3599.0
    assert route(1) in seen
    clock.now = 3600.0
    assert route(1) not in seen


def test_the_oldest_models_are_forgotten_above_the_limit() -> None:
    seen = RecentModels(Clock())
    for number in range(3000):
        seen.add(route(number))
    remembered = [route(number) in seen for number in range(3000)]
    assert sum(remembered) == 1024
    assert remembered[-1]
    assert not remembered[0]


def test_a_model_that_is_added_twice_counts_once() -> None:
    seen = RecentModels(Clock())
    for number in range(1024):
        seen.add(route(number))
    seen.add(route(1023))
    assert route(0) in seen


def test_rules_of_output_limits_are_remembered_for_an_hour_by_model_and_kind_of_response() -> None:
    clock, rule = Clock(), OutputRule("max_tokens", 4096)
    rules = OutputRules(clock)
    rules.remember(route(1), rule, is_stream=False)
    assert rules.of(route(1), is_stream=False) == rule
    assert rules.of(route(1), is_stream=True) == rules.of(route(2), is_stream=False) == NO_OUTPUT_RULE
    clock.now = 3600.0
    assert rules.of(route(1), is_stream=False) == NO_OUTPUT_RULE


def test_the_oldest_output_rules_are_forgotten_above_the_limit() -> None:
    rules = OutputRules(Clock())
    for number in range(3000):
        rules.remember(route(number), OutputRule(None, number), is_stream=False)
    remembered = [rules.of(route(number), is_stream=False).maximum == number for number in range(3000)]
    assert (sum(remembered), remembered[0], remembered[-1]) == (1024, False, True)
