"""Read and set the output limit and the number of responses, in each API.

`gateway.core.ledger.output_limit` decides which limit is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.ledger.arithmetic import MOST
from gateway.core.ledger.output_limit import USEFUL, OutputAsked
from gateway.core.values import dataclass
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.fields import AnyFields, decode
from gateway.dialects.texts import prompts

#: the fields that limit the output, by format; a request may have several of them
_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "completions": ("max_tokens",),
}
#: the field that llama.cpp's server accepts instead of any of them; other servers do not know it
_LLAMA_LIMIT: Final = "n_predict"
_LLAMA_FORMATS: Final = frozenset({"chat", "completions"})
#: all names of an output limit; a server may know more than one
ALL_LIMITS: Final = tuple(sorted({_LLAMA_LIMIT, *(name for names in _FIELDS.values() for name in names)}))
#: all fields that `output_asked` depends on
_LENGTH_FIELDS: Final = frozenset({*ALL_LIMITS, "thinking", "reasoning"})
#: the name in a chat call that every provider knows, except those configured with the other name in `limit_field`
_MAX_TOKENS: Final = "max_tokens"
#: models that respond after the first one refuses, each with its own settings:
#: https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback
_FALLBACKS: Final = "fallbacks"
#: output tokens of a completion if the call names no limit:
#: https://platform.openai.com/docs/api-reference/completions/create
_COMPLETION_DEFAULT: Final = 16
_DEFAULT_LENGTH: Final = OutputAsked(default=_COMPLETION_DEFAULT)
_ANY_LENGTH: Final = OutputAsked()
#: the fields that ask for several responses in one call
_RESPONSE_COUNTS: Final = ("n", "best_of")
#: the fields that select the service tier
_TIER_FIELDS: Final = ("speed", "inference_geo", "service_tier")
#: (fast mode, inference in the US) -> service tier
_TIERS: Final = {(True, True): "fast-us", (True, False): "fast", (False, True): "us"}
#: The smallest budget of thinking tokens that any provider accepts. It must be below the output limit.
_MIN_THINKING: Final = 1_024
#: the minimum output length: https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
_MIN_TOKENS: Final = "min_tokens"


def output_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """Return the output limit of a request as its provider may read it; None if there is no limit.

    - If several fields differ, the largest value counts, because any of them may be the one that the provider reads.
    - A field that only another API knows is no limit. In an unknown format (None) every name counts.
    - A fallback model may have its own limit; the largest counts.
    """
    own = _own_limit(fields, wire)
    return own if own is None else max([own, *(limit for _, limit in _fallback_limits(fields, wire))])


def output_asked(fields: AnyFields, wire: Wire | None) -> OutputAsked:
    """Return what a request says about the length of its response. `wire`: None for an unknown format."""
    if fields.keys().isdisjoint(_LENGTH_FIELDS):
        return _DEFAULT_LENGTH if wire == "completions" else _ANY_LENGTH
    limit = output_limit(fields, wire)
    if wire is None:
        # The gateway cannot lower this limit.
        return OutputAsked(limit, least=limit or 0)
    return OutputAsked(
        limit, default_limit(fields, wire), minimum_output(fields, wire), is_none=asks_no_output(fields, wire)
    )


def _own_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """Return the output limit for the model that the request names, or None."""
    if fields.keys().isdisjoint(ALL_LIMITS):
        return None
    known = {name: number for name in ALL_LIMITS if name in fields and (number := _number(fields, name)) is not None}
    own = _limit_names(wire) if wire is not None else ALL_LIMITS
    return None if known.keys().isdisjoint(own) else max(known.values())


def _fallback_limits(fields: AnyFields, wire: Wire | None) -> list[tuple[dict[str, Any], int]]:
    """Return the entries of Anthropic's `fallbacks` that have their own limit, each with this limit."""
    listed = decode(fields[_FALLBACKS]) if wire == "messages" and _FALLBACKS in fields else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    return [(entry, limit) for entry in entries if (limit := _as_number(entry.get(_MAX_TOKENS))) is not None]


def _limit_names(wire: Wire) -> tuple[str, ...]:
    return (*_FIELDS[wire], _LLAMA_LIMIT) if wire in _LLAMA_FORMATS else _FIELDS[wire]


def _given_limits(fields: AnyFields) -> list[str]:
    """Return the limits that a request names, including those whose value is not a number."""
    return [name for name in ALL_LIMITS if name in fields and decode(fields[name]) is not None]


