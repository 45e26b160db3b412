"""Send events to webhooks, signed as in Standard Webhooks 1.0.0.

No call waits for a receiver.

Each webhook of each worker has a queue and a few senders. What the queue has no room for is dropped and counted; what
is not taken is sent again a few times, later each time. Only the host of a URL is ever logged: paths and queries of
such URLs are often secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final

from gateway.core.errors import GatewayError
from gateway.core.http.headers import Headers, is_success
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import asked_wait
from gateway.core.http.signing import signature
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.values import dataclass

logger = logging.getLogger("gateway")

#: events that may wait for one webhook in one worker
MOST_WAITING: Final = 1000
#: events of one webhook that a worker sends at once
SENDERS: Final = 4
TRIES: Final = 6
_LONGEST_WAIT_S: Final = 60.0
#: asked again: too many requests, and whatever is the receiver's own trouble
_AGAIN: Final = frozenset({408, 429, *range(500, 600)})
#: bytes of an answer that are read so that its connection can be used again; for more that is not worth it
_READ_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """Where events go.

    Attributes:
        shown: what may be said of `url`.
        key: that events are signed with; None: they are not signed.
        timeout_s: for one try, with the answer.
    """

    url: str
    shown: str
    events: frozenset[str]
    key: bytes | None
    headers: Headers
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Message:
    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class _Answer:
    """What became of one try. `said`: for the log; `wait_s`: seconds that the receiver asks to wait, if it does."""

    is_taken: bool
    may_be_tried_again: bool
    said: str
    wait_s: float | None = None


class WebhookSender:
    """Sends events to one receiver. Construct it where an event loop runs; `counted` hears what became of each."""

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
        self._target = target
        self._upstream = upstream
        self._counted = counted
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._queue = asyncio.Queue[_Message](MOST_WAITING)
        self._senders: list[asyncio.Task[None]] = []
        self._under_way = 0
        #: events dropped since the queue was full
        self._dropped = 0
        #: whether the last event was not taken
        self._is_failing = False

    def put(self, message_id: str, body: bytes) -> None:
        """Have an event sent, or drop it where too many wait."""
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
                "webhook %s: %d events wait for it, further ones are dropped", self._target.shown, MOST_WAITING
            )
        self._dropped += 1
        self._counted("dropped")

    async def _send_all(self) -> None:
        while True:
            message = await self._queue.get()
            self._under_way += 1
            try:
                await self._send(message)
            except Exception:
                logger.exception("webhook %s: an event was not sent", self._target.shown)
            finally:
                self._queue.task_done()
            self._under_way -= 1
            if self._dropped and self._queue.qsize() <= MOST_WAITING // 2:
                logger.warning("webhook %s: %d events were dropped", self._target.shown, self._dropped)
                self._dropped = 0

    async def _send(self, message: _Message) -> None:
        for number in range(1, TRIES + 1):
            answer = await self._try(message)
            if answer.is_taken or not answer.may_be_tried_again or number == TRIES:
                break
            backoff = 2 ** (number - 1) * (0.5 + self._chance() / 2)
            await self._sleep(min(_LONGEST_WAIT_S, max(backoff, answer.wait_s or 0.0)))
        self._counted("sent" if answer.is_taken else "failed")
        self._did(answer)

    def _did(self, answer: _Answer) -> None:
        if answer.is_taken == self._is_failing:
            self._is_failing = not answer.is_taken
            said = "takes events again" if answer.is_taken else f"does not take events: {answer.said}"
            logger.warning("webhook %s %s", self._target.shown, said)

    async def _try(self, message: _Message) -> _Answer:
        request = Outgoing("POST", self._target.url, self._headers(message), message.body)
        answer = _Answer(is_taken=False, may_be_tried_again=True, said=f"no answer in {self._target.timeout_s:g} s")
        try:
            async with asyncio.timeout(self._target.timeout_s), self._upstream.send(request) as reply:
                # This is the answer, whatever becomes of its body.
                answer = _answer_of(reply, self._clock())
                with contextlib.suppress(GatewayError):
                    await _read(reply.chunks())
        except TimeoutError:
            return answer
        except GatewayError as fault:
            return replace(answer, said=fault.code)
        return answer

    def _headers(self, message: _Message) -> Headers:
        now = int(self._clock())
        headers: Headers = [
            (b"content-type", b"application/json"),
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
        """Send what waits, for at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max_wait_s):
                await self._queue.join()
        left = self._queue.qsize() + self._under_way
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        if left:
            logger.warning("webhook %s: %d events were not sent before the end", self._target.shown, left)
        await self._upstream.aclose()


def _answer_of(reply: UpstreamReply, now: float) -> _Answer:
    wait_s = asked_wait(reply.headers, now)
    return _Answer(is_success(reply.status), reply.status in _AGAIN, f"it says {reply.status}", wait_s)


async def _read(chunks: AsyncIterator[bytes]) -> None:
    """Read to the end, so that the connection can be used again; or give up where that is far."""
    size = 0
    async for piece in chunks:
        size += len(piece)
        if size > _READ_BYTES:
            return
