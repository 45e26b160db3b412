"""Save when each client key was last used, at most once a minute, for lists of client keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import is_reserved
from gateway.core.ports import Lessons, Observer
from gateway.core.record import CallRecord
from gateway.core.usage import Totals

#: key of the times among the learned values
_KEY: Final = "served/client-key-uses"
#: client keys whose last use is saved; the ones used longest ago are dropped first
_MOST_KEYS: Final = 10_000
_WRITE_AFTER_S: Final = 60.0
_TIMES: Final = msgspec.json.Decoder(dict[str, float])


class KeyUses(Observer):
    """Notes the end of the last call of each client key, and saves it later, so that no call waits for it."""

    def __init__(self, store: Lessons, write_after_s: float = _WRITE_AFTER_S) -> None:
        self._store = store
        self._write_after_s = write_after_s
        self._noted: dict[str, float] = {}
        self._writing: asyncio.Task[None] | None = None

    def record(self, call: CallRecord, totals: Totals | None, left: Allowance | None = None) -> None:
        """See `Observer.record`."""
        del totals, left
        if call.session is None or is_reserved(call.session.namespace):
            return
        name, ended = call.session.namespace, call.started_at + call.duration_s
        if len(self._noted) < _MOST_KEYS or name in self._noted:
            self._noted[name] = max(ended, self._noted.get(name, 0.0))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_later())

    async def _write_later(self) -> None:
        await asyncio.sleep(self._write_after_s)
        await self._write()

    async def _write(self) -> None:
        """Save the noted times. Those that the store does not take are saved with the next ones."""
        noted, self._noted = self._noted, {}
        if not noted:
            return
        try:
            await self._store.learn({_KEY: lambda known: msgspec.json.encode(_merged(_decode(known), noted))})
        except StoreUnavailable:
            self._noted = _merged(noted, self._noted)

    async def aclose(self) -> None:
        """Save what was noted, with a single try."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writing
        await self._write()


async def last_uses(store: Lessons) -> Mapping[str, float]:
    """Return the Unix time of the last call by the name of the client key, up to a minute late.

    A key that made no call for as long as sessions are kept may be missing, because learned values expire.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    return _decode(await store.learned(_KEY))


def _decode(value: bytes | None) -> dict[str, float]:
    """Return the saved times, or an empty dict if another version saved them in another form."""
    if value is not None:
        with contextlib.suppress(msgspec.MsgspecError):
            return _TIMES.decode(value)
    return {}


def _merged(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Return the later time of each key, of at most `_MOST_KEYS` keys."""
    times = {**one, **{name: max(time, one.get(name, 0.0)) for name, time in other.items()}}
    newest = sorted(times, key=lambda name: times[name])[-_MOST_KEYS:]
    return {name: times[name] for name in newest}
