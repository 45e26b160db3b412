"""Send requests to one provider, with time limits and without redirects.

The response is passed on in the chunks in which it arrives. Only this module converts network errors to the gateway's
errors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from gateway.core.errors import (
    InvalidRequest,
    UpstreamBusy,
    UpstreamFault,
    UpstreamHungUp,
    UpstreamNotAccepted,
    UpstreamNotTaken,
    UpstreamProtocolError,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.http.request import Outgoing
from gateway.core.ports import PassedPieces, TakePiece, Upstream, UpstreamReply
from gateway.core.values import dataclass
from gateway.upstream.connection import (
    BrokenOff,
    Connection,
    ConnectionEnded,
    HttpFault,
    HttpResponse,
    HungUp,
    NoResponse,
    PeerGone,
    RequestNotRead,
)
from gateway.upstream.origin import (
    AddressNotFound,
    ConnectTimeout,
    NoFreeConnection,
    NotConnected,
    Origin,
    ProxyRefused,
    WrongProxy,
)
from gateway.upstream.read_timeout import ReadTimeout

#: exceptions of the network code that are converted to errors of the gateway
_NETWORK_ERRORS: Final = (OSError, HttpFault, NoFreeConnection, ConnectTimeout, NotConnected, ValueError)
#: methods that may be sent again if a reused connection turns out to be dead (RFC 9110, section 9.2.2)
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_UP_TO_HOST: Final = re.compile(r"[^/]*//[^/?]*")
#: methods whose requests state a length even if it is zero (RFC 9110, section 8.6)
_WITH_LENGTH: Final = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
    """Seconds to connect, to the head of a response, and between two chunks of it."""

    connect_s: float
    first_byte_s: float
    between_bytes_s: float


class HttpUpstream:
    """Connections to one provider. Create it in a running event loop."""

    def __init__(
        self,
        name: str,
        base_url: str,
        timeouts: UpstreamTimeouts,
        *,
        max_connections: int = 1024,
        tls: ssl.SSLContext | bool = True,
        proxy: str | None = None,
    ) -> None:
        self._name = name
        self.timeouts = timeouts
        self._host = urlsplit(base_url).netloc.rpartition("@")[2]
        self._origin = Origin(
            base_url,
            connect_s=timeouts.connect_s,
            wait_s=timeouts.first_byte_s,
            most=max_connections,
            tls=tls,
            proxy=proxy,
        )

    def send(self, request: Outgoing) -> _SendContext:
        """Return the context in which the request is sent."""
        return _SendContext(self, request)

    async def ask(self, request: Outgoing, head: bytes, *, fresh: bool = False) -> tuple[Connection, HttpResponse]:
        """Send a request and wait for the head of its response. Pass the connection to `release` afterwards."""
        connection = await self._origin.take(fresh=fresh)
        request.on_work(is_so=True)
        timeout = ReadTimeout(
            self.timeouts.first_byte_s,
            lambda: connection.fail(TimeoutError() if connection.is_sent else RequestNotRead()),
        )
        timeout.begin()
        try:
            return connection, await connection.ask(head, request.body, has_body=request.method != "HEAD")
        except BaseException as error:
            self.release(connection)
            if fresh or not isinstance(error, NoResponse) or not connection.until:
                raise
            self._origin.forget_idle()
            # A body may be a call with any method. Sent twice, it could be billed twice.
            is_repeatable = request.method in _IDEMPOTENT and not request.body
            if not is_repeatable and not isinstance(error, ConnectionEnded):
                raise HungUp from error
        finally:
            timeout.stop()
        return await self.ask(request, head, fresh=True)

    def release(self, connection: Connection) -> None:
        """Give the connection back."""
        self._origin.give(connection)

    def head(self, request: Outgoing) -> bytes:
        """Return the head of a request.

        Raises:
            InvalidRequest: a value would be read as another line. The configuration is checked when it is loaded, so
                the value is from the call.
        """
        place, proxy = self._origin.place, self._origin.proxy
        path = _path_and_query(request.url)
        named = dict(request.headers)
        fields = [*request.headers] if b"host" in named else [(b"host", place.netloc), *request.headers]
        if place.credential and b"authorization" not in named:
            fields.append((b"authorization", place.credential))
        if proxy is not None and not place.is_tls:
            path = b"http://%b%b" % (place.netloc, path)
            if proxy.credential:
                fields.append((b"proxy-authorization", proxy.credential))
        if request.body or request.method in _WITH_LENGTH:
            fields.append((b"content-length", b"%d" % len(request.body)))
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), path), *map(b": ".join, fields), b"", b""]
        head, ends = b"\r\n".join(lines), len(lines) - 1
        if head.count(b"\r") != ends or head.count(b"\n") != ends or b"\0" in head:
            raise InvalidRequest(
                "A header or the address of this call contains a line break or a zero byte. Remove it."
            )
        return head

    def gateway_error(self, error: Exception) -> UpstreamFault:
        """Return the gateway's error for an exception."""
        if isinstance(error, NoFreeConnection):
            return UpstreamBusy(
                f"{self._provider} has no free connection: all were in use for {self.timeouts.first_byte_s:g} s "
                "(timeout_s.first_byte). Try again later, or raise its max_connections."
            )
        if isinstance(error, ConnectTimeout):
            problem = (
                "has a name that was not resolved"
                if isinstance(error, AddressNotFound)
                else "did not accept a connection"
            )
            return UpstreamNotAccepted(
                f"{self._provider} {problem} within {self.timeouts.connect_s:g} s (timeout_s.connect)."
            )
        if isinstance(error, RequestNotRead):
            return UpstreamNotTaken(
                f"{self._provider} did not read the whole request within {self.timeouts.first_byte_s:g} s "
                "(timeout_s.first_byte). Try again later."
            )
        if isinstance(error, TimeoutError):
            return UpstreamTimeout(
                f"{self._provider} sent nothing for longer than timeout_s allows "
                f"(first_byte {self.timeouts.first_byte_s:g} s, between_bytes {self.timeouts.between_bytes_s:g} s)."
            )
        if isinstance(error, NotConnected | NoResponse | OSError):
            return _kind(error)(f"{self._provider} cannot be reached: {_reason(error)}. Try again later.")
        problem = "broke off its response" if isinstance(error, BrokenOff) else "did not respond in valid HTTP"
        return UpstreamProtocolError(f"{self._provider} {problem}. Try again. If it persists, ask the provider.")

    @property
    def _provider(self) -> str:
        return f'The provider "{self._name}" ({self._host})'

    async def aclose(self) -> None:
        """Close all connections."""
        await self._origin.aclose()


