from __future__ import annotations

import gzip
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.counters import tiktoken as tiktoken_counters
from gateway.counters.registry import Counters
from gateway.counters.tiktoken import TABLES, TiktokenCounter, load, rank_folders
from tests.conftest import StartGateway
from tests.support.gateways import ROOT

#: parts that the patterns split: cases, contractions, scripts, marks, numbers, signs, spaces, line ends
ODD_TEXTS = (
    "I'm HE'LL we'Ve don\u2019t O'Clock camelCase HTTPServer ǅungla",
    "1 12 123 1234 12345678 ٣٤٥ ½ Ⅷ",
    "a\n\n\nb \r\n\t c  \u3000\u00a0 d   ",
    "!!! ...\n/// --> `x`;\n{}[]//\n",
    "e\u0301 हिन्दी ไทย 漢字かな 한국어 👩‍👩‍👧 \ud800 <|endoftext|>",
)


def unpacked(folder: Path) -> Path:
    """Write the rank files into a new folder, as tiktoken does."""
    for table in TABLES.values():
        (folder / table.file).write_bytes(gzip.decompress((rank_folders()[-1] / f"{table.file}.gz").read_bytes()))
    return folder


def probed(counters: Counters) -> dict[str, str]:
    """Return the name of the counter of each encoding."""
    return {encoding: counters.counter(encoding).name for encoding in TABLES}


@pytest.fixture(scope="module")
def counters() -> Counters:
    return Counters()


