from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.heuristic import CharacterCounter, HeuristicCounter, estimate_tokens


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("abcdefgh", 2),
        ("\x00\x7f", 0.5),
        ("漢字", 2),  # ideographs
        ("かな", 2),  # kana
        ("한글", 2),  # hangul
        ("🙂", 1),  # beyond the basic plane
        ("Привет", 3),  # another alphabet: half a token a character
        ("ab漢я", 0.5 + 1 + 0.5),
        ("\ud800", 0.5),  # a lone surrogate is a character like another
    ],
)
def test_token_estimate_depends_on_the_script(text: str, tokens: float) -> None:
    assert estimate_tokens(text) == pytest.approx(tokens)


def test_estimates_of_text_parts_add_up_to_the_estimate_of_the_whole() -> None:
    text = "The quick brown 狐 jumps über the 怠け者の犬 🐕."
    assert sum(map(estimate_tokens, text)) == pytest.approx(estimate_tokens(text))


def test_megabyte_is_counted_fast() -> None:
    assert estimate_tokens("x" * 2**20) == 2**18


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("one two three", 3),
        ("HttpServer", 2),
        ("counterrevolutionary", 3),  # 10 letters, and 10 more by 6
        ("123456 7", 3),
        ('{"a":1}', 5),
        ("    indented\n\tline", 4),
        ("汉字汉字", 3),
        ("Привет", 3),
        ("🙂", 1),
        ("\ud800", 1),
    ],
)
def test_heuristic_counts_words_numbers_punctuation_and_scripts(text: str, tokens: int) -> None:
    assert HeuristicCounter().count(text) == tokens


def test_counters_without_tokenizer_are_named_for_their_method() -> None:
    assert [HeuristicCounter.name, CharacterCounter.name] == ["heuristic", "chars/4"]
    assert CharacterCounter().count("abcde") == 2


@given(st.text(st.characters(exclude_categories=()), max_size=300))
def test_any_text_can_be_counted_and_a_longer_one_has_no_fewer_tokens(text: str) -> None:
    for counter in (HeuristicCounter(), CharacterCounter()):
        assert 0 <= counter.count(text) <= counter.count(f"{text} more") + 1
