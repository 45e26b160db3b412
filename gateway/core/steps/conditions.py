"""Define the conditions under which a step becomes active.

Tool names are matched by shell patterns, case-sensitively (`search`, `read_*`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from typing import Final, Protocol

from gateway.core.values import dataclass

#: shell patterns; one match is enough
Patterns = tuple[str, ...]

#: the last used tools that a session remembers for its steps: the largest window of a condition
MOST_RECENT: Final = 64

#: sets of patterns that stay compiled; all of them come from the configuration
_COMPILED: Final = 1024


def matches_any(name: str, patterns: Patterns) -> bool:
    """Return whether one of the patterns matches."""
    return _expression(patterns).match(name) is not None


@lru_cache(_COMPILED)
def _expression(patterns: Patterns) -> re.Pattern[str]:
    """Return one expression that matches what any pattern matches. One test per tool is faster than one per pattern."""
    return re.compile("|".join(map(translate, patterns)) or "(?!)")


def _has_any(names: Sequence[str], patterns: Patterns) -> bool:
    match = _expression(patterns).match
    # Agents call few tools many times, so each name is tested once.
    return any(map(match, set(names)))


class ConditionFacts:
    """The facts besides tools that conditions may read.

    Attributes:
        tokens: estimated input tokens of the request before trimming; None if no condition needs them.
        left: the share, 0 to 1, that is left of the most used budget; 1 without a budget.
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
        """Return the text of the newest user message, or None. It is read when a condition first needs it."""
        if callable(self._message):
            self._message = self._message()
        return self._message


class Condition(Protocol):
    """One condition of a step."""

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met. `recent`: the last used tools, newest last."""


@dataclass(frozen=True, slots=True)
class ToolUsed:
    """One of these tools is among the last `within` that were used."""

    tools: Patterns
    within: int = MOST_RECENT

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del facts
        return _has_any(recent[-self.within :], self.tools)


@dataclass(frozen=True, slots=True)
class NotRecentlyUsed:
    """None of these tools is among the last `window` that were used."""

    tools: Patterns
    window: int

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del facts
        return not _has_any(recent[-self.window :], self.tools)


@dataclass(frozen=True, slots=True)
class SequenceMatch:
    """The last used tools are exactly these, in this order. Each entry has alternatives."""

    entries: tuple[Patterns, ...]

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del facts
        last = recent[-len(self.entries) :]
        return len(last) == len(self.entries) and all(map(matches_any, last, self.entries))


@dataclass(frozen=True, slots=True)
class MessageMatches:
    """The newest user message satisfies `is_match`."""

    is_match: Callable[[str], bool]

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del recent
        return facts.message is not None and self.is_match(facts.message)


@dataclass(frozen=True, slots=True)
class TokensAbove:
    """The request has more than `tokens` input tokens."""

    tokens: int

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del recent
        return facts.tokens is not None and facts.tokens > self.tokens


@dataclass(frozen=True, slots=True)
class BudgetBelow:
    """Less than this share is left of the most used budget. Never true without a budget."""

    share: float

    def holds(self, recent: Sequence[str], facts: ConditionFacts) -> bool:
        """Return whether the condition is met, see `Condition`."""
        del recent
        return facts.left < self.share
