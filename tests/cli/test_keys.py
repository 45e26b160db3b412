"""`gateway keys`: add and revoke client keys while the gateway runs."""

from __future__ import annotations

import errno
import io
import json
import os
import sqlite3
import sys
from pathlib import Path

import pytest

from gateway.cli import app
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands, run_with_closed_streams, run_with_output
from tests.support.gateways import GatewayThread, until
from tests.support.terminals import Terminal

ALICE = 'auth: {keys: [{name: alice, key: "0123456789abcdef"}]}'


def test_a_key_is_shown_once_opens_its_sessions_and_is_refused_once_it_is_revoked(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url)
    store = ["--store", f"sqlite://{gateway.store}"]
    assert gateway.web.chat("s").status == 200
    added = gateway_command("keys", "add", "carol", "--budget-calls", "2", "--window", "1d", *store)
    key = added.out.strip()
    assert added.code == 0
    assert len(key) > 40
    assert key.encode() not in gateway.store.read_bytes()
    until(lambda: gateway.web.chat("s").status == 401)
    own = {"authorization": f"Bearer {key}"}
    body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}]}
    statuses = [gateway.web.post("/v1/chat/completions", body, own).status for _ in range(3)]
    assert statuses == [200, 200, 400]
    assert gateway_command("keys", "add", "carol", *store).code == 1
    (row,) = json.loads(gateway_command("keys", "list", "--json", *store).out)
    assert (row["name"], row["calls"], row["used_fraction"]) == ("carol", 2, 1.0)
    assert key not in gateway_command("keys", *store).out
    assert gateway_command("keys", "revoke", "carol", *store).code == 0
    until(lambda: gateway.web.post("/v1/chat/completions", body).status == 200)
    assert gateway_command("keys", "revoke", "carol", *store).code == 1


FIRST = "This is the first client key. Once it exists, calls without a client key are refused (401)."


@pytest.mark.parametrize(("answer", "status"), [("y", 401), ("n", 200)])
def test_a_terminal_is_asked_before_the_first_key_ends_open_access(
    answer: str, status: int, mock_server: MockServer, gateway_server: StartGateway, tmp_path: Path
) -> None:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.chat("s").status == 200
    args = ("keys", "add", "carol", "--store", f"sqlite://{gateway.store}")
    done = Terminal(tmp_path, 80, *args, stdin=f"{answer}\n", has_stderr=True).done()
    assert FIRST in " ".join(done.out.split())
    assert "Create it? [y/N]" in done.out
    assert (done.code, "gw-" in done.out) == ((0, True) if answer == "y" else (1, False))
    if status == 200:
        assert "No key was created." in done.out
        assert gateway.web.chat("s").status == 200
    else:
        until(lambda: gateway.web.chat("s").status == status)
        again = Terminal(tmp_path, 80, "keys", "add", "dave", *args[3:], has_stderr=True).done()
        assert (again.code, "Create it?" in again.out) == (0, False), "there is nothing left to end"


@pytest.mark.parametrize("more", [(), ("--yes",)])
def test_first_key_prints_a_notice_in_a_script(more: tuple[str, ...], gateway_command: Commands) -> None:
    done = gateway_command.process("keys", "add", "carol", *more, stdin="")
    assert (done.code, done.out[:3]) == (0, "gw-")
    assert done.err.startswith(FIRST)
    assert FIRST not in gateway_command("keys", "add", "dave").err


def test_yes_option_skips_the_confirmation(tmp_path: Path) -> None:
    done = Terminal(tmp_path, 80, "keys", "add", "carol", "--yes", has_stderr=True).done()
    assert done.code == 0
    assert "Create it?" not in done.out


@pytest.mark.parametrize("auth", [ALICE, "auth: {required: true}"])
def test_no_notice_if_calls_need_a_key_already(auth: str, gateway_command: Commands) -> None:
    gateway_command.file(auth, "gateway.yaml")
    assert FIRST not in gateway_command("keys", "add", "carol").err


