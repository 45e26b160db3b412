"""Check settings that depend on each other, and format configuration errors with their key paths.

What one value must be is said by the schema. Here stands what several say together, and how the schema's own complaints
are worded. No line repeats a text that stands in the file: a secret may stand in the wrong place.
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
#: what pydantic says in words of Python
_WORDS: Final = {
    "dict_type": "input should be keys and values, like {a: b}",
    "tuple_type": "input should be a list, like [a, b]",
    "path_type": "input should be a path",
    "too_short": "needs %(min_length)d or more entries, and has %(actual_length)d",
    "too_long": "takes %(max_length)d entries or fewer, and has %(actual_length)d",
}
#: how alike a name must be to be proposed
ALIKE: Final = 0.5
#: keys whose text is a duration
_DURATIONS: Final = frozenset({"ttl", "window"})
#: what a parser says that is not understood without its context, and what is said instead
_SAID: Final = {
    "but found another document": "it holds more than one document (---)",
    "second occurrence": "an anchor (&) stands there twice",
}

#: keys that name a model which the gateway calls by itself
_CALLED_BY_US: Final = ("budget.summary_model", "context.summary.model")


def unknown_providers(merged: Mapping[str, Any]) -> list[str]:
    """References to providers that do not exist."""
    providers, models = merged.get("providers"), merged.get("models")
    if not isinstance(providers, dict):
        return []  # the schema says what is wrong with it
    known = providers
    default = merged.get("default_provider", Settings.model_fields["default_provider"].default)
    named: list[tuple[str, object]] = [("default_provider", default)]
    if isinstance(models, list):
        rows = [(index, row) for index, row in enumerate(models) if isinstance(row, dict)]
        named += [(f"models[{index}].provider", name) for index, row in rows for name in _names(row.get("provider"))]
    return [
        f"{path}: there is no such provider{did_you_mean(name, known)}; configured: {', '.join(known) or 'none'}"
        for path, name in named
        if isinstance(name, str) and name not in known
    ]


def _names(provider: object) -> Iterable[object]:
    """The name of one provider, or those of all that share a route's calls."""
    return provider if isinstance(provider, dict) else [provider]


def named_models(settings: Settings) -> list[tuple[str, str]]:
    """(path, name) of the models that the configuration names for calls to go to."""
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
    asked = zip(_CALLED_BY_US, (settings.budget.summary_model, settings.context.summary.model), strict=True)
    return [*named, *((path, name) for path, name in asked if name is not None)]


def served_by_nobody(settings: Settings) -> list[str]:
    """Models of the configuration that no provider serves, and `summarize` without one."""
    if settings.context.summary.model is None and "summarize" in settings.context.strategies:
        return ["context.summary.model: summarize needs a model to call; name one, or take summarize out of strategies"]
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
            problems += _untaken(path, provider, settings.providers[provider].dialects)
    return problems


def _untaken(path: str, provider: str, dialects: Sequence[str] | None) -> list[str]:
    """A complaint where the gateway is to ask for summaries at a provider that does not take the format chat."""
    if path not in _CALLED_BY_US or dialects is None or "chat" in dialects:
        return []
    return [f"{path}: summaries are asked for in the format chat, which providers.{provider}.dialects does not name"]


def unknown_agents(settings: Settings) -> list[str]:
    """References to agents that do not exist."""
    return [
        f"models[{index}].agent: there is no such agent{did_you_mean(row.agent, settings.agents)}; "
        f"configured: {', '.join(settings.agents) or 'none'}"
        for index, row in enumerate(settings.models)
        if row.agent is not None and row.agent not in settings.agents
    ]


def unshared_store(settings: Settings) -> list[str]:
    """Several workers, each with a store of its own."""
    if settings.server.workers > 1 and settings.store.url == "memory://":
        return ["server.workers: more than one worker needs a store they share; set store.url to sqlite://PATH"]
    return []


def not_yaml(error: Exception, text: str) -> str:
    """Where a text is no YAML, and why."""
    mark = getattr(error, "problem_mark", None)
    if not isinstance(error, MarkedYAMLError) or mark is None:
        return f": {_unmarked(error)}"
    place = f" (line {mark.line + 1}, column {mark.column + 1})"
    line = text.split("\n")[mark.line :][:1]
    if line and line[0][mark.column : mark.column + 1] == "\t":
        return f"{place}: a tab stands where YAML takes spaces only"
    if line and line[0][max(mark.column - 1, 0) :].startswith("${"):
        return f'{place}: between brackets a text with ${{NAME}} needs quotes, like {{url: "${{NAME}}"}}'
    return f"{place}: {_reason(error)}"


