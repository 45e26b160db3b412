"""Define the Lua scripts, which a server runs atomically."""

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
#: the verb that only reads, and is sent together with others
_READING: Final = "standings"
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def _load() -> dict[str, tuple[str, bytes]]:
    prelude = (_FOLDER / f"{_PRELUDE}.lua").read_bytes()
    sources = {path.stem: prelude + path.read_bytes() for path in _FOLDER.glob("*.lua") if path.stem != _PRELUDE}
    return {name: (hashlib.sha1(text).hexdigest(), text) for name, text in sources.items()}  # noqa: S324  # Redis' name


class Scripts:
    """Calls of the verbs. `ahead_s`: by how many seconds the server's clock is taken to be ahead; for tests alone."""

    def __init__(self, ahead_s: Callable[[], float] | None = None) -> None:
        self._scripts = _load()
        self._sources = dict(self._scripts.values())
        self._ahead_s = ahead_s

    def call(self, verb: str, keys: Sequence[str], arguments: object, *more: bytes) -> Command:
        """The command that runs a verb."""
        ahead = 0 if self._ahead_s is None else int(self._ahead_s() * 1e6)
        return ("EVALSHA", self._scripts[verb][0], len(keys), *keys, ahead, _ENCODE(arguments), *more)

    def spelled_out(self, command: Command) -> Command:
        """The same for a server that does not know the script yet; it does from then on."""
        return ("EVAL", self._sources[str(command[1])], *command[2:])

    def is_reading(self, command: Command) -> bool:
        """Whether this runs a verb that changes nothing, and so may be run once more."""
        return command[1] == self._scripts[_READING][0]
