"""Define steps: named modes of work that decide which tools a call may use."""

from __future__ import annotations

from gateway.core.steps.conditions import (
    MOST_RECENT,
    BudgetBelow,
    Condition,
    ConditionFacts,
    MessageMatches,
    NotRecentlyUsed,
    Patterns,
    SequenceMatch,
    TokensAbove,
    ToolUsed,
    matches_any,
)
from gateway.core.steps.machine import DEFAULT_AGENT, Agent, Enforce, Step, StepChange, StepState, Used

__all__ = [
    "DEFAULT_AGENT",
    "MOST_RECENT",
    "Agent",
    "BudgetBelow",
    "Condition",
    "ConditionFacts",
    "Enforce",
    "MessageMatches",
    "NotRecentlyUsed",
    "Patterns",
    "SequenceMatch",
    "Step",
    "StepChange",
    "StepState",
    "TokensAbove",
    "ToolUsed",
    "Used",
    "matches_any",
]
