from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import MAX_VALUES
from gateway.core.modes.handle import handle_line
from gateway.core.trimming.blocks import GAP, MAX_BLOCK_CHARS, render, slice_message, split_text


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content, "x_unknown": 1}


def texts_of(message: dict[str, Any]) -> list[str]:
    return [block.text for block in slice_message(message).blocks]


def content_with(message: dict[str, Any], *picked: int) -> Any:
    return render(message, slice_message(message), picked)["content"]


@given(st.text(st.sampled_from("ab .!?\n\r\u3002\u2028é漢"), max_size=2000))
@settings(max_examples=200, deadline=None)
def test_text_is_cut_into_pieces_that_are_the_text_and_none_is_long(text: str) -> None:
    pieces = list(split_text(text))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= MAX_BLOCK_CHARS for piece in pieces)


def test_short_lines_are_joined_and_long_lines_are_cut_at_sentences() -> None:
    assert list(split_text("a\nb\n" + "c" * 50 + "\nd")) == ["a\nb\n" + "c" * 50 + "\n", "d"]
    sentence = "This is a sentence of about fifty characters, yes. "
    assert [len(piece) for piece in split_text(sentence * 8)] == [204, 204]


@pytest.mark.parametrize("sentence", ["Some words.  ", "\u4e00" * 30 + "\u3002", "a" * 70 + "; \t  \u3000", "word "])
def test_a_very_long_line_is_cut_like_its_parts(sentence: str) -> None:
    """The end of a searched part may be in a word, before blanks, among them or after them."""
    for shift in range(len(sentence)):
        line = "b" * shift + sentence * (70_000 // len(sentence))
        pieces = list(split_text(line))
        assert "".join(pieces) == line
        assert pieces[-200:] == list(split_text("".join(pieces[-200:])))


LINES = "".join(f"line {n} {'x' * 40}\n" for n in range(5))


def test_kept_lines_are_unchanged_and_gaps_are_marked_once() -> None:
    lines = LINES.splitlines(keepends=True)
    assert content_with(tool(LINES), 1, 2, 4) == f"{GAP}\n{lines[1]}{lines[2]}{GAP}\n{lines[4]}"
    assert content_with(tool(LINES), 0) == f"{lines[0]}{GAP}"
    assert content_with(tool(LINES)) == GAP
    assert content_with(tool(LINES), *range(5)) == LINES


def test_a_gap_next_to_a_gap_mark_of_the_text_is_marked_once() -> None:
    # An extract has gap marks of its own, each joined with the next line.
    shown = "".join(f"line {n} {'x' * 40}\n{GAP}\n" for n in range(4)) + f"line 4 {'x' * 40}"
    lines = [f"line {n} {'x' * 40}\n" for n in range(5)]
    assert content_with(tool(shown), 0, 2) == f"{lines[0]}{GAP}\n{lines[2]}{GAP}"
    assert content_with(tool(shown), 1) == f"{GAP}\n{lines[1]}{GAP}"
    assert content_with(tool(f"{LINES}{GAP}\n"), 0, 5) == f"{LINES.splitlines()[0]}\n{GAP}\n"


def test_a_shortened_result_keeps_the_line_with_its_handle() -> None:
    way = handle_line("summary of", 9000, "tr_1")
    assert content_with(tool(f"{LINES}{way}"), 2) == f"{GAP}\n{LINES.splitlines()[2]}\n{GAP}\n{way}"
    assert content_with(tool(f"{LINES}{way}")) == GAP
    long = handle_line("text, 90 lines, begins: " + "word " * 50, 9000, "tr_2")
    assert content_with(tool(long), 0) == long
    assert content_with(tool(f"{way}\n{LINES}"), 2) == f"{GAP}\n{LINES.splitlines()[1]}\n{GAP}"


def test_a_gap_inside_a_line_stands_between_spaces() -> None:
    sentence = "This is a sentence of about fifty characters, yes. "
    assert content_with(tool(sentence * 12), 0, 2) == f"{sentence * 4}{GAP} {sentence * 4}"


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


THOUGHT = f"<think>\n{LINES}Hm. {'x' * 300}\n</think>\n\n"
TABLE = json.dumps([{"id": n, "name": "x" * 60} for n in range(4)])


def test_thinking_at_the_start_is_kept_or_dropped_whole() -> None:
    answer = said(THOUGHT + LINES)
    assert texts_of(answer)[0] == THOUGHT
    assert content_with(answer, 1, 2) == f"{GAP}\n{''.join(LINES.splitlines(keepends=True)[:2])}{GAP}"
    assert content_with(answer, 0) == f"{THOUGHT}{GAP}"
    assert content_with(answer, *range(6)) == THOUGHT + LINES
    parts = said([{"type": "text", "text": f" {THOUGHT}"}, {"type": "text", "text": LINES}])
    assert texts_of(parts) == [f" {THOUGHT}", *texts_of(tool(LINES))]


def test_a_table_after_thinking_keeps_its_head() -> None:
    assert content_with(said(THOUGHT + TABLE), 2) == f"{GAP}\nrows | id | name\n0 | {'x' * 60}\n{GAP}"


@pytest.mark.parametrize("text", [f"<think>{LINES}", f"So </think>{LINES}", f"Write <think> and </think>.\n{LINES}"])
def test_text_without_leading_thinking_is_split_like_other_text(text: str) -> None:
    assert texts_of(said(text)) == texts_of(tool(text))
    assert len(texts_of(tool(THOUGHT))) > 2, "it is no thinking of the assistant's"


words = st.lists(st.sampled_from(["some words of it. ", "x" * 50, "\n", ", ", "{"]), max_size=40).map("".join)


@given(words, words, st.data())
@settings(deadline=None)
def test_no_thinking_tag_is_kept_without_the_other(thought: str, answer: str, data: st.DataObject) -> None:
    message = said(f"<think>{thought}</think>{answer}")
    count = len(slice_message(message).blocks)
    content = content_with(message, *data.draw(st.sets(st.integers(0, count - 1))))
    assert content.count("<think>") == content.count("</think>")
    assert content_with(message, *range(count)) == message["content"] or not slice_message(message).is_verbatim


def test_render_keeps_every_other_field() -> None:
    assert render(tool(LINES), slice_message(tool(LINES)), [0])["x_unknown"] == 1


ROWS = [{"id": n, "city": f"city{n}", "more": {"price": n * 100, "text": "a|b"}} for n in range(4)]


def test_similar_json_objects_become_a_table_and_each_row_needs_the_head() -> None:
    message = tool(json.dumps({"total": 4, "rows": ROWS, "pad": "x" * 100}))
    assert texts_of(message)[:3] == ["total: 4\n", "rows | id | city | more\n", "0 | city0 | {price: 0, text: a|b}\n"]
    shown = content_with(message, 4)
    assert shown == f"{GAP}\nrows | id | city | more\n{GAP}\n2 | city2 | {{price: 200, text: a|b}}\n{GAP}"


def test_rows_of_a_table_may_have_names_or_stand_in_several_lists() -> None:
    flights = [{"flight": f"HAT{number}", "seats": {"business": number, "economy": 9}} for number in range(4)]
    named = {flight["flight"]: {**flight, "note": "x" * 40} for flight in flights}
    assert texts_of(tool(json.dumps({"found": named})))[:2] == [
        "found | flight | seats | note\n",
        f"HAT0 | HAT0 | {{business: 0, economy: 9}} | {'x' * 40}\n",
    ]
    odd = texts_of(
        tool(json.dumps({"a\nb": {"x\ny": 1, "z": "w" * 160}, "": {"x\ny": 2, "z": ""}, "c": {"x\ny": 3, "z": ""}}))
    )
    assert odd == ["rows | x y | z\n", f"a b | 1 | {'w' * 160}\n", " | 2 | \n", "c | 3 | \n"]
    pairs = texts_of(tool(json.dumps([flights[:2], flights[2:]])))
    assert pairs[0] == "rows | flight | seats\n"
    assert pairs[-1] == "[1][1] | HAT3 | {business: 3, economy: 9}\n"


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"x": "1" * 60, "y": 2}, "b": {"x": "2" * 60, "y": 3}},  # two objects are no table
        {"a": {"x": "1" * 60, "y": 2}, "b": {"x": "2" * 60, "y": 3}, "c": {"x": "3" * 60}},
        [[{"x": "1" * 60, "y": 2}, {"x": "2" * 60, "y": 2}], {"x": "3" * 60, "y": 4}],
        [[], [], []],
    ],
)
def test_json_that_is_no_table_is_written_with_paths(value: Any) -> None:
    assert not any(" | " in text for text in texts_of(tool(json.dumps({"found": value, "pad": "x" * 160}))))


