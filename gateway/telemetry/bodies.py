"""Log the bodies of requests to providers and of their responses, if that is enabled.

Bodies contain what users write, and go to the same place as the log. Headers are not logged, because they contain
credentials.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import msgspec

from gateway.core.http.compression import SUPPORTED, Corrupt, TooLarge, Unpacker
from gateway.core.http.headers import header
from gateway.core.http.request import Outgoing
from gateway.core.ports import Upstream, UpstreamReply

#: bytes of each body that are kept, and bytes that are shown after decompression
MAX_BYTES: Final = 64 * 1024
#: Fields of a body that hold a credential, for example that of an MCP server. The text may end within an escape.
_SECRET: Final = re.compile(
    r'("(?:authorization|authorization_token|access_token|api[-_]?key|x-api-key|client_secret|password)"\s*:\s*")'
    r'[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)',
    re.IGNORECASE | re.DOTALL,
)


class _Body:
    """The first bytes of a body, and its size."""

    def __init__(self, encoding: str = "") -> None:
        self.size = 0
        self._encoding = encoding
        self._kept = bytearray()

    def add(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self._kept += chunk[: MAX_BYTES - len(self._kept)]

    @property
    def text(self) -> str:
        """Return the text to log, without credentials; a note if the body is not text or cannot be decompressed."""
        try:
            plain = self._decompressed() if self._encoding else bytes(self._kept)
        except (Corrupt, TooLarge):
            return f"({self.size} bytes, compressed: {self._encoding})"
        is_truncated = self.size > len(self._kept) or len(plain) == MAX_BYTES
        try:
            # A truncated text may end within a character.
            text = plain.decode("utf-8", "ignore" if is_truncated else "strict")
        except UnicodeDecodeError:
            return f"({self.size} bytes that are not text)"
        return _SECRET.sub(r"\1***\2", text) + ("…" if is_truncated else "")

    def _decompressed(self) -> bytes:
        if self._encoding not in SUPPORTED:
            raise Corrupt
        plain = bytearray()
        for part in Unpacker(None).feed(bytes(self._kept), at_most=MAX_BYTES):
            plain += part
            if len(plain) >= MAX_BYTES:
                break
        return bytes(plain[:MAX_BYTES])


class _Exchange:
    """One request to a provider, and the part of its response that has arrived."""

    def __init__(self, provider: str, request: Outgoing) -> None:
        self._provider = provider
        self._request = request
        self._started_at = time.time()
        self._status: int | None = None
        self._sent, self._received = _Body(), _Body()
        self._sent.add(request.body)

    def observe(self, reply: UpstreamReply) -> UpstreamReply:
        """Return a reply that also copies each chunk to the log."""
        self._status = reply.status
        self._received = _Body(header(reply.headers, b"content-encoding").strip().lower().decode("latin-1"))
        return _ObservedReply(reply, self._received.add)

    def line(self, *, as_json: bool) -> str:
        """Return the log line of the exchange."""
        path, sent, received = urlsplit(self._request.url).path, self._sent, self._received
        if not as_json:
            quoted = [msgspec.json.encode(body.text).decode() for body in (sent, received)]
            return (
                f"bodies {self._request.call_id} · {self._provider} {self._request.method} {path} · "
                f"sent {sent.size:,} bytes {quoted[0]} · "
                f"{self._status or 'no response'} {received.size:,} bytes {quoted[1]}"
            )
        fields = {
            "event": "bodies",
            "time": self._started_at,
            "call_id": self._request.call_id,
            "provider": self._provider,
            "method": self._request.method,
            "path": path,
            "status": self._status,
            "request_bytes": sent.size,
            "request": sent.text,
            "response_bytes": received.size,
            "response": received.text,
        }
        return msgspec.json.encode(fields).decode()


class _ObservedReply:
    """An `UpstreamReply` that passes a copy of each chunk to `observe`."""

    def __init__(self, reply: UpstreamReply, observe: Callable[[bytes], None]) -> None:
        self._reply = reply
        self._observe = observe

    @property
    def status(self) -> int:
        """Return the status."""
        return self._reply.status

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """Return the headers."""
        return self._reply.headers

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the chunks of the body."""
        return _ObservedChunks(self._reply.chunks(), self._observe)


class _ObservedChunks(AsyncIterator[bytes]):
    def __init__(self, chunks: AsyncIterator[bytes], observe: Callable[[bytes], None]) -> None:
        self._chunks = chunks
        self._observe = observe

    async def __anext__(self) -> bytes:
        chunk = await anext(self._chunks)
        self._observe(chunk)
        return chunk


class LoggedUpstream(Upstream):
    """An upstream that logs all bodies that pass through it. `put` writes a line to the log."""

    def __init__(self, inner: Upstream, provider: str, put: Callable[[str], None], *, as_json: bool) -> None:
        self._inner = inner
        self._provider = provider
        self._put = put
        self._as_json = as_json

    def send(self, request: Outgoing) -> AbstractAsyncContextManager[UpstreamReply]:
        """Send a request. Log both bodies when the response has been read, or when its reader stops."""
        return self._send(request)

    @asynccontextmanager
    async def _send(self, request: Outgoing) -> AsyncIterator[UpstreamReply]:
        exchange = _Exchange(self._provider, request)
        try:
            async with self._inner.send(request) as reply:
                yield exchange.observe(reply)
        finally:
            self._put(exchange.line(as_json=self._as_json))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()
