"""Request rules of Claude models, as data: thinking modes, forced tool choice, sampling and bound thinking blocks.

Sources: platform.claude.com/docs/en/build-with-claude/preserved-thinking and the "What's new" page of each model. A
value marked "inferred" has no documented source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal

#: Which accounts get a 400 for a thinking block that fails the prefix check while `prefix_mismatch_behavior` is unset.
#: `none`: the model does not run the check. `new`: accounts created on or after 2026-08-31. `all`: every account.
PrefixCheck = Literal["none", "new", "all"]
#: The result of a request that forces a tool call. `accepted`: a response without thinking. `not_thinking`: a 400 if
#: the request turns thinking on. `refused`: a 400.
ForcedChoice = Literal["accepted", "not_thinking", "refused"]
#: Values of `thinking.type`.
ThinkingMode = Literal["adaptive", "enabled", "between_tools", "disabled"]

#: platform.claude.com/docs/en/release-notes/overview, 2026-09-24
BILLED_REFUSALS: Final = frozenset({"bio", "frontier_llm", "reasoning_extraction"})

_DEFAULTS_ONLY: Final = MappingProxyType[str, tuple[float, ...]](
    {"temperature": (1,), "top_p": (0.99, 1), "top_k": ()},
)
_HAIKU: Final = MappingProxyType[str, tuple[float, ...]]({"temperature": (1,), "top_p": (0.99,), "top_k": ()})


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The request rules of one model, or of models with the same rules."""

    models: tuple[str, ...]
    """Name parts after `claude-`; the first one names the rules. An empty part matches every Claude model."""
    reads: tuple[str, ...] = ()
    """Names of the rules whose thinking blocks the model reads, besides its own; other blocks are dropped."""
    prefix_check: PrefixCheck = "none"
    account_bound: bool = False
    """The model's thinking blocks are dropped when another account sends them."""
    modes: tuple[ThinkingMode, ...] = ("adaptive", "disabled")
    """Accepted values of `thinking.type`."""
    thinks: bool = True
    """The model thinks when `thinking` is not set."""
    off_needs_low_effort: bool = False
    """`disabled` and `between_tools` are refused with an effort above `high`."""
    forced_choice: ForcedChoice = "accepted"
    prefill: bool = False
    """The last message may be an assistant message."""
    sampling: Mapping[str, tuple[float, ...]] | None = None
    """The accepted values of `temperature`, `top_p` and `top_k`; None: all."""
    sampling_together: bool = True
    """`temperature` and `top_p` may be set in one request."""
    tool_changes: bool = True
    """A system message inside the conversation may withdraw tools or offer them again."""
    keeps_open_round: bool = False
    """A tool result must follow an assistant message that starts with its thinking block.

    The documentation requires it. In a test on 2026-09-26, the real API accepted requests without it.
    """
    compacts: bool = True
    """The model summarizes its conversation, on demand and at a threshold."""
    keeps_thinking: bool = True
    """The default of clearing: keep all thinking. False: keep only the thinking of the last response."""
    least_task_budget: int | None = 20_000
    """The minimum of `task_budget.total`; None: the model does not accept task budgets."""
    fallbacks: tuple[str, ...] = ()
    """Models that `fallbacks` may name, the default first. Empty: the model does not support the field."""
    billed_refusals: frozenset[str] = BILLED_REFUSALS
    """Categories of refusals that are billed even before any output (since 2026-09-24)."""

    @property
    def name(self) -> str:
        """Return the name that thinking signatures carry."""
        return self.models[0]


_OLDER: Final = ("opus-4-8", "older")
_GENERATION_5: Final = ("opus-5", "sonnet-5", "fable-5", *_OLDER)

