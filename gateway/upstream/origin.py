"""Pool the connections to one host.

Addresses are tried as in RFC 8305 (by aiohappyeyeballs), directly or through a proxy, with TLS if the URL says so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from gateway.core.http.addresses import is_address
from gateway.core.http.headers import is_success
from gateway.upstream.connection import Connection, HttpFault, HttpResponse
from gateway.upstream.keepalive import KeepaliveSettings
from gateway.upstream.limit import ConnectionLimit

#: Idle connections are closed before most providers close them (after 60 s or more), so few turn out to be dead.
_KEEPALIVE_S: Final = 45.0
#: seconds after which a name is resolved again
_ADDRESSES_S: Final = 30.0
#: seconds after which the next address is tried in parallel (RFC 8305, section 5)
_NEXT_ADDRESS_S: Final = 0.25
#: Firewalls and NATs forget a connection without traffic after one to six minutes. A minute without a reply is longer
#: than a route takes to change.
_PROBES: Final = KeepaliveSettings(after_s=15, every_s=15, times=4)
#: seconds between two checks whether the used connections are still acknowledged
_CHECK_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}
#: seconds that connections have to end when the pool is closed
_ENDS_WITHIN_S: Final = 1.0
#: seconds that a call waits for a name to be resolved again while older addresses are known
_MAX_WAIT_S: Final = 1.0


class NoFreeConnection(Exception):
    """Raised if all connections were in use for longer than a call may wait."""


class ConnectTimeout(Exception):
    """Raised if no connection was made within the time limit."""


class AddressNotFound(ConnectTimeout):
    """Raised if the name was not resolved within the time limit for a connection."""


class NotConnected(Exception):
    """Raised if no connection was made; the cause is an error of the system, the other side or the proxy."""


class ProxyRefused(Exception):
    """Raised if the proxy refused the connection."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the proxy responded with {status}")


class WrongProxy(Exception):
    """Raised if the configured proxy address is not valid."""

    def __init__(self) -> None:
        # The message does not show the configured address, which may contain a password.
        super().__init__(
            "HTTP_PROXY or HTTPS_PROXY must be the address of an HTTP proxy, like http://proxy.example:3128"
        )


class HostPort:
    """Scheme, host and port of the address of a provider or a proxy.

    `credential`: the Basic credential of user and password in the address; empty if it has none.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.is_tls = parts.scheme == "https"
        self.host = _ascii((parts.hostname or "").rstrip(".")).decode()
        self.port = parts.port or _PORTS.get(parts.scheme, 80)
        #: host and port as requests name them
        self.netloc = _ascii(parts.netloc.rpartition("@")[2])
        self.credential = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.credential = b"Basic " + base64.b64encode(pair.encode())

    @property
    def authority(self) -> bytes:
        """Return host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