@pytest.mark.parametrize(
    "asked",
    [
        ["a/b"],
        ["default"],
        ["anonymous"],
        ["cred-1"],
        ["x", "--window", "soon"],
        ["x", "--budget-usd", "much"],
        ["x", "--budget-tokens", str(2**53 + 1)],
        ["x", "--rpm", "0"],
        ["x", "--rpm", str(2**53 + 1)],
        ["x", "--rpm", "99999999999999999999999"],
    ],
)
def test_invalid_key_is_refused(gateway: GatewayThread, gateway_command: Commands, asked: list[str]) -> None:
    done = gateway_command("keys", "add", *asked, "--store", f"sqlite://{gateway.store}")
    assert done.code == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["x", "--budget-usd", "much"], '--budget-usd "much": input should be a valid decimal'),
        (["x", "--window", "1d"], '--window "1d": has no limit to refill; '),
        (["x", "--window", "soon"], '--window "soon": must be a duration like 90s'),
        (["a\x07b"], '"a?b" is not a valid name'),
        (["x", "--models", ""], '--models "": each must be one pattern of model names'),
        (["x", "--models", "gpt-*,claude-*"], '--models "gpt-*,claude-*": each must be one pattern of model names'),
        (["x", "--expires", "soon"], '--expires "soon": must be a date like 2026-12-31'),
        (["x", "--expires", "2020-01-01"], '--expires "2020-01-01": must be in the future'),
    ],
)
def test_error_repeats_the_option_as_typed(asked: list[str], said: str, gateway_command: Commands) -> None:
    done = gateway_command("keys", "add", *asked)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(said)


def listed(commands: Commands, name: str, *store: str) -> dict[str, object]:
    rows = json.loads(commands("keys", "list", "--json", *store).out)
    return next(row for row in rows if row["name"] == name)


def test_key_is_changed_without_a_new_secret(gateway_command: Commands) -> None:
    added = gateway_command("keys", "add", "carol", "--budget-usd", "5", "--window", "1d", "--models", "gpt-*")
    assert added.code == 0
    done = gateway_command("keys", "set", "carol", "--budget-usd", "20", "--budget-calls", "1k", "--rpm", "60")
    assert (done.code, "$20" in done.out, "gw-" in done.out) == (0, True, False)
    row = listed(gateway_command, "carol")
    assert (row["usd"], row["calls"], row["rpm"], row["window_s"]) == ("20.000000", 1000, 60, 86_400)
    assert row["models"] == ["gpt-*"]
    free = ("--budget-usd", "none", "--budget-calls", "none", "--rpm", "none", "--models", "all", "--expires", "30d")
    assert gateway_command("keys", "set", "carol", *free).code == 0
    row = listed(gateway_command, "carol")
    assert (row["usd"], row["calls"], row["rpm"], row["window_s"], row["models"]) == (None, None, None, None, [])
    assert row["expires_at"] is not None
    assert json.loads(gateway_command("keys", "set", "carol", "--expires", "none", "--json").out)["expires_at"] is None


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (["carol"], 2, "Name what to change, such as --budget-usd 20"),
        (["carol", "--rpm", "0"], 2, "0 is not in the range"),
        (["carol", "--budget-usd", "much"], 2, '--budget-usd "much": input should be a valid decimal'),
        (["carol", "--window", "1h"], 2, '--window "1h": has no limit to refill'),
        (["carl", "--rpm", "1"], 1, 'The store has no key "carl" (did you mean carol?).'),
    ],
)
def test_wrong_change_says_why(asked: list[str], code: int, said: str, gateway_command: Commands) -> None:
    assert gateway_command("keys", "add", "carol").code == 0
    done = gateway_command("keys", "set", *asked)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_key_of_the_configuration_is_changed_there(gateway_command: Commands) -> None:
    file = gateway_command.file(ALICE)
    done = gateway_command("keys", "set", "alice", "--rpm", "1", "-c", file)
    assert (done.code, done.err) == (
        1,
        '"alice" is a key in the configuration. Change it in auth.keys and reload.\n',
    )


def test_key_joins_a_group_of_the_configuration(gateway_command: Commands) -> None:
    gateway_command.file("auth: {groups: {research: {budget: {usd: 5}}}, budget: {calls: 9}}", "gateway.yaml")
    assert gateway_command("keys", "add", "carol", "--group", "research").code == 0
    assert listed(gateway_command, "carol")["group"] == "research"
    shown = gateway_command("keys", "list").out
    assert "all keys: 0 % of the budget is used\ngroup research: 0 % of the budget is used" in shown
    wrong = gateway_command("keys", "set", "carol", "--group", "nobody")
    assert (wrong.code, wrong.err) == (
        2,
        (
            '--group "nobody": auth.groups of the configuration has no group of this name; add it there, or '
            "name another one\n"
        ),
    )
    assert gateway_command("keys", "set", "carol", "--group", "none").code == 0
    assert listed(gateway_command, "carol")["group"] is None


