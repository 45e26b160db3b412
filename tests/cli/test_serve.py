"""`gateway serve` in a separate process: start, flags, errors, several workers, reload, end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway import __version__
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartUpstream
from tests.support.commands import Commands, Serving, command, environment
from tests.support.gateways import ROOT, STARTS_S, until
from tests.support.scripted import Held
from tests.support.timing import LIMIT_S, in_time
from tests.support.web import Web

pytestmark = pytest.mark.long

Serve = Callable[..., Serving]
SECRET = "sk-secret-Zq8vR2mK7x"


@pytest.fixture
def other_server() -> Iterator[MockServer]:
    """A second provider, for a changed configuration."""
    with MockServer() as server:
        yield server


def settings(url: str, folder: Path, **more: Any) -> str:
    """A configuration with one provider and no other."""
    return json.dumps(
        {
            "built_in_providers": False,
            "default_provider": "own",
            "providers": {"own": {"base_url": url, "auth": "none"}},
            "store": {"url": f"sqlite://{folder / 'gateway.db'}", "timeout_ms": 5000},
            **more,
        }
    )


def taken_port() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def says(gateway: Serving, text: str, times: int = 1) -> None:
    """Wait until the gateway has printed this text."""
    until(lambda: gateway.log.count(text) >= times, what=f"{text}, {times} times")


# --- start-up -----------------------------------------------------------------------------------------------------


def test_banner_shows_url_providers_store_and_budget(serving: Serve, gateway_command: Commands) -> None:
    gateway = serving("--mock")
    lines = gateway.log.splitlines()
    assert lines[0] == f"gateway {__version__} · {gateway.url}"
    assert re.fullmatch(r"  provider  mock +http://127\.0\.0\.1:\d+/v1 +key: none needed", lines[1])
    store = gateway_command.folder / ".local/share/gateway/gateway-mock.db"
    assert lines[2:] == [
        f"  store     sqlite {store}",
        "  budget    none",
        "  config    built-in defaults",
        f"  try       export OPENAI_BASE_URL={gateway.url}/v1",
        f"            export ANTHROPIC_BASE_URL={gateway.url}",
        f"  dashboard {gateway.url}/ui",
    ]
    assert store.exists()


@pytest.mark.parametrize("form", ["text", "json"])
def test_each_line_of_several_workers_has_its_time_and_its_worker(
    form: str, serving: Serve, gateway_command: Commands
) -> None:
    gateway = serving("--mock", "--workers", "2", env={"GATEWAY_TELEMETRY_LOG_FORMAT": form})
    banner = len(gateway.log.splitlines())
    assert gateway.web.chat("s").status == 200
    gateway.signal(signal.SIGHUP)  # each worker says that it has read the configuration again
    until(lambda: len(gateway.log.splitlines()) >= banner + 3, what="the call's line, and one of each worker")
    lines = gateway.log.splitlines()[banner:]
    pids = {str(pid) for pid in gateway.children}
    if form == "json":
        found = [json.loads(line) for line in lines]
        assert all(line["time"] > 0 for line in found)
        assert {str(line["worker"]) for line in found} == pids
        assert {line["event"] for line in found} == {"call", "log"}
        return
    marked = [
        re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z worker (\d+) (chat|INFO) .+", line) for line in lines
    ]
    assert all(marked), lines
    assert {match[1] for match in marked if match} == pids
    assert {match[2] for match in marked if match} == {"chat", "INFO"}


def test_a_line_of_the_only_worker_has_its_time_alone(serving: Serve) -> None:
    gateway = serving("--mock", env={"GATEWAY_TELEMETRY_LOG_FORMAT": "text"})
    assert gateway.web.chat("s").status == 200
    says(gateway, "session s")
    assert re.fullmatch(r"[-0-9]{10}T[:0-9]{8}\.\d{3}Z chat .+", gateway.log.splitlines()[-1])


def test_gateway_on_all_addresses_shows_a_local_and_a_network_url(serving: Serve) -> None:
    gateway = serving("--mock", "--store", "memory://", "--host", "0.0.0.0")
    assert gateway.url.startswith("http://127.0.0.1:")
    assert "0.0.0.0" not in gateway.log
    found = re.search(r"^  network   (http://\S+)$", gateway.log, re.MULTILINE)
    is_alone = not any(address for address in own_addresses() if not address.startswith("127."))
    assert (found is None) == is_alone
    for url in (gateway.url, *([found[1]] if found else [])):
        assert Web(url).get("/healthz").status == 200


def own_addresses() -> set[str]:
    """The IPv4 addresses of this machine."""
    listed = Path("/proc/net/fib_trie").read_text().splitlines()
    return {before.split()[-1] for before, line in itertools.pairwise(listed) if "/32 host LOCAL" in line}


def test_gateway_on_one_address_shows_no_network_url(serving: Serve) -> None:
    assert "  network " not in serving("--mock", "--store", "memory://").log


def test_mock_does_not_touch_real_sessions(serving: Serve, gateway_command: Commands) -> None:
    own = gateway_command.file(f"store: {{url: 'sqlite://{gateway_command.folder / 'real.db'}'}}")
    shared = gateway_command.file("store: {url: 'redis://127.0.0.1:1/0'}", "redis.yaml")
    for file, path in ((own, "real-mock.db"), (shared, ".local/share/gateway/gateway-mock.db")):
        gateway = serving("--mock", "-c", file)
        assert gateway.web.chat("trial").status == 200
        assert f"sqlite {gateway_command.folder / path}\n" in gateway.log
        listed = gateway_command.process("sessions", "-c", file, "--store", "mock", "--json")
        assert [row["id"] for row in json.loads(listed.out)] == ["trial"]
        elsewhere = gateway_command.process("sessions", "show", "trial", "-c", file)
        assert (elsewhere.code, elsewhere.out) == (1, "")
        assert "--store mock" in elsewhere.err or file == shared
        assert "1" in gateway_command.process("sessions", "budget", "trial", "1", "-c", file, "--store", "mock").err
        assert gateway.web.chat("trial").status == 400, "the budget holds"
        gateway.stop()
    assert not (gateway_command.folder / "real.db").exists()


def test_mock_uses_the_named_store(serving: Serve, gateway_command: Commands) -> None:
    named = gateway_command.folder / "named.db"
    assert serving("--mock", "--store", f"sqlite://{named}").web.chat("s").status == 200
    assert named.exists()
    refused = gateway_command("serve", "--store", "mock")
    assert refused.code == 2
    assert "store.url" in refused.err


def test_each_call_logs_one_line_and_nothing_else_is_logged(serving: Serve) -> None:
    gateway = serving("--mock", "--store", "memory://")
    assert gateway.web.get("/healthz").status == 200
    assert len(gateway.log.splitlines()) == 8
    assert gateway.web.chat("s").status == 200
    until(lambda: len(gateway.log.splitlines()) == 9)
    line = json.loads(gateway.log.splitlines()[-1])
    assert (line["event"], line["session"], line["status"]) == ("call", "s", 200)
    assert gateway.said == "", "talk goes to stderr"


def test_the_built_in_provider_has_the_request_rules_of_claude_models(serving: Serve) -> None:
    gateway = serving("--mock", "--store", "memory://")
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "claude-opus-5-5", "max_tokens": 100, "messages": messages, "system": "be brief"}
    content = gateway.web.post("/v1/messages", body).json["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    more = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    assert gateway.web.post("/v1/messages", {**body, "messages": more}).status == 200
    changed = {**body, "messages": more, "system": "be kind"}
    # A client that handles such errors itself receives them.
    refused = gateway.web.post("/v1/messages", changed, {"x-claude-code-session-id": "one"})
    assert (refused.status, "bound to a different conversation" in refused.json["error"]["message"]) == (400, True)
    assert gateway.web.post("/v1/messages", changed, {"x-mock": "old_account=1"}).status == 200


def test_the_built_in_provider_enforces_the_request_rules_of_a_model_by_its_name(serving: Serve) -> None:
    web = serving("--mock", "--store", "memory://").web
    assert web.chat("free", messages=[{"role": "assistant", "content": "hi"}]).status == 200
    refused = web.chat("strict", model="mistral-small", messages=[{"role": "assistant", "content": "hi"}])
    assert (refused.status, refused.json["code"]) == (400, "3230")


def test_without_any_configuration_the_built_in_providers_are_shown_and_no_key_is_needed(serving: Serve) -> None:
    lines = serving(env={"OPENAI_API_KEY": SECRET}).log.splitlines()
    assert re.fullmatch(r"  provider  openai +https://api\.openai\.com/v1 +key: OPENAI_API_KEY", lines[1])
    assert re.fullmatch(r"  provider  anthropic +https://api\.anthropic\.com/v1 +key: caller's own", lines[2])


def test_upstream_is_one_provider_for_every_model_and_gets_the_callers_key(
    serving: Serve, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = serving("--upstream", mock_server.url, "--store", "memory://", env={"OPENAI_API_KEY": SECRET})
    gateway.web.headers["authorization"] = "Bearer sk-caller"
    for model in ("gpt-5.1", "claude-sonnet-4-5", "anything"):
        assert gateway.web.chat("s", model=model).status == 200
    assert [call.model for call in mock.calls] == ["gpt-5.1", "claude-sonnet-4-5", "anything"]
    assert {call.header("authorization") for call in mock.calls} == {"Bearer sk-caller"}
    assert (
        gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == mock.billed().total_tokens
    )


MODELS = [
    {"match": "short", "provider": "own", "name": "gpt-5.1", "window": 600, "price": {"input": 100, "output": 200}},
    {"match": "far-*", "provider": {"own": 2, "other": 1}, "window": 5_000},
]


@pytest.mark.parametrize("way", ["--mock", "--upstream"])
def test_upstream_option_keeps_model_settings(
    way: str, serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    providers = {name: {"base_url": "http://127.0.0.1:1", "key": "${NOT_SET}"} for name in ("own", "other")}
    file = gateway_command.file(settings("", gateway_command.folder, providers=providers, models=MODELS))
    flags = ("--mock",) if way == "--mock" else ("--upstream", mock_server.url)
    web = serving("-c", file, *flags).web
    answer = web.chat("s", "tokens=10/5" if way == "--upstream" else "", model="short")
    assert answer.status == 200
    if way == "--upstream":
        assert [call.model for call in mock.calls] == ["gpt-5.1"], "the alias"
        assert answer.header("x-session-cumulative-cost-usd") == "0.002000", "the price"
    assert int(answer.header("x-context-budget-tokens") or 0) < 600, "the window"
    assert float(answer.header("x-session-cumulative-cost-usd") or 0) > 0.0005
    assert web.chat("s", model="short", messages=[{"role": "user", "content": "word " * 700}]).status == 400
    assert int(web.chat("t", model="far-away").header("x-context-budget-tokens") or 0) in range(4_000, 5_000)
    assert web.chat("u", model="own/anything").status == 200, "no other provider is left, whatever a call names"


def test_the_built_in_provider_has_a_price_for_each_model_without_one(
    serving: Serve, gateway_command: Commands
) -> None:
    file = gateway_command.file(settings("http://127.0.0.1:1", gateway_command.folder, models=MODELS))
    web = serving("-c", file, "--mock").web
    costs = [web.chat(model, model=model).header("x-session-cumulative-cost-usd") for model in ("far-away", "any")]
    assert costs[0] == costs[1]
    assert float(costs[0] or 0) > 0


def test_a_reload_keeps_the_one_provider(serving: Serve, gateway_command: Commands) -> None:
    file = gateway_command.file(settings("http://127.0.0.1:1", gateway_command.folder, models=MODELS))
    gateway = serving("-c", file, "--mock")
    file.write_text(settings("http://127.0.0.1:1", gateway_command.folder, models=[{**MODELS[0], "window": 900}]))
    assert gateway.web.post("/api/reload", {}).status == 200
    answer = gateway.web.chat("s", model="short")
    assert answer.status == 200
    assert 600 < int(answer.header("x-context-budget-tokens") or 0) < 900


def test_flags_beat_the_environment_which_beats_the_file(serving: Serve, gateway_command: Commands) -> None:
    folder = gateway_command.folder
    file = gateway_command.file(settings("http://127.0.0.1:1", folder, sessions={"on_missing": "require"}))
    env = {"GATEWAY_SESSIONS_ON_MISSING": "none", "GATEWAY_STORE_URL": f"sqlite://{folder}/by-environment.db"}
    gateway = serving("-c", file, "--store", f"sqlite://{folder}/by-flag.db", "--mock", env=env)
    answer = gateway.web.chat()
    assert answer.status == 200, "not `require`, as in the file"
    assert answer.header("x-session-id") is None
    assert str(file) in gateway.log
    assert sorted(path.name for path in folder.glob("*.db")) == ["by-flag.db"]


def test_client_keys_are_shown_and_required(serving: Serve, gateway_command: Commands, mock_server: MockServer) -> None:
    keys = [{"name": "alice", "key": "${ALICE_KEY}"}]
    file = gateway_command.file(settings(mock_server.url, gateway_command.folder, auth={"keys": keys}))
    gateway = serving("-c", file, env={"ALICE_KEY": SECRET})
    assert "  clients   alice" in gateway.log
    assert gateway.web.chat("s").status == 401
    gateway.web.headers["authorization"] = f"Bearer {SECRET}"
    assert gateway.web.chat("s").status == 200


# --- refusals -----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named_with_the_flag_that_helps(gateway_command: Commands) -> None:
    listener, port = taken_port()
    with listener:
        done = gateway_command.process("serve", "--mock", "--store", "memory://", "--port", str(port))
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert str(port) in done.err
    assert "--port" in done.err


def test_invalid_families_are_reported_and_stop_the_start(gateway_command: Commands) -> None:
    gateway_command.file("families: {mine: {text: -1}}", "mine.yaml")
    gateway_command.file("context: {families: mine.yaml}", "gateway.yaml")
    done = gateway_command.process("serve", "--port", "0")
    assert (done.code, done.out) == (2, "")
    assert "context.families: families.mine.text: must be 0 or more" in done.err


def test_address_of_another_machine_is_reported(gateway_command: Commands) -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        done = gateway_command.process("serve", "--mock", "--store", "memory://", "--port", "0", "--host", host)
        assert done.code == 1
        assert host in done.err
        assert "Unknown error" not in done.err
        assert done.err.endswith("Choose another with --host.\n")


def test_unknown_host_is_reported(gateway_command: Commands) -> None:
    done = gateway_command.process("serve", "--mock", "--store", "memory://", "--port", "0", "--host", "[nonsense]")
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert "it is neither an address nor a known host name. Choose another with --host." in done.err
    assert "(while" not in done.err


@pytest.mark.parametrize("host", ["a b", "a..b", "x" * 300])
def test_a_host_that_cannot_be_one_is_a_problem_of_the_configuration(host: str, gateway_command: Commands) -> None:
    done = gateway_command("serve", "--mock", "--store", "memory://", "--port", "0", "--host", host)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("server.host: is neither an address nor a host name")


@pytest.mark.parametrize(
    ("place", "host"), [("flag", "::1"), ("flag", "[::1]"), ("file", "[::1]"), ("variable", "[::1]")]
)
def test_a_host_may_be_written_as_in_a_url(place: str, host: str, serving: Serve, gateway_command: Commands) -> None:
    file = gateway_command.file(f'server: {{host: "{host}"}}' if place == "file" else "{}")
    flags = ("--host", host) if place == "flag" else ()
    env = {"GATEWAY_SERVER_HOST": host} if place == "variable" else {}
    gateway = serving("--mock", "--store", "memory://", "-c", file, *flags, env=env)
    assert gateway.url.startswith("http://[::1]:")
    assert gateway.web.get("/healthz").status == 200


def test_loopback_address_in_brackets_is_not_public(serving: Serve) -> None:
    gateway = serving("--store", "memory://", env={"GATEWAY_SERVER_HOST": "[::1]", "OPENAI_API_KEY": SECRET})
    assert gateway.web.get("/healthz").status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1"])
def test_the_address_that_is_shown_is_one_that_can_be_called(host: str, serving: Serve) -> None:
    gateway = serving("--mock", "--host", host, "--store", "memory://")
    assert gateway.web.get("/healthz").status == 200


def test_variables_that_set_nothing_are_named_in_one_warning(serving: Serve) -> None:
    env = {"GATEWAY_SERVER_PROT": SECRET, "GATEWAY_NOPE": SECRET, "GATEWAY_PORT": "tcp://10.0.0.1:80"}
    gateway = serving("--mock", "--store", "memory://", env=env)
    says(gateway, "GATEWAY_SERVER_PROT")
    (line,) = (line for line in gateway.log.splitlines() if "GATEWAY_" in line)
    warning = json.loads(line)
    assert warning["level"] == "warning"
    assert "GATEWAY_SERVER_PROT: this variable has no effect" in warning["message"]
    assert "did you mean GATEWAY_SERVER_PORT?" in warning["message"]
    assert "GATEWAY_NOPE" in warning["message"]
    assert SECRET not in gateway.log


def test_full_disk_at_stderr_does_not_stop_calls(gateway_command: Commands) -> None:
    listener, port = taken_port()
    listener.close()
    args = ("serve", "--mock", "--store", "memory://", "--port", str(port))
    with Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(command(args), cwd=gateway_command.folder, stderr=full,
                                   env=environment(gateway_command.folder, None))  # fmt: skip
    try:
        until(lambda: accepts(port) or process.poll() is not None, STARTS_S, "it listens")
        assert Web(f"http://127.0.0.1:{port}").get("/healthz").status == 200
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("closed", "workers"),
    [("<&-", "1"), (">&-", "1"), ("2>&-", "1"), ("<&- >&- 2>&-", "1"), ("<&- >&- 2>&-", "2")],
)
def test_closed_standard_streams_do_not_stop_calls(closed: str, workers: str, gateway_command: Commands) -> None:
    listener, port = taken_port()
    listener.close()
    store = gateway_command.folder / "own.db"
    args = ("serve", "--mock", "--store", f"sqlite://{store}", "--port", str(port), "--workers", workers)
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *command(args)], cwd=gateway_command.folder,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               env=environment(gateway_command.folder, None))  # fmt: skip
    try:
        until(lambda: accepts(port) or process.poll() is not None, STARTS_S, "it listens")
        web = Web(f"http://127.0.0.1:{port}")
        assert web.chat("s").status == 200
        family = [process.pid, *children_of(process.pid)]
        assert len(family) >= int(workers)
        places = [Path(f"/proc/{pid}/fd/{number}").readlink() for pid in family for number in range(3)]
        assert set(places) == {Path(os.devnull)}
        assert web.get("/api/sessions/s").json["calls"] == 1
    finally:
        process.terminate()
        code = process.wait(LIMIT_S)
    assert code == 0
    (row,) = json.loads(gateway_command("sessions", "--json", "--store", f"sqlite://{store}").out)
    assert row["id"] == "s"


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_public_host_with_a_provider_key_is_refused_with_the_remedy(gateway_command: Commands) -> None:
    args = ("serve", "--host", "0.0.0.0", "--port", "0", "--store", "memory://")
    done = gateway_command.process(*args, env={"OPENAI_API_KEY": SECRET})
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    for part in ("0.0.0.0", "openai", "auth.keys", "127.0.0.1"):
        assert part in done.err
    assert SECRET not in done.all


def test_public_host_without_a_provider_key_or_with_client_keys_is_served(
    serving: Serve, gateway_command: Commands
) -> None:
    assert "0.0.0.0" not in serving("--host", "0.0.0.0", "--mock", "--store", "memory://").url
    file = gateway_command.file('auth: {keys: [{name: alice, key: "0123456789abcdef"}]}')
    gateway = serving("-c", file, "--host", "0.0.0.0", "--store", "memory://", env={"OPENAI_API_KEY": SECRET})
    assert gateway.web.get("/healthz").status == 200


def test_a_broken_configuration_is_refused_with_every_key_path(gateway_command: Commands) -> None:
    file = gateway_command.file("{stroe: {}, server: {prot: 1}, sessions: {ttl: long}}")
    done = gateway_command.process("serve", "-c", file)
    assert (done.code, done.out) == (2, "")
    assert sorted(line.partition(": ")[0] for line in done.err.splitlines()) == ["server.prot", "sessions.ttl", "stroe"]


@pytest.mark.parametrize("flags", [["--store", "postgres://db"], ["--workers", "0"], ["--upstream", "ftp://host"],
                                   ["--workers", "2", "--store", "memory://"], ["-c", "missing.yaml"],
                                   ["--mock", "--upstream", "http://127.0.0.1:1"]])  # fmt: skip
def test_contradictory_flags_end_with_2_and_an_error(flags: list[str], gateway_command: Commands) -> None:
    done = gateway_command.process("serve", "--port", "0", *flags)
    assert (done.code, done.out) == (2, "")
    assert done.err.strip()
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("workers", ["1", "2"])
def test_store_that_cannot_be_written_ends_with_1_and_an_error(workers: str, gateway_command: Commands) -> None:
    gateway_command.file("", "no-folder")
    store = f"sqlite://{gateway_command.folder}/no-folder/gateway.db"
    done = gateway_command.process("serve", "--mock", "--port", "0", "--workers", workers, "--store", store)
    assert (done.code, done.out) == (1, "")
    assert "gateway.db" in done.err


def test_store_that_cannot_be_written_is_reported_once(gateway_command: Commands) -> None:
    gateway_command.file("", "no-folder")
    store = f"sqlite://{gateway_command.folder}/no-folder/gateway.db"
    done = gateway_command.process("serve", "--mock", "--port", "0", "--store", store)
    assert done.code == 1
    assert len(done.err.splitlines()) == 1


def test_error_at_start_prints_no_other_messages(gateway_command: Commands) -> None:
    file = gateway_command.file(
        "{providers: {openai: {tls: {ca_file: missing.pem}}}, store: {url: 'memory://'},"
        " callbacks: {webhooks: [{url: 'http://127.0.0.1:9/'}]}}"
    )
    done = gateway_command.process("serve", "-c", file, "--port", "0")
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1
    assert "the gateway cannot start: providers.openai.tls.ca_file: missing.pem cannot be used" in done.err


def test_half_of_the_packages_of_telemetry_are_not_enough(gateway_command: Commands) -> None:
    hidden = gateway_command.folder / "opentelemetry/exporter"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError")
    file = gateway_command.file("{telemetry: {otel: true}, store: {url: 'memory://'}}")
    env = {"PYTHONPATH": f"{gateway_command.folder}:{ROOT}"}
    done = gateway_command.process("serve", "-c", file, "--port", "0", env=env)
    assert done.code == 1
    assert len(done.err.splitlines()) == 1
    assert "telemetry.otel: packages missing: pip install" in done.err


# --- reload -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "2"])
def test_workers_that_cannot_start_end_with_1(workers: str, gateway_command: Commands) -> None:
    file = gateway_command.folder / "gateway.yaml"
    file.write_text("callbacks:\n  observers: [no_such_package.Thing]\nstore: {url: sqlite://gateway.db}\n")
    done = gateway_command.process("serve", "-c", file, "--port", "0", "--workers", workers)
    assert done.code == 1
    assert "callbacks.observers[0]: no_such_package.Thing cannot be loaded" in done.err
    assert "OPENAI_BASE_URL" not in done.err, "nobody is invited to what takes no calls"


def test_sighup_applies_a_changed_file(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider, other_server: MockServer
) -> None:
    folder = gateway_command.folder
    gateway = serving("-c", gateway_command.file(settings(mock_server.url, folder)))
    assert gateway.web.chat("s").status == 200
    gateway_command.file(settings(other_server.url, folder, sessions={"on_missing": "require"}))
    gateway.signal(signal.SIGHUP)
    says(gateway, "configuration reloaded")
    assert gateway.web.chat("s").status == 200
    assert gateway.web.chat().status == 400, "sessions.on_missing"
    assert (len(mock.calls), len(other_server.provider.calls)) == (1, 1)
    both = mock.billed().total_tokens + other_server.provider.billed().total_tokens
    assert gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == both


def test_sighup_with_a_broken_file_changes_nothing_and_reports_it(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    file = gateway_command.file(settings(mock_server.url, gateway_command.folder))
    gateway = serving("-c", file)
    for times, broken in enumerate(("stroe: {}", "server: [", "providers: {own: {base_url: nowhere}}", None), 1):
        if broken is None:
            file.unlink()
        else:
            gateway_command.file(broken)
        gateway.signal(signal.SIGHUP)
        says(gateway, "not reloaded", times)
        assert gateway.web.chat("s").status == 200
    assert len(mock.calls) == 4
    assert "stroe: unknown key (did you mean store?)" in gateway.log
    assert gateway.process.poll() is None


def test_reload_never_opens_access(serving: Serve, gateway_command: Commands, mock_server: MockServer) -> None:
    folder = gateway_command.folder
    keys = {"keys": [{"name": "alice", "key": SECRET}]}
    gateway = serving("-c", gateway_command.file(settings(mock_server.url, folder, auth=keys)), "--host", "0.0.0.0")
    gateway_command.file(settings(mock_server.url, folder).replace('"auth": "none"', f'"key": "{SECRET}-own"'))
    gateway.signal(signal.SIGHUP)
    says(gateway, "not reloaded")
    assert gateway.web.chat("s").status == 401
    assert SECRET not in gateway.log


def test_reload_does_not_change_a_running_stream(
    serving: Serve, gateway_command: Commands, byte_server: StartUpstream, other_server: MockServer
) -> None:
    folder = gateway_command.folder
    held = Held()
    upstream = byte_server(held)
    gateway = serving("-c", gateway_command.file(settings(upstream.url, folder)))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(gateway.web.stream, "s")
        until(lambda: upstream.requests)
        gateway_command.file(settings(other_server.url, folder))
        gateway.signal(signal.SIGHUP)
        says(gateway, "configuration reloaded")
        assert not stream.done()
        held.release()
        answer = stream.result(LIMIT_S)
    assert answer.clean
    assert b"data: [DONE]" in answer.body
    assert answer.totals == (10, 5, 15)


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_gateway_ends_at_once_on_a_signal(number: signal.Signals, serving: Serve) -> None:
    gateway = serving("--mock", "--store", "memory://")
    assert gateway.web.chat("s").status == 200
    gateway.signal(number)
    code = gateway.wait()  # not for the grace, which is longer
    assert code in (0, -number, 128 + number)


def test_sigterm_lets_a_stream_end_and_its_usage_is_kept(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = serving("-c", gateway_command.file(settings(mock_server.url, gateway_command.folder)))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(gateway.web.stream, "s", "chunks=20,interval=0.03")
        until(lambda: len(mock.calls) == 1)
        gateway.signal(signal.SIGTERM)
        answer = stream.result(LIMIT_S)
    gateway.wait()
    assert b"data: [DONE]" in answer.body
    store = f"sqlite://{gateway_command.folder}/gateway.db"
    shown = json.loads(gateway_command("sessions", "show", "s", "--json", "--store", store).out)
    assert shown["cumulative_token_usage"]["total_tokens"] == mock.billed().total_tokens
    assert shown["usage_source"] == "provider"


def test_grace_period_is_respected(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    file = gateway_command.file(settings(mock_server.url, gateway_command.folder, server={"shutdown_grace_s": 1}))
    gateway = serving("-c", file)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stream = pool.submit(gateway.web.stream, "s", "chunks=4000,interval=0.02")
        until(lambda: len(mock.calls) == 1)
        with in_time(at_least=0.5):
            gateway.signal(signal.SIGTERM)
            gateway.wait()
        assert b"data: [DONE]" not in stream.result(LIMIT_S).body
    store = f"sqlite://{gateway_command.folder}/gateway.db"
    shown = json.loads(gateway_command("sessions", "show", "s", "--json", "--store", store).out)
    assert shown["cumulative_token_usage"]["total_tokens"] > 0, "what was delivered is charged"


# --- several workers ----------------------------------------------------------------------------------------------


def test_two_workers_share_a_store_reload_together_and_end_together(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider, other_server: MockServer
) -> None:
    folder = gateway_command.folder
    gateway = serving("-c", gateway_command.file(settings(mock_server.url, folder)), "--workers", "2")
    # A starting worker has nothing to reload.
    until(lambda: gateway.web.get("/metrics").body.count(b"\ngateway_info{") == 2, STARTS_S, "both take calls")
    assert len(gateway.children) == 2

    def total() -> int:
        tokens: int = gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"]
        return tokens

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [
            *pool.map(lambda _: gateway.web.chat("s"), range(60)),
            *pool.map(lambda _: gateway.web.stream("s"), range(20)),
        ]
        assert {answer.status for answer in answers} == {200}
        assert (total(), len(mock.calls)) == (mock.billed().total_tokens, 80)

        gateway_command.file(settings(other_server.url, folder))
        gateway.signal(signal.SIGHUP)
        says(gateway, "configuration reloaded", times=2)
        before = len(mock.calls)
        assert {answer.status for answer in pool.map(lambda _: gateway.web.chat("s"), range(40))} == {200}
        assert (len(mock.calls) - before, len(other_server.provider.calls)) == (0, 40)
        both = mock.billed().total_tokens + other_server.provider.billed().total_tokens
        assert total() == both

        streams = [pool.submit(gateway.web.stream, "s", "chunks=20,interval=0.03") for _ in range(6)]
        until(lambda: len(other_server.provider.calls) == 46)
        workers = gateway.children
        gateway.signal(signal.SIGTERM)
        ended = [stream.result(LIMIT_S) for stream in streams]
    gateway.wait()
    assert [b"data: [DONE]" in answer.body for answer in ended] == [True] * 6
    assert [pid for pid in workers if alive(pid)] == []
    shown = json.loads(
        gateway_command("sessions", "show", "s", "--json", "--store", f"sqlite://{folder}/gateway.db").out
    )
    both = mock.billed().total_tokens + other_server.provider.billed().total_tokens
    assert (shown["cumulative_token_usage"]["total_tokens"], shown["calls"]) == (both, 126)
    assert shown["usage_source"] == "provider"


def test_a_worker_that_is_killed_is_replaced_and_no_total_is_lost(serving: Serve, mock: MockProvider) -> None:
    gateway = serving("--mock", "--workers", "2")
    workers = until(lambda: len(gateway.children) == 2 and gateway.children)
    assert gateway.web.chat("s", "tokens=10/5").status == 200
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: len(gateway.children) == 2 and workers[0] not in gateway.children, STARTS_S, "it is replaced")
    answers = [gateway.web.chat("s", "tokens=1/1") for _ in range(10)]
    assert {answer.status for answer in answers} == {200}
    assert answers[-1].totals == (20, 15, 35)


def test_worker_that_does_not_respond_is_replaced(serving: Serve) -> None:
    gateway = serving("--mock", "--workers", "2")
    workers = until(lambda: len(gateway.children) == 2 and gateway.children)
    # A starting worker has a longer timeout.
    until(lambda: gateway.web.get("/metrics").body.count(b"\ngateway_info{") == 2, STARTS_S, "both take calls")
    os.kill(workers[0], signal.SIGSTOP)
    until(lambda: len(gateway.children) == 2 and workers[0] not in gateway.children, STARTS_S, "it is replaced")
    assert gateway.web.chat("s").status == 200


def test_workers_stop_when_their_parent_is_killed(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    file = gateway_command.file(settings(mock_server.url, gateway_command.folder))
    gateway = serving("-c", file, "--workers", "2")
    workers = until(lambda: len(gateway.children) == 2 and gateway.children)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        stream = pool.submit(gateway.web.stream, "s", "chunks=20,interval=0.05")
        until(lambda: mock.calls)
        gateway.signal(signal.SIGKILL)
        answer = stream.result(LIMIT_S)
    assert b"data: [DONE]" in answer.body
    until(lambda: not any(map(alive, workers)), STARTS_S, "nobody would reload or replace them")
    says(gateway, "parent")


SLOW = """
import os, pathlib, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    (pathlib.Path(__file__).parent / f"began-{os.getpid()}").touch()
    time.sleep(6.5)
