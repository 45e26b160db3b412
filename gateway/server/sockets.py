"""Serve /v1/responses over a WebSocket: each `response.create` is one call.

To the pipeline such a call is a POST like any other, with the headers of the handshake: keys, budgets, fitting, errors
and settlement are the same. Here is what a connection adds: lanes that answer side by side, the answers that only it
remembers, an end.
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
from gateway.dialects.responses_frames import CreateFrame, EarlierTurn, read_create, warmed_up
from gateway.server import headers as ours
from gateway.server.body import BodyMemory
from gateway.server.endpoints import SOCKET_PATH, Forwarder, Receive, Scope, Send, as_fault, send_fault
from gateway.server.protocol import SOCKET_STOPS
from gateway.server.socket_calls import SocketCall, headers_of_calls, told_fault

#: How long a connection may stay open, in seconds: as long as OpenAI's.
MOST_AGE_S: Final = 3_600.0
#: lanes of one connection; the least recently used is forgotten for a new one
_MOST_LANES: Final = 16
#: requests that wait in one lane
_MOST_WAITING: Final = 16
#: why a connection is closed (RFC 6455, section 7.4.1, and IANA's registry)
_DONE: Final = 1000
_RESTART: Final = 1012


@dataclass(slots=True)
class _Lane:
    """What goes on under one `stream_id`: one request after the other.

    Attributes:
        waiting: what is asked for, with the memory it takes.
        task: at work on the first of it.
        told: the last answer that only the connection remembers.
        memory: what that takes.
    """

    memory: BodyMemory
    waiting: deque[tuple[CreateFrame, BodyMemory]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    told: EarlierTurn | None = None


class Sockets:
    """The ASGI endpoint of WebSockets. `forwarder`: the one in force."""

    def __init__(
        self, forwarder: Callable[[], Forwarder], new_id: Callable[[], str], *, most_age_s: float = MOST_AGE_S
    ) -> None:
        self._forwarder = forwarder
        self._new_id = new_id
        self._most_age_s = most_age_s
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, to its end."""
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
        except Exception as error:  # noqa: BLE001  # bugs are logged where they become faults
            await send_fault(_instead(send), endpoint("GET", SOCKET_PATH), as_fault(error, request_id), request_id)
            return False
        await send({"type": "websocket.accept", "headers": [(ours.GATEWAY_REQUEST_ID, request_id.encode())]})
        return True


