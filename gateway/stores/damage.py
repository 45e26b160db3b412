"""Log records that a store cannot take or read, without blocking others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final

import msgspec

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ports import RecordRefused
from gateway.core.record import CallRecord
from gateway.core.stored import StoredKey

logger = logging.getLogger("gateway")

_KEYS: Final = msgspec.json.Decoder(StoredKey)
_RECORDS: Final = msgspec.json.Decoder(CallRecord)
#: records that are named in the log: another version may have left any number of them
_MOST_NAMED: Final = 100
#: what is raised where a stored value is none of ours
UNREADABLE: Final = (msgspec.MsgspecError, TypeError, ValueError, RecursionError, StoreDamaged)
_UNREAD_KEY: Final = (
    "the client key %s in the store cannot be read, and nobody can call with it: %s. Revoke it, and make another"
)
_UNREAD_RECORD: Final = "the record of call %s cannot be read and is left out of lists: %s. Totals and budgets have it"
_UNREAD_SESSION: Final = "session %s cannot be read and is left out of lists: %s"
_UNREAD_HOLD: Final = (
    "call %s was left by its worker and cannot be read: %s. What it holds stays held until a gateway of the version "
    "that wrote it runs on this store"
)
#: what a caller is told of damage
MENDING: Final = "Trying again does not help: an operator has to mend it, or to delete the session"


def unreadable(account: str, store: str) -> str:
    """What is said of an account that no call can be charged to. To take it for an empty one would lift its budget."""
    return f"The account {account} in the store {store} cannot be read, so no call can be charged to it. {MENDING}."


class Refusing:
    """Settle a call within this: what goes wrong, unless the store is away, lies in its record or in what that meets.

    Raises:
        RecordRefused: it is not settled.
    """

    __slots__ = ("_call_id",)

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, StoreDamaged) or not isinstance(error, StoreUnavailable):
            what = f"{type(error).__name__}: {error}"
            raise RecordRefused(f"The store cannot take call {self._call_id}: {what}") from error


class _Unread:
    """Names of what cannot be read, each of which is told in the log once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def _tell(self, name: str, message: str, error: Exception) -> None:
        """`message`: with a place for the name, and one for the error."""
        if name not in self._names:
            self._names.add(name)
            logger.error(message, name, error)


class UnreadKeys(_Unread):
    """Client keys that this version cannot read: they open to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: Sequence[tuple[str, bytes]] = ()
        self._found: Sequence[StoredKey] = ()

    def read(self, rows: Sequence[tuple[str, bytes]]) -> Sequence[StoredKey]:
        """The keys in these rows of names and values, sorted by name; without those that cannot be read.

        Each worker asks once a second, and rarely is anything new: to decode thousands takes long in its loop.
        """
        if rows != self._rows:
            self._rows, self._found = rows, self._decoded(rows)
        return self._found

    def _decoded(self, rows: Sequence[tuple[str, bytes]]) -> Sequence[StoredKey]:
        found = []
        for name, value in rows:
            try:
                found.append(_KEYS.decode(value))
            except UNREADABLE as error:
                self._tell(name, _UNREAD_KEY, error)
        return sorted(found, key=lambda key: key.name)


class UnreadRecords(_Unread):
    """Records of calls that this version cannot read: they are left out of lists."""

    def read(self, call_id: str, value: bytes) -> CallRecord | None:
        """The record; None where it cannot be read."""
        try:
            return _RECORDS.decode(value)
        except UNREADABLE as error:
            if len(self) < _MOST_NAMED:
                self._tell(call_id, _UNREAD_RECORD, error)
            return None


class UnreadSessions(_Unread):
    """Sessions that cannot be read: lists leave them out, and clearing goes on behind them."""

    @contextlib.contextmanager
    def passed_over(self, session: str) -> Iterator[None]:
        """Read a session, or what belongs to it, and go on where that cannot be done."""
        try:
            yield
        except UNREADABLE as error:
            if len(self) < _MOST_NAMED:
                self._tell(session, _UNREAD_SESSION, error)


class UnreadHolds(_Unread):
    """Holds that this version cannot read. All are counted: whoever looks for holds must look beyond them."""

    @contextlib.contextmanager
    def passed_over(self, hold_id: str) -> Iterator[None]:
        """Read a hold, and go on where that cannot be done."""
        try:
            yield
        except UNREADABLE as error:
            self._tell(hold_id, _UNREAD_HOLD, error)
