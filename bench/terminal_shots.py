"""Draw a terminal for docs/start.md: `gateway top` while agents work, a raised budget, the largest sessions.

    python bench/terminal_shots.py [--out docs/img/terminal.svg]

The agents of dashboard_shots.py run concurrently against a gateway in front of the built-in provider. The commands run
in a separate terminal, and their output is drawn. Linux; needs `pip install '.[dev]'`.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from dashboard_shots import AGENTS, ROOT, play, served
from rich.console import Console
from rich.text import Text

from gateway.mock.server import MockServer

WIDTH, HEIGHT = 112, 40
WATCHED_S = 6.0
#: what rich's Live writes between two states of a table
_BETWEEN = re.compile(r"(?:\r?\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh])+")
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def run(store: Path, *arguments: str, for_s: float = 60.0) -> str:
    """Return what the command writes to a terminal until it ends, or is stopped with Ctrl-C after this time."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_") and name != "COLUMNS"},
        "GATEWAY_STORE_URL": f"sqlite://{store}",
        "GATEWAY_BUDGET_TOKENS": "500000",
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
    }
    command = subprocess.Popen(
        [sys.executable, "-m", "gateway", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=store.parent,  # a folder without gateway.yaml
    )
    os.close(theirs)
    until, written = time.monotonic() + for_s, b""
    with closing(os.fdopen(ours, "rb", buffering=0)) as screen:
        while True:
            if time.monotonic() > until:
                command.send_signal(signal.SIGINT)
                until = float("inf")
            if not select.select([screen], [], [], 0.2)[0]:
                continue
            try:
                written += screen.read(65536)
            except OSError:  # the terminal is closed: the command has ended
                break
    command.wait()
    return written.decode().replace("\r\n", "\n")


def busiest(written: str) -> str:
    """Return the last state of a live table that has nearly as many rows as any."""
    pictures = [(len(part.split()), part) for part in _BETWEEN.split(written)]
    most, _ = max(pictures)
    return [part for size, part in pictures if size > most - 4][-1]


def draw(screens: list[tuple[str, str]], file: Path) -> None:
    """Draw commands and their output, one below the other."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for command, written in screens:
        console.print(Text.assemble(("$ ", "green"), (command, "bold")))
        console.print(Text.from_ansi(written.rstrip()), end="\n\n")
    picture = console.export_svg(title="LLM session gateway", unique_id="terminal")
    # A page in a repository loads nothing from other hosts, so the reader's own monospaced font is used.
    file.write_text(_FONTS.sub("", picture), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "terminal.svg")
    options = parser.parse_args()
    name = AGENTS[0].name
    with tempfile.TemporaryDirectory() as folder, MockServer() as provider:
        store = Path(folder) / "gateway.db"
        with served(store, provider.url) as url, ThreadPoolExecutor(len(AGENTS)) as threads:
            playing = [threads.submit(play, url, agent, random.Random(7)) for agent in AGENTS]
            screens = [("gateway top --every 0.2", busiest(run(store, "top", "--every", "0.2", for_s=WATCHED_S)))]
            for one in playing:
                one.result()
            raised = ("sessions", "budget", name, "1000000")
            screens.append((f"gateway {' '.join(raised)}", run(store, *raised)))
            listed = ("sessions", "--sort", "tokens", "--limit", "5")
            screens.append((f"gateway {' '.join(listed)}", run(store, *listed)))
    draw(screens, options.out)
    print(f"{options.out.name}: {options.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
