"""Run a `gateway` command in a real terminal (a pty) of a given width."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

from tests.support.commands import Done, checked, command, environment
from tests.support.timing import LIMIT_S

_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A command whose stdin and stdout are a terminal, `columns` wide; with `has_stderr`, so is its stderr."""

    def __init__(
        self, folder: Path, columns: int, *args: str | Path, stdin: str = "", has_stderr: bool = False
    ) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.write(self._master, stdin.encode())
        self._process = subprocess.Popen(
            command(args),
            stdin=slave,
            stdout=slave,
            stderr=slave if has_stderr else subprocess.PIPE,
            env=environment(folder, {"NO_COLOR": "1", "TERM": "xterm"}),
            cwd=folder,
        )
        os.close(slave)

    def shown(self) -> list[str]:
        """Return the lines of a command that succeeded and wrote nothing to stderr."""
        done = self.done()
        assert (done.code, done.err) == (0, "")
        return done.lines

    def done(self) -> Done:
        """Return the result of the command; its output has no escape sequences."""
        text = b""
        with contextlib.suppress(OSError):  # raised at the end, when the other side is closed
            while piece := os.read(self._master, 65536):
                text += piece
        os.close(self._master)
        _, errors = self._process.communicate(timeout=LIMIT_S)
        return checked(self._process.returncode, _STYLES.sub("", text.decode()), (errors or b"").decode())
