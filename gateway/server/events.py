"""/api/events: send the calls of all workers as server-sent events.

One look at the store a second for all who listen here, and none while nobody does. What a listener does not take in
time is dropped and counted; a call never waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path
from starlette.types import Receive, Scope, Send

from gateway.core import errors
from gateway.core.ports import Calls
from gateway.core.stored import LatestCalls, Settled
from gateway.server.auth import Access
from gateway.server.handling import ServerRules, accessed, wrapped
from gateway.server.shown import call_json, totals_json

logger = logging.getLogger("gateway")

#: listeners at one worker
MOST_LISTENERS: Final = 64
#: listeners with one client key, so that nobody takes all places
MOST_OF_ONE: Final = 16
#: events that may wait for one listener
MOST_WAITING: Final = 256
#: calls that are read from the store at once, and how long those who listen get to take them
_PAGE: Final = 128
_PAUSE_S: Final = 0.01
_LOOK_S: Final = 1.0
_HEARTBEAT_S: Final = 15.0
#: how long a listener may take nothing
_STALLED_S: Final = 60.0
_HEARTBEAT: Final = b": \n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


class _Listener:
    """What waits for one listener."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._waiting = deque[bytes]()
        self._missed = 0
        self._is_unknown = False
        self.news = asyncio.Event()

    def sees(self, settled: Settled) -> bool:
        """Whether a call is one of its own."""
        session, namespace = settled.call.session, self.access.namespace
        return namespace is None or (session is not None and session.namespace == namespace)

    def put(self, event: bytes) -> None:
        """Have an event sent, or count it where too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self.miss(1)
            return
        self._tell_missed()
        self._waiting.append(event)
        self.news.set()

    def miss(self, number: int | None) -> None:
        """So many events were dropped; None: nobody knows how many of them were its own."""
        self._missed += number or 0
        self._is_unknown |= number is None
        self.news.set()

    def _tell_missed(self) -> None:
        if self._missed or self._is_unknown:
            count = None if self._is_unknown else self._missed
            self._waiting.append(b"event: missed\ndata: " + msgspec.json.encode({"count": count}) + b"\n\n")
            self._missed, self._is_unknown = 0, False

    def take(self) -> bytes:
        """All that waits."""
        self._tell_missed()
        self.news.clear()
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class EventsApi:
    """The handler. `rules` gives those in force; the intervals are in seconds."""

    def __init__(
        self,
        store: Calls,
        rules: Callable[[], ServerRules],
        *,
        look_s: float = _LOOK_S,
        heartbeat_s: float = _HEARTBEAT_S,
        stalled_s: float = _STALLED_S,
    ) -> None:
        self._store = store
        self._rules = rules
        self._look_s = look_s
        self.heartbeat_s = heartbeat_s
        self.stalled_s = stalled_s
        self._listeners = set[_Listener]()
        self._cursor: int | None = None
        self._looking: asyncio.Task[None] | None = None
        self.is_stopping = False

    def paths(self) -> list[Path]:
        """The routes."""
        return [Path("/api/events", wrapped(self._rules, self.events), methods=["GET"])]

    def _check_room(self, access: Access) -> None:
        if len(self._listeners) >= MOST_LISTENERS:
            raise errors.Overloaded(f"{MOST_LISTENERS} programs listen already. Try again later.")
        others = sum(one.access.namespace == access.namespace for one in self._listeners)
        if access.namespace is not None and others >= MOST_OF_ONE:
            raise errors.Overloaded(f"{MOST_OF_ONE} programs listen with this client key already. Try again later.")

    async def events(self, request: Request, access: Access) -> Any:
        """GET /api/events."""
        if self.is_stopping:
            raise errors.ShuttingDown("The gateway is stopping. Try again shortly.")
        self._check_room(access)
        if request.method == "HEAD":
            return Response(headers={name.decode(): value.decode() for name, value in _HEADERS})
        listener = _Listener(access)
        self._listeners.add(listener)
        try:
            await self._begin()
        except BaseException:
            self.leave(listener)
            raise
        return _Stream(self, listener, lambda: self._may_stay(request, access))

    async def _may_stay(self, request: Request, access: Access) -> bool:
        """Whether it would be let in as it was: its key may have been revoked since."""
        with contextlib.suppress(errors.GatewayError):
            return await accessed(self._rules, request) == access
        return False

    async def _begin(self) -> None:
        """Note which call was settled last, as later ones are news, and start to look for those.

        Raises:
            StoreUnavailable: that cannot be read.
        """
        if self._cursor is None:
            now = (await self._store.latest(None, 0)).cursor
            if self._cursor is None:
                self._cursor = now
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def leave(self, listener: _Listener) -> None:
        """Forget a listener."""
        self._listeners.discard(listener)

    async def _look(self) -> None:
        while self._listeners:
            await asyncio.sleep(self._look_s)
            try:
                await self._tell_news()
            except errors.StoreUnavailable:
                pass  # what is settled meanwhile is seen when it is back
            except Exception:
                logger.exception("events were not read this time")
        self._cursor = None

    async def _tell_news(self) -> None:
        while self._listeners:
            latest = await self._store.latest(self._cursor, _PAGE)
            self._tell(latest)
            if latest.cursor == self._cursor:
                return
            self._cursor = latest.cursor
            await asyncio.sleep(_PAUSE_S)

    def _tell(self, latest: LatestCalls) -> None:
        for listener in self._listeners if latest.missed else ():
            listener.miss(latest.missed if listener.access.namespace is None else None)
        for settled in latest.settled:
            written: dict[bool, bytes] = {}
            for listener in self._listeners:
                if not listener.sees(settled):
                    continue
                sees_all = listener.access.namespace is None
                if sees_all not in written:
                    written[sees_all] = event(settled, listener.access)
                listener.put(written[sees_all])

    def stop(self) -> None:
        """End all streams; the server waits for them before it stops."""
        self.is_stopping = True
        for listener in self._listeners:
            listener.news.set()

    async def aclose(self) -> None:
        """Stop looking."""
        self.stop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class _Stream(Response):
    """The answer to one listener, which ends when it leaves, may no longer listen, or the gateway stops."""

    def __init__(self, api: EventsApi, listener: _Listener, may_stay: Callable[[], Awaitable[bool]]) -> None:
        super().__init__()
        self._api = api
        self._listener = listener
        self._may_stay = may_stay
        self._asked_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        del scope
        tasks = {asyncio.create_task(self._send(send)), asyncio.create_task(_left(receive))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._api.leave(self._listener)
        for error in ended:
            # A listener that takes nothing is told by its connection that breaks; all else is a bug, for the log.
            if isinstance(error, Exception) and not isinstance(error, TimeoutError):
                raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        piece = _HEARTBEAT
        while piece:
            # One that takes nothing holds a place that others wait for: its connection breaks.
            async with asyncio.timeout(self._api.stalled_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await self._next()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> bytes:
        """What is new, or a sign of life; nothing at the end."""
        if not self._api.is_stopping:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._api.heartbeat_s):
                    await self._listener.news.wait()
        now = time.monotonic()
        if now - self._asked_at >= self._api.heartbeat_s:
            self._asked_at = now
            if not await self._may_stay():
                return b""
        taken = self._listener.take()
        return taken if self._api.is_stopping else taken or _HEARTBEAT


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(settled: Settled, access: Access) -> bytes:
    """One call as an event."""
    totals = totals_json(settled.totals) if settled.totals is not None else None
    data = msgspec.json.encode({**call_json(settled.call, access), "totals": totals})
    return b"event: call\nid: %b\ndata: %b\n\n" % (settled.call.call_id.encode(), data)
