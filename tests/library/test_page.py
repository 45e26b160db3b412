"""Run the programs of docs/guides/library.md against the built-in provider.

The program for the OpenAI agents SDK runs where that package is installed; otherwise it is only compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.mock import MockProvider, MockServer, ToolCall, Turn
from tests.support.gateways import ROOT, STARTS_S

PAGE = (ROOT / "docs/guides/library.md").read_text("utf-8")
MODULE, *_ = BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROGRAMS = dict(zip(("openai", "langgraph", "agents"), BLOCKS[1:], strict=True))
pytestmark = pytest.mark.long


def listing(tokens: int) -> Turn:
    """Return a response that calls the tool, and costs these tokens of input and 50 of output."""
    return Turn(tool_calls=(ToolCall("list_issues", '{"state": "open"}'),), usage=(tokens, 50))


def run(name: str, folder: Path, server: MockServer, *turns: Turn) -> str:
    """Run a program of the page, and return its output."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    server.provider.push(*turns)
    (folder / "shared.py").write_text(MODULE)
    (folder / "program.py").write_text(PROGRAMS[name])
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OPENAI_API_KEY": "any",
            "OPENAI_BASE_URL": f"{server.url}/v1",
        },
        capture_output=True,
        text=True,
        timeout=STARTS_S,
        check=False,
    )
    assert done.returncode == 0 or "BudgetExhausted" in done.stderr, done.stderr
    return done.stdout + done.stderr


def bodies(provider: MockProvider) -> list[str]:
    return [bytes(call.body).decode() for call in provider.calls]


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_the_page_compiles(program: str) -> None:
    compile(PROGRAMS[program], program, "exec")


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_get_shorter_as_the_budget_runs_low(
    program: str, mock: MockProvider, mock_server: MockServer, tmp_path: Path
) -> None:
    turns = (listing(100), listing(16_500), Turn("Sixty issues.", usage=(100, 10)))
    assert run(program, tmp_path, mock_server, *turns) == "Sixty issues. summary\n"
    assert "Issue 37" not in bodies(mock)[0]
    assert "Issue 37" in bodies(mock)[1]
    assert bodies(mock)[2].count("Issue 37") == 1
    assert "full text: handle tr_" in bodies(mock)[2]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_call_is_made_once_the_budget_is_used_up(
    program: str, mock: MockProvider, mock_server: MockServer, tmp_path: Path
) -> None:
    printed = run(program, tmp_path, mock_server, listing(19_900), Turn("Never."))
    assert re.search(r"tokens are needed and 50 of 20,000 are left \(19,950 used, 0 held\)", printed)
    assert len(mock.calls) == 1


def test_page_is_listed_and_short() -> None:
    assert ": guides/library.md\n" in (ROOT / "mkdocs.yml").read_text("utf-8")
    assert len(PAGE.splitlines()) <= 120
