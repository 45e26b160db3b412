"""What the scripts for command-line clients share: running one in a home of its own, and leaving it in mid-answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from checks import PROVIDER, get, sessions

ASK = "Say hello."
#: an answer of the built-in provider takes seconds then, so that it can be left
SLOW_ANSWER = "chunks=40;interval=0.2"
_WITHIN_S = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Program:
    """A client that is a command. Its files are under a new home; it starts in an empty folder."""

    def __init__(self, name: str, **environment: str) -> None:
        self._binary = str(Path(os.environ["CLIENT_BIN"]) / name)
        self.home = Path(os.environ["WORK"]) / "home"
        self.folder = Path(os.environ["WORK"]) / "folder"
        self.home.mkdir(exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        # Some look for their project in PWD.
        self._environment = {**kept, "HOME": str(self.home), "PWD": str(self.folder), **environment}

    def run(self, *arguments: str) -> str:
        """What it prints; it must succeed."""
        done = subprocess.run(
            [self._binary, *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-500:]} {done.stderr[-500:]}"
        return _COLOUR.sub("", done.stdout)

    def leave(self, *arguments: str) -> None:
        """Start it, and end it as soon as the provider has begun to answer it."""
        before = len(calls())
        process = subprocess.Popen(
            [self._binary, *arguments],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + _WITHIN_S
            while len(calls()) == before:
                assert process.poll() is None, "it ended before it called anybody"
                assert time.monotonic() < deadline, "it called nobody"
                time.sleep(0.05)
            time.sleep(0.5)
            assert process.poll() is None, "the answer was over too early"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def calls() -> list[dict[str, Any]]:
    """What the provider was asked, the oldest first."""
    found: list[dict[str, Any]] = get(f"{PROVIDER}/__mock/calls?limit=1000")["calls"]
    return found


def only_session() -> dict[str, Any]:
    """The one session there is; a client that is not recognised leaves one that was derived, or several."""
    (session,) = sessions()
    assert not session["derived_id"], session["id"]
    return session


def check_session(name: str, least_calls: int) -> None:
    """Whether the client's own name for its session is the gateway's, with all its calls in it."""
    session = only_session()
    assert session["id"] == f"client/{name}", session["id"]
    assert session["calls"] == len(calls()) >= least_calls, (session["calls"], len(calls()))