def default_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """Return the API's own output limit if the request names none; None if only the model limits it."""
    return _COMPLETION_DEFAULT if wire == "completions" and not _given_limits(fields) else None


def asks_no_output(fields: AnyFields, wire: Wire) -> bool:
    """Return True if a request only writes its prompt to the provider's cache: its limit is 0 in Anthropic's API.

    https://platform.claude.com/docs/en/build-with-claude/prompt-caching#pre-warming-the-cache. In other formats a
    server may read 0 as no limit.
    """
    limit = decode(fields[_MAX_TOKENS]) if wire == "messages" and _MAX_TOKENS in fields else None
    return limit == 0 and not isinstance(limit, bool)


def may_be_ignored(fields: AnyFields, wire: Wire, usual: str) -> bool:
    """Return True if a server may ignore the limit that `output_limit` or `default_limit` returns.

    A server may not know the name that is used, or may read a value that is not a number above 0 as no limit.
    `usual`: the name that the provider accepts in a chat call.
    """
    given = _given_limits(fields)
    if not given:
        return default_limit(fields, wire) is not None
    is_known = any(name in _known_names(wire, usual) for name in given)
    return not is_known or any(_number(fields, name) is None for name in given)


def _known_names(wire: Wire, usual: str) -> tuple[str, ...]:
    """Return the names that a provider certainly knows. `usual`: the configured name for chat calls."""
    return (_MAX_TOKENS,) if wire == "chat" and usual == _MAX_TOKENS else _FIELDS[wire]


def responses_asked(fields: AnyFields, wire: Wire | None) -> int:
    """Return the number of responses that one call asks for; 1 if it does not say, or not as a valid number.

    In completions there is a response to each prompt. The other formats have one conversation.
    """
    known = [number for name in _RESPONSE_COUNTS if (number := _number(fields, name)) is not None]
    has_prompts = wire in (None, "completions") and "prompt" in fields
    return min(MOST, max([1, *known]) * (prompts(fields["prompt"]) if has_prompts else 1))


def _number(fields: AnyFields, name: str) -> int | None:
    """Return a field as a number above 0, else None. Like some servers, read `5.0` and `"5"` as 5."""
    return _as_number(decode(fields[name]) if name in fields else None)


def _as_number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = value if isinstance(value, int) else math.ceil(float(value))
    except (ValueError, OverflowError):
        return None
    return number if number > 0 else None


def service_tier(fields: AnyFields) -> str | None:
    """Return the service tier that a call asks for, as named in `core.pricing`."""
    if fields.keys().isdisjoint(_TIER_FIELDS):
        return None
    values = {name: decode(fields[name]) for name in _TIER_FIELDS if name in fields}
    tier = values.get("service_tier")
    return anthropic_tier(values) or (tier if isinstance(tier, str) else None)


def anthropic_tier(values: Mapping[str, object]) -> str | None:
    """Return the tier that `speed` and `inference_geo` select for the price; None for the default prices."""
    is_fast, is_us = values.get("speed") == "fast", values.get("inference_geo") == "us"
    return _TIERS.get((is_fast, is_us))


def with_limit(fields: AnyFields, wire: Wire, limit: int, usual: str, *, is_held: bool = False) -> dict[str, object]:
    """Return the fields to set so that a response has at most `limit` tokens.

    - Limits in the request are lowered, and set if their value is not a limit.
    - A chat call without a limit gets the field `usual`, because providers differ in the name that they accept.
    - A budget of thinking tokens keeps its share of the limit. A minimum length becomes at most the limit.

    `is_held`: only `limit` tokens are reserved in the budget, so the limit must have a name that the provider is known
    to read. It then replaces the other name, because some providers refuse both in one request.
    """
    names, given = _FIELDS[wire], _given_limits(fields)
    changes: dict[str, object] = {name: min(limit, _number(fields, name) or limit) for name in given}
    known_names = _known_names(wire, usual) if is_held else names
    if not any(name in known_names for name in given):
        changes |= dict.fromkeys((name for name in given if name in names), msgspec.UNSET)
        changes[usual if wire == "chat" else names[0]] = limit
    changes |= _with_lower_fallbacks(fields, wire, limit)
    own = _own_limit(fields, wire)
    if own is not None and limit >= own:
        return changes
    return changes | _with_less_thinking(fields, own, limit) | _with_lower_minimum(fields, limit)


