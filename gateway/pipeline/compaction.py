"""Compact a conversation where its provider cannot, and expand the gateway's own compaction items.

A request for compaction is forwarded unchanged to a provider that makes compactions. For any other provider the gateway
responds itself: it trims the conversation, with a summary if `context.summary` names a model, keeps the remaining items
in the store, and returns one compaction item that holds their handle. The client sends this item back with
each later request. It is expanded before the request is counted, trimmed and forwarded.

The items are kept with the session's tool results: for as long as the session, and within `sessions.results_max_mb`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from gateway.call.recent_models import RecentModels
from gateway.call.record import input_estimate
from gateway.call.state import CallState
from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.context.request import RequestComposer
from gateway.core.context_budget import ContextOptions, smallest_limit
from gateway.core.errors import (
    CompactionUnknown,
    InvalidRequest,
    SessionRequired,
    UpstreamProtocolError,
)
from gateway.core.http.headers import EVENTS, ProviderAddress, is_success
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Results, UpstreamReply
from gateway.core.routing import ModelFacts, Route
from gateway.core.times import Clocks
from gateway.dialects.base import Call
from gateway.dialects.compaction import (
    COMPACT_PATH,
    MadeCompaction,
    asks_for_compaction,
    compacted_response,
    compaction_in,
    expand,
    handle_of,
    handles_in,
    is_unsupported,
    items_to_compact,
    streamed_response,
    whole_response,
)
from gateway.dialects.fields import join, write_fields
from gateway.dialects.server_state import continued_from
from gateway.pipeline.response import MAX_WHOLE_ANSWER, read_error
from gateway.upstream.body import AlreadyRead, decompress, is_compressed, without_compression_headers

T = TypeVar("T")

#: Share of the conversation's tokens that a compaction by trimming keeps. Clients compact near their limit, so three
#: quarters of it become free.
KEPT_SHARE: Final = 0.25
#: maximum characters of all items that are expanded in one request; the default maximum of a body
MAX_EXPANDED: Final = 64 * 1024 * 1024
#: characters that are expanded in the event loop; more are expanded in a thread
_INLINE: Final = 256 * 1024
#: Conversations of up to this many tokens are not trimmed.
KEPT_LEAST: Final = 2_000
#: Factor on the tokens that must stay: they are counted as chat messages.
_MUST_STAY: Final = 1.1
_JSON: Final = [(b"content-type", b"application/json")]
_STREAM: Final = [(b"content-type", EVENTS)]
_MIB: Final = 2**20


class Compactions:
    """Make and expand compactions. One instance serves all calls.

    `most`: bytes of texts that a session keeps.
    """

    def __init__(
        self,
        *,
        store: Results,
        planner: Planner,
        composer: RequestComposer,
        providers: Mapping[str, ProviderAddress],
        facts: Callable[[Route], ModelFacts],
        most: int,
        new_id: Callable[[], str],
        clocks: Clocks,
    ) -> None:
        self._store = store
        self._planner = planner
        self._composer = composer
        self._providers = providers
        self._facts = facts
        self._most = most
        self._new_id = new_id
        self._clocks = clocks
        #: models whose provider refused to compact, or responded without a compaction
        self._unsupported = RecentModels(clocks.monotonic)

    # --- before the call ---------------------------------------------------------------------------------------

    async def begin(self, state: CallState, call: Call) -> Call:
        """Note whether a request asks for compaction, and expand the gateway's own items in it.

        Raises:
            CompactionUnknown: the store does not have one of them.
            InvalidRequest: the items hold too much together.
            StoreUnavailable: the items cannot be read.
        """
        endpoint, incoming = state.incoming.endpoint, state.incoming
        if not endpoint.may_continue or incoming.purpose is not None:
            return call
        if endpoint.metered and incoming.path.rstrip("/").lower() == COMPACT_PATH:
            state.context.compaction = "path"
        elif endpoint.wire == "responses" and await self._read(call, asks_for_compaction):
            state.context.compaction = "trigger"
        handles = await self._read(call, handles_in)
        if not handles:
            return call
        texts = await self._texts(state, handles)
        size = sum(len(texts[handle]) for handle in handles)
        _check_size(size)
        if size <= _INLINE:
            return expand(call, texts)
        return await asyncio.to_thread(expand, call, texts)

    async def _read(self, call: Call, work: Callable[[Call], T]) -> T:
        return await self._planner.read(len(call.body), partial(work, call))

    async def _texts(self, state: CallState, handles: Sequence[str]) -> Mapping[str, str]:
        session, namespace = state.session, state.incoming.caller.namespace
        known = dict(await self._store.results(session, handles)) if session is not None else {}
        for handle in handles:
            if handle in known:
                continue
            # A fork or a sub-agent continues from it in another session, which may live longer.
            text = await self._store.result(namespace, handle)
            if text is None:
                raise CompactionUnknown(
                    "The input has a compaction item that this gateway cannot open: another deployment or client key "
                    "made it, or its session has expired or was deleted. Start a new conversation, or send the "
                    "messages instead of the item.",
                    param="input",
                )
            known[handle] = text
            _check_size(sum(map(len, known.values())))
            if session is not None:
                await self._store.keep_results(session, {handle: text}, self._most)
        return known

    # --- instead of a provider ---------------------------------------------------------------------------------

    def is_made_here(self, state: CallState) -> bool:
        """Return whether the gateway compacts, since the provider of the current route is known not to."""
        if state.context.compaction is None:
            return False
        return (
            self._providers[state.routing.route.provider].compaction is False
            or state.routing.route in self._unsupported
        )

    async def make(self, state: CallState, call: Call, usage: Mapping[str, object] | None = None) -> UpstreamReply:
        """Compact the conversation of a request. `usage`: what a provider reported that was called first.

        Raises:
            SessionRequired: there is no session to keep the compaction in.
            InvalidRequest: there is nothing to compact, a part of the conversation is stored at its provider, or the
                session has no room for it.
            StoreUnavailable: the compaction cannot be stored.
        """
        session = state.session
        if session is None:
            raise SessionRequired("A compaction is kept in its session, and the call names none. Send x-session-id.")
        if continued_from(call.fields, "responses"):
            raise InvalidRequest(
                "The provider of this model makes no compaction, and the gateway can compact only what the request "
                "holds. Send the whole input, without previous_response_id or conversation.",
                param="input",
            )
        items = await self._trimmed(state, call)
        handle = await self._keep(session, bytes(join(items)).decode())
        made = MadeCompaction(handle, f"resp_{self._new_id()}", call.model or "", int(self._clocks.wall()), usage)
        state.response.status, state.dispatch.head_at = 200, self._clocks.monotonic()
        if state.context.compaction == "path":
            return AlreadyRead(200, _JSON, compacted_response(made))
        if call.stream:
            return AlreadyRead(200, _STREAM, streamed_response(made))
        return AlreadyRead(200, _JSON, whole_response(made))

    async def _keep(self, session: SessionKey, text: str) -> str:
        handle = handle_of(session.namespace, text)
        if await self._store.keep_results(session, {handle: text}, self._most):
            size = len(text.encode()) / _MIB
            raise InvalidRequest(
                f"The compaction has {size:.1f} MiB, and the session may keep {self._most / _MIB:.0f} MiB of "
                "texts in all. Raise sessions.results_max_mb, or start a new conversation."
            )
        return handle

    async def _trimmed(self, state: CallState, call: Call) -> Sequence[bytes]:
        """Return the items of a conversation that remain, some of them shorter, and note what was done."""
        original = await self._read(call, items_to_compact)
        fields = {**call.fields, "input": join(original)}
        whole = replace(call, fields=fields, body=write_fields(fields, {}))
        contents = await self._planner.contents(whole, "responses")
        if contents is None:
            state.notes["compaction"] = "made by the gateway: too many items to be trimmed"
            return original
        facts = self._facts(state.routing.route)
        asked = PlanRequest(contents, state.routing.route, facts, ContextOptions("auto"), len(whole.body))
        counts = await self._planner.count_tokens(asked, state.context.remembered)
        tokens, overhead = counts.original.tokens, counts.original.estimate.overhead
        target = overhead + max(KEPT_LEAST, int((tokens - overhead) * KEPT_SHARE))
        limit = smallest_limit(target, state.incoming.directives.context.budget)
        asked = replace(asked, options=ContextOptions("auto", limit), counts=counts)
        plan = await self._composer.plan(state, asked)
        if plan.overflow is not None:
            # The items that must remain exceed the target, so try again with a larger target.
            roomy = replace(asked, options=ContextOptions("auto", overhead + int(plan.overflow.needed * _MUST_STAY)))
            plan = await self._composer.plan(state, roomy)
        kept = original if plan.messages is None else plan.messages
        state.notes["compaction"] = (
            f"made by the gateway: {len(kept)} of {len(original)} items, {plan.context.tokens - overhead:,} of "
            f"{tokens - overhead:,} tokens"
        )
        return kept

    # --- after a provider --------------------------------------------------------------------------------------

    async def checked(self, state: CallState, call: Call, response: UpstreamReply) -> UpstreamReply:
        """Return a provider's response, or the gateway's compaction if the response has none.

        If support is unknown, the whole response is read first: some hosts ignore the trigger and return a message,
        which clients treat as a failure.
        """
        if state.context.compaction is None:
            return response
        if not is_success(response.status):
            return await self._unless_unsupported(state, call, response)
        if self._providers[state.routing.route.provider].compaction is True:
            return response
        state.response.is_billed = True
        body = await _whole(response)
        found = compaction_in(body)
        if found.items == 1 or found.is_error:
            return AlreadyRead(response.status, without_compression_headers(response.headers), body)
        usage = found.usage or {"input_tokens": input_estimate(state), "output_tokens": 0}
        self._unsupported.add(state.routing.route)
        return await self._instead(state, call, usage)

    async def _unless_unsupported(self, state: CallState, call: Call, response: UpstreamReply) -> UpstreamReply:
        body = await read_error(response)
        if is_unsupported(response.status, body, is_path=state.context.compaction == "path"):
            self._unsupported.add(state.routing.route)
        elif not state.dispatch.is_too_long:
            return AlreadyRead(response.status, without_compression_headers(response.headers), body)
        return await self._instead(state, call, None)

    async def _instead(self, state: CallState, call: Call, usage: Mapping[str, object] | None) -> UpstreamReply:
        await state.dispatch.hang_up()
        state.dispatch.work(is_so=False)
        # Drop the plan: this response must not calibrate the token count.
        state.dispatch.is_too_long, state.context.plan = False, None
        return await self.make(state, call, usage)


def _check_size(size: int) -> None:
    """Refuse a request whose compaction items hold too much.

    Raises:
        InvalidRequest: the size exceeds `MAX_EXPANDED`.
    """
    if size > MAX_EXPANDED:
        raise InvalidRequest(
            f"The compaction items of the input hold {size:,} characters; they may hold {MAX_EXPANDED:,}. Send fewer "
            "of them: each replaces everything before it.",
            param="input",
        )


async def _whole(response: UpstreamReply) -> bytes:
    """Return the body of a response.

    Raises:
        UpstreamProtocolError: it is longer than any compaction.
    """
    body = bytearray()
    async for piece in decompress(response) if is_compressed(response) else response.chunks():
        body += piece
        if len(body) > MAX_WHOLE_ANSWER:
            raise UpstreamProtocolError(f"The provider's compaction has over {MAX_WHOLE_ANSWER:,} bytes.")
    return bytes(body)
