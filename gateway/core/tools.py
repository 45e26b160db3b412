"""Count the tools that the calls of a session used, and keep the names of the last 64 calls in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Final

from gateway.core.values import dataclass

#: calls whose tools' names are kept in order, the newest
MAX_RECENT: Final = 64
#: tools that are counted by name
MAX_NAMES: Final = 256
#: characters of a tool's name that are kept, and of any other foreign name: they stand in records
NAME_CHARACTERS: Final = 256
#: the name under which all others are counted together
OTHERS: Final = "…"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a session's answers asked for. `recent`: the newest last; `calls`: by name.

    The first `MAX_NAMES` tools that were called are counted by name, all others under `OTHERS`: the sum of `calls` is
    the number of all of them.
    """

    recent: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)

    def with_calls(self, names: Sequence[str]) -> ToolUse:
        """This with an answer's calls, in their order."""
        if not names:
            return self
        calls = dict(self.calls)
        for name in names:
            known = counted_as(name, calls, MAX_NAMES)
            calls[known] = calls.get(known, 0) + 1
        return ToolUse((*self.recent, *names)[-MAX_RECENT:], calls)


def counted_as(name: str, known: Mapping[str, object], most: int) -> str:
    """Under which name a tool is counted where `most` have names of their own."""
    named = len(known) - (OTHERS in known)
    return name if name in known or named < most else OTHERS
