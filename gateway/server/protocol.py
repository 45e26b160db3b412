"""Serve HTTP/1.1 with limits on the size, the number and the time of headers, based on uvicorn's own class.

httptools takes headers of any size and nothing ends a half-sent head (measured on uvicorn 0.54). The answers to what is
refused here have OpenAI's error shape like all others.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any, Final, cast
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.core.http.headers import Headers
from gateway.server.body import MemoryPool
from gateway.server.cycle import Cycle
from gateway.server.headers import GATEWAY_REQUEST_ID, SHOULD_RETRY

MAX_HEADERS: Final = 256
#: under which name of its state (ASGI's "lifespan state") the application leaves what is called when the server stops
STOPPING: Final = "stopping"
#: the message, beside those of ASGI, by which a WebSocket's application hears that the server stops
SOCKET_STOPS: Final = "websocket.server_stops"
#: An upgrade that nobody here speaks (h2c from Java's client) would end the reading of the body.
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
#: a handshake for a WebSocket of Responses, as far as the head shows; all others are answered as plain requests
_HANDSHAKE: Final = re.compile(
    rb"GET [^ ?]*/responses(?:\?[^ ]*)? HTTP/1\.1(?=\r\n)(?=.*\r\nupgrade:[ \t]*websocket(?:\r|\Z))",
    re.IGNORECASE | re.DOTALL,
)
_END_OF_HEAD: Final = b"\r\n\r\n"
_METHOD: Final = re.compile(rb"\s*[A-Z]{1,20}(?: |\Z)")
_REASONS: Final = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class ServerConfig(Config):
    """uvicorn's configuration, our bounds beside it. Leaves the process's logging alone."""

    max_head_bytes = 64 * 1024
    head_timeout_s = 20.0
    #: how long a client may take nothing of what is left for it on a connection that is to be closed
    linger_s = 10.0
    #: what messages of WebSockets may take together while they arrive
    arriving = MemoryPool(16 * 64 * 1024 * 1024)

    def configure_logging(self) -> None:
        """Do nothing."""


def bounds_of(config: Config) -> ServerConfig | type[ServerConfig]:
    """What holds a configuration's bounds: another than ours has the defaults."""
    return config if isinstance(config, ServerConfig) else ServerConfig


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. A head is kept until it is whole, and only then parsed."""

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
        self._head_timeout_s = bounds.head_timeout_s
        self._linger_s = bounds.linger_s
        #: what comes next is the beginning of a head; decided between two pieces of data
        self._idle = True
        #: the last head that was looked at is a handshake
        self._is_handshake = False
        #: the parser is between two messages
        self._between = True
        #: the parser is within a head
        self._in_head = False
        self._head = b""
        #: bytes of a head that came behind another message and went to the parser in parts
        self._pipelined = 0
        #: the last data held a part of a body; bytes since then that held none, but its framing
        self._fed = False
        self._framing = 0
        #: the request that is being answered, or was last
        self._served: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a head is awaited."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:
            # uvicorn tells the request that came last, which may still wait for its turn.
            self._served.disconnected = True
            self._served.message_event.set()

    def pause_writing(self) -> None:
        """The client takes nothing just now."""
        super().pause_writing()
        if self._rest_timer is None:
            self._rest_timer = self.loop.call_later(self._linger_s, self._look_at_rest, None)

    def _look_at_rest(self, before: int | None) -> None:
        """Break a connection that is to be closed and of which nothing has gone out since the last look.

        A transport closes once all is sent, which never comes where nobody reads. `before`: bytes that were left to
        send at the last look; None where the connection was not to be closed then.
        """
        rest = self.transport.get_write_buffer_size()
        self._rest_timer = None
        if self.transport.is_closing() and before is not None and rest >= before:
            self.transport.abort()
        elif rest:
            seen = rest if self.transport.is_closing() else None
            self._rest_timer = self.loop.call_later(self._linger_s, self._look_at_rest, seen)

    def data_received(self, data: bytes) -> None:
        """Feed the parser whole heads, and bodies as they come."""
        if self._idle:
            data = self._collect_head(data)
        if not data:
            return
        self._fed = False
        super().data_received(data)
        self._idle = self._between
        if self._idle or self.transport.is_closing():
            return
        if self._in_head:
            self._bound_pipelined(len(data))
        else:
            self._bound_framing(len(data))

    def _bound_pipelined(self, size: int) -> None:
        """A head that came behind another message is in the parser in part: count it from its second piece on."""
        self._pipelined = self._pipelined + size if self._pipelined else 1
        if self._pipelined > self._max_head_bytes:
            self._refuse_size()
        elif self._head_timer is None:
            self._await_head()

    def _bound_framing(self, size: int) -> None:
        """Bound what comes of a chunked body beside its data: the parser keeps a trailer until it is whole."""
        self._framing = 0 if self._fed else self._framing + size
        if self._framing > self._max_head_bytes:
            limit = f"{self._max_head_bytes // 1024} KiB (server.max_header_kb)"
            self._refuse(431, "headers_too_large", f"The trailers or extensions of a chunked body are over {limit}.")

    def _collect_head(self, data: bytes) -> bytes:
        """What may go to the parser now; nothing while the head is incomplete."""
        self._unset_keepalive_if_required()
        head = self._head + data if self._head else data
        end = head.find(_END_OF_HEAD)
        if end < 0 and len(head) <= self._max_head_bytes and _METHOD.match(head):
            self._head = head
            if self._head_timer is None:
                self._await_head()
            return b""
        self._head = b""
        if (len(head) if end < 0 else end) > self._max_head_bytes or head.count(b"\n", 0, end) > MAX_HEADERS:
            self._refuse_size()
            return b""
        if b"pgrade" in head[:end]:
            self._is_handshake = _HANDSHAKE.match(head, 0, end) is not None
            if not self._is_handshake:
                head = _UPGRADE.sub(b"", head[:end]) + head[end:]
        return head

    def on_message_begin(self) -> None:
        """A request begins."""
        self._between = False
        self._in_head = True
        self._pipelined = 0
        self._framing = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. What comes behind the body says nothing: who calls, and what for, is decided by then."""
        if self._in_head:
            self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._fed = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head is whole: the request is served, or waits until the one before it is answered."""
        self._in_head = False
        self._pipelined = 0
        self._stop_timer()
        parser, scope = self.parser, self.scope
        scope["method"] = parser.get_method().decode("ascii")
        scope["http_version"] = version = parser.get_http_version()
        if parser.should_upgrade() and self._should_upgrade():
            return
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = url.path, url.query or b""
        before, is_old = self.cycle, version != "1.1"
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],
            message_event=asyncio.Event(),
            expect_100_continue=not is_old and is_continue_expected(self.headers),
            keep_alive=not is_old and parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.without_chunks = is_old
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """The body is whole."""
        self._between = True
        super().on_message_complete()

    def _should_upgrade_to_ws(self) -> bool:
        """Whether a handshake is one. Behind a request that is not answered yet, the answer would get lost."""
        return self._is_handshake and (self.cycle is None or self.cycle.response_complete)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the protocol of WebSockets, which takes memory only where one is opened."""
        from gateway.server.socket_protocol import SocketProtocol  # noqa: PLC0415

        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self.ws_protocol_class = SocketProtocol
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed and close. `msg` is uvicorn's text; ours says more."""
        del msg
        self._refuse(400, "invalid_request", "This is not a valid HTTP/1.1 request.")

    def _refuse_size(self) -> None:
        limit = f"{self._max_head_bytes // 1024} KiB or {MAX_HEADERS} headers"
        self._refuse(431, "headers_too_large", f"The request's headers are over {limit} (server.max_header_kb).")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._head and not self._pipelined:
            # Nothing was asked, so there is nothing to answer.
            self.transport.close()
        else:
            # Not 408: SDKs would send the call again.
            seconds = f"{self._head_timeout_s:g} s (server.header_timeout_s)"
            self._refuse(400, "header_timeout", f"The request's head was not complete within {seconds}.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
            # The answer to the request before is due or on its way: this one would be taken for it, or for a part.
            self.transport.close()
            return
        headers, body = refused(code, message)
        fields = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\n%bconnection: close\r\n\r\n%b" % (status, _REASONS[status], fields, body)
        )
        self.transport.close()


def is_continue_expected(headers: Headers) -> bool:
    """Whether the client waits for a word before it sends the body (RFC 9110, section 10.1.1)."""
    return b"expect" in dict(headers) and b"100-continue" in [
        value.lower() for name, value in headers if name == b"expect"
    ]


def refused(code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """What answers a request that the application is not to see: headers and body."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (GATEWAY_REQUEST_ID, uuid.uuid4().hex.encode()),
        (SHOULD_RETRY, b"false"),
    ]
    return headers, body
