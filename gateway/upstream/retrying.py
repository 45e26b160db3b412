"""Retry a provider if nothing can have been billed, and open its circuit after failures in a row.

Only before the first byte of an answer, and only where it is sure that the provider did no work: the connection did not
come about, or it said itself that it turned the request away. Whatever else goes wrong may have been billed, and asking
again is the caller's to decide.
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
from gateway.core.http.retry_policy import REPEATED, WELL, BreakerPolicy, RetryPolicy, asked_wait, is_ill
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.values import dataclass

logger = logging.getLogger("gateway")

#: the header by which SDKs are told whether to repeat a call
_SHOULD_RETRY: Final = b"x-should-retry"


@dataclass(frozen=True, slots=True)
class _Marked:
    """A provider's response with other headers."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    chunks: Callable[[], AsyncIterator[bytes]]


class RetryingUpstream:
    """The way to one provider, with patience. Wraps the one that knows how to send."""

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
        self._breaker = WELL
        #: whether a call has ended here: well, or by a failure of the provider
        self.was_called = False
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._chance = chance

    @property
    def failures(self) -> int:
        """How often in a row the provider has failed."""
        return self._breaker.failed

    @property
    def asked_in_s(self) -> float | None:
        """Seconds until the provider is asked again; None: it is asked."""
        return self._breaker.opens_in(self._policy, self._clock())

    def send(self, request: Outgoing) -> _Asking:
        """See `Upstream.send`."""
        return _Asking(self, request)

    async def asked(self, request: Outgoing) -> tuple[AbstractAsyncContextManager[UpstreamReply], UpstreamReply]:
        """Ask, again if need be; what has to be left (`__aexit__`) once the answer was read, and the answer.

        Raises:
            UpstreamFault: there is none.
        """
        tries = 0
        while True:
            self._check()
            tries += 1
            sending = self._inner.send(request)
            try:
                reply = await self._try(sending)
            except UpstreamFault as fault:
                is_worth_it = fault.may_pass and not (fault.took_long and request.has_next)
                wait = self._retry.wait(tries, None, self._chance()) if is_worth_it else None
                self._failed(is_providers=fault.is_providers, is_last=wait is None)
                if wait is None:
                    if self._retry.is_spent(tries):
                        fault.retry = False
                    raise
                reason = fault.code
            else:
                wait = self._wait(reply, tries, has_next=request.has_next)
                if is_ill(reply.status):
                    self._failed(is_providers=True, is_last=wait is None)
                if wait is None:
                    return sending, self._not_again(reply) if self._retry.is_spent(tries) else reply
                reason = str(reply.status)
                await sending.__aexit__(None, None, None)
            request.note("retries", f"{tries}, the last after {reason}")
            # Whoever leaves now leaves nothing behind that would be billed.
            request.at_work(is_so=False)
            await self._sleep(wait)

    async def _try(self, sending: AbstractAsyncContextManager[UpstreamReply]) -> UpstreamReply:
        self._breaker = self._breaker.asked()
        try:
            reply = await sending.__aenter__()
        except UpstreamFault:
            raise
        except BaseException:
            self._breaker = self._breaker.left()
            raise
        if not is_ill(reply.status):
            self._did(well=True)
        return reply

    def _failed(self, *, is_providers: bool, is_last: bool) -> None:
        """Count a call that failed, once: at its last try, or at its first where it tests a provider left alone.

        `is_providers`: the failure is one of the provider. One client's requests must not close the way of all others.
        """
        if is_providers and (is_last or self._breaker.is_tried):
            self._did(well=False)
        else:
            self._breaker = self._breaker.left()

    def _not_again(self, reply: UpstreamReply) -> UpstreamReply:
        """Return a refusal marked as not to be repeated, unless it asks for a wait.

        An SDK that repeats a call has the gateway repeat it as well, so that the tries of both multiply.
        """
        if reply.status not in REPEATED or asked_wait(reply.headers, self._wall()):
            return reply
        kept = [pair for pair in reply.headers if pair[0] != _SHOULD_RETRY]
        return _Marked(reply.status, [*kept, (_SHOULD_RETRY, b"false")], reply.chunks)

    def _wait(self, reply: UpstreamReply, tries: int, *, has_next: bool) -> float | None:
        # A quota that is used up is a 429 as well; some say that no wait helps.
        if reply.status not in REPEATED or header(reply.headers, _SHOULD_RETRY) == b"false":
            return None
        asked = asked_wait(reply.headers, self._wall())
        return self._retry.wait(tries, asked, self._chance(), has_next=has_next)

    def _check(self) -> None:
        opens_in = self._breaker.opens_in(self._policy, self._clock())
        if opens_in is not None:
            seconds = max(1, math.ceil(opens_in))
            fault = UpstreamOpenCircuit(
                f'The provider "{self._name}" failed {self._breaker.failed} times in a row and is left alone. '
                f"It is asked again in {seconds} s."
            )
            fault.retry_after = seconds
            raise fault

    def _did(self, *, well: bool) -> None:
        self.was_called = True
        before = self._breaker
        self._breaker = before.did(self._policy, self._clock(), well=well)
        if (before.since is None) != (self._breaker.since is None):
            word = "is asked again" if self._breaker.since is None else f"is left alone for {self._policy.open_s:g} s"
            logger.warning("provider %s %s", self._name, word)

    async def aclose(self) -> None:
        """See `Upstream.aclose`."""
        await self._inner.aclose()


class _Asking:
    """One request on its way: entered when there is an answer worth passing on."""

    __slots__ = ("_request", "_sending", "_upstream")

    def __init__(self, upstream: RetryingUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._sending: AbstractAsyncContextManager[UpstreamReply] | None = None

    async def __aenter__(self) -> UpstreamReply:
        self._sending, reply = await self._upstream.asked(self._request)
        return reply

    async def __aexit__(self, *_: object) -> None:
        if self._sending is not None:
            await self._sending.__aexit__(None, None, None)


if TYPE_CHECKING:
    _: type[Upstream] = RetryingUpstream
