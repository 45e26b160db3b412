"""Define model families from config/families.yaml: token overheads, and requests that they refuse.

A request's family is the first in the list whose patterns match its model, provider and wire format; its image rule is
the first in a list of its own, since models of one family count images differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

from gateway.core.counting.images import COMMON_RULE, ImageRule
from gateway.core.counting.measure import Wire
from gateway.core.errors import ConfigError
from gateway.core.thinking_origin import ThinkingRule, ThinkingRules
from gateway.core.values import dataclass

#: answers of `TokenizerFamilies.of` that are remembered
_KNOWN_LIMIT: Final = 4096
_LISTS: Final = ("models", "providers", "wires")
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "rendering": ("typescript", "json"),
    "turns": ("strict", "any"),
    "thoughts": ("all", "turn", "none"),
    "binding": ("none", "prefix"),
    "forced_choice": ("accepted", "not_thinking", "refused"),
    "thinks": ("asked", "unasked"),
    "sampling": ("free", "fixed"),
    "prefill": ("accepted", "refused"),
    "tool_changes": ("accepted", "refused"),
}
_RULES: Final = ("tiles", "patches", "fixed")
_SECTIONS: Final = ("families", "images", "thinking")
_THINKING_KEYS: Final = ("models", "reads", "account")
_ACCOUNTS: Final = ("any", "own")
_WIRES: Final[Sequence[Wire]] = get_args(Wire)
#: what multiplies, or is counted: less than nothing of it makes no sense, as it does of what is added (a provider may
#: well add less than the family it is like)
_FACTORS: Final = frozenset(
    {
        "spread", "text", "result", "call", "called", "thinking", "inline", "sealed", "seal", "other", "tool_text",
        "schema", "audio_second", "pdf_page", "document",
    }
)  # fmt: skip
#: of an image rule: what is divided by, or shrunk to
_AT_LEAST_ONE: Final = frozenset({"patch", "cap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFamily:
    """One family. All numbers are tokens, or tokens for each token of the tokenizer's count.

    A factor (`text`, `result`, `call`, `thinking`, `other`, `tool_text`, `schema`) multiplies what the tokenizer says.
    """

    name: str
    models: tuple[str, ...] = ("*",)
    providers: tuple[str, ...] = ("*",)
    wires: tuple[str, ...] = ("*",)
    tokenizer: str = "o200k_base"
    exact: bool = False  # plain text is predicted to the token
    turns: Literal["strict", "any"] = "strict"  # strict: two messages of one role in a row may be refused
    #: prefix: a thinking block is valid only after the system prompt, tools and messages it was created after
    binding: Literal["none", "prefix"] = "none"
    #: whether a request may force a tool call: `not_thinking` refuses it while the model thinks
    forced_choice: Literal["accepted", "not_thinking", "refused"] = "accepted"
    #: whether the model thinks only where a request asks for it, or also where it says nothing
    thinks: Literal["asked", "unasked"] = "asked"
    #: fixed: a request is refused that sets temperature, top_p or top_k to another value than the default
    sampling: Literal["free", "fixed"] = "free"
    #: whether the last message may be the beginning of the response
    prefill: Literal["accepted", "refused"] = "accepted"
    #: whether a system message in the middle of the conversation may withdraw tools or offer them again
    tool_changes: Literal["accepted", "refused"] = "refused"
    #: how far the provider's figure may lie above the estimate while nothing is learned, as a share of the estimate
    spread: float = 0.02

    start: float = 0.0  # each request
    system: float = 0.0  # having a system text
    text: float = 1.0
    result: float = 1.0
    call: float = 1.0
    called: float = 0.0  # the name of a called tool, which some providers repeat above its result
    thinking: float = 1.0
    inline: float = 1.0  # thinking inside an assistant's text
    thoughts: Literal["all", "turn", "none"] = "all"  # which earlier thinking the provider keeps
    sealed: float = 0.0  # a character of sealed reasoning
    seal: float = 0.0  # characters of each sealed piece that weigh nothing
    other: float = 1.5
    message: float = 4.0
    per_call: float = 0.0
    per_result: float = 0.0
    parallel: float = 0.0  # each call of a message beyond its first

    rendering: Literal["typescript", "json"] = "json"
    tool_text: float = 1.0
    per_tool: float = 0.0
    tools: float = 0.0  # having tools
    tools_system: float | None = None  # having tools and a system text, where it differs
    forced: float = 0.0  # a tool must be called
    forced_name: float = 0.0  # a named tool must be called
    schema: float = 1.0
    with_schema: float = 0.0  # having a schema
    thinking_on: float = 0.0  # thinking is asked for

    image: ImageRule = COMMON_RULE
    audio_second: float = 10.0
    pdf_page: float = 250.0
    document: float = 0.0  # what stands round a text document
    server_tool: float = 0.0  # a tool the provider runs


class TokenizerFamilies:
    """The table; looks a family up by model, provider and wire format."""

    def __init__(
        self,
        families: Sequence[TokenizerFamily],
        images: Sequence[tuple[tuple[str, ...], ImageRule]] = (),
        thinking: ThinkingRules | None = None,
    ) -> None:
        self.thinking = thinking or ThinkingRules()
        self._families = tuple(families)
        self._images = tuple(images)
        self._known: dict[tuple[str, str, str], TokenizerFamily] = {}

    def of(self, model: str, provider: str, wire: str) -> TokenizerFamily:
        """The first family that fits a request; default numbers, named `unknown`, where none does."""
        key = (model, provider, wire)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _KNOWN_LIMIT:  # model names are the clients' to choose
                self._known.clear()
            found = self._known[key] = self._look_up(model.lower(), provider.lower(), wire)
        return found

    def _look_up(self, model: str, provider: str, wire: str) -> TokenizerFamily:
        names = (model, model.rpartition("/")[2])
        chosen = next((item for item in self._families if _fits(item, names, provider, wire)), None)
        image = next((rule for patterns, rule in self._images if _any(patterns, names)), COMMON_RULE)
        return replace(chosen or TokenizerFamily(name="unknown"), image=image)

    def __iter__(self) -> Iterator[TokenizerFamily]:
        return iter(self._families)


def _fits(family: TokenizerFamily, names: Sequence[str], provider: str, wire: str) -> bool:
    return _any(family.wires, (wire,)) and _any(family.providers, (provider,)) and _any(family.models, names)


def _any(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def families_from(table: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> TokenizerFamilies:
    """The families of a decoded table.

    Args:
        table: `families`: name -> numbers, in order; `like: NAME` starts from an earlier family's numbers.
            `images`: name -> image rule with the `models` it holds for, in order.
            `thinking`: name -> what the `models` of these patterns do with thinking blocks, in order.
        own: another such table, which is asked first; its families may be `like` those of the other one.

    Raises:
        ConfigError: with every problem found, the keys of `own` as they stand there.
    """
    problems: list[str] = []
    found, images, thinking = _read(table, {}, problems)
    first, first_images, first_thinking = _read(own, found, problems) if own is not None else ({}, [], [])
    if problems:
        raise ConfigError(problems)
    rules = ThinkingRules([*first_thinking, *thinking])
    return TokenizerFamilies((*first.values(), *found.values()), (*first_images, *images), rules)


_Images = list[tuple[tuple[str, ...], ImageRule]]


def _read(
    table: Mapping[str, Any], known: Mapping[str, TokenizerFamily], problems: list[str]
) -> tuple[dict[str, TokenizerFamily], _Images, list[ThinkingRule]]:
    """Return the families, image rules and thinking rules of one table; `known`: families of another one."""
    problems += [f"{key}: there is no such key" for key in table if key not in _SECTIONS]
    found: dict[str, TokenizerFamily] = {}
    for name, row in _rows(table, "families", problems):
        base = found.get(str(row.get("like"))) or known.get(str(row.get("like")))
        if "like" in row and base is None:
            problems.append(f"families.{name}.like: there is no family {row['like']!r} above this one")
        found[name] = _family(name, row, base or TokenizerFamily(name=""), problems)
    images = [
        (_models(f"images.{name}", row, problems), _image_rule(f"images.{name}", row, problems))
        for name, row in _rows(table, "images", problems)
    ]
    thinking = [_thinking_rule(f"thinking.{name}", row, problems) for name, row in _rows(table, "thinking", problems)]
    return found, images, thinking


def _thinking_rule(path: str, row: Mapping[str, Any], problems: list[str]) -> ThinkingRule:
    problems += [f"{path}.{key}: there is no such key" for key in row if key not in _THINKING_KEYS]
    account = row.get("account", "any")
    if account not in _ACCOUNTS:
        problems.append(f"{path}.account: must be one of {', '.join(_ACCOUNTS)}")
    reads = row.get("reads", "*")
    if (problem := _no_patterns("reads", reads)) is not None:
        problems.append(f"{path}.reads: {problem}")
        reads = "*"
    return ThinkingRule(
        models=_models(path, row, problems), reads=_patterns(reads), account="own" if account == "own" else "any"
    )


def _rows(table: Mapping[str, Any], section: str, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = table.get(section, {})
    if not isinstance(rows, Mapping):
        problems.append(f"{section}: must hold keys and values, not {type(rows).__name__}")
        return
    for name, row in rows.items():
        if isinstance(row, Mapping):
            yield str(name), row
        else:
            problems.append(f"{section}.{name}: must hold keys and values, not {type(row).__name__}")


def _models(path: str, row: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    models = row.get("models", "*")
    if (problem := _no_patterns("models", models)) is not None:
        problems.append(f"{path}.models: {problem}")
        return ()
    return _patterns(models)


def _patterns(value: object) -> tuple[str, ...]:
    return tuple(str(pattern).lower() for pattern in (value if isinstance(value, list) else [value]))


def _no_patterns(key: str, value: object) -> str | None:
    """Why a value is no list of patterns; None where it is one."""
    listed = value if isinstance(value, list) else [value]
    patterns = [pattern for pattern in listed if isinstance(pattern, str) and pattern]
    if not patterns or len(patterns) < len(listed):
        return "must be a pattern such as my-model-*, or a list of patterns"
    unknown = [one for one in patterns if key == "wires" and not any(fnmatchcase(wire, one) for wire in _WIRES)]
    return f"{unknown[0]} is none of {', '.join(_WIRES)}" if unknown else None


def _family(name: str, row: Mapping[str, Any], base: TokenizerFamily, problems: list[str]) -> TokenizerFamily:
    # Patterns are a family's own: one that is like another is for other models.
    changes: dict[str, Any] = {"name": name, "models": ("*",), "providers": ("*",), "wires": ("*",)}
    for key, value in row.items():
        if key == "like":
            continue
        problem = _problem(str(key), value)
        if problem:
            problems.append(f"families.{name}.{key}: {problem}")
        else:
            changes[key] = _patterns(value) if key in _LISTS else value
    return replace(base, **changes)


def _problem(key: str, value: object) -> str | None:
    """What is wrong with one key of a family, or None."""
    kind = _FIELDS.get(key)
    if kind is None or key in ("name", "image"):
        return "there is no such key"
    if key in _LISTS:
        return _no_patterns(key, value)
    if key in _CHOICES:
        return None if value in _CHOICES[key] else f"must be one of {', '.join(_CHOICES[key])}"
    if kind in ("str", "bool"):
        return None if type(value).__name__ == kind else f"must be {'a text' if kind == 'str' else 'true or false'}"
    if kind.startswith("float") and not _is_number(value):
        return "must be a number"
    return "must be 0 or more" if key in _FACTORS and float(str(value)) < 0 else None


def _image_rule(path: str, row: Mapping[str, Any], problems: list[str]) -> ImageRule:
    values = {key: value for key, value in row.items() if key != "models"}
    wrong = {"rule": f"must be one of {', '.join(_RULES)}"} if values.get("rule") not in _RULES else {}
    for key, value in values.items():
        least = 1 if key in _AT_LEAST_ONE else 0
        if key not in _IMAGE_FIELDS:
            wrong[key] = "there is no such key"
        elif key != "rule" and not (_is_number(value) and value >= least):
            wrong[key] = f"must be a number of {least} or more"
    problems += [f"{path}.{key}: {problem}" for key, problem in wrong.items()]
    return ImageRule() if wrong else ImageRule(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # noqa: PLR2004  # no inf, no nan


_FIELDS: Final = {item.name: str(item.type) for item in fields(TokenizerFamily)}
_IMAGE_FIELDS: Final = frozenset(item.name for item in fields(ImageRule))
