"""Calls whose answers are made in the background: found again by the id under which their provider keeps the answer.

Such a call is settled at once, as pending: its session is charged for the request by estimate, its budgets for all that
was held. The first request that fetches the finished answer, whoever sends it and whichever worker serves it, corrects
that to what the provider reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from typing import Final

import msgspec

from gateway.core.errors import StoreUnavailable
from gateway.core.ports import Store
from gateway.core.record import CallRecord
from gateway.core.values import dataclass
from gateway.dialects.base import Answer
from gateway.dialects.elsewhere import left_behind
from gateway.progress import Progress
from gateway.records import Records, answer_of, has_ended, kept_of

logger = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class _Noted:
    """A call that is pending, what others may go on from when it has ended, and its tokens that are no part of that."""

    provider: str
    namespace: str
    call_id: str
    ids: tuple[str, ...]
    beside: int


_NOTED: Final = msgspec.json.Decoder(_Noted)
#: what the keys in the store begin with, and bytes of the digest that each ends with
_PENDING: Final = "pending\n"
_DIGEST_BYTES: Final = 16


class Background:
    """Notes pending calls, and finds them. `wall`: seconds since the epoch."""

    def __init__(self, store: Store, records: Records, wall: Callable[[], float]) -> None:
        self._store = store
        self._records = records
        self._wall = wall

    async def begun(self, progress: Progress, record: CallRecord) -> None:
        """Note a pending call under the id of its answer. Where the store is away it stays charged as it is."""
        call, answer = progress.call, answer_of(progress)
        if call is None or answer.id is None:
            return
        ids = left_behind(call.fields, progress.incoming.endpoint.wire, answer.id)
        beside = progress.plan.beside if progress.plan is not None else 0
        noted = msgspec.json.encode(
            _Noted(record.provider, progress.incoming.caller.namespace, record.call_id, ids, beside)
        )
        try:
            await self._store.learn({_key(answer.id): lambda _: noted})
        except StoreUnavailable as error:
            logger.warning("call %s will not be found when its answer is fetched: %s", record.call_id, error.message)

    async def origin(self, answer_id: str) -> tuple[str | None, str | None]:
        """The provider that makes this answer in the background, and the namespace of whoever asked for it.

        Requests about it name no model, and nobody else knows. None where it is not known here either.
        """
        try:
            noted = await self._noted(answer_id)
        except StoreUnavailable:
            return None, None
        return (noted.provider, noted.namespace) if noted is not None else (None, None)

    async def ended(self, provider: str, answer_id: str, answer: Answer) -> tuple[CallRecord | None, bool]:
        """The record of the call whose answer this is, if that was pending and is over; whether it is settled already.

        It is where the answer was fetched before.
        """
        if not has_ended(answer):
            return None, False
        try:
            noted = await self._noted(answer_id)
            found = await self._store.call(None, noted.call_id) if noted is not None else None
        except StoreUnavailable as error:
            logger.warning("an answer that was fetched is not settled by that: %s", error.message)
            return None, False
        if noted is None or found is None or noted.provider != provider:
            return None, False
        if not found.is_provisional:
            return found, True
        record = self._records.fetched(found, answer, self._wall())
        return replace(record, kept=kept_of(provider, record.charge, noted.ids, noted.beside)), False

    async def _noted(self, answer_id: str) -> _Noted | None:
        known = await self._store.learned(_key(answer_id))
        return _NOTED.decode(known) if known is not None else None


def _key(answer_id: str) -> str:
    # Of any length, and another's to choose.
    digest = blake2b(answer_id.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
    return _PENDING + digest
