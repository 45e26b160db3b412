"""Shared code of the scripts for command-line clients: run a client in its own home, or end it during a response."""

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
#: makes a response of the built-in provider take seconds, so that the client can leave
SLOW_ANSWER = "chunks=40;interval=0.2"
_WITHIN_S = 120.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Program:
    """A client that is a command. Its files are in a new home; it starts in an empty folder."""

    def __init__(self, name: str, **environment: str) -> None:
        self._binary = str(Path(os.environ["CLIENT_BIN"]) / name)
        self.home = Path(os.environ["WORK"]) / "home"
        self.folder = Path(os.environ["WORK"]) / "folder"
        self.home.mkdir(exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        # Some clients read their project folder from PWD.
        self._environment = {**kept, "HOME": str(self.home), "PWD": str(self.folder), **environment}

    def run(self, *arguments: str) -> str:
        """Run it and return its output; it must succeed."""
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
        """Start it, and end it as soon as the provider has started to respond."""
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
    """Return the calls that the provider received, oldest first."""
    found: list[dict[str, Any]] = get(f"{PROVIDER}/__mock/calls?limit=1000")["calls"]
    return found


def only_session() -> dict[str, Any]:
    """Return the only session. An unrecognised client has a derived session, or several."""
    (session,) = sessions()
    assert not session["derived_id"], session["id"]
    return session


def check_session(name: str, least_calls: int) -> None:
    """Check that the client's own name for its session is the gateway's, with all its calls."""
    session = only_session()
    assert session["id"] == f"client/{name}", session["id"]
    assert session["calls"] == len(calls()) >= least_calls, (session["calls"], len(calls()))
