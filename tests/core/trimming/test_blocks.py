from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.conversation.message import MAX_VALUES
from gateway.core.modes.handle import handle_line
from gateway.core.trimming.blocks import render, slice_message
from gateway.core.trimming.text_blocks import GAP, MAX_BLOCK_CHARS, split_text


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


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, "x_unknown": 1}


def test_kept_lines_are_unchanged_and_gaps_are_marked_once() -> None:
    lines = LINES.splitlines(keepends=True)
    assert content_with(user(LINES), 1, 2, 4) == f"{GAP}\n{lines[1]}{lines[2]}{GAP}\n{lines[4]}"
    assert content_with(user(LINES), 0) == f"{lines[0]}{GAP}"
    assert content_with(user(LINES)) == GAP
    assert content_with(user(LINES), *range(5)) == LINES


def test_a_gap_next_to_a_gap_mark_of_the_text_is_marked_once() -> None:
    # An extract has gap marks of its own, each joined with the next line.
    shown = "".join(f"line {n} {'x' * 40}\n{GAP}\n" for n in range(4)) + f"line 4 {'x' * 40}"
    lines = [f"line {n} {'x' * 40}\n" for n in range(5)]
    assert content_with(user(shown), 0, 2) == f"{lines[0]}{GAP}\n{lines[2]}{GAP}"
    assert content_with(user(shown), 1) == f"{GAP}\n{lines[1]}{GAP}"
    assert content_with(user(f"{LINES}{GAP}\n"), 0, 5) == f"{LINES.splitlines()[0]}\n{GAP}\n"


LONG_LINES = "".join(f"line {n} {'x' * 200}\n" for n in range(5))


def test_a_shortened_result_keeps_the_line_with_its_handle() -> None:
    way = handle_line("summary of", 9000, "tr_1")
    assert content_with(tool(f"{LONG_LINES}{way}"), 2) == f"{GAP}\n{LONG_LINES.splitlines()[2]}\n{GAP}\n{way}"
    assert content_with(tool(f"{LONG_LINES}{way}")) == GAP
    long = handle_line("text, 90 lines, begins: " + "word " * 50, 9000, "tr_2")
    assert content_with(tool(long), 0) == long
    assert content_with(tool(f"{way}\n{LONG_LINES}"), 2) == f"{GAP}\n{LONG_LINES.splitlines()[2]}\n{GAP}"


def test_a_small_gap_in_a_result_is_closed() -> None:
    lines = LONG_LINES.splitlines(keepends=True)
    short = "".join([lines[0], f"short {'y' * 90}\n\n", lines[1]])
    assert content_with(tool(short), 0, 2) == short
    assert content_with(user(short), 0, 2) == f"{lines[0]}{GAP}\n\n{lines[1]}"
    assert content_with(tool(LONG_LINES), 0, 2) == f"{lines[0]}{GAP}\n{lines[2]}{GAP}"


def test_a_gap_inside_a_line_stands_between_spaces() -> None:
    sentence = "This is a sentence of about fifty characters, yes. "
    assert content_with(user(sentence * 12), 0, 2) == f"{sentence * 4}{GAP} {sentence * 4}"


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


THOUGHT = f"<think>\n{LINES}Hm. {'x' * 300}\n</think>\n\n"


def test_thinking_at_the_start_is_kept_or_dropped_whole() -> None:
    answer = said(THOUGHT + LINES)
    assert texts_of(answer)[0] == THOUGHT
    assert content_with(answer, 1, 2) == f"{GAP}\n{''.join(LINES.splitlines(keepends=True)[:2])}{GAP}"
    assert content_with(answer, 0) == f"{THOUGHT}{GAP}"
    assert content_with(answer, *range(6)) == THOUGHT + LINES
    parts = said([{"type": "text", "text": f" {THOUGHT}"}, {"type": "text", "text": LINES}])
    assert texts_of(parts) == [f" {THOUGHT}", *texts_of(user(LINES))]


@pytest.mark.parametrize("text", [f"<think>{LINES}", f"So </think>{LINES}", f"Write <think> and </think>.\n{LINES}"])
def test_text_without_leading_thinking_is_split_like_other_text(text: str) -> None:
    assert texts_of(said(text)) == texts_of(user(text))
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


#: numbers that Python would write differently, or cannot hold
NUMBERS = ("9007199254740993.07", "123456789012345678.9", "1.10", "-0", "1E+05", "0.1e-7", "9" * 5000)


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
