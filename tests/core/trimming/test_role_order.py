from __future__ import annotations

from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, SUMMARIZED, Decision, Draft, SummaryEntry
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.role_order import restore_role_order

LONG = "words of it " * 20


def draft_of(roles: str, *, takes_turns: bool = True, **fields: Any) -> Draft:
    """Return a draft: `u` is a user text, `a` an assistant text, `s` a system text, `c` a call with its result."""
    messages: list[dict[str, Any]] = []
    names = {"u": "user", "a": "assistant", "s": "system"}
    for number, letter in enumerate(roles):
        if letter == "c":
            call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": LONG})
        else:
            messages.append({"role": names[letter], "content": LONG, **fields})
    conversation = Conversation.of_messages(messages)
    conversation = Conversation(
        conversation.messages, conversation.keys, conversation.marked, needs_alternating_roles=takes_turns
    )
    return Draft.untouched(conversation, Reader(counter_of(len)))


def without(draft: Draft, *gone: int) -> Draft:
    return draft.with_decisions(dict.fromkeys(gone, DROP))


@pytest.mark.parametrize(
    ("roles", "gone", "marks"),
    [
        ("uaua", (2,), {2: ()}),  # the assistant twice
        ("uauau", (1,), {1: ()}),  # the user twice
        ("uauauau", (1, 2, 3), {3: ()}),  # the newest of the dropped messages
        ("ucaucau", (3,), {3: ()}),  # a user after a result
        ("ucaucau", (1, 2), {}),  # the assistant after the user is an old pair
        ("suasuau", (4,), {4: ()}),  # a system text takes no turn
        ("suaasuau", (3, 4), {}),  # the client sent it so
        ("uaucu", (1, 2, 3, 4), {1: ()}),  # a text is shorter than a call with its result
        ("ucucu", (1, 2, 3, 4, 5), {4: (), 5: ()}),  # only calls were dropped
        ("uuauau", (2, 3, 4), {}),
    ],
)
def test_a_gap_mark_prevents_new_pairs_of_roles(roles: str, gone: tuple[int, ...], marks: dict[int, Decision]) -> None:
    left = without(draft_of(roles), *gone)
    done = restore_role_order(left)
    assert done.decisions == left.with_decisions(marks).decisions
    assert (done is left) == (not marks)
    assert restore_role_order(done) is done


def test_formats_that_join_neighbours_need_no_marks() -> None:
    left = without(draft_of("uaua", takes_turns=False), 2)
    assert restore_role_order(left) is left


def test_short_and_sealed_messages_stay_unchanged_as_marks() -> None:
    short = without(draft_of("uaua", content="Go."), 2)
    assert restore_role_order(short).decisions == (KEEP,) * 4
    sealed = without(draft_of("uaua", content=[{"type": "image_url", "image_url": {"url": LONG}}]), 2)
    assert restore_role_order(sealed).decisions == (KEEP,) * 4


THOUGHT = [{"type": "thinking", "thinking": [{"type": "text", "text": LONG}]}, {"type": "text", "text": "So."}]


def test_a_sealed_text_is_replaced_by_a_mark_without_thinking() -> None:
    done = restore_role_order(without(draft_of("ucaucau", content=THOUGHT), 3))
    assert done.decisions == (KEEP,) * 3 + ((),) + (KEEP,) * 5
    assert done.sent().messages[3] == encode({"role": "assistant", "content": "[...]"})
    assert done.tokens_of(3) < done.original[3] / 10
    either = restore_role_order(without(draft_of("uaucu", content=THOUGHT), 1, 2, 3, 4))
    assert either.decisions[1:5] == ((), DROP, DROP, DROP), "rather than a call with its result"


def test_a_summary_is_an_assistant_message() -> None:
    draft = draft_of("uauauau").with_decisions({1: SummaryEntry("s", 2, "told"), 2: SUMMARIZED, 3: DROP, 4: DROP})
    assert restore_role_order(draft).decisions[3:5] == (DROP, ())
    told = draft_of("uauauau").with_decisions({1: SummaryEntry("s", 4, "told"), **dict.fromkeys((2, 3, 4), SUMMARIZED)})
    assert restore_role_order(told).decisions[1:5] == (SummaryEntry("s", 3, "told"), SUMMARIZED, SUMMARIZED, ()), (
        "the mark is not counted"
    )
    assert restore_role_order(restore_role_order(told)) == restore_role_order(told)
    alone = draft_of("ucaucau").with_decisions({1: SummaryEntry("s", 2, "told"), 2: SUMMARIZED})
    assert restore_role_order(alone) is alone


@pytest.mark.parametrize(
    ("roles", "gone"), [("uauauau", (2, 4)), ("uauauau", (1, 2, 3)), ("ucaucau", (3,)), ("ucucu", (1, 2))]
)
@pytest.mark.parametrize("more", ["au", "cau", "uu", "aau", "ccu"])
def test_marks_in_the_sent_prefix_do_not_change(roles: str, gone: tuple[int, ...], more: str) -> None:
    sent = restore_role_order(without(draft_of(roles), *gone)).decisions
    longer = draft_of(roles + more)
    longer = longer.with_decisions(dict(enumerate(sent)))
    assert restore_role_order(longer) is longer