def test_rotated_key_prints_the_new_secret_and_when_the_old_one_ends(gateway_command: Commands) -> None:
    first = gateway_command("keys", "add", "carol").out.strip()
    done = gateway_command("keys", "rotate", "carol")
    assert (done.code, done.out.startswith("gw-"), done.out.strip() == first) == (0, True, False)
    assert "The secret before it ends at 20" in done.err
    now = gateway_command("keys", "rotate", "carol", "--overlap", "0")
    assert "Secrets before it have ended." in now.err
    assert listed(gateway_command, "carol")["replaced_until"] == []
    wrong = gateway_command("keys", "rotate", "carol", "--overlap", "soon")
    assert (wrong.code, wrong.err.startswith('--overlap "soon": must be a duration')) == (2, True)


def test_similar_key_or_client_is_suggested(gateway_command: Commands) -> None:
    assert gateway_command("keys", "add", "alice").code == 0
    done = gateway_command("keys", "revoke", "alise")
    assert (done.code, done.err) == (1, 'The store has no key "alise" (did you mean alice?).\n')
    done = gateway_command("env", "claude-cod")
    assert done.code == 2
    assert 'Unknown client "claude-cod" (did you mean claude-code?). Known clients: ' in done.err


@pytest.mark.parametrize("given", [["--store", "sqlite://other.db"], ["-c", "other.yaml"], ["--json"]])
@pytest.mark.parametrize("then", [["revoke", "carol"], ["add", "carol"], ["list"]])
def test_option_before_the_command_is_refused(given: list[str], then: list[str], gateway_command: Commands) -> None:
    done = gateway_command("keys", *given, *then)
    assert (done.code, done.out) == (2, "")
    assert "Write it after" in done.err
    assert list(gateway_command.folder.iterdir()) == []


def test_a_key_whose_account_cannot_be_read_hides_no_other(gateway_command: Commands, tmp_path: Path) -> None:
    store = ["--store", f"sqlite://{tmp_path / 'keys.db'}"]
    for name in ("broken", "sound"):
        assert gateway_command("keys", "add", name, "--budget-calls", "2", *store).code == 0
    with sqlite3.connect(tmp_path / "keys.db") as database:
        database.execute(
            "INSERT INTO accounts (kind, namespace, id, used_tokens, used_nano_usd, used_calls, held_tokens, "
            "held_nano_usd, held_calls, changed_at) VALUES ('key', 'broken', '', 'junk', 0, 0, 0, 0, 0, 0)"
        )
    database.close()
    listed = gateway_command("keys", "list", "--json", *store)
    assert listed.code == 0
    assert {row["name"]: row["used_fraction"] for row in json.loads(listed.out)} == {"broken": None, "sound": 0.0}
    assert "broken" in listed.err


@pytest.mark.parametrize("store", ["memory://", "sqlite://none-yet.db"])
def test_configured_key_cannot_be_revoked(store: str, gateway_command: Commands) -> None:
    file = gateway_command.file(ALICE)
    done = gateway_command("keys", "revoke", "alice", "-c", file, "--store", store)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith('"alice" is a key in the configuration. Remove it from auth.keys')
    assert len(done.err.splitlines()) == 1


def test_key_in_store_and_configuration_is_revoked_in_the_store(gateway_command: Commands) -> None:
    store = ["--store", "sqlite://own.db"]
    assert gateway_command("keys", "add", "alice", *store).code == 0
    done = gateway_command("keys", "revoke", "alice", "-c", gateway_command.file(ALICE), *store)
    assert done.code == 1, "the other one still opens"
    assert done.err.splitlines()[0] == "revoked alice"
    assert '"alice" is also a key in the configuration' in done.err
    assert gateway_command("keys", "revoke", "alice", *store).err == 'The store has no key "alice".\n'


