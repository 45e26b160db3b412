"""Output limits and the number of responses that a request asks for, in each API."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.core.counting.measure import Wire
from gateway.core.ledger.output_limit import OutputAsked
from gateway.dialects.limits import (
    default_limit,
    may_be_ignored,
    minimum_output,
    output_asked,
    output_limit,
    responses_asked,
    service_tier,
    thinking_budget,
    with_limit,
)
from tests.support.timing import count_calls


def fields(**values: Any) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in values.items()}


@pytest.mark.parametrize(
    ("requested", "number"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 7}, 7),
        ({"n": 16_000}, 16_000),
        ({"n": 10**400}, 2**53),
        # Some servers read these as numbers, so tokens are reserved accordingly.
        ({"n": "9"}, 9),
        ({"n": 5.0}, 5),
        ({"n": 2.5}, 3),
        *(({"n": nonsense}, 1) for nonsense in (None, -5, 0, True, "many", [5], "nan", "inf")),
    ],
)
def test_number_of_responses_is_read_and_invalid_values_count_as_one(requested: dict[str, Any], number: int) -> None:
    assert responses_asked(fields(**requested), "chat") == number


@pytest.mark.parametrize(
    ("prompt", "number"),
    [
        ("x", 1),
        (["x"], 1),
        (["a, b", '"', "\\", '[\\"[', ""], 5),
        ([15, 7], 1),
        ([[15, 7], [3]], 2),
        (["x", [15, 7], "y"], 3),
        ([], 1),
        (None, 1),
        ({"id": "p"}, 1),
    ],
)
def test_each_prompt_has_a_response(prompt: object, number: int) -> None:
    assert (
        responses_asked(fields(prompt=prompt), "completions") == responses_asked(fields(prompt=prompt), None) == number
    )
    assert responses_asked(fields(prompt=prompt, n=3), "completions") == 3 * number
    assert responses_asked(fields(prompt=prompt), "responses") == 1


def test_many_prompts_are_counted_without_decoding() -> None:
    for piece in (b'"\\""', b"[15]"):
        many = {"prompt": b"[" + b",".join([piece] * 2_000_000) + b"]"}
        assert responses_asked(many, "completions") == 2_000_000
        assert count_calls(lambda many=many: responses_asked(many, "completions")) < 100  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wire", "body", "limit"),
    [
        ("chat", {"max_tokens": 10}, 10),
        ("chat", {"max_completion_tokens": 20, "max_tokens": 10}, 20),
        ("chat", {"max_completion_tokens": 16, "max_tokens": 50_000}, 50_000),
        ("responses", {"max_output_tokens": 30}, 30),
        # Not every server reads a field of another API: alone it is no limit, and it never hides the API's own field.
        ("messages", {"max_tokens": 50_000, "max_completion_tokens": 16}, 50_000),
        ("responses", {"max_output_tokens": 50_000, "max_tokens": 16}, 50_000),
        ("completions", {"max_tokens": 50_000, "max_completion_tokens": 16}, 50_000),
        ("messages", {"max_tokens": 16, "max_completion_tokens": 50_000}, 50_000),
        ("messages", {"max_completion_tokens": 16}, None),
        ("chat", {"max_tokens": None}, None),
        ("chat", {"max_tokens": -1}, None),
        ("chat", {"max_tokens": 0}, None),
        ("chat", {"max_tokens": True}, None),
        ("chat", {"max_tokens": "many"}, None),
        ("chat", {"max_tokens": "10"}, 10),
        ("chat", {"max_tokens": 1.5}, 2),
        ("chat", {}, None),
        (None, {"max_output_tokens": 30, "max_completion_tokens": 16}, 30),
        # llama.cpp accepts it instead of the others.
        ("chat", {"max_tokens": 16, "n_predict": 50_000}, 50_000),
        ("chat", {"max_tokens": 50, "n_predict": "16"}, 50),
        ("chat", {"n_predict": 70}, 70),
        ("completions", {"n_predict": 70, "max_tokens": 16}, 70),
        ("completions", {"n_predict": -1, "max_tokens": 16}, 16),
        ("chat", {"n_predict": -1}, None),
        ("chat", {"n_predict": "many"}, None),
        ("messages", {"n_predict": 70}, None),
        ("messages", {"n_predict": 70, "max_tokens": 16}, 70),
        (None, {"n_predict": 70}, 70),
        (None, {"prompt": "x"}, None),
        ("messages", {"max_tokens": 16, "fallbacks": [{"model": "a", "max_tokens": 70}, {"model": "b"}, 7]}, 70),
        ("messages", {"max_tokens": 16, "fallbacks": [{"model": "a", "max_tokens": 7}]}, 16),
        ("messages", {"max_tokens": 16, "fallbacks": [{"model": "a", "max_tokens": None}]}, 16),
        ("messages", {"max_tokens": 16, "fallbacks": "default"}, 16),
        ("chat", {"max_tokens": 16, "fallbacks": [{"model": "a", "max_tokens": 70}]}, 16),
    ],
)
def test_output_limit_is_the_largest_that_a_provider_may_read(
    wire: Wire | None, body: dict[str, Any], limit: int | None
) -> None:
    assert output_limit(fields(**body), wire) == limit


def test_service_tier_is_a_string() -> None:
    assert service_tier(fields(service_tier="flex")) == "flex"
    assert service_tier(fields(service_tier=3)) is None
    assert service_tier({}) is None


def test_anthropic_speed_is_a_tier() -> None:
    assert service_tier(fields(speed="fast", service_tier="auto")) == "fast"
    assert service_tier(fields(speed="standard", service_tier="auto")) == "auto"
    assert service_tier(fields(speed=1.5)) is None


def test_anthropic_inference_geo_is_a_tier() -> None:
    assert service_tier(fields(inference_geo="us", service_tier="auto")) == "us"
    assert service_tier(fields(inference_geo="us", speed="fast")) == "fast-us"
    assert service_tier(fields(inference_geo="global", service_tier="auto")) == "auto"
    assert service_tier(fields(inference_geo=["us"])) is None


@pytest.mark.parametrize(
    ("wire", "own", "set_fields"),
    [
        ("chat", {}, {"max_tokens": 50}),
        ("chat", {"max_tokens": None}, {"max_tokens": 50}),
        ("chat", {"max_completion_tokens": 900}, {"max_completion_tokens": 50}),
        ("chat", {"max_tokens": 900, "max_completion_tokens": 20}, {"max_completion_tokens": 20, "max_tokens": 50}),
        ("chat", {"max_tokens": "many"}, {"max_tokens": 50}),
        ("chat", {"max_tokens": -1}, {"max_tokens": 50}),
        ("chat", {"max_tokens": True}, {"max_tokens": 50}),
        ("chat", {"max_tokens": "900"}, {"max_tokens": 50}),
        ("chat", {"max_output_tokens": 900}, {"max_output_tokens": 50, "max_tokens": 50}),
        ("messages", {"max_tokens": 900, "max_completion_tokens": 16}, {"max_completion_tokens": 16, "max_tokens": 50}),
        ("responses", {}, {"max_output_tokens": 50}),
        ("messages", {"max_tokens": 80}, {"max_tokens": 50}),
        ("completions", {}, {"max_tokens": 50}),
    ],
)
def test_limit_is_set_under_the_given_or_the_usual_name(
    wire: Wire, own: dict[str, Any], set_fields: dict[str, int]
) -> None:
    assert with_limit(fields(**own), wire, 50, "max_tokens") == set_fields


def test_the_limit_of_each_fallback_is_lowered_too() -> None:
    listed: list[dict[str, Any]] = [
        {"model": "a", "max_tokens": 900, "speed": "fast"},
        {"model": "b"},
        {"model": "c", "max_tokens": 20},
    ]
    own = fields(max_tokens=80, fallbacks=listed)
    lowered = [{**listed[0], "max_tokens": 50}, *listed[1:]]
    assert with_limit(own, "messages", 50, "max_tokens") == {"max_tokens": 50, "fallbacks": lowered}
    assert with_limit(own, "messages", 900, "max_tokens") == {"max_tokens": 80}
    thinking = {"type": "enabled", "budget_tokens": 4_000}
    changes = with_limit(fields(max_tokens=8_000, thinking=thinking, fallbacks=[{"max_tokens": 64_000}]), "messages", 4_000, "max_tokens")  # fmt: skip
    assert changes["thinking"] == {**thinking, "budget_tokens": 2_000}, "a share of the requested's own limit"


def test_provider_gets_the_name_that_it_knows() -> None:
    assert with_limit({}, "chat", 50, "max_completion_tokens") == {"max_completion_tokens": 50}
    assert with_limit({}, "responses", 50, "max_completion_tokens") == {"max_output_tokens": 50}


@pytest.mark.parametrize(
    ("wire", "usual", "own", "set_fields"),
    [
        # The name that the provider may not know is replaced by the one that it knows.
        ("chat", "max_tokens", {"max_completion_tokens": 900}, {"max_completion_tokens": msgspec.UNSET, "max_tokens": 50}),
        ("chat", "max_tokens", {"max_tokens": 90, "max_completion_tokens": 20},
         {"max_completion_tokens": 20, "max_tokens": 50}),
        ("chat", "max_completion_tokens", {"max_tokens": 900}, {"max_tokens": 50}),
        ("chat", "max_completion_tokens", {"max_completion_tokens": 900}, {"max_completion_tokens": 50}),
        ("chat", "max_tokens", {"n_predict": 90}, {"n_predict": 50, "max_tokens": 50}),
        ("chat", "max_tokens", {"n_predict": -1, "max_tokens": 20}, {"n_predict": 50, "max_tokens": 20}),
        ("chat", "max_completion_tokens", {"n_predict": 90}, {"n_predict": 50, "max_completion_tokens": 50}),
        ("completions", "max_tokens", {"n_predict": 90}, {"n_predict": 50, "max_tokens": 50}),
        ("responses", "max_tokens", {"max_tokens": 90}, {"max_tokens": 50, "max_output_tokens": 50}),
        ("messages", "max_completion_tokens", {"max_tokens": 90}, {"max_tokens": 50}),
    ],
)  # fmt: skip
def test_reserved_limit_has_a_name_that_the_provider_knows(
    wire: Wire, usual: str, own: dict[str, Any], set_fields: dict[str, Any]
) -> None:
    assert with_limit(fields(**own), wire, 50, usual, is_held=True) == set_fields


@pytest.mark.parametrize(
    ("wire", "usual", "own", "loose"),
    [
        ("chat", "max_tokens", {"max_completion_tokens": 9}, True),
        ("chat", "max_tokens", {"max_tokens": 9}, False),
        ("chat", "max_tokens", {"max_tokens": 9, "max_completion_tokens": 9}, False),
        ("chat", "max_completion_tokens", {"max_completion_tokens": 9}, False),
        ("chat", "max_completion_tokens", {"max_tokens": 9}, False),
        ("chat", "max_completion_tokens", {"n_predict": 9}, True),
        ("chat", "max_tokens", {"max_tokens": 9, "n_predict": 9}, False),
        ("chat", "max_tokens", {"max_tokens": 9, "n_predict": -1}, True),
        ("chat", "max_tokens", {"max_tokens": 9, "n_predict": None}, False),
        ("chat", "max_completion_tokens", {"max_tokens": -1, "max_completion_tokens": 9}, True),
        ("chat", "max_tokens", {}, False),
        ("completions", "max_tokens", {}, True),
        ("completions", "max_tokens", {"max_tokens": 9}, False),
        ("completions", "max_tokens", {"n_predict": 9}, True),
        ("messages", "max_tokens", {"max_tokens": 9}, False),
        ("responses", "max_tokens", {"max_output_tokens": 9}, False),
    ],
)  # fmt: skip
def test_limit_that_a_server_may_ignore_is_reported(
    wire: Wire, usual: str, own: dict[str, Any], *, loose: bool
) -> None:
    assert may_be_ignored(fields(**own), wire, usual) is loose


def test_completion_without_limit_has_the_api_default() -> None:
    assert default_limit({}, "completions") == default_limit(fields(max_tokens=None), "completions") == 16
    assert default_limit(fields(max_tokens=-1), "completions") is None, "as much as there can be, it says"
    assert default_limit({}, "chat") is None
    assert default_limit({}, None) is None


def thinks(budget: Any, **more: Any) -> dict[str, bytes]:
    return fields(thinking={"type": "enabled", "budget_tokens": budget, "display": "omitted"}, **more)


@pytest.mark.parametrize(
    ("wire", "own", "limit", "budget"),
    [
        ("messages", thinks(16_000, max_tokens=32_000), 6_000, 3_000),
        ("messages", thinks(10_000, max_tokens=16_000), 5_056, 3_160),
        ("messages", thinks(16_000, max_tokens=32_000, max_completion_tokens=16), 6_000, 3_000),
        ("chat", thinks(16_000, max_tokens=32_000), 6_000, 3_000),
        # Tokens remain for the text, and the provider accepts no smaller budget.
        ("messages", thinks(31_999, max_tokens=32_000), 6_000, 5_984),
        ("messages", thinks(2_000, max_tokens=32_000), 6_000, 1_024),
        ("messages", thinks(6_000, max_tokens=32_000), 1_040, 1_024),
        ("messages", thinks(6_000, max_tokens=32_000), 1_025, 1_024),
        # No change is needed, or no change would help.
        ("messages", thinks(31_999, max_tokens=32_000), 32_000, None),
        ("messages", thinks(1_024, max_tokens=32_000), 6_000, None),
        ("messages", thinks(31_999, max_tokens=32_000), 1_024, None),
        ("messages", fields(thinking={"type": "adaptive"}, max_tokens=32_000), 6_000, None),
        ("messages", fields(thinking={"type": "disabled", "budget_tokens": 9_000}, max_tokens=32_000), 6_000, None),
        ("messages", thinks("many", max_tokens=32_000), 6_000, None),
        ("messages", fields(thinking=[], max_tokens=32_000), 6_000, None),
        # Thinking between tool calls may exceed the output limit.
        ("messages", thinks(40_000, max_tokens=32_000), 6_000, None),
    ],
)
def test_thinking_keeps_its_share_of_a_lowered_limit(
    wire: Wire, own: dict[str, bytes], limit: int, budget: int | None
) -> None:
    changes = with_limit(own, wire, limit, "max_tokens")
    assert changes["max_tokens"] == limit
    expected = {"type": "enabled", "budget_tokens": budget, "display": "omitted"} if budget is not None else None
    assert changes.get("thinking") == expected


@pytest.mark.parametrize(
    ("requested", "limit", "budget"),
    [(4_096, 8_192, 4_096), (4_096, 8_190, 4_095), (4_096, 1_500, 1_024), (1_024, 1_040, 1_024), (1_024, 1_039, None)],
)
def test_thinking_for_an_effort_has_at_most_half_of_the_limit(requested: int, limit: int, budget: int | None) -> None:
    assert thinking_budget(requested, limit) == budget


def test_thinking_without_output_limit_leaves_tokens_for_text() -> None:
    for requested, limit, budget in ((5_000, 6_000, None), (9_000, 6_000, 5_984)):
        changes = with_limit(thinks(requested), "chat", limit, "max_tokens")
        expected: Any = changes.get("thinking")
        assert (expected["budget_tokens"] if expected else None) == budget


@pytest.mark.parametrize(
    ("requested", "more", "limit", "budget"),
    [
        (16_000, {"max_tokens": 32_000}, 6_000, 3_000),
        (31_999, {"max_tokens": 32_000}, 6_000, 5_984),
        (2_000, {"max_completion_tokens": 32_000}, 6_000, 1_024),
        (9_000, {}, 6_000, 5_984),
        # Both fit, or the provider refuses the unchanged value.
        (500, {"max_tokens": 32_000}, 6_000, None),
        (31_999, {"max_tokens": 32_000}, 32_000, None),
        (40_000, {"max_tokens": 32_000}, 6_000, None),
        (True, {"max_tokens": 32_000}, 6_000, None),
        ("many", {"max_tokens": 32_000}, 6_000, None),
    ],
)
def test_openrouter_reasoning_stays_below_a_lowered_limit(
    requested: Any, more: dict[str, int], limit: int, budget: int | None
) -> None:
    own = fields(reasoning={"max_tokens": requested, "exclude": True}, **more)
    expected = {"max_tokens": budget, "exclude": True} if budget is not None else None
    assert with_limit(own, "chat", limit, "max_tokens").get("reasoning") == expected


def test_reasoning_without_budget_is_unchanged() -> None:
    for said in ({"enabled": False, "max_tokens": 9_000}, {"effort": "high"}, "much", None):
        own = fields(reasoning=said, max_tokens=32_000)
        assert "reasoning" not in with_limit(own, "chat", 6_000, "max_tokens")
        assert minimum_output(own, "chat") == 0


@pytest.mark.parametrize(
    ("least", "own", "limit", "expected"),
    [(300, 900, 200, 200), ("300", 900, 200, 200), (300, None, 200, 200), (300, 900, 300, None), (300, 900, 900, None)],
)
def test_minimum_length_is_at_most_a_lowered_limit(
    least: object, own: int | None, limit: int, expected: int | None
) -> None:
    assert (
        with_limit(fields(min_tokens=least, max_tokens=own), "chat", limit, "max_tokens").get("min_tokens") == expected
    )


def test_response_with_thinking_has_a_minimum_limit() -> None:
    assert minimum_output(thinks(2_000, max_tokens=32_000), "messages") == 1_040
    assert minimum_output(thinks(40_000, max_tokens=32_000), "messages") == 0
    assert minimum_output(thinks(900, max_tokens=1_000), "messages") == 0
    assert minimum_output(fields(max_tokens=32_000), "messages") == 0
    assert minimum_output({}, "responses") == 0
    assert minimum_output(fields(reasoning={"max_tokens": 2_000}, max_tokens=32_000), "chat") == 1_040
    assert minimum_output(fields(reasoning={"max_tokens": 500}, max_tokens=32_000), "chat") == 516
    assert minimum_output(fields(min_tokens=500, max_tokens=32_000), "chat") == 0, "it can be lowered"


def test_what_is_asked_of_the_output_is_read_at_once() -> None:
    assert output_asked(fields(prompt="x"), "completions") == OutputAsked(default=16)
    assert output_asked(fields(max_tokens=0), "messages").is_none
    assert output_asked(thinks(2_000, max_tokens=32_000), "messages") == OutputAsked(32_000, least=1_040)
    assert output_asked(fields(max_tokens=50), None) == OutputAsked(50, least=50), "the gateway cannot lower it"
