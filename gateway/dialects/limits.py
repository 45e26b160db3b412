"""Read and set the output limit and the number of responses, in each API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.ledger.arithmetic import MOST
from gateway.core.ledger.charging import USEFUL
from gateway.core.values import dataclass
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.fields import AnyFields, decode
from gateway.dialects.texts import prompts

#: by format: the fields that bound an answer; several may stand in one request
_FIELDS: Final[Mapping[Wire, tuple[str, ...]]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "completions": ("max_tokens",),
}
#: what llama.cpp's server takes in the place of any of them; other servers do not know it
_IN_PLACE: Final = "n_predict"
_KNOW_IN_PLACE: Final = frozenset({"chat", "completions"})
#: by any name; a server may know more than one
ALL_LIMITS: Final = tuple(sorted({_IN_PLACE, *(name for names in _FIELDS.values() for name in names)}))
#: of the names in a chat call, the one that every provider knows but those that are told the other by `limit_field`
_OLDER: Final = "max_tokens"
#: the models that answer instead after a refusal, each with settings of its own:
#: https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback
_FALLBACKS: Final = "fallbacks"
#: tokens of a completion where the call names no limit:
#: https://platform.openai.com/docs/api-reference/completions/create
_COMPLETION: Final = 16
#: the fields that ask for several answers in one call
_ANSWERS: Final = ("n", "best_of")
#: the fields that tell the service tier
_OF_TIER: Final = ("speed", "inference_geo", "service_tier")
#: that of what is asked for in a hurry, and in the US
_TIERS: Final = {(True, True): "fast-us", (True, False): "fast", (False, True): "us"}
#: no provider takes a smaller budget of thinking, and it must be below the limit of the answer
_LEAST_THINKING: Final = 1_024
#: the least length of an answer: https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
_AT_LEAST: Final = "min_tokens"


def output_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """The most tokens that an answer may have, as the provider may read it; None where nothing bounds it.

    One of several fields that differ may be the one that counts, so the largest is taken; a field of another API alone
    bounds nothing. In a format that nobody knows (None) any of them may be its own. A model that answers instead may
    have a limit of its own.
    """
    own = _own_limit(fields, wire)
    return own if own is None else max([own, *(limit for _, limit in _fallback_limits(fields, wire))])


def _own_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """Return the same of the model that the request names."""
    if fields.keys().isdisjoint(ALL_LIMITS):
        return None
    known = {name: number for name in ALL_LIMITS if name in fields and (number := _number(fields, name)) is not None}
    own = _named(wire) if wire is not None else ALL_LIMITS
    return None if known.keys().isdisjoint(own) else max(known.values())


def _fallback_limits(fields: AnyFields, wire: Wire | None) -> list[tuple[dict[str, Any], int]]:
    """Return the entries of Anthropic's `fallbacks` that have a limit of their own, and that limit."""
    listed = decode(fields[_FALLBACKS]) if wire == "messages" and _FALLBACKS in fields else None
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [(one, limit) for one in entries if (limit := _as_number(one.get(_OLDER))) is not None]


def _named(wire: Wire) -> tuple[str, ...]:
    return (*_FIELDS[wire], _IN_PLACE) if wire in _KNOW_IN_PLACE else _FIELDS[wire]


def _given(fields: AnyFields) -> list[str]:
    """The limits that a request names, also those whose value is no number."""
    return [name for name in ALL_LIMITS if name in fields and decode(fields[name]) is not None]


def default_limit(fields: AnyFields, wire: Wire | None) -> int | None:
    """The most tokens of an answer by the API itself, where the request names no limit; None: as its model has it."""
    return _COMPLETION if wire == "completions" and not _given(fields) else None


def asks_no_answer(fields: AnyFields, wire: Wire) -> bool:
    """Whether a request only brings its prompt into the provider's cache: 0 is a limit in Anthropic's API.

    https://platform.claude.com/docs/en/build-with-claude/prompt-caching#pre-warming-the-cache. In other formats a
    server may read it as no limit.
    """
    said = decode(fields[_OLDER]) if wire == "messages" and _OLDER in fields else None
    return said == 0 and not isinstance(said, bool)


def is_loose(fields: AnyFields, wire: Wire, usual: str) -> bool:
    """Whether a server may heed another limit than `output_limit` says, or than the API has by default.

    One may not know the name that is used, and take what is no number above 0 for no limit at all. `usual`: the name
    that the provider takes in a chat call.
    """
    given = _given(fields)
    if not given:
        return default_limit(fields, wire) is not None
    is_heeded = any(name in _heeded(wire, usual) for name in given)
    return not is_heeded or any(_number(fields, name) is None for name in given)


def _heeded(wire: Wire, usual: str) -> tuple[str, ...]:
    """The names that a provider surely knows. `usual`: the one that it is configured to take in a chat call."""
    return (_OLDER,) if wire == "chat" and usual == _OLDER else _FIELDS[wire]


def answers_asked(fields: AnyFields, wire: Wire | None) -> int:
    """Answers that one call asks for, 1 where it does not say, or says what is no number of answers.

    Of several prompts each is answered. The other formats have one conversation.
    """
    known = [number for name in _ANSWERS if (number := _number(fields, name)) is not None]
    has_prompts = wire in (None, "completions") and "prompt" in fields
    return min(MOST, max([1, *known]) * (prompts(fields["prompt"]) if has_prompts else 1))


def _number(fields: AnyFields, name: str) -> int | None:
    """A field as a number above 0; None where it is none. Some servers take `5.0` and `"5"` for 5, so we do too."""
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
    """The service tier a call asks for, as `core.pricing` names it."""
    if fields.keys().isdisjoint(_OF_TIER):
        return None
    said = {name: decode(fields[name]) for name in _OF_TIER if name in fields}
    value = said.get("service_tier")
    return anthropic_tier(said) or (value if isinstance(value, str) else None)


