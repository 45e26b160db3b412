"""Run docs/guides/ word by word: each command and program in order, and compare its output."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.test_start import Reader, is_shown
from tests.support.gateways import ROOT

BLOCK = re.compile(r"^```(sh|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: a shell that runs the program of a page
PROGRAM = f"\"{sys.executable}\" - <<'END'\n{{}}END\n"
GUIDES = ("callbacks", "cap-spending", "replay", "team")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    # Both outputs go to one pipe here, in the order of a terminal.
    made.environment["PYTHONUNBUFFERED"] = "1"
    yield made
    made.leave()


def steps(guide: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of each block, programs included, and what they print."""
    blocks = BLOCK.findall((ROOT / "docs" / "guides" / f"{guide}.md").read_text("utf-8"))
    following = [*blocks[1:], ("", "")]
    for (kind, text), (then, printed) in zip(blocks, following, strict=True):
        if kind != "text":
            yield PROGRAM.format(text) if kind == "python" else text, printed if then == "text" else ""


@pytest.mark.parametrize("guide", GUIDES)
def test_every_command_of_a_guide_prints_the_output_in_the_guide(guide: str, reader: Reader) -> None:
    typed = 0
    for commands, expected in steps(guide):
        printed = reader.serve(commands) if commands.startswith("gateway serve") else reader.type(commands)
        assert is_shown(expected, printed), f"{commands}\nprinted\n{printed}\ninstead of\n{expected}"
        typed += 1
    assert typed > 0