def test_json_becomes_lines_with_their_paths() -> None:
    value = {
        "user": {"name": "Mia", "address": {"street": "s" * 80, "city": "c" * 90}},
        "tags": ["a", "b"],
        "mixed": [{"a": "x" * 200}, 1],
        "numbers": list(range(100)),
        "note": "First.\nSecond line of the note, which is long enough to stand alone.\nThird.",
    }
    lines = texts_of(tool(json.dumps(value)))
    assert lines[:4] == [
        "user.name: Mia\n",
        f"user.address.street: {'s' * 80}\n",
        f"user.address.city: {'c' * 90}\n",
        "tags: [a, b]\n",
    ]
    assert lines[4:6] == [f"mixed[0].a: {'x' * 200}\n", "mixed[1]: 1\n"]
    assert lines[6].startswith("numbers: 0, 1, 2,")
    assert lines[-1] == "Third.\n"


#: numbers that Python would write differently, or cannot hold
NUMBERS = ("9007199254740993.07", "123456789012345678.9", "1.10", "-0", "1E+05", "0.1e-7", "9" * 5000)


@pytest.mark.parametrize("number", [*NUMBERS[:-1], "NaN", "-Infinity"])
def test_numbers_keep_their_spelling(number: str) -> None:
    cells = ", ".join(f'{{"id": {number}, "of": [{number}, {{}}]}}' for _ in range(12))
    values = ", ".join([number] * 60)
    text = f'{{"one": {number}, "short": {{"a": {number}}}, "values": [{values}], "rows": [{cells}]}}'
    shown = "".join(texts_of(tool(text)))
    assert shown.startswith(f"one: {number}\nshort: {{a: {number}}}\nvalues: {number}, {number}, ")
    assert shown.endswith("rows | id | of\n" + f"{number} | [{number}, {{}}]\n" * 12)