def test_json_of_a_new_key_contains_the_key_once(gateway_command: Commands) -> None:
    store = ["--store", "sqlite://own.db"]
    done = gateway_command("keys", "add", "carol", "--budget-usd", "2", "--models", "gpt-*", "--json", *store)
    assert (done.code, done.err) == (0, f"{FIRST}\n")
    added = json.loads(done.out)
    key = added.pop("key")
    assert key.startswith("gw-")
    assert (added["name"], added["usd"], added["models"]) == ("carol", "2.000000", ["gpt-*"])
    assert json.loads(gateway_command("keys", "list", "--json", *store).out) == [added]
    again = gateway_command("keys", "add", "carol", "--json", *store)
    assert (again.code, again.out) == (1, "")
    revoked = gateway_command("keys", "revoke", "carol", "--json", *store)
    assert (revoked.code, revoked.err, json.loads(revoked.out)) == (0, "", {"name": "carol", "revoked": True})
    gone = gateway_command("keys", "revoke", "carol", "--json", *store)
    assert (gone.code, gone.out, gone.err) == (1, "", 'The store has no key "carol".\n')


def test_json_of_a_revoked_key_that_is_also_configured(gateway_command: Commands) -> None:
    store = ["--store", "sqlite://own.db"]
    assert gateway_command("keys", "add", "alice", *store).code == 0
    done = gateway_command("keys", "revoke", "alice", "--json", "-c", gateway_command.file(ALICE), *store)
    assert (done.code, json.loads(done.out)) == (1, {"name": "alice", "revoked": True})
    assert done.err.startswith('"alice" is also a key in the configuration')


# --- keys that cannot be printed ----------------------------------------------------------------------------------

TAKEN_BACK = "carol: the key could not be shown, and is revoked again."
STORE = ["--store", "sqlite://own.db"]
ADD = ["keys", "add", "carol", *STORE]


def kept(commands: Commands) -> list[str]:
    """Return the names of the keys in the store."""
    return [row["name"] for row in json.loads(commands("keys", "list", "--json", *STORE).out)]


#: both formats, with and without buffering; without stderr, one of each
UNSHOWN = [
    (closed, unbuffered, more)
    for closed in (">&-", ">/dev/full")
    for unbuffered in ("1", "")
    for more in ([], ["--json"])
]
UNSAID = [(">&- 2>&-", "1", []), (">&- 2>&-", "", ["--json"]), (">/dev/full 2>/dev/full", "", [])]


@pytest.mark.parametrize(("closed", "unbuffered", "more"), [*UNSHOWN, *UNSAID])
def test_a_key_that_cannot_be_shown_is_revoked_again(
    closed: str, unbuffered: str, more: list[str], gateway_command: Commands
) -> None:
    done = run_with_closed_streams(closed, gateway_command, [*ADD, *more], {"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    if "2>" not in closed:
        assert TAKEN_BACK in done.stderr.splitlines()
    assert kept(gateway_command) == []
    assert gateway_command(*ADD).code == 0, "the name is free"


def test_key_is_revoked_if_its_reader_left(gateway_command: Commands) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_with_output(writer, gateway_command, ADD, {})
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [TAKEN_BACK])
    assert kept(gateway_command) == []


def test_key_that_was_printed_stays_valid_without_stderr(gateway_command: Commands) -> None:
    done = run_with_closed_streams("2>&-", gateway_command, ADD, {})
    assert done.returncode == 0
    assert done.stdout.startswith("gw-")
    assert kept(gateway_command) == ["carol"]


def test_key_that_cannot_be_printed_or_revoked_is_reported(
    gateway_command: Commands, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Breaking(gateway_command.folder / "own.db"))
    with pytest.raises(OSError, match="No space left"):
        app(ADD, standalone_mode=False)
    said = capsys.readouterr().err.splitlines()
    assert (
        said[-1] == "carol: the key could not be shown, but is still in the store. Revoke it: gateway keys revoke carol"
    )
    assert "own.db" in said[-2], "why it could not be revoked"


class Breaking(io.StringIO):
    """A full disk, on which the store fails at the same time."""

    def __init__(self, store: Path) -> None:
        super().__init__()
        self._store = store

    def write(self, text: str) -> int:
        self._store.write_text("this is no database, " * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
