"""Describe a model in `GET /v1/models`: its window, its longest output and its prices, in the fields that clients read.

| field | clients that read it |
|---|---|
| `context_length`, `top_provider`, `pricing` | those of OpenRouter |
| `max_context_length` | those of LM Studio |
| `max_input_tokens`, `max_tokens` | those of Anthropic |

Fields of the provider are kept. Only a window that is larger than the gateway allows is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from gateway.core.context_budget import ContextPolicy, smallest_limit, usable_window
from gateway.core.pricing import Price
from gateway.core.routing import ModelFacts
from gateway.dialects.fields import UNREADABLE

_TOP_PROVIDER: Final = "top_provider"
#: fields that the gateway may lower
_WINDOWS: Final = frozenset({"context_length", "max_context_length", "max_input_tokens"})
_MISSING: Final = (None, b"null")

#: a model as its provider lists it
ListedModel = Mapping[str, msgspec.Raw]


def model_fields(facts: ModelFacts, policy: ContextPolicy) -> dict[str, Any]:
    """Return the fields that describe a model, as far as its facts are known."""
    window = usable_window(policy, facts)
    fields: dict[str, Any] = {
        "context_length": window,
        "max_context_length": window,
        "max_input_tokens": smallest_limit(window, facts.input),
        "max_tokens": facts.output,
        _TOP_PROVIDER: _known({"context_length": window, "max_completion_tokens": facts.output}),
        "pricing": _pricing(facts.price) if facts.price is not None else None,
    }
    return _known(fields)


def with_fields(model: ListedModel, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a provider's model with these fields added, and with lowered windows."""
    changed: dict[str, Any] = {**model}
    for name, value in fields.items():
        known = model.get(name)
        if known is None or bytes(known) in _MISSING or (name in _WINDOWS and _exceeds(known, value)):
            changed[name] = value
        elif name == _TOP_PROVIDER:
            changed[name] = _lowered(known, value)
    return changed


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != {}}


def _exceeds(known: msgspec.Raw, limit: int) -> bool:
    try:
        return msgspec.json.decode(known, type=int, strict=False) > limit
    except (*UNREADABLE, ValueError):
        return False


def _lowered(known: msgspec.Raw, value: Mapping[str, Any]) -> Any:
    """Return the provider's object with a lower window; the same bytes if that is not needed."""
    try:
        theirs = msgspec.json.decode(known, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return known
    low = {name: value[name] for name in _WINDOWS & value.keys() & theirs.keys() if _exceeds(theirs[name], value[name])}
    return {**theirs, **low} if low else known


def _pricing(price: Price) -> dict[str, str]:
    """Return prices in US dollars per token, as text."""
    rates = price.rates
    parts = {
        "prompt": rates.input,
        "completion": rates.output,
        "input_cache_read": rates.cache_read,
        "input_cache_write": rates.cache_write,
        "web_search": price.search,
    }
    if not price.search:
        del parts["web_search"]
    return {name: f"{rate.normalize():f}" for name, rate in parts.items() if rate is not None}
