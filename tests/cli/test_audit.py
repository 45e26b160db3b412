"""`gateway audit`, and the entries that commands write."""

from __future__ import annotations

import json
import os
import platform
import pwd
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.audit import change_text
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands, run_with_output
from tests.support.gateways import GatewayThread

ME = f"{pwd.getpwuid(os.getuid()).pw_name}@{platform.node()}"


@pytest.fixture
def filled(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.chat("s", "tokens=10/5").status == 200
    return gateway


def entries(gateway_command: Commands, store: str, *target: str) -> list[Any]:
    found: list[Any] = json.loads(gateway_command("audit", *target, "--json", "--store", store).out)
    return found


def test_changes_of_sessions_by_commands_are_recorded(filled: GatewayThread, gateway_command: Commands) -> None:
    store = f"sqlite://{filled.store}"
    for args in (("budget", "s", "500"), ("budget", "s", "+100%"), ("reset", "s"), ("resume", "s"), ("delete", "s")):
        assert gateway_command("sessions", *args, "--store", store, env={"LOGNAME": "mallory"}).code == 0
    assert gateway_command("sessions", "delete", "unknown", "--store", store).code == 1
    found = entries(gateway_command, store)
    # The session was not stopped, so nothing was resumed.
    assert [one["action"] for one in found] == [
        *("session.delete", "session.reset", "session.budget", "session.budget")
    ]
    assert {(one["target"], one["actor"], one["origin"]) for one in found} == {("s", "command line", ME)}
    assert [(one["old"]["tokens"], one["new"]["tokens"]) for one in found[2:]] == [(500, 1_000), (None, 500)]
    assert found == filled.web.get("/api/audit").json["changes"]


def test_client_keys_by_commands_are_recorded_without_the_key(gateway_command: Commands) -> None:
    store = f"sqlite://{gateway_command.folder / 's.db'}"
    options = ("--budget-tokens", "500", "--window", "1d", "--models", "gpt-*", "--rpm", "9")
    key = gateway_command("keys", "add", "bob", *options, "--store", store).out.strip()
    assert gateway_command("keys", "add", "bob", "--store", store).code == 1
    assert gateway_command("keys", "revoke", "bob", "--store", store).code == 0
    assert gateway_command("keys", "revoke", "bob", "--store", store).code == 1
    revoked, added = entries(gateway_command, store, "bob")
    assert (added["action"], added["old"], added["actor"], added["origin"]) == ("key.add", None, "command line", ME)
    assert (revoked["action"], revoked["new"]) == ("key.revoke", None)
    settings = {
        "group": None,
        "models": ["gpt-*"],
        "tokens": 500,
        "usd": None,
        "calls": None,
        "window": "1d",
        "rpm": 9,
        "expires_at": None,
        "replaced_until": None,
    }
    assert added["new"] == revoked["old"] == settings
    assert key.startswith("gw-")
    assert key.encode() not in (gateway_command.folder / "s.db").read_bytes()
    assert key not in json.dumps([revoked, added])


def test_a_key_that_could_not_be_printed_is_recorded_as_revoked(gateway_command: Commands) -> None:
    args = ["keys", "add", "bob", "--yes", "--store", "sqlite://s.db"]
    with Path("/dev/full").open("wb") as full:
        assert run_with_output(full.fileno(), gateway_command, args, {}).returncode == 1
    assert [one["action"] for one in entries(gateway_command, "sqlite://s.db")] == ["key.revoke", "key.add"]


def test_the_list_is_newest_first_and_can_be_filtered(gateway_command: Commands) -> None:
    store = f"sqlite://{gateway_command.folder / 's.db'}"
    gateway_command("keys", "add", "alice", "--yes", "--budget-usd", "2.5", "--store", store)
    gateway_command("keys", "add", "bob", "--yes", "--models", "m" * 200, "--store", store)
    first, models, author, second, limits, _ = gateway_command("audit", "--store", store).lines
    assert (first.split()[1:], second.split()[1:]) == (["key.add", "bob"], ["key.add", "alice"])
    assert models == f"    models {'m' * 200}", "a pipe gets whole lines"
    assert limits == "    usd $2.50"
    assert author == f"    by command line from {ME}"
    assert "alice" in gateway_command("audit", "ali", "--store", store).out
    nothing = gateway_command("audit", "carol", "--store", store)
    assert (nothing.code, nothing.out, nothing.err) == (0, "", 'No changes are recorded for "carol".\n')
    assert len(gateway_command("audit", "--limit", "1", "--store", store).lines) == 3


def test_a_store_in_memory_has_no_log_to_read(gateway_command: Commands) -> None:
    done = gateway_command("audit", "--store", "memory://")
    assert done.code == 1
    assert "only the running gateway knows" in done.err


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ({"tokens": 100, "usd": None}, {"tokens": 20_000, "usd": None}, "tokens 100 to 20,000"),
        ({"tokens": None}, {"tokens": 5, "calls": 1}, "tokens none to 5, calls none to 1"),
        ({"used_tokens": 5, "used_usd": "1.5"}, None, "used_tokens 5, used_usd $1.50"),
        (None, {"models": ["a", "b"], "rpm": None}, "models a b"),
        ({"budget.usd": "1.500000"}, {"budget.usd": None}, "budget.usd $1.50 to none"),
        ({"modes": True}, {"modes": False}, "modes True to False"),
        (None, None, ""),
        ('{"x": "… (5,000 characters)', None, '{"x": "… (5,000 characters) to none'),
    ],
)
def test_a_change_in_words(old: Any, new: Any, text: str) -> None:
    assert change_text(old, new) == text
