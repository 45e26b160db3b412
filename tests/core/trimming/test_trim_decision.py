from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, SUMMARIZED, Draft, DuplicateResult, SummaryEntry
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.trim_decision import DecisionDetails, TrimDecision, format_spans


def draft_with(*decisions: Any, recalls: Any = None, rules: Any = None) -> Draft:
    messages = [{"role": "user", "content": "x"} for _ in decisions]
    draft = Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))
    return replace(draft, decisions=decisions, recalls=recalls or {}, rules=rules or {})


def test_a_trim_decision_survives_json() -> None:
    decisions = (KEEP, KEEP, DROP, (0, 1, 2, 7), (), DuplicateResult(3), DuplicateResult(3), (4,), KEEP)
    rules = {3: "condense", 4: "shorten", 7: "mine"}
    recalls = {8: ((2, (0, 4)), (3, (1,)))}
    trim_decision = TrimDecision.of("ab", draft_with(*decisions, recalls=recalls, rules=rules))
    assert trim_decision.plan == "k2 d1 c0-2,7 s =3 =3 mine:4 k1 8<2:0,4;3:1"
    again = TrimDecision.from_json(json.loads(json.dumps(trim_decision.to_json())))
    assert again == trim_decision
    assert again.read() == DecisionDetails(decisions, recalls, rules)


def test_a_trim_decision_is_small() -> None:
    trim_decision = TrimDecision.of(
        "ab",
        draft_with(*[KEEP] * 100, *[DROP] * 200, *[tuple(range(50))] * 20, rules=dict.fromkeys(range(400), "condense")),
    )
    assert len(json.dumps(trim_decision.to_json())) < 250


@pytest.mark.parametrize(
    "value", [None, 7, [], {}, {"v": 1}, {"v": 2}, {"v": 2, "prefix": "x", "size": "1", "plan": "k1"}]
)
def test_other_json_values_are_no_trim_decision(value: Any) -> None:
    assert TrimDecision.from_json(value) is None


@pytest.mark.parametrize(
    "plan",
    [
        "",
        "k1",
        "k3",
        "k2 k2 k2",
        "k0 k2",
        "k-1",
        "kx",
        "z1 k1",
        "c- k1",
        "ca-b k1",
        "=x k1",
        "k2 1<x",
        "c0-90000000 k1",
        "c0-900000 c0-900000",
    ],
)
def test_an_invalid_plan_raises_an_error(plan: str) -> None:
    with pytest.raises(ValueError):
        TrimDecision("x", 2, plan).read()


@pytest.mark.parametrize(("numbers", "spans"), [((), ""), ((0,), "0"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")])
def test_spans_are_parsed_to_the_same_numbers(numbers: tuple[int, ...], spans: str) -> None:
    assert format_spans(numbers) == spans
    assert TrimDecision("x", 1, f"c{spans}").read().decisions == (numbers,)


def test_a_summary_is_written_by_its_id_and_read_with_its_text() -> None:
    decisions = (KEEP, SummaryEntry("s1", 4, "what happened"), SUMMARIZED, KEEP, SUMMARIZED, SUMMARIZED, KEEP)
    trim_decision = TrimDecision.of("ab", draft_with(*decisions))
    assert (trim_decision.plan, trim_decision.summary) == ("k1 ~ m1 k1 m2 k1", "s1")
    written = json.dumps(trim_decision.to_json())
    assert "what happened" not in written
    again = TrimDecision.from_json(json.loads(written))
    assert again == trim_decision
    assert again.read({"s1": "what happened"}).decisions == decisions
    with pytest.raises(ValueError):
        again.read({"s2": "something else"})


@pytest.mark.parametrize("plan", ["k4", "m4", "~ ~ k2", "k1 m1 ~ k1", "~1 k3", "~ m-1 k3", "~ m4"])
def test_a_summary_is_unique_and_precedes_the_summarized_messages(plan: str) -> None:
    with pytest.raises(ValueError):
        TrimDecision("x", 4, plan, "s1").read({"s1": "text"})


def test_summarized_messages_need_a_summary() -> None:
    for plan in ("~ m1 k2", "k1 m3"):
        with pytest.raises(ValueError):
            TrimDecision("x", 4, plan).read({"s1": "text"})


def test_a_summary_id_must_be_a_string() -> None:
    assert TrimDecision.from_json({"v": 2, "prefix": "x", "size": 1, "plan": "k1", "summary": ["s1"]}) is None
