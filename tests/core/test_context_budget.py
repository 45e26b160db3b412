from __future__ import annotations

from typing import Any

import pytest

from gateway.core.context_budget import (
    ContextOptions,
    ContextPolicy,
    LengthLimit,
    SummaryModel,
    budget_of,
    with_call_limits,
)
from gateway.core.routing import ModelFacts, Route


@pytest.mark.parametrize(
    ("policy", "facts", "options", "learned", "budget"),
    [
        ({}, {}, {}, None, None),
        ({}, {"window": 128_000}, {}, None, 128_000 - 4096),
        ({}, {"window": 8_000}, {}, None, 7_200),
        ({}, {"window": 8_000}, {"output": 3_000}, None, 5_000),
        ({}, {"window": 8_000, "output": 1_000}, {"output": 3_000}, None, 7_000),
        ({}, {"window": 8_000, "output": 3_000}, {"output": 1_000}, None, 7_000),
        ({}, {"window": 8_000}, {"output": 1_000_000}, None, 4_000),
        ({"reserve_tokens": 500}, {"window": 8_000}, {"output": 3_000}, None, 7_500),
        ({"reserve_tokens": 9_000}, {"window": 8_000}, {}, None, 1),
        ({"budget": 3_000}, {"window": 8_000}, {}, None, 3_000),
        ({"budget": 9_000}, {"window": 8_000}, {}, None, 7_200),
        ({"budget": 3_000}, {}, {"budget": 2_000}, None, 2_000),
        ({"budget": 3_000}, {}, {"budget": 4_000}, None, 3_000),
        ({}, {}, {}, LengthLimit(4_000), 3_600),
        ({}, {"window": 8_000}, {}, LengthLimit(4_000), 3_600),
        ({}, {"window": 4_000}, {}, LengthLimit(8_000), 3_600),
        ({}, {"window": 400_000, "input": 272_000, "output": 128_000}, {"output": 128_000}, None, 272_000),
        ({}, {"window": 400_000, "input": 272_000}, {}, None, 272_000),
        ({}, {"window": 400_000, "input": 272_000}, {"output": 190_000}, None, 210_000),
        ({"reserve_tokens": 200_000}, {"window": 400_000, "input": 272_000}, {}, None, 200_000),
        ({"budget": 9_000}, {"input": 8_000}, {}, None, 8_000),
        ({}, {"input": 8_000}, {"output": 4_000}, LengthLimit(6_000, of_input=True), 6_000),
        ({}, {"input": 8_000}, {}, LengthLimit(9_000, of_input=True), 8_000),
        ({}, {"window": 8_000}, {"output": 3_000}, LengthLimit(6_000, of_input=True), 5_000),
        ({}, {"window": 8_000, "input": 3_500}, {"output": 3_000}, LengthLimit(6_000), 3_000),
    ],
)
def test_context_budget_is_the_smallest_limit(
    policy: dict[str, Any],
    facts: dict[str, Any],
    options: dict[str, Any],
    learned: LengthLimit | None,
    budget: int | None,
) -> None:
    asked = ContextOptions(**options)
    assert budget_of(ContextPolicy(**policy), with_call_limits(ModelFacts(**facts), asked, learned), asked) == budget


@pytest.mark.parametrize(
    ("betas", "window"),
    [
        ((), 200_000),
        (("other-1",), 200_000),
        (("other-1", "wide-1"), 1_000_000),
        (("wide-1", "wider-1"), 2_000_000),
        (("small-1",), 200_000),
    ],
)
def test_beta_header_enlarges_the_window(betas: tuple[str, ...], window: int) -> None:
    facts = ModelFacts(window=200_000, betas={"wide-1": 1_000_000, "wider-1": 2_000_000, "small-1": 100_000})
    options = ContextOptions(betas=frozenset(betas))
    assert with_call_limits(facts, options, None).window == window
    assert with_call_limits(facts, options, LengthLimit(150_000)).window == 150_000
    assert with_call_limits(ModelFacts(window=5), options, None).window == 5


def test_summary_request_leaves_room_for_its_output() -> None:
    route = Route("p", "m")
    known, unknown = (SummaryModel("s", route, ModelFacts(window=window), 1_000) for window in (11_000, None))
    assert (known.room, unknown.room) == (9_000, 27_900)
    limited = SummaryModel("s", route, ModelFacts(window=11_000, input=5_000), 1_000)
    assert limited.room == 4_500
