"""Check settings that depend on each other, and format configuration errors with their key paths.

The schema checks single values. This module checks values that depend on each other, and words the errors of the
schema. No message repeats a text of the file, because a secret can be in the wrong place.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from yaml.error import MarkedYAMLError
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from gateway.config.schema import BUILT_IN_ROUTES, Settings
from gateway.config.section import NO_DURATION
from gateway.core.errors import UnknownModel
from gateway.core.routing import ModelRule, Routes

#: how pydantic names the alternatives of a union
_KIND: Final = re.compile(r"(?:literal|dict|lax-or-strict|function-[a-z]+)\[.*\]|constrained-(?:int|float|str)")
#: messages that replace those of pydantic, which use terms of Python
_WORDS: Final = {
    "dict_type": "input should be keys and values, like {a: b}",
    "tuple_type": "input should be a list, like [a, b]",
    "path_type": "input should be a path",
    "too_short": "needs %(min_length)d or more entries, and has %(actual_length)d",
    "too_long": "takes %(max_length)d entries or fewer, and has %(actual_length)d",
}
#: the least similarity, 0 to 1, of a name that is suggested
ALIKE: Final = 0.5
#: keys whose text is a duration
_DURATIONS: Final = frozenset({"ttl", "window", "keep"})
#: YAML parser messages that are unclear without context, and their replacements
_CLEARER: Final = {
    "but found another document": "it holds more than one document (---)",
    "second occurrence": "an anchor (&) is used twice",
}

#: keys that name a model which the gateway itself calls
_CALLED_BY_GATEWAY: Final = ("budget.summary_model", "context.summary.model")


def unknown_providers(merged: Mapping[str, Any]) -> list[str]:
    """Return an error for each reference to an unknown provider."""
    providers, models = merged.get("providers"), merged.get("models")
    if not isinstance(providers, dict):
        return []  # the schema reports the error
    known = providers
    default = merged.get("default_provider", Settings.model_fields["default_provider"].default)
    named: list[tuple[str, object]] = [("default_provider", default)]
    if isinstance(models, list):
        rows = [(index, row) for index, row in enumerate(models) if isinstance(row, dict)]
        named += [(f"models[{index}].provider", name) for index, row in rows for name in _names(row.get("provider"))]
    return [
        f"{path}: unknown provider{did_you_mean(name, known)}; configured: {', '.join(known) or 'none'}"
        for path, name in named
        if isinstance(name, str) and name not in known
    ]


def _names(provider: object) -> Iterable[object]:
    """Return the name of a provider, or the names of all that share the calls of a route."""
    return provider if isinstance(provider, dict) else [provider]


def named_models(settings: Settings) -> list[tuple[str, str]]:
    """Return (path, name) of the models in the configuration that calls are sent to."""
    named = [
        (f"models[{index}].fallback[{place}]", name)
        for index, row in enumerate(settings.models)
        for place, name in enumerate(row.fallback)
    ]
    named += [(f"steps[{at}].model", step.model) for at, step in enumerate(settings.steps) if step.model is not None]
    named += [
        (f"agents.{name}.steps[{at}].model", step.model)
        for name, agent in settings.agents.items()
        for at, step in enumerate(agent.steps)
        if step.model is not None
    ]
    if settings.budget.downgrade is not None:
        named.append(("budget.downgrade.model", settings.budget.downgrade.model))
    asked = zip(_CALLED_BY_GATEWAY, (settings.budget.summary_model, settings.context.summary.model), strict=True)
    return [*named, *((path, name) for path, name in asked if name is not None)]


def models_without_provider(settings: Settings) -> list[str]:
    """Return an error for each configured model without a provider, and for `summarize` without a model."""
    if settings.context.summary.model is None and "summarize" in settings.context.strategies:
        return ["context.summary.model: summarize needs a model; set one, or remove summarize from strategies"]
    rules = [ModelRule(row.match, row.providers[0]) for row in settings.models]
    if settings.built_in_providers:
        rules += [ModelRule(match, provider) for match, provider in BUILT_IN_ROUTES]
    routes, problems = Routes(rules, list(settings.providers), settings.default_provider), []
    for path, name in named_models(settings):
        try:
            provider = routes.resolve(name).provider
        except UnknownModel as fault:
            problems.append(f"{path}: {fault.message}")
        else:
            problems += _without_chat(path, provider, settings.providers[provider].dialects)
    return problems


def _without_chat(path: str, provider: str, dialects: Sequence[str] | None) -> list[str]:
    """Return an error if a provider that is asked for summaries does not accept the format chat."""
    if path not in _CALLED_BY_GATEWAY or dialects is None or "chat" in dialects:
        return []
    return [f"{path}: summaries use the format chat, which providers.{provider}.dialects does not list"]


def unknown_agents(settings: Settings) -> list[str]:
    """Return an error for each reference to an unknown agent."""
    return [
        f"models[{index}].agent: unknown agent{did_you_mean(row.agent, settings.agents)}; "
        f"configured: {', '.join(settings.agents) or 'none'}"
        for index, row in enumerate(settings.models)
        if row.agent is not None and row.agent not in settings.agents
    ]


def unshared_store(settings: Settings) -> list[str]:
    """Return an error if several workers would each have their own store."""
    if settings.server.workers > 1 and settings.store.url == "memory://":
        return ["server.workers: more than one worker needs a shared store; set store.url to sqlite://PATH"]
    return []


def yaml_error(error: Exception, text: str) -> str:
    """Return the place and the reason of a YAML error, to append to a message."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return f": {_unmarked(error)}"
    place = f" (line {mark.line + 1}, column {mark.column + 1})"
    line = text.split("\n")[mark.line :][:1]
    if line and line[0][mark.column : mark.column + 1] == "\t":
        return f"{place}: there is a tab where YAML allows only spaces"
    if line and line[0][max(mark.column - 1, 0) :].startswith("${"):
        return f'{place}: inside brackets a text with ${{NAME}} needs quotes, like {{url: "${{NAME}}"}}'
    return f"{place}: {_reason(error)}"


