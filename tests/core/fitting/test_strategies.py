from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, KEEP, Draft
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.strategies import DEFAULT, Condense, Dedupe, Drop, Shorten, Strategy, strategies_of
from gateway.core.fitting.worth import Worth

LINES = "".join(f"line number {n} with A{n}B{n}C{n} {'x' * 20}\n" for n in range(60))
USER = {"role": "user", "content": "task: " + LINES}
LAST = {"role": "user", "content": "on"}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def draft_of(*messages: dict[str, Any]) -> Draft:
    return Draft.untouched(Conversation.of_messages(messages), Reader(weigher(len)))


def test_every_default_is_a_strategy_with_its_own_name() -> None:
    strategies: list[Strategy] = [Dedupe(), Condense(), Shorten(), Drop()]
    assert [strategy.name for strategy in strategies] == ["dedupe", "condense", "shorten", "drop"]
    assert tuple(strategies) == DEFAULT


def test_shorten_keeps_head_and_tail_and_stops_when_it_fits() -> None:
    draft = draft_of(said(LINES), said(LINES), said("short"), LAST)
    done = Shorten(tokens=300).apply(draft, draft.total() - 100)
    assert [decision == KEEP for decision in done.decisions] == [False, True, True, True]
    shown = str(json.loads(done.sent().messages[0])["content"])
    assert shown.startswith("line number 0 ")
    assert shown.endswith(LINES[-40:])
    assert "[...]" in shown
    assert 200 < len(shown) < 400


def test_shorten_leaves_what_is_long_in_its_calls() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 200})}}
    caller = {"role": "assistant", "content": "Look.", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "a", "content": "seen"}
    done = Shorten(tokens=50).apply(draft_of(USER, caller, answer, LAST), 0)
    assert json.loads(done.made(1).raw or b"") == caller


def test_drop_leaves_out_the_oldest_units_but_not_the_task() -> None:
    draft = draft_of(USER, said("one" * 50), said("two" * 50), said("three"), LAST)
    done = Drop().apply(draft, draft.total() - 10)
    assert done.decisions == (KEEP, DROP, KEEP, KEEP, KEEP)


def test_drop_cuts_the_task_last_and_as_little_as_needed() -> None:
    draft = draft_of(USER, said("one"), LAST)
    assert Drop().apply(draft, 200).decisions == ((0,), DROP, KEEP)
    assert Drop().apply(draft, 40).decisions == ((), DROP, KEEP)


def test_a_sealed_task_is_not_cut() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 500}}]}
    assert Drop().apply(draft_of(image, said("one"), LAST), 100).decisions == (KEEP, DROP, KEEP)


def test_condense_drops_unread_what_is_too_much_to_read() -> None:
    draft = draft_of(USER, *(said(LINES) for _ in range(6)), LAST)
    done = Condense(most_characters=7000).apply(draft, 2000)
    assert done.decisions[1:5] == (DROP,) * 4
    assert done.total() <= 2000


def test_strategies_come_by_name_in_the_order_of_the_configuration() -> None:
    worth = Worth(word=0.5)
    found = strategies_of(["shorten", "condense", "drop"], shorten_tokens=50, worth=worth)
    assert found == (Shorten(50), Condense(worth), Drop())
    assert strategies_of([], shorten_tokens=50) == ()


def test_an_unknown_strategy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'shrink' is no strategy; there are dedupe, condense, shorten, drop"):
        strategies_of(["dedupe", "shrink"], shorten_tokens=50)


def test_what_pointed_at_a_result_that_is_left_out_points_at_nothing() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    unit: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": LINES},
    ]
    again = [{**unit[0], "tool_calls": [{**call, "id": "b"}]}, {**unit[1], "tool_call_id": "b"}]
    draft = Dedupe().apply(draft_of(USER, *unit, *again, LAST), 0)
    done = Drop().apply(draft, draft.total() - 10)
    assert done.decisions == (KEEP, DROP, DROP, KEEP, (), KEEP)
    assert done.total() <= draft.total() - 10


def test_drop_and_shorten_begin_with_what_is_worth_least() -> None:
    messages = [USER, said(LINES), said(LINES), LAST]
    conversation = Conversation.of_messages(messages, priorities={0: 3.0, 1: 2.0})
    draft = Draft.untouched(conversation, Reader(weigher(len)))
    assert Drop().apply(draft, draft.total() - 10).decisions == (KEEP, KEEP, DROP, KEEP)
    assert [d == KEEP for d in Shorten().apply(draft, draft.total() - 10).decisions] == [True, True, False, True]
