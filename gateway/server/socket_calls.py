"""Run one call of a WebSocket through the forwarder, like an HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from gateway.core.errors import GatewayError, UpstreamProtocolError
from gateway.core.http.gateway_headers import REQUEST_ID
from gateway.core.http.headers import EVENTS, Headers, content_type, is_success
from gateway.core.http.sse import EventBuffer, event_data, split_events
from gateway.dialects.responses_frames import (
    CreateFrame,
    EarlierTurn,
    ResponseFrames,
    error_message,
    fault_message,
    request_of,
)
from gateway.server import headers as ours

#: bytes of an event, or of an answer that comes whole; both are one message
_MOST_WHOLE: Final = 64 * 1024 * 1024
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
#: the names of headers as they stand in messages
_CUMULATIVE: Final = ours.CUMULATIVE.decode()
_USAGE: Final = ours.CUMULATIVE_USAGE.decode()
_IS_FINAL: Final = ours.USAGE_FINAL.decode()
_REQUEST_ID: Final = ours.GATEWAY_REQUEST_ID.decode()


class SocketCall:
    """A request on its way through the forwarder. `told`: what it goes on from, where the connection remembers that.

    `say` sends a message; `remember` keeps an answer that only the connection can go on from.
    """

    def __init__(
        self,
        create: CreateFrame,
        told: EarlierTurn | None,
        say: Callable[[str], Awaitable[None]],
        remember: Callable[[EarlierTurn], None],
    ) -> None:
        self._say = say
        self._remember = remember
        self._frames = ResponseFrames(create, told)
        self._lane = create.lane
        self._body: bytes | None = request_of(create, told)
        #: bytes of the request's body
        self.size = len(self._body)
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
        if is_success(status) and content_type(headers) == EVENTS:
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
                await self._tell(told_fault(fault, self._headers[_REQUEST_ID], self._lane))
        elif is_success(self._status):
            await self._tell(self._frames.whole(bytes(self._whole), self._headers))
        elif self._status:
            await self._tell(error_message(self._status, bytes(self._whole), self._headers, self._lane))


def headers_of_calls(headers: Headers) -> Headers:
    """The handshake's headers that each of its calls has."""
    kept = [
        (name, _without_sockets(value) if name == _BETA else value)
        for name, value in headers
        if name not in _OF_HANDSHAKE and not name.startswith(_SOCKET_HEADERS)
    ]
    return [(name, value) for name, value in kept if value or name != _BETA]


def _without_sockets(value: bytes) -> bytes:
    return b",".join(part for part in value.split(b",") if b"websocket" not in part)


def told_fault(fault: GatewayError, request_id: str, lane: str | None) -> str:
    """The message for what the gateway itself refuses, with its id and what tells a client whether to ask again."""
    headers = {name.decode(): value.decode("latin-1") for name, value in ours.of_fault(fault)}
    return fault_message(fault, {_REQUEST_ID: request_id, **headers}, lane)


def _comment(block: bytes) -> dict[str, str]:
    """The names and values in a comment of ours."""
    lines = (line[2:].partition(": ") for line in block.decode("latin-1").splitlines() if line.startswith(": "))
    return {name: value for name, mark, value in lines if mark}
