"""Retry a provider if nothing can have been billed, and open its circuit after failures in a row.

A request is retried only before the first byte of a response, and only if the provider certainly did no work: either no
connection was made, or the provider itself refused the request. After any other failure the call may have been billed,
so the caller decides whether to send it again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final

from gateway.core.errors import UpstreamFault, UpstreamOpenCircuit
from gateway.core.http.headers import header
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import (
    CLOSED,
    RETRIED,
    BreakerPolicy,
    RetryPolicy,
    is_provider_failure,
    requested_wait,
)
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.record import NOTE_RETRIES
from gateway.core.values import dataclass

logger = logging.getLogger("gateway")

#: the header by which SDKs decide whether to retry a call
_SHOULD_RETRY: Final = b"x-should-retry"


@dataclass(frozen=True, slots=True)
class _Marked:
    """A provider's response with other headers."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    chunks: Callable[[], AsyncIterator[bytes]]


class RetryingUpstream:
    """Send requests to one provider with retries and a circuit breaker. Wraps the upstream that sends them."""

    def __init__(
        self,
        name: str,
        inner: Upstream,
        retry: RetryPolicy,
        breaker: BreakerPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._inner = inner
        self._retry = retry
        self._policy = breaker
        self._breaker = CLOSED
        #: True after a call succeeded, or failed because of the provider
        self.was_called = False
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._chance = chance

    @property
    def failures(self) -> int:
        """Return the number of failures in a row."""
        return self._breaker.failed

    @property
    def opens_in_s(self) -> float | None:
        """Return the seconds until the circuit lets a call through; None: it is closed."""
        return self._breaker.opens_in(self._policy, self._clock())

    def send(self, request: Outgoing) -> _RetryContext:
        """Return the context in which the request is sent."""
        return _RetryContext(self, request)

    async def send_with_retries(
        self, request: Outgoing
    ) -> tuple[AbstractAsyncContextManager[UpstreamReply], UpstreamReply]:
        """Send a request, with retries.

        Returns:
            The context to leave (`__aexit__`) after reading, and the response.

        Raises:
            UpstreamFault: there is no response.
        """
        tries = 0
        while True:
            self._check()
            tries += 1
            sending = self._inner.send(request)
            try:
                reply = await self._try(sending)
            except UpstreamFault as fault:
                is_worth_it = fault.is_retryable and not (fault.took_long and request.has_next)
                wait = self._retry.wait(tries, None, self._chance()) if is_worth_it else None
                self._failed(is_providers=fault.is_providers, is_last=wait is None)
                if wait is None:
                    if self._retry.is_spent(tries):
                        fault.retry = False
                    raise
                reason = fault.code
            else:
                wait = self._wait(reply, tries, has_next=request.has_next)
                if is_provider_failure(reply.status):
                    self._failed(is_providers=True, is_last=wait is None)
                if wait is None:
                    return sending, self._forbid_retry(reply) if self._retry.is_spent(tries) else reply
                reason = str(reply.status)
                await sending.__aexit__(None, None, None)
            request.note(NOTE_RETRIES, f"{tries}, the last after {reason}")
            # If the client leaves during the wait, no work is running that could be billed.
            request.on_work(is_so=False)
            await self._sleep(wait)

    async def _try(self, sending: AbstractAsyncContextManager[UpstreamReply]) -> UpstreamReply:
        self._breaker = self._breaker.after_start()
        try:
            reply = await sending.__aenter__()
        except UpstreamFault:
            raise
        except BaseException:
            self._breaker = self._breaker.after_abandon()
            raise
        if not is_provider_failure(reply.status):
            self._record(succeeded=True)
        return reply

    def _failed(self, *, is_providers: bool, is_last: bool) -> None:
        """Count a failed call once: at its last try, or at its first try if it tests an open circuit.

        `is_providers`: the provider caused the failure. Bad requests of one client must not open the circuit for all.
        """
        if is_providers and (is_last or self._breaker.is_probed):
            self._record(succeeded=False)
        else:
            self._breaker = self._breaker.after_abandon()

    def _forbid_retry(self, reply: UpstreamReply) -> UpstreamReply:
        """Return a refusal with a header that forbids a retry, unless it asks the client to wait.

        The gateway has retried already. If the SDK retried too, the tries of both would multiply.
        """
        if reply.status not in RETRIED or requested_wait(reply.headers, self._wall()):
            return reply
        other_headers = [pair for pair in reply.headers if pair[0] != _SHOULD_RETRY]
        return _Marked(reply.status, [*other_headers, (_SHOULD_RETRY, b"false")], reply.chunks)

    def _wait(self, reply: UpstreamReply, tries: int, *, has_next: bool) -> float | None:
        # An exhausted quota is a 429 too. Some providers then say that waiting does not help.
        if reply.status not in RETRIED or header(reply.headers, _SHOULD_RETRY) == b"false":
            return None
        asked = requested_wait(reply.headers, self._wall())
        return self._retry.wait(tries, asked, self._chance(), has_next=has_next)

    def _check(self) -> None:
        opens_in = self._breaker.opens_in(self._policy, self._clock())
        if opens_in is not None:
            seconds = max(1, math.ceil(opens_in))
            fault = UpstreamOpenCircuit(
                f'The provider "{self._name}" failed {self._breaker.failed} times in a row, so its circuit is open. '
                f"It is called again in {seconds} s."
            )
            fault.retry_after = seconds
            raise fault

    def _record(self, *, succeeded: bool) -> None:
        self.was_called = True
        if succeeded and self._breaker is CLOSED:
            return
        before = self._breaker
        self._breaker = before.after_call(self._policy, self._clock(), succeeded=succeeded)
        if (before.since is None) != (self._breaker.since is None):
            state = "closed" if self._breaker.since is None else f"open for {self._policy.open_s:g} s"
            logger.warning("provider %s: circuit %s", self._name, state)

    async def aclose(self) -> None:
        """Close the wrapped upstream."""
        await self._inner.aclose()


class _RetryContext:
    """One request with its retries: entered when there is a response to pass on."""

    __slots__ = ("_request", "_sending", "_upstream")

    def __init__(self, upstream: RetryingUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._sending: AbstractAsyncContextManager[UpstreamReply] | None = None

    async def __aenter__(self) -> UpstreamReply:
        self._sending, reply = await self._upstream.send_with_retries(self._request)
        return reply

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:
            await self._sending.__aexit__(None, None, None)


if TYPE_CHECKING:
    _: type[Upstream] = RetryingUpstream
