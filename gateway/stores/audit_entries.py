"""Encode the entries of the audit log for every store, and decode them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.core.audit import AuditEntry, AuditPage
from gateway.stores.damage import UNREADABLE

#: characters of an old or a new value, as JSON
_MOST_VALUE: Final = 4_000
_DECODER: Final = msgspec.json.Decoder(AuditEntry)
#: shown instead of an entry that is damaged, since an audit log must not hide that there was one
_UNREADABLE: Final = AuditEntry(0.0, "unreadable", "", "", "")


def encoded(entry: AuditEntry) -> bytes:
    """Return an entry as JSON. A value that is too long is replaced by the beginning of its text."""
    short = AuditEntry(
        entry.at, entry.action, entry.target, entry.actor, entry.origin, _shortened(entry.old), _shortened(entry.new)
    )
    return msgspec.json.encode(short)


def _shortened(value: Any) -> Any:
    text = msgspec.json.encode(value).decode()
    return value if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}… ({len(text):,} characters)"


def page_of_rows(rows: list[tuple[str, bytes]], limit: int) -> AuditPage:
    """Return the first `limit` rows as a page. `rows`: positions and encoded entries, one more than fits if any."""
    shown = rows[:limit]
    return AuditPage([_decoded(value) for _, value in shown], shown[-1][0] if len(rows) > limit else None)


def number_of(cursor: str | None) -> int | None:
    """Return the position that a cursor of an embedded store names."""
    return int(cursor.partition("-")[0]) if cursor is not None else None


def _decoded(value: bytes) -> AuditEntry:
    try:
        return _DECODER.decode(value)
    except UNREADABLE:
        return _UNREADABLE
