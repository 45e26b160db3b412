"""Read model families from config/families.yaml: token overheads, and requests that their models refuse.

- The family of a request is the first in the list whose patterns match its model, provider and wire format.
- Its image rule is the first match in a separate list, because the models of one family count images differently.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

from gateway.core.counting.images import COMMON_RULE, ImageRule
from gateway.core.counting.measure import Wire
from gateway.core.errors import ConfigError
from gateway.core.thinking_origin import ThinkingRule, ThinkingRules
from gateway.core.values import dataclass

#: maximum number of cached results of `TokenizerFamilies.find`
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
    "task_budget": ("accepted", "refused"),
}
_RULES: Final = ("tiles", "patches", "fixed")
_SECTIONS: Final = ("families", "images", "thinking")
_THINKING_KEYS: Final = ("models", "reads", "account")
_ACCOUNTS: Final = ("any", "own")
_WIRES: Final[Sequence[Wire]] = get_args(Wire)
#: Fields that multiply or count something, so they must not be negative. Fields that are added may be negative, because
#: a provider may add less than the family that it is based on (`like`).
_FACTORS: Final = frozenset(
    {
        "spread", "text", "result", "call", "called", "thinking", "inline", "sealed", "seal", "other", "tool_text",
        "schema", "audio_second", "pdf_page", "document",
    }
)  # fmt: skip
#: fields of an image rule that are divisors, or sizes to shrink to
_AT_LEAST_ONE: Final = frozenset({"patch", "cap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFamily:
    """The token overheads of one model family, in tokens, or in provider tokens per token of the tokenizer.

    The factors (`text`, `result`, `call`, `thinking`, `other`, `tool_text`, `schema`) multiply the count of the
    tokenizer.
    """

    name: str
    models: tuple[str, ...] = ("*",)
    providers: tuple[str, ...] = ("*",)
    wires: tuple[str, ...] = ("*",)
    tokenizer: str = "o200k_base"
    exact: bool = False  # the estimate of plain text is exact
    turns: Literal["strict", "any"] = "strict"  # strict: two messages of one role in a row may be refused
    #: `prefix`: a thinking block is only valid after the same system prompt, tools and messages as when it was created
    binding: Literal["none", "prefix"] = "none"
    #: whether a request may force a tool call; `not_thinking`: only while the model does not think
    forced_choice: Literal["accepted", "not_thinking", "refused"] = "accepted"
    #: whether the model thinks only if a request asks for it, or also by default
    thinks: Literal["asked", "unasked"] = "asked"
    #: `fixed`: a request is refused if temperature, top_p or top_k differs from the default
    sampling: Literal["free", "fixed"] = "free"
    #: whether the last message may be the start of the response
    prefill: Literal["accepted", "refused"] = "accepted"
    #: whether a system message in the middle of the conversation may withdraw tools or offer them again
    tool_changes: Literal["accepted", "refused"] = "refused"
    #: whether a request may say how many tokens the model has left (Claude's `task_budget`)
    task_budget: Literal["accepted", "refused"] = "refused"
    #: how far the reported tokens may exceed the estimate before anything is learned, as a share of the estimate
    spread: float = 0.02

    start: float = 0.0  # per request
    system: float = 0.0  # if there is a system prompt
    text: float = 1.0
    result: float = 1.0
    call: float = 1.0
    called: float = 0.0  # name of a called tool, which some providers repeat above its result
    thinking: float = 1.0
    inline: float = 1.0  # thinking inside an assistant's text
    thoughts: Literal["all", "turn", "none"] = "all"  # earlier thinking that the provider keeps
    sealed: float = 0.0  # per character of sealed (encrypted) reasoning
    seal: float = 0.0  # characters of each sealed piece that cost no tokens
    other: float = 1.5
    message: float = 4.0
    per_call: float = 0.0
    per_result: float = 0.0
    parallel: float = 0.0  # per call of a message after its first

    rendering: Literal["typescript", "json"] = "json"
    tool_text: float = 1.0
    per_tool: float = 0.0
    tools: float = 0.0  # if there are tools
    tools_system: float | None = None  # if there are tools and a system prompt; None: as `tools`
    forced: float = 0.0  # if some tool must be called
    forced_name: float = 0.0  # if a named tool must be called
    schema: float = 1.0
    with_schema: float = 0.0  # if there is a response schema
    thinking_on: float = 0.0  # if the request asks for thinking

    image: ImageRule = COMMON_RULE
    audio_second: float = 10.0
    pdf_page: float = 250.0
    document: float = 0.0  # markers around a text document
    server_tool: float = 0.0  # per tool that the provider runs


class TokenizerFamilies:
    """Look up the model family of a request by model, provider and wire format."""

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

    def find(self, model: str, provider: str, wire: str) -> TokenizerFamily:
        """Return the first family that matches, or default numbers under the name `unknown`."""
        key = (model, provider, wire)
        family = self._known.get(key)
        if family is None:
            if len(self._known) >= _KNOWN_LIMIT:  # clients choose the model names, so there may be many
                self._known.clear()
            family = self._known[key] = self._look_up(model.lower(), provider.lower(), wire)
        return family

    def _look_up(self, model: str, provider: str, wire: str) -> TokenizerFamily:
        names = (model, model.rpartition("/")[2])
        chosen = next((item for item in self._families if _matches(item, names, provider, wire)), None)
        image = next((rule for patterns, rule in self._images if _match_any(patterns, names)), COMMON_RULE)
        return replace(chosen or TokenizerFamily(name="unknown"), image=image)

    def __iter__(self) -> Iterator[TokenizerFamily]:
        return iter(self._families)


def _matches(family: TokenizerFamily, names: Sequence[str], provider: str, wire: str) -> bool:
    return (
        _match_any(family.wires, (wire,))
        and _match_any(family.providers, (provider,))
        and _match_any(family.models, names)
    )


def _match_any(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def families_from(
    table: Mapping[str, Any], own: Mapping[str, Any] | None = None, vocabularies: Collection[str] = ()
) -> TokenizerFamilies:
    """Read the families of a decoded table.

    Args:
        table: the table, with three sections.
            `families`: name -> numbers, in order; `like: NAME` starts from the numbers of an earlier family. The
            numbers under `vocabulary` replace others if the tokenizer that they name is one of `vocabularies`.
            `images`: name -> image rule and the `models` that it applies to, in order.
            `thinking`: name -> what the matching `models` do with thinking blocks, in order.
        own: a second table that is searched first; its families may be `like` families of the other table.
        vocabularies: the optional tokenizers that are installed.

    Raises:
        ConfigError: lists every problem, with the keys of `own` as written there.
    """
    problems: list[str] = []
    families, images, thinking = _read_table(table, {}, problems, vocabularies)
    own_families, own_images, own_thinking = _read_table(own or {}, families, problems, vocabularies)
    if problems:
        raise ConfigError(problems)
    rules = ThinkingRules([*own_thinking, *thinking])
    return TokenizerFamilies((*own_families.values(), *families.values()), (*own_images, *images), rules)


_Images = list[tuple[tuple[str, ...], ImageRule]]


def _read_table(
    table: Mapping[str, Any],
    known: Mapping[str, TokenizerFamily],
    problems: list[str],
    vocabularies: Collection[str],
) -> tuple[dict[str, TokenizerFamily], _Images, list[ThinkingRule]]:
    """Read one table; return its families, image rules and thinking rules.

    `known` holds the families of the other table.
    """
    problems += [f"{key}: there is no such key" for key in table if key not in _SECTIONS]
    families: dict[str, TokenizerFamily] = {}
    for name, row in _rows(table, "families", problems):
        base = families.get(str(row.get("like"))) or known.get(str(row.get("like")))
        if "like" in row and base is None:
            problems.append(f"families.{name}.like: there is no family {row['like']!r} above this one")
        families[name] = _family(name, row, base or TokenizerFamily(name=""), problems, vocabularies)
    images = [
        (_models(f"images.{name}", row, problems), _image_rule(f"images.{name}", row, problems))
        for name, row in _rows(table, "images", problems)
    ]
    thinking = [_thinking_rule(f"thinking.{name}", row, problems) for name, row in _rows(table, "thinking", problems)]
    return families, images, thinking


def _thinking_rule(path: str, row: Mapping[str, Any], problems: list[str]) -> ThinkingRule:
    problems += [f"{path}.{key}: there is no such key" for key in row if key not in _THINKING_KEYS]
    account = row.get("account", "any")
    if account not in _ACCOUNTS:
        problems.append(f"{path}.account: must be one of {', '.join(_ACCOUNTS)}")
    reads = row.get("reads", "*")
    if (problem := _pattern_problem("reads", reads)) is not None:
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
    if (problem := _pattern_problem("models", models)) is not None:
        problems.append(f"{path}.models: {problem}")
        return ()
    return _patterns(models)


def _patterns(value: object) -> tuple[str, ...]:
    return tuple(str(pattern).lower() for pattern in (value if isinstance(value, list) else [value]))


def _pattern_problem(key: str, value: object) -> str | None:
    """Return why a value is not a list of patterns, or None if it is one."""
    listed = value if isinstance(value, list) else [value]
    patterns = [pattern for pattern in listed if isinstance(pattern, str) and pattern]
    if not patterns or len(patterns) < len(listed):
        return "must be a pattern such as my-model-*, or a list of patterns"
    unknown = [one for one in patterns if key == "wires" and not any(fnmatchcase(wire, one) for wire in _WIRES)]
    return f"{unknown[0]} is none of {', '.join(_WIRES)}" if unknown else None


def _family(
    name: str, row: Mapping[str, Any], base: TokenizerFamily, problems: list[str], vocabularies: Collection[str]
) -> TokenizerFamily:
    # Patterns are not inherited: a family that is `like` another one is for other models.
    base = replace(base, name=name, models=("*",), providers=("*",), wires=("*",))
    numbers = {key: value for key, value in row.items() if key not in ("like", "vocabulary")}
    family = replace(base, **_changes(f"families.{name}", numbers, problems))
    counted_exactly = row.get("vocabulary", {})
    if not isinstance(counted_exactly, Mapping):
        problems.append(f"families.{name}.vocabulary: must hold keys and values, not {type(counted_exactly).__name__}")
        return family
    exact = replace(family, **_changes(f"families.{name}.vocabulary", counted_exactly, problems))
    return exact if exact.tokenizer in vocabularies else family


def _changes(path: str, numbers: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the valid keys of a family; add the problems of the others."""
    changes: dict[str, Any] = {}
    for key, value in numbers.items():
        problem = _key_problem(str(key), value)
        if problem:
            problems.append(f"{path}.{key}: {problem}")
        else:
            changes[key] = _patterns(value) if key in _LISTS else value
    return changes


def _key_problem(key: str, value: object) -> str | None:
    """Return what is wrong with one key of a family, or None."""
    kind = _FIELDS.get(key)
    if kind is None or key in ("name", "image"):
        return "there is no such key"
    if key in _LISTS:
        return _pattern_problem(key, value)
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
