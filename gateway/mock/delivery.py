"""Send a response over ASGI, with the timing and faults that its behaviour names."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import TYPE_CHECKING, Final

from gateway.mock.wire import MockResponse, ReceivedCall, SentEvent, Stream, Whole, encode

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Send

    from gateway.mock.turns import Behaviour

Headers = list[tuple[bytes, bytes]]

_GZIP_WBITS: Final = 31
_FASTEST: Final = 1


class Delivery:
    """Send the response of one call. `number`: the number of the call."""

    def __init__(self, request: ReceivedCall, behaviour: Behaviour, number: int, receive: Receive, send: Send) -> None:
        self._request = request
        self._behaviour = behaviour
        self._number = number
        self._receive = receive
        self._send = send

    async def run(self, response: MockResponse) -> None:
        """Send the response with the delays and faults of the behaviour."""
        behaviour = self._behaviour
        if behaviour.hang:
            await self._until_disconnected()
            return
        if behaviour.delay and await self._disconnects_within(behaviour.delay):
            return
        if behaviour.die == 0:
            await self._drop()
        elif isinstance(response, Stream):
            await self._stream(response)
        else:
            await self._whole(response)

    async def _whole(self, response: Whole) -> None:
        body = self._body(response)
        headers = self._headers(response.content_type)
        headers += [(name.encode(), value.encode()) for name, value in response.headers]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        if self._behaviour.die is None:
            await self._send({"type": "http.response.body", "body": body})
            return
        await self._send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
        await self._drop()

    def _body(self, response: Whole) -> bytes:
        content = response.content
        if isinstance(content, dict):
            if self._behaviour.echo_headers:
                content = {**content, "received_headers": _joined(self._request.headers)}
            content = encode(content)
        if self._behaviour.malformed:
            content = content[: len(content) * 2 // 3]
        return gzip.compress(content, _FASTEST, mtime=0) if self._behaviour.gzip else content

    async def _stream(self, response: Stream) -> None:
        headers = self._headers("text/event-stream; charset=utf-8")
        headers.append((b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        compressor = zlib.compressobj(_FASTEST, zlib.DEFLATED, _GZIP_WBITS) if self._behaviour.gzip else None
        sent = 0
        for frame in self._frames(response.frames):
            if frame.kind == "content":
                if sent == self._behaviour.die:
                    break
                if sent and self._behaviour.interval and await self._disconnects_within(self._behaviour.interval):
                    return
                sent += 1
            data = frame.data
            if compressor:
                data = compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if self._behaviour.die is not None:
            await self._drop()
            return
        await self._send({"type": "http.response.body", "body": compressor.flush() if compressor else b""})

    def _frames(self, frames: list[SentEvent]) -> Iterable[SentEvent]:
        if self._behaviour.no_done:
            frames = [frame for frame in frames if frame.kind != "done"]
        if self._behaviour.malformed:
            content = [index for index, frame in enumerate(frames) if frame.kind == "content"]
            middle = content[len(content) // 2] if content else len(frames) // 2
            broken = frames[middle].data
            frames = [*frames[:middle], SentEvent(broken[: len(broken) * 2 // 3] + b"\n\n"), *frames[middle:]]
        return frames

    def _headers(self, content_type: str) -> Headers:
        request_id = f"req_mock{self._number}".encode()
        headers = [(b"content-type", content_type.encode()), (b"x-request-id", request_id), (b"request-id", request_id)]
        if self._behaviour.gzip:
            headers.append((b"content-encoding", b"gzip"))
        if self._behaviour.cookie:
            headers.append((b"set-cookie", b"mock_session=1; Path=/; HttpOnly"))
        return headers

    async def _disconnects_within(self, seconds: float) -> bool:
        """Wait, and return True as soon as the client disconnects, or False after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._until_disconnected()
        except TimeoutError:
            return False
        return True

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _drop(self) -> None:
        """Close the connection without ending the response.

        ASGI has no message for this. In uvicorn, `send` is a method of the object that holds the transport. Closing the
        transport still sends everything that was written before. For other servers, an exception is raised.
        """
        # The transports of uvloop are not subclasses of asyncio's, so `isinstance` cannot be used.
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        close = getattr(transport, "close", None)
        if close is None:
            raise ConnectionAbortedError
        close()
        await self._until_disconnected()


def _joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers as an object; several values of one name are joined with commas."""
    joined: dict[str, str] = {}
    for name, value in headers:
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined
