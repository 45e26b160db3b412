"""Test how the library renders tool results."""

from __future__ import annotations

import json

import pytest

from gateway import BudgetManager, RenderedResult, ResponseMode, render_result
from gateway.core.modes import show
from gateway.core.modes.handle import ends_with_handle

ROWS = json.dumps([{"id": n, "title": f"Issue number {n}", "status": "open"} for n in range(60)])
TEXT = "".join(f"Step {n} of the plan is to visit place_{n} and to write down what is found.\n" for n in range(80))


def test_result_is_rendered_by_what_is_left_of_the_budget() -> None:
    full_texts: dict[str, str] = {}
    budget = BudgetManager(1_000, full_texts=full_texts)
    modes = []
    for used in (0, 600, 300, 90):
        budget.record_usage(used)
        modes.append(budget.render(TEXT).mode)
    assert modes == ["raw", "raw", "summary", "handle_only"]
    assert list(full_texts.values()) == [TEXT]
    assert (budget.used, budget.held) == (990, 0)


@pytest.mark.parametrize("mode", ["summary", "handle_only"])
@pytest.mark.parametrize("result", [ROWS, TEXT, TEXT + "\ud800"])
def test_shortened_result_names_the_handle_of_its_full_text(result: str, mode: ResponseMode) -> None:
    full_texts: dict[str, str] = {}
    rendered = render_result(result, mode, full_texts)
    assert rendered.handle is not None
    assert full_texts == {rendered.handle: result}
    assert rendered.mode == mode
    assert len(rendered.text) < len(result) / 2
    assert rendered.text.endswith(f"characters; full text: handle {rendered.handle}]")
    assert "/api/" not in rendered.text


def test_shortened_result_is_not_shortened_again() -> None:
    full_texts: dict[str, str] = {}
    rendered = render_result(TEXT, "summary", full_texts)
    assert len(rendered.text) > 300
    assert render_result(rendered.text, "handle_only", full_texts) == RenderedResult(rendered.text)
    # The gateway leaves it unchanged too, so that its handle stays valid.
    raw = json.dumps({"role": "tool", "content": rendered.text}).encode()
    assert ends_with_handle(rendered.text)
    assert show(raw, "handle_only", lambda _: "tr_1") is None


@pytest.mark.parametrize("mode", ["table", "summary", "handle_only"])
def test_without_a_place_for_full_texts_nothing_is_left_out(mode: ResponseMode) -> None:
    rendered = render_result(ROWS, mode)
    assert (rendered.mode, rendered.handle) == ("table", None)
    assert all(f"Issue number {n}|" in rendered.text for n in range(60))
    assert render_result(TEXT, mode) == RenderedResult(TEXT)


@pytest.mark.parametrize("result", ["", "short", "x" * 300])
def test_short_result_is_unchanged(result: str) -> None:
    assert render_result(result, "handle_only", {}) == RenderedResult(result)