#: The rules of current models; the first entry that matches a model's name applies. Sources of single values:
#:
#: - Every model reads the thinking of Haiku 5.5: documented for Amazon Bedrock only.
#: - `reads` of generation 5 and of Fable 5.2, and the fallbacks of Fable 5.2 and Opus 5.5: inferred.
#: - Task budgets of Sonnet 5 and 5.5: inferred from a test of Sonnet 5 (2026-07).
#: - Compaction of older models: documented only for Opus 4.6 and Sonnet 4.6.
CLAUDE_RULES: Final = (
    ModelRules(
        models=("fable-5-2", "mythos-5-2"),
        reads=("mythos-5-1", "fable-5-1", "opus-5-5", "haiku-5-5", *_GENERATION_5),
        prefix_check="all",
        modes=("adaptive",),
        forced_choice="refused",
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-5", "opus-4-8"),
    ),
    ModelRules(
        models=("mythos-5-1",),
        reads=("fable-5-1", "opus-5-5", "haiku-5-5", *_GENERATION_5),
        prefix_check="all",
        modes=("adaptive",),
        forced_choice="refused",
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-4-8", "opus-5"),
    ),
    ModelRules(
        models=("fable-5-1",),
        reads=("mythos-5-1", "opus-5-5", "haiku-5-5", *_GENERATION_5),
        prefix_check="new",
        modes=("adaptive",),
        forced_choice="refused",
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-4-8", "opus-5"),
    ),
    ModelRules(
        models=("opus-5-5",),
        reads=("sonnet-5-5", "haiku-5-5", "opus-5", "sonnet-5", *_OLDER),
        prefix_check="new",
        modes=("adaptive",),
        forced_choice="refused",
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-5", "opus-4-8"),
    ),
    ModelRules(
        models=("sonnet-5-5",),
        reads=("haiku-5-5", "sonnet-5", *_OLDER),
        prefix_check="new",
        account_bound=True,
        modes=("adaptive", "between_tools"),
        off_needs_low_effort=True,
        forced_choice="refused",
        sampling=_DEFAULTS_ONLY,
    ),
    ModelRules(
        models=("haiku-5-5",),
        prefix_check="new",
        account_bound=True,
        off_needs_low_effort=True,
        sampling=_HAIKU,
        sampling_together=False,
        compacts=False,
        keeps_thinking=False,
        least_task_budget=None,
    ),
    ModelRules(
        models=("fable-5", "mythos-5", "mythos-preview"),
        reads=("opus-5", "sonnet-5", "haiku-5-5", *_OLDER),
        modes=("adaptive",),
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-4-8", "opus-5"),
    ),
    ModelRules(
        models=("opus-5",),
        reads=("sonnet-5", "haiku-5-5", *_OLDER),
        off_needs_low_effort=True,
        sampling=_DEFAULTS_ONLY,
        fallbacks=("opus-4-8",),
    ),
    ModelRules(models=("sonnet-5",), reads=("haiku-5-5", *_OLDER), sampling=_DEFAULTS_ONLY, tool_changes=False),
    ModelRules(
        models=("opus-4-8", "opus-4-7"),
        reads=("older", "haiku-5-5"),
        thinks=False,
        forced_choice="not_thinking",
        sampling=_DEFAULTS_ONLY,
    ),
    ModelRules(
        models=("older", ""),
        reads=("haiku-5-5",),
        modes=("adaptive", "enabled", "disabled"),
        thinks=False,
        forced_choice="not_thinking",
        prefill=True,
        tool_changes=False,
        keeps_thinking=False,
        least_task_budget=None,
    ),
)


def rules_of(table: tuple[ModelRules, ...], model: str) -> ModelRules | None:
    """Return the rules in `table` that apply to `model`, or None if it is not listed.

    These parts of a name are ignored: a prefix (`anthropic/`, `us.anthropic.`), a date or other suffix. A dot in the
    version is the same as a hyphen.
    """
    for rules in table:
        if any(is_named(part, model) for part in rules.models):
            return rules
    return None


def is_named(part: str, model: str) -> bool:
    """Return True if `model` is the model whose name has `part` after `claude-`."""
    return _pattern(part).search(model.lower().replace(".", "-")) is not None


@lru_cache(maxsize=256)
def _pattern(part: str) -> re.Pattern[str]:
    """Return a pattern for `part` of a model's name. It does not match if a digit follows: a longer version or date."""
    return re.compile(rf"claude-{re.escape(part)}(?![0-9])" if part else "claude-")