def _unmarked(error: Exception) -> str:
    if isinstance(error, ReaderError):
        return "it contains a control character"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "it contains an impossible date or number; put quotes around a text that looks like one"


def _reason(error: MarkedYAMLError) -> str:
    """Return the message of the parser, without quoted parts of the file."""
    message = _CLEARER.get(error.problem or "", error.problem or "the reason is unknown")
    if "alias" in message or "tag" in message:
        return "a text that begins with *, & or ! needs quotes"
    # Scanner and parser only quote signs such as '}'. Composer and constructor quote texts of the file.
    return message if isinstance(error, ScannerError | ParserError) else re.split("['\"]", message)[0].strip()


def schema_errors(error: ValidationError) -> list[str]:
    """Return the errors of the schema, one line per key."""
    lines: dict[str, str] = {}
    problems = error.errors(include_url=False)
    for problem in problems:
        if _is_of_another_kind(problem, problems) or _is_counted_without(problem, problems):
            continue
        # pydantic reports a value that can be a word or a number once for each of them.
        location = _keys(problem["loc"])
        path = _dotted(location)
        if problem["type"] == "extra_forbidden":
            lines[path] = f"unknown key{_meant(location)}"
            continue
        text = _worded(problem)
        text = f"{text[:1].lower()}{text[1:]}{_shown(location, problem.get('input'))}"
        if path in lines:
            text = f"{lines[path].partition(' (got')[0]}, or {text.removeprefix('input should be ')}"
        lines[path] = text
    return [f"{path}: {text}" for path, text in lines.items()]


def _worded(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "string_type" and problem["loc"][-1:] and problem["loc"][-1] in _DURATIONS:
        return NO_DURATION
    if problem["type"] == "model_type" and (section := _section(_keys(problem["loc"]))) is not None:
        fields = section.model_fields
        shown = next((name for name, facts in fields.items() if facts.is_required()), next(iter(fields)))
        return f"input should be keys and values, like {{{shown}: …}}"
    own, message = _WORDS.get(problem["type"]), str(problem["msg"])
    if own is None:
        return message.removeprefix("Value error, ")
    numbers = problem.get("ctx", {})
    if numbers.get("actual_length", 0) is None:
        # pydantic omits the length of mappings
        numbers = {**numbers, "actual_length": len(problem["input"])}
    return str(own % numbers)


def _keys(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    return tuple(part for part in location if not (isinstance(part, str) and _KIND.fullmatch(part)))


def _is_of_another_kind(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an error only rejects one alternative of a union, while another error is inside the right one."""
    kinds = problem["loc"][:-1]
    is_choice = _keys(problem["loc"][-1:]) == ()
    return is_choice and any(
        other["loc"][: len(kinds)] == kinds and len(_keys(other["loc"])) > len(_keys(kinds)) for other in problems
    )


def _is_counted_without(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a list is only reported as too short because invalid entries were not counted."""
    place = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in problems
    )


def _shown(location: tuple[int | str, ...], value: object) -> str:
    return f" (got {value})" if isinstance(value, (int, float)) and _is_no_secret(location) else ""


def _is_no_secret(location: tuple[int | str, ...]) -> bool:
    """Return whether a message may show the wrong number. In other places it can be a key made of digits."""
    match location:
        case ("server" | "context" | "sessions" | "telemetry" | "budget", *_) | ("store", "timeout_ms"):
            return True
        case ("providers", _, "retries" | "breaker" | "timeout_s" | "max_connections", *_):
            return True
        case ("auth", "keys", _, "budget" | "rpm", *_) | ("auth", "budget" | "groups", *_):
            return True
        case ("auth", "jwt", "groups", _, "budget" | "rpm", *_) | ("auth", "jwt", "leeway_s"):
            return True
    return False


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(whole file)"


def _meant(location: tuple[int | str, ...]) -> str:
    """Return a suggestion for an unknown key, with another indentation or spelling, or an empty text."""
    name, section = str(location[-1]), _section(location[:-1])
    below = min(_below(section, name), key=len, default=()) if section is not None else ()
    if below:
        return f" (did you mean {_dotted((*location[:-1], *below))}, indented under {_dotted(below[:-1])}?)"
    meant = did_you_mean(name, list(section.model_fields) if section is not None else [])
    if not meant and name in Settings.model_fields:
        return f" (did you mean {name} without indentation?)"
    return meant


def _section(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Settings
    for part in location:
        section = _inner_section(section, part) if section is not None else None
    return section


def _below(section: type[BaseModel], name: str) -> Iterator[tuple[str, ...]]:
    """Yield the paths of this key inside the sections of a section, but not in lists or mappings."""
    for field, facts in section.model_fields.items():
        inner = facts.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if name in inner.model_fields:
                yield field, name
            yield from ((field, *rest) for rest in _below(inner, name))


def _inner_section(section: type[BaseModel], part: int | str) -> type[BaseModel] | None:
    if not isinstance(part, str) or part not in section.model_fields:
        return section  # an index or the name of a provider: `section` is already that of the elements
    return next(_sections_in(section.model_fields[part].annotation), None)


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = ALIKE, before: str = "") -> str:
    """Return " (did you mean …?)" with the most similar known name, or an empty text if none is similar.

    Args:
        name: the unknown name.
        known: the known names, without `before`.
        cutoff: the least similarity, 0 to 1.
        before: a prefix of all known names, which the suggestion repeats.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {before}{close[0]}?)" if close else ""
