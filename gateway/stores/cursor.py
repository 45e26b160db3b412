"""Where a page of sessions ended: the value it was sorted by, then the key, which makes it unique."""

from __future__ import annotations

import base64
import binascii
from typing import Final, NamedTuple

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.stored import SessionView

#: the integers that a value may be: SQLite takes no larger ones
_INTEGERS: Final = range(-(2**63), 2**63)


class Cursor(NamedTuple):
    """`value`: tokens, or when the session was called last (Unix seconds). A smaller cursor comes later in the list."""

    value: float | int
    namespace: str
    id: str

    @classmethod
    def of(cls, view: SessionView, sort: str) -> Cursor:
        """The place of a session in a list sorted by `recent` or `tokens`."""
        value = view.totals.total_tokens if sort == "tokens" else view.last_call_at
        return cls(value, view.key.namespace, view.key.id)

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """Read what `str` wrote.

        Raises:
            InvalidRequest: it is no cursor.
        """
        try:
            cursor = cls(*msgspec.json.decode(base64.urlsafe_b64decode(text), type=tuple[int | float, str, str]))
        except (msgspec.DecodeError, binascii.Error, ValueError):
            raise _not_ours() from None
        if isinstance(cursor.value, int) and cursor.value not in _INTEGERS:
            raise _not_ours()
        return cursor

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(msgspec.json.encode(tuple(self))).decode()


def _not_ours() -> InvalidRequest:
    return InvalidRequest("The cursor is not one that this list returned.", param="cursor")
