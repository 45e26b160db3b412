"""A session that counts in its state how often it was changed."""

from __future__ import annotations

from dataclasses import replace

from gateway.core.record import CallRecord
from gateway.core.session import Places, SessionState, with_agent_step
from gateway.core.steps import StepState
from gateway.core.stored import StepEnding

_AGENT = "counts"


def number_in(places: Places) -> int:
    return places[_AGENT].index if _AGENT in places else 0


def _one_more(places: Places) -> Places:
    return with_agent_step(places, _AGENT, StepState(None, number_in(places) + 1))


def counts(state: SessionState) -> SessionState:
    """Counts how often it was applied."""
    return state.with_steps(_one_more(state.steps))


def counts_apart(state: SessionState) -> SessionState:
    """Counts in the part of the state that the end of a call leaves as it is."""
    return replace(state, trim_decisions={"n": {"prefix": "n", "number": number_apart(state) + 1}})


def number_apart(state: SessionState) -> int:
    number: int = state.trim_decisions["n"]["number"] if "n" in state.trim_decisions else 0
    return number


def ending(record: CallRecord) -> StepEnding:
    """Counts in the session's steps, and says in the record how far."""

    def end(places: Places) -> tuple[Places, CallRecord]:
        after = _one_more(places)
        return after, replace(record, notes={"number": str(number_in(after))})

    return end
