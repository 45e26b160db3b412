"""Records that a store cannot take, and what this version cannot read in it: logged, and nothing else waits for it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ports import CallRecord, RecordRefused, StoredKey

logger = logging.getLogger("gateway")

_KEYS: Final = msgspec.json.Decoder(StoredKey)
_RECORDS: Final = msgspec.json.Decoder(CallRecord)
#: records that are named in the log: another version may have left any number of them
_MOST_NAMED: Final = 100
#: what is raised where a stored value is none of ours
UNREADABLE: Final = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
#: what a caller is told of damage
MENDING: Final = "Trying again does not help: an operator has to mend it, or to delete the session"


def unreadable(account: str, store: str) -> str:
    """What is said of an account that no call can be charged to. To take it for an empty one would lift its budget."""
    return f"The account {account} in the store {store} cannot be read, so no call can be charged to it. {MENDING}."


@contextlib.contextmanager
def refusing(call_id: str) -> Iterator[None]:
    """Settle a call within this: what goes wrong, unless the store is away, lies in its record or in what that meets.

    Raises:
        RecordRefused: it is not settled.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, StoreUnavailable) and not isinstance(error, StoreDamaged):
            raise
        raise RecordRefused(f"The store cannot take call {call_id}: {type(error).__name__}: {error}") from error


class UnreadKeys:
    """Client keys that this version cannot read, each of which is named in the log once, and opens to nobody."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, rows: Iterable[tuple[str, bytes]]) -> list[StoredKey]:
        """The keys in these rows of names and values, sorted by name; without those that cannot be read."""
        found = []
        for name, value in rows:
            try:
                found.append(_KEYS.decode(value))
            except UNREADABLE as error:
                if name not in self._names:
                    self._names.add(name)
                    logger.error(  # noqa: TRY400  # a traceback would say no more
                        "the client key %s in the store cannot be read, and nobody can call with it: %s. Revoke it, "
                        "and make another",
                        name,
                        error,
                    )
        return sorted(found, key=lambda key: key.name)


class UnreadRecords:
    """Records of calls that this version cannot read: they are left out of lists, and named in the log once."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def read(self, call_id: str, value: bytes) -> CallRecord | None:
        """The record; None where it cannot be read."""
        try:
            return _RECORDS.decode(value)
        except UNREADABLE as error:
            if call_id not in self._ids and len(self._ids) < _MOST_NAMED:
                self._ids.add(call_id)
                logger.error(  # noqa: TRY400  # what it cannot read says enough
                    "the record of call %s cannot be read and is left out of lists: %s. Totals and budgets have it",
                    call_id,
                    error,
                )
            return None


class UnreadHolds:
    """Holds that this version cannot read, each of which is named in the log once."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    @contextlib.contextmanager
    def passed_over(self, hold_id: str) -> Iterator[None]:
        """Read a hold, and go on where that cannot be done."""
        try:
            yield
        except UNREADABLE as error:
            if hold_id not in self._ids:
                self._ids.add(hold_id)
                logger.error(  # noqa: TRY400  # a traceback would say no more
                    "call %s was left by its worker and cannot be read: %s. What it holds stays held until a gateway "
                    "of the version that wrote it runs on this store",
                    hold_id,
                    error,
                )
