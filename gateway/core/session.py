"""What a session remembers besides its totals: what was decided about its conversations, and its last reported turn.

Changed by pure functions only; a store applies them to what it holds, and again if somebody else was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.core.counting.calibration import LastTurn

#: Conversations of one session that are remembered: the agent's own, and those of a few helpers that share its id.
MAX_EPOCHS: Final = 8


@dataclass(frozen=True, slots=True)
class SessionState:
    """The fitted beginnings of a session's conversations, as `Epoch.to_json` gives them, by prefix; the newest last."""

    epochs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def with_epoch(self, epoch: Mapping[str, Any], *, instead_of: str | None = None) -> SessionState:
        """This state with one more epoch, `instead_of` the one it goes on from; the oldest give way."""
        kept = {prefix: old for prefix, old in self.epochs.items() if prefix not in (instead_of, epoch["prefix"])}
        kept[epoch["prefix"]] = epoch
        return replace(self, epochs=dict(list(kept.items())[-MAX_EPOCHS:]))


Change = Callable[[SessionState], SessionState]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a call needs to know of its session before it is planned."""

    state: SessionState = SessionState()
    last_turn: LastTurn | None = None
