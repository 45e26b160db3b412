"""Send events to webhooks, signed as in Standard Webhooks 1.0.0.

- Calls never wait for a receiver: each webhook has a queue and a few senders in each worker.
- Events beyond the size of the queue are dropped and counted.
- A failed event is retried a few times, with growing delays.
- Only the host of a URL is logged, because paths and queries of webhook URLs often contain secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final

from gateway.core.errors import GatewayError
from gateway.core.http.headers import Headers, is_success
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import requested_wait
from gateway.core.http.signing import signature
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.values import dataclass
from gateway.telemetry.event_bodies import CONTENT_TYPES, BodyFormat

logger = logging.getLogger("gateway")

#: size of the queue of one webhook in one worker
MAX_WAITING: Final = 1000
#: events of one webhook that a worker sends at the same time
SENDERS: Final = 4
MAX_TRIES: Final = 6
_MAX_DELAY_S: Final = 60.0
#: statuses that are retried: timeout, too many requests, and errors of the receiver itself
_RETRIED: Final = frozenset({408, 429, *range(500, 600)})
#: A response is read up to this size, so that its connection can be reused. A larger one is not worth reading.
_READ_BYTES: Final = 64 * 1024
_NAME_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """The receiver of one webhook.

    Attributes:
        shown_url: the part of `url` that may be logged.
        events: the names of the events that it receives.
        key: signs the events; None to send them unsigned.
        timeout_s: time limit of one try, including the response.
        format: of the bodies.
    """

    url: str
    shown_url: str
    events: frozenset[str]
    key: bytes | None
    headers: Headers
    timeout_s: float
    format: BodyFormat = "event"


@dataclass(frozen=True, slots=True)
class _Message:
    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class _TryResult:
    """The result of one try. `problem`: for the log; `wait_s`: seconds that the receiver asks to wait, or None."""

    is_accepted: bool
    may_be_retried: bool
    problem: str
    wait_s: float | None = None


class WebhookSender:
    """Send events to one receiver. Create it while an event loop is running.

    `counted` is called with the result of each event: "sent", "failed" or "dropped".
    """

    def __init__(
        self,
        target: WebhookTarget,
        upstream: Upstream,
        *,
        counted: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.events = target.events
        self.format = target.format
        self._target = target
        self._upstream = upstream
        self._counted = counted
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._queue = asyncio.Queue[_Message](MAX_WAITING)
        self._senders: list[asyncio.Task[None]] = []
        self._sending = 0
        #: events dropped since the queue became full
        self._dropped = 0
        #: True if the last event failed
        self._is_failing = False

    @property
    def name(self) -> str:
        """Return a name of the receiver that is stored with waiting events. It does not reveal the URL."""
        return hashlib.sha256(f"{self.format} {self._target.url}".encode()).hexdigest()[:_NAME_DIGITS]

    async def offer(self, message_id: str, body: bytes) -> bool:
        """Send an event once, without the queue. Return False if it has to be offered again later."""
        result = await self._try(_Message(message_id, body))
        self._log_change(result)
        if not result.is_accepted and result.may_be_retried:
            return False
        self._counted("sent" if result.is_accepted else "failed")
        return True

    def put(self, message_id: str, body: bytes) -> None:
        """Queue an event, or drop it if the queue is full."""
        try:
            self._queue.put_nowait(_Message(message_id, body))
        except asyncio.QueueFull:
            self._drop()
            return
        if not self._senders:
            self._senders = [asyncio.create_task(self._send_all()) for _ in range(SENDERS)]

    def _drop(self) -> None:
        if not self._dropped:
            logger.warning(
                "webhook %s: %d events are waiting; further events are dropped", self._target.shown_url, MAX_WAITING
            )
        self._dropped += 1
        self._counted("dropped")

    async def _send_all(self) -> None:
        while True:
            message = await self._queue.get()
            self._sending += 1
            try:
                await self._send(message)
            except Exception:
                logger.exception("webhook %s: sending an event failed", self._target.shown_url)
            finally:
                self._queue.task_done()
            self._sending -= 1
            if self._dropped and self._queue.qsize() <= MAX_WAITING // 2:
                logger.warning("webhook %s: %d events were dropped", self._target.shown_url, self._dropped)
                self._dropped = 0

    async def _send(self, message: _Message) -> None:
        for number in range(1, MAX_TRIES + 1):
            result = await self._try(message)
            if result.is_accepted or not result.may_be_retried or number == MAX_TRIES:
                break
            backoff = 2 ** (number - 1) * (0.5 + self._chance() / 2)
            await self._sleep(min(_MAX_DELAY_S, max(backoff, result.wait_s or 0.0)))
        self._counted("sent" if result.is_accepted else "failed")
        self._log_change(result)

    def _log_change(self, result: _TryResult) -> None:
        """Log that the webhook began to fail, or that it works again."""
        if result.is_accepted == self._is_failing:
            self._is_failing = not result.is_accepted
            change = "accepts events again" if result.is_accepted else f"does not accept events: {result.problem}"
            logger.warning("webhook %s %s", self._target.shown_url, change)

    async def _try(self, message: _Message) -> _TryResult:
        request = Outgoing("POST", self._target.url, self._headers(message), message.body)
        problem = f"no response within {self._target.timeout_s:g} s"
        result = _TryResult(is_accepted=False, may_be_retried=True, problem=problem)
        try:
            async with asyncio.timeout(self._target.timeout_s), self._upstream.send(request) as reply:
                # The status decides, even if reading the body fails or takes too long.
                result = _result_of(reply, self._clock())
                with contextlib.suppress(GatewayError):
                    await _drain(reply.chunks())
        except TimeoutError:
            return result
        except GatewayError as fault:
            return replace(result, problem=fault.code)
        return result

    def _headers(self, message: _Message) -> Headers:
        now = int(self._clock())
        headers: Headers = [
            (b"content-type", CONTENT_TYPES[self.format]),
            (b"user-agent", b"llm-session-gateway"),
            (b"webhook-id", message.id.encode()),
            (b"webhook-timestamp", b"%d" % now),
            *self._target.headers,
        ]
        if self._target.key is not None:
            signed = signature(self._target.key, message.id, now, message.body)
            headers.append((b"webhook-signature", signed.encode()))
        return headers

    async def aclose(self, max_wait_s: float) -> None:
        """Send the queued events, for at most `max_wait_s` seconds, and close the connections."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_wait_s):
                await self._queue.join()
        unsent = self._queue.qsize() + self._sending
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        if unsent:
            logger.warning(
                "webhook %s: %d events were not sent before the gateway stopped", self._target.shown_url, unsent
            )
        await self._upstream.aclose()


def _result_of(reply: UpstreamReply, now: float) -> _TryResult:
    wait_s = requested_wait(reply.headers, now)
    return _TryResult(is_success(reply.status), reply.status in _RETRIED, f"status {reply.status}", wait_s)


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    """Read a response to its end, so that the connection can be reused. Stop early if it is too large."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        if size > _READ_BYTES:
            return
