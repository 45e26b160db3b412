from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import DROP, KEEP, Draft
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.relevance import RelevanceFactors
from gateway.core.trimming.select import condense

FILLER = "".join(
    f"nothing of note happened at all on day number {['one', 'two', 'three', 'four'][n % 4]}.\n" for n in range(40)
)


def step(number: int, content: str, **more: Any) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call], **more},
        {"role": "tool", "tool_call_id": f"c{number}", "content": content},
    ]


def draft_of(*messages: dict[str, Any]) -> Draft:
    return Draft.untouched(Conversation.of_messages(messages), Reader(counter_of(len)))


def sent(draft: Draft) -> list[Any]:
    return [json.loads(raw) for raw in draft.sent().messages]


SILENT = {"role": "assistant", "content": ""}
USER = {"role": "user", "content": "Book the flight for me, please."}


def test_the_answering_line_is_found_among_filler() -> None:
    needle = "The reservation of Ms Silva is NM1VX1 and departs from gate 17 in the evening.\n"
    ask = {"role": "user", "content": "What is the reservation of Silva?"}
    draft = draft_of(USER, *step(1, FILLER + needle + FILLER), *step(2, FILLER), ask)
    done = condense(draft, 400, RelevanceFactors())
    assert done.total() <= 400
    assert needle in "".join(str(message["content"]) for message in sent(done))


def test_shared_text_of_two_results_is_kept_once() -> None:
    rows = "".join(f"order W{n}00{n} of customer {n}{n}{n}{n} was shipped to Boston{n}.\n" for n in range(1, 7))
    draft = draft_of(USER, *step(1, rows), *step(2, rows), {"role": "user", "content": "on"})
    shown = json.dumps(sent(condense(draft, draft.total() - 50, RelevanceFactors())))
    assert [shown.count(f"W{n}00{n}") for n in range(1, 7)] == [1] * 6


def test_messages_without_tokens_can_be_chosen() -> None:
    conversation = Conversation.of_messages([USER, SILENT, *step(1, FILLER), {"role": "user", "content": "on"}])
    draft = Draft.untouched(conversation, Reader(lambda raws: [len(raw) * (raw != encode(SILENT)) for raw in raws]))
    assert condense(draft, 900, RelevanceFactors()).total() <= 900


def test_a_unit_without_chosen_blocks_is_left_out() -> None:
    draft = draft_of(
        USER, *step(1, FILLER), *step(2, "code A1B2C3D4 for the customer"), {"role": "user", "content": "on"}
    )
    done = condense(draft, 170, RelevanceFactors())
    assert done.decisions[1:3] == (DROP, DROP)
    assert DROP not in done.decisions[3:]


def test_the_task_stays_at_least_as_a_mark() -> None:
    task = {"role": "user", "content": "word " * 400}
    draft = draft_of(task, *step(1, "x"), {"role": "user", "content": "on"})
    assert condense(draft, 300, RelevanceFactors()).decisions[0] == (0,)
    tight = condense(draft, 30, RelevanceFactors())
    assert tight.decisions[0] == ()
    assert sent(tight)[0]["content"] == "[...]"


def test_a_short_task_stays_whole_despite_better_results() -> None:
    options = "".join(
        f"Please be sure that it is {word} in the end.\n" for word in ("quick", "small", "safe", "tested")
    )
    rows = "".join(f"order W{n}00{n}K of customer C{n}{n}{n}{n} went to Boston{n}.\n" for n in range(1, 60))
    draft = draft_of({"role": "user", "content": options}, *step(1, rows), *step(2, rows[::-1]), USER)
    room = 800
    done = condense(draft, draft.tokens_of(len(draft.decisions) - 1) + room, RelevanceFactors())
    assert len(options) < 0.3 * room
    assert done.decisions[0] == KEEP
    assert done.total() <= draft.tokens_of(len(draft.decisions) - 1) + room


def test_a_long_result_is_kept_as_far_as_it_fits() -> None:
    lines = "".join(f"K{n}Q{n * 7} went to the depot D{n * 3}x on the day E{n * 13}.\n" for n in range(160))
    draft = draft_of(USER, *step(1, lines), {"role": "user", "content": "on"})
    for share in (0.1, 0.3, 0.6):
        limit = int(draft.total() * share)
        assert 0.8 * limit < condense(draft, limit, RelevanceFactors()).total() <= limit


