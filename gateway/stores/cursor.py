"""Encode the cursors of paged lists, and choose the sessions of one page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from decimal import Decimal
from typing import Final, NamedTuple

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.ledger.session_key import SessionKey
from gateway.core.stored import MOST_SEARCHED, SessionView, Sort

#: integers that a cursor's value may have: SQLite takes no larger ones
_INTEGERS: Final = range(-(2**63), 2**63)
_PICO: Final = Decimal(10) ** 12


class Cursor(NamedTuple):
    """The place of a session in a list. A smaller cursor comes later in the list.

    `value`: tokens, picodollars, or when the session was called last (Unix seconds).
    """

    value: float | int
    namespace: str
    id: str

    @classmethod
    def of(cls, view: SessionView, sort: Sort) -> Cursor:
        """Return the place of a session in a list."""
        if sort == "recent":
            value: float | int = view.last_call_at
        else:
            value = view.totals.total_tokens if sort == "tokens" else int(view.totals.cost_usd * _PICO)
        return cls(value, view.key.namespace, view.key.id)

    @property
    def key(self) -> SessionKey:
        """Return the key of the session."""
        return SessionKey(self.namespace, self.id)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read what `str` wrote.

        Raises:
            InvalidRequest: the text is not a cursor.
        """
        try:
            cursor = cls(*msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[int | float, str, str]))
        except (msgspec.DecodeError, binascii.Error, ValueError):
            raise _invalid_cursor() from None
        if isinstance(cursor.value, int) and cursor.value not in _INTEGERS:
            raise _invalid_cursor()
        return cursor

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(tuple(self))).decode()


class Names:
    """Choose sessions by a part of their names.

    `namespace`: of the reader; None for a reader of all namespaces, who also sees the names of client keys.
    `part`: empty for every session.
    """

    def __init__(self, namespace: str | None, part: str) -> None:
        self._namespace = namespace
        self._part = part.lower()

    def match(self, place: Cursor) -> bool:
        """Return True if the session has the part in its name."""
        return not self._part or self._part in place.key.shown(self._namespace).lower()


def page_of(places: Iterable[Cursor], names: Names, limit: int) -> tuple[list[Cursor], str | None]:
    """Return the places of one page, and the cursor that continues it. `places`: in the order of the list."""
    chosen, last = list[Cursor](), None
    for searched, place in enumerate(places):
        if searched == MOST_SEARCHED and last is not None:
            return chosen, str(last)
        last = place
        if names.match(place):
            if len(chosen) == limit:
                return chosen, str(chosen[-1])
            chosen.append(place)
    return chosen, None


def _invalid_cursor() -> InvalidRequest:
    return InvalidRequest("The cursor is not one that this list returned.", param="cursor")