class _Socket:
    """One connection."""

    def __init__(self, scope: Scope, send: Send, forwarder: Callable[[], Forwarder], new_id: Callable[[], str]) -> None:
        self._scope = scope
        self._send = send
        self._forwarder = forwarder
        self._new_id = new_id
        self._headers = headers_of_calls(scope["headers"])
        #: in the order of their last use
        self._lanes: dict[str, _Lane] = {}
        self._calls: set[SocketCall] = set()
        self._gone = False
        #: why nothing more is taken, and the code to close with
        self._ending: tuple[GatewayError, int] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def run(self, receive: Receive, most_age_s: float) -> None:
        """Take what the client sends until it leaves, or until the connection has been open for this long."""
        minutes = f"{most_age_s / 60:g} minutes"
        expired = SocketExpired(f"This WebSocket has been open for {minutes}, the longest that one may. Open another.")
        timer = asyncio.get_running_loop().call_later(most_age_s, self._end, expired, _DONE)
        try:
            while await self._take(await receive()):
                pass
        except asyncio.CancelledError:
            # The server's patience is over: each call is told so, and tells its client.
            await self._join(cut=True)
            raise
        finally:
            timer.cancel()
            self._gone = True
            for call in self._calls:
                call.over.set()
            await self._join(cut=False)
            for lane in self._lanes.values():
                lane.memory.release()

    async def _join(self, *, cut: bool) -> None:
        """Wait for what is at work; what waits is forgotten."""
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

    async def _take(self, message: Mapping[str, Any]) -> bool:
        """Whether more may come after this. Nothing of it is held on to while the next is awaited."""
        kind: str = message["type"]
        if kind == SOCKET_STOPS:
            self._end(ShuttingDown("The gateway is stopping. Open a new WebSocket."), _RESTART)
        elif kind == "websocket.receive":
            await self._ask(message.get("text") or message.get("bytes") or b"")
            # Thousands may have come at once: others have their turn between them.
            await asyncio.sleep(0)
        return kind != "websocket.disconnect"

    async def _ask(self, data: str | bytes) -> None:
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
            await self.say(told_fault(fault, self._new_id(), name))
            return
        lane.waiting.append((create, memory))
        if lane.task is None:
            lane.task = asyncio.get_running_loop().create_task(self._work(lane))

    def _lane(self, create: CreateFrame) -> _Lane:
        """The lane that it is for, which is the last one used now.

        Raises:
            SocketFull: it has too much to do, or all others have.
        """
        name = create.lane or ""
        lane = self._lanes.pop(name, None)
        if lane is None:
            self._forget_one(create.previous)
            lane = _Lane(self._forwarder().memory(lasting=True))
        self._lanes[name] = lane
        if len(lane.waiting) >= _MOST_WAITING:
            raise SocketFull(f"{_MOST_WAITING} requests wait on this stream already.", param="stream_id")
        return lane

    def _forget_one(self, needed: str | None) -> None:
        """Make room for a lane, not at the cost of the one whose answer is needed."""
        if len(self._lanes) < _MOST_LANES:
            return
        source = self._remembered(needed)
        resting = (
            name
            for name, lane in self._lanes.items()
            if lane.task is None and (source is None or lane.told is not source)
        )
        oldest = next(resting, None)
        if oldest is None:
            raise SocketFull(f"This WebSocket answers on {_MOST_LANES} streams already.", param="stream_id")
        self._lanes.pop(oldest).memory.release()

    # --- what it is answered -----------------------------------------------------------------------------------

    async def _work(self, lane: _Lane) -> None:
        """Answer what waits in a lane, in its order."""
        while lane.waiting:
            create, memory = lane.waiting.popleft()
            try:
                if self._ending is not None:
                    raise self._ending[0]
                await self._answer(create, lane)
            except Exception as error:  # noqa: BLE001  # bugs are logged where they become faults
                request_id = self._new_id()
                await self.say(told_fault(as_fault(error, request_id), request_id, create.lane))
            finally:
                memory.release()
        lane.task = None
        self._close_if_idle()

    async def _answer(self, create: CreateFrame, lane: _Lane) -> None:
        told = self._remembered(create.previous)
        if not create.generates:
            await self._forwarder().check_socket(self._scope, 0)
            messages, new = warmed_up(create, told, f"resp_{self._new_id()}", time.time())
            self._remember(lane, new)
            for message in messages:
                await self.say(message)
            return
        call = SocketCall(create, told, self.say, partial(self._remember, lane))
        self._calls.add(call)
        # A task of its own: where an answer breaks off, the forwarder ends the one that it was called in.
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
        """What was said up to this answer, in whichever lane it was given."""
        known = (lane.told for lane in self._lanes.values())
        return next((one for one in known if one is not None and one.response_id == response_id), None)

    def _remember(self, lane: _Lane, told: EarlierTurn) -> None:
        """Keep an answer in the place of the lane's last one; without room for it, none is kept."""
        lane.memory.release()
        lane.told = None
        with contextlib.suppress(GatewayError):
            lane.memory.grow(len(told.items))
            lane.told = told

    async def say(self, message: str) -> None:
        """Send a message, where somebody still takes it."""
        if self._gone:
            return
        try:
            await self._send({"type": "websocket.send", "text": message})
        except (OSError, RuntimeError):
            # It has left, or was hung up on as it did not answer; `receive` says so too.
            self._gone = True

    # --- its end -----------------------------------------------------------------------------------------------

    def _end(self, why: GatewayError, code: int) -> None:
        """Take nothing more, and close when what is under way is answered."""
        self._ending = why, code
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        is_idle = all(lane.task is None for lane in self._lanes.values())
        if self._ending is not None and is_idle and self._closing is None and not self._gone:
            self._closing = asyncio.get_running_loop().create_task(self._close(*self._ending))

    async def _close(self, why: GatewayError, code: int) -> None:
        if isinstance(why, SocketExpired):
            await self.say(told_fault(why, self._new_id(), None))
        if not self._gone:
            with contextlib.suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": code})


def _instead(send: Send) -> Send:
    """`send` for an ordinary answer to a handshake (ASGI's extension "websocket.http.response")."""

    async def denying(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return denying
