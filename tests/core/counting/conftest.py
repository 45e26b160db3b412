from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.counting.cache import CountCache
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.families import TokenizerFamilies, families_from
from gateway.counters.vocabularies import VOCABULARIES

TABLE = Path(__file__).parents[3] / "config" / "families.yaml"


class WordCounter:
    """Count one token per word, so that expected numbers can be read from the text; record the counted texts."""

    def __init__(self, name: str = "words") -> None:
        self.name = name
        self.texts: list[str] = []

    def count(self, text: str) -> int:
        self.texts.append(text)
        return len(text.split())


@pytest.fixture
def words() -> WordCounter:
    return WordCounter()


@pytest.fixture
def estimator(words: WordCounter) -> Estimator:
    """Return an estimator that counts words; a message costs 4 tokens, a request 3, tools 9."""
    return make_estimator(words, {"plain": {"start": 3, "tools": 9, "tool_text": 1, "forced": 7, "exact": True}})


@pytest.fixture(scope="session")
def families() -> TokenizerFamilies:
    """Return the families of the table that ships with the package."""
    return families_from(yaml.safe_load(TABLE.read_text("utf-8")))


@pytest.fixture(scope="session")
def families_with_vocabularies() -> TokenizerFamilies:
    """Return the families as they are with all optional vocabularies."""
    return families_from(yaml.safe_load(TABLE.read_text("utf-8")), vocabularies=VOCABULARIES)


def make_estimator(counter: WordCounter, table: dict[str, dict[str, Any]], images: Any = None) -> Estimator:
    return Estimator(
        families_from({"families": table, "images": images or {}}), lambda _tokenizer: counter, CountCache()
    )


@pytest.fixture
def make() -> Any:
    return make_estimator
