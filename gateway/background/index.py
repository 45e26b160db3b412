"""Find a call by the id of its stored response, for example a response made in the background.

A call whose response is made in the background is settled at once, as pending: its session is charged the estimated
input, and its budgets everything that was reserved. The first request that fetches the complete response corrects this
to what the provider reports. Any client may send this request, and any worker may serve it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from gateway.call.record import RecordBuilder, has_ended, kept_response, response_so_far
from gateway.call.state import CallState
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Store
from gateway.core.record import CallRecord, response_digest
from gateway.core.routing import Routes
from gateway.core.usage import Totals
from gateway.core.values import dataclass
from gateway.dialects.base import ParsedResponse
from gateway.dialects.limits import service_tier
from gateway.dialects.server_state import continuation_ids

logger = logging.getLogger("gateway")


class _Noted(msgspec.Struct, frozen=True):
    """A pending call, as it is stored.

    The stored names must not change: another version may have noted the call.

    Attributes:
        provider: where the response is made.
        namespace: the client key of the call.
        call_id: the id of the call.
        ids: the responses and conversations that later calls can continue from.
        overhead: tokens of the call that are no part of what later calls continue.
        match: the pattern of the `models:` entry that chose the route.
        tier: the service tier that the call asked for.
        is_told: observers were notified of its cost.
    """

    provider: str
    namespace: str
    call_id: str
    ids: tuple[str, ...]
    overhead: int = msgspec.field(name="beside")
    match: str | None = None
    tier: str | None = None
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class FetchedResponse:
    """A response that was fetched while its call was still running, or after its worker died."""

    provider: str
    answer_id: str
    answer: ParsedResponse


_NOTED: Final = msgspec.json.Decoder(_Noted)
_MADE: Final = msgspec.json.Decoder(FetchedResponse)
#: a call whose data has expired
_FORGOTTEN: Final = _Noted("", "", "", (), 0, is_told=True)
#: prefixes of the keys in the store
_PENDING: Final = "pending\n"
_FETCHED: Final = "fetched\n"


class BackgroundIndex:
    """Note pending calls, and find them. `wall`: returns Unix time in seconds."""

    def __init__(self, store: Store, records: RecordBuilder, routes: Routes, wall: Callable[[], float]) -> None:
        self._store = store
        self._records = records
        self._routes = routes
        self._wall = wall

    async def note_call(self, state: CallState) -> bool:
        """Note a call under the id of its response; return False if the id is not known yet.

        Raises:
            StoreUnavailable: the call may not be noted.
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
        """Return the key and the value under which a call is noted; None if the id of its response is unknown."""
        call, answer = state.call, response_so_far(state)
        if call is None or answer.id is None:
            return None
        named = continuation_ids(call.fields, state.incoming.endpoint.wire, answer.id)
        # JSON can spell half a surrogate pair, which no text can hold.
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
        """Return the provider that makes or keeps a response, and the namespace of the client key that asked for it.

        Requests about a response name no model, so only this index knows the provider. A response that was not made in
        the background is found only for the `namespace` that asked for it. Returns None for what is unknown.

        Raises:
            StoreUnavailable: the response cannot be looked up.
        """
        noted = await self._noted(answer_id)
        if noted is not None:
            return noted.provider, noted.namespace
        found = await self.call_of_response(answer_id, namespace)
        return (found.provider, namespace) if found is not None else (None, None)

    async def call_of_response(self, answer_id: str, namespace: str) -> CallRecord | None:
        """Return the call of this namespace that received a stored response; None if it is unknown.

        Raises:
            StoreUnavailable: the call cannot be looked up.
        """
        return await self._store.call_of_response(namespace, response_digest(answer_id))

    async def completed_call(
        self, provider: str, answer_id: str, answer: ParsedResponse
    ) -> tuple[CallRecord | None, bool]:
        """Return the record of the pending call that this response completes, and whether observers know its cost.

        The record is None if there is no such call. The response to a call that is not settled yet is stored, in case
        its worker died: see `fetched_response`.

        Raises:
            StoreUnavailable: the call cannot be looked up.
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
            # The record has expired, and another call received its id as a request id.
            return None, False
        if not found.is_provisional:
            return found, noted.is_told
        route = self._routes.route_of_call(found.provider, found.model, noted.match)
        record = self._records.build_fetched(found, answer, route, noted.tier, self._wall())
        kept = kept_response(provider, record.charge, noted.ids, noted.overhead)
        # If the worker died before it settled the call, the record does not name the response.
        found_by = record.answer or (response_digest(answer_id) if answer_id in noted.ids else None)
        return replace(record, kept=kept, answer=found_by), False

    async def fetched_response(self, call_id: str) -> FetchedResponse | None:
        """Return the response to a call if it was fetched before the call was settled.

        Raises:
            StoreUnavailable: the response cannot be looked up.
        """
        known = await self._store.learned(_FETCHED + call_id)
        return _MADE.decode(known) if known is not None else None

    async def totals(self, session: SessionKey) -> Totals:
        """Return the totals of the session of a call that was settled.

        Raises:
            StoreUnavailable: they are unknown.
        """
        return await self._store.totals(session)

    async def claim_notification(self, answer_id: str) -> bool:
        """Return True once: for the caller that is to notify the observers of the cost of this call.

        Several workers may fetch the same response at once.

        Raises:
            StoreUnavailable: it is unknown whether the observers were notified.
        """
        before = []

        def mark(known: bytes | None) -> bytes:
            noted = _NOTED.decode(known) if known is not None else _FORGOTTEN
            before.append(noted.is_told)
            return msgspec.json.encode(msgspec.structs.replace(noted, is_told=True))

        await self._store.learn({_key(answer_id): mark})
        return not before[-1]

    async def _noted(self, answer_id: str) -> _Noted | None:
        known = await self._store.learned(_key(answer_id))
        try:
            return _NOTED.decode(known) if known is not None else None
        except msgspec.DecodeError:
            logger.warning("the note of a response made in the background cannot be read")
            return None


def _key(answer_id: str) -> str:
    return _PENDING + response_digest(answer_id)
