"""Define the settings of trimming and their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from gateway.core.fitting.recall import Recall
from gateway.core.fitting.relevance import RelevanceFactors
from gateway.core.fitting.strategies import DEFAULT, Drop, Strategy, Summarize
from gateway.core.fitting.summary import Use
from gateway.core.values import dataclass

#: low-water marks with recall and without
_DEEP: Final = 0.46
_SHALLOW: Final = 0.7


@dataclass(frozen=True, slots=True)
class TrimPolicy:
    """How conversations are fitted. Shares are of the limit without the system messages."""

    strategies: Sequence[Strategy] = DEFAULT
    #: A cut goes down to this share of what is left beside that which must stay: lower loses more, higher cuts and pays
    #: more often. None is 0.7, and 0.46 with recall, which brings back what is asked for and costs less than what it
    #: saves to send little on every turn.
    low_water: float | None = None
    #: Only with recall: while what an earlier cut left takes no more than this share, the next cut leaves it alone and
    #: takes from what came behind it. With a higher share the new messages would lose too much; without recall what
    #: was cut once would never come back.
    settled: float = 0.5
    #: A cut leaves the beginning as it was sent up to where the tokens on which it differs from a fresh choice are more
    #: than this share.
    stale: float = 0.2
    recall: Recall = "off"
    #: Recalled lines take at most this share, those of earlier turns that still stand there included: the more of the
    #: room they fill, the sooner the next cut is needed, which takes them away again.
    recall_share: float = 0.3
    #: and on each turn at most this many times what the trimming saves then: what is recalled is paid in full once, and
    #: what is saved is saved on every later turn again
    recall_saving: float = 2.0
    #: what a token costs that the provider has cached, in relation to one it has not
    cached_price: float = 0.1
    #: What an earlier turn decided stays in force while it fits, even if everything would fit without it: the model's
    #: thinking is bound to what was sent.
    keeps_decisions: bool = False
    #: for recall; `Condense` has its own
    worth: RelevanceFactors = field(default_factory=RelevanceFactors)

    @property
    def depth(self) -> float:
        """The low-water mark in use."""
        if self.low_water is not None:
            return self.low_water
        return _DEEP if self.recall != "off" else _SHALLOW

    @property
    def may_drop(self) -> bool:
        """Whether whole units may be left out, as the last resort too."""
        return any(strategy.may_drop for strategy in self.strategies)

    @property
    def summarizes(self) -> bool:
        """Whether a summary may come of it: then what was appended last is not all that a cut may take."""
        return any(isinstance(strategy, Summarize) and strategy.use != "off" for strategy in self.strategies)

    def given(self, use: Use, summaries: Mapping[str, str], most: int) -> TrimPolicy:
        """This with summaries to use, see `Summarize.given`, and with the last resort as the last of its strategies."""
        given = [one.given(use, summaries, most) if isinstance(one, Summarize) else one for one in self.strategies]
        if self.may_drop and not any(isinstance(one, Drop) for one in given):
            # As deep as any cut: down to the limit alone it would be needed again on the next turn.
            given.append(Drop())
        return replace(self, strategies=given) if given != [*self.strategies] else self