"""


def test_slow_start_of_a_worker_is_not_treated_as_a_hang(serving: Serve, gateway_command: Commands) -> None:
    gateway_command.file(SLOW, "sitecustomize.py")
    gateway = serving("--mock", "--workers", "2", env={"PYTHONPATH": f"{gateway_command.folder}{os.pathsep}{ROOT}"})
    assert gateway.web.chat("s").status == 200
    began = {int(file.name.removeprefix("began-")) for file in gateway_command.folder.glob("began-*")}
    assert began == set(gateway.children)
    assert len(began) == 2, "none was killed and started again"


STUCK = """
import os, pathlib, sys, time
here = pathlib.Path(__file__).parent
if "--multiprocessing-fork" in sys.orig_argv and (here / "stuck").exists():
    (here / "began").touch()
    time.sleep(100)
"""


def test_dead_worker_is_replaced_although_another_cannot_start(serving: Serve, gateway_command: Commands) -> None:
    gateway_command.file(STUCK, "sitecustomize.py")
    gateway = serving("--mock", "--workers", "2", env={"PYTHONPATH": f"{gateway_command.folder}{os.pathsep}{ROOT}"})
    first, second = until(lambda: len(gateway.children) == 2 and gateway.children)
    assert gateway.web.chat("s").status == 200
    stuck = gateway_command.file("", "stuck")
    os.kill(first, signal.SIGKILL)
    until(stuck.with_name("began").exists, STARTS_S)
    stuck.unlink()
    os.kill(second, signal.SIGKILL)
    until(lambda: len(gateway.children) == 2 and second not in gateway.children, STARTS_S, "it is replaced")
    assert gateway.web.chat("s").status == 200


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # A zombie process, which has ended without a wait of its parent, is not alive.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# --- secrets ------------------------------------------------------------------------------------------------------


def test_keys_are_never_printed(
    serving: Serve, gateway_command: Commands, mock_server: MockServer, mock: MockProvider
) -> None:
    auth = {"keys": [{"name": "alice", "key": f"{SECRET}-alice"}], "admin_key": f"{SECRET}-admin"}
    text = settings(mock_server.url, gateway_command.folder, auth=auth, telemetry={"log": {"level": "debug"}})
    file = gateway_command.file(text.replace('"auth": "none"', '"key": "${OWN_KEY}"'))
    gateway = serving("-c", file, env={"OWN_KEY": f"{SECRET}-own", "OPENAI_API_KEY": f"{SECRET}-openai"})
    shown = []
    for key in ("alice", "wrong", "admin"):
        gateway.web.headers["authorization"] = f"Bearer {SECRET}-{key}"
        shown += [gateway.web.chat("s"), gateway.web.chat("s", "status=401"), gateway.web.chat("s", "die=0")]
        shown += [gateway.web.get("/api/sessions"), gateway.web.get("/api/models?q=gpt-5"), gateway.web.get("/nowhere")]
    gateway_command.file(file.read_text() + "}")
    gateway.signal(signal.SIGHUP)
    says(gateway, "not reloaded")
    assert mock.calls[0].header("authorization") == f"Bearer {SECRET}-own", "it was used"
    said = gateway.log + gateway.said + "".join(f"{answer.headers}{answer.body!r}" for answer in shown)
    assert SECRET not in said
    assert len(gateway.log.splitlines()) > 8
