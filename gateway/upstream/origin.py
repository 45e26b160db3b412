"""Pool the connections to one host.

Addresses are tried as RFC 8305 has it (by aiohappyeyeballs), directly or through a proxy, in TLS where the address says
so.
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

#: idle connections are dropped before the usual provider drops them (60 s and more), so that few are found dead
_KEEPALIVE_S: Final = 45.0
#: seconds after which the addresses of a name are looked up again
_ADDRESSES_S: Final = 30.0
#: seconds after which the next address is tried as well (RFC 8305, section 5)
_NEXT_ADDRESS_S: Final = 0.25
#: Firewalls and NATs forget a connection that was quiet for one to six minutes. A minute without an answer is more than
#: a path takes to change.
_ASKING: Final = KeepaliveSettings(after_s=15, every_s=15, times=4)
#: seconds between two looks whether those in use are heard of
_LOOK_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}
#: seconds that connections have to end when all are closed
_ENDS_WITHIN_S: Final = 1.0
#: seconds that a call waits for the addresses of a name where some are known from before
_MAX_WAIT_S: Final = 1.0


class NoneFree(Exception):
    """All connections were in use for longer than anybody may wait."""


class NotAccepted(Exception):
    """No connection within the time for it."""


class AddressNotFound(NotAccepted):
    """Not even an address within the time for a connection."""


class NotConnected(Exception):
    """No connection; its cause is what the system, the other side or the proxy said."""


class NotLetThrough(Exception):
    """A proxy refused."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the proxy answered {status}")


class WrongProxy(Exception):
    """There is no proxy as it is named."""

    def __init__(self) -> None:
        # Not how it is named: that may hold a password.
        super().__init__(
            "HTTP_PROXY or HTTPS_PROXY must be the address of an HTTP proxy, like http://proxy.example:3128"
        )


class HostPort:
    """Scheme, host and port of a provider's address or a proxy's.

    `credential`: the Basic one of its user and password; empty where it names none.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.is_tls = parts.scheme == "https"
        self.host = _ascii((parts.hostname or "").rstrip(".")).decode()
        self.port = parts.port or _PORTS.get(parts.scheme, 80)
        #: its host and port as requests name them
        self.netloc = _ascii(parts.netloc.rpartition("@")[2])
        self.credential = b""
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            self.credential = b"Basic " + base64.b64encode(pair.encode())

    @property
    def authority(self) -> bytes:
        """Its host and port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