def _unmarked(error: Exception) -> str:
    if isinstance(error, ReaderError):
        return "it holds a control character"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    return "it holds a date or a number that there is not; a text that looks like one needs quotes"


def _reason(error: MarkedYAMLError) -> str:
    """What the parser says, without what it read."""
    said = _SAID.get(error.problem or "", error.problem or "the reason is not known")
    if "alias" in said or "tag" in said:
        return "a text that begins with *, & or ! needs quotes"
    # A scanner names signs such as '}', a composer and a constructor whole texts.
    return said if isinstance(error, ScannerError | ParserError) else re.split("['\"]", said)[0].strip()


def described(error: ValidationError) -> list[str]:
    """What the schema complains about, one line for each key."""
    lines: dict[str, str] = {}
    problems = error.errors(include_url=False)
    for problem in problems:
        if _is_of_another_kind(problem, problems) or _is_counted_without(problem, problems):
            continue
        # A value that may be a word or a number is complained about once for each.
        location = _keys(problem["loc"])
        path = _dotted(location)
        if problem["type"] == "extra_forbidden":
            lines[path] = f"there is no such key{_meant(location)}"
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
    own, said = _WORDS.get(problem["type"]), str(problem["msg"])
    if own is None:
        return said.removeprefix("Value error, ")
    numbers = problem.get("ctx", {})
    if numbers.get("actual_length", 0) is None:
        # pydantic does not say it of keys and values
        numbers = {**numbers, "actual_length": len(problem["input"])}
    return str(own % numbers)


def _keys(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    return tuple(part for part in location if not (isinstance(part, str) and _KIND.fullmatch(part)))


def _is_of_another_kind(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it only says that a value is not of one kind, while the value is of another and wrong within that."""
    kinds = problem["loc"][:-1]
    is_choice = _keys(problem["loc"][-1:]) == ()
    return is_choice and any(
        other["loc"][: len(kinds)] == kinds and len(_keys(other["loc"])) > len(_keys(kinds)) for other in problems
    )


def _is_counted_without(problem: Mapping[str, Any], problems: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list is called too short only because entries in which something is wrong are not counted."""
    place = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(place)] == place and len(other["loc"]) > len(place) for other in problems
    )


def _shown(location: tuple[int | str, ...], value: object) -> str:
    return f" (got {value})" if isinstance(value, (int, float)) and _is_no_secret(location) else ""


def _is_no_secret(location: tuple[int | str, ...]) -> bool:
    """Whether a complaint may show the number it is about. Elsewhere it may be a key that has only digits."""
    match location:
        case ("server" | "context" | "sessions" | "telemetry" | "budget", *_) | ("store", "timeout_ms"):
            return True
        case ("providers", _, "retries" | "breaker" | "timeout_s" | "max_connections", *_):
            return True
        case ("auth", "keys", _, "budget" | "rpm", *_):
            return True
    return False


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(whole file)"


def _meant(location: tuple[int | str, ...]) -> str:
    """What an unknown key may have been meant as: one that is indented otherwise, or spelled otherwise."""
    name, section = str(location[-1]), _section(location[:-1])
    below = next(_below(section, name), ()) if section is not None else ()
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
    """Where in the sections of a section there is a key of this name; not in lists, nor in what users name."""
    for field, facts in section.model_fields.items():
        inner = facts.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if name in inner.model_fields:
                yield field, name
            yield from ((field, *rest) for rest in _below(inner, name))


def _inner_section(section: type[BaseModel], part: int | str) -> type[BaseModel] | None:
    if not isinstance(part, str) or part not in section.model_fields:
        return section  # an index, or a provider's name: the section is that of the elements
    return next(_sections_in(section.model_fields[part].annotation), None)


def _sections_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = ALIKE, before: str = "") -> str:
    """The known name that is most like one that is not known, to be said behind it; empty where none is.

    `cutoff`: how much alike they have to be, 0 to 1; `before`: how all of them begin.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {before}{close[0]}?)" if close else ""
