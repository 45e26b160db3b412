"""Send a request over one HTTP/1.1 connection and read the response.

llhttp reads what comes, by way of httptools. What it reads is kept until somebody takes it, and the socket is left
alone while much is kept. A break is told of behind all that came before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import select
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.core.http.headers import header
from gateway.upstream.keepalive import is_unheard

#: bytes of an answer's head, at the most
_MAX_HEAD: Final = 64 * 1024
#: bytes of an answer that wait to be taken, from which on no more are read
_KEPT: Final = 256 * 1024
#: bytes of a request that are sent in one turn of the event loop
_PIECE: Final = 512 * 1024
_NOTHING: Final = memoryview(b"")
_INTERIM: Final = range(100, 200)
#: `struct linger`: on, and no time
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_SWITCHING: Final = 101
#: the statuses from which on a request was turned away
_TURNED_AWAY: Final = 400
_TIMEOUT: Final = re.compile(rb"(?:^|[\s,])timeout\s*=\s*\"?(\d{1,9})", re.IGNORECASE)
#: seconds less than the other side keeps a connection: a request takes time to arrive, and clocks tick in seconds
_MARGIN_S: Final = 1.0


class HttpFault(Exception):
    """What came is no whole answer."""


class NoAnswer(HttpFault):
    """The connection ended before an answer began."""


class HungUp(NoAnswer):
    """A connection that had been kept ended before an answer began: perhaps before the request was there."""


class PeerGone(NoAnswer):
    """The other side is not there any more, or nothing gets through to it."""


class ConnectionEnded(NoAnswer):
    """The connection had ended before anything was sent."""


class NotTaken(HttpFault):
    """The time was up before all of the request had been taken."""


class NotHttp(HttpFault):
    """What came is not HTTP, or a head without end."""


class BrokenOff(HttpFault):
    """The answer began, and does not come to its end."""


class HttpResponse:
    """What comes back for one request. Its bytes wait here until they are taken."""

    __slots__ = (
        *("_connection", "_error", "_has_body", "_has_end", "_head_bytes", "_is_interim", "_kept", "_mute_bytes"),
        *("__weakref__", "_parser", "_pieces", "_waiter", "has_begun", "headers", "is_complete", "is_tainted"),
        "status",
    )

    def __init__(self, connection: Connection, *, has_body: bool, has_end: bool) -> None:
        self.status = 0
        #: names in lower case, values as they came
        self.headers: list[tuple[bytes, bytes]] = []
        #: whether its head is there
        self.has_begun = False
        self.is_complete = False
        #: no other request may follow: something came that belongs to no answer, or the connection ends with this one
        self.is_tainted = not has_body
        self._connection = connection
        self._has_body = has_body
        self._has_end = has_end
        self._error: Exception | None = None
        self._is_interim = False
        self._head_bytes = 0
        #: bytes received since the last ones of its body: heads and marks of chunks must end some time
        self._mute_bytes = 0
        self._pieces: list[bytes] = []
        self._kept = 0
        self._waiter: asyncio.Future[None] | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        # Some servers write such answers, and other clients read them.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    # --- what came -----------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Take what the connection received."""
        if self._parser is None:
            return
        before = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._is_nonsense()
        # Counted here and not piece by piece: a burst has a hundred of them, and framing takes memory as well.
        if len(self._pieces) > before:
            self._mute_bytes = 0
            self._kept += len(data)
            if self._kept > _KEPT:
                self._connection.pause()
        else:
            self._mute_bytes += len(data)
        if self._mute_bytes > _MAX_HEAD or self._head_bytes > _MAX_HEAD:
            self._is_nonsense()
        if self._error is not None or (self.is_tainted and self.is_complete):
            self._connection.abort()
        self._wake()

    def _is_nonsense(self) -> None:
        self.is_tainted = True
        self.fail(BrokenOff() if self.has_begun else NotHttp())

    def orphaned(self, error: Exception | None) -> None:
        """The connection has ended."""
        if self.has_begun and error is self._error is None and self._is_open_ended:
            self.is_complete = self.is_tainted = True
        elif not self.is_complete:
            before = PeerGone() if isinstance(error, TimeoutError) else NoAnswer()
            self.fail(BrokenOff() if self.has_begun else before)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let whoever waits for it fail, once all that came before has been taken."""
        if self._error is None and not self.is_complete:
            self._error = error
        self._wake()

    @property
    def _is_open_ended(self) -> bool:
        """Whether it says no end of its own, so that it ends with its connection."""
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in self.headers
        )

    # --- the parser's words --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; another one behind a whole one was not asked for."""
        self.is_tainted = self.is_tainted or self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head; or one behind a body in chunks, which nobody needs."""
        if not self.has_begun:
            # Blanks before the colon are no part of a name, and not to be passed on (RFC 9112, section 5.1).
            self.headers.append((name.rstrip(b" \t").lower(), value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        status = self._parser.get_status_code() if self._parser is not None else 0
        if self.has_begun or status == _SWITCHING:
            return
        self._head_bytes += sum(map(len, chain.from_iterable(self.headers)))
        if self._head_bytes > _MAX_HEAD:
            return
        self._is_interim = status in _INTERIM
        if self._is_interim:
            self.headers.clear()
            return
        self.status, self.has_begun, self.is_complete = status, True, not self._has_body

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        if not self.is_complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """The answer has ended; or only an interim one (1xx) that came before it."""
        if self._is_interim:
            self._is_interim = False
        elif self.has_begun and self._has_end and not self.is_complete:
            self.is_complete = True
            self.is_tainted = self.is_tainted or self._parser is None or not self._parser.should_keep_alive()

    @property
    def kept_s(self) -> float:
        """See `Connection.kept_s`."""
        said = _TIMEOUT.search(header(self.headers, b"keep-alive"))
        return float(said[1]) - _MARGIN_S if said is not None else math.inf

    # --- whoever waits for it ------------------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait for its head.

        Raises:
            HttpFault: it does not come.
        """
        while not self.has_begun and self._error is None:
            await self._wait()
        if not self.has_begun and self._error is not None:
            raise self._error

    @property
    def has_news(self) -> bool:
        """Whether there is something to take, or it has ended."""
        return bool(self._pieces) or self.is_complete or self._error is not None

    async def news(self) -> None:
        """Wait until there is something to take, or it has ended."""
        while not self.has_news:
            await self._wait()

    def take(self) -> bytes:
        """The bytes that have come since the last call; empty at the end.

        Raises:
            HttpFault: it breaks off here, or whatever `fail` was told.
        """
        if self._pieces:
            pieces, self._pieces, self._kept = self._pieces, [], 0
            self._connection.resume()
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._error is not None:
            raise self._error
        return b""

    def leave(self) -> bool:
        """Take no more of it; whether all of it has come, and nothing else."""
        # It holds the parser, which holds it: without this both would wait for the garbage collector.
        self._parser = None
        return self.is_complete and not self.is_tainted

    async def _wait(self) -> None:
        """Until something has happened to it. There is one at a time who waits."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        """Something has happened."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Connection(asyncio.Protocol):
    """A connection over which one request at a time is sent. `on_lost` is told once it has ended."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self.is_orphaned = False
        #: loop time until which it may be used again; 0: it has not been used yet
        self.until = 0.0
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: HttpResponse | None = None
        self._is_full = False
        self._is_paused = False
        #: asks the system whether something has come
        self._incoming = select.poll()
        #: what of the request's body is not sent yet
        self._rest = _NOTHING
        #: a request went out whose answer has not begun
        self._is_unanswered = False

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_quiet(self) -> bool:
        """Whether it is open and nothing has come. Asks the system, which knows of an end a turn before we are told."""
        if not self.is_open:
            return False
        return not self._incoming.poll(0)

    @property
    def kept_s(self) -> float:
        """Seconds that the other side keeps it after the answer, less a margin; infinity where it does not say."""
        return self._answer.kept_s if self._answer is not None else 0.0

    async def ask(self, head: bytes, body: bytes = b"", *, has_body: bool = True, has_end: bool = True) -> HttpResponse:
        """Send a request; its answer once the head of it is there.

        Args:
            head: with the blank line that ends it.
            body: of the request.
            has_body: whether the answer may have one: to HEAD it never has, whatever it says.
            has_end: False: what follows the head is no more of HTTP, whatever it says: so it is with CONNECT.

        Raises:
            HttpFault: there is none.
        """
        answer = self._answer = HttpResponse(self, has_body=has_body, has_end=has_end)
        if self._transport is None or not self.is_open:
            raise ConnectionEnded
        self._is_unanswered = True
        if len(body) <= _PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            self._send()
        await answer.begun()
        self._is_unanswered = False
        return answer

    def _send(self) -> None:
        """Send of a large body what there is room for, also while it is answered.

        A server that turns the request away before all of it is there reads no more of it (RFC 9112, section 9.3).
        """
        answer, transport = self._answer, self._transport
        if not self._rest or self._is_full or transport is None or transport.is_closing():
            return
        if answer is None or answer.status >= _TURNED_AWAY:
            return
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:] or _NOTHING
        transport.write(piece)
        asyncio.get_running_loop().call_soon(self._send)

    @property
    def is_sent(self) -> bool:
        """Whether all of the request has left this process."""
        return not self._rest and (self._transport is None or self._transport.get_write_buffer_size() == 0)

    def leave(self) -> bool:
        """Take no more of the answer; whether another request may follow."""
        answer, self._answer = self._answer, None
        rest, self._rest = self._rest, _NOTHING
        is_over = answer is not None and answer.leave()
        self.resume()
        if self._transport is None or not self.is_open:
            return False
        # Who answers without reading all of a request may never read the rest of it, nor what would come behind.
        return is_over and not rest and self._transport.get_write_buffer_size() == 0

    async def encrypt(self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext, name: str) -> None:
        """Go on under TLS, behind a proxy that has let us through. `name`: that the certificate must be for.

        Raises:
            OSError: it is not, or there is no TLS on the other side.
        """
        self.leave()
        if self._transport is None:
            raise NoAnswer
        try:
            self._transport = await loop.start_tls(self._transport, self, context, server_hostname=name)
        except TypeError as error:  # where the proxy is spoken to in TLS itself
            raise OSError("TLS within TLS is not possible here") from error

    @property
    def is_unheard(self) -> bool:
        """Whether the other side has been silent to what it was sent for too long."""
        if self._transport is None or not self.is_open:
            return False
        return is_unheard(self._transport.get_extra_info("socket"))

    def fail(self, error: Exception) -> None:
        """Let whoever waits for the answer fail."""
        if self._answer is not None:
            self._answer.fail(error)

    def abort(self, error: Exception | None = None) -> None:
        """End it now; what was not sent yet is not sent any more. `error`: why, where it is not our own wish."""
        if self._answer is not None:
            # Otherwise an answer that ends with its connection would be taken for a whole one.
            self._answer.orphaned(error or ConnectionAbortedError())
        if self._transport is not None:
            if self._is_unanswered and self.is_open:
                self._take_back(self._transport)
            self._transport.abort()

    @staticmethod
    def _take_back(transport: asyncio.Transport) -> None:
        """Have the system reset the connection and send nothing more.

        Else it would go on for minutes to deliver what nobody waits for, and the provider would do it and bill it.
        """
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)

    def pause(self) -> None:
        """Read no more for now: whoever sends waits."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # --- asyncio's words -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._incoming.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._answer is not None:
            self._answer.feed(data)
        else:
            self.abort()  # nobody asked for it

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.BaseProtocol`."""
        transport, self._transport = self._transport, None
        self.is_orphaned = True
        if self._answer is not None:
            if transport is not None:
                for data in _left_in_tls(transport):
                    self._answer.feed(data)
            self._answer.orphaned(exc)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = True

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._is_full = False
        self._send()


def _left_in_tls(transport: asyncio.Transport) -> Iterator[bytes]:
    """What had come and was not read yet when the connection ended: what is paused under TLS is never told of it."""
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    with contextlib.suppress(ssl.SSLError):
        while tls is not None and (data := tls.read(_KEPT)):
            yield data
