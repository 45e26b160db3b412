"""Check docs/clients/: each page is linked, has the common outline, and its examples print what it says.

Code that needs a package without tests here is only compiled. `bench/clients/pages.py` runs all of it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.mock import MockServer
from tests.conftest import StartGateway
from tests.support.gateways import ROOT, STARTS_S

PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
ENTRY = ROOT / "docs" / "clients.md"
OUTLINE = ["Set up", "Session", "Totals", "Budget error", "Notes"]
#: pages whose packages are installed for tests: language and program
RUN = {
    "anthropic-python": ("python", sys.executable),
    "curl": ("sh", "/bin/bash"),
    "jupyter": ("python", sys.executable),
    "langchain": ("python", sys.executable),
    "openai-python": ("python", sys.executable),
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERSION = re.compile(r"\d+\.\d+\.\d+")
ADDRESS = "127.0.0.1:8484"


def text_of(page: str) -> str:
    return (ROOT / "docs" / "clients" / f"{page}.md").read_text("utf-8")


def shown(page: str, kind: str) -> tuple[str, str]:
    """Return the code of a page in one language, and its expected output."""
    blocks = BLOCK.findall(text_of(page))
    following = [*blocks[1:], ("", "")]
    code = [text for found, text in blocks if found == kind]
    printed = [
        after for (found, _), (then, after) in zip(blocks, following, strict=True) if (found, then) == (kind, "text")
    ]
    # A response has no newline at its end.
    return {"sh": "echo\n"}.get(kind, "\n").join(code), "".join(printed)


def is_shown(expected: str, printed: str) -> bool:
    """Return True if exactly this was printed, except for empty lines; `…` matches anything."""
    pattern = ".*".join(re.escape(part) for part in without_empty_lines(expected).split("…"))
    return re.fullmatch(pattern, without_empty_lines(printed), re.DOTALL) is not None


def without_empty_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.strip())


def test_there_is_a_page_for_each_client() -> None:
    assert len(PAGES) >= 17
    assert set(RUN) <= {page.stem for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_is_linked(page: Path) -> None:
    assert f": clients/{page.name}\n" in (ROOT / "mkdocs.yml").read_text("utf-8")
    table = ENTRY.read_text("utf-8").split("\n## ", 2)[1]
    assert f"](clients/{page.name}) |" in table


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_has_the_common_outline(page: Path) -> None:
    assert re.findall(r"^## (.*)$", page.read_text("utf-8"), re.MULTILINE) == OUTLINE


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_names_the_versions_that_were_tested(page: Path) -> None:
    introduction = page.read_text("utf-8").split("\n## ", 1)[0]
    assert VERSION.search(introduction.split("Tested with ", 1)[1])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_python_of_a_page_compiles(page: Path) -> None:
    for kind, text in BLOCK.findall(page.read_text("utf-8")):
        if kind == "python":
            compile(text, page.name, "exec")


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [("a …\nb", "a 1\nb\n", True), ("a …\nb", "a 1\nb\nc", False), ("a", "ab", False), ("…a", "1\n2\na", True)],
)
def test_is_shown_compares_output(expected: str, printed: str, *, same: bool) -> None:
    assert is_shown(expected, printed) is same


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_prints_the_output_on_the_page(
    page: str, mock_server: MockServer, gateway_server: StartGateway, tmp_path: Path
) -> None:
    kind, program = RUN[page]
    code, expected = shown(page, kind)
    assert expected
    file = tmp_path / "page"
    file.write_text(code.replace(ADDRESS, gateway_server(mock_server.url).url.removeprefix("http://")))
    done = subprocess.run(
        [program, str(file)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENAI_API_KEY": "any", "ANTHROPIC_API_KEY": "any"},
        capture_output=True,
        text=True,
        timeout=STARTS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert is_shown(expected, done.stdout), f"printed\n{done.stdout}\ninstead of\n{expected}"
