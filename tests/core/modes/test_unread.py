from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.conversation.message import Hashed, encode
from gateway.core.counting.heuristic import HeuristicCounter
from gateway.core.modes import ResponseMode, show_blocks
from gateway.core.modes.unread import (
    ModeTry,
    ResponseModes,
    after_last_reply,
    chosen_blocks,
    modes_for,
    results_in,
    tokens_complete,
    tries_for,
)
from gateway.core.trimming.deadline import DeadlinePassed
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.views import view_of

READER = Reader(counter_of(HeuristicCounter().count))
TASK = {"role": "user", "content": "Where is the fee of an invoice rounded?"}
BODY = "def round_fee(invoice):\n    cents = invoice.fee * 100\n    return round(cents) if cents else 0\n"
FILLER = [f"def column_{n}(table):\n    found = table.row({n})\n    return found.value_{n}\n" for n in range(60)]
TEXT = "".join([*FILLER[:40], BODY, *FILLER[40:]])


def asks(*names: str, arguments: str = '{"path": "fees.py"}') -> dict[str, Any]:
    made = [{"id": name, "type": "function", "function": {"name": "Read", "arguments": arguments}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(name: str, text: Any = TEXT) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def shown(messages: Sequence[dict[str, Any]], room: int, *indices: int) -> list[str]:
    """Return what is shown of the results at these places."""
    raws = [encode(message) for message in messages]
    blocks = chosen_blocks(raws, indices, room, READER, lambda: False)
    made = [show_blocks(raws[index], blocks[index], lambda _: "tr_h") for index in indices if index in blocks]
    return [json.loads(one.raw)["content"] for one in made if one is not None]


@pytest.mark.parametrize(
    ("asked", "automatic", "modes"),
    [
        ("raw", "raw", ("raw", "raw")),
        ("raw", "table", ("table", "table")),
        ("raw", "summary", ("summary", "table")),
        ("raw", "handle_only", ("handle_only", "table")),
        ("table", "summary", ("summary", "table")),
        ("summary", "raw", ("summary", "summary")),
        ("summary", "handle_only", ("handle_only", "summary")),
        ("handle_only", "summary", ("handle_only", "handle_only")),
    ],
)
def test_a_budget_makes_unread_results_tables_at_most_and_a_client_may_ask_for_less(
    asked: ResponseMode, automatic: ResponseMode, modes: tuple[ResponseMode, ResponseMode]
) -> None:
    assert modes_for(asked, automatic) == modes


def test_older_results_are_shortened_before_unread_ones() -> None:
    first, last = ResponseModes("summary", "table"), ResponseModes("handle_only", "handle_only")
    shorter = ModeTry(ResponseModes("handle_only", "table"), all_results=True, may_extract=True)
    assert tries_for(first, is_bound=False) == (ModeTry(first), shorter, ModeTry(last, all_results=True))
    assert tries_for(first, is_bound=True)[1] == ModeTry(first, all_results=True)
    assert [one.modes for one in tries_for(last, is_bound=False)] == [last, last]
    asked = tries_for(ResponseModes("summary", "summary"), is_bound=False)
    assert [one.modes.unread for one in asked] == ["summary", "summary", "handle_only"]
    assert not any(one.may_extract for one in asked), "the client has said how it is to be shortened"


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([], 0),
        ([TASK], 0),
        ([TASK, asks("a"), result("a")], 2),
        ([TASK, asks("a"), result("a"), {"role": "assistant", "content": "Yes."}], 4),
        ([{"type": "function_call"}, {"type": "function_call_output"}], 1),
        ([{"type": "reasoning"}, {"type": "custom_tool_call"}, {"type": "custom_tool_call_output"}], 2),
        ([{"type": "function_call_output"}], 0),
    ],
)
def test_results_after_the_last_reply_are_unread(messages: Sequence[Any], index: int) -> None:
    assert after_last_reply([encode(message) for message in messages]) == index


