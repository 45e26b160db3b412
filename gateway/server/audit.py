"""Record changes of administrators in the audit log, and show it: /api/audit."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.routing import Route as Path

from gateway.core import errors
from gateway.core.audit import Action, AuditEntry, Author
from gateway.core.ports import AuditLog
from gateway.core.times import time_text
from gateway.server.auth import Access, require_admin
from gateway.server.handling import ServerRules, json_handler, limit_of

logger = logging.getLogger("gateway")

_CURSOR: Final = re.compile(r"[0-9]{1,18}(-[0-9]{1,18})?")
#: longest text that is searched for: the name of a client key, a slash and a session id
_MOST_TARGET: Final = 512


class AuditApi:
    """The handler of the audit log. `store`: where it is; `rules`: returns the rules in force."""

    def __init__(self, store: AuditLog, rules: Callable[[], ServerRules]) -> None:
        self._store = store
        self._rules = rules

    def paths(self) -> list[Path]:
        """Return the routes."""
        return [Path("/api/audit", json_handler(self._rules, self.changes), methods=["GET"])]

    async def changes(self, request: Request, access: Access) -> Any:
        """GET /api/audit?limit=&cursor=&target=part of a name: return the changes, newest first."""
        require_admin(access)
        cursor, target = request.query_params.get("cursor"), request.query_params.get("target", "")
        if cursor is not None and not _CURSOR.fullmatch(cursor):
            raise errors.InvalidRequest("The cursor is invalid. Send one that this list returned.", param="cursor")
        if len(target) > _MOST_TARGET or not target.isprintable():
            raise errors.InvalidRequest(
                f'"target" must be at most {_MOST_TARGET} printable characters of a session or client key.',
                param="target",
            )
        page = await self._store.changes(limit_of(request), cursor, target)
        return {"changes": [*map(change_json, page.entries)], "cursor": page.cursor}


def author_of(request: Request, access: Access) -> Author:
    """Return who sends a request. The address is that of the connection: anyone can send X-Forwarded-For."""
    return Author(access.actor, request.client.host if request.client is not None else "unknown address")


async def record_change(
    store: AuditLog, author: Author, action: Action, target: str, *, old: Any = None, new: Any = None
) -> None:
    """Record a change that was made, in the log and in the store. It never fails, as the change remains.

    `old` and `new` are values of JSON without secrets.
    """
    entry = AuditEntry(time.time(), action, target, author.actor, author.origin, old, new)
    logger.info("audit: %s", line_of(entry))
    try:
        await store.record_change(entry)
    except errors.StoreUnavailable as fault:
        logger.error(  # noqa: TRY400  # no bug of ours
            "the change was made, but the audit log in the store lacks it: %s %s",
            fault.message,
            line_of(entry),
        )


def line_of(entry: AuditEntry) -> str:
    """Return an entry as one line of text."""
    values = [msgspec.json.encode(value).decode() for value in (entry.old, entry.new)]
    return f"{entry.action} {entry.target} by {entry.actor} from {entry.origin}: {' -> '.join(values)}"


def change_json(entry: AuditEntry) -> dict[str, Any]:
    """Return an entry as JSON for /api and the command line."""
    return {
        "at": time_text(entry.at),
        "action": entry.action,
        "target": entry.target,
        "actor": entry.actor,
        "origin": entry.origin,
        "old": entry.old,
        "new": entry.new,
    }