def test_known_texts_have_their_known_counts(counters: Counters) -> None:
    """Compare with published counts of these encodings."""
    o200k, cl100k = counters.counter("o200k_base"), counters.counter("cl100k_base")
    assert (o200k.name, cl100k.name) == ("tiktoken:o200k_base", "tiktoken:cl100k_base")
    assert [counter.count("hello world") for counter in (o200k, cl100k)] == [2, 2]
    assert [counter.count("antidisestablishmentarianism") for counter in (o200k, cl100k)] == [6, 6]
    assert [counter.count("お誕生日おめでとう") for counter in (o200k, cl100k)] == [8, 9]
    assert o200k.count("") == 0


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Callable[[str], list[int]]]:
    """Return the encoding that tiktoken loads itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(unpacked(tmp_path_factory.mktemp("ranks"))))
        return {name: tiktoken.get_encoding(name).encode_ordinary for name in TABLES}


@pytest.mark.parametrize("encoding", TABLES)
@example(text="".join(ODD_TEXTS))
@example(text="word " * 3 + "x" * 500 + " 's" * 50)
@settings(max_examples=300, deadline=None)
@given(
    text=st.one_of(
        st.text(st.characters(exclude_categories=())),
        st.lists(st.sampled_from([*ODD_TEXTS, *" \n\r\t/'sSlLdD12aZ.é漢"])).map("".join),
    )
)
def test_every_count_is_that_of_tiktoken_itself(
    counters: Counters, theirs: Mapping[str, Callable[[str], list[int]]], encoding: str, text: str
) -> None:
    assert counters.counter(encoding).count(text) == len(theirs[encoding](text))


def test_ranks_are_released_after_building(tmp_path: Path) -> None:
    """The ranks alone would be 400,000 objects."""
    before = sys.getallocatedblocks()
    counter = load(unpacked(tmp_path), "o200k_base")
    kept = sys.getallocatedblocks() - before
    assert counter is not None
    assert counter.count("hello world") == 2
    assert kept < 20_000


@pytest.mark.parametrize(
    ("text", "further"),
    [
        ("no number in it", 0),
        ("a 7 and a 4", 0),
        ("in 2026", 2),  # 202|6
        ("12345678", 5),  # 123|456|78
        ("id=48213 took 512 ms", 5),
        ("2026-11-23T16:41:09Z", 2 + 1 + 1 + 1 + 1 + 1),
        ("x1y22z333", 0 + 1 + 2),
    ],
)
def test_each_digit_is_a_token_where_a_vocabulary_holds_no_numbers(counters: Counters, text: str, further: int) -> None:
    assert counters.counter("o200k_digits").count(text) - counters.counter("o200k_base").count(text) == further


@given(st.text(alphabet="0123456789a ,é٣\ud800"))
def test_each_digit_of_any_text_is_a_token(counters: Counters, text: str) -> None:
    further = sum(len(number) - 1 for number in re.findall("[0-9]{1,3}", text))
    assert counters.counter("o200k_digits").count(text) - counters.counter("o200k_base").count(text) == further


def test_digits_of_a_long_text_are_counted_to_its_end(counters: Counters) -> None:
    rows = "row 12345\n" * 20_000
    found = counters.counter("o200k_digits").count(rows) - counters.counter("o200k_base").count(rows)
    assert found == 3 * 20_000


def test_an_unknown_tokenizer_is_counted_with_a_known_one(counters: Counters) -> None:
    assert counters.counter("llama9").name == "tiktoken:o200k_base"


def test_a_table_is_loaded_once_though_many_ask_at_once(tmp_path: Path) -> None:
    folder, found, start = unpacked(tmp_path), list[object](), threading.Barrier(8)

    def ask() -> None:
        own = Counters(folder)
        start.wait()
        found.append(own.counter("cl100k_base"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_token_tables_are_loaded_by_the_first_call_that_needs_them(
    gateway_server: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> list[str]:
        return [encoding for at, encoding in tiktoken_counters.LOADED if at == folder]

    (tmp_path / "ranks").mkdir()
    folder = unpacked(tmp_path / "ranks")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    gateway = gateway_server("http://127.0.0.1:9", models=[{"match": "gpt-4", "provider": "upstream"}])
    assert loaded() == []
    for model, encodings in (("gpt-4o", ["o200k_base"]), ("gpt-4", ["o200k_base", "cl100k_base"])):
        body = {"model": model, "messages": [{"role": "user", "content": "Hi."}]}
        gateway.web.post("/v1/chat/completions", body)
        assert loaded() == encodings


def test_names_of_special_tokens_are_text(counters: Counters) -> None:
    assert counters.counter("o200k_base").count("<|endoftext|><|im_start|>") > 4


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_counted(counters: Counters, text: str) -> None:
    count = counters.counter("o200k_base").count(text)
    assert (count > 0) == bool(text)


def test_long_text_is_split_before_spaces() -> None:
    pieces: list[str] = []

    def encode(text: str) -> list[int]:
        pieces.append(text)
        return [0] * len(text.split())

    text = "word " * 60_000
    assert TiktokenCounter("o200k_base", encode).count(text) == 60_000
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 64_000


@pytest.mark.parametrize("run", ["a", " ", "^", "汉", "\n", "é"])
def test_long_word_is_counted_in_bounded_chunks(run: str) -> None:
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
    assert probed(counters) == {"o200k_base": "heuristic", "cl100k_base": "heuristic"}
    assert counters.counter("o200k_base").count("one two three") == 3


def test_a_damaged_file_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    for table in TABLES.values():
        (tmp_path / table.file).write_bytes(b"not the ranks")
    assert set(probed(Counters(tmp_path)).values()) == {"heuristic"}
    assert len(list(tmp_path.iterdir())) == len(TABLES)


@pytest.mark.parametrize("has", [["cl100k_base"], []])
def test_missing_rank_files_come_from_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: list[str]
) -> None:
    (tmp_path / "all").mkdir()
    every = unpacked(tmp_path / "all")
    for name in has:
        (tmp_path / TABLES[name].file).symlink_to(every / TABLES[name].file)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert rank_folders()[0] == tmp_path
    assert probed(Counters()) == {name: f"tiktoken:{name}" for name in TABLES}
    assert Counters().notes() == []
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert probed(Counters()) == {name: f"tiktoken:{name}" for name in TABLES}


def test_missing_or_damaged_rank_file_is_noted(tmp_path: Path) -> None:
    folder = unpacked(tmp_path)
    (folder / TABLES["o200k_base"].file).unlink()
    (folder / TABLES["o200k_base"].file).write_bytes(b"not the ranks")
    [note] = Counters(folder).notes()
    assert TABLES["o200k_base"].file in note
    assert "of o200k_base are estimated" in note
    assert "TIKTOKEN_CACHE_DIR" in note
    (folder / TABLES["cl100k_base"].file).unlink()
    assert len(Counters(folder).notes()) == 2


def test_tiktoken_itself_reads_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    folder = unpacked(tmp_path / "ours")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "theirs"))
    assert Counters(folder).counter("cl100k_base").name == "tiktoken:cl100k_base"
    assert os.environ["TIKTOKEN_CACHE_DIR"] == str(tmp_path / "theirs")
    assert list((tmp_path / "theirs").iterdir()) == []


def test_check_and_serve_tell_of_missing_tables(tmp_path: Path) -> None:
    (tmp_path / "gateway" / "data").mkdir(parents=True)
    for part in (ROOT / "gateway").iterdir():
        (tmp_path / "gateway" / part.name).symlink_to(part)
    for part in (ROOT / "config").iterdir():
        if part.name != "ranks":
            (tmp_path / "gateway" / "data" / part.name).symlink_to(part)
    env = {**os.environ, "TIKTOKEN_CACHE_DIR": "", "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for command, code in (["check"], 0), (["serve", "--port", port], 1):
            done = subprocess.run(
                [sys.executable, "-m", "gateway", *command],
                capture_output=True, text=True, env=env, check=False, timeout=120, cwd=tmp_path,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
            assert all(table.file in done.stderr for table in TABLES.values())


SCRIPT = """
import os, socket, sys
def refuse(*_args, **_more): raise SystemExit("network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
from gateway.counters import tiktoken as tiktoken_counters
from gateway.counters.registry import Counters
assert "tiktoken" not in sys.modules
print({name: Counters().counter(name).name for name in ("o200k_base", "cl100k_base")}, "litellm" in sys.modules, "TIKTOKEN_CACHE_DIR" in os.environ)
"""


def test_a_fresh_process_counts_without_the_network_and_without_litellm() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TIKTOKEN_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=False, timeout=120
    )
    assert (
        done.stdout.strip()
        == str({"o200k_base": "tiktoken:o200k_base", "cl100k_base": "tiktoken:cl100k_base"}) + " False False"
    ), done.stderr


def test_huge_text_is_extrapolated_from_its_prefix() -> None:
    counted: list[int] = []

    def encode(text: str) -> list[int]:
        counted.append(len(text))
        return [0] * (len(text) // 4)

    assert TiktokenCounter("x", encode).count("word" * 5_000_000) == 5_000_000
    assert sum(counted) == 4_000_000
