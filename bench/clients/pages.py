"""Run the code of docs/clients/ unchanged, with the client itself.

    python bench/clients/pages.py [NAME ...] [--environments FOLDER]

Needs what run.py needs. For each page, the client is installed, `gateway serve --mock` is started with an empty store,
and the code of the page is run in order: Python and JavaScript as one program, shell commands in one shell. The page's
configuration is written to its place before. Output that the page shows must be printed; `…` matches anything. The exit
code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from run import CLIENTS, ROOT, RUNS_S, STARTS_S, Client, await_address, clean, install, use_recent_node

PAGES = ROOT / "docs" / "clients"
ADDRESS = "127.0.0.1:8484"
#: page -> client, if the names differ
CLIENT_OF = {"vercel-ai": "ai-sdk"}
ONLY_HERE = {"jupyter": Client("jupyter", "", ("openai", "ipykernel", "nbclient"), ("openai", "ipykernel", "nbclient"))}
#: place of a page's configuration: in the home folder, or in the start folder of the client
CONFIGURATION = {"codex": ("toml", "home/.codex/config.toml"), "opencode": ("json", "folder/opencode.json")}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "-- 8< --"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: runs cells in a kernel, and prints their output
_NOTEBOOK = """
import json, sys
import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
book = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
print("".join(output.text for cell in book.cells for output in cell.outputs if output.output_type == "stream"), end="")
"""


class Block(NamedTuple):
    """A fenced block of a page, and its expected output, if the page shows it."""

    kind: str
    code: str
    printed: str


class Place(NamedTuple):
    """The place in which a page is run: its folders, the client's environment, and a gateway."""

    work: Path
    environment: Path
    variables: Mapping[str, str]


def blocks(page: Path) -> list[Block]:
    """Return all blocks except those with the output of the previous block."""
    found = _BLOCK.findall(page.read_text("utf-8"))
    following = [*found[1:], ("", "")]
    return [
        Block(kind, code, after[1] if after[0] == "text" else "")
        for (kind, code), after in zip(found, following, strict=True)
        if kind != "text"
    ]


def is_shown(expected: str, printed: str) -> bool:
    """Return True if exactly this was printed; `…` matches anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def run(command: Sequence[str], text: str, place: Place, *, stderr: int | None = None) -> str:
    """Return the output of a program that gets a text as its input."""
    process = subprocess.Popen(
        command,
        cwd=place.work / "folder",
        env=dict(place.variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(text, RUNS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and its child processes
        process.communicate()
        raise
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {printed[-2000:]}")
    return _COLOUR.sub("", printed)


def as_program(found: Sequence[Block], kind: str, place: Place, *, notebook: bool) -> list[str]:
    """Return what is wrong with the blocks of one language, run together."""
    chosen = [block for block in found if block.kind == kind]
    if not chosen:
        return []
    code = [block.code for block in chosen]
    if kind == "js":
        file = place.environment / "page.mjs"  # Node searches packages next to the file
        file.write_text("\n".join(code))
        printed = run(["node", str(file)], "", place)
    elif notebook:
        printed = run([str(place.environment / "bin/python"), "-c", _NOTEBOOK], json.dumps(code), place)
    else:
        printed = run([str(place.environment / "bin/python"), "-"], "\n".join(code), place)
    expected = "".join(block.printed for block in chosen)
    return [] if is_shown(expected, printed) else [f"{kind} printed\n{printed}\ninstead of\n{expected}"]


def as_commands(found: Sequence[Block], place: Place) -> list[str]:
    """Return what is wrong with the commands, run in one shell."""
    chosen = [block for block in found if block.kind == "sh"]
    script = "".join(f"{block.code}echo '{_MARK}'\n" for block in chosen)
    # A client may read its standard input, which would be the script.
    file = place.work / "commands.sh"
    file.write_text(script)
    printed = run(["bash", "-e", str(file)], "", place, stderr=subprocess.STDOUT).split(f"{_MARK}\n")
    return [
        f"{block.code}printed\n{said}\ninstead of\n{block.printed}"
        for block, said in zip(chosen, printed, strict=False)
        if block.printed and not is_shown(block.printed, said)
    ]


def configure(name: str, found: Sequence[Block], place: Place) -> None:
    """Write the page's configuration to its place."""
    if name in CONFIGURATION:
        kind, target = CONFIGURATION[name]
        file = place.work / target
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(next(block.code for block in found if block.kind == kind))


def client_of(name: str) -> Client | None:
    """Return the client of a page; None if nothing has to be installed."""
    known = {client.name: client for client in CLIENTS} | ONLY_HERE
    return known.get(CLIENT_OF.get(name, name))


def problems(name: str, environments: Path) -> list[str]:
    """Return what is wrong with a page."""
    client = client_of(name)
    environment = environments / (client.name if client else name)
    if client:
        install(client, environment)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        for folder in ("home", "folder", "bin"):
            (work / folder).mkdir()
        command = work / "bin" / "gateway"
        command.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m gateway "$@"\n')
        command.chmod(0o755)
        path = [work / "bin", environment / "node_modules/.bin", environment / "bin", clean()["PATH"]]
        variables = {
            **{name: value for name, value in clean().items() if not name.startswith("XDG_")},
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(work / "home"),
            "PWD": str(work / "folder"),
            "OPENAI_API_KEY": "any",
            "ANTHROPIC_API_KEY": "any",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return tried(name, Place(work, environment, variables))


def tried(name: str, place: Place) -> list[str]:
    """Return what differs, with a separate gateway."""
    log = place.work / "gateway.log"
    # The keys are for the clients. A gateway with these keys would require client keys.
    own = {key: value for key, value in place.variables.items() if not key.endswith("_API_KEY")}
    serve = ["gateway", "serve", "--mock", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(serve, env=own, cwd=place.work, stderr=output)
    try:
        url = await_address(process, log).removeprefix("http://")
        here = place._replace(variables={**place.variables, "GATEWAY_SERVER_PORT": url.rpartition(":")[2]})
        found = [block._replace(code=block.code.replace(ADDRESS, url)) for block in blocks(PAGES / f"{name}.md")]
        configure(name, found, here)
        notebook = name == "jupyter"
        programs = [line for kind in ("python", "js") for line in as_program(found, kind, here, notebook=notebook)]
        return [*programs, *as_commands(found, here)]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    finally:
        process.terminate()
        process.wait(STARTS_S)


def main() -> None:
    """Read the command line and try the pages, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = sorted(page.stem for page in PAGES.glob("*.md"))
    parser.add_argument("pages", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all without")
    parser.add_argument("--environments", type=Path, help="folder to install into and to use again")
    asked = parser.parse_args()
    unknown = set(asked.pages) - set(names)
    if unknown:
        parser.error(f"no such page: {', '.join(sorted(unknown))}")
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.environments or Path(temporary)).resolve()
        use_recent_node(folder)
        for name in asked.pages or names:
            wrong = problems(name, folder)
            failed = failed or bool(wrong)
            print(f"{name}: {'as it says' if not wrong else 'not so'}", *wrong, sep="\n  ", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
