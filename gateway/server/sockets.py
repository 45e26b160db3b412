"""/v1/responses over a WebSocket: each `response.create` is one call of the `Forwarder`, whose stream goes back.

To the pipeline such a call is a POST like any other, with the headers of the handshake: keys, budgets, fitting, errors
and settlement are the same. Here is what a connection adds: lanes that answer side by side, the answers that only it
remembers, an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from typing import Any, Final

from gateway.core.asked import REQUEST_ID
from gateway.core.errors import GatewayError, ShuttingDown, SocketExpired, SocketFull, UpstreamProtocolError
from gateway.core.forwarding import EVENTS, Headers, content_type
from gateway.core.sse import EventBuffer, event_data, split_events
from gateway.core.values import dataclass
from gateway.dialects import endpoint
from gateway.dialects.responses_frames import (
    AnswerFrames,
    Create,
    Told,
    error_message,
    fault_message,
    read_create,
    request_of,
    warmed_up,
)
from gateway.server import headers as ours
from gateway.server.body import BodyMemory
from gateway.server.endpoints import SOCKET_PATH, Forwarder, Receive, Scope, Send, as_fault, send_fault
from gateway.server.protocol import SOCKET_STOPS

logger = logging.getLogger("gateway")

#: How long a connection may stay open, in seconds: as long as OpenAI's.
MOST_AGE_S: Final = 3_600.0
#: lanes of one connection; the least recently used is forgotten for a new one
_MOST_LANES: Final = 16
#: requests that wait in one lane
_MOST_WAITING: Final = 16
#: bytes of an event, or of an answer that comes whole; both are one message
_MOST_WHOLE: Final = 64 * 1024 * 1024
#: why a connection is closed (RFC 6455, section 7.4.1, and IANA's registry)
_DONE: Final = 1000
_RESTART: Final = 1012
#: Of the handshake's headers, those that are not for each of its calls.
_OF_HANDSHAKE: Final = frozenset(
    {
        *(b"connection", b"upgrade", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"),
        *(b"expect", b"accept", b"accept-encoding", b"idempotency-key", REQUEST_ID),
    }
)
_SOCKET_HEADERS: Final = b"sec-websocket-"
#: names the versions of the API that a client asks for; those of the WebSocket say nothing to POST
_BETA: Final = b"openai-beta"
#: Of an answer's headers, those that are only about its body or its connection.
_OF_BODY: Final = frozenset(
    {"content-type", "content-length", "transfer-encoding", "connection", "date", "server", "cache-control"}
)
#: names of headers that tell a session's totals
_CUMULATIVE: Final = "x-session-cumulative-"
_USAGE: Final = "x-session-cumulative-token-usage"
_IS_FINAL: Final = "x-session-usage-final"


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
    waiting: deque[tuple[Create, BodyMemory]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    told: Told | None = None


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
        await send({"type": "websocket.accept", "headers": [(REQUEST_ID, request_id.encode())]})
        return True


class _Socket:
    """One connection."""

    def __init__(self, scope: Scope, send: Send, forwarder: Callable[[], Forwarder], new_id: Callable[[], str]) -> None:
        self._scope = scope
        self._send = send
        self._forwarder = forwarder
        self._new_id = new_id
        self._headers = _of_calls(scope["headers"])
        #: in the order of their last use
        self._lanes: dict[str, _Lane] = {}
        self._calls: set[_Call] = set()
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
            await self.say(_fault_message(fault, name))
            return
        lane.waiting.append((create, memory))
        if lane.task is None:
            lane.task = asyncio.get_running_loop().create_task(self._work(lane))

    def _lane(self, create: Create) -> _Lane:
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
                await self.say(_fault_message(as_fault(error, self._new_id()), create.lane))
            finally:
                memory.release()
        lane.task = None
        self._close_if_idle()

    async def _answer(self, create: Create, lane: _Lane) -> None:
        told = self._remembered(create.previous)
        if not create.generates:
            await self._forwarder().check_socket(self._scope, 0)
            messages, new = warmed_up(create, told, f"resp_{self._new_id()}", time.time())
            self._remember(lane, new)
            for message in messages:
                await self.say(message)
            return
        body = request_of(create, told)
        call = _Call(self.say, lambda new: self._remember(lane, new), AnswerFrames(create, told), create.lane, body)
        self._calls.add(call)
        # A task of its own: where an answer breaks off, the forwarder ends the one that it was called in.
        task = asyncio.get_running_loop().create_task(
            self._forwarder()(self._scope_of_call(len(body)), call.receive, call.send)
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

    def _remembered(self, response_id: str | None) -> Told | None:
        """What was said up to this answer, in whichever lane it was given."""
        known = (lane.told for lane in self._lanes.values())
        return next((one for one in known if one is not None and one.response_id == response_id), None)

    def _remember(self, lane: _Lane, told: Told) -> None:
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
            await self.say(_fault_message(why, None))
        if not self._gone:
            with contextlib.suppress(OSError, RuntimeError):
                await self._send({"type": "websocket.close", "code": code})


class _Call:
    """One call of the forwarder, in the place of the server: gives it the request, and takes its answer."""

    def __init__(
        self,
        say: Callable[[str], Awaitable[None]],
        remember: Callable[[Told], None],
        frames: AnswerFrames,
        lane: str | None,
        body: bytes,
    ) -> None:
        self._say = say
        self._remember = remember
        self._frames = frames
        self._lane = lane
        self._body: bytes | None = body
        #: nobody waits for the answer any more, or it has been given
        self.over = asyncio.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        #: of a stream; None where the answer is none
        self._events: EventBuffer | None = None
        self._whole = bytearray()

    async def receive(self) -> dict[str, object]:
        """The request's body, and that the client has left, or got its answer."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        piece = message.get("body", b"")
        if self._events is None:
            self._whole += piece[: _MOST_WHOLE - len(self._whole)]
        else:
            await self._pass_on(self._events.feed(piece))
        if not message.get("more_body", False):
            self.over.set()

    def _begin(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in headers
            if name.decode("latin-1").lower() not in _OF_BODY
        }
        if 200 <= status < 300 and content_type(headers) == EVENTS:  # noqa: PLR2004
            self._events = EventBuffer(_MOST_WHOLE)

    async def _pass_on(self, region: bytes) -> None:
        for block in split_events(region) if region else ():
            if block.startswith(b":"):
                self._count_in(_comment(block))
                continue
            data = event_data(block)
            message = self._frames.message(data, self._headers) if data else None
            if message is not None:
                await self._tell(message)

    async def _tell(self, message: str) -> None:
        """Send a message. Who has it may go on from it at once."""
        if self._frames.told is not None:
            self._remember(self._frames.told)
        await self._say(message)

    def _count_in(self, comment: Mapping[str, str]) -> None:
        """Take what a finished answer says in its headers: it stands in a comment before a stream's last event.

        The totals in the stream's own headers are those of before the call.
        """
        if _USAGE not in comment:
            return
        kept = {name: value for name, value in self._headers.items() if not name.startswith(_CUMULATIVE)}
        self._headers = {**kept, **comment, _IS_FINAL: "true"}

    async def end(self) -> None:
        """Tell what is left to be told once the forwarder has nothing more."""
        if self._events is not None:
            await self._pass_on(self._events.rest())
            if not self._frames.has_ended:
                fault = UpstreamProtocolError("The answer broke off before its last event.")
                await self._tell(_fault_message(fault, self._lane))
        elif 200 <= self._status < 300:  # noqa: PLR2004
            await self._tell(self._frames.whole(bytes(self._whole), self._headers))
        elif self._status:
            await self._tell(error_message(self._status, bytes(self._whole), self._headers, self._lane))


def _comment(block: bytes) -> dict[str, str]:
    """The names and values in a comment of ours."""
    lines = (line[2:].partition(": ") for line in block.decode("latin-1").splitlines() if line.startswith(": "))
    return {name: value for name, mark, value in lines if mark}


def _of_calls(headers: Headers) -> Headers:
    """The handshake's headers that each of its calls has."""
    kept = [
        (name, _without_sockets(value) if name == _BETA else value)
        for name, value in headers
        if name not in _OF_HANDSHAKE and not name.startswith(_SOCKET_HEADERS)
    ]
    return [(name, value) for name, value in kept if value or name != _BETA]


def _without_sockets(value: bytes) -> bytes:
    return b",".join(part for part in value.split(b",") if b"websocket" not in part)


def _fault_message(fault: GatewayError, lane: str | None) -> str:
    headers = {name.decode(): value.decode("latin-1") for name, value in ours.of_fault(fault)}
    return fault_message(fault, headers, lane)


def _instead(send: Send) -> Send:
    """`send` for an ordinary answer to a handshake (ASGI's extension "websocket.http.response")."""

    async def denying(message: Any) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    return denying