class Origin:
    """Connections to one host. Create it in a running event loop.

    Args:
        url: an address of the host.
        connect_s: seconds to connect, including TLS and proxy.
        wait_s: seconds that a call waits for a free connection.
        most: maximum number of connections at once.
        tls: how the certificate is checked; True: with the authorities of the system; False: not at all.
        proxy: the address of a proxy, or None.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_s: float,
        wait_s: float,
        most: int,
        tls: ssl.SSLContext | bool,
        proxy: str | None,
    ) -> None:
        self.place = HostPort(url)
        self.proxy = HostPort(proxy) if proxy and is_address(proxy) else None
        self._is_proxy_wrong = bool(proxy) and self.proxy is None
        self._connect_s = connect_s
        self._wait_s = wait_s
        self._tls = tls
        self._limit = ConnectionLimit(most)
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        #: Loop time until which the addresses are not looked up again. Old addresses are better than none.
        self._fresh_until = 0.0
        self._addresses: Sequence[AddrInfoType] = ()
        self._looking_up: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._pruning: asyncio.TimerHandle | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._ended = asyncio.Event()

    async def take(self, *, fresh: bool = False) -> Connection:
        """Return a connection for one request, reused or new. It must be given back.

        Raises:
            NoFreeConnection, ConnectTimeout, NotConnected: there is no connection.
        """
        if not self._limit.try_take():
            await self._turn()
        try:
            while self._idle and not fresh:
                connection = self._idle.pop()
                if connection.is_idle and self._loop.time() < connection.until:
                    return connection
                connection.abort()
            return await self._opened()
        except BaseException:
            self._limit.give_back()
            raise

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._limit.take()
        except TimeoutError:
            raise NoFreeConnection from None

    def give(self, connection: Connection) -> None:
        """Give a connection back, whatever the result of its request was."""
        self._limit.give_back()
        keep_alive_s = min(connection.keep_alive_s, _KEEPALIVE_S)
        if not connection.release() or self._is_closed or keep_alive_s <= 0:
            connection.abort()
            return
        connection.until = self._loop.time() + keep_alive_s
        self._idle.append(connection)
        if self._pruning is None:
            self._pruning = self._loop.call_later(_KEEPALIVE_S, self._prune)

    def forget_idle(self) -> None:
        """Close all idle connections: one of them was dead, and the others are as old."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    def _prune(self) -> None:
        """Close the connections that were idle for too long."""
        self._pruning = None
        now = self._loop.time()
        for connection in [idle for idle in self._idle if idle.until <= now]:
            self._idle.remove(connection)
            connection.abort()
        if self._idle:
            self._pruning = self._loop.call_at(min(connection.until for connection in self._idle), self._prune)

    def _check_acknowledged(self) -> None:
        """Abort connections whose other side is gone; their calls would wait as long as for a model that thinks."""
        self._check_timer = None
        for connection in [used for used in self._all if used.is_unacknowledged]:
            connection.abort(TimeoutError())
        self._schedule_look()

    def _schedule_look(self) -> None:
        if self._check_timer is None and self._all:
            self._check_timer = self._loop.call_later(_CHECK_S, self._check_acknowledged)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._is_closed and not self._all:
            self._ended.set()

    # --- opening -------------------------------------------------------------------------------------------------

    async def _opened(self) -> Connection:
        if self._is_proxy_wrong:
            raise NotConnected from WrongProxy()
        try:
            async with asyncio.timeout(self._connect_s):
                connection = await self._connected(self.proxy or self.place)
                try:
                    await self._through_proxy(connection)
                except BaseException:
                    connection.release()
                    connection.abort()
                    raise
        except TimeoutError as error:
            self._fresh_until = 0.0
            raise (ConnectTimeout if self._addresses else AddressNotFound) from error
        except (OSError, HttpFault, ProxyRefused, UnicodeError) as error:
            self._fresh_until = 0.0
            raise NotConnected from error
        # Registered only now: asyncio may never report the end of a connection that is aborted in a TLS handshake
        # through a proxy, and `aclose` would wait for it.
        if not connection.is_lost:
            self._all.add(connection)
            self._schedule_look()
        return connection

    async def _connected(self, place: HostPort) -> Connection:
        sock = await start_connection(await self._resolved(place), happy_eyeballs_delay=_NEXT_ADDRESS_S)
        self._prefer_address_of(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _PROBES.begin(sock)
            context, name = (await self._context(), place.host) if place.is_tls else (None, None)
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._forget), sock=sock, ssl=context, server_hostname=name
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _resolved(self, place: HostPort) -> Sequence[AddrInfoType]:
        """Return the addresses; the previous ones if a new look-up fails or takes long.

        All calls wait for one look-up. It continues if they are cancelled, because its thread is busy in any case.
        """
        if self._loop.time() < self._fresh_until:
            return self._addresses
        if self._looking_up is None or self._looking_up.done():
            self._looking_up = self._loop.create_task(self._look_up(place))
            # If addresses are known, no call reads the exception of a failed look-up, and asyncio would log it.
            self._looking_up.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({self._looking_up}, timeout=_MAX_WAIT_S if self._addresses else None)
        if self._looking_up.done() and not self._addresses:
            self._looking_up.result()
        return self._addresses

    async def _look_up(self, place: HostPort) -> None:
        self._addresses = await _addresses_of(place.host, place.port)
        self._fresh_until = self._loop.time() + _ADDRESSES_S

    def _prefer_address_of(self, sock: socket.socket) -> None:
        """Try the address that accepted a connection first from now on; an earlier one may drop all packets."""
        with contextlib.suppress(OSError):
            peer = sock.getpeername()
            self._addresses = sorted(self._addresses, key=lambda address: address[4] != peer)

    async def _through_proxy(self, connection: Connection) -> None:
        """Make the proxy open a tunnel if the host uses TLS, so that the proxy cannot read the content."""
        if self.proxy is None or not self.place.is_tls:
            return
        target, credential = self.place.authority, self.proxy.credential
        head = b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n" % (target, target)
        if credential:
            head += b"proxy-authorization: %b\r\n" % credential
        response: HttpResponse = await connection.ask(head + b"\r\n", has_end=False)
        if not is_success(response.status):
            raise ProxyRefused(response.status)
        await connection.encrypt(self._loop, await self._context(), self.place.host)

    async def _context(self) -> ssl.SSLContext:
        """Return how certificates are checked. The first call reads the authorities of the system, in a thread.

        That takes 30 ms and some megabytes, which a gateway without TLS to its providers does not need.
        """
        if not isinstance(self._tls, ssl.SSLContext):
            self._tls = await asyncio.to_thread(_default_context, verify=self._tls)
        return self._tls

    async def aclose(self) -> None:
        """Close all connections."""
        self._is_closed = True
        if not self._all:
            self._ended.set()
        for timer in (self._pruning, self._check_timer):
            if timer is not None:
                timer.cancel()
        if self._looking_up is not None:
            self._looking_up.cancel()
        for connection in list(self._all):
            connection.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ENDS_WITHIN_S):
                await self._ended.wait()


async def _addresses_of(host: str, port: int) -> Sequence[AddrInfoType]:
    """Resolve a name in a new thread.

    The event loop has few threads for this (uvloop: two). Names without a reply would block them for half a minute for
    all other calls. The thread is a daemon, so the process does not wait for it at its end.

    Raises:
        OSError, UnicodeError: there are no addresses.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Sequence[AddrInfoType]] = loop.create_future()

    def finish(setter: Callable[[Any], None], value: object) -> None:
        def set_result() -> None:
            if not result.done():
                setter(value)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_result)

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001  # any exception is passed to the waiting calls
            finish(result.set_exception, error)
        else:
            finish(result.set_result, addresses)

    threading.Thread(target=look_up, name=f"addresses of {host}", daemon=True).start()
    return await result


def _ascii(name: str) -> bytes:
    """Return a host name in ASCII for requests and look-ups; an invalid name becomes one without an address."""
    try:
        return name.encode("ascii" if name.isascii() else "idna")
    except UnicodeError:
        return name.encode("ascii", "replace")


_READING: Final = threading.Lock()


def _default_context(*, verify: bool) -> ssl.SSLContext:
    """Return the process-wide context. Callers in other threads wait until the first one has made it."""
    with _READING:
        return _made_context(verify=verify)


@functools.cache
def _made_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
