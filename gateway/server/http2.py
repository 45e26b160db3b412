"""Serve HTTP/2 to clients, with limits.

Imported where `server.http2` is on.

zttp, which reads and writes the frames, bounds heads (64 KiB), open streams (128) and what of a body may come unasked
(64 KiB), and breaks a connection off that sends one head in too many frames. Over its 256th reset and its 4,096th
stream it does so as well, however long they took (measured on zttp 0.0.35): a connection ends before that. uvicorn lets
an answer pile up that its client does not take, keeps a connection open for whoever sends anything, waits for the body
of a request that has none, and leaves trailers out where they were not asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import unquote

import zttp
from uvicorn.config import Config
from uvicorn.protocols.http.zttp_h2_impl import FORBIDDEN_HEADERS, RequestResponseCycle, ZttpH2Protocol
from uvicorn.server import ServerState

from gateway.core.http.headers import BODILESS
from gateway.server.endpoints import TRAILERS
from gateway.server.protocol import (
    MAX_HEADERS,
    GatewayProtocol,
    bounds_of,
    is_continue_expected,
    refused,
)

#: what a client sends first that speaks HTTP/2 without having asked (RFC 9113, section 3.4), as far as it looks like a
#: head of HTTP/1.1
_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\n"
#: Requests, and resets of streams, after which a connection is closed once nothing is under way; and after how many
#: times as many it takes no more. Not at once: clients of Python (h2, so httpx) then give up what is under way.
_MANY_REQUESTS: Final = 1000
_MANY_RESETS: Final = 64
_TOO_MANY: Final = 3
#: Bytes that may wait in a connection for a client that reads nothing. Parts of answers stop far below; more is answers
#: to pings and settings.
_MOST_UNREAD: Final = 256 * 1024
#: bytes of an answer that go out before others have their turn: a frame that every client takes
_SLICE: Final = 16 * 1024
#: how long one connection is read before others have their turn, in seconds; and how much between looks at the clock
_TURN_S: Final = 0.005
_LOOK: Final = 4096

Headers = Sequence[tuple[bytes, bytes]]


class EitherProtocol(GatewayProtocol):
    """A connection of HTTP/1.1, unless its first bytes say that it is one of HTTP/2."""

    def _collect_head(self, data: bytes) -> bytes:
        head = super()._collect_head(data)
        if self._served is None and head.startswith(_PREFACE):
            self._hand_over(head)
            return b""
        return head

    def _hand_over(self, data: bytes) -> None:
        self._stop_timer()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self.connections.discard(self)
        protocol = Http2Protocol(self.config, self.server_state, self.app_state, self.loop)
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)
        protocol.data_received(data)


class Http2Protocol(ZttpH2Protocol):
    """One connection, from its preface on."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        bounds = bounds_of(config)
        self._max_head_bytes = bounds.max_head_bytes
        self._linger_s = bounds.linger_s
        self._requests = 0
        self._resets = 0
        #: the client was told to send no more requests here
        self._takes_no_more = False
        #: what has come and was not read yet
        self._unread = bytearray()
        self._next_turn: asyncio.Handle | None = None
        self._end_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a request is awaited."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.on_stream_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for timer in (self._end_timer, self._next_turn):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Take frames. Only a request keeps a connection open that rests: pings and settings do not."""
        self._unread += data
        if self._next_turn is None:
            self._read()

    def _read(self) -> None:
        """Read for a turn: what comes at once may be many thousand frames, and all others would wait for them."""
        self._next_turn = None
        unread, at = self._unread, 0
        end = self.loop.time() + _TURN_S
        try:
            while at < len(unread) and not self.transport.is_closing() and self.loop.time() < end:
                self.conn.receive_data(bytes(unread[at : at + _LOOK]))
                self.handle_events()
                at += _LOOK
        except zttp.RemoteProtocolError:
            # The last frame that is left to send says why.
            self.flush()
            self._hang_up()
            return
        del unread[:at]
        self.flush()
        self._wake()
        if self.transport.is_closing():
            return
        if unread:
            self.flow.pause_reading()
            self._next_turn = self.loop.call_soon(self._read)
        else:
            self.resume_reading_if_idle()

    def resume_reading_if_idle(self) -> None:
        """Take more, once what has come was read and no body waits for the application."""
        if not self._unread:
            super().resume_reading_if_idle()

    def _wake(self) -> None:
        """Have answers look whether they can go on."""
        for cycle in self.cycles.values():
            cast("Http2Cycle", cycle).credit.set()

    def flush(self) -> None:
        """Send what zttp has ready."""
        data = self.conn.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)
            if self.transport.get_write_buffer_size() > _MOST_UNREAD:
                self.transport.abort()

    def handle_request(self, event: Any) -> None:
        """Begin to serve a request whose head is whole."""
        stream = self.conn.stream(event.stream_id)
        if self._takes_no_more:
            # Says that nothing was done: the client may send it again elsewhere.
            stream.reset(zttp.H2ErrorCode.REFUSED_STREAM)
            return
        self._unset_keepalive_if_required()
        # In what is no path of ASCII nothing is found; it is refused below.
        path = unquote(event.path.decode("ascii", "replace"))
        scope: Any = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": "2",
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": event.method.decode("ascii"),
            "root_path": self.root_path,
            "path": path,
            "raw_path": event.path,
            "query_string": event.query,
            "headers": list(event.headers),
            "state": self.app_state.copy(),
            "extensions": {TRAILERS: {}},
        }
        cycle = Http2Cycle(
            scope=scope,
            conn=self.conn,
            stream=stream,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            on_response=self.on_response_complete,
            resume_reading=self.resume_reading_if_idle,
        )
        if event.end_stream:
            # Nothing more is said of a request without a body.
            cycle.more_body = False
            cycle.message_event.set()
        cycle.waits_to_continue = is_continue_expected(scope["headers"])
        cycle.patience_s = self.timeout_keep_alive
        self.cycles[event.stream_id] = cycle
        task = self.loop.create_task(cycle.run_asgi(self._refusal(scope, event.target) or self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._requests += 1
        self._retire_in_time()

    def _refusal(self, scope: Any, target: bytes) -> Any:
        """What answers a request that the application is not to see; None: it is to."""
        size = len(target) + sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_head_bytes or len(scope["headers"]) > MAX_HEADERS:
            limit = f"{self._max_head_bytes // 1024} KiB or {MAX_HEADERS} headers"
            return _refusing(
                431, "headers_too_large", f"The request's headers are over {limit} (server.max_header_kb)."
            )
        if scope["method"] == "CONNECT" or not (target.startswith(b"/") and target.isascii()):
            return _refusing(
                400, "invalid_request", "A request has a path in ASCII that begins with /, and is no CONNECT."
            )
        return None

    def handle_rst_stream(self, event: Any) -> None:
        """A stream was given up: its client has left. Or its frames were wrong, and zttp has reset it."""
        self._resets += 1
        self._retire_in_time()
        cycle = self.cycles.get(event.stream_id)
        super().handle_rst_stream(event)
        if cycle is not None:
            cast("Http2Cycle", cycle).credit.set()

    def shutdown(self) -> None:
        """The server begins to stop and waits for the answers under way."""
        self._take_no_more()

    def _retire_in_time(self) -> None:
        """Have a connection that was much used end before zttp breaks it off."""
        used = max(self._requests / _MANY_REQUESTS, self._resets / _MANY_RESETS)
        if used >= _TOO_MANY and not self._takes_no_more:
            self._take_no_more()
        elif used >= 1:
            self.shutdown_requested = True

    def _take_no_more(self) -> None:
        """Say that no more requests are taken here, and close once those under way are answered."""
        self.shutdown_requested = self._takes_no_more = True
        if self.cycles:
            self.conn.close()
            self.flush()
        else:
            self._close_connection()

    def _close_connection(self) -> None:
        if not self.transport.is_closing():
            self.conn.close()
            self.flush()
            self._hang_up()

    def _hang_up(self) -> None:
        """Close; what is left to send has some seconds to go out. Whoever waits for an answer has left."""
        for cycle in self.cycles.values():
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._wake()
        self.transport.close()
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(self._linger_s, self.transport.abort)


class Http2Cycle(RequestResponseCycle):
    """One request and its answer. No more of it is handed on than the client takes: zttp would keep the rest."""

    #: the client sends its body once it hears that it may
    waits_to_continue = False
    #: how long a client may take nothing of the last part of an answer; of others the application sees to that
    patience_s = 75.0
    #: bytes of the body that are still to come; None: as many as there are
    _due: int | None = None

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        #: the client may have let more of it come
        self.credit = asyncio.Event()

    async def receive(self) -> Any:
        """See ASGI."""
        if self.waits_to_continue and self.more_body and not self.response_started and not self.disconnected:
            self.waits_to_continue = False
            self.stream.send_informational(100)
            self._flush()
        return await super().receive()

    async def send(self, message: Any) -> None:
        """See ASGI. Waits while the client takes nothing.

        Raises:
            RuntimeError: the answer would not be what its head says.
        """
        if self.disconnected:
            return
        kind = message["type"]
        is_last = not message.get("more_body", False)
        if kind == "http.response.start" and not self.response_started:
            self.response_started = True
            self.trailers_expected = message.get("trailers", False)
            self._send_head(message["status"], message.get("headers", []))
        elif kind == "http.response.body" and self.response_started and not self.body_complete:
            await self._send_body(message.get("body", b""), self.patience_s if is_last else None)
            self.body_complete = is_last
            if is_last and not self.trailers_expected:
                self._end([])
        elif kind == TRAILERS and self.body_complete and not self.response_complete:
            self._end(message["headers"])
        else:
            raise RuntimeError(f"{kind} is not what comes next in an answer")

    def _send_head(self, status: int, headers: Headers) -> None:
        self.bodyless = self.scope["method"] == "HEAD" or status in BODILESS
        length = dict(headers).get(b"content-length")
        self._due = int(length) if length is not None and not self.bodyless else None
        self.stream.send_response(status, _sendable(headers))
        self._flush()

    async def _send_body(self, body: bytes, patience_s: float | None) -> None:
        if self._due is not None:
            self._due -= len(body)
            if self._due < 0:
                raise RuntimeError("the body of the answer is longer than its head says")
        rest = memoryview(b"" if self.bodyless else body)
        while rest and not self.disconnected:
            room = 0 if self.flow.write_paused else min(self.stream.send_window or 0, self.conn.send_window, _SLICE)
            if room > 0:
                self.stream.send_data(rest[:room])
                self._flush()
                rest = rest[room:]
            else:
                await self._more_room(patience_s)

    async def _more_room(self, patience_s: float | None) -> None:
        """Wait until the client may have taken something; give the stream up if it does not."""
        self.credit.clear()
        try:
            async with asyncio.timeout(patience_s):
                await (self.flow.drain() if self.flow.write_paused else self.credit.wait())
        except TimeoutError:
            self.abort_stream()
            self.message_event.set()

    def _end(self, trailers: Headers) -> None:
        if self.disconnected:
            return
        if self._due:
            raise RuntimeError("the body of the answer is shorter than its head says")
        self.stream.end_message(_sendable(trailers) or None)
        self._flush()
        self.response_complete = True
        self.message_event.set()
        self.on_response(self.stream.stream_id)
        self.on_response = lambda _: None

    def _flush(self) -> None:
        self.transport.write(self.conn.data_to_send())


def _sendable(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Without those that speak of a connection of HTTP/1.1 (RFC 9113, section 8.2.2)."""
    return [pair for pair in headers if pair[0] not in FORBIDDEN_HEADERS]


def _refusing(status: int, code: str, message: str) -> Any:
    """An application that refuses whatever comes."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers, body = refused(code, message)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