def test_texts_without_their_quotes_are_not_escaped() -> None:
    said = {"path": r"C:\data\new", "said": 'She said "no".', "code": "a\nb", "on": True, "of": None}
    shown = r'{path: C:\data\new, said: She said "no"., code: a' + "{}b, on: true, of: null}}\n"
    lines = texts_of(tool(json.dumps({"it": said, "pad": "x" * 100})))
    assert lines[0] == "it: " + shown.replace("{}b", "\nb").replace("}}", "}")
    rows = texts_of(tool(json.dumps([{"id": n, "it": said} for n in range(3)])))
    assert rows[1] == "0 | " + shown.replace("{}b", " b").replace("}}", "}")


def test_a_list_of_booleans_is_written_as_in_json() -> None:
    assert "".join(texts_of(tool(json.dumps({"a": [True, False] * 20})))).startswith("a: true, false, true, ")


def test_a_list_may_end_with_a_full_line() -> None:
    assert texts_of(tool(json.dumps({"a": ["x" * 159, "y" * 159]}))) == [f"a: {'x' * 159},\n", f"{'y' * 159},\n"]


@pytest.mark.parametrize(
    "content", ["[" * 500 + "]" * 500, '{"a":' * 50 + '"' + "x" * 300 + '"' + "}" * 50, "{broken" * 40]
)
def test_deep_or_broken_json_is_split_as_text(content: str) -> None:
    assert texts_of(tool(content))


def test_json_of_far_too_many_values_is_cut_as_a_text() -> None:
    """Parsing it would block all other calls."""
    many = "[" + "[], " * (MAX_VALUES // 2) + "[]]"
    assert "".join(texts_of(tool(many))) == many


def test_parts_are_split_separately_and_keep_their_fields() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [{"type": "text", "text": "short"}, {"type": "text", "text": LINES, **mark}]}
    out = content_with(message, 0, 1)
    assert out[0] == {"type": "text", "text": "short"}
    assert out[1] == {"type": "text", "text": LINES.splitlines(keepends=True)[0] + GAP, **mark}


def caller(arguments: str, content: Any = "Let me look.") -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "edit", "arguments": arguments}}
    short = {"id": "d", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {"role": "assistant", "content": content, "tool_calls": [call, short]}


def test_long_strings_in_arguments_are_cut_and_the_arguments_stay_json() -> None:
    message = caller(json.dumps({"path": "a.py", "edits": [{"text": LINES * 2}]}))
    sliced = slice_message(message)
    out = render(message, sliced, [1])
    arguments = json.loads(out["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"path": "a.py", "edits": [{"text": LINES.splitlines(keepends=True)[0] + GAP}]}
    assert out["tool_calls"][1] is message["tool_calls"][1]
    assert "a.py" in sliced.fixed
    assert "line 0" not in sliced.fixed


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_in_shortened_arguments_keep_their_spelling(number: str) -> None:
    message = caller(f'{{"amount": {number}, "of": [{number}], "text": {json.dumps(LINES * 2)}}}')
    sliced = slice_message(message)
    shown = render(message, sliced, [])["tool_calls"][0]["function"]["arguments"]
    assert shown == f'{{"amount":{number},"of":[{number}],"text":"{GAP}"}}'
    assert f"edit {shown}" in sliced.fixed


@pytest.mark.parametrize("arguments", ["{" + "x" * 900, json.dumps(["x" * 900]), "{}", ""])
def test_short_and_broken_arguments_are_unchanged(arguments: str) -> None:
    message = caller(arguments)
    assert render(message, slice_message(message), [])["tool_calls"] == message["tool_calls"]


def test_an_empty_message_is_none_with_calls_and_a_gap_mark_without() -> None:
    assert content_with(caller("{}")) is None
    assert content_with({"role": "assistant", "content": "Words."}) == GAP
    assert content_with(caller("{}", None)) is None


def test_is_verbatim_is_true_if_all_blocks_are_the_message() -> None:
    assert slice_message(tool(LINES)).is_verbatim
    assert not slice_message(tool(json.dumps(ROWS))).is_verbatim
