"""`gateway sessions` with a store that was filled by real calls."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.ledger.session_key import SessionKey
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.stores.files import write
from tests.support import records
from tests.support.commands import Commands
from tests.support.gateways import GatewayThread, until, write_config
from tests.support.web import CHAT, HI

ALICE = "alice-key-0123456789"


@pytest.fixture
def filled(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """A running gateway with the sessions "small" (two calls, 30+12 tokens) and "large" (one, 500+70)."""
    gateway = gateway_server(mock_server.url)
    for session, tokens in (("small", "10/5"), ("large", "500/70"), ("small", "20/7")):
        assert gateway.web.chat(session, f"tokens={tokens}").status == 200
    return gateway


@pytest.fixture
def store(filled: GatewayThread) -> str:
    return f"sqlite://{filled.store}"


def test_the_list_is_newest_first_or_largest_first(store: str, gateway_command: Commands) -> None:
    for sort, names in (("recent", ["small", "large"]), ("tokens", ["large", "small"])):
        rows = json.loads(gateway_command("sessions", "list", "--sort", sort, "--json", "--store", store).out)
        assert [row["id"] for row in rows] == names
    first = json.loads(gateway_command("sessions", "list", "--limit", "1", "--json", "--store", store).out)
    assert [row["id"] for row in first] == ["small"]


def test_a_session_whose_only_call_was_refused_is_listed(filled: GatewayThread, gateway_command: Commands) -> None:
    refused = filled.web.post(
        CHAT, {"model": "mock-small", "messages": HI}, {"x-session-id": "tiny", "x-session-budget-tokens": "3"}
    )
    assert refused.status == 400
    for command in (("sessions", "list"), ("top",)):
        done = gateway_command(*command, "--json", "--store", f"sqlite://{filled.store}")
        assert [row["id"] for row in json.loads(done.out)] == ["tiny", "small", "large"]


def test_the_budget_of_serve_is_shown_without_its_configuration_and_follows_a_reload(
    mock_server: MockServer, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1000})
    assert gateway.web.chat("half", "tokens=400/100").status == 200
    store = f"sqlite://{gateway.store}"

    def shown() -> list[int | None]:
        found = [json.loads(gateway_command(*command, "--json", "--store", store).out) for command in commands]
        rows = [one[0] if isinstance(one, list) else one for one in found]
        return [row["budget"] and row["budget"]["tokens"] for row in rows]

    commands = (("sessions", "list"), ("top",), ("sessions", "show", "half"))
    assert shown() == [1000, 1000, 1000]
    assert "500" in gateway_command("sessions", "list", "--store", store).lines[1].split()
    assert "50 %" in gateway_command("top", "--once", "--store", store).out
    write_config(gateway.folder, mock_server.url, {"budget.tokens": 2000})
    assert gateway.web.post("/api/reload").status == 200
    until(lambda: shown() == [2000, 2000, 2000])


def test_the_list_leaves_out_a_session_whose_account_cannot_be_read(
    filled: GatewayThread, gateway_command: Commands
) -> None:
    filled.stop()
    write(filled.store, "UPDATE accounts SET decided = ? WHERE kind = 'session' AND id = 'small'", b"junk")
    for command in (("sessions", "list"), ("top",)):
        done = gateway_command(*command, "--json", "--store", f"sqlite://{filled.store}")
        assert [row["id"] for row in json.loads(done.out)] == ["large"]


def test_the_list_shows_what_the_provider_billed(store: str, gateway_command: Commands, mock: MockProvider) -> None:
    rows = json.loads(gateway_command("sessions", "list", "--json", "--store", store).out)
    billed = mock.billed()
    assert sum(row["cumulative_token_usage"]["total_tokens"] for row in rows) == billed.total_tokens
    assert sum(row["calls"] for row in rows) == billed.calls
    table = gateway_command("sessions", "list", "--store", store).lines
    assert table[1].split()[:5] == ["small", "2", "30", "12", "42"]
    assert table[2].split()[:5] == ["large", "1", "500", "70", "570"]


def test_without_a_command_the_sessions_are_listed(filled: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("sessions", env={"GATEWAY_CONFIG": str(filled.file)})
    assert done.code == 0
    assert "small" in done.out
    assert "large" in done.out


def test_sort_and_limit_work_without_a_command(store: str, gateway_command: Commands) -> None:
    for args, names in (
        (("--sort", "tokens"), ["large", "small"]),
        (("--limit", "1"), ["small"]),
        (("--sort", "tokens", "--limit", "1"), ["large"]),
    ):
        done = gateway_command("sessions", *args, "--json", "--store", store)
        assert [row["id"] for row in json.loads(done.out)] == names
    assert gateway_command("sessions", "--sort", "name", "--store", store).code == 2
    assert gateway_command("sessions", "--limit", "0", "--store", store).code == 2


def test_the_store_of_a_configuration_file_is_read(filled: GatewayThread, gateway_command: Commands) -> None:
    rows = json.loads(gateway_command("sessions", "list", "--json", "-c", filled.file).out)
    assert len(rows) == 2


def test_a_session_is_shown_with_its_calls(store: str, gateway_command: Commands) -> None:
    done = gateway_command("sessions", "show", "small", "--json", "--store", store)
    shown = json.loads(done.out)
    assert done.code == 0
    assert (shown["id"], shown["calls"], shown["usage_source"]) == ("small", 2, "provider")
    assert shown["cumulative_token_usage"]["total_tokens"] == 42
    assert [call["usage"]["total_tokens"] for call in shown["last_calls"]] == [27, 15]
    text = gateway_command("sessions", "show", "small", "--store", store).out
    assert "small" in text
    assert text.count("mock-small") == 2


def test_a_refused_child_is_shown_with_its_parent_the_declared_budget_and_the_message(
    filled: GatewayThread, store: str, gateway_command: Commands
) -> None:
    headers = {"x-session-id": "child", "x-parent-session-id": "large", "x-session-budget-tokens": "900"}
    filled.web.send("PATCH", "/api/sessions/large", {"budget": {"tokens": 570}})
    refused = filled.web.post(CHAT, {"model": "mock-small", "messages": HI}, headers)
    done = gateway_command("sessions", "show", "child", "--store", store)
    facts = [re.split(r"\s{2,}", line.strip()) for line in done.lines]
    assert ["parent large", "570 tokens (100 % used)"] in facts
    assert ["declared by its last call", "900 tokens"] in facts
    assert any("budget_exhausted" in line for line in facts)
    assert refused.json["error"]["message"] in done.out


def test_a_session_is_shown_with_its_tools(filled: GatewayThread, store: str, gateway_command: Commands) -> None:
    assert "results in context" not in gateway_command("sessions", "show", "small", "--store", store).out
    filled.web.chat("small", tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}])
    shown = json.loads(gateway_command("sessions", "show", "small", "--json", "--store", store).out)
    assert shown["recent_tools"] == ["look"]
    assert shown["tools"] == {"look": {"calls": 1, "result_tokens": 0, "results": 0}}
    lines = gateway_command("sessions", "show", "small", "--store", store).lines
    assert ["look", "1", "0", "0"] in [line.split() for line in lines]


def test_a_session_is_shown_with_its_agents(filled: GatewayThread, store: str, gateway_command: Commands) -> None:
    body = {"model": "mock-small", "messages": HI}
    headers = {"x-session-id": "small", "x-agent-id": "a1", "x-agent-type": "Explore", "x-mock": "tokens=100/11"}
    assert filled.web.post(CHAT, body, headers).status == 200
    done = gateway_command("sessions", "show", "small", "--store", store)
    rows = [line.split() for line in done.lines]
    assert ["main", "2", "42", "?", "153"] in rows
    assert ["a1", "Explore", "1", "111", "?"] in rows
    found = json.loads(gateway_command("sessions", "show", "small", "--store", store, "--json").out)
    assert found["agents"] == filled.web.get("/api/sessions/small").json["agents"]


def test_reset_sets_the_totals_to_zero_for_the_running_gateway_too(
    filled: GatewayThread, store: str, gateway_command: Commands
) -> None:
    done = gateway_command("sessions", "reset", "small", "--store", store)
    assert (done.code, done.out, done.err) == (0, "", "reset small\n")
    shown = json.loads(gateway_command("sessions", "show", "small", "--json", "--store", store).out)
    assert (shown["calls"], shown["cumulative_token_usage"]["total_tokens"]) == (0, 0)
    assert len(shown["last_calls"]) == 2, "its records stay"
    assert filled.web.chat("small", "tokens=3/4").totals == (3, 4, 7)
    assert filled.web.chat("large", "tokens=1/1").totals == (501, 71, 572), "no other session is touched"


def test_delete_forgets_a_session_and_its_calls(filled: GatewayThread, store: str, gateway_command: Commands) -> None:
    assert gateway_command("sessions", "delete", "small", "--store", store).code == 0
    assert filled.web.get("/api/sessions/small").status == 404
    assert gateway_command("sessions", "show", "small", "--store", store).code == 1
    rows = json.loads(gateway_command("sessions", "list", "--json", "--store", store).out)
    assert [row["id"] for row in rows] == ["large"]


@pytest.mark.parametrize("what", ["reset", "delete"])
def test_budget_of_a_session_without_calls_is_reset_and_deleted(
    what: str, filled: GatewayThread, store: str, gateway_command: Commands
) -> None:
    headers = {"x-session-id": "child", "x-parent-session-id": "parent"}
    assert filled.web.post(CHAT, {"model": "mock-small", "messages": HI}, headers).status == 200
    assert gateway_command("sessions", what, "parent", "--store", store).code == 0
    now = json.loads(gateway_command("sessions", "budget", "parent", "9", "--json", "--store", store).out)
    assert now["budget"]["used"]["tokens"] == 0


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("what", ["show", "reset", "delete"])
def test_unknown_session_is_named(what: str, more: tuple[str, ...], store: str, gateway_command: Commands) -> None:
    done = gateway_command("sessions", what, "smal", "--store", store, *more)
    assert (done.code, done.out, done.err) == (1, "", f'There is no session "smal" in {store} (did you mean small?).\n')


@pytest.fixture
def stepping(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """A running gateway with budgets and steps, and a session "s" that has called."""
    gateway = gateway_server(mock_server.url, steps=[{"name": "work"}], **{"budget.calls": 9})
    assert gateway.web.chat("s").status == 200
    return gateway


def test_json_of_show_equals_the_api(stepping: GatewayThread, gateway_command: Commands) -> None:
    shown = json.loads(gateway_command("sessions", "show", "s", "--json", "-c", stepping.file).out)
    assert shown.pop("last_calls")
    assert shown == stepping.web.get("/api/sessions/s").json
    assert shown["active_step"] == "work"
    lines = gateway_command("sessions", "show", "s", "-c", stepping.file).lines
    assert ["active_step", "work"] in [line.split() for line in lines]


@pytest.mark.parametrize("session", ["s", "never-called"])
def test_json_of_budget_equals_the_api(session: str, stepping: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("sessions", "budget", session, "--calls", "5", "--usd", "2", "--json", "-c", stepping.file)
    assert (done.code, done.err) == (0, "")
    now = json.loads(done.out)
    assert now == stepping.web.send("PATCH", f"/api/sessions/{session}", {"budget": {"calls": 5, "usd": 2}}).json
    assert now["budget"]["calls"] == 5
    assert now["id"] == session


def test_json_of_reset_equals_the_api(stepping: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("sessions", "reset", "s", "--json", "-c", stepping.file)
    assert (done.code, done.err) == (0, "")
    now = json.loads(done.out)
    assert (now["calls"], now["budget"]["used"]["calls"], now["active_step"]) == (0, 0, "work")
    assert now == stepping.web.post("/api/sessions/s/reset", {}).json


def test_json_of_delete_equals_the_api(stepping: GatewayThread, gateway_command: Commands) -> None:
    done = gateway_command("sessions", "delete", "s", "--json", "-c", stepping.file)
    assert (done.code, done.err) == (0, "")
    assert stepping.web.get("/api/sessions/s").status == 404
    assert stepping.web.chat("s").status == 200
    assert json.loads(done.out) == stepping.web.send("DELETE", "/api/sessions/s").json == {"id": "s", "deleted": True}


@pytest.mark.parametrize("what", ["show", "reset", "delete"])
@pytest.mark.parametrize("name", ["", "a b", "x" * 256, "é", "../../etc", "a/b/c"])
def test_invalid_session_id_is_wrong_usage(
    what: str, name: str, filled: GatewayThread, gateway_command: Commands
) -> None:
    done = gateway_command("sessions", what, name, "--store", f"sqlite://{filled.store}")
    assert done.code == 2
    assert "is not a session id" in done.err


def test_sessions_of_client_keys_are_distinguished(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url, **{"auth.keys": [{"name": "alice", "key": ALICE}]})
    gateway.web.headers["authorization"] = f"Bearer {ALICE}"
    assert gateway.web.chat("mine").status == 200
    store = f"sqlite://{gateway.store}"
    rows = json.loads(gateway_command("sessions", "list", "--json", "--store", store).out)
    assert [row["id"] for row in rows] == ["alice/mine"]
    assert gateway_command("sessions", "show", "alice/mine", "--store", store).code == 0
    assert gateway_command("sessions", "show", "mine", "--store", store).code == 1
    assert ALICE not in gateway_command("sessions", "show", "alice/mine", "--json", "--store", store).out


def test_a_name_with_markup_is_shown_as_it_is(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.chat("s", model="[red]mock[/red]").status == 200
    text = gateway_command("sessions", "show", "s", "--store", f"sqlite://{gateway.store}").out
    assert "[red]mock[/red]" in text


@pytest.mark.parametrize("command", ["show", "reset", "delete"])
def test_similar_session_is_suggested(command: str, tmp_path: Path, gateway_command: Commands) -> None:
    one = records.record("", time.time())
    keys = [SessionKey("alice", "coder"), SessionKey("default", "reviewer-17")]
    records.settle(
        tmp_path / "s.db", [replace(one, call_id=f"{number:032x}", session=key) for number, key in enumerate(keys)]
    )
    store = ["--store", f"sqlite://{tmp_path / 's.db'}"]
    for typed, meant in (("coder", "alice/coder"), ("reviewer-71", "reviewer-17"), ("alice/codr", "alice/coder")):
        done = gateway_command("sessions", command, typed, *store)
        assert (done.code, done.out) == (1, "")
        assert f'There is no session "{typed}" in sqlite:' in done.err
        assert f"(did you mean {meant}?)" in done.err
    assert "did you mean" not in gateway_command("sessions", command, "zzz", *store).err
    assert "(did you mean alice/coder?)" in gateway_command("sessions", "budget", "coder", "5", *store).err
    assert "(did you mean alice/coder?)" in gateway_command("replay", "--records", "codr", *store).err


def test_memory_store_is_not_accessible(gateway_command: Commands) -> None:
    for args in (["list"], ["show", "s"], ["reset", "s"], ["delete", "s"]):
        done = gateway_command("sessions", *args, "--store", "memory://")
        assert (done.code, done.out) == (1, "")
        assert "GET /api/sessions" in done.err


def test_missing_store_is_named_and_not_created(gateway_command: Commands) -> None:
    path = gateway_command.folder / "none" / "gateway.db"
    for args in (["list"], ["show", "s"], ["reset", "s"], ["delete", "s"]):
        done = gateway_command("sessions", *args, "--store", f"sqlite://{path}")
        assert (done.code, done.out) == (1, "")
        assert str(path) in done.err
    assert not path.parent.exists()


def test_file_that_is_not_a_database_is_an_error_and_unchanged(gateway_command: Commands) -> None:
    path = gateway_command.file("this is no database, " * 100, "gateway.db")
    before = path.read_bytes()
    done = gateway_command("sessions", "list", "--store", f"sqlite://{path}")
    assert (done.code, done.out) == (1, "")
    assert "gateway.db" in done.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("url", ["mysql://localhost", "sqlite://", "nonsense"])
def test_unknown_kind_of_store_is_wrong_usage(url: str, gateway_command: Commands) -> None:
    done = gateway_command("sessions", "list", "--store", url)
    assert done.code == 2
    assert done.err.startswith("store.url: ")


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["--store", "memory://"], ["delete", "small"]),
        (["-c", "own.yaml"], ["reset", "small"]),
        (["--json"], ["show", "small"]),
        (["--limit", "1", "--sort", "cost"], ["list"]),
    ],
)
def test_options_before_the_command_are_refused(
    given: list[str], command: list[str], store: str, gateway_command: Commands
) -> None:
    done = gateway_command("sessions", *given, *command)
    assert (done.code, done.out) == (2, "")
    assert f"sessions {command[0]} --" in done.err
    assert gateway_command("sessions", "show", "small", "--store", store).code == 0


# --- budgets ----------------------------------------------------------------------------------------------------------------


def test_session_continues_after_its_budget_is_raised(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, gateway_command: Commands
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 1})
    assert [gateway.web.chat("s").status for _ in range(2)] == [200, 400]
    store = ["--store", f"sqlite://{gateway.store}"]
    done = gateway_command("sessions", "budget", "s", "--calls", "3", *store)
    assert done.code == 0
    assert "s: 3 calls (33 % used)" in done.err
    assert [gateway.web.chat("s").status for _ in range(3)] == [200, 200, 400]
    assert gateway_command("sessions", "budget", "s", "--calls", "none", *store).code == 0
    assert gateway.web.chat("s").status == 200
    assert gateway_command("sessions", "budget", "s", "default", *store).code == 0
    assert gateway.web.chat("s").status == 400


@pytest.mark.parametrize(
    ("unit", "session"),
    [("tokens", "-x"), ("tokens", "--help"), ("tokens", "a:b.c"), ("calls", "-5"), ("calls", "--"), ("calls", "s")],
)
def test_command_in_a_budget_error_can_be_run(
    mock_server: MockServer, gateway_server: StartGateway, gateway_command: Commands, unit: str, session: str
) -> None:
    gateway = gateway_server(mock_server.url, **{f"budget.{unit}": 1 if unit == "calls" else 40})
    refused = next(reply for reply in iter(lambda: gateway.web.chat(session), None) if reply.status == 400)
    named = refused.error["message"].partition("Raise it with: gateway ")[2].partition(", or start")[0]
    words = shlex.split(named)
    done = gateway_command(*words[:2], "--store", f"sqlite://{gateway.store}", *words[2:])
    assert (done.code, done.err.partition(": ")[0]) == (0, session)
    assert gateway.web.chat(session).status == 200


@pytest.mark.parametrize(
    "asked", [[], ["many"], ["-5"], ["1.5"], ["--usd", "x"], ["--usd", "1e15"], ["default", "--calls", "3"]]
)
def test_invalid_budget_is_refused(gateway: GatewayThread, gateway_command: Commands, asked: list[str]) -> None:
    done = gateway_command("sessions", "budget", "s", *asked, "--store", f"sqlite://{gateway.store}")
    assert done.code == 2


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["many"], 'tokens "many": '),
        (["9007199254740993"], "from 0 to 9,007,199,254,740,992"),
        (["--usd", "-1"], '--usd "-1": '),
        (["--usd", "99,999,999,999"], "from 0.000000001 to 4,500,000"),
        (["--calls", "nan"], '--calls "nan": '),
        (["5\x1b[2J"], 'tokens "5?[2J": '),
    ],
)
def test_error_about_a_budget_names_valid_values(
    gateway: GatewayThread, gateway_command: Commands, asked: list[str], said: str
) -> None:
    done = gateway_command("sessions", "budget", "s", *asked, "--store", f"sqlite://{gateway.store}")
    assert said in done.err
    assert done.err.endswith("none removes the limit.\n")
    assert len(done.err.splitlines()) == 1


def test_a_budget_for_a_session_without_calls_says_so(store: str, gateway_command: Commands) -> None:
    assert f"no call yet in {store}" in gateway_command("sessions", "budget", "smal", "100", "--store", store).err
    assert "no call yet" not in gateway_command("sessions", "budget", "small", "100", "--store", store).err


def test_remaining_budget_is_never_negative(store: str, gateway_command: Commands) -> None:
    gateway_command("sessions", "budget", "small", "--calls", "1", "--store", store)
    line = next(line for line in gateway_command("sessions", "--store", store).lines if line.startswith("small"))
    assert line.split()[5:7] == ["0", "%"]
    shown = gateway_command("sessions", "show", "small", "--store", store).lines
    assert ["budget", "calls", "2", "of", "1", "used"] in [line.split() for line in shown]
