from __future__ import annotations

import tracemalloc

import pytest

from gateway.mock import tokens
from tests.support.timing import count_calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("   \n", 0),
        ("hello world", 2),
        ("foo_bar, 1234!", 4),
        ("漢字 kana", 3),
        ("café", 2),
        ("🙂🙂", 2),
        ("a1b2", 4),
        ("\ud800", 1),
    ],
)
def test_counts_words_digit_runs_and_single_characters(text: str, expected: int) -> None:
    assert tokens.count(text) == expected


@pytest.mark.parametrize("text", ["", " a", "a  b ", "x=1;\u00a0漢 字\n", "  ", "wörd 12.5%"])
def test_pieces_join_to_the_text_and_agree_with_the_count(text: str) -> None:
    pieces = tokens.pieces(text)
    assert "".join(pieces) == text
    assert sum(tokens.count(piece) for piece in pieces) == tokens.count(text)


def test_truncates_to_a_number_of_tokens() -> None:
    assert tokens.truncate("one two three", 2) == ("one two", True)
    assert tokens.truncate("one two three", 3) == ("one two three", False)
    assert tokens.truncate("one", 0) == ("", True)
    assert tokens.truncate("one two", None) == ("one two", False)


def test_counts_the_text_inside_json_but_not_an_inlined_file() -> None:
    value = {"role": "user", "content": [{"type": "text", "text": "two words"}, {"url": "data:image/png;base64,AAAA"}]}
    assert tokens.count_json(value) == 2 + tokens.FILE_TOKENS


def test_counts_four_megabytes_without_building_their_pieces() -> None:
    text = "The quick brown fox, 123 jumps! über 漢字 " * 100_000
    assert count_calls(lambda: tokens.count(text)) < 100
    tracemalloc.start()
    try:
        tokens.count(text)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 10 * len(text)


def test_json_nested_deeper_than_the_recursion_limit_is_counted() -> None:
    deep: object = "bottom"
    for _ in range(5_000):
        deep = [{"content": deep}]
    assert tokens.count_json(deep) == 1
