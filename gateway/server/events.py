"""/api/events: send the calls of all workers as server-sent events.

The worker reads the store once a second for all its listeners, and not at all without listeners. Events that a listener
does not receive in time are dropped and counted. Calls never wait for a listener.
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
from gateway.server.handling import ServerRules, access_of, json_handler
from gateway.server.shown import call_json, totals_json

logger = logging.getLogger("gateway")

#: most listeners of one worker
MOST_LISTENERS: Final = 64
#: most listeners with the same client key, so that one key cannot take all places
MOST_OF_ONE: Final = 16
#: most events that wait for one listener
MOST_WAITING: Final = 256
#: calls that are read from the store at once, and the pause after them in which listeners receive the events
_PAGE: Final = 128
_PAUSE_S: Final = 0.01
_POLL_S: Final = 1.0
_HEARTBEAT_S: Final = 15.0
#: seconds after which a listener that reads nothing is disconnected
_STALL_TIMEOUT_S: Final = 60.0
_HEARTBEAT: Final = b": \n\n"
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers events
]


class _Listener:
    """The events that wait for one listener."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._waiting = deque[bytes]()
        self._missed = 0
        self._is_unknown = False
        self.news = asyncio.Event()

    def sees(self, settled: Settled) -> bool:
        """Return True if the listener may see this call."""
        session, namespace = settled.call.session, self.access.namespace
        return namespace is None or (session is not None and session.namespace == namespace)

    def put(self, event: bytes) -> None:
        """Queue an event, or count it as missed if too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            self.miss(1)
            return
        self._report_missed()
        self._waiting.append(event)
        self.news.set()

    def miss(self, number: int | None) -> None:
        """Count dropped events. `number`: None if it is unknown how many of them the listener may see."""
        self._missed += number or 0
        self._is_unknown |= number is None
        self.news.set()

    def _report_missed(self) -> None:
        if self._missed or self._is_unknown:
            count = None if self._is_unknown else self._missed
            self._waiting.append(b"event: missed\ndata: " + msgspec.json.encode({"count": count}) + b"\n\n")
            self._missed, self._is_unknown = 0, False

    def take(self) -> bytes:
        """Return all waiting events and empty the queue."""
        self._report_missed()
        self.news.clear()
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class EventsApi:
    """The handler of /api/events. `rules` returns the rules in force. Intervals are in seconds."""

    def __init__(
        self,
        store: Calls,
        rules: Callable[[], ServerRules],
        *,
        look_s: float = _POLL_S,
        heartbeat_s: float = _HEARTBEAT_S,
        stalled_s: float = _STALL_TIMEOUT_S,
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
        """Return the routes."""
        return [Path("/api/events", json_handler(self._rules, self.events), methods=["GET"])]

    def _check_room(self, access: Access) -> None:
        if len(self._listeners) >= MOST_LISTENERS:
            raise errors.Overloaded(f"The limit of {MOST_LISTENERS} event streams is reached. Try again later.")
        others = sum(listener.access.namespace == access.namespace for listener in self._listeners)
        if access.namespace is not None and others >= MOST_OF_ONE:
            raise errors.Overloaded(
                f"This client key has {MOST_OF_ONE} event streams, which is the limit. Close one, or try again later."
            )

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
        """Return True if the request still has the same access: its key may have been revoked since."""
        with contextlib.suppress(errors.GatewayError):
            return await access_of(self._rules, request) == access
        return False

    async def _begin(self) -> None:
        """Note the last settled call and start to poll the store for later ones.

        Raises:
            StoreUnavailable: the last call cannot be read.
        """
        if self._cursor is None:
            now = (await self._store.settled_after(None, 0)).cursor
            if self._cursor is None:
                self._cursor = now
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def leave(self, listener: _Listener) -> None:
        """Remove a listener."""
        self._listeners.discard(listener)

    async def _look(self) -> None:
        while self._listeners:
            await asyncio.sleep(self._look_s)
            try:
                await self._send_news()
            except errors.StoreUnavailable:
                pass  # calls settled meanwhile are read when the store is available again
            except Exception:
                logger.exception("reading events from the store failed; it will be tried again")
        self._cursor = None

    async def _send_news(self) -> None:
        while self._listeners:
            latest = await self._store.settled_after(self._cursor, _PAGE)
            self._distribute(latest)
            if latest.cursor == self._cursor:
                return
            self._cursor = latest.cursor
            await asyncio.sleep(_PAUSE_S)

    def _distribute(self, latest: LatestCalls) -> None:
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
        """Stop polling the store."""
        self.stop()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)


class _Stream(Response):
    """The response to one listener. It ends when the listener leaves, loses its access, or the gateway stops."""

    def __init__(self, api: EventsApi, listener: _Listener, may_stay: Callable[[], Awaitable[bool]]) -> None:
        super().__init__()
        self._api = api
        self._listener = listener
        self._may_stay = may_stay
        self._asked_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        del scope
        tasks = {asyncio.create_task(self._send(send)), asyncio.create_task(_wait_for_disconnect(receive))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._api.leave(self._listener)
        for error in ended:
            # A timeout means that the listener read nothing: its connection breaks. Other errors are bugs.
            if isinstance(error, Exception) and not isinstance(error, TimeoutError):
                raise error

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        piece = _HEARTBEAT
        while piece:
            # A listener that reads nothing would keep its place for ever.
            async with asyncio.timeout(self._api.stalled_s):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await self._next()
        await send({"type": "http.response.body", "body": b""})

    async def _next(self) -> bytes:
        """Return new events or a heartbeat, or empty bytes at the end."""
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


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(settled: Settled, access: Access) -> bytes:
    """Return a settled call as an event `call`."""
    totals = totals_json(settled.totals) if settled.totals is not None else None
    data = msgspec.json.encode({**call_json(settled.call, access), "totals": totals})
    return b"event: call\nid: %b\ndata: %b\n\n" % (settled.call.call_id.encode(), data)
