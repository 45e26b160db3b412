"""Read and write the audit log in Redis: one stream, so all of it is on one server of a cluster."""

from __future__ import annotations

from typing import Final

from gateway.core.audit import MOST_CHANGES, AuditEntry, AuditPage
from gateway.stores.audit_entries import encoded, page_of_rows
from gateway.stores.redis.link import Link

#: entries read at once, which takes the server about a millisecond
_CHUNK: Final = 1_000


class RedisAuditLog:
    """The audit log in a stream with this key. Its ids are the server's time in milliseconds."""

    def __init__(self, link: Link, key: str) -> None:
        self._link = link
        self._key = key

    async def add(self, entry: AuditEntry) -> None:
        """Add an entry, and drop the oldest one if there are too many."""
        await self._link.call(
            ("XADD", self._key, "MAXLEN", MOST_CHANGES, "*", "target", entry.target, "value", encoded(entry))
        )

    async def page(self, limit: int, cursor: str | None, target: str) -> AuditPage:
        """See `AuditLog.changes`."""
        found = list[tuple[str, bytes]]()
        end = "+" if cursor is None else f"({cursor}"
        chunk = _CHUNK if target else limit + 1
        while len(found) <= limit:
            [rows] = await self._link.call(("XREVRANGE", self._key, end, "-", "COUNT", chunk))
            for number, (_, name, _, value) in rows:
                if target.encode() in name:
                    found.append((number.decode(), value))
            if len(rows) < chunk:
                break
            end = f"({rows[-1][0].decode()}"
        return page_of_rows(found, limit)

    async def forget(self, before: float) -> None:
        """Delete the entries that were made before this Unix time in seconds."""
        await self._link.call(("XTRIM", self._key, "MINID", max(0, int(before * 1000))))
