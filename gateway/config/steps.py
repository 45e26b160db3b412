"""Define the settings of `steps:`, also in the files of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from gateway.config.section import MOST_TOKENS, Section
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.routing import is_pattern
from gateway.core.steps import MOST_RECENT, is_any

#: characters of a message that are looked at, from its end
_MOST_CHARACTERS: Final = 16 * 1024
#: seconds to look for a pattern; a pattern that takes longer is not found
_MOST_S: Final = 0.02
#: messages for which it is remembered whether a pattern was found
_MOST_MESSAGES: Final = 8
_MOST_STEPS: Final = 64

Patterns = tuple[str, ...]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _each_one_or_many(value: Any) -> Any:
    return [_one_or_many(entry) for entry in value] if isinstance(value, list) else value


def _without_window(value: Any) -> Any:
    """A name, or names, without a window."""
    return {"tools": value} if isinstance(value, str | list) else value


def check_entries(entries: tuple[Patterns, ...]) -> tuple[Patterns, ...]:
    """The entries of a sequence, if each can be met.

    Raises:
        ValueError: one names no tool.
    """
    if not all(entry and all(entry) for entry in entries):
        raise ValueError("an entry names no tool")
    return entries


# What the JSON Schema is told as well: how each may be written, short forms among them.
_Short = str | list[str]
_Written = list[_Short]
_ENTRIES: Final = AfterValidator(check_entries)
#: tools in an order; each entry is one, or a list of alternatives
Sequence = Annotated[
    tuple[Patterns, ...],
    Field(max_length=256),
    BeforeValidator(_each_one_or_many, json_schema_input_type=Annotated[_Written, Field(max_length=256)]),
    _ENTRIES,
]
LastTools = Annotated[
    tuple[Patterns, ...],
    Field(min_length=1, max_length=MOST_RECENT),
    BeforeValidator(
        _each_one_or_many,
        json_schema_input_type=Annotated[_Written, Field(min_length=1, max_length=MOST_RECENT)],
    ),
    _ENTRIES,
]


class ToolWindow(Section):
    """Tools, and among how many of those used last they are looked for."""

    tools: Annotated[
        Patterns,
        Field(min_length=1),
        BeforeValidator(_one_or_many, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)]),
    ] = Field(description="Tools, by shell patterns; any of them.")
    window: int = Field(MOST_RECENT, ge=1, le=MOST_RECENT, description="Among so many tools used last.")


Window = Annotated[ToolWindow, BeforeValidator(_without_window, json_schema_input_type=_Short | ToolWindow)]


class StepCondition(Section):
    """What must be so. All that is named here must."""

    tool_used: Window | None = Field(None, description="One of these tools was used.")
    not_recently_used: Window | None = Field(None, description="None of these tools was used.")
    sequence_match: LastTools | None = Field(None, description="The tools used last, in order; entries may be lists.")
    message_matches: str | None = Field(
        None,
        description="A regular expression that is found in the newest user message, in its last 16,384 characters.",
    )
    tokens_above: int | None = Field(
        None, ge=0, le=MOST_TOKENS, description="The request weighs more input tokens than this."
    )
    budget_below: float | None = Field(
        None, gt=0, le=1, description="Less than this share is left of the narrowest budget."
    )

    @field_validator("message_matches")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        if value is not None:
            matcher(value)
        return value

    @model_validator(mode="after")
    def _some(self) -> StepCondition:
        if all(value is None for _, value in self):
            raise ValueError(f"name one of {', '.join(type(self).model_fields)}")
        return self


class AvailableTools(Section):
    """The tools of a step, by shell patterns."""

    allowed: Patterns | None = Field(None, description="It may call these; null: all. An empty list: none.")
    denied: Patterns = Field((), description="It may not call these, even if they are allowed.")


class StepRow(Section):
    """One step."""

    name: str = Field(description="Its name, as headers show it.")
    description: str = Field("", max_length=2000, description="For people.")
    is_default: bool = Field(default=False, description="The step to be in where no other holds.")
    conditions: tuple[StepCondition, ...] = Field((), description="All must hold.")
    available_tools: AvailableTools = Field(AvailableTools(), description="The tools that may be called in it.")
    sequence: Sequence = Field(
        (), description="Tools in the order they are due; an entry may be a list of alternatives."
    )
    enforce: Literal["filter", "require", "reject", "observe"] = Field(
        "filter",
        description="filter: only what may be called now is offered to the model; require: and what is due must be "
        "called; reject: a request that offers anything else is refused; observe: nothing but a record and a warning.",
    )
    context_budget: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Input tokens of a call, if lower.")
    model: str | None = Field(None, description="The model to call instead of the one that is asked for.")
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Tokens of an answer, if lower.")

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not is_valid(value):
            raise ValueError(f"use {ID_FORM}")
        return value

    @model_validator(mode="after")
    def _can_be_done(self) -> StepRow:
        for entry in self.sequence:
            if all(_is_barred(tool, self.available_tools) for tool in entry):
                raise ValueError(f"its sequence has {' or '.join(entry)}, which its available_tools do not allow")
        return self


class AgentSteps(Section):
    """The steps of one agent."""

    steps: tuple[StepRow, ...] = Field(min_length=1, description="The first that holds is the active one.")

    @field_validator("steps")
    @classmethod
    def _steps(cls, value: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
        return check_steps(value)


def _no_path(value: Any) -> Any:
    """What stands in a file is read before anything is checked, see `load`.

    Raises:
        ValueError: it is still a path.
    """
    if isinstance(value, str):
        raise ValueError("is a path, and nothing was read from there")  # noqa: TRY004  # pydantic takes ValueErrors
    return value


#: the steps of an agent, or the path of a file that holds them
AgentFile = Annotated[AgentSteps, BeforeValidator(_no_path, json_schema_input_type=str | AgentSteps)]


def _is_barred(tool: str, available: AvailableTools) -> bool:
    """Whether a step surely may not call it; of a pattern only the denial of the same pattern is sure."""
    if is_pattern(tool):
        return tool in available.denied or "*" in available.denied or available.allowed == ()
    return is_any(tool, available.denied) or (available.allowed is not None and not is_any(tool, available.allowed))


def check_steps(rows: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
    """The steps, if they go together.

    Raises:
        ValueError: they do not.
    """
    if len(rows) > _MOST_STEPS:
        raise ValueError(f"there are more than {_MOST_STEPS} steps")
    if (twice := _twice(row.name for row in rows)) is not None:
        raise ValueError(f"two steps have the name {twice}")
    if sum(row.is_default for row in rows) > 1:
        raise ValueError("there is more than one default step")
    others = [row for row in rows if not row.is_default]
    always = next((row for row in others[:-1] if not row.conditions), None)
    if always is not None:
        raise ValueError(
            f"the step {always.name} has no conditions, so that those behind it would never be active; give it some, "
            "put it last, or say is_default: true"
        )
    return rows


def _twice(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether the pattern is found in a text. A search that takes too long finds nothing: a client chooses the text.

    Raises:
        ValueError: it is no regular expression.
    """
    import regex  # noqa: PLC0415  # only where a step has such a condition

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    except RecursionError:
        raise ValueError("is no regular expression: it is nested too deep") from None

    # The same message is looked at again for each tool of its turn, and a pattern may be slow.
    @lru_cache(_MOST_MESSAGES)
    def is_in(text: str) -> bool:
        try:
            return compiled.search(text, timeout=_MOST_S) is not None
        except TimeoutError:
            return False

    return lambda text: is_in(text[-_MOST_CHARACTERS:])
