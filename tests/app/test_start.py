"""Run docs/start.md and the program in README.md: each command in order, and compare its output."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gateways import ROOT, STARTS_S, until
from tests.support.timing import LIMIT_S
from tests.support.web import Web

PAGE = ROOT / "docs" / "start.md"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:8484"


def steps() -> Iterator[tuple[str, str]]:
    """Yield (commands, their output) in order; the output is empty if the page does not show it."""
    blocks = BLOCK.findall(PAGE.read_text("utf-8"))
    for index, (kind, text) in enumerate(blocks):
        if kind == "sh":
            after = blocks[index + 1] if index + 1 < len(blocks) else ("sh", "")
            yield text, after[1] if after[0] == "text" else ""


def is_shown(expected: str, printed: str) -> bool:
    """Return True if the lines were printed in this order; `…` matches anything, and on its own line any lines."""
    pattern = ""
    for line in expected.strip().splitlines():
        wild = ".*".join(re.escape(part) for part in line.split("…"))
        pattern += r"(?:.*\n)*?" if line.strip() == "…" else rf"{wild}[ \r]*\n"
    return re.search(rf"^{pattern}", printed.rstrip("\n") + "\n", re.MULTILINE) is not None


@pytest.mark.parametrize(
    ("expected", "printed", "shown"),
    [
        ("one\ntwo", "one\ntwo\n", True),
        ("one\ntwo", "one\nand\ntwo\n", False),
        ("one\n…\ntwo", "zero\none\nand\nso\ntwo\n", True),
        ("one\n…\ntwo", "one\ntwo", True),
        ("o…e", "onset", False),
        ("total: 1", "total: 13", False),
    ],
)
def test_is_shown_compares_output(expected: str, printed: str, *, shown: bool) -> None:
    assert is_shown(expected, printed) is shown


class Reader:
    """Run commands like a user with two terminals, on another port than the page uses."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "gateway").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gateway "$@"\n')
        (folder / "bin" / "gateway").chmod(0o755)
        self.folder = folder
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.server: subprocess.Popen[bytes] | None = None

    def serve(self, command: str) -> str:
        """Start the server in the first terminal, instead of an earlier one; return its output once it is ready."""
        self.leave()
        said = self.folder / "said.txt"
        port = self.address.rpartition(":")[2]
        with said.open("wb") as out:
            self.server = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command.strip()} --port {port}"],
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
            )
        until(lambda: "dashboard" in said.read_text(), STARTS_S, "it says where it is")
        return self.spelled(said.read_text())

    def type(self, commands: str) -> str:
        """Run commands in the second terminal; return their output."""
        # If the page shows the address alone, as in the output of `gateway env`, it is the configured address.
        script = commands.replace(ADDRESS, self.address)
        done = subprocess.run(
            ["/bin/bash", "-ec", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STARTS_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return self.spelled(done.stdout)

    def spelled(self, text: str) -> str:
        """Return the output with the address of the page."""
        return text.replace(self.address, ADDRESS)

    def leave(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(LIMIT_S)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    made.leave()


def test_every_command_of_the_page_prints_the_output_on_the_page(reader: Reader) -> None:
    typed = 0
    for commands, expected in steps():
        if commands.startswith("pip install"):
            continue
        printed = reader.serve(commands) if commands.startswith("gateway serve") else reader.type(commands)
        assert is_shown(expected, printed), f"{commands}\nprinted\n{printed}\ninstead of\n{expected}"
        typed += 1
    assert typed >= 7
    links = re.findall(rf"`http://{ADDRESS}(/\S*)`", PAGE.read_text("utf-8"))
    assert links
    assert [link for link in links if Web(f"http://{reader.address}").get(link).status != 200] == []


def test_the_program_in_readme_prints_the_output_in_readme(reader: Reader) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    program, expected = blocks[0]
    reader.serve("gateway serve --mock")
    (reader.folder / "program.py").write_text(program.replace(ADDRESS, reader.address))
    assert reader.type(f"{sys.executable} program.py") == expected
