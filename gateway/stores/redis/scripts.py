"""Load the Lua scripts, which a server runs atomically, and build the commands that call them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

#: a command and its arguments
Command = tuple[str | bytes | int | float, ...]

_FOLDER: Final = Path(__file__).parent / "lua"
_PRELUDE: Final = "prelude"
#: the script that only reads, and is sent together with others
_READING: Final = "standings"
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def _load() -> dict[str, tuple[str, bytes]]:
    prelude = (_FOLDER / f"{_PRELUDE}.lua").read_bytes()
    sources = {path.stem: prelude + path.read_bytes() for path in _FOLDER.glob("*.lua") if path.stem != _PRELUDE}
    return {name: (hashlib.sha1(text).hexdigest(), text) for name, text in sources.items()}  # noqa: S324  # Redis' name


class Scripts:
    """Builds commands that run a script. `ahead_s`: seconds added to the server's clock, for tests only."""

    def __init__(self, ahead_s: Callable[[], float] | None = None) -> None:
        self._scripts = _load()
        self._sources = dict(self._scripts.values())
        self._ahead_s = ahead_s

    def call(self, script: str, keys: Sequence[str], arguments: object, *more: bytes) -> Command:
        """Return the command that runs a script. `script`: its name; `more`: arguments that are sent as raw bytes."""
        ahead = 0 if self._ahead_s is None else int(self._ahead_s() * 1e6)
        return ("EVALSHA", self._scripts[script][0], len(keys), *keys, ahead, _ENCODE(arguments), *more)

    def with_source(self, command: Command) -> Command:
        """Return the same command with the script's source, for a server that has not cached the script yet."""
        return ("EVAL", self._sources[str(command[1])], *command[2:])

    def is_reading(self, command: Command) -> bool:
        """Return True if the command runs a script that changes nothing, so that it may run again."""
        return command[1] == self._scripts[_READING][0]
