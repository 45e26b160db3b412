"""Serve /v1/responses over a WebSocket: each `response.create` is one call.

For the pipeline such a call is a POST with the headers of the handshake: keys, budgets, trimming, errors and settlement
are the same. This module adds what belongs to the connection:

- lanes (`stream_id`) that are served in parallel
- responses that only the connection remembers
- the end of the connection
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Final

from gateway.core.errors import GatewayError, ShuttingDown, SocketExpired, SocketFull
from gateway.core.http.headers import EVENTS
from gateway.core.values import dataclass
from gateway.dialects import endpoint
from gateway.dialects.responses_frames import CreateFrame, EarlierTurn, read_create, warm_up_messages
from gateway.server import headers as ours
from gateway.server.body import BodyMemory
from gateway.server.endpoints import SOCKET_PATH, Forwarder, Receive, Scope, Send, error_for_client, send_error
from gateway.server.protocol import SOCKET_STOPS
from gateway.server.socket_calls import SocketCall, call_headers, error_frame

#: longest time that a connection stays open, in seconds; the same as OpenAI's
MOST_AGE_S: Final = 3_600.0
#: most lanes of one connection; a new lane replaces the least recently used one
_MOST_LANES: Final = 16
#: most requests that wait in one lane
_MOST_WAITING: Final = 16
#: close codes (RFC 6455, section 7.4.1, and IANA's registry)
_CLOSE_NORMAL: Final = 1000
_CLOSE_RESTART: Final = 1012


@dataclass(slots=True)
class _Lane:
    """The requests of one `stream_id`, which are served one after the other.

    Attributes:
        memory: memory of the remembered response.
        waiting: waiting requests with their memory.
        task: task that serves the first request.
        earlier: the last response that only the connection remembers.
    """

    memory: BodyMemory
    waiting: deque[tuple[CreateFrame, BodyMemory]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    earlier: EarlierTurn | None = None


class Sockets:
    """The ASGI endpoint of WebSockets. `forwarder`: returns the one in force."""

    def __init__(
        self, forwarder: Callable[[], Forwarder], new_id: Callable[[], str], *, most_age_s: float = MOST_AGE_S
    ) -> None:
        self._forwarder = forwarder
        self._new_id = new_id
        self._most_age_s = most_age_s
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until its end."""
        await receive()
        self._open += 1
        try:
            if await self._accepted(scope, send):
                await _Socket(scope, send, self._forwarder, self._new_id).run(receive, self._most_age_s)
        finally:
            self._open -= 1

    async def _accepted(self, scope: Scope, send: Send) -> bool:
        request_id = ours.request_id(scope["headers"]) or self._new_id()
        try:
            await self._forwarder().check_socket(scope, self._open - 1)
        except Exception as error:  # noqa: BLE001  # `error_for_client` logs bugs
            await send_error(
                _as_http_response(send), endpoint("GET", SOCKET_PATH), error_for_client(error, request_id), request_id
            )
            return False
        await send({"type": "websocket.accept", "headers": [(ours.GATEWAY_REQUEST_ID, request_id.encode())]})
        return True


