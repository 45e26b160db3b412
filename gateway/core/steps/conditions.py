"""Define the conditions under which a step becomes active.

Names of tools are matched by shell patterns, letter for letter (`search`, `read_*`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Final, Protocol

from gateway.core.values import dataclass

#: shell patterns, of which any may match
Patterns = tuple[str, ...]

#: tools used last that a session remembers for its steps, and so the widest window of a condition
MOST_RECENT: Final = 64


#: sets of patterns that stay compiled; all of them stand in a configuration
_COMPILED: Final = 1024


def is_any(name: str, patterns: Patterns) -> bool:
    """Whether one of the patterns matches."""
    return _expression(patterns).match(name) is not None


@lru_cache(_COMPILED)
def _expression(patterns: Patterns) -> re.Pattern[str]:
    """What matches what any of them does: one look instead of one for each, at each tool of each call."""
    return re.compile("|".join(map(translate, patterns)) or "(?!)")


def _has_any(names: Sequence[str], patterns: Patterns) -> bool:
    match = _expression(patterns).match
    # An agent calls a few tools many times.
    return any(map(match, set(names)))


class ConditionFacts:
    """What conditions may look at beside tools.

    Attributes:
        tokens: input tokens that the request is expected to weigh, before anything is left out; None where no condition
            asks for it.
        left: what is left of the narrowest budget, as a share of it; 1 where there is none.
    """

    __slots__ = ("_message", "left", "tokens")

    def __init__(
        self, message: str | Callable[[], str | None] | None = None, tokens: int | None = None, left: float = 1.0
    ) -> None:
        self._message = message
        self.tokens = tokens
        self.left = left

    @property
    def message(self) -> str | None:
        """Text of the newest user message, None where there is none; read once a condition comes to it."""
        if callable(self._message):
            self._message = self._message()
        return self._message


class Condition(Protocol):
    """One condition of a step."""

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Whether it is met. `recent`: the tools used last, the newest at the end."""


@dataclass(frozen=True, slots=True)
class ToolUsed:
    """One of these tools is among the last `within` that were used."""

    tools: Patterns
    within: int = MOST_RECENT

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del facts
        return _has_any(recent[-self.within :], self.tools)


@dataclass(frozen=True, slots=True)
class NotRecentlyUsed:
    """None of these tools is among the last `window` that were used."""

    tools: Patterns
    window: int

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del facts
        return not _has_any(recent[-self.window :], self.tools)


@dataclass(frozen=True, slots=True)
class SequenceMatch:
    """The tools used last are these, in this order, and none in between or behind. Each entry has alternatives."""

    entries: tuple[Patterns, ...]

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del facts
        last = recent[-len(self.entries) :]
        return len(last) == len(self.entries) and all(map(is_any, last, self.entries))


@dataclass(frozen=True, slots=True)
class MessageMatches:
    """The newest user message is what somebody looks for."""

    is_match: Callable[[str], bool]

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del recent
        return facts.message is not None and self.is_match(facts.message)


@dataclass(frozen=True, slots=True)
class TokensAbove:
    """The request weighs more than so many input tokens."""

    tokens: int

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del recent
        return facts.tokens is not None and facts.tokens > self.tokens


@dataclass(frozen=True, slots=True)
class BudgetBelow:
    """Less than this share is left of the narrowest budget. Never where there is no budget."""

    share: float

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """See `Condition`."""
        del recent
        return facts.left < self.share
