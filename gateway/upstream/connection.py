"""Send a request over one HTTP/1.1 connection and read the response.

llhttp (through httptools) parses the received bytes. The parsed content is kept until the reader takes it, and the
socket is paused while a lot of content is kept. An error is raised only after everything before it was taken.

While the reader sleeps in `HttpResponse.pass_to`, nothing is kept: the content is passed on in the callback in which it
arrives.
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
from gateway.core.ports import TakePiece
from gateway.upstream.keepalive import is_unacknowledged
from gateway.upstream.read_timeout import ReadTimeout

#: bytes of the head of a response, at most
_MAX_HEAD: Final = 64 * 1024
#: If more bytes of a response than this wait to be taken, reading is paused.
_KEPT: Final = 256 * 1024
#: bytes of a request that are sent in one turn of the event loop
_PIECE: Final = 512 * 1024
_NOTHING: Final = memoryview(b"")
_INTERIM: Final = range(100, 200)
#: `struct linger` for an immediate reset: on, with a time of zero
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_SWITCHING: Final = 101
#: From this status on, the provider has refused the request.
_REFUSED: Final = 400
_TIMEOUT: Final = re.compile(rb"(?:^|[\s,])timeout\s*=\s*\"?(\d{1,9})", re.IGNORECASE)
#: Seconds less than the server keeps a connection open. A request takes time to arrive, and clocks count whole seconds.
_MARGIN_S: Final = 1.0


class HttpFault(Exception):
    """Raised if the connection returned no complete response."""


class NoResponse(HttpFault):
    """Raised if the connection ended before a response began."""


class HungUp(NoResponse):
    """Raised if a reused connection ended before a response began, perhaps before the request arrived."""


class PeerGone(NoResponse):
    """Raised if the server is gone, or if the network does not deliver to it."""


class ConnectionEnded(NoResponse):
    """Raised if the connection had ended before anything was sent."""


class RequestNotRead(HttpFault):
    """Raised if the time limit passed before the server had read the whole request."""


class NotHttp(HttpFault):
    """Raised if the received bytes are not HTTP, or the head is too long."""


class BrokenOff(HttpFault):
    """Raised if the response began and did not reach its end."""


class HttpResponse:
    """Response to one request. Its bytes are kept here until they are taken."""

    __slots__ = (
        *("_connection", "_error", "_has_body", "_has_end", "_head_bytes", "_is_interim", "_kept", "_mute_bytes"),
        *("__weakref__", "_parser", "_pieces", "_take", "_silence", "_waiter", "has_begun", "headers", "is_complete"),
        *("is_tainted", "status"),
    )

    def __init__(self, connection: Connection, *, has_body: bool, has_end: bool) -> None:
        self.status = 0
        #: names in lower case, values unchanged
        self.headers: list[tuple[bytes, bytes]] = []
        #: True when the whole head was received
        self.has_begun = False
        self.is_complete = False
        #: True if the connection cannot be reused: it received extra data, or it ends with this response
        self.is_tainted = not has_body
        self._connection = connection
        self._has_body = has_body
        self._has_end = has_end
        self._error: Exception | None = None
        self._is_interim = False
        self._head_bytes = 0
        #: Bytes received since the last bytes of the body. Heads and chunk headers without end must be stopped.
        self._mute_bytes = 0
        self._pieces: list[bytes] = []
        self._kept = 0
        #: takes the content in the callback in which it arrives, while the reader sleeps in `pass_to`
        self._take: TakePiece | None = None
        #: restarted whenever `_take` was called
        self._silence: ReadTimeout | None = None
        #: wakes the reader; its result is True if `_take` has stopped
        self._waiter: asyncio.Future[bool] | None = None
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        # Some servers send such responses, and other clients accept them.
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    # --- received data -------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Parse what the connection received."""
        if self._parser is None:
            return
        before = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._fail_parsing()
        if len(self._pieces) == before:
            self._mute_bytes += len(data)
        else:
            self._mute_bytes = 0
            if self._take is None:
                self._keep(len(data))
            else:
                self._pass_on(self._take)
                if not self.is_complete and self._error is None:
                    return
        if self._mute_bytes > _MAX_HEAD or self._head_bytes > _MAX_HEAD:
            self._fail_parsing()
        if self._error is not None or (self.is_tainted and self.is_complete):
            self._connection.abort()
        if self._take is None or self.is_complete:
            self._wake()

    def _keep(self, size: int) -> None:
        """Count bytes that wait for the reader. Their framing counts too: there may be a hundred chunks at once."""
        self._kept += size
        if self._kept > _KEPT:
            self._connection.pause()

    def _pass_on(self, take: TakePiece) -> None:
        """Pass on what has just arrived, and wake the reader if `take` has stopped."""
        pieces, self._pieces = self._pieces, []
        if self._silence is not None:
            self._silence.begin()
        try:
            if take(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
                return
        except Exception as error:  # noqa: BLE001  # a bug in the reader's own code is raised in the reader
            self._wake(error=error)
        self._take = None
        self._wake(has_stopped=True)

    def _fail_parsing(self) -> None:
        self.is_tainted = True
        self.fail(BrokenOff() if self.has_begun else NotHttp())

    def connection_ended(self, error: Exception | None) -> None:
        """Handle the end of the connection."""
        if self.has_begun and error is self._error is None and self._is_open_ended:
            self.is_complete = self.is_tainted = True
        elif not self.is_complete:
            before = PeerGone() if isinstance(error, TimeoutError) else NoResponse()
            self.fail(BrokenOff() if self.has_begun else before)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader, after it has taken everything that was received before."""
        if self._error is None and not self.is_complete:
            self._error = error
        self._wake()

    @property
    def _is_open_ended(self) -> bool:
        """Return True if the head does not define the end of the body, which then ends with the connection."""
        return not any(
            name == b"content-length" or (name == b"transfer-encoding" and b"chunked" in value.lower())
            for name, value in self.headers
        )

    # --- callbacks of the parser ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a response. A second one after a complete response was not requested."""
        self.is_tainted = self.is_tainted or self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a field of the head; ignore trailer fields after a chunked body."""
        if not self.has_begun:
            # White space before the colon is not part of the name and must be removed (RFC 9112, section 5.1).
            self.headers.append((name.rstrip(b" \t").lower(), value))

    def on_headers_complete(self) -> None:
        """End the head."""
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
        """Keep a part of the body."""
        if not self.is_complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """End the response, or an interim response (1xx) before it."""
        if self._is_interim:
            self._is_interim = False
        elif self.has_begun and self._has_end and not self.is_complete:
            self.is_complete = True
            self.is_tainted = self.is_tainted or self._parser is None or not self._parser.should_keep_alive()

    @property
    def keep_alive_s(self) -> float:
        """Return the seconds that the server keeps the connection, less a margin; infinity if it does not say."""
        timeout = _TIMEOUT.search(header(self.headers, b"keep-alive"))
        return float(timeout[1]) - _MARGIN_S if timeout is not None else math.inf

    # --- reading -------------------------------------------------------------------------------------------------

    async def wait_for_head(self) -> None:
        """Wait for the head of the response.

        Raises:
            HttpFault: there is no head.
        """
        while not self.has_begun and self._error is None:
            await self._wait()
        if not self.has_begun and self._error is not None:
            raise self._error

    @property
    def is_readable(self) -> bool:
        """Return True if `take` need not wait: there is data, or the response has ended."""
        return bool(self._pieces) or self.is_complete or self._error is not None

    async def wait_for_data(self) -> None:
        """Wait until there is data, or the response has ended."""
        while not self.is_readable:
            await self._wait()

    async def pass_to(self, take: TakePiece, silence: ReadTimeout) -> bool:
        """Call `take` with what arrives from now on, in the callback in which it arrives, until it returns False.

        Call this only after everything was taken. `silence` measures the wait for each piece.

        Returns:
            True when `take` has returned False; False when the response has ended, or something waits to be taken.
        """
        self._take, self._silence = take, silence
        silence.begin()
        try:
            return await self._wait()
        finally:
            silence.end()
            self._take = self._silence = None

    def take(self) -> bytes:
        """Return the bytes received since the last call; empty at the end.

        Raises:
            HttpFault: the response breaks off here. `fail` may set another exception.
        """
        if self._pieces:
            pieces, self._pieces, self._kept = self._pieces, [], 0
            self._connection.resume()
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._error is not None:
            raise self._error
        return b""

    def release(self) -> bool:
        """Stop reading; return True if the connection can be reused."""
        # The parser and this object refer to each other. Without this, only the garbage collector would free them.
        self._parser = None
        return self.is_complete and not self.is_tainted

    async def _wait(self) -> bool:
        """Wait until something has happened; return True if `take` has stopped. Only one task waits at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _wake(self, *, has_stopped: bool = False, error: Exception | None = None) -> None:
        """Wake the waiting task. `error`: raise this in it."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if error is not None:
            waiter.set_exception(error)
        else:
            waiter.set_result(has_stopped)


class Connection(asyncio.Protocol):
    """A connection for one request at a time. `on_lost` is called when it has ended."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self.is_lost = False
        #: loop time until which it may be reused; 0: it was not used yet
        self.until = 0.0
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._response: HttpResponse | None = None
        self._is_full = False
        self._is_paused = False
        #: asks the operating system whether data has arrived
        self._incoming = select.poll()
        #: the part of the request body that is not sent yet
        self._rest = _NOTHING
        #: True while a request was sent and its response has not begun
        self._is_unanswered = False

    @property
    def is_open(self) -> bool:
        """Return True if a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Return True if it is open and received nothing.

        This asks the operating system, which knows of an end one turn before the event loop reports it.
        """
        if not self.is_open:
            return False
        return not self._incoming.poll(0)

    @property
    def keep_alive_s(self) -> float:
        """Return the seconds that the server keeps it after the response; infinity if it does not say."""
        return self._response.keep_alive_s if self._response is not None else 0.0

    async def ask(self, head: bytes, body: bytes = b"", *, has_body: bool = True, has_end: bool = True) -> HttpResponse:
        """Send a request; return its response when the head was received.

        Args:
            head: the head, including the blank line at its end.
            body: the body of the request.
            has_body: False if the response has no body whatever its head says, as for HEAD.
            has_end: False if the data after the head is not HTTP, as for CONNECT.

        Raises:
            HttpFault: there is no response.
        """
        response = self._response = HttpResponse(self, has_body=has_body, has_end=has_end)
        if self._transport is None or not self.is_open:
            raise ConnectionEnded
        self._is_unanswered = True
        if len(body) <= _PIECE:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            self._send()
        await response.wait_for_head()
        self._is_unanswered = False
        return response

    def _send(self) -> None:
        """Send as much of a large body as fits, also while the response arrives.

        If a server refuses the request before it has all of it, it does not read the rest (RFC 9112, section 9.3).
        """
        response, transport = self._response, self._transport
        if not self._rest or self._is_full or transport is None or transport.is_closing():
            return
        if response is None or response.status >= _REFUSED:
            return
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:] or _NOTHING
        transport.write(piece)
        asyncio.get_running_loop().call_soon(self._send)

    @property
    def is_sent(self) -> bool:
        """Return True if the whole request has left this process."""
        return not self._rest and (self._transport is None or self._transport.get_write_buffer_size() == 0)

    def release(self) -> bool:
        """Stop reading the response; return True if another request may follow."""
        response, self._response = self._response, None
        rest, self._rest = self._rest, _NOTHING
        is_over = response is not None and response.release()
        self.resume()
        if self._transport is None or not self.is_open:
            return False
        # A server that responds without reading the whole request may never read the rest, or anything after it.
        return is_over and not rest and self._transport.get_write_buffer_size() == 0

    async def encrypt(self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext, name: str) -> None:
        """Start TLS after a proxy has opened a tunnel. `name`: the host that the certificate must be for.

        Raises:
            OSError: the certificate is for another host, or the server does not use TLS.
        """
        self.release()
        if self._transport is None:
            raise NoResponse
        try:
            self._transport = await loop.start_tls(self._transport, self, context, server_hostname=name)
        except TypeError as error:  # the connection to the proxy uses TLS itself
            raise OSError("TLS within TLS is not possible here") from error

    @property
    def is_unacknowledged(self) -> bool:
        """Return True if the server has not acknowledged what was sent to it for too long."""
        if self._transport is None or not self.is_open:
            return False
        return is_unacknowledged(self._transport.get_extra_info("socket"))

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader of the response."""
        if self._response is not None:
            self._response.fail(error)

    def abort(self, error: Exception | None = None) -> None:
        """End the connection now and discard unsent data. `error`: the cause, if the gateway did not decide it."""
        if self._response is not None:
            # Otherwise a response that ends with its connection would be treated as complete.
            self._response.connection_ended(error or ConnectionAbortedError())
        if self._transport is not None:
            if self._is_unanswered and self.is_open:
                self._reset(self._transport)
            self._transport.abort()

    @staticmethod
    def _reset(transport: asyncio.Transport) -> None:
        """Make the operating system reset the connection and send nothing more.

        Otherwise it would try for minutes to deliver a request without a reader. The provider would execute and bill
        it.
        """
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)

    def pause(self) -> None:
        """Stop reading for now, so that the sender has to wait."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # --- callbacks of asyncio ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._incoming.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Pass received data to the response."""
        if self._response is not None:
            self._response.feed(data)
        else:
            self.abort()  # unrequested data

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        transport, self._transport = self._transport, None
        self.is_lost = True
        if self._response is not None:
            if transport is not None:
                for data in _left_in_tls(transport):
                    self._response.feed(data)
            self._response.connection_ended(exc)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """Pause sending."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Continue sending."""
        self._is_full = False
        self._send()


def _left_in_tls(transport: asyncio.Transport) -> Iterator[bytes]:
    """Yield data that arrived before the end but was not read: asyncio does not deliver it while TLS is paused."""
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    with contextlib.suppress(ssl.SSLError):
        while tls is not None and (data := tls.read(_KEPT)):
            yield data