def _with_lower_fallbacks(fields: AnyFields, wire: Wire, limit: int) -> dict[str, object]:
    """Return `fallbacks` with no limit above this one; empty if none is above it."""
    above = [entry for entry, own in _fallback_limits(fields, wire) if own > limit]
    if not above:
        return {}
    listed = decode(fields[_FALLBACKS])
    return {_FALLBACKS: [{**entry, _MAX_TOKENS: limit} if entry in above else entry for entry in listed]}


def _with_less_thinking(fields: AnyFields, own: int | None, limit: int) -> dict[str, object]:
    """Return the thinking budget reduced in proportion to a lowered limit, so that tokens remain for the text.

    Thinking is paid for in any case. `own`: the limit in the request.
    """
    changes: dict[str, object] = {}
    for thinking in _thinking(fields, own):
        asked = thinking.budget
        share = asked * limit // own if own is not None else asked
        budget = max(thinking.least, min(share, limit - USEFUL))
        # If even the smallest budget is too large, the provider refuses the call: see `minimum_output`.
        if budget < min(asked, limit):
            changes[thinking.field] = {**thinking.value, thinking.name: budget}
    return changes


def _with_lower_minimum(fields: AnyFields, limit: int) -> dict[str, object]:
    """Return a reduced minimum length (vLLM), which is refused above the limit; empty if nothing changes."""
    least = _number(fields, _MIN_TOKENS)
    return {_MIN_TOKENS: limit} if least is not None and least > limit else {}


def minimum_output(fields: AnyFields, wire: Wire) -> int:
    """Return the tokens below which the output limit must not be lowered.

    - With thinking, the provider would refuse the call, or no tokens would remain for the text. Turning thinking off
      instead would change the request, and is refused between a tool call and its result.
    - A summary of the whole conversation is useless if it is cut short, so its own limit stays.
    """
    if asks_for_compaction(fields, wire):
        return output_limit(fields, wire) or 0
    thinking = _thinking(fields, _own_limit(fields, wire))
    return max((setting.least + USEFUL for setting in thinking), default=0)


def thinking_budget(asked: int, limit: int) -> int | None:
    """Return the thinking budget for an effort within an output limit; None if thinking does not fit.

    `asked`: the budget that is equivalent to the effort. At most half of the limit is thinking, so that as much remains
    for the text, but never less than the smallest budget that providers accept.
    """
    budget = min(asked, max(_MIN_THINKING, limit // 2))
    return budget if budget + USEFUL <= limit else None


@dataclass(frozen=True, slots=True)
class _Thinking:
    """A thinking budget in a request.

    Attributes:
        field: the field of the request with the thinking settings.
        value: the value of this field.
        name: the key of the budget in it.
        budget: tokens of thinking.
        least: the smallest budget that can be set.
    """

    field: str
    value: dict[str, Any]
    name: str
    budget: int
    least: int


def _thinking(fields: AnyFields, own: int | None) -> list[_Thinking]:
    """Return the thinking budgets of a call that count against its output limit.

    A budget at or above the limit is for thinking between tool calls, which may exceed the limit; or the provider
    refuses it. Such a budget is left unchanged.
    """
    settings = (_anthropic_thinking(fields), _openrouter_thinking(fields))
    return [setting for setting in settings if setting and (own is None or setting.budget < own)]


def _anthropic_thinking(fields: AnyFields) -> _Thinking | None:
    value = decode(fields["thinking"]) if "thinking" in fields else None
    if not isinstance(value, dict) or value.get("type") != "enabled":
        return None
    budget = value.get("budget_tokens")
    if not isinstance(budget, int) or budget < _MIN_THINKING:
        return None
    return _Thinking("thinking", value, "budget_tokens", budget, _MIN_THINKING)


def _openrouter_thinking(fields: AnyFields) -> _Thinking | None:
    """Read OpenRouter's `reasoning`; other models than Anthropic's may have a smaller budget.

    https://openrouter.ai/docs/use-cases/reasoning-tokens
    """
    value = decode(fields["reasoning"]) if "reasoning" in fields else None
    if not isinstance(value, dict) or value.get("enabled") is False:
        return None
    budget = value.get("max_tokens")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        return None
    return _Thinking("reasoning", value, "max_tokens", budget, min(budget, _MIN_THINKING))
