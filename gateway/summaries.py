"""A summary of what a call leaves out, made by a call of the gateway's own and kept with the session.

That call goes the way of any other: it has an id, a record and a charge, and is settled before the one it is made for
is sent. Where there is no summary, the call that wanted one goes on without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Final, cast

from gateway.calls import TELLING, Caller, Directives, Incoming, Purpose, Reply
from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import UpstreamTimeout
from gateway.core.fitting.summary import NeedsSummary
from gateway.core.forwarding import CREDENTIALS, Provider, holds_credential
from gateway.core.ports import Headers, SessionKey, Store
from gateway.core.routing import Route, Routes
from gateway.core.spending import KeyBudget
from gateway.dialects import endpoint
from gateway.dialects.openai_chat import completion_request, completion_text
from gateway.progress import TOO_SLOW, Progress

#: a call waits so long for a summary
SUMMARY_S: Final = 60.0
#: how the length of an answer is bounded: as most know it, and as some insist on
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
#: a summary may be so many times longer than it was asked to be
_LONGEST_SUMMARY: Final = 2


class NoSummaryError(Exception):
    """There is no summary, and why: for the record of the call that would have been sent with it."""


class Summaries:
    """Makes summaries. Shared by all calls.

    `handle` sends a call of our own on its way, as `Gateway.handle` does.
    """

    def __init__(
        self,
        routes: Routes,
        providers: Mapping[str, Provider],
        store: Store,
        handle: Callable[[Incoming], AbstractAsyncContextManager[Reply]],
        *,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        patience_s: float,
    ) -> None:
        self._routes = routes
        self._providers = providers
        self._store = store
        self._handle = handle
        self._new_id = new_id
        self._clock = clock
        self._patience_s = patience_s

    async def make(self, needs: NeedsSummary, progress: Progress) -> None:
        """Have a summary made for a call, and kept before it is used.

        Raises:
            GatewayError, NoSummaryError: there is none, and why.
        """
        session = progress.session
        if session is None:
            raise NoSummaryError("there is no session to keep it in")
        call_id, text = await self._summary_of(needs, session, progress)
        state = await self._store.update(session, lambda state: state.with_summary(needs.id, text))
        progress.remembered = replace(progress.remembered, state=state)
        progress.use = "known"
        progress.notes["summary"] = f"of {needs.count} messages, made by call {call_id}"

    async def _summary_of(self, needs: NeedsSummary, session: SessionKey, progress: Progress) -> tuple[str, str]:
        """The id of the call that made it, and its text."""
        headers = self._headers(self._routes.resolve(needs.model), progress)
        async with _patience(self._patience_s):
            for field_name in _LIMITS:
                body = completion_request(needs.model, needs.messages, (field_name, needs.max_tokens))
                call_id = self._new_id()
                async with self._handle(self._of_our_own(call_id, session, headers, body, progress)) as reply:
                    answer = reply.body if isinstance(reply.body, bytes) else b""
                if reply.status not in TELLING or _LIMITS[-1].encode() not in answer:
                    break
        if reply.status != 200:  # noqa: PLR2004
            raise NoSummaryError(f"call {call_id} was answered with the status {reply.status}")
        text = completion_text(answer)
        if text is None:
            raise NoSummaryError(f"call {call_id} was answered without a text")
        if estimate_tokens(text) > _LONGEST_SUMMARY * needs.max_tokens:
            raise NoSummaryError(f"call {call_id} was answered with far more than was asked for")
        return call_id, text

    def _headers(self, route: Route, progress: Progress) -> Headers:
        """The headers of a call for a summary: with the gateway's own credential, or the caller's where it belongs."""
        provider, incoming = self._providers[route.provider], progress.incoming
        headers: Headers = [(b"content-type", b"application/json")]
        if holds_credential(provider):
            return headers
        key_headers = incoming.caller.key_headers
        own = [pair for pair in incoming.headers if pair[0] in CREDENTIALS and pair[0] not in key_headers]
        # Where the call itself goes, a call without a credential goes too: many local servers ask for none.
        if route.provider != progress.route.provider:
            raise NoSummaryError(f"the gateway holds no key of {route.provider}")
        return headers + own

    def _of_our_own(
        self, call_id: str, session: SessionKey, headers: Headers, body: bytes, progress: Progress
    ) -> Incoming:
        asking = progress.incoming
        return Incoming(
            call_id=call_id,
            request_id=call_id,
            method="POST",
            path="chat/completions",
            query="",
            headers=headers,
            body=body,
            unpacked=False,
            endpoint=endpoint("POST", "chat/completions"),
            # What a client key may call says nothing of what the gateway may.
            caller=Caller(session.namespace, budget=KeyBudget(asking.caller.budget.limits)),
            path_session=session.id,
            started=self._clock(),
            directives=Directives(budget=asking.directives.budget),
            purpose=Purpose("summary", progress.derived, {"for": asking.call_id}),
        )


@asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[None]:
    """So long and no longer. What is cut says so in its record, and is told from what is cut because nobody waits.

    Raises:
        UpstreamTimeout: it took longer.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel, TOO_SLOW)
    try:
        yield
    except asyncio.CancelledError as error:
        if error.args != (TOO_SLOW,) or task.uncancel() > 0:
            raise
        raise UpstreamTimeout(f"it took longer than {seconds:g} s") from None
    finally:
        timer.cancel()
