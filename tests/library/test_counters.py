"""Test the token counters of the library."""

from __future__ import annotations

import pytest

from gateway import BudgetManager, CharacterCounter, model_counter, tiktoken_counter

TEXT = "The quick brown fox jumps over the lazy dog, 12345 times."


def test_tiktoken_counter_counts_exactly_and_is_shared() -> None:
    assert tiktoken_counter().count(TEXT) == 15
    assert tiktoken_counter().name == "tiktoken:o200k_base"
    assert tiktoken_counter("cl100k_base") is tiktoken_counter("cl100k_base")


def test_unknown_encoding_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown encoding 'p50k'; the known ones are o200k_base, cl100k_base"):
        tiktoken_counter("p50k")


@pytest.mark.parametrize("model", ["gpt-5.1", "openai/gpt-5.1"])
def test_model_counter_uses_the_tokenizer_of_the_model(model: str) -> None:
    assert model_counter(model).count(TEXT) == tiktoken_counter().count(TEXT)


def test_model_counter_multiplies_by_the_factor_of_the_family() -> None:
    counter = model_counter("claude-opus-4-5")
    assert counter.name.startswith("tiktoken:o200k_base x ")
    factor = float(counter.name.rpartition(" ")[2])
    assert counter.count(TEXT * 20) == pytest.approx(tiktoken_counter().count(TEXT * 20) * factor, abs=1)


@pytest.mark.parametrize("counter", [CharacterCounter(), tiktoken_counter(), model_counter("gpt-5.1")])
@pytest.mark.parametrize("text", ["", "x", TEXT, "\ud800", "<|endoftext|>", "日本語"])
def test_every_counter_counts_any_text(counter: CharacterCounter, text: str) -> None:
    assert BudgetManager(1_000, counter=counter).allocate(text).tokens == counter.count(text) >= bool(text)
