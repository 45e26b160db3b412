"""Find the thinking blocks that the called model or account cannot read.

Such a block is dropped by its provider without an error, and the model continues without that reasoning. The rules are
data: `thinking:` in config/families.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

from gateway.core.values import dataclass

#: origins that are remembered of one conversation; a switch of model or provider is rare
MAX_ORIGINS: Final = 8
#: a thinking block of the Messages API; inside a JSON string its quotes would have backslashes before them
_BLOCK: Final = re.compile(rb'"type"\s*:\s*"(?:redacted_)?thinking"')

Reason = Literal["model", "provider"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRule:
    """A rule for the thinking blocks that models of these patterns can read.

    Attributes:
        models: patterns of their names.
        reads: patterns of models whose thinking blocks they read.
        account: `own` if only the account that created a block can read it.
    """

    models: tuple[str, ...]
    reads: tuple[str, ...] = ("*",)
    account: Literal["any", "own"] = "any"


class ThinkingRules:
    """The rules in order. The first that matches a model applies to it."""

    def __init__(self, rules: Sequence[ThinkingRule] = ()) -> None:
        self.rules = tuple(rules)

    def of(self, model: str) -> ThinkingRule | None:
        """Return the rule for a model, or None if nothing is known of it."""
        return next((rule for rule in self.rules if _matches(model, rule.models)), None)


class ThinkingOrigin(NamedTuple):
    """The provider and model that made the thinking blocks of a conversation, from block number `start`."""

    provider: str
    model: str
    start: int


@dataclass(frozen=True, slots=True)
class UnreadableThinking:
    """Thinking blocks of a request that its target cannot read.

    Attributes:
        blocks: how many there are.
        reason: `model`: the model does not read those of the model that made them; `provider`: they are bound to the
            account that made them, and another provider was called.
        provider: the provider that made them.
        model: the model that made them.
    """

    blocks: int
    reason: Reason
    provider: str
    model: str


def thinking_blocks(messages: bytes) -> int:
    """Return how many thinking blocks are in the `messages` of a Messages request, as written in its body."""
    return len(_BLOCK.findall(messages)) if b'thinking"' in messages else 0


def unread(
    origins: Sequence[ThinkingOrigin], blocks: int, provider: str, model: str, rules: ThinkingRules
) -> tuple[UnreadableThinking, ...]:
    """Return which of the thinking blocks of a request its target drops, as far as the rules say."""
    ends = [*(origin.start for origin in origins[1:]), blocks]
    unreadable = []
    for origin, end in zip(origins, ends, strict=False):
        # A client can leave out blocks, so that there are fewer than were counted.
        count, reason = min(end, blocks) - origin.start, _why(origin, provider, model, rules)
        if count > 0 and reason is not None:
            unreadable.append(UnreadableThinking(count, reason, origin.provider, origin.model))
    return tuple(unreadable)


def followed(origins: Sequence[ThinkingOrigin], blocks: int, provider: str, model: str) -> tuple[ThinkingOrigin, ...]:
    """Return the origins after a response of this model, to a request with so many thinking blocks."""
    if origins and origins[-1][:2] == (provider, model):
        return tuple(origins)
    return (*origins, ThinkingOrigin(provider, model, blocks if origins else 0))[-MAX_ORIGINS:]


def _why(origin: ThinkingOrigin, provider: str, model: str, rules: ThinkingRules) -> Reason | None:
    if (origin.provider, origin.model) == (provider, model):
        return None
    target, maker = rules.of(model), rules.of(origin.model)
    if target is not None and not _matches(origin.model, target.reads):
        return "model"
    is_bound = maker is not None and maker.account == "own"
    return "provider" if is_bound and origin.provider != provider else None


def _matches(model: str, patterns: Sequence[str]) -> bool:
    name = model.lower()
    return any(fnmatchcase(form, pattern) for pattern in patterns for form in (name, name.rpartition("/")[2]))
