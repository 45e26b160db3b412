"""Define how long a store keeps sessions, call records, roll-ups of usage and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.core.rollup import Period
from gateway.core.values import dataclass

_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a store keeps its data.

    Attributes:
        sessions_s: seconds for which sessions are kept after their last call.
        hours_s: seconds for which usage by hour is kept.
        days_s: seconds for which usage by day is kept.
        calls_s: seconds for which call records are kept; None: as long as sessions.
        calls_per_session: the newest records that are kept of each session; None: the limit of the store.
        changes_s: seconds for which the audit log is kept.
    """

    sessions_s: float = 30 * _DAY_S
    hours_s: float = 60 * _DAY_S
    days_s: float = 800 * _DAY_S
    calls_s: float | None = None
    calls_per_session: int | None = None
    changes_s: float = 365 * _DAY_S

    @property
    def usage_s(self) -> Mapping[Period, float]:
        """Return the seconds for which roll-ups are kept."""
        return {"hour": self.hours_s, "day": self.days_s}

    def calls_before(self, sessions_before: float, now: float) -> float:
        """Return the Unix time before which calls are deleted, if old sessions are those before `sessions_before`."""
        return sessions_before if self.calls_s is None else max(sessions_before, now - self.calls_s)


DEFAULT_RETENTION: Final = Retention()
