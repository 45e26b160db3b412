from __future__ import annotations

import pytest

from gateway.core.session import SessionState
from gateway.core.steps import StepState
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.stores import states

FULL = SessionState(
    trim_decisions={
        "a1": TrimDecision("a1", 3, "d2 k1", None).to_json(),
        "b2": TrimDecision("b2", 1, "k1", "s1").to_json(),
    },
    summaries={"s1": "what was said"},
    parent="parent",
    steps={"default": StepState("work", 2, ("read", "write"), is_set=True), "writer": StepState()},
)


def test_a_state_is_read_as_it_was_written() -> None:
    for state in (SessionState(), FULL):
        value = states.written(state)
        assert states.read(value) == state
        # Another process decodes these bytes: the space makes them unknown to the cache.
        assert states.read(value + b" ") == state


def test_what_was_read_before_is_not_read_again() -> None:
    value = states.written(FULL)
    assert states.read(value) is states.read(bytes(bytearray(value)))


@pytest.mark.parametrize("value", [None, 7, "text", b"", b"{", b"[]", b'{"epochs": 7}', b'{"steps":{"a":1}}', b"\xff"])
def test_invalid_state_is_ignored(value: object) -> None:
    assert states.read(value) == SessionState()
