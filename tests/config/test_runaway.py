"""Settings of runaway protection: defaults, and errors that name the key."""

from __future__ import annotations

import pytest

from gateway.config.policies import runaway_policy
from gateway.core.runaway import RunawayPolicy, Thresholds
from tests.config.conftest import Load, Problems


def test_by_default_agents_are_only_warned(loaded: Load) -> None:
    assert runaway_policy(loaded().settings) == RunawayPolicy(
        Thresholds(4, None), Thresholds(8, None), Thresholds(200, None), warn_share=0.8
    )


def test_a_limit_for_refusals_keeps_the_default_warning(loaded: Load) -> None:
    policy = runaway_policy(loaded("runaway: {loop: {refuse: 6}, rounds: {warn: null}}").settings)
    assert (policy.loop, policy.rounds) == (Thresholds(4, 6), Thresholds(None, None))


def test_limits_in_seconds_are_those_of_the_budget_and_the_steps(loaded: Load) -> None:
    text = "budget: {seconds: 600, warn_at: 0.5}\nsteps: [{name: a, max_seconds: 60, is_default: true}]"
    policy = runaway_policy(loaded(text).settings)
    assert (policy.seconds, policy.has_step_seconds, policy.step_seconds(60)) == (
        Thresholds(300, 600), True, Thresholds(30, 60),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("runaway: {loop: {warn: 1}}", "runaway.loop.warn: "),
        ("runaway: {rounds: {refuse: many}}", "runaway.rounds.refuse: "),
        ("runaway: {turns: {warn: 3}}", "runaway.turns: "),
        ("budget: {seconds: 0}", "budget.seconds: "),
        ("steps: [{name: a, max_seconds: -1, is_default: true}]", "steps[0].max_seconds: "),
    ],
)
def test_errors_name_the_key(problems: Problems, text: str, problem: str) -> None:
    [found] = problems(text)
    assert found.startswith(problem)
