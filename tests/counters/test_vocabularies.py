from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.counting.families import families_from
from gateway.counters import vocabularies
from gateway.counters.registry import Counters
from gateway.counters.vocabularies import VOCABULARIES, ClaudeCounter, SplintrCounter, installed, load

TABLE = Path(__file__).parents[2] / "config" / "families.yaml"
#: parts that Claude's tokenizer treats differently: cases, apostrophes, numbers, control characters, marks, scripts
ODD_TEXTS = (
    "I'm HE'LL we'Ve don\u2019t 'quoted' O'Clock x'y 1's camelCase HTTPServer WORD",
    "1 12 123 1234 a1b22c333 9876543210 ٣٤٥ ½ Ⅷ 3.14%",
    "\n\n a\n\n\nb \r\n\t c  \u3000\u00a0 d   \n",
    "a\x01b \x00c d\x7fe f\rg h\r\ni",
    "!!! ...\n/// --> `x`;\n{}[]//\nfoo(bar, baz_qux): return",
    "e\u0301a \u0301b caf\u00e9 n漢字n हिन्दी ไทย 한국어 x👩‍👩‍👧y \ud800 <|endoftext|>",
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.lists(st.sampled_from([*ODD_TEXTS, *" \n\r\t/'sStTdDLl129aZ.,_é漢\x01\u0301"])).map("".join),
)
#: fakes of the packages: one token per character, or per word and a frame of seven
SPLINTR = """
class Tokenizer:
    @staticmethod
    def from_pretrained(name):
        made = Tokenizer()
        made.name = name
        return made
    def encode_ordinary(self, text):
        return list(text.encode())
"""
CTOK = """
def token_count(text, version):
    return 7 + len(text.split())
"""


def packages(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """Install packages with these sources, and nothing else of this kind."""
    for name in ("ctok", "splintr"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that what is imported now is removed after the test
        del sys.modules[name]
        if name in sources:
            (folder / f"{name}.py").write_text(sources[name])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(vocabularies, "LOADED", {})


def test_installed_packages_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, monkeypatch, ctok="raise RuntimeError('imported')", splintr="raise RuntimeError('imported')")
    assert installed() == frozenset(VOCABULARIES)
    assert Counters().vocabularies == frozenset(VOCABULARIES)


def test_a_folder_of_the_name_of_a_package_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "splintr").mkdir()
    (tmp_path / "empty").mkdir()
    packages(tmp_path / "empty", monkeypatch)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installed() == frozenset()


def test_a_model_is_counted_with_its_own_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, monkeypatch, ctok=CTOK, splintr=SPLINTR)
    counters = Counters()
    assert not counters.is_loaded("llama3")
    assert counters.loop_bytes("llama3") == 0
    llama, claude = counters.counter("llama3"), counters.counter("claude_v4.8")
    assert (llama.name, llama.count("héllo")) == ("splintr:llama3", 6)
    assert (claude.name, claude.count("three short words")) == ("ctok:claude_v4.8", 3)
    assert counters.is_loaded("llama3")
    assert 0 < counters.loop_bytes("claude_v4.8") < counters.loop_bytes("llama3")
    assert Counters().counter("llama3") is llama


def test_a_package_that_cannot_be_used_is_replaced_by_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packages(tmp_path, monkeypatch, ctok=CTOK, splintr="raise OSError('built for another processor')")
    counters = Counters()
    assert counters.counter("gemma3").name == "tiktoken:o200k_digits"
    assert Counters().counter("gemma3").name == "tiktoken:o200k_digits"
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        "the vocabulary gemma3 cannot be loaded; an estimate counts instead"
    ]


def test_a_vocabulary_is_loaded_once_though_many_ask_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages(tmp_path, monkeypatch, ctok=CTOK, splintr=SPLINTR)
    found, start = list[object](), threading.Barrier(8)

    def ask() -> None:
        start.wait()
        found.append(load("qwen3"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("tokenizer", VOCABULARIES)
def test_each_vocabulary_counts_for_a_family_and_has_a_substitute(tokenizer: str) -> None:
    table = yaml.safe_load(TABLE.read_text("utf-8"))
    assert any(family.tokenizer == tokenizer for family in families_from(table, vocabularies=[tokenizer]))
    assert not any(family.tokenizer in VOCABULARIES for family in families_from(table))
    assert VOCABULARIES[tokenizer].substitute in ("o200k_base", "o200k_digits")


def test_a_text_with_half_a_surrogate_pair_is_counted() -> None:
    counter = SplintrCounter("x", lambda text: list(text.encode()))
    assert counter.count("a\ud800b") == 3


def test_a_long_text_is_counted_in_chunks_and_a_huge_one_in_part() -> None:
    sizes = list[int]()

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return [0] * len(text)

    counter = SplintrCounter("x", encode)
    assert counter.count("a" * 100_000) == 100_000
    assert max(sizes) <= 16_000
    sizes.clear()
    assert counter.count("a" * 8_000_000) == 8_000_000
    assert sum(sizes) == 4_000_000


def test_words_that_claudes_counter_knows_are_not_counted_again() -> None:
    texts = list[str]()

    def count_message(text: str) -> int:
        texts.append(text)
        return 7 + len(text.split())

    counter = ClaudeCounter("x", count_message)
    assert counter.count("the gateway counts the words") == 5
    asked = len(texts)
    assert counter.count("the words the gateway counts") == 5
    assert len(texts) == asked


def test_claudes_counter_keeps_a_limited_number_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "_KNOWN_LIMIT", 10)
    counter = ClaudeCounter("x", lambda text: 7 + len(text.split()))
    for number in range(100):
        word = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        assert counter.count(f"{word} and {word}{word}") == 3
    assert len(counter._words) <= 10


@pytest.mark.parametrize("version", ["3.0", "4.8"])
@example(text="".join(ODD_TEXTS))
@example(text=" " + ODD_TEXTS[0])
@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_every_count_of_claudes_counter_is_that_of_ctok(version: str, text: str) -> None:
    ctok = pytest.importorskip("ctok")
    counter = ClaudeCounter("x", lambda content: ctok.token_count(content, version))
    if text:
        assert counter.count(text) == ctok.token_count(text, version) - ctok.token_count("x", version) + 1
    else:
        assert counter.count(text) == 0


@pytest.mark.parametrize(
    ("tokenizer", "digit_tokens"),
    [("llama3", 3), ("kimi_k2", 3), ("deepseek_v3", 3), ("mistral_v3", 8), ("gemma3", 8), ("qwen3", 8)],
)
def test_numbers_are_counted_as_the_vendors_split_them(tokenizer: str, digit_tokens: int) -> None:
    """Three digits are one token, or each digit is one, as the vendors' tokenizer files say."""
    pytest.importorskip("splintr")
    counter = load(tokenizer)
    assert counter is not None
    assert counter.count("Hello world\n\n") == 3
    assert counter.count("12345678") == digit_tokens
