"""Compute the input tokens that a call may have, from settings, headers and the model's window."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Final, Literal, NamedTuple

from gateway.core.fitting.policy import TrimPolicy
from gateway.core.routing import ModelFacts, Route
from gateway.core.values import dataclass

Trim = Literal["auto", "off", "shadow"]
Overflow = Literal["error", "forward", "least"]
#: Kept free of a window for the answer where neither the settings nor the call say how long it may be: this share of
#: the window, at most so many tokens.
_RESERVE_SHARE: Final = 0.1
_RESERVE_MOST: Final = 4096
#: Most of a window that is kept free for an answer, as a share: some clients ask for more than the model has.
_RESERVE_SHARE_MOST: Final = 0.5
#: tokens; the window that a model which makes summaries is taken to have where nobody says
_UNKNOWN_WINDOW: Final = 32_000
#: Share of its window that a summary's question may fill: it is estimated, without anything learned.
_SURE_SHARE: Final = 0.9


class LengthLimit(NamedTuple):
    """How long a call may be, in tokens, as a provider named it in a refusal; `of_input`: without its answer."""

    tokens: int
    of_input: bool = False


@dataclass(frozen=True, slots=True)
class SummaryModel:
    """Who makes summaries. `name`: as configured; `max_tokens`: of each."""

    name: str
    route: Route
    facts: ModelFacts
    max_tokens: int

    @property
    def room(self) -> int:
        """Tokens it can be asked with."""
        room = (self.facts.window or _UNKNOWN_WINDOW) - self.max_tokens
        return int(min(room, self.facts.input or room) * _SURE_SHARE)


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """The `context:` settings.

    Attributes:
        trim: what is done with a request that is over its budget.
        budget: input tokens of a call; None: as the window allows.
        reserve_tokens: kept free for the answer; None: see `budget_of`.
        keep_last_turns: turns at the end that are never touched.
        overflow: what is done with a request that cannot be made to fit: refuse it, send it as it came, or send the
            least that can be sent of it.
        safety: factor over the estimate; None: as learned from reported usage.
        fit: how the choice is made.
        summary: who makes summaries; None: nobody.
    """

    trim: Trim = "auto"
    budget: int | None = None
    reserve_tokens: int | None = None
    keep_last_turns: int = 1
    overflow: Overflow = "error"
    safety: float | None = None
    fit: TrimPolicy = field(default_factory=TrimPolicy)
    summary: SummaryModel | None = None


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """What one call asks for itself: how it is trimmed, its budget, the tokens its answer may take.

    `betas`: what it names in its header `anthropic-beta`.
    """

    trim: Trim | None = None
    budget: int | None = None
    output: int | None = None
    betas: frozenset[str] = frozenset()


NO_OPTIONS: Final = ContextOptions()


def beta_of(facts: ModelFacts, options: ContextOptions) -> str | None:
    """What a call names to have a larger window of the model; of several, that of the largest."""
    windows = {name: window for name, window in (facts.betas or {}).items() if name in options.betas}
    return max(windows, key=windows.__getitem__, default=None)


def within(facts: ModelFacts, options: ContextOptions, said: LengthLimit | None) -> ModelFacts:
    """A model with its limits for a call: as they are configured or listed, or lower where its provider has said so."""
    beta = beta_of(facts, options)
    if beta is not None and facts.betas is not None:
        facts = replace(facts, window=max(facts.betas[beta], facts.window or 0))
    if said is None:
        return facts
    if said.of_input:
        return replace(facts, input=min(said.tokens, facts.input or said.tokens))
    return replace(facts, window=min(said.tokens, facts.window or said.tokens))


def budget_of(policy: ContextPolicy, facts: ModelFacts, options: ContextOptions) -> int | None:
    """Input tokens that a call may take: the smallest of what limits it; None where nothing does.

    A window is shared by what goes in and what comes out, so the answer's share is kept free: `reserve_tokens`, else
    the call's own output limit, else a tenth of the window up to 4,096. Of a limit of the input nothing is.
    """
    window = facts.window
    room = max(1, window - _reserve(policy, facts, options, window)) if window is not None else None
    return least(policy.budget, options.budget, facts.input, room)


def least(*limits: int | None) -> int | None:
    """The smallest of these limits; None where there is none."""
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _reserve(policy: ContextPolicy, facts: ModelFacts, options: ContextOptions, window: int) -> int:
    if policy.reserve_tokens is not None:
        return policy.reserve_tokens
    if options.output is None:
        return min(_RESERVE_MOST, int(window * _RESERVE_SHARE))
    return min(options.output, facts.output or options.output, int(window * _RESERVE_SHARE_MOST))