class Origin:
    """The connections to one place. Construct it where an event loop runs.

    Args:
        url: an address there.
        connect_s: seconds to connect, TLS and proxy included.
        most: connections at once; whoever is one too many waits, up to `wait_s` seconds.
        tls: how its certificate is checked; True: by the authorities of the system, False: not at all.
        proxy: the address of one to go through.
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
        # Here and not with the first call: to read the authorities takes 30 ms, and all calls would wait.
        is_tls = self.place.is_tls or (self.proxy is not None and self.proxy.is_tls)
        self._context = (tls if isinstance(tls, ssl.SSLContext) else _default_context(verify=tls)) if is_tls else None
        self._slots = ConnectionLimit(most)
        self._all: set[Connection] = set()
        self._idle: list[Connection] = []
        #: until when (loop time) the addresses are not looked up again, and they: old ones are better than none
        self._believed_until = 0.0
        self._addresses: Sequence[AddrInfoType] = ()
        self._looking_up: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._pruning: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._ended = asyncio.Event()

    async def take(self, *, fresh: bool = False) -> Connection:
        """A connection for one request: one that was used before, or a new one. To be given back.

        Raises:
            NoneFree, NotAccepted, NotConnected: there is none.
        """
        if not self._slots.take():
            await self._turn()
        try:
            while self._idle and not fresh:
                connection = self._idle.pop()
                if connection.is_quiet and self._loop.time() < connection.until:
                    return connection
                connection.abort()
            return await self._opened()
        except BaseException:
            self._slots.give()
            raise

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.turn()
        except TimeoutError:
            raise NoneFree from None

    def give(self, connection: Connection) -> None:
        """Give a connection back, whatever became of its request."""
        self._slots.give()
        kept_s = min(connection.kept_s, _KEEPALIVE_S)
        if not connection.leave() or self._is_closed or kept_s <= 0:
            connection.abort()
            return
        connection.until = self._loop.time() + kept_s
        self._idle.append(connection)
        if self._pruning is None:
            self._pruning = self._loop.call_later(_KEEPALIVE_S, self._prune)

    def forget_idle(self) -> None:
        """Drop all that are kept: one of them was found dead, and they are of its age."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.abort()

    def _prune(self) -> None:
        """Drop those that nobody has used for long."""
        self._pruning = None
        now = self._loop.time()
        for connection in [one for one in self._idle if one.until <= now]:
            self._idle.remove(connection)
            connection.abort()
        if self._idle:
            self._pruning = self._loop.call_at(min(one.until for one in self._idle), self._prune)

    def _look(self) -> None:
        """End those whose other side has vanished: their calls would wait for it as long as for a model that thinks."""
        self._looking = None
        for connection in [one for one in self._all if one.is_unheard]:
            connection.abort(TimeoutError())
        self._look_again()

    def _look_again(self) -> None:
        if self._looking is None and self._all:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

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
                    connection.leave()
                    connection.abort()
                    raise
        except TimeoutError as error:
            self._believed_until = 0.0
            raise (NotAccepted if self._addresses else AddressNotFound) from error
        except (OSError, HttpFault, NotLetThrough, UnicodeError) as error:
            self._believed_until = 0.0
            raise NotConnected from error
        # Not before: one that is left in the middle of a handshake behind a proxy may never be told of its end, and
        # `aclose` would wait for it.
        if not connection.is_orphaned:
            self._all.add(connection)
            self._look_again()
        return connection

    async def _connected(self, place: HostPort) -> Connection:
        sock = await start_connection(await self._resolved(place), happy_eyeballs_delay=_NEXT_ADDRESS_S)
        self._begin_with(sock)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _ASKING.begin(sock)
            context, name = (self._context, place.host) if place.is_tls else (None, None)
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._forget), sock=sock, ssl=context, server_hostname=name
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _resolved(self, place: HostPort) -> Sequence[AddrInfoType]:
        """The addresses; those from before where a new look-up fails or takes long.

        All calls wait for one look-up, which goes on when they are left: its thread is busy in any case.
        """
        if self._loop.time() < self._believed_until:
            return self._addresses
        if self._looking_up is None or self._looking_up.done():
            self._looking_up = self._loop.create_task(self._look_up(place))
            # Where some are known, nobody asks why it failed: taken here, or asyncio would log it.
            self._looking_up.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({self._looking_up}, timeout=_MAX_WAIT_S if self._addresses else None)
        if self._looking_up.done() and not self._addresses:
            self._looking_up.result()
        return self._addresses

    async def _look_up(self, place: HostPort) -> None:
        self._addresses = await _addresses_of(place.host, place.port)
        self._believed_until = self._loop.time() + _ADDRESSES_S

    def _begin_with(self, sock: socket.socket) -> None:
        """Try the address that answered first from now on: one before it may swallow what is sent to it."""
        with contextlib.suppress(OSError):
            peer = sock.getpeername()
            self._addresses = sorted(self._addresses, key=lambda one: one[4] != peer)

    async def _through_proxy(self, connection: Connection) -> None:
        """Have the proxy open a tunnel where the place is spoken to in TLS: it sees nothing of what goes through."""
        if self.proxy is None or not self.place.is_tls or self._context is None:
            return
        target, credential = self.place.authority, self.proxy.credential
        head = b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n" % (target, target)
        if credential:
            head += b"proxy-authorization: %b\r\n" % credential
        answer: HttpResponse = await connection.ask(head + b"\r\n", has_end=False)
        if not is_success(answer.status):
            raise NotLetThrough(answer.status)
        await connection.encrypt(self._loop, self._context, self.place.host)

    async def aclose(self) -> None:
        """End all connections."""
        self._is_closed = True
        if not self._all:
            self._ended.set()
        for timer in (self._pruning, self._looking):
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
    """The addresses of a name, found in a thread of its own.

    Those of the event loop are few (uvloop has two), and names that nobody answers for would keep them from all others
    for half a minute. At the end nobody waits for it.

    Raises:
        OSError, UnicodeError: there are none.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Sequence[AddrInfoType]] = loop.create_future()

    def tell(how: Callable[[Any], None], what: object) -> None:
        def say() -> None:
            if not found.done():
                how(what)

        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(say)

    def look_up() -> None:
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for whoever waits
            tell(found.set_exception, error)
        else:
            tell(found.set_result, addresses)

    threading.Thread(target=look_up, name=f"addresses of {host}", daemon=True).start()
    return await found


def _ascii(name: str) -> bytes:
    """A host's name for requests and look-ups; one that cannot be encoded becomes one that has no address."""
    try:
        return name.encode("ascii" if name.isascii() else "idna")
    except UnicodeError:
        return name.encode("ascii", "replace")


@functools.cache
def _default_context(*, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
