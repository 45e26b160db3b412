from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.counters.registry import Counters
from gateway.counters.tiktoken import RANK_FILES, TiktokenCounter, rank_folder


@pytest.fixture(scope="module")
def counters() -> Counters:
    return Counters()


def test_known_texts_have_their_known_counts(counters: Counters) -> None:
    """Counts as published for these encodings."""
    o200k, cl100k = counters.counter("o200k_base"), counters.counter("cl100k_base")
    assert (o200k.name, cl100k.name) == ("tiktoken:o200k_base", "tiktoken:cl100k_base")
    assert [counter.count("hello world") for counter in (o200k, cl100k)] == [2, 2]
    assert [counter.count("antidisestablishmentarianism") for counter in (o200k, cl100k)] == [6, 6]
    assert [counter.count("お誕生日おめでとう") for counter in (o200k, cl100k)] == [8, 9]
    assert o200k.count("") == 0


def test_an_unknown_tokenizer_is_counted_with_a_known_one(counters: Counters) -> None:
    assert counters.counter("llama9").name == "tiktoken:o200k_base"


def test_one_counter_serves_all_who_ask(counters: Counters) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(counters.counter("o200k_base"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_names_of_special_tokens_are_text(counters: Counters) -> None:
    assert counters.counter("o200k_base").count("<|endoftext|><|im_start|>") > 4


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_counted(counters: Counters, text: str) -> None:
    count = counters.counter("o200k_base").count(text)
    assert (count > 0) == bool(text)


def test_a_long_text_is_cut_where_it_costs_next_to_nothing() -> None:
    pieces: list[str] = []

    def encode(text: str) -> list[int]:
        pieces.append(text)
        return [0] * len(text.split())

    text = "word " * 60_000
    assert TiktokenCounter("o200k_base", encode).count(text) == 60_000
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 64_000


@pytest.mark.parametrize("run", ["a", " ", "^", "汉", "\n", "é"])
def test_a_run_of_one_character_is_given_over_in_bounded_pieces(run: str) -> None:
    sizes: list[int] = []

    def encode(text: str) -> list[int]:
        sizes.append(len(text))
        return [0]

    TiktokenCounter("o200k_base", encode).count(run * 300_000)
    assert sum(sizes) == 300_000
    assert max(sizes) <= 64_000
    assert len(sizes) <= 10


def test_missing_files_leave_the_heuristic_and_its_name(tmp_path: Path) -> None:
    counters = Counters(tmp_path)
    assert counters.probe() == {"o200k_base": "heuristic", "cl100k_base": "heuristic"}
    assert counters.counter("o200k_base").count("one two three") == 3


def test_a_damaged_file_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    for name, _ in RANK_FILES.values():
        (tmp_path / name).write_bytes(b"not the ranks")
    assert set(Counters(tmp_path).probe().values()) == {"heuristic"}
    assert len(list(tmp_path.iterdir())) == len(RANK_FILES)


def test_a_users_folder_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert rank_folder() == tmp_path
    assert set(Counters().probe().values()) == {"heuristic"}
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert rank_folder() is None
    assert set(Counters().probe().values()) == {"heuristic"}


def test_another_folder_than_the_users_is_not_slipped_past_tiktoken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    whole = rank_folder()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert Counters(whole).counter("o200k_base").name == "heuristic"


SCRIPT = """
import socket, sys
def refuse(*_args, **_more): raise SystemExit("network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from gateway.counters.registry import Counters
assert "tiktoken" not in sys.modules
print(Counters().probe(), "litellm" in sys.modules)
"""


def test_a_fresh_process_counts_without_the_network_and_without_litellm() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TIKTOKEN_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=False, timeout=120
    )
    assert (
        done.stdout.strip()
        == str({"o200k_base": "tiktoken:o200k_base", "cl100k_base": "tiktoken:cl100k_base"}) + " False"
    ), done.stderr


def test_a_text_that_no_window_holds_is_counted_by_its_beginning() -> None:
    counted: list[int] = []

    def encode(text: str) -> list[int]:
        counted.append(len(text))
        return [0] * (len(text) // 4)

    assert TiktokenCounter("x", encode).count("word" * 5_000_000) == 5_000_000
    assert sum(counted) == 4_000_000
