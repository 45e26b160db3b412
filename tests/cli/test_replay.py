"""`gateway replay`."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands
from tests.support.gateways import GatewayThread, until

TEXT = " ".join(f"word{number % 97}" for number in range(150))


@dataclass(frozen=True)
class Played:
    """The configuration of a gateway, and its API's data after all calls."""

    file: Path
    totals: dict[str, Any]
    page: bytes


def messages(turns: int) -> list[dict[str, str]]:
    return [{"role": "assistant" if k % 2 else "user", "content": f"{k} {TEXT}"} for k in range(2 * turns + 1)]


@pytest.fixture
def recording(gateway_command: Commands) -> Path:
    file = gateway_command.folder / "requests.jsonl"
    rows: list[Any] = [{"session": name, "body": {"model": "gpt-4o", "messages": messages(10)}} for name in ("a", "b")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_table_shows_what_would_have_been_sent(recording: Path, gateway_command: Commands) -> None:
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
    compressed = recording.with_name("requests.jsonl.gz")
    compressed.write_bytes(gzip.compress(recording.read_bytes()))
    plain = gateway_command("replay", recording, "--json").out
    assert gateway_command("replay", compressed, "--json").out == plain
    assert gateway_command.process("replay", "-", "--json", stdin=recording.read_text()).out == plain


@pytest.mark.parametrize(
    ("name", "begin"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF"), ("a b.c.PNG", b"\x89PNG")]
)
def test_a_plot_is_drawn_into_the_file_that_is_named(
    recording: Path, gateway_command: Commands, name: str, begin: bytes
) -> None:
    drawn = recording.with_name(name)
    done = gateway_command("replay", recording, "--conversations", "--plot", drawn)
    assert done.code == 0
    assert drawn.read_bytes().startswith(begin)
    assert {path.name for path in recording.parent.iterdir() if path.is_file()} == {recording.name, name}


@pytest.mark.parametrize("name", ["q", "q.", ".png", "p.xyz", "p.pgf", "-", "", "p\x1b[2J"])
def test_a_plot_whose_name_says_no_format_is_refused_before_anything_is_read(
    name: str, gateway_command: Commands
) -> None:
    (gateway_command.folder / "q.png").write_text("another one's")
    for more in ((), ("--records", "--store", "sqlite://none.db")):
        done = gateway_command("replay", "nowhere.jsonl", "--plot", name, *more)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("--plot ")
        assert done.err.endswith("must end with .png, .svg or .pdf.\n")
        assert "\x1b" not in done.err
    assert [path.name for path in gateway_command.folder.iterdir()] == ["q.png"]
    assert (gateway_command.folder / "q.png").read_text() == "another one's"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/p.png", "the folder does not exist"),
        ("folder.png", "it is a folder"),
        (f"{'x' * 500}.png", "File name too long"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_read(
    name: str, reason: str, gateway_command: Commands
) -> None:
    (gateway_command.folder / "folder.png").mkdir()
    done = gateway_command("replay", "nowhere.jsonl", "--plot", name)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("--plot ")
    assert done.err.endswith(f" cannot be written: {reason}.\n")
    assert len(done.err.splitlines()) == 1


def test_lines_without_a_request_are_reported_and_skipped(recording: Path, gateway_command: Commands) -> None:
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
    assert "cannot be written" in done.err


def test_a_packed_file_that_is_damaged_fails(recording: Path, gateway_command: Commands) -> None:
    compressed = bytearray(gzip.compress(recording.read_bytes()))
    compressed[30:60] = b"\xff" * 30
    damaged = recording.with_name("damaged.jsonl.gz")
    damaged.write_bytes(compressed)
    done = gateway_command("replay", damaged)
    assert done.code == 1
    assert "damaged.jsonl.gz cannot be read" in done.err


def test_error_about_a_line_names_its_file(recording: Path, gateway_command: Commands) -> None:
    other = recording.with_name("other.jsonl")
    other.write_text('{"model": "", "messages": []}\n')
    done = gateway_command("replay", recording, other, "--json")
    assert done.code == 0
    assert "other.jsonl, line 1: " in done.err
    assert gateway_command.process("replay", "-", stdin="{}").err.startswith("stdin, line 1: ")


def test_without_a_file_it_says_what_to_name(gateway_command: Commands) -> None:
    done = gateway_command("replay")
    assert done.code == 2
    assert "--records" in done.err


@pytest.mark.parametrize(
    "args",
    [
        ("x.jsonl", "--session-budget", "5"),
        ("x.jsonl", "--store", "memory://"),
        ("--records", "-m", "gpt-4o"),
        ("--records", "--conversations"),
    ],
)
def test_options_of_the_other_kind_are_refused(args: tuple[str, ...], gateway_command: Commands) -> None:
    assert gateway_command("replay", *args).code == 2


@pytest.fixture(scope="module")
def played(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Two sessions of 8 calls each, served by a gateway."""
    gateway = GatewayThread(tmp_path_factory.mktemp("played"), mock_server.url, {})
    for session in ("a", "b"):
        for turn in range(8):
            asked = messages(turn)
            assert gateway.web.chat(session=session, messages=asked, stream=turn % 2 == 1).status == 200
    assert gateway.web.chat(session="a", mock="status=400").status == 400
    totals = {one["id"]: one for one in gateway.web.get("/api/sessions").json["sessions"]}
    page = gateway.web.get("/api/sessions/a/calls?limit=100").body
    gateway.stop()
    return Played(gateway.file, totals, page)


def test_records_of_a_store_add_up_to_its_totals(played: Played, gateway_command: Commands) -> None:
    done = gateway_command("replay", "--records", "-c", played.file, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert set(found["sessions"]) == {"a", "b"}
    for name, one in found["sessions"].items():
        usage = played.totals[name]["cumulative_token_usage"]
        assert one["usage"] == {part: usage[part] for part in one["usage"]}
        assert one["calls"] - one["uncharged_calls"] == played.totals[name]["calls"] == 8
    assert found["sessions"]["a"]["uncharged_calls"] == 1
    assert found["total"]["usage"]["total_tokens"] == sum(
        one["cumulative_token_usage"]["total_tokens"] for one in played.totals.values()
    )


def test_the_records_that_the_api_shows_say_the_same(played: Played, gateway_command: Commands) -> None:
    page = gateway_command.folder / "calls.jsonl"
    page.write_bytes(played.page)
    budgets = ("--budget", "1000", "--session-budget", "5000", "--json")
    shown = gateway_command("replay", "--records", page, *budgets)
    stored = gateway_command("replay", "--records", "a", "-c", played.file, *budgets)
    assert json.loads(shown.out)["total"] == json.loads(stored.out)["total"]
    assert gateway_command.process("replay", "--records", "-", *budgets, stdin=played.page.decode()).out == shown.out


def test_table_of_records_shows_when_budgets_would_take_effect(played: Played, gateway_command: Commands) -> None:
    args = ("replay", "--records", "-c", played.file, "--budget", "1000", "--session-budget", "5000")
    done = gateway_command(*args)
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert sorted(row[0] for row in rows) == ["a", "all", "b", "session"]
    assert "refused at" in done.lines[0]
    assert "Records contain no text" in done.err
    found = json.loads(gateway_command(*args, "--json").out)["sessions"]["a"]
    assert found["over_context_budget"]["calls"] == len(found["calls_over"]) > 0
    assert all(one["over"] == one["tokens"] - 1000 > 0 for one in found["calls_over"])
    assert list(found["modes"]) == sorted(found["modes"], key=("table", "summary", "handle_only").index)
    assert found["refused_calls"] > 0
    assert found["first_refused"]["limit"] == 5000
    assert found["spent"]["tokens"] <= 5000


def test_without_a_budget_the_table_says_how_to_name_one(played: Played, gateway_command: Commands) -> None:
    done = gateway_command(
        "replay", "--records", "-c", played.file, "--store", f"sqlite://{played.file.parent}/gateway.db"
    )
    assert "refused at" not in done.lines[0]
    assert "--session-budget" in done.err
    assert "1 of 17 calls cost nothing" in done.err


def test_budgets_of_stored_keys_are_known_only_with_the_store(
    mock_server: MockServer, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url)
    store = ("--store", f"sqlite://{gateway.store}")
    own = {
        "authorization": f"Bearer {gateway_command('keys', 'add', 'carol', '--budget-calls', '3', *store).out.strip()}"
    }
    body = {"model": "mock-small", "messages": messages(1)}
    until(lambda: gateway.web.chat("open").status == 401)
    for _ in range(3):
        assert gateway.web.post("/s/s/v1/chat/completions", body, own).status == 200
    page = gateway_command.folder / "calls.jsonl"
    done = gateway_command("replay", "--records", *store, "--session-budget", "1000000")
    assert "not known" not in done.err
    assert gateway_command("keys", "revoke", "carol", *store).code == 0
    assert gateway_command("keys", "add", "carol", "--budget-calls", "2", *store).code == 0
    known = gateway_command("replay", "--records", *store, "--json")
    assert known.err == ""
    assert json.loads(known.out)["total"]["refused_calls"] == 1
    call = {"call_id": "c", "request_id": "c", "session": "carol/s", "started_at": "2026-01-01T00:00:00.000Z"}
    page.write_text(json.dumps({**call, "provider": "own", "model": "mock-small", "stream": False}) + "\n")
    for more in ((), ("--json",)):
        assert "No budgets are known for these client keys: carol." in (
            gateway_command("replay", "--records", page, *more).err
        )


def test_a_plot_of_records_is_drawn(played: Played, gateway_command: Commands) -> None:
    drawn = gateway_command.folder / "plot.png"
    assert gateway_command("replay", "--records", "-c", played.file, "--plot", drawn).code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "neither a file nor a session"),
        ("calls.jsonl", 'File "calls.jsonl" does not exist'),
        ("no/such file", "neither a file nor a valid session id"),
    ],
)
def test_what_is_neither_a_file_nor_a_session_fails(
    name: str, said: str, played: Played, gateway_command: Commands
) -> None:
    done = gateway_command("replay", "--records", name, "-c", played.file)
    assert done.code == 1
    assert said in done.err


def test_requests_and_records_are_distinguished(recording: Path, played: Played, gateway_command: Commands) -> None:
    page = gateway_command.folder / "calls.jsonl"
    page.write_bytes(played.page)
    mixed = gateway_command("replay", recording, page, "--json")
    assert json.loads(mixed.out)["total"]["requests"] == 2
    assert "calls.jsonl, line 1: is a record of a call" in mixed.err
    done = gateway_command("replay", "--records", recording)
    assert done.code == 1
    assert "requests.jsonl, line 1: is a request" in done.err
    assert "not a record of a call" in done.err


def test_control_characters_in_names_are_replaced(recording: Path, gateway_command: Commands) -> None:
    recording.write_text(json.dumps({"session": "a\x1b[2Jb", "body": {"model": "gpt-4o", "messages": messages(1)}}))
    done = gateway_command("replay", recording)
    assert done.code == 0
    assert "a?[2Jb" in done.out


def test_control_characters_in_a_recording_are_replaced(gateway_command: Commands) -> None:
    file = gateway_command.folder / "odd.jsonl"
    file.write_text(json.dumps({"model": "odd\x07", "messages": [{"role": "user", "content": "hello"}]}))
    done = gateway_command.process("replay", file, "-c", gateway_command.file("default_provider: null"))
    assert done.code == 1
    assert 'the model "odd?"' in done.err
