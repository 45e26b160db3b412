"""Define the settings of `steps:`, in gateway.yaml and in the files of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from gateway.config.section import MOST_TOKENS, Positive, Section
from gateway.core.identity import ID_FORM, is_valid
from gateway.core.routing import is_pattern
from gateway.core.steps import MOST_RECENT, matches_any

#: characters at the end of a message that are searched
_MOST_CHARACTERS: Final = 16 * 1024
#: longest search in seconds; a pattern that takes longer counts as not found
_MOST_S: Final = 0.02
#: messages whose search result is cached
_MOST_MESSAGES: Final = 8
_MOST_STEPS: Final = 64

Patterns = tuple[str, ...]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _each_one_or_many(value: Any) -> Any:
    return [_one_or_many(entry) for entry in value] if isinstance(value, list) else value


def _without_window(value: Any) -> Any:
    """Convert a tool, or a list of tools, into a `ToolWindow` with the default window."""
    return {"tools": value} if isinstance(value, str | list) else value


def check_entries(entries: tuple[Patterns, ...]) -> tuple[Patterns, ...]:
    """Return the entries of a sequence.

    Raises:
        ValueError: an entry names no tool.
    """
    if not all(entry and all(entry) for entry in entries):
        raise ValueError("an entry names no tool")
    return entries


# These types describe the short forms in the JSON Schema.
_Short = str | list[str]
_Written = list[_Short]
_ENTRIES: Final = AfterValidator(check_entries)
#: tools in order; each entry is a tool or a list of alternatives
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
    """Tools, and the number of last used tools that are searched for them."""

    tools: Annotated[
        Patterns,
        Field(min_length=1),
        BeforeValidator(_one_or_many, json_schema_input_type=str | Annotated[list[str], Field(min_length=1)]),
    ] = Field(description="Shell patterns of tools; one match is enough.")
    window: int = Field(MOST_RECENT, ge=1, le=MOST_RECENT, description="Number of last used tools that are checked.")


Window = Annotated[ToolWindow, BeforeValidator(_without_window, json_schema_input_type=_Short | ToolWindow)]


class StepCondition(Section):
    """A condition of a step. All keys that are set must be met."""

    tool_used: Window | None = Field(None, description="One of these tools was used.")
    not_recently_used: Window | None = Field(None, description="None of these tools was used.")
    sequence_match: LastTools | None = Field(
        None, description="The last used tools are these, in order. An entry may be a list of alternatives."
    )
    message_matches: str | None = Field(
        None,
        description="Regular expression that is found in the last 16,384 characters of the newest user message.",
    )
    tokens_above: int | None = Field(
        None, ge=0, le=MOST_TOKENS, description="The request has more input tokens than this."
    )
    budget_below: float | None = Field(
        None, gt=0, le=1, description="Less than this share, 0 to 1, is left of the most used budget."
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

    allowed: Patterns | None = Field(None, description="Tools that may be called; null: all; an empty list: none.")
    denied: Patterns = Field((), description="Tools that may not be called, even if they are allowed.")


class StepRow(Section):
    """One step."""

    name: str = Field(description="Name of the step, shown in headers.")
    description: str = Field("", max_length=2000, description="Description for people.")
    is_default: bool = Field(default=False, description="Make this the active step if no other one holds.")
    conditions: tuple[StepCondition, ...] = Field((), description="Conditions of the step. All must be met.")
    available_tools: AvailableTools = Field(AvailableTools(), description="Tools that may be called in this step.")
    sequence: Sequence = Field(
        (), description="Tools in the order in which they are due. An entry may be a list of alternatives."
    )
    enforce: Literal["filter", "require", "reject", "observe"] = Field(
        "filter",
        description="filter: offer only allowed tools to the model; require: also force a call of the due tool; "
        "reject: refuse requests that offer other tools; observe: only record and warn.",
    )
    context_budget: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Most input tokens of a call, if lower than its context budget."
    )
    model: str | None = Field(None, description="Model to call instead of the requested one.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Most output tokens of a call, if lower than its own limit."
    )
    max_seconds: Positive | None = Field(
        None,
        description="Longest time in seconds that the step may last without a new user message. Later calls are "
        "refused (400 session_stopped).",
    )

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

    steps: tuple[StepRow, ...] = Field(min_length=1, description="Steps in order. The first one that holds is active.")

    @field_validator("steps")
    @classmethod
    def _steps(cls, value: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
        return check_steps(value)


def _no_path(value: Any) -> Any:
    """Refuse a path, because `load` replaces paths by the content of their files before validation.

    Raises:
        ValueError: the value is still a path.
    """
    if isinstance(value, str):
        raise ValueError("is a path whose file was not read")  # noqa: TRY004  # pydantic takes ValueErrors
    return value


#: the steps of an agent, or the path of a file that holds them
AgentFile = Annotated[AgentSteps, BeforeValidator(_no_path, json_schema_input_type=str | AgentSteps)]


def _is_barred(tool: str, available: AvailableTools) -> bool:
    """Return whether a step certainly does not allow a tool.

    A pattern is only certain if the same pattern is denied.
    """
    if is_pattern(tool):
        return tool in available.denied or "*" in available.denied or available.allowed == ()
    return matches_any(tool, available.denied) or (
        available.allowed is not None and not matches_any(tool, available.allowed)
    )


def check_steps(rows: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
    """Return the steps.

    Raises:
        ValueError: the steps contradict each other.
    """
    if len(rows) > _MOST_STEPS:
        raise ValueError(f"there are more than {_MOST_STEPS} steps")
    if (twice := _repeated_name(row.name for row in rows)) is not None:
        raise ValueError(f"two steps have the name {twice}")
    if sum(row.is_default for row in rows) > 1:
        raise ValueError("there is more than one default step")
    others = [row for row in rows if not row.is_default]
    always = next((row for row in others[:-1] if not row.conditions), None)
    if always is not None:
        raise ValueError(
            f"the step {always.name} has no conditions, so later steps would never be active; add conditions, put it "
            "last, or set is_default: true"
        )
    return rows


def _repeated_name(names: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that searches a text for a pattern.

    A search that takes too long counts as not found, because the client chooses the text.

    Raises:
        ValueError: the pattern is not a valid regular expression.
    """
    import regex  # noqa: PLC0415  # only needed for such a condition

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"is not a valid regular expression: {error}") from None
    except RecursionError:
        raise ValueError("is not a valid regular expression: it is nested too deeply") from None

    # The same message is searched for each tool of its turn, and a pattern may be slow.
    @lru_cache(_MOST_MESSAGES)
    def matches(text: str) -> bool:
        try:
            return compiled.search(text, timeout=_MOST_S) is not None
        except TimeoutError:
            return False

    return lambda text: matches(text[-_MOST_CHARACTERS:])
