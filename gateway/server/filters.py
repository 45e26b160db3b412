"""Choose the sessions and calls of a list by client key, model, status, agent, tag and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gateway.core.record import FAILED, CallRecord
from gateway.core.stored import Page, Sort
from gateway.server.auth import Access
from gateway.server.usage import time_of

#: newest calls that a list with filters reads
MOST_READ: Final = 5_000
#: the status of calls with any of the outcomes `FAILED`
FAILED_STATUS: Final = "failed"
#: the parameters by which the records of calls are compared
CALL_FILTERS: Final = ("model", "status", "agent", "tag", "from", "to")
_NEVER: Final = float("inf")


class CallFilter(NamedTuple):
    """What the listed calls have in common. Empty texts match every call. Times are Unix seconds."""

    model: str = ""
    status: str = ""
    agent: str = ""
    tag: str = ""
    since: float = 0.0
    until: float = _NEVER

    def matches(self, record: CallRecord) -> bool:
        """Return whether a call has all the wanted values."""
        return (
            self.since <= record.started_at < self.until
            and self.model in ("", record.model)
            and self.tag in ("", record.labels.get("tag"))
            and (not self.agent or self.agent in _agent_names(record))
            and (not self.status or self.status in _statuses(record))
        )


def _agent_names(record: CallRecord) -> tuple[str | None, ...]:
    return (record.agent.id, record.agent.type) if record.agent is not None else ()


def _statuses(record: CallRecord) -> tuple[str | None, ...]:
    failed = FAILED_STATUS if record.outcome in FAILED else None
    return record.outcome, failed, record.error_code, str(record.status)


def call_filter_of(asked: Mapping[str, str]) -> CallFilter | None:
    """Return the filter that the parameters of a request ask for; None without one.

    Raises:
        InvalidRequest: a time is invalid.
    """
    if not any(asked.get(name) for name in CALL_FILTERS):
        return None
    texts = {name: asked.get(name, "") for name in ("model", "status", "agent", "tag")}
    return CallFilter(**texts, since=_time(asked, "from", 0.0), until=_time(asked, "to", _NEVER))


def namespaces_of(asked: Mapping[str, str], access: Access) -> Sequence[str | None]:
    """Return the namespace to list (None: all of them), or nothing if the caller may not see the wanted client key."""
    key = asked.get("key") or access.namespace
    return [key] if access.namespace in (None, key) else []


def called_since(page: Page, asked: Mapping[str, str], sort: Sort) -> Page:
    """Return the sessions of a page whose last call is not before the time `from`.

    Sorted by last call, the list ends with a page that has only older sessions.

    Raises:
        InvalidRequest: the time is invalid.
    """
    since = _time(asked, "from", 0.0)
    found = [view for view in page.sessions if view.last_call_at >= since]
    is_end = sort == "recent" and not found
    return Page(found, None if is_end else page.cursor)


def _time(asked: Mapping[str, str], name: str, default: float) -> float:
    return time_of(asked, name, default) if asked.get(name) else default
