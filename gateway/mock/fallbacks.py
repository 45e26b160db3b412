"""Read the fallback models of a request, which respond after a refusal, and the settings of each attempt.

Source: platform.claude.com/docs/en/build-with-claude/refusals-and-fallback. The error message for a field without its
beta is that of the real API, the other messages are inferred.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from gateway.mock import betas
from gateway.mock.claude_fields import Controls
from gateway.mock.claude_requests import HIGH_EFFORTS
from gateway.mock.claude_rules import ModelRules, is_named, rules_of
from gateway.mock.context_edits import read_field
from gateway.mock.wire import ApiError, JsonObject, Limit

#: Settings of an entry that the first version of the beta supports.
_FIRST_SETTINGS: Final = frozenset({"model", "max_tokens", "thinking"})


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    max_tokens: Limit | None = None
    thinking: JsonObject | UnsetType | None = UNSET
    output_config: JsonObject | UnsetType | None = UNSET
    speed: Literal["standard", "fast"] | None = None


class _Chain(msgspec.Struct):
    entries: Annotated[list[_Entry], msgspec.Meta(min_length=1, max_length=3)]


class Fallback(NamedTuple):
    """A model that responds if all models before it refuse, and its settings."""

    model: str
    rules: ModelRules
    controls: Controls
    max_tokens: int | None
    """None: the limit of the request."""
    is_named: bool
    """The request names the model, so the request must be valid for this model."""


def read_fallbacks(
    controls: Controls, model: str, table: tuple[ModelRules, ...], named: frozenset[str]
) -> list[Fallback]:
    """Return the models that `model` falls back to. `named`: the betas of the request.

    Raises:
        ApiError: 400, the field is not valid, or the request does not name its beta.
    """
    value = controls.fallbacks
    if value is None:
        return []
    if named.isdisjoint({betas.FALLBACK, betas.DEFAULT_FALLBACK}):
        raise ApiError(400, f"fallbacks: {betas.EXTRA_INPUTS}")
    rules = rules_of(table, model)
    permitted = rules.fallbacks if rules else ()
    if isinstance(value, str):
        if value != "default" or betas.DEFAULT_FALLBACK not in named:
            raise ApiError(400, "fallbacks: Input should be a valid list")
        return [_default(f"claude-{name}", controls, table) for name in permitted[:1]]
    if not permitted:
        raise ApiError(400, f"'{model}' does not support the `fallbacks` parameter")
    entries = read_field({"entries": value}, _Chain, "fallbacks").entries
    _refuse_models(entries, model, permitted, table)
    if betas.DEFAULT_FALLBACK in named:
        return [_adapted(entry, controls, table, named=True) for entry in entries]
    _refuse_later_settings(value)
    return [_unadapted(entry, controls, table) for entry in entries]


def _refuse_later_settings(entries: list[JsonObject]) -> None:
    for number, entry in enumerate(entries):
        for key in sorted(entry.keys() - _FIRST_SETTINGS):
            raise ApiError(400, f"fallbacks.{number}.{key}: {betas.EXTRA_INPUTS}")


def _refuse_models(
    entries: list[_Entry], model: str, permitted: tuple[str, ...], table: tuple[ModelRules, ...]
) -> None:
    seen = {model}
    for number, entry in enumerate(entries):
        if entry.model in seen:
            raise ApiError(400, f"fallbacks.{number}.model: '{entry.model}' is listed more than once.")
        seen.add(entry.model)
        if rules_of(table, entry.model) is None or not any(is_named(name, entry.model) for name in permitted):
            names = ", ".join(f"claude-{name}" for name in permitted)
            message = f"'{entry.model}' is not a permitted fallback of '{model}'. Permitted: {names}"
            raise ApiError(400, f"fallbacks.{number}.model: {message}")


def _unadapted(entry: _Entry, controls: Controls, table: tuple[ModelRules, ...]) -> Fallback:
    """Return an attempt of the first version of the beta, which uses the settings of the request unchanged."""
    own = {} if isinstance(entry.thinking, UnsetType) else {"thinking": entry.thinking}
    changed = msgspec.structs.replace(controls, **own)
    return Fallback(entry.model, _known(entry.model, table), changed, entry.max_tokens, is_named=True)


def _default(model: str, controls: Controls, table: tuple[ModelRules, ...]) -> Fallback:
    return _adapted(_Entry(model), controls, table, named=False)


def _adapted(entry: _Entry, controls: Controls, table: tuple[ModelRules, ...], *, named: bool) -> Fallback:
    rules = _known(entry.model, table)
    changed = msgspec.structs.replace(
        controls, thinking=_thinking(entry, controls, rules), output_config=_output(entry, controls, rules)
    )
    return Fallback(entry.model, rules, changed, entry.max_tokens, named)


def _known(model: str, table: tuple[ModelRules, ...]) -> ModelRules:
    rules = rules_of(table, model)
    if rules is None:
        raise ApiError(400, f"fallbacks: the model '{model}' is not known.")
    return rules


def _thinking(entry: _Entry, controls: Controls, rules: ModelRules) -> JsonObject | None:
    """Return the thinking setting of an attempt: its own, or the request's if the model supports that mode."""
    if not isinstance(entry.thinking, UnsetType):
        return entry.thinking
    thinking = controls.thinking
    if thinking is None or thinking.get("type") in rules.modes:
        return thinking
    is_off = thinking.get("type") == "between_tools" and "disabled" in rules.modes
    return {"type": "disabled"} if is_off else None


def _output(entry: _Entry, controls: Controls, rules: ModelRules) -> JsonObject | None:
    """Return the output settings of an attempt: its own, and those of the request that the model accepts."""
    own = entry.output_config
    if own is None:
        return None
    inherited = dict(controls.output_config or {})
    total = controls.task_budget.get("total")
    if rules.least_task_budget is None or (isinstance(total, int) and total < rules.least_task_budget):
        inherited.pop("task_budget", None)
    if rules.off_needs_low_effort and inherited.get("effort") in HIGH_EFFORTS:
        inherited.pop("effort")
    merged = inherited | ({} if isinstance(own, UnsetType) else own)
    return {key: value for key, value in merged.items() if value is not None}
