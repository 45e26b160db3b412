"""Billing of refused requests: an attempt is billed if it has output, or if its category is billed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from gateway.core.usage import Usage
from gateway.dialects.base import ParsedResponse
from gateway.dialects.refusals import without_free_attempts
from gateway.dialects.reported import UsageReader

BILLED = ("bio", "frontier_llm", "reasoning_extraction")
FABLE, OPUS = "claude-fable-5", "claude-opus-4-8"


def answer(usage: dict[str, Any] | None, reason: str = "refusal", **fields: Any) -> ParsedResponse:
    reader = UsageReader()
    reader.add(usage)
    return ParsedResponse(reader.reported(), finish_reason=reason, **fields)


def billed_usage(of: ParsedResponse, categories: Collection[str] = BILLED) -> Usage:
    billed, _ = without_free_attempts(of, categories)
    assert billed.usage is not None
    return billed.usage.complete(99, 99)[0]


def attempt(model: str, tokens: int, output: int, kind: str = "message") -> dict[str, Any]:
    return {"type": kind, "model": model, "input_tokens": tokens, "output_tokens": output}


WHOLE = {"input_tokens": 400, "output_tokens": 0, "cache_read_input_tokens": 12}


@pytest.mark.parametrize("category", [None, "cyber", "general_harms", "one of next year"])
def test_a_refusal_before_any_output_is_not_billed(category: str | None) -> None:
    refused = answer(WHOLE, refusal=category)
    assert billed_usage(refused) == Usage()
    assert (
        without_free_attempts(refused, BILLED)[1]
        == f"refused before any output ({category or 'no category'}): 412 input tokens"
    )


@pytest.mark.parametrize("category", BILLED)
def test_a_refusal_of_a_billed_category_is_billed(category: str) -> None:
    refused = answer(WHOLE, refusal=category)
    assert without_free_attempts(refused, BILLED) == (refused, None)
    assert without_free_attempts(refused, ())[1] is not None, "which categories are billed is the provider's to say"


@pytest.mark.parametrize(
    "billed",
    [
        answer({**WHOLE, "output_tokens": 1}),
        answer(WHOLE, "end_turn"),
        answer({"input_tokens": 400}, output_estimate=3),
        answer({"input_tokens": 400, "iterations": [attempt(FABLE, 400, 7)]}),
        answer({"input_tokens": 4, "output_tokens": 0, "iterations": [attempt(FABLE, 4, 0)]}, "max_tokens"),
    ],
    ids=["output", "no refusal", "delivered text", "an attempt with output", "nothing was asked for"],
)
def test_other_responses_are_billed_as_reported(billed: ParsedResponse) -> None:
    assert without_free_attempts(billed, BILLED) == (billed, None)


@pytest.mark.parametrize("usage", [None, {"input_tokens": 400}])
def test_a_refusal_that_reports_no_output_and_delivered_none_is_not_billed(usage: dict[str, Any] | None) -> None:
    assert billed_usage(answer(usage)) == Usage()


SERVED = {
    "input_tokens": 450,
    "output_tokens": 20,
    "iterations": [attempt(FABLE, 400, 0), attempt(OPUS, 450, 20, "fallback_message")],
}


def test_attempt_without_output_before_a_fallback_is_not_billed() -> None:
    served = answer(SERVED, "end_turn")
    billed, note = without_free_attempts(served, BILLED)
    assert billed.usage is not None
    assert billed_usage(served) == Usage(450, 20, 470)
    assert billed.usage.by_model == ((FABLE, Usage()), (OPUS, Usage(450, 20, 470)))
    assert billed.usage.request_tokens == 0, "of the model that was asked nothing is left to learn from"
    assert note == "claude-fable-5 refused before any output (no category): 400 input tokens"


@pytest.mark.parametrize(("category", "tokens"), [("cyber", 450), ("bio", 850)])
def test_the_category_of_an_attempt_is_that_of_its_fallback_block(category: str, tokens: int) -> None:
    served = answer(SERVED, "end_turn", fallback_refusals=(category,))
    assert billed_usage(served).input_tokens == tokens


def test_an_attempt_that_was_refused_in_the_middle_is_billed() -> None:
    served = {**SERVED, "iterations": [attempt(FABLE, 400, 5), attempt(OPUS, 450, 20, "fallback_message")]}
    assert billed_usage(answer(served, "end_turn")) == Usage(850, 25, 875)


def test_each_refused_attempt_is_judged_by_its_own_category() -> None:
    passes = [attempt(FABLE, 400, 0), attempt("claude-opus-5", 500, 0), attempt(OPUS, 450, 0)]
    refused = {"input_tokens": 450, "output_tokens": 0, "iterations": passes}
    for declined, last, tokens in (
        ((), None, 0),
        (("bio", "cyber"), "cyber", 400),
        (("cyber", "bio"), "bio", 950),
        (("bio", "bio"), "bio", 1_350),
    ):
        assert billed_usage(answer(refused, fallback_refusals=declined, refusal=last)).input_tokens == tokens


def test_passes_of_one_model_are_one_attempt_and_other_passes_stay_billed() -> None:
    passes = [
        {"type": "compaction", "input_tokens": 1_000, "output_tokens": 50},
        attempt(FABLE, 400, 5),
        attempt(FABLE, 410, 0),
        attempt("advisor", 30, 3, "advisor_message"),
    ]
    refused = {"input_tokens": 410, "output_tokens": 0, "iterations": passes}
    assert billed_usage(answer(refused)) == Usage(1_840, 58, 1_898), "the model had produced output before"
    passes[1:3] = [attempt(FABLE, 400, 0)]
    assert billed_usage(answer(refused)) == Usage(1_030, 53, 1_083)


def test_a_web_search_stays_billed() -> None:
    searched = {**WHOLE, "server_tool_use": {"web_search_requests": 2}}
    billed, _ = without_free_attempts(answer(searched), BILLED)
    assert billed.usage is not None
    assert billed.usage.searches == 2
