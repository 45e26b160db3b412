"""Have a model summarize messages that a trim leaves out, in a call of the gateway's own.

Such a call goes the way of any other: it has an id, a record and a charge, and is settled before the one it is made for
is sent. Where there is no summary, the call that wanted one goes on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final, TypeVar

from gateway.call.routing import seed_of
from gateway.call.state import CallState
from gateway.call.timeout import max_wait
from gateway.call.types import Caller, ClientResponse, Directives, Incoming, Purpose
from gateway.core.conversation.message import Message
from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError
from gateway.core.fitting.summary import SummaryRequest
from gateway.core.http.headers import CREDENTIALS, Headers, ProviderAddress
from gateway.core.http.retry_policy import TELLING
from gateway.core.ledger.charging import KeyLimits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Sessions
from gateway.core.routing import Route, Routes
from gateway.core.values import dataclass
from gateway.dialects import endpoint
from gateway.dialects.openai_chat import completion_request, completion_text

T = TypeVar("T")

#: a call waits so long for a summary
SUMMARY_S: Final = 60.0
#: the field that bounds an answer: the name that most providers know, and the one that some insist on
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
#: a summary may be so many times longer than it was asked to be
_LONGEST_SUMMARY: Final = 2


class NoSummaryError(Exception):
    """There is no summary, and why: for the record of the call that would have been sent with it."""


@dataclass(frozen=True, slots=True)
class SummaryQuestion:
    """What a model is asked. `operation`: how it is recorded; `model`: as configured; `max_tokens`: of its answer."""

    operation: str
    model: str
    messages: tuple[Message, ...]
    max_tokens: int


class Summaries:
    """Makes summaries. Shared by all calls.

    `handle` sends a call of our own on its way, as `Gateway.handle` does.
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

    async def make(self, needs: SummaryRequest, progress: CallState) -> None:
        """Have a summary made for a call, and kept before it is used.

        Raises:
            GatewayError, NoSummaryError: there is none, and why.
        """
        session = progress.session
        if session is None:
            raise NoSummaryError("there is no session to keep it in")
        question = SummaryQuestion("summary", needs.model, needs.messages, needs.max_tokens)
        call_id, text = await self._at_work(self._answer(question, session, progress), progress)
        state = await self._store.update(session, lambda state: state.with_summary(needs.id, text))
        progress.remembered = replace(progress.remembered, state=state)
        progress.use = "known"
        progress.notes["summary"] = f"of {needs.count} messages, made by call {call_id}"

    async def answers(
        self, questions: Sequence[SummaryQuestion], session: SessionKey, progress: CallState
    ) -> list[tuple[str | None, str]]:
        """What models say to several questions, asked at once: a text and by which call, or None and why there is none.

        A call that is cut while it waits cuts these calls too, with the same outcome.
        """

        async def one(question: SummaryQuestion) -> tuple[str | None, str]:
            try:
                call_id, text = await self._answer(question, session, progress)
            except (GatewayError, NoSummaryError) as error:
                return None, f"none: {error}"
            return text, f"call {call_id}"

        return list(await self._at_work(asyncio.gather(*map(one, questions)), progress))

    async def _at_work(self, answer: Awaitable[T], progress: CallState) -> T:
        """Wait for a summary. It counts as work of a provider: if the client leaves, it is made to its end."""
        # It is charged to the session, whose totals are out of date by then.
        progress.before = None
        progress.at_work(is_so=True)
        try:
            return await answer
        finally:
            progress.at_work(is_so=False)

    async def _answer(self, question: SummaryQuestion, session: SessionKey, progress: CallState) -> tuple[str, str]:
        """The id of the call that was made for it, and the text of its answer."""
        headers = self._headers(self._route(question.model, session), progress)
        async with max_wait(self._max_wait_s):
            for field_name in _LIMITS:
                incoming = self._of_our_own(question, field_name, session, headers, progress)
                call_id = incoming.call_id
                async with self._handle(incoming) as reply:
                    answer = reply.body if isinstance(reply.body, bytes) else b""
                if reply.status not in TELLING or _LIMITS[-1].encode() not in answer:
                    break
        if reply.status != 200:  # noqa: PLR2004
            raise NoSummaryError(f"call {call_id} was answered with the status {reply.status}")
        text = completion_text(answer)
        if text is None:
            raise NoSummaryError(f"call {call_id} was answered without a text")
        if estimate_tokens(text) > _LONGEST_SUMMARY * question.max_tokens:
            raise NoSummaryError(f"call {call_id} was answered with far more than was asked for")
        return call_id, text

    def _route(self, model: str, session: SessionKey) -> Route:
        """Where a call of ours for this session will go."""
        return self._routes.chain(model, seed_of(session, ""))[0]

    def _headers(self, route: Route, progress: CallState) -> Headers:
        """The headers of a call for a summary: with the gateway's own credential, or the caller's where it belongs."""
        provider, incoming = self._providers[route.provider], progress.incoming
        headers: Headers = [(b"content-type", b"application/json")]
        if provider.holds_credential:
            return headers
        key_headers = incoming.caller.key_headers
        own = [pair for pair in incoming.headers if pair[0] in CREDENTIALS and pair[0] not in key_headers]
        # The caller's credential is for the call's own provider. There may be none: many local servers ask for none.
        if route.provider != progress.route.provider:
            raise NoSummaryError(f"the gateway holds no key of {route.provider}")
        return headers + own

    def _of_our_own(
        self, question: SummaryQuestion, limit_field: str, session: SessionKey, headers: Headers, progress: CallState
    ) -> Incoming:
        asking, call_id = progress.incoming, self._new_id()
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
            # What a client key may call says nothing of what the gateway may.
            caller=Caller(session.namespace, budget=KeyLimits(asking.caller.budget.limits)),
            path_session=session.id,
            started=self._clock(),
            directives=Directives(budget=asking.directives.budget),
            purpose=Purpose(question.operation, progress.derived, {"for": asking.call_id}),
        )
