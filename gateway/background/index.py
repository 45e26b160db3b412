"""Find a call by the id of its stored response, for example a response made in the background.

A call whose answer is made in the background is settled at once, as pending: its session is charged for the request by
estimate, its budgets for all that was held. The first request that fetches the finished answer, whoever sends it and
whichever worker serves it, corrects that to what the provider reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from gateway.call.record import RecordBuilder, answer_of, has_ended, kept_of
from gateway.call.state import CallState
from gateway.core.ports import Store
from gateway.core.record import CallRecord, answer_name
from gateway.core.routing import Routes
from gateway.core.values import dataclass
from gateway.dialects.base import ParsedResponse
from gateway.dialects.limits import service_tier
from gateway.dialects.server_state import left_over

logger = logging.getLogger("gateway")


@dataclass(frozen=True, slots=True)
class _Noted:
    """A call that is pending, what others may go on from when it has ended, and its tokens that are no part of that.

    `match`: of the entry of `models:` that decided where it went; `tier`: the service tier that it asked for;
    `is_told`: observers were told what it has cost.
    """

    provider: str
    namespace: str
    call_id: str
    ids: tuple[str, ...]
    overhead: int
    match: str | None = None
    tier: str | None = None
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class FetchedResponse:
    """What an answer came to that was fetched while its call was under way, or its worker gone."""

    provider: str
    answer_id: str
    answer: ParsedResponse


_NOTED: Final = msgspec.json.Decoder(_Noted)
_MADE: Final = msgspec.json.Decoder(FetchedResponse)
#: a call of which all is gone by now
_FORGOTTEN: Final = _Noted("", "", "", (), 0, is_told=True)
#: what the keys in the store begin with
_PENDING: Final = "pending\n"
_FETCHED: Final = "fetched\n"


class BackgroundIndex:
    """Notes pending calls, and finds them. `wall`: seconds since the epoch."""

    def __init__(self, store: Store, records: RecordBuilder, routes: Routes, wall: Callable[[], float]) -> None:
        self._store = store
        self._records = records
        self._routes = routes
        self._wall = wall

    async def begun(self, state: CallState) -> bool:
        """Note a call under the id of its answer, once that is known; whether there was something to note.

        Raises:
            StoreUnavailable: it is not noted, or nobody knows whether.
        """
        note = self.note(state)
        if note is None:
            return False
        key, written = note
        await self._store.learn({key: lambda _: written.encode()})
        state.settlement.is_findable = True
        return True

    @staticmethod
    def note(state: CallState) -> tuple[str, str] | None:
        """Where a call is noted, and as what; None where the id of its answer is not known."""
        call, answer = state.call, answer_of(state)
        if call is None or answer.id is None:
            return None
        named = left_over(call.fields, state.incoming.endpoint.wire, answer.id)
        # JSON can name half a surrogate pair, and no text can hold it.
        ids = tuple(one for one in named if one.isprintable())
        overhead = state.context.plan.overhead if state.context.plan is not None else 0
        rule = state.routing.route.rule
        match = rule.match if rule is not None else None
        call_id, namespace = state.incoming.call_id, state.incoming.caller.namespace
        noted = _Noted(
            state.routing.route.provider, namespace, call_id, ids, overhead, match, service_tier(call.fields)
        )
        return _key(answer.id), msgspec.json.encode(noted).decode()

    async def origin(self, answer_id: str, namespace: str) -> tuple[str | None, str | None]:
        """The provider that makes or keeps this answer, and the namespace of whoever asked for it.

        Requests about it name no model, and nobody else knows. One that was not made in the background is known to the
        `namespace` that asked for it. None where it is not known here either.

        Raises:
            StoreUnavailable: it cannot be looked up.
        """
        noted = await self._noted(answer_id)
        if noted is not None:
            return noted.provider, noted.namespace
        found = await self.answered(answer_id, namespace)
        return (found.provider, namespace) if found is not None else (None, None)

    async def answered(self, answer_id: str, namespace: str) -> CallRecord | None:
        """The call of this namespace that had an answer which its provider keeps; None where it is not known.

        Raises:
            StoreUnavailable: it cannot be looked up.
        """
        return await self._store.answered(namespace, answer_name(answer_id))

    async def ended(self, provider: str, answer_id: str, answer: ParsedResponse) -> tuple[CallRecord | None, bool]:
        """The record of the call whose answer this is, if that was pending and is over; whether observers know of it.

        Of a call that is not settled yet the answer is kept, should its worker be gone: see `made`.

        Raises:
            StoreUnavailable: nobody can say.
        """
        if not has_ended(answer):
            return None, False
        noted = await self._noted(answer_id)
        if noted is None or noted.provider != provider:
            return None, False
        found = await self._store.call(None, noted.call_id)
        if found is None:
            made = msgspec.json.encode(FetchedResponse(provider, answer_id, answer))
            await self._store.learn({_FETCHED + noted.call_id: lambda _: made})
            return None, False
        if found.call_id != noted.call_id:
            # Its record is gone, and another call was given its id for a request id.
            return None, False
        if not found.is_provisional:
            return found, noted.is_told
        route = self._routes.taken(found.provider, found.model, noted.match)
        record = self._records.fetched(found, answer, route, noted.tier, self._wall())
        kept = kept_of(provider, record.charge, noted.ids, noted.overhead)
        # The record of a call whose worker was gone before it settled does not know of its answer.
        found_by = record.answer or (answer_name(answer_id) if answer_id in noted.ids else None)
        return replace(record, kept=kept, answer=found_by), False

    async def made(self, call_id: str) -> FetchedResponse | None:
        """What the answer to a call came to, if it was fetched before the call was settled.

        Raises:
            StoreUnavailable: nobody can say.
        """
        known = await self._store.learned(_FETCHED + call_id)
        return _MADE.decode(known) if known is not None else None

    async def is_first(self, answer_id: str) -> bool:
        """Whether observers are still to be told what this call has cost; from now on they are not.

        Many may fetch the same answer at once, in as many workers.

        Raises:
            StoreUnavailable: nobody can say.
        """
        before = []

        def tell(known: bytes | None) -> bytes:
            noted = _NOTED.decode(known) if known is not None else _FORGOTTEN
            before.append(noted.is_told)
            return msgspec.json.encode(replace(noted, is_told=True))

        await self._store.learn({_key(answer_id): tell})
        return not before[-1]

    async def _noted(self, answer_id: str) -> _Noted | None:
        known = await self._store.learned(_key(answer_id))
        try:
            return _NOTED.decode(known) if known is not None else None
        except msgspec.DecodeError:
            logger.warning("what is noted of an answer made in the background cannot be read")
            return None


def _key(answer_id: str) -> str:
    return _PENDING + answer_name(answer_id)