class _Socket:
    """One WebSocket connection."""

    def __init__(self, scope: Scope, send: Send, forwarder: Callable[[], Forwarder], new_id: Callable[[], str]) -> None:
        self._scope = scope
        self._send = send
        self._forwarder = forwarder
        self._new_id = new_id
        self._headers = call_headers(scope["headers"])
        #: lanes in the order of their last use
        self._lanes: dict[str, _Lane] = {}
        self._calls: set[SocketCall] = set()
        self._has_left = False
        #: error for further requests, and the close code; None: requests are accepted
        self._ending: tuple[GatewayError, int] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def run(self, receive: Receive, most_age_s: float) -> None:
        """Handle messages until the client leaves, or until the connection has been open for `most_age_s`."""
        minutes = f"{most_age_s / 60:g} minutes"
        expired = SocketExpired(f"This WebSocket has been open for {minutes}, which is the limit. Open a new one.")
        timer = asyncio.get_running_loop().call_later(most_age_s, self._stop_accepting, expired, _CLOSE_NORMAL)
        try:
            while await self._handle(await receive()):
                pass
        except asyncio.CancelledError:
            # The grace period of the server is over. Each call is cancelled and notifies its client.
            await self._wait_for_tasks(cut=True)
            raise
        finally:
            timer.cancel()
            self._has_left = True
            for call in self._calls:
                call.ended.set()
            await self._wait_for_tasks(cut=False)
            for lane in self._lanes.values():
                lane.memory.release()

    async def _wait_for_tasks(self, *, cut: bool) -> None:
        """Wait for running tasks and discard waiting requests. `cut`: cancel the tasks first."""
        for lane in self._lanes.values():
            while lane.waiting:
                lane.waiting.pop()[1].release()
        tasks = {lane.task for lane in self._lanes.values() if lane.task is not None}
        tasks |= {self._closing} if self._closing is not None else set()
        for task in tasks if cut else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # --- what the client sends ---------------------------------------------------------------------------------

    async def _handle(self, message: Mapping[str, Any]) -> bool:
        """Handle one message, and return False if it was the last. The message is not kept afterwards."""
        kind: str = message["type"]
        if kind == SOCKET_STOPS:
            self._stop_accepting(ShuttingDown("The gateway is stopping. Open a new WebSocket."), _CLOSE_RESTART)
        elif kind == "websocket.receive":
            await self._queue(message.get("text") or message.get("bytes") or b"")
            # Thousands of messages may arrive at once. Other tasks get their turn between them.
            await asyncio.sleep(0)
        return kind != "websocket.disconnect"

    async def _queue(self, data: str | bytes) -> None:
        name: str | None = None
        memory = self._forwarder().memory()
        try:
            memory.grow(len(data))
            create = read_create(data)
            if create is None:
                memory.release()
                return
            name = create.lane
            if self._ending is not None:
                raise self._ending[0]
            lane = self._lane(create)
        except GatewayError as fault:
            memory.release()
            await self.say(error_frame(fault, self._new_id(), name))
            return
        lane.waiting.append((create, memory))
        if lane.task is None:
            lane.task = asyncio.get_running_loop().create_task(self._run_lane(lane))

    def _lane(self, create: CreateFrame) -> _Lane:
        """Return the lane of a request, and mark it as the most recently used one.

        Raises:
            SocketFull: too many requests wait in the lane, or too many lanes are busy.
        """
        name = create.lane or ""
        lane = self._lanes.pop(name, None)
        if lane is None:
            self._make_room(create.previous_response_id)
            lane = _Lane(self._forwarder().memory(lasting=True))
        self._lanes[name] = lane
        if len(lane.waiting) >= _MOST_WAITING:
            raise SocketFull(
                f"{_MOST_WAITING} requests wait on this stream, which is the limit. Wait for a response.",
                param="stream_id",
            )
        return lane

    def _make_room(self, needed: str | None) -> None:
        """Remove the least recently used idle lane if there are too many, but not the one whose response is needed."""
        if len(self._lanes) < _MOST_LANES:
            return
        source = self._remembered(needed)
        idle = (
            name
            for name, lane in self._lanes.items()
            if lane.task is None and (source is None or lane.earlier is not source)
        )
        oldest = next(idle, None)
        if oldest is None:
            raise SocketFull(
                f"This WebSocket has {_MOST_LANES} busy streams, which is the limit. Wait for a response.",
                param="stream_id",
            )
        self._lanes.pop(oldest).memory.release()

    # --- what the gateway sends ----------------------------------------------------------------------------------

    async def _run_lane(self, lane: _Lane) -> None:
        """Serve the waiting requests of a lane in order."""
        while lane.waiting:
            create, memory = lane.waiting.popleft()
            try:
                if self._ending is not None:
                    raise self._ending[0]
                await self._respond(create, lane)
            except Exception as error:  # noqa: BLE001  # `error_for_client` logs bugs
                request_id = self._new_id()
                await self.say(error_frame(error_for_client(error, request_id), request_id, create.lane))
            finally:
                memory.release()
        lane.task = None
        self._close_if_idle()

    async def _respond(self, create: CreateFrame, lane: _Lane) -> None:
        earlier = self._remembered(create.previous_response_id)
        if not create.generates:
            await self._forwarder().check_socket(self._scope, 0)
            messages, new = warm_up_messages(create, earlier, f"resp_{self._new_id()}", time.time())
            self._remember(lane, new)
            for message in messages:
                await self.say(message)
            return
        call = SocketCall(create, earlier, self.say, partial(self._remember, lane))
        self._calls.add(call)
        # The call needs its own task: if a response breaks off, the forwarder cancels the task that called it.
        task = asyncio.get_running_loop().create_task(
            self._forwarder()(self._scope_of_call(call.size), call.receive, call.send)
        )
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            self._calls.discard(call)
        await task
        await call.end()

    def _scope_of_call(self, size: int) -> Scope:
        headers = [
            *self._headers,
            (b"accept", EVENTS),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % size),
        ]
        return {**self._scope, "type": "http", "method": "POST", "headers": headers}

    def _remembered(self, response_id: str | None) -> EarlierTurn | None:
        """Return the conversation up to a remembered response of any lane, or None."""
        remembered = (lane.earlier for lane in self._lanes.values())
        return next((turn for turn in remembered if turn is not None and turn.response_id == response_id), None)

    def _remember(self, lane: _Lane, earlier: EarlierTurn) -> None:
        """Remember a response instead of the lane's last one. Without memory for it, none is remembered."""
        lane.memory.release()
        lane.earlier = None
        with contextlib.suppress(GatewayError):
            lane.memory.grow(len(earlier.items))
            lane.earlier = earlier

    async def say(self, message: str) -> None:
        """Send a message, unless the client has left."""
        if self._has_left:
            return
        try:
            await self._send({"type": "websocket.send", "text": message})
        except (OSError, RuntimeError):
            # The client has left, or was disconnected because it did not answer a ping. `receive` reports it too.
            self._has_left = True

    # --- the end of the connection -------------------------------------------------------------------------------

    def _stop_accepting(self, why: GatewayError, code: int) -> None:
        """Accept no more requests, and close the connection when the running ones have ended."""
        self._ending = why, code
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        is_idle = all(lane.task is None for lane in self._lanes.values())
        if self._ending is not None and is_idle and self._closing is None and not self._has_left:
            self._closing = asyncio.get_running_loop().create_task(self._close(*self._ending))

    async def _close(self, why: GatewayError, code: int) -> None:
        if isinstance(why, SocketExpired):
            await self.say(error_frame(why, self._new_id(), None))
        if not self._has_left:
            with contextlib.suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": code})


def _as_http_response(send: Send) -> Send:
    """Return `send` for an HTTP response to a handshake (ASGI's extension "websocket.http.response")."""

    async def deny(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return deny
