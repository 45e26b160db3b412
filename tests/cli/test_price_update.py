"""`gateway models update`: what it accepts, refuses and writes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.config.price_table import LEAST_PRICED, MOST_BYTES, fetched_file
from tests.conftest import StartUpstream
from tests.support.commands import Commands
from tests.support.scripted import Connection, Script

OWN = {"litellm_provider": "openai", "input_cost_per_token": 2e-06, "output_cost_per_token": 3e-06}
TABLE = json.dumps({f"own-{number}": OWN for number in range(LEAST_PRICED)}).encode()


@pytest.fixture
def command(gateway_command: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("HOME", str(tmp_path))
    return gateway_command


def written() -> list[str]:
    """Return the files next to the fetched table, with itself."""
    folder = fetched_file().parent
    return [file.name for file in folder.iterdir()] if folder.is_dir() else []


def test_fetched_prices_are_used_and_named_with_their_date(command: Commands, byte_server: StartUpstream) -> None:
    server = byte_server(lambda connection: connection.whole(TABLE))
    done = command("models", "update", f"{server.url}/prices.json")
    assert done.code == 0, done.all
    name = f"127.0.0.1 ({datetime.now(UTC).date()})"
    assert done.lines[0].startswith(f"{LEAST_PRICED} models from {name}. Compared with litellm ")
    assert f"{LEAST_PRICED} new" in done.out
    assert written() == ["prices.json.gz"]
    row, *_ = json.loads(command("models", "own-7", "--json").out)
    assert (row["price"]["input"], row["sources"]["price"]) == ("2", name)


def test_file_is_read_like_an_address(command: Commands, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_bytes(TABLE)
    shown = json.loads(command("models", "update", file, "--json").out)
    assert (shown["models"], shown["new"], shown["file"]) == (LEAST_PRICED, LEAST_PRICED, str(fetched_file()))
    assert shown["table"].startswith("a file (")


def cut_off(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(TABLE) + TABLE[:-1])


def too_large(connection: Connection) -> None:
    connection.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
    while connection.sent <= MOST_BYTES + 2**20:
        connection.send(bytes(2**20))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (lambda connection: connection.whole(b"{}", status=b"404 Not Found"), "Not Found"),
        (lambda connection: connection.whole(b"<html>"), "not JSON"),
        (lambda connection: connection.whole(b"{}"), "prices of 0 models"),
        (lambda connection: connection.send(b"no HTTP\r\n\r\n"), "not valid HTTP"),
        (cut_off, "ended after"),
        (too_large, "larger than 32 MiB"),
    ],
    ids=["not found", "a page", "no models", "no HTTP", "cut off", "too large"],
)
def test_other_responses_leave_the_old_table(
    command: Commands, byte_server: StartUpstream, script: Script, reason: str
) -> None:
    server = byte_server(script)
    done = command("models", "update", f"{server.url}/prices.json")
    assert done.code == 1
    assert reason in done.err
    assert "The old table stays." in done.err
    assert written() == []


@pytest.mark.parametrize("address", ["http://prices.invalid/x.json", "ftp://prices.invalid/x.json"])
def test_prices_are_not_fetched_without_tls(command: Commands, address: str) -> None:
    done = command("models", "update", address)
    assert (done.code, "only fetched with https" in done.err) == (1, True)


def test_unreadable_file_and_unwritable_folder_are_named(command: Commands, tmp_path: Path) -> None:
    assert "No such file" in command("models", "update", tmp_path / "nothing").err
    file = tmp_path / "table.json"
    file.write_bytes(TABLE)
    fetched_file().parent.parent.mkdir(parents=True)
    fetched_file().parent.write_text("a file instead of a folder")
    done = command("models", "update", file)
    assert (done.code, "cannot be written" in done.err) == (1, True)


def test_update_needs_an_address_and_nothing_is_fetched_without_it(command: Commands) -> None:
    done = command("models", "update")
    assert done.code == 2
    assert written() == []
