"""Compute the input tokens that a call may have, from settings, headers and the context window of the model."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Final, Literal, NamedTuple

from gateway.core.routing import ModelFacts, Route
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.values import dataclass

Trim = Literal["auto", "off", "shadow"]
Overflow = Literal["error", "forward", "least"]
#: The share of the context window that is kept free for the output if neither settings nor call limit it, and the most
#: tokens of it.
_RESERVE_SHARE: Final = 0.1
_RESERVE_MOST: Final = 4096
#: The largest share of a window that is kept free for the output: some clients ask for more than the model has.
_RESERVE_SHARE_MOST: Final = 0.5
#: assumed context window, in tokens, of a summary model whose window is unknown
_UNKNOWN_WINDOW: Final = 32_000
#: Share of its window that a request for a summary may fill, because its tokens are only estimated.
_SURE_SHARE: Final = 0.9


class LengthLimit(NamedTuple):
    """A limit of a call in tokens, from a provider's refusal. `of_input`: it does not include the output."""

    tokens: int
    of_input: bool = False


@dataclass(frozen=True, slots=True)
class SummaryModel:
    """The model that makes summaries. `name`: as configured. `max_tokens`: the longest summary."""

    name: str
    route: Route
    facts: ModelFacts
    max_tokens: int

    @property
    def room(self) -> int:
        """Return the most input tokens of a request for a summary."""
        room = (self.facts.window or _UNKNOWN_WINDOW) - self.max_tokens
        return int(min(room, self.facts.input or room) * _SURE_SHARE)


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """The `context:` settings.

    Attributes:
        trim: whether a request over its budget is trimmed.
        budget: the most input tokens of a call; None: what the context window allows.
        reserve_tokens: tokens kept free for the output; None: see `budget_of`.
        keep_last_turns: turns at the end that are never changed.
        overflow: how a request is handled that cannot be trimmed to its budget: refuse it, send it unchanged, or send
            the least that can be sent.
        safety: factor over the estimate; None: learned from reported usage.
        fit: how messages to keep are chosen.
        summary: the model that makes summaries; None: no summaries.
        deadline_s: seconds that a trim may take.
        sets_cache_marks: set cache marks in calls to Claude models whose client sets none.
    """

    trim: Trim = "auto"
    budget: int | None = None
    reserve_tokens: int | None = None
    keep_last_turns: int = 1
    overflow: Overflow = "error"
    safety: float | None = None
    fit: TrimPolicy = field(default_factory=TrimPolicy)
    summary: SummaryModel | None = None
    deadline_s: float = 60.0
    sets_cache_marks: bool = False


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Options of one call: whether it is trimmed, its context budget, and its output limit.

    `betas`: the names in its header `anthropic-beta`.
    """

    trim: Trim | None = None
    budget: int | None = None
    output: int | None = None
    betas: frozenset[str] = frozenset()


NO_OPTIONS: Final = ContextOptions()


def beta_of(facts: ModelFacts, options: ContextOptions) -> str | None:
    """Return the beta of a call that gives the model its largest context window, or None."""
    if not options.betas:
        return None
    windows = {name: window for name, window in (facts.betas or {}).items() if name in options.betas}
    return max(windows, key=windows.__getitem__, default=None)


def with_call_limits(facts: ModelFacts, options: ContextOptions, limit: LengthLimit | None) -> ModelFacts:
    """Return the facts of a model for one call, with the window of its beta and the limit from a provider's refusal."""
    beta = beta_of(facts, options)
    if beta is not None and facts.betas is not None:
        facts = replace(facts, window=max(facts.betas[beta], facts.window or 0))
    if limit is None:
        return facts
    if limit.of_input:
        return replace(facts, input=min(limit.tokens, facts.input or limit.tokens))
    return replace(facts, window=min(limit.tokens, facts.window or limit.tokens))


def budget_of(policy: ContextPolicy, facts: ModelFacts, options: ContextOptions) -> int | None:
    """Return the most input tokens of a call, the smallest of all limits, or None if nothing limits it.

    Input and output share the context window, so a part is kept free for the output: `reserve_tokens`, or the output
    limit of the call, or a tenth of the window up to 4,096. Nothing is kept free of a limit for the input alone.
    """
    window = facts.window
    room = max(1, window - _reserve(policy, facts, options, window)) if window is not None else None
    return smallest_limit(policy.budget, options.budget, facts.input, room)


def usable_window(policy: ContextPolicy, facts: ModelFacts) -> int | None:
    """Return the context window that a client can use: that of the model, or `context.budget` if that is smaller."""
    return smallest_limit(facts.window, policy.budget if policy.trim == "auto" else None)


def smallest_limit(*limits: int | None) -> int | None:
    """Return the smallest of these limits, or None if there is none."""
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _reserve(policy: ContextPolicy, facts: ModelFacts, options: ContextOptions, window: int) -> int:
    if policy.reserve_tokens is not None:
        return policy.reserve_tokens
    if options.output is None:
        return min(_RESERVE_MOST, int(window * _RESERVE_SHARE))
    return min(options.output, facts.output or options.output, int(window * _RESERVE_SHARE_MOST))
