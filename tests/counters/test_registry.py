from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.counting.cache import CountCache
from gateway.core.errors import ConfigError
from gateway.counters.registry import Counters


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    source = (
        "class ByWords:\n    name = 'words'\n    def count(self, text):\n        return len(text.split())\n"
        "class Mute:\n    name = 'mute'\nclass Broken:\n    def __init__(self):\n        raise RuntimeError('no licence')\n"
        "class Quits:\n    name = 'quits'\n    def __init__(self):\n        raise SystemExit(3)\n"
        "class Odd:\n    count = len\n    @property\n    def name(self):\n        raise RuntimeError('no name')\n"
        "class Fails:\n    name = 'tiktoken:o200k_base'\n    def count(self, text):\n        return {'a': 1 / 2, 'b': -1, 'c': float('nan'), 'd': 7}[text] if text != 'e' else exit(3)\n"
    )
    (tmp_path / "own_counters.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_counters"


def test_a_users_own_counter_counts_under_its_dotted_path(own_module: str) -> None:
    counters = Counters()
    counters.add(f"{own_module}:ByWords")
    found = counters.counter(f"{own_module}:ByWords")
    assert (found.name, found.count("three short words")) == (f"words ({own_module}:ByWords)", 3)


def test_where_a_users_counter_fails_the_heuristic_counts_and_the_log_says_so_once(
    own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    counters.add(f"{own_module}:Fails")
    own, plain = counters.counter(f"{own_module}:Fails"), counters.counter("heuristic")
    assert own.count("d") == 7
    assert [own.count(text) for text in ("b", "c", "e", "no such key")] == [
        plain.count(text) for text in ("b", "c", "e", "no such key")
    ]
    assert [record.message for record in caplog.records] == [
        f"the token counter {own_module}:Fails failed; the heuristic counts instead"
    ]


def test_counters_with_equal_names_are_distinguished(own_module: str) -> None:
    counters = Counters()
    counters.add(f"{own_module}:Fails")
    own, theirs = counters.counter(f"{own_module}:Fails"), counters.counter("o200k_base")
    cache = CountCache()
    assert (cache.tokens(own, "d"), cache.tokens(theirs, "d")) == (7, 1)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NoSuch", "AttributeError"),
        ("Mute", r"count\(text\)"),
        ("Broken", "no licence"),
        ("Quits", "SystemExit: 3"),
        ("Odd", "no name"),
    ],
)
def test_invalid_counter_is_refused_with_reason(own_module: str, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Counters().add(f"{own_module}:{name}")


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_module"):
        Counters().add("no_such_module:Thing")


def test_the_counters_that_need_nothing_have_names_of_their_own() -> None:
    counters = Counters()
    assert [counters.counter(name).name for name in ("heuristic", "chars/4")] == ["heuristic", "chars/4"]
    assert counters.is_loaded("chars/4")


def test_a_tokenizer_is_loaded_when_it_is_first_asked_for() -> None:
    counters = Counters()
    assert not counters.is_loaded("o200k_base")
    counters.counter("o200k_base")
    assert counters.is_loaded("o200k_base")
    assert counters.is_loaded("a name that stands for the same")


def test_a_missing_table_is_replaced_by_the_heuristic_under_its_own_name(tmp_path: Path) -> None:
    assert Counters(tmp_path).counter("o200k_base").name == "heuristic"
    assert Counters(tmp_path).counter("o200k_digits").name == "heuristic:digits"


def test_each_digit_is_counted_without_a_table_too(tmp_path: Path) -> None:
    counters, text = Counters(tmp_path), "order 12345 of 2024, 7"
    assert counters.counter("o200k_digits").count(text) - counters.counter("o200k_base").count(text) == 3 + 2


def test_a_vocabulary_with_a_token_for_each_digit_needs_no_table_of_its_own() -> None:
    counters = Counters()
    assert not counters.is_loaded("o200k_digits")
    counters.counter("o200k_base")
    assert counters.is_loaded("o200k_digits")
    assert counters.counter("o200k_digits").name == "tiktoken:o200k_digits"
    assert counters.counter("o200k_digits") is counters.counter("o200k_digits")
