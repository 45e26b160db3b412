"""Define the settings of what is kept longer or shorter than sessions: call records, usage and changes."""

from __future__ import annotations

from pydantic import Field

from gateway.config.section import LARGEST, Duration, Section, duration


class CallSettings(Section):
    """How long call records are kept. Totals, budgets and usage do not change when a record is deleted."""

    keep: Duration | None = Field(
        None,
        description="A call record is deleted this long after its call began, such as 7d. null: together with its "
        "session. The least is twice budget.lease_s, the most sessions.ttl. A deleted call cannot be shown, and no "
        "later call can continue its response.",
    )
    per_session: int | None = Field(
        None,
        ge=10,
        le=LARGEST,
        description="Most call records of a session; the oldest are deleted. null: 1,000 in Redis and memory, any "
        "number in SQLite, which deletes them once an hour.",
    )

    @property
    def keep_s(self) -> int | None:
        """Return `keep` in seconds."""
        return duration(self.keep) if self.keep is not None else None


class UsageSettings(Section):
    """How long usage by hour and by day is kept."""

    keep_hours: Duration = Field("60d", description="Usage by hour is deleted this long after its hour.")
    keep_days: Duration = Field("800d", description="Usage by day is deleted this long after its day.")


class AuditSettings(Section):
    """How long the audit log is kept."""

    keep: Duration = Field(
        "365d",
        description="An entry of the audit log is deleted this long after the change. At most the newest 10,000 are "
        "kept.",
    )
