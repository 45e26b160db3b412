"""`gateway env`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml

from gateway.cli.env import CLIENTS
from gateway.core.identity import is_valid
from tests.support.commands import Commands


@pytest.mark.parametrize("client", [name for name, one in CLIENTS.items() if one.text.startswith("export ")])
def test_output_can_be_evaluated_by_a_shell(client: str, gateway_command: Commands) -> None:
    done = gateway_command("env", client, "--url", "http://gw.example:9000/a&b'c")
    assert done.code == 0
    name = done.out.partition("=")[0].removeprefix("export ")
    script = f'{done.out}printf %s "${name}"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.startswith("http://gw.example:9000/a&b'c"), "what a shell would split is quoted"


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_the_url_and_no_placeholder_remains(client: str, gateway_command: Commands) -> None:
    done = gateway_command("env", client, "--json")
    told = json.loads(done.out)
    assert "http://127.0.0.1:8484" in told["text"]
    assert "$" not in told["text"]


def test_the_address_is_where_the_configuration_listens(gateway_command: Commands) -> None:
    (gateway_command.folder / "gateway.yaml").write_text("server: {host: '::1', port: 9001}\n")
    assert gateway_command("env", "openai").out == "export OPENAI_BASE_URL='http://[::1]:9001/v1'\n"


def test_curl_command_runs_in_a_shell(gateway_command: Commands) -> None:
    done = gateway_command("env", "curl", "--url", "http://gw.example:9000/a&b'c")
    assert shlex.split(done.out)[1] == "http://gw.example:9000/a&b'c/v1/chat/completions"


@pytest.mark.parametrize("url", ["https://gw.example", "http://[::1]:80/v1/", "http://10.0.0.1:8484/a/b%20c"])
def test_url_option_is_used(url: str, gateway_command: Commands) -> None:
    told = json.loads(gateway_command("env", "openai", "--url", url, "--json").out)
    assert told["base_url"] == url.removesuffix("/v1/") + "/v1"


@pytest.mark.parametrize("client", CLIENTS)
def test_the_base_url_for_programs_is_the_one_in_the_text(client: str, gateway_command: Commands) -> None:
    told = json.loads(gateway_command("env", client, "--json").out)
    _, found, after = told["text"].partition(told["base_url"])
    assert found, told
    assert not after.startswith("/v1")


@pytest.mark.parametrize(
    ("client", "where", "entered"),
    [
        ("cursor", "Cursor Settings, Models", "Override OpenAI Base URL: https://gw.example/v1\n"),
        ("open-webui", "Connections", "URL: https://gw.example/v1\n"),
        ("librechat", "librechat.yaml", '      baseURL: "https://gw.example/v1"\n'),
        ("jupyter", "first cell", 'base_url="https://gw.example/v1"'),
    ],
)
def test_settings_outside_a_shell_name_their_place(
    client: str, where: str, entered: str, gateway_command: Commands
) -> None:
    done = gateway_command("env", client, "--url", "https://gw.example")
    assert (done.code, done.err.count("\n")) == (0, 1)
    assert entered in done.out
    assert where in done.err


def test_the_block_for_librechat_is_yaml_and_the_cell_for_jupyter_python(gateway_command: Commands) -> None:
    (endpoint,) = yaml.safe_load(gateway_command("env", "librechat").out)["endpoints"]["custom"]
    assert endpoint["baseURL"] == "http://127.0.0.1:8484/v1"
    assert endpoint["headers"] == {"x-session-id": "{{LIBRECHAT_BODY_CONVERSATIONID}}"}
    cell = gateway_command("env", "jupyter").out + "print(client.base_url, client.default_headers['x-session-id'])"
    done = subprocess.run(
        [sys.executable, "-c", cell], capture_output=True, text=True, check=True, env={"OPENAI_API_KEY": "any"}
    )
    url, session = done.stdout.split()
    assert url == "http://127.0.0.1:8484/v1/"
    assert re.fullmatch(r"nb-[0-9a-f]{32}", session)


@pytest.mark.parametrize(
    "url",
    ["", "gw.example", "ftp://gw.example", "http://", "http://gw example", 'http://gw"', "http://gw\\", "http://gw\n",
     "http://gw:99999", "http://gw:0", "http://[::1", "https://gw?a=1", "https://gw#a", "http://gw\x1b[2J"],
)  # fmt: skip
def test_invalid_url_is_refused(url: str, gateway_command: Commands) -> None:
    done = gateway_command("env", "codex", "--url", url)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("--url ")
    assert len(done.err.splitlines()) == 1
    assert "\x1b" not in done.err


def test_port_0_needs_the_url_option(gateway_command: Commands) -> None:
    done = gateway_command("env", "openai", env={"GATEWAY_SERVER_PORT": "0"})
    assert (done.code, done.out) == (2, "")
    assert "--url" in done.err


@pytest.mark.parametrize("name", ["a", "report-42", "A.b_c:d-e", "...", "x" * 255])
def test_valid_session_id_is_accepted(name: str, gateway_command: Commands) -> None:
    assert is_valid(name)
    assert gateway_command("env", "curl", "--session", name).out.startswith(f"curl http://127.0.0.1:8484/s/{name}/v1/")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a\n", "a\x1b[31mb", "$(ls)", "x" * 256])
def test_invalid_session_id_is_refused(name: str, gateway_command: Commands) -> None:
    assert not is_valid(name)
    done = gateway_command("env", "aider", "--session", name)
    assert (done.code, done.out) == (2, "")
    assert "1-255 characters of A-Z a-z 0-9 . _ : -" in done.err
    assert len(done.err.splitlines()) == 1
    assert len(done.err) < 300
    assert "\x1b" not in done.err


def test_a_session_is_named_by_the_path(gateway_command: Commands) -> None:
    done = gateway_command("env", "aider", "--session", "report-42")
    assert done.out == "export OPENAI_API_BASE=http://127.0.0.1:8484/s/report-42/v1\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nobody"], "claude-code"),
        (["aider", "--session", "a/b"], "1-255 characters"),
        (["claude-code", "--session", "mine"], "names its sessions itself"),
    ],
)
def test_invalid_arguments_are_errors(args: list[str], said: str, gateway_command: Commands) -> None:
    done = gateway_command("env", *args)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


# --- the window of a model -----------------------------------------------------------------------------------------

MODELS = """
models:
  - {match: local, provider: openai, window: 64000, output: 8000}
  - {match: wide, provider: openai, window: 2000000, output: 64000}