def test_a_sealed_message_is_kept_or_dropped_with_its_results() -> None:
    needle = "The reservation of Ms Silva is NM1VX1.\n"
    signed = step(1, FILLER + needle + FILLER, reasoning_details=[{"data": "x"}])
    ask = {"role": "user", "content": "What is the reservation of Silva?"}
    draft = draft_of(USER, *signed, *step(2, FILLER), ask)
    done = condense(draft, 500, RelevanceFactors())
    assert done.total() <= 500
    assert done.decisions[1] == KEEP
    assert "NM1VX1" in sent(done)[2]["content"]
    assert condense(draft, 200, RelevanceFactors()).decisions[1:3] == (DROP, DROP)


def test_earlier_decisions_are_unchanged() -> None:
    draft = draft_of(USER, *step(1, FILLER), *step(2, FILLER), {"role": "user", "content": "on"})
    decided = draft.with_decisions({1: DROP, 2: DROP}).reopened(3)
    assert condense(decided, 400, RelevanceFactors()).decisions[:3] == (KEEP, DROP, DROP)


def test_a_message_with_all_blocks_is_unchanged() -> None:
    draft = draft_of(
        USER, *step(1, "code A1B2C3D4 for the customer"), *step(2, FILLER), {"role": "user", "content": "on"}
    )
    done = condense(draft, 400, RelevanceFactors())
    assert done.rendered(2).raw is draft.conversation.messages[2]


def test_remaining_room_is_filled_in_a_few_rounds() -> None:
    lines = [
        "".join(f"order W{n}{m}00 of customer {n}{m}{m}{n} was shipped to Boston{n}{m}.\n" for m in range(90))
        for n in range(9)
    ]
    messages = [USER, *(message for n in range(9) for message in step(n, lines[n])), {"role": "user", "content": "on"}]
    conversation = Conversation.of_messages(messages)

    def light(raws: Sequence[bytes]) -> list[int]:
        return [len(raw) if raw in conversation.messages else len(raw) // 6 for raw in raws]

    draft = Draft.untouched(conversation, Reader(light))
    done = condense(draft, draft.total() // 4, RelevanceFactors())
    assert 0.5 < done.total() / (draft.total() // 4) < 0.95


def test_two_tables_with_the_same_columns_are_kept_if_there_is_room() -> None:
    def table(first: int) -> str:
        rows = range(first, first + 30)
        return json.dumps([{"identifier_of_order": f"W{n}00{n}", "name_of_customer": f"Name{n}"} for n in rows])

    draft = draft_of(USER, *step(1, table(0)), *step(2, table(100)), {"role": "user", "content": "on"})
    least = condense(draft, draft.total(), RelevanceFactors()).total()
    shown = json.dumps(sent(condense(draft, least + 100, RelevanceFactors())))
    assert [n for n in (*range(30), *range(100, 130)) if f"Name{n}" not in shown] == []


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [("Close issue #42.", '"number":42'), ("Close it.", None), ("In 42 days?", None), ("#42 " * 600, None)],
)
def test_a_row_named_by_a_short_number_is_found(ask: str, wanted: str | None) -> None:
    rows = json.dumps([{"number": number, "title": "broken", "state": "open"} for number in range(10, 99)])
    head_and_tail = [{"role": "assistant", "content": "There are some."}, {"role": "user", "content": ask}]
    draft = draft_of(USER, *step(1, rows), *head_and_tail)
    done = condense(draft, draft.total() - 900, RelevanceFactors())
    shown = str(sent(done)[2]["content"])
    assert done.total() <= draft.total() - 900
    assert ("42" in shown, wanted is None or wanted in shown) == (wanted is not None, True)


@pytest.mark.parametrize("limit", [12_000, 20_000])
def test_the_room_is_used_although_small_gaps_are_closed(limit: int) -> None:
    function = (
        "def compute_total_{0}(order, table):\n"
        '    """Return column {0} of the table for an order."""\n'
        "    row = table.find(order.key_{0}, default={0})\n"
        "    return row.values[{0}] * order.factor_{0}\n\n\n"
    )
    code = "".join(function.format(number) for number in range(300))
    draft = draft_of(USER, *step(1, code), {"role": "user", "content": "What does compute_total_200 return?"})
    assert 0.9 * limit < condense(draft, limit, RelevanceFactors()).total() <= limit
