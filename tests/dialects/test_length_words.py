from __future__ import annotations

import pytest

from gateway.dialects.length_words import Lengths, lengths_in


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("length of prompt_tokens (12000) must be less than max_seq_len (6000).", Lengths(6000, 12000)),
        ("prompt tokens (9,000) > n_ctx (8,192)", Lengths(8192, 9000)),
        ("The number of input tokens must not exceed 4096. Given 9 tools", Lengths(4096)),
        ("Prompt of 9000 tokens is too long", Lengths()),
        ("The context window of gpt-4-1106-preview is exceeded", Lengths()),
        ("The input of 10 tokens, 20 tokens and 30 tokens exceeds the maximum of 25 tokens", Lengths(25)),
    ],
)
def test_limits_and_lengths_are_distinguished_by_terms_and_size(text: str, lengths: Lengths) -> None:
    assert lengths_in(text) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The prompt is ready",
        "The file exceeds the maximum of 8 tokens",
        "Unknown role: the prompt exceeds 8 tokens",
        "'the prompt exceeds 8 tokens' is longer than the maximum length",
        "max_tokens exceeds the limit of 8 tokens",
        "Too many tokens per minute",
        "Something else. The prompt exceeds the maximum of 8 tokens",
    ],
)
def test_other_sentences_have_no_length(text: str) -> None:
    assert lengths_in(text) is None