"""


def exports(text: str) -> dict[str, str]:
    return dict(line.removeprefix("export ").split("=", 1) for line in text.splitlines())


def told(command: Commands, *arguments: str, config: str = MODELS) -> str:
    (command.folder / "gateway.yaml").write_text(config)
    done = command("env", *arguments)
    assert done.code == 0, done.err
    return done.out


def test_claude_code_compacts_within_the_context_budget(gateway_command: Commands) -> None:
    assert exports(told(gateway_command, "claude-code", config="")).keys() == {"ANTHROPIC_BASE_URL"}
    found = exports(told(gateway_command, "claude-code", config="context: {budget: 150000}\n"))
    assert (found.pop("ANTHROPIC_BASE_URL"), found) == (
        "http://127.0.0.1:8484",
        {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "150000"},
    )
    found = exports(told(gateway_command, "claude-code", config="context: {budget: 60000}\n"))
    # Its smallest window is 100,000 tokens, so it also gets a share of it.
    assert found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "100000"
    assert found["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] == "60"
    untrimmed = told(gateway_command, "claude-code", config="context: {budget: 60000, trim: 'off'}\n")
    assert exports(untrimmed).keys() == {"ANTHROPIC_BASE_URL"}


def test_claude_code_learns_the_window_of_a_model_that_it_does_not_know(gateway_command: Commands) -> None:
    found = exports(told(gateway_command, "claude-code", "--model", "local"))
    assert found == {
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8484",
        "ANTHROPIC_MODEL": "local",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "64000",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8000",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "64",
    }
    wide = exports(told(gateway_command, "claude-code", "--model", "wide"))
    assert wide["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "1000000"
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS" not in wide
    limited = "models: [{match: wide, provider: openai, window: 900000, input: 200000}]\n"
    found = exports(told(gateway_command, "claude-code", "--model", "wide", config=limited))
    assert found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "200000"
    known = exports(told(gateway_command, "claude-code", "--model", "claude-opus-5-5"))
    assert known.keys() == {"ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"}


def test_codex_gets_the_model_and_its_window_at_the_top_of_its_file(gateway_command: Commands) -> None:
    file = tomllib.loads(told(gateway_command, "codex", "--model", "local"))
    assert (file["model"], file["model_context_window"], file["model_auto_compact_token_limit"]) == (
        "local",
        64_000,
        57_600,
    )
    assert file["model_providers"]["gateway"]["base_url"] == "http://127.0.0.1:8484/v1"
    lowered = tomllib.loads(told(gateway_command, "codex", config="context: {budget: 50000}\n"))
    assert (lowered["model_context_window"], "model" in lowered) == (50_000, False)
    assert "model_context_window" not in tomllib.loads(told(gateway_command, "codex"))


def test_opencode_gets_the_limits_of_the_model(gateway_command: Commands) -> None:
    file = json.loads(told(gateway_command, "opencode", "--model", "local"))
    assert file["provider"]["gateway"]["models"] == {"local": {"limit": {"context": 64_000, "output": 8_000}}}
    assert json.loads(told(gateway_command, "opencode"))["provider"]["gateway"]["models"] == {"gpt-5.1": {}}


def test_an_unknown_window_is_said_and_not_guessed(gateway_command: Commands) -> None:
    (gateway_command.folder / "gateway.yaml").write_text("models: [{match: own, provider: openai}]\n")
    done = gateway_command("env", "codex", "--model", "own")
    assert (done.code, tomllib.loads(done.out).get("model_context_window")) == (0, None)
    assert 'The context window of "own" is unknown.' in done.err


def test_a_model_for_a_client_without_such_settings_is_refused(gateway_command: Commands) -> None:
    done = gateway_command("env", "curl", "--model", "local")
    assert (done.code, done.out) == (2, "")
    assert "omit --model" in done.err
