"""Log the requests to providers and their responses, if that is enabled.

Bodies hold whatever users write, and go where the log goes. Headers, with the credentials in them, are not written.
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

#: bytes that are kept of each body, and shown of what is packed in them
MOST: Final = 64 * 1024
#: Fields of a body that hold a credential, such as that of an MCP server. The text may break off inside of an escape.
_SECRET: Final = re.compile(
    r'("(?:authorization|authorization_token|access_token|api[-_]?key|x-api-key|client_secret|password)"\s*:\s*")'
    r'[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)',
    re.IGNORECASE | re.DOTALL,
)


class _Body:
    """The beginning of a body, and how long it was."""

    def __init__(self, encoding: str = "") -> None:
        self.size = 0
        self._encoding = encoding
        self._kept = bytearray()

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._kept += piece[: MOST - len(self._kept)]

    @property
    def text(self) -> str:
        """What may be shown of it."""
        try:
            plain = self._decompressed() if self._encoding else bytes(self._kept)
        except (Corrupt, TooLarge):
            return f"({self.size} bytes, packed: {self._encoding})"
        is_cut = self.size > len(self._kept) or len(plain) == MOST
        try:
            # The cut may have gone through a letter.
            text = plain.decode("utf-8", "ignore" if is_cut else "strict")
        except UnicodeDecodeError:
            return f"({self.size} bytes that are no text)"
        return _SECRET.sub(r"\1***\2", text) + ("…" if is_cut else "")

    def _decompressed(self) -> bytes:
        if self._encoding not in SUPPORTED:
            raise Corrupt
        plain = bytearray()
        for part in Unpacker(None).feed(bytes(self._kept), at_most=MOST):
            plain += part
            if len(plain) >= MOST:
                break
        return bytes(plain[:MOST])


class _Exchange:
    """One request to a provider, and its answer as far as it came."""

    def __init__(self, provider: str, request: Outgoing) -> None:
        self._provider = provider
        self._request = request
        self._began = time.time()
        self._status: int | None = None
        self._sent, self._received = _Body(), _Body()
        self._sent.add(request.body)

    def heard(self, reply: UpstreamReply) -> UpstreamReply:
        self._status = reply.status
        self._received = _Body(header(reply.headers, b"content-encoding").strip().lower().decode("latin-1"))
        return _Heard(reply, self._received.add)

    def line(self, *, as_json: bool) -> str:
        path, sent, received = urlsplit(self._request.url).path, self._sent, self._received
        if not as_json:
            quoted = [msgspec.json.encode(body.text).decode() for body in (sent, received)]
            return (
                f"bodies {self._request.call_id} · {self._provider} {self._request.method} {path} · "
                f"sent {sent.size:,} bytes {quoted[0]} · "
                f"{self._status or 'no answer'} {received.size:,} bytes {quoted[1]}"
            )
        fields = {
            "event": "bodies",
            "time": self._began,
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


class _Heard:
    """An `UpstreamReply` of which each piece is heard as it passes."""

    def __init__(self, reply: UpstreamReply, hear: Callable[[bytes], None]) -> None:
        self._reply = reply
        self._hear = hear

    @property
    def status(self) -> int:
        """See `UpstreamReply.status`."""
        return self._reply.status

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """See `UpstreamReply.headers`."""
        return self._reply.headers

    def chunks(self) -> AsyncIterator[bytes]:
        """See `UpstreamReply.chunks`."""
        return _Pieces(self._reply.chunks(), self._hear)


class _Pieces(AsyncIterator[bytes]):
    def __init__(self, pieces: AsyncIterator[bytes], hear: Callable[[bytes], None]) -> None:
        self._pieces = pieces
        self._hear = hear

    async def __anext__(self) -> bytes:
        piece = await anext(self._pieces)
        self._hear(piece)
        return piece


class LoggedUpstream(Upstream):
    """The way to a provider, of which all that goes by is written down. `put` takes a line of the log."""

    def __init__(self, inner: Upstream, provider: str, put: Callable[[str], None], *, as_json: bool) -> None:
        self._inner = inner
        self._provider = provider
        self._put = put
        self._as_json = as_json

    def send(self, request: Outgoing) -> AbstractAsyncContextManager[UpstreamReply]:
        """See `Upstream.send`. The line is written when the answer has been read, or nobody reads on."""
        return self._send(request)

    @asynccontextmanager
    async def _send(self, request: Outgoing) -> AsyncIterator[UpstreamReply]:
        exchange = _Exchange(self._provider, request)
        try:
            async with self._inner.send(request) as reply:
                yield exchange.heard(reply)
        finally:
            self._put(exchange.line(as_json=self._as_json))

    async def aclose(self) -> None:
        """See `Upstream.aclose`."""
        await self._inner.aclose()
