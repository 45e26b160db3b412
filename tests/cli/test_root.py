"""`gateway`, `--help`, `--version`, `demo`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from gateway import __version__
from gateway.cli import app
from tests.support.commands import Commands, command, environment, run_with_closed_streams, run_with_output
from tests.support.gateways import ROOT, STARTS_S

pytestmark = pytest.mark.long

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
    "bench",
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


def test_every_command_with_output_has_json() -> None:
    without = [
        path for path, one in commands(get_command(app)) if all("--json" not in each.opts for each in one.params)
    ]
    assert without == ["export", "schema", "serve"], "the output of export and schema is JSON by itself"


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all commands in the order of their names, such as `sessions list`."""
    for name, one in sorted(getattr(command, "commands", {}).items()):
        yield from commands(one, f"{path}{name} ")
    if not hasattr(command, "commands"):
        yield path.strip(), command


def test_without_a_command_the_help_is_shown_as_wrong_usage(gateway_command: Commands) -> None:
    done = gateway_command()
    assert done.code == 2
    assert "serve" in done.all


@pytest.mark.parametrize("args", [["sreve"], ["--nonsense"], ["serve", "--port", "many"], ["serve", "--port", "70000"],
                                  ["demo", "--steps", "0"], ["sessions", "show"], ["models", "--limit", "0"],
                                  ["models", "--limit", "99999999999999999999"]])  # fmt: skip
def test_wrong_usage_ends_with_2_and_a_sentence_on_stderr(args: list[str], gateway_command: Commands) -> None:
    done = gateway_command(*args)
    assert done.code == 2
    assert done.out == ""
    assert done.err.strip()


def test_the_version_is_that_of_the_package(gateway_command: Commands) -> None:
    done = gateway_command.process("--version")
    assert (done.code, done.out, done.err) == (0, f"gateway {__version__}\n", "")


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("args", [["schema"], ["env", "codex"], ["models", "gpt-4o"], ["models", "gpt-4o", "--json"]])
def test_full_disk_is_a_one_line_error(args: list[str], unbuffered: str, gateway_command: Commands) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_with_output(full.fileno(), gateway_command, args, {"PYTHONUNBUFFERED": unbuffered})
    assert (done.returncode, done.stderr) == (1, "The output cannot be written: No space left on device.\n")


def test_full_disk_without_stderr_is_still_an_error(gateway_command: Commands) -> None:
    with Path("/dev/full").open("wb") as full:
        done = run_with_output(full.fileno(), gateway_command, ["schema"], {}, stderr=full.fileno())
    assert done.returncode == 1


@pytest.mark.parametrize("args", [["schema"], ["env", "codex"], ["models", "gpt-4o", "--json", "--limit", "1"]])
@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_closed_pipe_prints_no_error(args: list[str], unbuffered: str, gateway_command: Commands) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_with_output(writer, gateway_command, args, {"PYTHONUNBUFFERED": unbuffered})
    finally:
        os.close(writer)
    assert done.returncode == 1
    assert set(done.stderr.splitlines()) <= {"# in ~/.codex/config.toml"}


@pytest.mark.parametrize("args", [
    ["--version"], ["schema"], ["env", "codex", "--json"], ["models", "gpt-4o"], ["models", "gpt-4o", "--json"],
    ["count", "body.json"], ["count", "body.json", "--json"], ["trim", "body.json"], ["trim", "body.json", "--json"],
    ["sessions"], ["sessions", "--json"], ["top", "--once"], ["top", "--json"], ["check", "--json"], ["keys"],
    ["keys", "--json"], ["replay", "body.json"], ["replay", "body.json", "--json"],
    ["demo", "--steps", "1", "--json"],
])  # fmt: skip
def test_closed_stdout_is_a_one_line_error(args: list[str], gateway_command: Commands) -> None:
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello"}]}
    gateway_command.file(json.dumps(body), "body.json")
    store = {"GATEWAY_STORE_URL": f"sqlite:///{gateway_command.folder / 's.db'}"}
    if args[0] in {"sessions", "top", "keys"}:
        assert gateway_command("keys", "add", "alice", env=store).code == 0  # makes the store
    done = run_with_closed_streams(">&-", gateway_command, args, store)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (1, [CLOSED])
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0), ("<&- >&- 2>&-", 0)])
def test_closed_stdout_is_no_error_without_output(closed: str, code: int, gateway_command: Commands) -> None:
    assert run_with_closed_streams(closed, gateway_command, ["check"], {}).returncode == code


def test_exit_code_is_the_same_without_stderr(gateway_command: Commands) -> None:
    assert run_with_closed_streams("2>&-", gateway_command, ["check", "-c", "missing.yaml"], {}).returncode == 3
    assert run_with_closed_streams(">&- 2>&-", gateway_command, ["demo", "--steps", "1", "--json"], {}).returncode == 1


def test_closed_stdin_is_empty(gateway_command: Commands) -> None:
    done, empty = (
        run_with_closed_streams("<&-", gateway_command, ["count", "-"], {}),
        gateway_command.process("count", "-", stdin=""),
    )
    assert (done.returncode, done.stderr) == (empty.code, empty.err)
    assert empty.code == 1


