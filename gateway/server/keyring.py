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

#: seconds within which this worker knows a key that was added or revoked by another process
_MOST_AGE_S: Final = 2.0
#: seconds between two reads in the background
_POLL_S: Final = 1.0
#: seconds until a store that could not be read is tried again
_RETRY_S: Final = 0.5


class KeyRing:
    """The client keys of the store by the digests of their secrets. Call `ready` before `keys` is read.

    Args:
        store: where the keys are.
        is_unavailable: returns True if the store is known to be unavailable. No call waits for it then.
        away: called with the error when the store turns out to be unavailable.
        look_s: seconds between two reads of `keep_fresh`.
    """

    def __init__(
        self,
        store: ClientKeys,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_unavailable: Callable[[], bool] = lambda: False,
        away: Callable[[StoreUnavailable], None] = lambda _: None,
        look_s: float = _POLL_S,
    ) -> None:
        self._store = store
        self._clock = clock
        self._is_unavailable = is_unavailable
        self._away = away
        self._look_s = look_s
        self._keys: Mapping[bytes, StoredKey] = {}
        #: start of the read that returned these keys
        self._read_started_at = -math.inf
        self._read_at: float | None = None
        self._failed_at = 0.0
        self._failure: str | None = None
        self._lock = asyncio.Lock()

    @property
    def keys(self) -> Mapping[bytes, StoredKey]:
        """Return the keys of the last read."""
        return self._keys

    async def load(self) -> None:
        """Read the keys before the first call, so that they are known if the store becomes unavailable."""
        try:
            await self.ready()
        except StoreUnavailable:
            pass  # the first call tries again
        except Exception:
            logger.exception("the client keys in the store cannot be read")

    async def keep_fresh(self) -> None:
        """Read the keys every `look_s` seconds, for ever, so that calls need not wait for a read."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._is_unavailable():
                continue
            try:
                await self._read()
            except StoreUnavailable:
                pass  # the next call reads the keys itself, and reports the error if needed
            except Exception:
                logger.exception("reading the client keys from the store failed; it will be tried again")

    async def _read(self) -> None:
        began = self._clock()
        keys = {digest: key for key in await self._store.keys() for digest in key.digests}
        # Of two parallel reads the later one may return first. The result of the other one is then outdated.
        if began >= self._read_started_at:
            self._keys, self._read_started_at, self._read_at = keys, began, began

    async def ready(self) -> None:
        """Read the keys, unless they were read just now.

        Raises:
            StoreUnavailable: the keys were never read, so no caller can be authenticated.
        """
        if self._is_fresh():
            return
        asked_at = self._clock()
        async with self._lock:
            # A read that started after this call came is fresh enough for it, however long the read took.
            if self._read_started_at >= asked_at or self._is_fresh():
                return
            try:
                await self._read()
            except StoreUnavailable as error:
                if not isinstance(error, StoreDamaged):
                    self._away(error)
                # The keys of the last read remain valid. The next read follows soon, but not for each call.
                if self._read_at is None:
                    self._failed_at, self._failure = self._clock(), error.message
                    raise
                self._read_at = self._clock()

    def _is_fresh(self) -> bool:
        if self._failure is not None and self._read_at is None and self._clock() - self._failed_at < _RETRY_S:
            # Otherwise each call that waits for the lock would wait for the store again.
            raise StoreUnavailable(self._failure)
        return self._read_at is not None and (self._clock() - self._read_at < _MOST_AGE_S or self._is_unavailable())
