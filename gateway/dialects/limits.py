"""How long an answer may be and how many are asked for, as each API says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.dialects.fields import decode

#: by format: the fields that bound an answer; several may stand in one request
_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "completions": ("max_tokens",),
}
#: so many answers are asked for in one call
_ANSWERS: Final = ("n", "best_of")
#: no provider gives more; what is asked beyond it is refused there
_MOST_ANSWERS: Final = 1_024


def answers_asked(fields: Mapping[str, bytes | msgspec.Raw]) -> int:
    """Answers that one call asks for, 1 where it does not say, or says what is no number of answers."""
    asked = (decode(fields[name]) for name in _ANSWERS if name in fields)
    known = [value for value in asked if isinstance(value, int) and not isinstance(value, bool)]
    return min(max([1, *known]), _MOST_ANSWERS) * _prompts(fields)


def _prompts(fields: Mapping[str, bytes | msgspec.Raw]) -> int:
    """Prompts of a completions call, each of which is answered: a list of numbers is one prompt in tokens."""
    found = decode(fields["prompt"]) if "prompt" in fields else None
    if not isinstance(found, list) or all(isinstance(one, int) for one in found):
        return 1
    return len(found)


def service_tier(fields: Mapping[str, bytes | msgspec.Raw]) -> str | None:
    """The service tier a call asks for."""
    value = decode(fields["service_tier"]) if "service_tier" in fields else None
    return value if isinstance(value, str) else None


def with_limit(fields: Mapping[str, bytes | msgspec.Raw], wire: Wire, limit: int, usual: str) -> dict[str, object]:
    """The fields to set so that an answer has at most `limit` tokens.

    The fields that the call has itself are lowered; where it has none, `usual` is set in a chat call: providers differ
    in the name they take.
    """
    names = _FIELDS[wire]
    own = [name for name in names if name in fields and decode(fields[name]) is not None]
    if not own:
        return {usual if wire == "chat" else names[0]: limit}
    return {name: min(limit, value) if isinstance(value := decode(fields[name]), int) else limit for name in own}
