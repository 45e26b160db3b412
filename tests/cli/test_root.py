"""`gateway`, `--help`, `--version`, `demo`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gateway import __version__
from tests.support.commands import Commands, environment

ALL = (
    "serve",
    "demo",
    "check",
    "init",
    "schema",
    "count",
    "trim",
    "models",
    "sessions",
    "keys",
    "env",
    "top",
    "replay",
)


def test_help_names_every_command(gateway_command: Commands) -> None:
    done = gateway_command("--help")
    assert done.code == 0
    assert [name for name in ALL if name not in done.out] == []


@pytest.mark.parametrize("name", ALL)
def test_every_command_explains_itself(name: str, gateway_command: Commands) -> None:
    for flag in ("--help", "-h"):
        done = gateway_command(name, flag)
        assert done.code == 0
        assert "Usage:" in done.out


def test_without_a_command_the_help_is_shown_as_wrong_usage(gateway_command: Commands) -> None:
    done = gateway_command()
    assert done.code == 2
    assert "serve" in done.all


@pytest.mark.parametrize("args", [["sreve"], ["--nonsense"], ["serve", "--port", "many"], ["serve", "--port", "70000"],
                                  ["demo", "--steps", "0"], ["sessions", "show"], ["models", "--limit", "0"]])  # fmt: skip
def test_wrong_usage_ends_with_2_and_a_sentence_on_stderr(args: list[str], gateway_command: Commands) -> None:
    done = gateway_command(*args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.strip()


def test_the_version_is_that_of_the_package(gateway_command: Commands) -> None:
    done = gateway_command.process("--version")
    assert (done.code, done.out, done.err) == (0, f"gateway {__version__}\n", "")


def test_help_imports_nothing_heavier_than_typer_and_rich(gateway_command: Commands) -> None:
    program = (
        "import sys; from gateway.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('pydantic', 'yaml', 'aiohttp', 'uvicorn', 'starlette', 'msgspec', 'litellm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(gateway_command.folder, None),
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_demo_plays_a_session_and_its_total_is_the_providers_count(gateway_command: Commands) -> None:
    done = gateway_command.process("demo", env={"COLUMNS": "40"})
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out, "no colour, as this is no terminal"
    assert "session total" in done.out, "nor is anything cut to its width"
    assert "condense=" in done.out, "the conversation outgrows its budget"
    assert all(f"  {mode}  " in done.out for mode in ("raw", "table", "summary")), "and the session its own"
    assert 'was refused: Session "demo" has used' in done.out
    last = [line for line in done.lines if "tokens" in line][-2:]
    counts = {line.rsplit(": ", 1)[1] for line in last}
    assert len(last) == 2
    assert len(counts) == 1, "the session's total and the provider's count"


def test_the_demo_in_json_holds_every_call(gateway_command: Commands) -> None:
    done = gateway_command.process("demo", "--steps", "3", "--json")
    assert done.code == 0
    shown = json.loads(done.out)
    assert shown["session_total_tokens"] == shown["provider_billed_tokens"] > 0
    assert len(shown["calls"]) == 6
    assert shown["refused"] is None
    used = [json.loads(call["headers"]["x-token-usage"])["totalTokens"] for call in shown["calls"]]
    totals = [json.loads(call["headers"]["x-session-cumulative-token-usage"])["totalTokens"] for call in shown["calls"]]
    assert totals == [sum(used[: n + 1]) for n in range(6)]


def test_the_demo_heeds_no_configuration_and_leaves_nothing_behind(gateway_command: Commands) -> None:
    gateway_command.file('auth: {keys: [{name: alice, key: "0123456789abcdef"}]}', "gateway.yaml")
    done = gateway_command.process("demo", "--steps", "1", env={"GATEWAY_SERVER_PORT": "nonsense"})
    assert (done.code, done.err) == (0, "")
    assert [path.name for path in gateway_command.folder.iterdir()] == ["gateway.yaml"]
