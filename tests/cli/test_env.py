"""`gateway env`."""

from __future__ import annotations

import json
import subprocess

import pytest

from gateway.cli.env import CLIENTS
from tests.support.commands import Commands


@pytest.mark.parametrize("client", [name for name, one in CLIENTS.items() if one.text.startswith("export ")])
def test_a_shell_can_take_the_variables_over(client: str, gateway_command: Commands) -> None:
    done = gateway_command("env", client, "--url", "http://gw.example:9000/a b")
    assert done.code == 0
    name = done.out.partition("=")[0].removeprefix("export ")
    script = f'{done.out}printf %s "${name}"'
    shell = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout.startswith("http://gw.example:9000/a b"), "what a shell would split is quoted"


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_is_told_the_address_and_nothing_is_left_open(client: str, gateway_command: Commands) -> None:
    done = gateway_command("env", client, "--json")
    told = json.loads(done.out)
    assert "http://127.0.0.1:8484" in told["text"]
    assert "$" not in told["text"]


def test_the_address_is_where_the_configuration_listens(gateway_command: Commands) -> None:
    (gateway_command.folder / "gateway.yaml").write_text("server: {host: '::1', port: 9001}\n")
    assert gateway_command("env", "openai").out == "export OPENAI_BASE_URL='http://[::1]:9001/v1'\n"


def test_a_session_is_named_by_the_path(gateway_command: Commands) -> None:
    done = gateway_command("env", "aider", "--session", "report-42")
    assert done.out == "export OPENAI_API_BASE=http://127.0.0.1:8484/s/report-42/v1\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nobody"], "claude-code"),
        (["aider", "--session", "a/b"], "1-255 characters"),
        (["claude-code", "--session", "mine"], "by itself"),
    ],
)
def test_what_cannot_be_is_said(args: list[str], said: str, gateway_command: Commands) -> None:
    done = gateway_command("env", *args)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""
