from __future__ import annotations

import pytest

from gateway.core.counting.heuristic import estimate_tokens


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
def test_tokens_follow_the_script(text: str, tokens: float) -> None:
    assert estimate_tokens(text) == pytest.approx(tokens)


def test_parts_of_a_text_weigh_what_the_whole_does() -> None:
    text = "The quick brown 狐 jumps über the 怠け者の犬 🐕."
    assert sum(map(estimate_tokens, text)) == pytest.approx(estimate_tokens(text))


def test_a_megabyte_is_weighed_at_once() -> None:
    assert estimate_tokens("x" * 2**20) == 2**18
