"""Settlements that must not be lost: what the store did not take is kept and offered again until it does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Final

from gateway.core.errors import StoreUnavailable
from gateway.core.ports import CallRecord, Store
from gateway.core.usage import Totals

logger = logging.getLogger("gateway")

#: records waiting for a store; past it the gateway takes no calls that would add to them
_MAX_WAITING: Final = 10_000
_RETRY_S: Final = 0.5


class Settler:
    """Writes call records. Settling is idempotent by `call_id`, so offering one again is safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[CallRecord] = deque()
        self._away = False
        self._retry: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Refuse a new call while earlier ones wait for the store.

        Raises:
            StoreUnavailable: the store is away.
        """
        if self._away:
            raise StoreUnavailable(
                f"The store is away and {len(self._waiting)} settled calls wait for it. Try again shortly."
            )

    async def settle(self, record: CallRecord) -> Totals | None:
        """Write one record; the session's totals after it, or None while the store is away."""
        try:
            return await self._store.settle(record)
        except asyncio.CancelledError:
            # Whether it was written is not known; offered again, it counts once.
            self._keep(record)
            raise
        except StoreUnavailable as error:
            if not self._away:
                logger.error("store away, settlements are kept in memory: %s", error.message)  # noqa: TRY400  # no bug
            self._away = True
            self._keep(record)
            return None

    def _keep(self, record: CallRecord) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            logger.error("settlement of call %s is lost: %d are waiting already", record.call_id, _MAX_WAITING)
            return
        self._waiting.append(record)
        if self._retry is None or self._retry.done():
            self._retry = asyncio.get_running_loop().create_task(self._offer_again())

    async def _offer_again(self) -> None:
        while self._waiting:
            await asyncio.sleep(_RETRY_S)
            await self._drain()

    async def _drain(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            while self._waiting:
                await self._store.settle(self._waiting[0])
                self._waiting.popleft()
            if self._away:
                self._away = False
                logger.warning("store back, all settlements written")

    async def aclose(self) -> None:
        """Offer what is waiting one last time."""
        if self._retry is not None:
            self._retry.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._retry
        await self._drain()
        for record in self._waiting:
            logger.error("settlement of call %s is lost: the store is away at the end", record.call_id)
