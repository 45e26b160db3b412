"""Keep the client keys of the store in memory, and read them again every few seconds."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.ports import ClientKeys
from gateway.core.stored import StoredKey

logger = logging.getLogger("gateway")

#: seconds within which a key that was added or revoked elsewhere is known here
_FRESH_S: Final = 2.0
#: seconds between two looks that no call waits for
_LOOK_S: Final = 1.0
#: seconds for which a store that could not be read is not asked again
_UNAVAILABLE_S: Final = 0.5


class KeyRing:
    """Stored keys by their digest. Call `ready` before `keys` is looked at.

    Args:
        store: where they are.
        is_unavailable: whether the store is known to be unavailable. No call waits for it then.
        away: called with the error when the store turns out to be unavailable.
        look_s: see `keep_fresh`.
    """

    def __init__(
        self,
        store: ClientKeys,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_unavailable: Callable[[], bool] = lambda: False,
        away: Callable[[StoreUnavailable], None] = lambda _: None,
        look_s: float = _LOOK_S,
    ) -> None:
        self._store = store
        self._clock = clock
        self._is_unavailable = is_unavailable
        self._away = away
        self._look_s = look_s
        self._keys: Mapping[bytes, StoredKey] = {}
        #: when the read began that these are from
        self._as_of = -math.inf
        self._read_at: float | None = None
        self._failed_at = 0.0
        self._failure: str | None = None
        self._lock = asyncio.Lock()

    @property
    def keys(self) -> Mapping[bytes, StoredKey]:
        """As they were read last."""
        return self._keys

    async def begin(self) -> None:
        """Read the keys before anybody calls: then those known at the start open while the store is away."""
        try:
            await self.ready()
        except StoreUnavailable:
            pass  # the first call asks again
        except Exception:
            logger.exception("the client keys in the store cannot be read")

    async def keep_fresh(self) -> None:
        """Read the keys every `look_s` seconds, for ever, so that no call has to wait for that."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._is_unavailable():
                continue
            try:
                await self._read()
            except StoreUnavailable:
                pass  # the next call asks for itself, and says so where it has to
            except Exception:
                logger.exception("the client keys in the store were not read again this time")

    async def _read(self) -> None:
        began = self._clock()
        keys = {key.digest: key for key in await self._store.keys()}
        # Of two reads at once the later one may be answered first: the other may have keys that were revoked since.
        if began >= self._as_of:
            self._keys, self._as_of, self._read_at = keys, began, began

    async def ready(self) -> None:
        """Read the keys, if that was not done just now.

        Raises:
            StoreUnavailable: they were never read. Nobody can say who may call.
        """
        if self._is_fresh():
            return
        asked_at = self._clock()
        async with self._lock:
            # However long it took: what was asked for after a call came is fresh enough for that call.
            if self._as_of >= asked_at or self._is_fresh():
                return
            try:
                await self._read()
            except StoreUnavailable as error:
                if not isinstance(error, StoreDamaged):
                    self._away(error)
                # Those known a moment ago still hold; they are asked for again soon, not by each call.
                if self._read_at is None:
                    self._failed_at, self._failure = self._clock(), error.message
                    raise
                self._read_at = self._clock()

    def _is_fresh(self) -> bool:
        if self._failure is not None and self._read_at is None and self._clock() - self._failed_at < _UNAVAILABLE_S:
            # Else each call that waits for the lock would wait for the store as long once more.
            raise StoreUnavailable(self._failure)
        return self._read_at is not None and (self._clock() - self._read_at < _FRESH_S or self._is_unavailable())
