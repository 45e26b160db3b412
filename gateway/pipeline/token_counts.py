"""Count the tokens of a request where its provider cannot: `messages/count_tokens` and `responses/input_tokens`.

The provider is asked first, because its count is exact. A provider without such a path is remembered for an hour, and
one that is called through a translation has none. The gateway then responds with its own estimate, marked in a header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from gateway.call.recent_models import RecentModels
from gateway.call.state import CallState
from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.core.context_budget import ContextOptions
from gateway.core.counting.measure import Wire
from gateway.core.http.headers import ProviderAddress
from gateway.core.ports import UpstreamReply
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import NOTHING_REMEMBERED
from gateway.dialects.base import Call
from gateway.pipeline.response import read_error
from gateway.upstream.body import AlreadyRead, without_compression_headers

#: statuses of providers without the path
_NO_SUCH_PATH: Final = frozenset({404, 405, 501})
_NOT_FOUND: Final = 404
#: part of each error with status 404 that is about an unknown model instead
_ABOUT_MODEL: Final = b"model"


class TokenCounts:
    """Answer requests for a token count instead of a provider. One instance serves all calls."""

    def __init__(
        self,
        planner: Planner,
        providers: Mapping[str, ProviderAddress],
        facts: Callable[[Route], ModelFacts],
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._providers = providers
        self._facts = facts
        #: models whose provider has shown that it does not count
        self._uncounted = RecentModels(clock)

    async def instead(self, state: CallState, call: Call) -> UpstreamReply | None:
        """Return the gateway's own count if the provider is known not to count; else None."""
        route = state.routing.route
        if state.incoming.endpoint.counts is None:
            return None
        if not (self._providers[route.provider].is_translated or route in self._uncounted):
            return None
        return await self._counted(state, call)

    async def checked(self, state: CallState, call: Call, response: UpstreamReply) -> UpstreamReply:
        """Return the provider's response, or the gateway's own count if the provider has no such path."""
        if state.incoming.endpoint.counts is None or response.status not in _NO_SUCH_PATH:
            return response
        body = await read_error(response)
        refusal = AlreadyRead(response.status, without_compression_headers(response.headers), body)
        if response.status == _NOT_FOUND and _ABOUT_MODEL in body.lower():
            return refusal
        counted = await self._counted(state, call)
        if counted is None:
            return refusal
        self._uncounted.add(state.routing.route)
        await state.dispatch.hang_up()
        state.dispatch.work(is_so=False)
        return counted

    async def _counted(self, state: CallState, call: Call) -> UpstreamReply | None:
        """Return a response with the estimated tokens of a request; None if the request cannot be read."""
        wire, route = state.incoming.endpoint.counts, state.routing.route
        contents = await self._planner.contents(call, wire) if wire is not None else None
        if wire is None or contents is None or (wire == "messages" and contents.messages is None):
            return None
        request = PlanRequest(contents, route, self._facts(route), ContextOptions(), len(call.body))
        counts = await self._planner.count_tokens(request, NOTHING_REMEMBERED)
        state.response.is_count_estimated = True
        body = _body(wire, counts.original.tokens)
        length = str(len(body)).encode()
        return AlreadyRead(200, [(b"content-type", b"application/json"), (b"content-length", length)], body)


def _body(wire: Wire, tokens: int) -> bytes:
    """Return the body of a response with a token count, in the format of the API."""
    count: dict[str, object] = {"input_tokens": tokens}
    return msgspec.json.encode({"object": "response.input_tokens", **count} if wire == "responses" else count)
