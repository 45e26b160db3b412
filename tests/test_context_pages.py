"""Run the commands of the pages on context and steps, and load each configuration that they show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from gateway import config
from gateway.config.policies import agents_of
from tests.app.test_start import Reader, is_shown
from tests.support.gateways import ROOT

PAGES = [
    ROOT / "docs" / name
    for name in (
        "concepts/context.md",
        "concepts/steps.md",
        "guides/limit-context.md",
        "guides/models.md",
        "guides/restrict-tools.md",
    )
]
BLOCK = re.compile(r"^```(sh|text|yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text("utf-8"))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    made.environment["PYTHONUNBUFFERED"] = "1"  # as on a terminal: lines to stderr appear in order
    (tmp_path / "config").symlink_to(ROOT / "config")
    yield made
    made.leave()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_prints_the_output_on_the_page(page: Path, reader: Reader) -> None:
    shown = [*blocks(page), ("", "")]
    for (kind, text), (after, expected) in pairwise(shown):
        if kind == "yaml" and (named := re.match(r"# (\w+\.yaml)\n", text)):
            (reader.folder / named[1]).write_text(text)
        if kind == "python":
            (reader.folder / "example.py").write_text(text)
            reader.type(f"{sys.executable} example.py")
        if kind == "sh":
            is_server = text.startswith("gateway serve")
            if is_server:
                reader.leave()
            printed = reader.serve(text) if is_server else reader.type(text)
            if after == "text":
                assert is_shown(expected, printed), f"{text}\nprinted\n{printed}\ninstead of\n{expected}"


CONFIGURATIONS = [text for page in PAGES for kind, text in blocks(page) if kind == "yaml"]


@pytest.mark.parametrize("text", CONFIGURATIONS, ids=range(len(CONFIGURATIONS)))
def test_every_configuration_of_a_page_is_valid(text: str, tmp_path: Path) -> None:
    if text.startswith("# families.yaml\n"):
        file = tmp_path / "families.yaml"
        file.write_text(text)
        assert {"mine", "unchecked"} <= {family.name for family in config.families(str(file))}
        return
    file = tmp_path / "gateway.yaml"
    file.write_text(text.replace("config/steps/", f"{ROOT}/config/steps/"))
    settings = config.load(file, environment={}).settings
    given = yaml.safe_load(text)
    assert len(agents_of(settings)) == len(given.get("agents", {})) + ("steps" in given)