@pytest.mark.parametrize("args", [
    ["models", "--limit", "5000"], ["models", "--limit", "5000", "--json"], ["trim", "body.json"],
    ["count", "body.json", "--items"], ["count", "body.json", "--items", "--json"],
])  # fmt: skip
def test_pipe_closed_after_the_first_line_prints_no_error(args: list[str], gateway_command: Commands) -> None:
    # more than a pipe holds, in each of these forms: what is left to print is what is looked at
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": f"hello {n} " * 9} for n in range(5000)]}
    gateway_command.file(json.dumps(body), "body.json")
    with subprocess.Popen(
        command(tuple(args)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=gateway_command.folder,
        env=environment(gateway_command.folder, {"PYTHONUNBUFFERED": ""}),
    ) as running:  # fmt: skip
        assert running.stdout is not None
        assert running.stderr is not None
        assert os.read(running.stdout.fileno(), 1)
        running.stdout.close()
        said = running.stderr.read().decode()
        assert running.wait(STARTS_S) == 1
    assert not {"Traceback", "Exception", "Broken pipe"} & set(said.replace(":", " ").split()), said


#: error of the system for a closed stdout
CLOSED = "The output cannot be written: Bad file descriptor."


def test_characters_outside_the_encoding_of_stdout_are_replaced(gateway_command: Commands) -> None:
    file = gateway_command.file("providers: {模: {}}")
    done = gateway_command.process("check", "-c", file, env={"PYTHONIOENCODING": "latin-1"})
    assert (done.code, done.out) == (3, "providers.?.base_url: field required\n")


def test_ctrl_c_while_the_command_is_being_imported_is_quiet(gateway_command: Commands) -> None:
    # The first import represents any import during which the key is pressed.
    gateway_command.file("import os, signal; os.kill(os.getpid(), signal.SIGINT)", "typer.py")
    done = gateway_command.process("--version", env={"PYTHONPATH": f"{gateway_command.folder}:{ROOT}"})
    assert (done.code, done.all) == (130, "")


def test_the_console_script_is_the_command_that_is_quiet_from_its_first_import_on() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"gateway": "gateway.__main__:main"}


def test_help_imports_nothing_heavier_than_typer_and_rich(gateway_command: Commands) -> None:
    program = (
        "import sys; from gateway.cli import main\ntry: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('pydantic', 'yaml', 'httptools', 'uvicorn', 'starlette', 'msgspec', 'litellm', 'http.client') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment(gateway_command.folder, None),
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_demo_total_equals_the_providers_count(gateway_command: Commands) -> None:
    done = gateway_command.process("demo", env={"COLUMNS": "40"})
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out, "no colour, as this is no terminal"
    assert "overhead" in done.out, "nor is anything cut to its width"
    assert "condense=" in done.out, "the conversation outgrows its budget"
    assert all(f"  {mode}  " in done.out for mode in ("raw", "table", "summary")), "and the session its own"
    trimmed = [int(number) for number in re.findall(r"(\d+) calls?\.$", done.out, re.MULTILINE)]
    assert trimmed == [1, 2, 3], "to the context budget, to the rest of the session's, and results alone"
    for line in done.lines[1:14]:
        assert len(re.findall(r"~[0-9,]+", line)) == 2, "its two estimates are marked"
    assert 'was refused: Session "demo" has used' in done.out
    numbers = [int(line.split()[0]) for line in done.out.splitlines() if line.endswith(" ms")]
    assert numbers == [*range(1, 1 + len(numbers))]
    assert len(numbers) > 3
    last = [line for line in done.lines if "tokens" in line][-2:]
    counts = {line.rsplit(": ", 1)[1] for line in last}
    assert len(last) == 2
    assert len(counts) == 1, "the session's total and the provider's count"


def test_readme_picture_matches_the_demo(gateway_command: Commands) -> None:
    played = json.loads(gateway_command.process("demo", "--json").out)
    picture = (ROOT / "README.md").read_text("utf-8").split("```\n", 2)[1]
    limit = played["refused"]["budget"]["limit"]
    assert f"a budget of {limit:,} tokens" in picture
    rows = re.findall(r"^ +(\d+)   (█*)░* +([\d,]+)(?:   (.*))?$", picture, re.MULTILINE)
    assert len(rows) >= 5
    for number, bar, left, note in rows:
        call = played["calls"][int(number) - 1]
        remaining = int(call["headers"]["x-session-budget-remaining-tokens"])
        assert left == f"{remaining:,}", number
        assert len(bar) == 24 * (limit - remaining) // limit, number
        sent = [f"~{call['context'][name]:,}" for name in ("original_tokens", "tokens")]
        assert re.findall(r"~[\d,]+", note) in ([], sent), number
        assert ("trimmed" in note or "tables" in note) is bool(call["context"]["trimmed"]), number
    assert f"{len(played['calls']) + 1}   refused: {limit - remaining:,} of {limit:,} used" in picture
    assert f"this call needs {played['refused']['budget']['needed']:,}" in picture


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


def test_demo_ignores_the_configuration_and_leaves_no_files(gateway_command: Commands) -> None:
    gateway_command.file('auth: {keys: [{name: alice, key: "0123456789abcdef"}]}', "gateway.yaml")
    done = gateway_command.process("demo", "--steps", "1", env={"GATEWAY_SERVER_PORT": "nonsense"})
    assert (done.code, done.err) == (0, "")
    assert [path.name for path in gateway_command.folder.iterdir()] == ["gateway.yaml"]