def test_results_of_calls_side_by_side_are_all_unread_in_each_format() -> None:
    chat = [TASK, asks("old"), result("old"), asks("a", "b"), result("a"), result("b")]
    calls = [{"type": "function_call", "call_id": name, "name": "Read", "arguments": "{}"} for name in ("a", "b")]
    outputs = [{"type": "function_call_output", "call_id": name, "output": TEXT} for name in ("a", "b")]
    for wire, elements, count in (("chat", chat, 3), ("responses", [*calls, *outputs], 2)):
        view = view_of(wire, Hashed([encode(one) for one in elements]), None)  # type: ignore[arg-type]
        found = results_in(view)
        assert len(found.names) == len(set(found.names.values())) == count
        assert [json.loads(view.messages[index])["tool_call_id"] for index in sorted(found.unread)] == ["a", "b"]


def test_a_result_has_the_same_name_with_a_cache_mark() -> None:
    marked = result("a", [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}])
    names = [results_in(view_of("chat", Hashed([encode(one)]), None)).names[0] for one in (result("a"), marked)]
    assert names[0] == names[1]


@pytest.mark.parametrize("room", [200, 400, 800])
def test_the_extract_has_the_answer_and_its_neighbours(room: int) -> None:
    [text] = shown([TASK, asks("a"), result("a")], room, 2)
    assert all(line in text for line in BODY.splitlines())
    assert HeuristicCounter().count(text) <= room
    assert text.endswith(f"[summary of {len(TEXT):,} characters; full text: GET /api/results/tr_h]")


def test_the_arguments_of_a_call_are_part_of_the_question() -> None:
    search = asks("a", arguments='{"pattern": "column_17"}')
    [text] = shown([{"role": "user", "content": "Go on."}, search, result("a")], 250, 2)
    assert "found.value_17" in text


def test_a_clients_reminder_is_no_question() -> None:
    note = {"type": "text", "text": "<system-reminder>column_3 column_4 column_5</system-reminder>"}
    [text] = shown([TASK, asks("a"), result("a"), {"role": "user", "content": [note]}], 250, 2)
    assert "return round(cents)" in text


def test_several_results_share_the_room() -> None:
    texts = shown([TASK, asks("a", "b"), result("a"), result("b", TEXT.replace("fee", "row"))], 700, 2, 3)
    assert sum(map(HeuristicCounter().count, texts)) <= 700
    assert "return round(cents)" in texts[0]


def test_without_room_only_the_handle_is_shown() -> None:
    [text] = shown([TASK, asks("a"), result("a")], 90, 2)
    assert len(text) < 300
    assert text.endswith("full text: GET /api/results/tr_h]")


def test_results_that_fit_are_not_extracted() -> None:
    assert shown([TASK, asks("a"), result("a")], 50_000, 2) == []


@pytest.mark.parametrize("content", ["short", [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]])
def test_results_without_long_text_are_not_extracted(content: Any) -> None:
    assert shown([TASK, asks("a"), result("a", content)], 100, 2) == []


def test_the_same_question_has_the_same_extract() -> None:
    messages = [TASK, asks("a"), result("a")]
    assert shown(messages, 500, 2) == shown(messages, 500, 2)


def test_choosing_stops_at_the_deadline() -> None:
    raws = [encode(message) for message in (TASK, asks("a"), result("a", TEXT * 50))]
    with pytest.raises(DeadlinePassed):
        chosen_blocks(raws, [2], 500, Reader(counter_of(len)), lambda: True)


def test_rows_count_as_their_table() -> None:
    rows = json.dumps([{"identifier": number, "description": "open"} for number in range(90)])
    assert tokens_complete([encode(result("a", rows))], READER) < HeuristicCounter().count(rows) / 2
    text = encode(result("a"))
    assert tokens_complete([text], READER) > HeuristicCounter().count(TEXT)