def anthropic_tier(values: Mapping[str, object]) -> str | None:
    """What `speed` and `inference_geo` make of the price; None where they are the usual ones, or not said."""
    is_fast, is_us = values.get("speed") == "fast", values.get("inference_geo") == "us"
    return _TIERS.get((is_fast, is_us))


def with_limit(fields: AnyFields, wire: Wire, limit: int, usual: str, *, is_held: bool = False) -> dict[str, object]:
    """The fields to set so that an answer has at most `limit` tokens.

    The fields that the call has itself are lowered, and set where they bound nothing; where it has none, `usual` is set
    in a chat call: providers differ in the name they take. A budget of thinking keeps its share of them, and a least
    length is no more than they are.

    `is_held`: no more than this is held, so that it must stand under a name which the provider is known to take. It
    takes the place of the other one: some providers refuse both at once.
    """
    names, given = _FIELDS[wire], _given(fields)
    changes: dict[str, object] = {name: min(limit, _number(fields, name) or limit) for name in given}
    heeded = _heeded(wire, usual) if is_held else names
    if not any(name in heeded for name in given):
        changes |= dict.fromkeys((name for name in given if name in names), msgspec.UNSET)
        changes[usual if wire == "chat" else names[0]] = limit
    changes |= _with_lower_fallbacks(fields, wire, limit)
    own = _own_limit(fields, wire)
    if own is not None and limit >= own:
        return changes
    return changes | _with_less_thinking(fields, own, limit) | _with_lower_least(fields, limit)


def _with_lower_fallbacks(fields: AnyFields, wire: Wire, limit: int) -> dict[str, object]:
    """Return `fallbacks` with no limit above this one; nothing where none is."""
    above = [one for one, own in _fallback_limits(fields, wire) if own > limit]
    if not above:
        return {}
    listed = decode(fields[_FALLBACKS])
    return {_FALLBACKS: [{**one, _OLDER: limit} if one in above else one for one in listed]}


def _with_less_thinking(fields: AnyFields, own: int | None, limit: int) -> dict[str, object]:
    """The thinking in its share of a lowered limit, so that the answer has its own: it is paid for in any case.

    `own`: the limit that the call has itself.
    """
    changes: dict[str, object] = {}
    for thinking in _thinking(fields, own):
        asked = thinking.budget
        share = asked * limit // own if own is not None else asked
        budget = max(thinking.least, min(share, limit - USEFUL))
        # Where even the least is too much, the provider says so: see `least_output`.
        if budget < min(asked, limit):
            changes[thinking.field] = {**thinking.said, thinking.name: budget}
    return changes


def _with_lower_least(fields: AnyFields, limit: int) -> dict[str, object]:
    """The least length that vLLM is asked for, which it refuses where it is above the limit."""
    least = _number(fields, _AT_LEAST)
    return {_AT_LEAST: limit} if least is not None and least > limit else {}


def least_output(fields: AnyFields, wire: Wire) -> int:
    """Tokens below which the limit of an answer cannot be lowered.

    With thinking the provider would refuse the call, or nothing would be left to answer with. To turn thinking off
    instead would change what the caller asked for, and is refused in the middle of calls of tools.
    A summary of the whole conversation is of no use if it is cut short, so its own limit stays.
    """
    if asks_for_compaction(fields, wire):
        return output_limit(fields, wire) or 0
    return max((one.least + USEFUL for one in _thinking(fields, _own_limit(fields, wire))), default=0)


def thinking_within(asked: int, limit: int) -> int | None:
    """The budget of thinking for an effort, where the answer has a limit; None where there is no room to think.

    `asked`: what stands for the effort, which has no limit to be a share of: at most half is thinking, so that as much
    is left to answer with, as long as no provider takes less.
    """
    budget = min(asked, max(_LEAST_THINKING, limit // 2))
    return budget if budget + USEFUL <= limit else None


@dataclass(frozen=True, slots=True)
class _Thinking:
    """Thinking that a call asks for: the field that does, what stands there, and under which name it has its budget.

    `least`: the smallest budget that can be set.
    """

    field: str
    said: dict[str, Any]
    name: str
    budget: int
    least: int


def _thinking(fields: AnyFields, own: int | None) -> list[_Thinking]:
    """The thinking a call asks for, where it has a budget that is bound by the limit of the answer.

    One that is not below that limit already is of thinking between calls of tools, which may go beyond it; or it is
    refused as it came.
    """
    return [one for one in (_anthropics(fields), _openrouters(fields)) if one and (own is None or one.budget < own)]


def _anthropics(fields: AnyFields) -> _Thinking | None:
    found = decode(fields["thinking"]) if "thinking" in fields else None
    if not isinstance(found, dict) or found.get("type") != "enabled":
        return None
    budget = found.get("budget_tokens")
    if not isinstance(budget, int) or budget < _LEAST_THINKING:
        return None
    return _Thinking("thinking", found, "budget_tokens", budget, _LEAST_THINKING)


def _openrouters(fields: AnyFields) -> _Thinking | None:
    """https://openrouter.ai/docs/use-cases/reasoning-tokens. Other models than Anthropic's may have a smaller one."""
    found = decode(fields["reasoning"]) if "reasoning" in fields else None
    if not isinstance(found, dict) or found.get("enabled") is False:
        return None
    budget = found.get("max_tokens")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        return None
    return _Thinking("reasoning", found, "max_tokens", budget, min(budget, _LEAST_THINKING))
