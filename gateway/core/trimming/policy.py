"""Define the settings of trimming and their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from gateway.core.trimming.recall import Recall
from gateway.core.trimming.relevance import RelevanceFactors
from gateway.core.trimming.strategies import DEFAULT, Drop, Strategy, Summarize
from gateway.core.trimming.summary import SummaryUse
from gateway.core.values import dataclass

#: default low-water marks with recall and without
_LOW_WATER_WITH_RECALL: Final = 0.46
_LOW_WATER: Final = 0.7


@dataclass(frozen=True, slots=True)
class TrimPolicy:
    """Settings that control how conversations are trimmed. Shares are of the limit without the system messages."""

    strategies: Sequence[Strategy] = DEFAULT
    #: A trim goes down to what must stay and this share of the rest. A lower share loses more; a higher one trims more
    #: often, and each trim costs cached tokens. None means 0.7, or 0.46 with recall: recall brings back what is needed,
    #: and costs less than a short prompt saves on every turn. None also keeps up to 0.85 of a conversation that grows
    #: slowly, where trims are rare, less `recall_share`.
    low_water: float | None = None
    #: Only with recall: while the result of earlier trims takes no more than this share, the next trim leaves it
    #: unchanged and shortens only later messages. A higher share would shorten new messages too much. Without recall,
    #: what was removed once would never come back.
    settled: float = 0.5
    #: A trim keeps the prefix that was sent before, up to the point where it differs from a new choice by more tokens
    #: than this share.
    stale: float = 0.2
    recall: Recall = "off"
    #: Recalled lines take at most this share, including those of earlier turns. The more room they fill, the sooner the
    #: next trim is needed, and it removes them again.
    recall_share: float = 0.3
    #: Recalled lines of a turn cost at most this many times what the trim saves on that turn. They are paid in full
    #: only once, while the trim saves on every later turn again.
    recall_saving: float = 2.0
    #: price of a cached token relative to an uncached one
    cached_price: float = 0.1
    #: Keep the decisions of earlier turns while they fit, even if everything would fit without them: the model's
    #: thinking is bound to what was sent.
    keeps_decisions: bool = False
    #: factors for recall; `Condense` has its own
    relevance: RelevanceFactors = field(default_factory=RelevanceFactors)

    @property
    def depth(self) -> float:
        """Return the low-water mark in use."""
        if self.low_water is not None:
            return self.low_water
        return _LOW_WATER_WITH_RECALL if self.recall != "off" else _LOW_WATER

    @property
    def may_drop(self) -> bool:
        """Return whether whole units may be left out, also as the last resort."""
        return any(strategy.may_drop for strategy in self.strategies)

    @property
    def summarizes(self) -> bool:
        """Return whether a summary may be used. Then a trim may also change messages before the appended ones."""
        return any(isinstance(strategy, Summarize) and strategy.use != "off" for strategy in self.strategies)

    def with_summaries(self, use: SummaryUse, summaries: Mapping[str, str], most: int) -> TrimPolicy:
        """Return this policy with summaries to use. If it may drop, `Drop` becomes its last strategy."""
        given = [
            one.with_summaries(use, summaries, most) if isinstance(one, Summarize) else one for one in self.strategies
        ]
        if self.may_drop and not any(isinstance(one, Drop) for one in given):
            # Drop goes as deep as any other strategy: down to the limit only, the next turn would need it again.
            given.append(Drop())
        return replace(self, strategies=given) if given != [*self.strategies] else self
