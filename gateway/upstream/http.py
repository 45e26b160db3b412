"""The pooled HTTP client towards one provider: time limits, no redirects, no cookies, no unpacking.

What the provider sends is handed on as framed: aiohttp neither decompresses nor follows. Its exceptions become ours
here and nowhere else.
"""

from __future__ import annotations

import asyncio
import io
import ssl
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.core.errors import (
    UpstreamFault,
    UpstreamNotAccepted,
    UpstreamProtocolError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.ports import Outgoing, Upstream, UpstreamReply
from gateway.core.values import dataclass
from gateway.upstream.silence import Silence

#: aiohttp would add these of its own accord; what the caller did not send, the provider does not get
_SKIP: Final = frozenset({"User-Agent", "Accept", "Content-Type"})
#: idle connections are dropped before the usual provider drops them (60 s and more), so that few are found dead
_KEEPALIVE_S: Final = 45.0
_MAX_HEADER_LINE: Final = 32 * 1024
_PIECEWISE: Final = 512 * 1024
#: what aiohttp and the sockets below it raise
_FOREIGN: Final = (OSError, aiohttp.ClientError, aiohttp.http.HttpProcessingError, ValueError)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: to connect, to the head of the answer, and between two pieces of it."""

    connect_s: float
    first_byte_s: float
    between_bytes_s: float


class HttpUpstream:
    """The connections to one provider. Construct it where an event loop runs."""

    def __init__(
        self,
        name: str,
        base_url: str,
        limits: Limits,
        *,
        max_connections: int = 1024,
        tls: ssl.SSLContext | bool = True,
        proxy: str | None = None,
    ) -> None:
        self._name = name
        self._limits = limits
        self._proxy = proxy
        self._host = urlsplit(base_url).netloc
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=max_connections, ssl=tls, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=30
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIP,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_s),
            max_line_size=_MAX_HEADER_LINE,
            max_field_size=_MAX_HEADER_LINE,
        )

    def send(self, request: Outgoing) -> _Sending:
        """See `Upstream.send`."""
        return _Sending(self, request)

    async def request(self, request: Outgoing) -> aiohttp.ClientResponse:
        """Send, and wait for the head of the answer."""
        headers = CIMultiDict([(name.decode("latin-1"), _header_text(value)) for name, value in request.headers])
        try:
            async with asyncio.timeout(self._limits.first_byte_s):
                return await self._session.request(
                    request.method,
                    URL(request.url, encoded=True),
                    headers=headers,
                    data=_payload(request.body),
                    allow_redirects=False,
                    proxy=self._proxy,
                )
        except _FOREIGN as error:
            raise self._translated(error) from error

    async def pieces(self, content: _Content) -> AsyncIterator[bytes]:
        """The body as it arrives; reading stops while the consumer is busy, so the socket pushes back."""
        silence = Silence(self._limits.between_bytes_s, lambda: content.fail(TimeoutError()))
        try:
            while True:
                silence.begin()
                piece = await content.next()
                silence.end()
                if not piece:
                    return
                yield piece
        except _FOREIGN as error:
            raise self._translated(error) from error
        finally:
            silence.stop()

    def _translated(self, error: Exception) -> UpstreamFault:
        """Ours for one of aiohttp's."""
        if isinstance(error, TimeoutError):
            return self._timeout(error)
        if isinstance(error, aiohttp.ServerDisconnectedError | OSError):
            # A connector's error comes before a byte was sent; any other may come after the provider has read it all.
            kind = UpstreamRefused if isinstance(error, aiohttp.ClientConnectorError) else UpstreamUnreachable
            return kind(f"{self._provider} cannot be reached: {_reason(error)}. Try again shortly.")
        return self._protocol_error(error)

    def _timeout(self, error: TimeoutError) -> UpstreamFault:
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return UpstreamNotAccepted(
                f"{self._provider} did not accept a connection within {self._limits.connect_s:g} s (timeout_s.connect)."
            )
        return UpstreamTimeout(
            f"{self._provider} was silent for longer than timeout_s allows "
            f"(first_byte {self._limits.first_byte_s:g} s, between_bytes {self._limits.between_bytes_s:g} s)."
        )

    def _protocol_error(self, error: Exception) -> UpstreamProtocolError:
        kind = (
            "broke off its answer" if isinstance(error, aiohttp.ClientPayloadError) else "did not answer in valid HTTP"
        )
        return UpstreamProtocolError(f"{self._provider} {kind}. Try again; if it stays so, ask the provider.")

    @property
    def _provider(self) -> str:
        return f'The provider "{self._name}" ({self._host})'

    async def aclose(self) -> None:
        """See `Upstream.aclose`."""
        await self._session.close()


class _Sending:
    """One request on its way: entered when the head of its answer is there, left when nobody reads on."""

    __slots__ = ("_answer", "_request", "_upstream")

    def __init__(self, upstream: HttpUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._answer: tuple[aiohttp.ClientResponse, _Content] | None = None

    async def __aenter__(self) -> UpstreamReply:
        response = await self._upstream.request(self._request)
        reply = _Reply(self._upstream, response)
        self._answer = response, reply.content
        return reply

    async def __aexit__(self, *_: object) -> None:
        if self._answer is None:
            return
        response, content = self._answer
        content.leave()
        # At the end of the body this returns the connection to the pool; before it, it closes it.
        if response.content.at_eof():
            response.release()
        else:
            response.close()


class _Reply:
    """An answer of which the head is there."""

    def __init__(self, upstream: HttpUpstream, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers: Sequence[tuple[bytes, bytes]] = response.raw_headers
        self._upstream = upstream
        self.content = _Content(response)

    def chunks(self) -> AsyncIterator[bytes]:
        """See `UpstreamReply.chunks`."""
        return self._upstream.pieces(self.content)


class _Content:
    """The body of an answer, and how it ends, which aiohttp does not always tell whoever reads it.

    Where it gives a connection up for what came, as nonsense between two chunks, nobody is told. It takes a reset for
    an end like any other of a body that ends with its connection. And it tells of a break before what had come until
    then has been read.
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._stream, headers = response.content, response.headers
        self._is_open_ended = "content-length" not in headers and "transfer-encoding" not in headers
        # Now: once the body has ended it no longer says by what.
        protocol = response.connection.protocol if response.connection is not None else None
        self._closed = protocol.closed if protocol is not None else None
        if self._closed is not None:
            # Once for each connection, however many answers come over it.
            self._closed.remove_done_callback(_was_reset)
            self._closed.add_done_callback(_was_reset)
            self._closed.add_done_callback(self._tell)

    def leave(self) -> None:
        """Nobody reads on."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._tell)

    def fail(self, error: Exception) -> None:
        """Let whoever reads it fail."""
        self._stream.set_exception(error)

    def _tell(self, _: object) -> None:
        if not self._stream.is_eof() and self._stream.exception() is None:
            self._stream.set_exception(aiohttp.ClientPayloadError())

    async def next(self) -> bytes:
        """What comes next; nothing at the end."""
        try:
            piece = await self._stream.readany()
        except _FOREIGN:
            # No public method gives what had come once the break is known.
            piece = self._stream._read_nowait(-1)  # noqa: SLF001
            if not piece:
                raise
        except RuntimeError as error:
            # Its word for a connection that it gave up, once the part before that has been read.
            raise aiohttp.ClientPayloadError(str(error)) from error
        if not piece and self._is_open_ended and self._closed is not None and _was_reset(self._closed):
            raise aiohttp.ClientPayloadError
        return piece


def _was_reset(closed: asyncio.Future[None]) -> bool:
    """Whether a connection ended in an error; the event loop complains of one that nobody has asked for."""
    return closed.done() and not closed.cancelled() and closed.exception() is not None


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """As a file, a large body is written in pieces, with turns of the event loop between them."""
    if len(body) > _PIECEWISE:
        return io.BytesIO(body)
    return body or None


def _header_text(value: bytes) -> str:
    """A header's value so that aiohttp, which writes UTF-8, puts the same bytes on the wire."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _reason(error: Exception) -> str:
    """What a stranger may know: no address beyond the host, no object's repr."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name cannot be resolved"
    if isinstance(error, aiohttp.ClientSSLError):
        return "TLS failed (certificate or protocol)"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    if (
        isinstance(error, ConnectionRefusedError)
        or getattr(error, "os_error", None).__class__ is ConnectionRefusedError
    ):
        return "connection refused"
    return "the connection failed or was reset"


def tls_context(*, verify: bool, ca_file: str | None) -> ssl.SSLContext | bool:
    """What `TCPConnector(ssl=…)` takes.

    Raises:
        OSError: the file of authorities cannot be read.
    """
    if not verify:
        return False
    return ssl.create_default_context(cafile=ca_file) if ca_file else True


def proxy_for(base_url: str) -> str | None:
    """The proxy that HTTP(S)_PROXY names for this address, unless NO_PROXY excludes it.

    Read once at start; aiohttp's own reading would do so on every call, and take credentials from ~/.netrc.
    """
    parts = urlsplit(base_url)
    if parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    return urllib.request.getproxies().get(parts.scheme)


if TYPE_CHECKING:
    _: type[Upstream] = HttpUpstream