class _SendContext:
    """One request: entered when the head of its response was received, left when it is no longer read."""

    __slots__ = ("_reply", "_request", "_upstream")

    def __init__(self, upstream: HttpUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._reply: _Reply | None = None

    async def __aenter__(self) -> UpstreamReply:
        upstream, head = self._upstream, self._upstream.head(self._request)
        try:
            connection, response = await upstream.ask(self._request, head)
        except _NETWORK_ERRORS as error:
            raise upstream.gateway_error(error) from error
        self._reply = _Reply(upstream, connection, response)
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.release()


class _Reply(PassedPieces):
    """A response whose head was received.

    It yields the body as it arrives. Reading stops while the consumer is busy, so the provider has to wait.
    """

    def __init__(self, upstream: HttpUpstream, connection: Connection, response: HttpResponse) -> None:
        self.status = response.status
        self.headers: Sequence[tuple[bytes, bytes]] = response.headers
        self.response = response
        self._upstream = upstream
        self._connection = connection
        #: created when the reader has to wait for the first time
        self._timeout: ReadTimeout | None = None

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the body as an iterator."""
        return self

    async def __anext__(self) -> bytes:
        response = self.response
        if not response.is_readable:
            timeout = self._read_timeout()
            timeout.begin()
            await response.wait_for_data()
            timeout.end()
        piece = self._take()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def pass_to(self, take: TakePiece) -> bool:
        """Call `take` with each piece, in the callback in which it arrives. See `PassedPieces`."""
        response = self.response
        while True:
            while response.is_readable:
                piece = self._take()
                if not piece:
                    return False
                if not take(piece):
                    return True
            if await response.pass_to(take, self._read_timeout()):
                return True

    def _take(self) -> bytes:
        """Return what has arrived; empty at the end."""
        try:
            return self.response.take()
        except _NETWORK_ERRORS as error:
            raise self._upstream.gateway_error(error) from error

    def _read_timeout(self) -> ReadTimeout:
        """Return the timer of this response; all its waits share it."""
        if self._timeout is None:
            response = self.response
            self._timeout = ReadTimeout(self._upstream.timeouts.between_bytes_s, lambda: response.fail(TimeoutError()))
        return self._timeout

    def release(self) -> None:
        """Stop reading and give the connection back."""
        if self._timeout is not None:
            self._timeout.stop()
        self._upstream.release(self._connection)


def _path_and_query(url: str) -> bytes:
    """Return the path and query of an address; an empty path becomes a slash (RFC 9112, section 3.2.1)."""
    path = _UP_TO_HOST.sub("", url, 1).encode()
    return path if path.startswith(b"/") else b"/" + path


def _kind(error: Exception) -> type[UpstreamUnreachable]:
    """Return the error class: without a connection nothing was sent; without a response all may have been read."""
    if isinstance(error, NotConnected | ConnectionEnded):
        return UpstreamRefused
    return UpstreamHungUp if isinstance(error, HungUp) else UpstreamUnreachable


def _reason(error: Exception) -> str:
    """Return a reason that is safe to show: no address beyond the host, no internal details."""
    cause = error.__cause__ if isinstance(error, NotConnected | HungUp) else error
    if isinstance(cause, socket.gaierror | UnicodeError):
        return "its name cannot be resolved"
    if isinstance(cause, ssl.SSLError):
        return "TLS failed (certificate or protocol)"
    if isinstance(cause, ProxyRefused | WrongProxy):
        return str(cause)
    if isinstance(cause, PeerGone):
        return "an open connection does not deliver data any more"
    if isinstance(cause, NoResponse):
        return "it closed the connection without a response"
    return "connection refused" if isinstance(cause, ConnectionRefusedError) else "the connection failed or was reset"


def tls_context(*, verify: bool, ca_file: str | None) -> ssl.SSLContext | bool:
    """Return the `tls` argument for `Origin`.

    Raises:
        OSError: the file with certificate authorities cannot be read.
    """
    if not verify:
        return False
    return ssl.create_default_context(cafile=ca_file) if ca_file else True


def proxy_for(base_url: str) -> str | None:
    """Return the proxy in HTTP(S)_PROXY for this address, unless NO_PROXY excludes it. Read once, at the start.

    A proxy without a scheme is addressed in plain HTTP, as curl does.
    """
    parts, known = urlsplit(base_url), urllib.request.getproxies()
    if not known or parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    if _is_within(parts.hostname, known.get("no", "")):
        return None
    proxy = known.get(parts.scheme)
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _is_within(host: str, excluded: str) -> bool:
    """Return True if an address is in a network of NO_PROXY (`10.0.0.0/8`), which Python itself does not support."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return any(address in network for network in map(_network, excluded.split(",")) if network is not None)
    return False


def _network(word: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_network(word.strip(), strict=False) if "/" in word else None
    return None


if TYPE_CHECKING:
    _: type[Upstream] = HttpUpstream
