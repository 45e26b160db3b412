"""Have a model summarize messages that a trim leaves out, in a call of the gateway's own.

Such a call is like any other: it has an id, a record and a charge. It is settled before the call that needs the summary
is sent. If it fails, that call continues without a summary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final, TypeVar

from gateway.call.routing import route_seed
from gateway.call.state import CallState
from gateway.call.timeout import max_wait
from gateway.call.types import Caller, ClientResponse, Directives, Incoming, Purpose
from gateway.core.conversation.message import Message
from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError
from gateway.core.http.headers import CREDENTIALS, Headers, ProviderAddress
from gateway.core.http.retry_policy import EXPLAINED
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Sessions
from gateway.core.routing import Route, Routes
from gateway.core.trimming.summary import SummaryRequest
from gateway.core.values import dataclass
from gateway.dialects import endpoint
from gateway.dialects.openai_chat import completion_request, completion_text

T = TypeVar("T")

#: seconds that a call waits for a summary
SUMMARY_S: Final = 60.0
#: names of the field with the output limit: the one that most providers know, and the one that some require
_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens")
#: a summary may have this many times the tokens that were requested
_MAX_EXCESS: Final = 2


class NoSummaryError(Exception):
    """No summary could be made. The message is the reason, for the record of the call that needs it."""


@dataclass(frozen=True, slots=True)
class SummaryQuestion:
    """A request for a summary.

    Attributes:
        operation: the operation in the record of its call.
        model: the name of the model as configured.
        messages: the prompt.
        max_tokens: the output limit.
    """

    operation: str
    model: str
    messages: tuple[Message, ...]
    max_tokens: int


class Summaries:
    """Requests summaries from models, for all calls.

    Args:
        routes: finds the provider of a model.
        providers: addresses of the providers.
        store: keeps the summaries.
        handle: handles a call of the gateway itself like a client's call (`Gateway.handle`).
        new_id: returns a new call id.
        clock: returns monotonic seconds.
        max_wait_s: seconds that a call waits for a summary.
    """

    def __init__(
        self,
        routes: Routes,
        providers: Mapping[str, ProviderAddress],
        store: Sessions,
        handle: Callable[[Incoming], AbstractAsyncContextManager[ClientResponse]],
        *,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        max_wait_s: float,
    ) -> None:
        self._routes = routes
        self._providers = providers
        self._store = store
        self._handle = handle
        self._new_id = new_id
        self._clock = clock
        self._max_wait_s = max_wait_s

    async def make(self, needs: SummaryRequest, state: CallState) -> None:
        """Request a summary for a call, and store it before it is used.

        Raises:
            GatewayError, NoSummaryError: no summary could be made or stored.
        """
        session = state.session
        if session is None:
            raise NoSummaryError("the call has no session to store it in")
        question = SummaryQuestion("summary", needs.model, needs.messages, needs.max_tokens)
        call_id, text = await self._while_at_work(self._ask(question, session, state), state)
        kept = await self._store.update(session, lambda kept: kept.with_summary(needs.id, text))
        state.context.remembered = replace(state.context.remembered, state=kept)
        state.context.summary_use = "known"
        state.notes["summary"] = f"of {needs.count} messages, made by call {call_id}"

    async def request_all(
        self, questions: Sequence[SummaryQuestion], session: SessionKey, state: CallState
    ) -> list[tuple[str | None, str]]:
        """Send several requests at the same time; return for each the summary and a note about its call.

        The summary is None if it failed; the note then says why. If the waiting call is cancelled, so are these calls,
        with the same outcome.
        """

        async def ask(question: SummaryQuestion) -> tuple[str | None, str]:
            try:
                call_id, text = await self._ask(question, session, state)
            except (GatewayError, NoSummaryError) as error:
                return None, f"none: {error}"
            return text, f"call {call_id}"

        return list(await self._while_at_work(asyncio.gather(*map(ask, questions)), state))

    async def _while_at_work(self, summary: Awaitable[T], state: CallState) -> T:
        """Wait for a summary. The provider counts as working: if the client leaves, the summary is still completed."""
        # The summary is charged to the session, so the totals that were read before are out of date.
        state.budget.totals_before = None
        state.dispatch.observer(is_so=True)
        try:
            return await summary
        finally:
            state.dispatch.observer(is_so=False)

    async def _ask(self, question: SummaryQuestion, session: SessionKey, state: CallState) -> tuple[str, str]:
        """Send a request; return the id of its call and the text of the summary."""
        headers = self._headers(self._route(question.model, session), state)
        async with max_wait(self._max_wait_s):
            for field_name in _LIMIT_FIELDS:
                incoming = self._incoming(question, field_name, session, headers, state)
                call_id = incoming.call_id
                async with self._handle(incoming) as reply:
                    body = reply.body if isinstance(reply.body, bytes) else b""
                if reply.status not in EXPLAINED or _LIMIT_FIELDS[-1].encode() not in body:
                    break
        if reply.status != 200:  # noqa: PLR2004
            raise NoSummaryError(f"call {call_id} failed with status {reply.status}")
        text = completion_text(body)
        if text is None:
            raise NoSummaryError(f"the response to call {call_id} has no text")
        if estimate_tokens(text) > _MAX_EXCESS * question.max_tokens:
            raise NoSummaryError(f"the response to call {call_id} is far longer than requested")
        return call_id, text

    def _route(self, model: str, session: SessionKey) -> Route:
        """Return the first route of a call of the gateway for this session."""
        return self._routes.chain(model, route_seed(session, ""))[0]

    def _headers(self, route: Route, state: CallState) -> Headers:
        """Return the headers of a call for a summary.

        The provider's credential is added later if the gateway holds one. Otherwise the caller's credential is sent,
        but only to the provider that the caller's own call uses.

        Raises:
            NoSummaryError: the gateway holds no credential for another provider.
        """
        provider, incoming = self._providers[route.provider], state.incoming
        headers: Headers = [(b"content-type", b"application/json")]
        if provider.holds_credential:
            return headers
        key_headers = incoming.caller.key_headers
        credentials = [pair for pair in incoming.headers if pair[0] in CREDENTIALS and pair[0] not in key_headers]
        # There may be no credential to pass on, because many local servers need none.
        if route.provider != state.routing.route.provider:
            raise NoSummaryError(f"the gateway has no API key for {route.provider}")
        return headers + credentials

    def _incoming(
        self, question: SummaryQuestion, limit_field: str, session: SessionKey, headers: Headers, state: CallState
    ) -> Incoming:
        served, call_id = state.incoming, self._new_id()
        return Incoming(
            call_id=call_id,
            request_id=call_id,
            method="POST",
            path="chat/completions",
            query="",
            headers=headers,
            body=completion_request(question.model, question.messages, (limit_field, question.max_tokens)),
            decompressed=False,
            endpoint=endpoint("POST", "chat/completions"),
            # The models that a client key may use do not limit the gateway's own calls.
            caller=Caller(session.namespace, budget=served.caller.budget._replace(rpm=None)),
            path_session=session.id,
            started=self._clock(),
            directives=Directives(budget=served.directives.budget, tag=served.directives.tag),
            purpose=Purpose(question.operation, state.is_session_derived, {"for": served.call_id}, state.agent),
        )
