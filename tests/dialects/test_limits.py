"""How long an answer may be and how many are asked for, as each API says it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.counting.measure import Wire
from gateway.dialects.limits import answers_asked, least_output, output_limit, service_tier, with_limit
from tests.support.timing import calls_made


def fields(**values: Any) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in values.items()}


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 7}, 7),
        ({"n": 10**400}, 1024),
        # Some servers take these for numbers, so they are held as such.
        ({"n": "9"}, 9),
        ({"n": 5.0}, 5),
        ({"n": 2.5}, 3),
        *(({"n": nonsense}, 1) for nonsense in (None, -5, 0, True, "many", [5], "nan", "inf")),
    ],
)
def test_answers_are_counted_and_nonsense_is_one(asked: dict[str, Any], number: int) -> None:
    assert answers_asked(fields(**asked), "chat") == number


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
def test_each_of_several_prompts_is_answered(prompt: object, number: int) -> None:
    assert answers_asked(fields(prompt=prompt), "completions") == answers_asked(fields(prompt=prompt), None) == number
    assert answers_asked(fields(prompt=prompt, n=3), "completions") == 3 * number
    assert answers_asked(fields(prompt=prompt), "responses") == 1


def test_prompts_without_number_are_counted_without_building_them() -> None:
    for piece in (b'"\\""', b"[15]"):
        many = {"prompt": b"[" + b",".join([piece] * 2_000_000) + b"]"}
        assert answers_asked(many, "completions") == 2_000_000
        assert calls_made(lambda many=many: answers_asked(many, "completions")) < 100  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wire", "body", "limit"),
    [
        ("chat", {"max_tokens": 10}, 10),
        ("chat", {"max_completion_tokens": 20, "max_tokens": 10}, 20),
        ("chat", {"max_completion_tokens": 16, "max_tokens": 50_000}, 50_000),
        ("responses", {"max_output_tokens": 30}, 30),
        # A field of another API is not heeded by every server: alone it bounds nothing, and it never hides the own one.
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
        (None, {"prompt": "x"}, None),
    ],
)
def test_the_limit_of_an_answer_is_the_largest_that_a_provider_may_read(
    wire: Wire | None, body: dict[str, Any], limit: int | None
) -> None:
    assert output_limit(fields(**body), wire) == limit


def test_a_service_tier_is_a_name() -> None:
    assert service_tier(fields(service_tier="flex")) == "flex"
    assert service_tier(fields(service_tier=3)) is None
    assert service_tier({}) is None


def test_anthropics_speed_is_a_tier_of_its_own() -> None:
    assert service_tier(fields(speed="fast", service_tier="auto")) == "fast"
    assert service_tier(fields(speed="standard", service_tier="auto")) == "auto"
    assert service_tier(fields(speed=1.5)) is None


def test_where_anthropic_computes_is_a_tier_of_its_own() -> None:
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
def test_a_limit_is_set_under_the_name_that_is_there_or_is_usual(
    wire: Wire, own: dict[str, Any], set_fields: dict[str, int]
) -> None:
    assert with_limit(fields(**own), wire, 50, "max_tokens") == set_fields


def test_a_provider_that_knows_another_name_gets_that() -> None:
    assert with_limit({}, "chat", 50, "max_completion_tokens") == {"max_completion_tokens": 50}
    assert with_limit({}, "responses", 50, "max_completion_tokens") == {"max_output_tokens": 50}


def thinks(budget: Any, **more: Any) -> dict[str, bytes]:
    return fields(thinking={"type": "enabled", "budget_tokens": budget, "display": "omitted"}, **more)


@pytest.mark.parametrize(
    ("wire", "own", "limit", "budget"),
    [
        ("messages", thinks(31_999, max_tokens=32_000), 6_000, 5_999),
        ("messages", thinks(6_000, max_tokens=32_000), 6_000, 5_999),
        ("messages", thinks(6_000, max_tokens=32_000), 1_025, 1_024),
        ("messages", thinks(5_000, max_tokens=32_000, max_completion_tokens=16), 5_000, 4_999),
        ("chat", thinks(31_999, max_tokens=32_000), 6_000, 5_999),
        # Nothing has to change, or nothing would help.
        ("messages", thinks(5_999, max_tokens=32_000), 6_000, None),
        ("messages", thinks(31_999, max_tokens=32_000), 1_024, None),
        ("messages", fields(thinking={"type": "adaptive"}, max_tokens=32_000), 6_000, None),
        ("messages", fields(thinking={"type": "disabled", "budget_tokens": 9_000}, max_tokens=32_000), 6_000, None),
        ("messages", thinks("many", max_tokens=32_000), 6_000, None),
        ("messages", fields(thinking=[], max_tokens=32_000), 6_000, None),
        # Thinking between calls may take more than one answer's limit.
        ("messages", thinks(40_000, max_tokens=32_000), 6_000, None),
    ],
)
def test_thinking_stays_below_a_lowered_limit(
    wire: Wire, own: dict[str, bytes], limit: int, budget: int | None
) -> None:
    changes = with_limit(own, wire, limit, "max_tokens")
    assert changes["max_tokens"] == limit
    told = {"type": "enabled", "budget_tokens": budget, "display": "omitted"} if budget is not None else None
    assert changes.get("thinking") == told


def test_an_answer_with_thinking_has_a_least_length() -> None:
    assert least_output(thinks(2_000, max_tokens=32_000), "messages") == 1_025
    assert least_output(thinks(40_000, max_tokens=32_000), "messages") == 0
    assert least_output(thinks(900, max_tokens=1_000), "messages") == 0
    assert least_output(fields(max_tokens=32_000), "messages") == 0
    assert least_output({}, "responses") == 0
