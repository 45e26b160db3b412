"""`gateway replay`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Commands

TEXT = " ".join(f"word{number % 97}" for number in range(150))


def messages(turns: int) -> list[dict[str, str]]:
    return [{"role": "assistant" if k % 2 else "user", "content": f"{k} {TEXT}"} for k in range(2 * turns + 1)]


@pytest.fixture
def recording(gateway_command: Commands) -> Path:
    file = gateway_command.folder / "requests.jsonl"
    rows: list[Any] = [{"session": name, "body": {"model": "gpt-4o", "messages": messages(10)}} for name in ("a", "b")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_table_says_what_would_have_been_sent(recording: Path, gateway_command: Commands) -> None:
    done = gateway_command("replay", recording, "--conversations", "--budget", "2000")
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[0] for row in rows] == ["session", "a", "b", "all"]
    assert "requests trimmed" in done.err


def test_json_has_the_sums_of_all_and_of_each_session(recording: Path, gateway_command: Commands) -> None:
    done = gateway_command("replay", recording, "--conversations", "--budget", "2000", "--json")
    found = json.loads(done.out)
    assert found["total"]["requests"] == 22
    assert set(found["sessions"]) == {"a", "b"}
    assert found["total"]["as_sent"]["tokens"] < found["total"]["as_it_came"]["tokens"]
    assert sum(one["as_sent"]["tokens"] for one in found["sessions"].values()) == found["total"]["as_sent"]["tokens"]


def test_a_packed_file_and_stdin_are_read(recording: Path, gateway_command: Commands) -> None:
    packed = recording.with_name("requests.jsonl.gz")
    packed.write_bytes(gzip.compress(recording.read_bytes()))
    plain = gateway_command("replay", recording, "--json").out
    assert gateway_command("replay", packed, "--json").out == plain
    assert gateway_command.process("replay", "-", "--json", stdin=recording.read_text()).out == plain


@pytest.mark.parametrize(("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_drawn(recording: Path, gateway_command: Commands, suffix: str, begin: bytes) -> None:
    drawn = recording.with_name(f"plot.{suffix}")
    done = gateway_command("replay", recording, "--conversations", "--plot", drawn)
    assert done.code == 0
    assert drawn.read_bytes().startswith(begin)


def test_lines_without_a_request_are_named_and_passed_over(recording: Path, gateway_command: Commands) -> None:
    recording.write_text("nonsense\n" * 9 + recording.read_text() + '{"model": 5, "messages": []}\n')
    done = gateway_command("replay", recording, "--json")
    assert done.code == 0
    assert json.loads(done.out)["total"]["requests"] == 2
    assert "requests.jsonl, line 1: " in done.err
    assert len(done.err.splitlines()) < 9, "not each of many"


@pytest.mark.parametrize("content", ["", "nonsense\n"])
def test_a_file_without_any_request_fails(content: str, recording: Path, gateway_command: Commands) -> None:
    recording.write_text(content)
    done = gateway_command("replay", recording)
    assert done.code == 1
    assert "no request" in done.err


def test_a_file_that_is_not_there_fails(gateway_command: Commands) -> None:
    done = gateway_command("replay", "nowhere.jsonl")
    assert done.code == 1
    assert "nowhere.jsonl cannot be read" in done.err


def test_a_plot_that_cannot_be_written_fails(recording: Path, gateway_command: Commands) -> None:
    done = gateway_command("replay", recording, "--plot", recording.parent / "none" / "plot.png")
    assert done.code == 1
    assert "cannot be drawn" in done.err


def test_a_packed_file_that_is_damaged_fails(recording: Path, gateway_command: Commands) -> None:
    packed = bytearray(gzip.compress(recording.read_bytes()))
    packed[30:60] = b"\xff" * 30
    damaged = recording.with_name("damaged.jsonl.gz")
    damaged.write_bytes(packed)
    done = gateway_command("replay", damaged)
    assert done.code == 1
    assert "damaged.jsonl.gz cannot be read" in done.err


def test_a_name_is_shown_without_what_a_terminal_would_follow(recording: Path, gateway_command: Commands) -> None:
    recording.write_text(json.dumps({"session": "a\x1b[2Jb", "body": {"model": "gpt-4o", "messages": messages(1)}}))
    done = gateway_command("replay", recording)
    assert done.code == 0
    assert "a?[2Jb" in done.out
