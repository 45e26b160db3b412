"""Send requests to one provider, with time limits and without redirects.

What the provider sends is handed on as framed. What goes wrong on the way becomes our errors here and nowhere else.
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
from gateway.core.ports import Upstream, UpstreamReply
from gateway.core.values import dataclass
from gateway.upstream.connection import (
    BrokenOff,
    Connection,
    ConnectionEnded,
    HttpFault,
    HttpResponse,
    HungUp,
    NoAnswer,
    NotTaken,
    PeerGone,
)
from gateway.upstream.origin import (
    AddressNotFound,
    NoneFree,
    NotAccepted,
    NotConnected,
    NotLetThrough,
    Origin,
    WrongProxy,
)
from gateway.upstream.read_timeout import ReadTimeout

#: what is raised on the way to a provider, and becomes an error of ours
_FOREIGN: Final = (OSError, HttpFault, NoneFree, NotAccepted, NotConnected, ValueError)
#: may be sent again where an old connection turns out to be dead (RFC 9110, section 9.2.2)
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_UP_TO_HOST: Final = re.compile(r"[^/]*//[^/?]*")
#: methods whose requests say their length even where it is zero (RFC 9110, section 8.6)
_WITH_LENGTH: Final = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True)
class UpstreamTimeouts:
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

    def send(self, request: Outgoing) -> _Sending:
        """See `Upstream.send`."""
        return _Sending(self, request)

    async def ask(self, request: Outgoing, head: bytes, *, fresh: bool = False) -> tuple[Connection, HttpResponse]:
        """Send, and wait for the head of the answer. The connection is to be handed to `leave`."""
        connection = await self._origin.take(fresh=fresh)
        request.at_work(is_so=True)
        silence = ReadTimeout(
            self.timeouts.first_byte_s,
            lambda: connection.fail(TimeoutError() if connection.is_sent else NotTaken()),
        )
        silence.begin()
        try:
            return connection, await connection.ask(head, request.body, has_body=request.method != "HEAD")
        except BaseException as error:
            self.leave(connection)
            if fresh or not isinstance(error, NoAnswer) or not connection.until:
                raise
            self._origin.forget_idle()
            # A body may make a call of any method, which the provider would bill twice.
            is_repeatable = request.method in _IDEMPOTENT and not request.body
            if not is_repeatable and not isinstance(error, ConnectionEnded):
                raise HungUp from error
        finally:
            silence.stop()
        return await self.ask(request, head, fresh=True)

    def leave(self, connection: Connection) -> None:
        """Give the connection back, as nobody reads on."""
        self._origin.give(connection)

    def head(self, request: Outgoing) -> bytes:
        """The head of a request.

        Raises:
            InvalidRequest: something in it would be read as another line. What is configured was looked at when it was
                read, so that this came with the call.
        """
        place, proxy = self._origin.place, self._origin.proxy
        path = _behind_host(request.url)
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
                "A header or the address of this call holds a line break or a zero byte. Leave it out."
            )
        return head

    def translated(self, error: Exception) -> UpstreamFault:
        """The error of ours for what was raised."""
        if isinstance(error, NoneFree):
            return UpstreamBusy(
                f"{self._provider} has no connection free: all were in use for {self.timeouts.first_byte_s:g} s "
                "(timeout_s.first_byte). Try again shortly, or raise its max_connections."
            )
        if isinstance(error, NotAccepted):
            what = (
                "has a name that was not resolved"
                if isinstance(error, AddressNotFound)
                else "did not accept a connection"
            )
            return UpstreamNotAccepted(
                f"{self._provider} {what} within {self.timeouts.connect_s:g} s (timeout_s.connect)."
            )
        if isinstance(error, NotTaken):
            return UpstreamNotTaken(
                f"{self._provider} did not take all of the request within {self.timeouts.first_byte_s:g} s "
                "(timeout_s.first_byte). Try again shortly."
            )
        if isinstance(error, TimeoutError):
            return UpstreamTimeout(
                f"{self._provider} was silent for longer than timeout_s allows "
                f"(first_byte {self.timeouts.first_byte_s:g} s, between_bytes {self.timeouts.between_bytes_s:g} s)."
            )
        if isinstance(error, NotConnected | NoAnswer | OSError):
            return _kind(error)(f"{self._provider} cannot be reached: {_reason(error)}. Try again shortly.")
        said = "broke off its answer" if isinstance(error, BrokenOff) else "did not answer in valid HTTP"
        return UpstreamProtocolError(f"{self._provider} {said}. Try again; if it stays so, ask the provider.")

    @property
    def _provider(self) -> str:
        return f'The provider "{self._name}" ({self._host})'

    async def aclose(self) -> None:
        """See `Upstream.aclose`."""
        await self._origin.aclose()


class _Sending:
    """One request on its way: entered when the head of its answer is there, left when nobody reads on."""

    __slots__ = ("_reply", "_request", "_upstream")

    def __init__(self, upstream: HttpUpstream, request: Outgoing) -> None:
        self._upstream = upstream
        self._request = request
        self._reply: _Reply | None = None

    async def __aenter__(self) -> UpstreamReply:
        upstream, head = self._upstream, self._upstream.head(self._request)
        try:
            connection, answer = await upstream.ask(self._request, head)
        except _FOREIGN as error:
            raise upstream.translated(error) from error
        self._reply = _Reply(upstream, connection, answer)
        return self._reply

    async def __aexit__(self, *_: object) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.leave()


class _Reply(AsyncIterator[bytes]):
    """An answer of which the head is there.

    It gives the body as that arrives; reading stops while the consumer is busy, so the socket pushes back.
    """

    def __init__(self, upstream: HttpUpstream, connection: Connection, answer: HttpResponse) -> None:
        self.status = answer.status
        self.headers: Sequence[tuple[bytes, bytes]] = answer.headers
        self.answer = answer
        self._upstream = upstream
        self._connection = connection
        #: only where something has to be waited for
        self._silence: ReadTimeout | None = None

    def chunks(self) -> AsyncIterator[bytes]:
        """See `UpstreamReply.chunks`."""
        return self

    async def __anext__(self) -> bytes:
        answer = self.answer
        if not answer.has_news:
            if self._silence is None:
                self._silence = ReadTimeout(
                    self._upstream.timeouts.between_bytes_s, lambda: answer.fail(TimeoutError())
                )
            self._silence.begin()
            await answer.news()
            self._silence.end()
        try:
            piece = answer.take()
        except _FOREIGN as error:
            raise self._upstream.translated(error) from error
        if not piece:
            raise StopAsyncIteration
        return piece

    def leave(self) -> None:
        """Nobody reads on."""
        if self._silence is not None:
            self._silence.stop()
        self._upstream.leave(self._connection)


def _behind_host(url: str) -> bytes:
    """The path and the query of an address; the path of one that has none is a slash (RFC 9112, section 3.2.1)."""
    path = _UP_TO_HOST.sub("", url, 1).encode()
    return path if path.startswith(b"/") else b"/" + path


def _kind(error: Exception) -> type[UpstreamUnreachable]:
    """Before there is a connection nothing was sent; without an answer the provider may have read it all."""
    if isinstance(error, NotConnected | ConnectionEnded):
        return UpstreamRefused
    return UpstreamHungUp if isinstance(error, HungUp) else UpstreamUnreachable


def _reason(error: Exception) -> str:
    """What a stranger may know: no address beyond the host, no object's repr."""
    cause = error.__cause__ if isinstance(error, NotConnected | HungUp) else error
    if isinstance(cause, socket.gaierror | UnicodeError):
        return "its name cannot be resolved"
    if isinstance(cause, ssl.SSLError):
        return "TLS failed (certificate or protocol)"
    if isinstance(cause, NotLetThrough | WrongProxy):
        return str(cause)
    if isinstance(cause, PeerGone):
        return "nothing gets through to it on a connection that was open"
    if isinstance(cause, NoAnswer):
        return "it closed the connection without an answer"
    return "connection refused" if isinstance(cause, ConnectionRefusedError) else "the connection failed or was reset"


def tls_context(*, verify: bool, ca_file: str | None) -> ssl.SSLContext | bool:
    """What `Origin` takes as `tls`.

    Raises:
        OSError: the file of authorities cannot be read.
    """
    if not verify:
        return False
    return ssl.create_default_context(cafile=ca_file) if ca_file else True


def proxy_for(base_url: str) -> str | None:
    """The proxy that HTTP(S)_PROXY names for this address, unless NO_PROXY excludes it. Read once, at the start.

    One without a scheme is spoken to in plain HTTP, as curl does it.
    """
    parts, known = urlsplit(base_url), urllib.request.getproxies()
    if parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    if _is_within(parts.hostname, known.get("no", "")):
        return None
    proxy = known.get(parts.scheme)
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _is_within(host: str, excluded: str) -> bool:
    """Whether an address lies in one of the networks of NO_PROXY (`10.0.0.0/8`), which Python itself leaves out."""
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
