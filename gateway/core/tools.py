"""Count the tools that the calls of a session used, and keep the names of the last 64 calls in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final

from gateway.core.values import dataclass

#: the newest tool calls whose names are kept in order
MAX_RECENT: Final = 64
#: tools that are counted by name
MAX_NAMES: Final = 256
#: characters that records keep of a tool name or any other name from a client or provider
NAME_CHARACTERS: Final = 256
#: the name under which all other tools are counted
OTHERS: Final = "…"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool calls of a session. `recent`: names, newest last. `calls`: number of calls by name.

    The first `MAX_NAMES` tools are counted by name and all others under `OTHERS`, so the sum of `calls` is the number
    of all calls.
    """

    recent: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)

    def with_calls(self, names: Sequence[str]) -> ToolUse:
        """Return this with the tool calls of a response added in order."""
        if not names:
            return self
        calls = dict(self.calls)
        for name in names:
            known = counted_as(name, calls, MAX_NAMES)
            calls[known] = calls.get(known, 0) + 1
        return ToolUse((*self.recent, *names)[-MAX_RECENT:], calls)


def counted_as(name: str, known: Mapping[str, object], most: int) -> str:
    """Return the name under which a tool is counted, if at most `most` tools are counted by name."""
    named = len(known) - (OTHERS in known)
    return name if name in known or named < most else OTHERS
