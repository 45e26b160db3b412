"""Log stored values that are damaged or of another version, so that they do not block other values."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final

import msgspec

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import RecordRefused
from gateway.core.record import CallRecord
from gateway.core.stored import StoredKey
from gateway.stores.record_encoding import decode_record

logger = logging.getLogger("gateway")

_KEYS: Final = msgspec.json.Decoder(StoredKey)
#: Damaged values that the log names: another version may have left any number of them.
_MOST_NAMED: Final = 100
#: errors that a stored value of another form raises
UNREADABLE: Final = (msgspec.MsgspecError, TypeError, ValueError, LookupError, RecursionError, zlib.error, StoreDamaged)
_UNREAD_KEY: Final = (
    "the client key %s in the store cannot be read, so calls with it are refused: %s. Revoke it, and make another"
)
_UNREAD_RECORD: Final = "the record of call %s cannot be read and is left out of lists: %s. Totals and budgets have it"
_UNREAD_SESSION: Final = "session %s cannot be read and is left out of lists: %s"
_UNREAD_HOLD: Final = (
    "the hold of call %s cannot be read, and its worker has ended: %s. The budget stays reserved until a gateway of "
    "the version that wrote it runs on this store"
)
#: the remedy in errors about damage
REPAIR: Final = "Trying again does not help: an operator has to repair it, or to delete the session"


def unreadable(account: str, store: str) -> str:
    """Return the message for an account that cannot be read. Treating it as empty would lift its budget."""
    return f"The account {account} in the store {store} cannot be read, so no call can be charged to it. {REPAIR}."


class Refusing:
    """A context that turns errors while settling a call into `RecordRefused`, unless the store is unavailable.

    Such an error is caused by the record, or by damaged data that it refers to.

    Raises:
        RecordRefused: the call is not settled.
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
    """Remember names of values that cannot be read, and log each of them once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def _log(self, name: str, message: str, error: Exception) -> None:
        """Log a name once. `message`: a format with one placeholder for the name and one for the error."""
        if name not in self._names:
            self._names.add(name)
            logger.error(message, name, error)


def decode_key(name: str, value: bytes) -> StoredKey:
    """Return a client key from its stored form.

    Raises:
        StoreDamaged: this version cannot read it.
    """
    try:
        return _KEYS.decode(value)
    except UNREADABLE as error:
        raise StoreDamaged(
            f"The client key {name} in the store cannot be read. Revoke it, and make another: gateway keys revoke "
            f"{name}."
        ) from error


class UnreadKeys(_Unread):
    """Decode client keys, and log those that this version cannot read: calls with them are refused."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: Sequence[tuple[str, bytes]] = ()
        self._keys: Sequence[StoredKey] = ()

    def read(self, rows: Sequence[tuple[str, bytes]]) -> Sequence[StoredKey]:
        """Return the readable keys of these rows of names and values, sorted by name.

        Each worker asks once a second. The rows rarely change, and decoding thousands of keys would block its event
        loop, so the last result is cached.
        """
        if rows != self._rows:
            self._rows, self._keys = rows, self._decoded(rows)
        return self._keys

    def _decoded(self, rows: Sequence[tuple[str, bytes]]) -> Sequence[StoredKey]:
        keys = []
        for name, value in rows:
            try:
                keys.append(_KEYS.decode(value))
            except UNREADABLE as error:
                self._log(name, _UNREAD_KEY, error)
        return sorted(keys, key=lambda key: key.name)


class UnreadRecords(_Unread):
    """Decode records of calls, and log those that this version cannot read: lists leave them out."""

    def read(self, call_id: str, value: bytes, key: SessionKey | None) -> CallRecord | None:
        """Return the record of a call of a session, or None if it cannot be read."""
        try:
            return decode_record(value, call_id, key)
        except UNREADABLE as error:
            if len(self) < _MOST_NAMED:
                self._log(call_id, _UNREAD_RECORD, error)
            return None


class UnreadSessions(_Unread):
    """Log sessions that cannot be read: lists and clean-up skip them."""

    @contextlib.contextmanager
    def skip_damaged(self, session: str) -> Iterator[None]:
        """Log and skip a session in this context if it, or what belongs to it, cannot be read."""
        try:
            yield
        except UNREADABLE as error:
            if len(self) < _MOST_NAMED:
                self._log(session, _UNREAD_SESSION, error)


class UnreadHolds(_Unread):
    """Log holds that this version cannot read. `len` counts all: a search for holds has to ask for as many more."""

    @contextlib.contextmanager
    def passed_over(self, hold_id: str) -> Iterator[None]:
        """Log and skip a hold in this context if it cannot be read."""
        try:
            yield
        except UNREADABLE as error:
            self._log(hold_id, _UNREAD_HOLD, error)
