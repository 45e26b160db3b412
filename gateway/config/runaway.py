"""Define the settings under `runaway:`."""

from __future__ import annotations

from typing import Final

from pydantic import Field

from gateway.config.section import Section

_MOST: Final = 2**31
_REFUSE: Final = "Refuse calls from this number (400 session_stopped); null: never."


class LoopLimits(Section):
    """How often the same calls may have the same results in a row."""

    warn: int | None = Field(4, ge=2, le=_MOST, description="Warn from this number of repetitions; null: never.")
    refuse: int | None = Field(None, ge=2, le=_MOST, description=_REFUSE)


class ProgressLimits(Section):
    """How many rounds in a row may repeat earlier calls with the same results."""

    warn: int | None = Field(8, ge=2, le=_MOST, description="Warn from this number of rounds; null: never.")
    refuse: int | None = Field(None, ge=2, le=_MOST, description=_REFUSE)


class RoundLimits(Section):
    """How many rounds may pass without a new user message."""

    warn: int | None = Field(200, ge=2, le=_MOST, description="Warn from this number of rounds; null: never.")
    refuse: int | None = Field(None, ge=2, le=_MOST, description=_REFUSE)


class Runaway(Section):
    """When an agent that repeats itself, or works alone for long, is warned and stopped."""

    loop: LoopLimits = Field(
        LoopLimits(),
        description="The same calls have the same results, this many times in a row. Cycles of up to 6 rounds count.",
    )
    no_progress: ProgressLimits = Field(
        ProgressLimits(),
        description="This many rounds in a row repeat calls of the last 32 rounds, with the same results.",
    )
    rounds: RoundLimits = Field(RoundLimits(), description="This many rounds pass without a new user message.")
