"""Completion with the Tab key: the script of `gateway --install-completion` works in the shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateways import ROOT, STARTS_S


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a separate home folder, in which the command is installed."""
    script = tmp_path / "bin" / "gateway"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom gateway.cli import main\nmain()\n")
    script.chmod(0o755)
    return {"HOME": str(tmp_path), "PATH": f"{script.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def typed(shell: str, commands: str, environment: dict[str, str]) -> str:
    # The shell keeps running, because the command asks which shell called it.
    done = subprocess.run(
        [shell, "-c", f"{commands}\n:"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=STARTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(words: str, environment: dict[str, str]) -> list[str]:
    """Return the completions of bash for the last word."""
    number = len(words.split()) - 1
    script = (
        f". ~/.bashrc; COMP_WORDS=({words}); COMP_CWORD={number}; "
        "$(complete -p gateway | sed -E 's/.*-F (\\w+) .*/\\1/') gateway; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    return typed("bash", script, environment).split()


def test_bash_completes_commands_and_options(environment: dict[str, str], tmp_path: Path) -> None:
    assert "installed" in typed("bash", "gateway --install-completion", environment)
    assert "gateway" in (tmp_path / ".bashrc").read_text()
    assert completed("gateway se", environment) == ["serve", "sessions"]
    assert completed("gateway sessions b", environment) == ["budget"]
    assert "--install-completion" in completed("gateway --", environment)
    assert {"--mock", "--budget"} <= set(completed("gateway serve --", environment))
    assert completed("gateway env claude", environment) == ["claude-code"]
    assert completed("gateway sessions --sort c", environment) == ["cost"]
    assert completed("gateway top --sort t", environment) == ["tokens"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_can_be_shown(shell: str, environment: dict[str, str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    assert "_GATEWAY_COMPLETE" in typed(shell, "gateway --show-completion", environment)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
