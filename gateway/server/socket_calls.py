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

#: most bytes of an event, or of a response without a stream; each becomes one message
_LARGEST_MESSAGE: Final = 64 * 1024 * 1024
#: headers of the handshake that its calls do not get
_HANDSHAKE_ONLY: Final = frozenset(
    {
        *(b"connection", b"upgrade", b"content-type", b"content-length", b"content-encoding", b"transfer-encoding"),
        *(b"expect", b"accept", b"accept-encoding", b"idempotency-key", REQUEST_ID),
    }
)
_SOCKET_PREFIX: Final = b"sec-websocket-"
#: names the requested versions of the API; versions of the WebSocket API have no meaning for a POST
_OPENAI_BETA: Final = b"openai-beta"
#: headers of a response about its body or its connection, which messages do not contain
_BODY_HEADERS: Final = frozenset(
    {"content-type", "content-length", "transfer-encoding", "connection", "date", "server", "cache-control"}
)
#: names of headers as text, as in messages
_CUMULATIVE: Final = ours.CUMULATIVE.decode()
_USAGE: Final = ours.CUMULATIVE_USAGE.decode()
_IS_FINAL: Final = ours.USAGE_FINAL.decode()
_REQUEST_ID: Final = ours.GATEWAY_REQUEST_ID.decode()


class SocketCall:
    """A call of a WebSocket in the form of an ASGI request for the forwarder.

    Args:
        create: the client's `response.create`.
        earlier: the remembered response that the call continues, if any.
        say: sends a message to the client.
        remember: keeps a response that only the connection can continue.
    """

    def __init__(
        self,
        create: CreateFrame,
        earlier: EarlierTurn | None,
        say: Callable[[str], Awaitable[None]],
        remember: Callable[[EarlierTurn], None],
    ) -> None:
        self._say = say
        self._remember = remember
        self._frames = ResponseFrames(create, earlier)
        self._lane = create.lane
        self._body: bytes | None = request_of(create, earlier)
        #: bytes of the request's body
        self.size = len(self._body)
        #: set when the response is complete, or the client has left
        self.ended = asyncio.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        #: events of a stream; None if the response is not a stream
        self._events: EventBuffer | None = None
        self._body_parts = bytearray()

    async def receive(self) -> dict[str, object]:
        """Return the request body; after it, wait for the end of the call and return a disconnect."""
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Receive a part of the response."""
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        piece = message.get("body", b"")
        if self._events is None:
            self._body_parts += piece[: _LARGEST_MESSAGE - len(self._body_parts)]
        else:
            await self._forward(self._events.feed(piece))
        if not message.get("more_body", False):
            self.ended.set()

    def _begin(self, status: int, headers: Headers) -> None:
        self._status = status
        self._headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in headers
            if name.decode("latin-1").lower() not in _BODY_HEADERS
        }
        if is_success(status) and content_type(headers) == EVENTS:
            self._events = EventBuffer(_LARGEST_MESSAGE)

    async def _forward(self, region: bytes) -> None:
        for block in split_events(region) if region else ():
            if block.startswith(b":"):
                self._add_totals(_comment(block))
                continue
            data = event_data(block)
            message = self._frames.message(data, self._headers) if data else None
            if message is not None:
                await self._send(message)

    async def _send(self, message: str) -> None:
        """Remember the response, then send the message: the client may continue from it at once."""
        if self._frames.continuable_turn is not None:
            self._remember(self._frames.continuable_turn)
        await self._say(message)

    def _add_totals(self, comment: Mapping[str, str]) -> None:
        """Replace the totals in the headers with those in the comment before the last event of a stream.

        The totals in the headers of a stream do not include the call yet.
        """
        if _USAGE not in comment:
            return
        others = {name: value for name, value in self._headers.items() if not name.startswith(_CUMULATIVE)}
        self._headers = {**others, **comment, _IS_FINAL: "true"}

    async def end(self) -> None:
        """Send the remaining messages when the forwarder has ended."""
        if self._events is not None:
            await self._forward(self._events.rest())
            if not self._frames.has_ended:
                fault = UpstreamProtocolError("The response broke off before its last event.")
                await self._send(error_frame(fault, self._headers[_REQUEST_ID], self._lane))
        elif is_success(self._status):
            await self._send(self._frames.complete_message(bytes(self._body_parts), self._headers))
        elif self._status:
            await self._send(error_message(self._status, bytes(self._body_parts), self._headers, self._lane))


def call_headers(headers: Headers) -> Headers:
    """Return the headers of the handshake that each of its calls gets."""
    forwarded = [
        (name, _without_websocket_versions(value) if name == _OPENAI_BETA else value)
        for name, value in headers
        if name not in _HANDSHAKE_ONLY and not name.startswith(_SOCKET_PREFIX)
    ]
    return [(name, value) for name, value in forwarded if value or name != _OPENAI_BETA]


def _without_websocket_versions(value: bytes) -> bytes:
    return b",".join(part for part in value.split(b",") if b"websocket" not in part)


def error_frame(fault: GatewayError, request_id: str, lane: str | None) -> str:
    """Return the message for an error of the gateway, with the request id and the headers about retries."""
    headers = {name.decode(): value.decode("latin-1") for name, value in ours.error_headers(fault)}
    return fault_message(fault, {_REQUEST_ID: request_id, **headers}, lane)


def _comment(block: bytes) -> dict[str, str]:
    """Return the names and values in a comment of the gateway."""
    lines = (line[2:].partition(": ") for line in block.decode("latin-1").splitlines() if line.startswith(": "))
    return {name: value for name, mark, value in lines if mark}
