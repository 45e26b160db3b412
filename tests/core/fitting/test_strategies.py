from __future__ import annotations

from typing import Any

from gateway.core.conversation import Conversation
from gateway.core.fitting.draft import DROP, KEEP, Draft
from gateway.core.fitting.reader import Reader, weigher
from gateway.core.fitting.strategies import DEFAULT, Condense, Dedupe, Drop, Shorten, Strategy

LINES = "".join(f"line number {n} with A{n}B{n}C{n} {'x' * 20}\n" for n in range(60))
USER = {"role": "user", "content": "task: " + LINES}
LAST = {"role": "user", "content": "on"}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def draft_of(*messages: dict[str, Any]) -> Draft:
    return Draft.untouched(Conversation.of(messages), Reader(weigher(len)))


def test_every_default_is_a_strategy_with_its_own_name() -> None:
    strategies: list[Strategy] = [Dedupe(), Condense(), Shorten(), Drop()]
    assert [strategy.name for strategy in strategies] == ["dedupe", "condense", "shorten", "drop"]
    assert tuple(strategies) == DEFAULT


def test_shorten_keeps_head_and_tail_and_stops_when_it_fits() -> None:
    draft = draft_of(said(LINES), said(LINES), said("short"), LAST)
    done = Shorten(tokens=300).apply(draft, draft.total() - 100)
    assert [decision == KEEP for decision in done.decisions] == [False, True, True, True]
    shown = str(done.messages()[0]["content"])
    assert shown.startswith("line number 0 ")
    assert shown.endswith(LINES[-40:])
    assert "[...]" in shown
    assert 200 < len(shown) < 400


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
