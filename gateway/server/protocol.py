"""Serve HTTP/1.1 with limits on the size, the number and the time of headers, based on uvicorn's own class.

httptools accepts headers of any size, and nothing ends an incomplete head (measured with uvicorn 0.54). Requests that
are refused here get errors in OpenAI's format, like all others.
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
#: key in ASGI's lifespan state of the function that the server calls when it starts to stop
STOPPING: Final = "stopping"
#: message, in addition to those of ASGI, that notifies a WebSocket's application that the server stops
SOCKET_STOPS: Final = "websocket.server_stops"
#: removed from other requests: with an unsupported upgrade (h2c from Java's client), the parser would not read the body
_UPGRADE_HEADER: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
#: head of a handshake for a WebSocket of Responses; all other requests are served as plain HTTP
_HANDSHAKE: Final = re.compile(
    rb"GET [^ ?]*/responses(?:\?[^ ]*)? HTTP/1\.1(?=\r\n)(?=.*\r\nupgrade:[ \t]*websocket(?:\r|\Z))",
    re.IGNORECASE | re.DOTALL,
)
_END_OF_HEAD: Final = b"\r\n\r\n"
_METHOD: Final = re.compile(rb"\s*[A-Z]{1,20}(?: |\Z)")
_REASONS: Final = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class ServerConfig(Config):
    """uvicorn's configuration with the gateway's limits. It does not configure logging."""

    max_head_bytes = 64 * 1024
    head_timeout_s = 20.0
    #: seconds for which a client may read nothing of the remaining bytes of a closing connection
    linger_s = 10.0
    #: memory of all incoming WebSocket messages together
    arriving = MemoryPool(16 * 64 * 1024 * 1024)

    def configure_logging(self) -> None:
        """Do nothing: the application configures logging."""


def bounds_of(config: Config) -> ServerConfig | type[ServerConfig]:
    """Return the limits of a configuration, or the defaults if it is not a `ServerConfig`."""
    return config if isinstance(config, ServerConfig) else ServerConfig


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. A head is kept until it is complete, and only then parsed."""

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
        #: the next data starts a head; decided between two calls of `data_received`
        self._expects_head = True
        #: the last head is a WebSocket handshake
        self._is_handshake = False
        #: the parser is between two messages
        self._is_between_messages = True
        #: the parser is within a head
        self._is_in_head = False
        self._head = b""
        #: bytes of a head that followed another message and went to the parser in parts
        self._pipelined_bytes = 0
        #: the last data contained a part of a body
        self._has_body_data = False
        #: bytes of the framing of a chunked body since the last part of the body
        self._framing_bytes = 0
        #: the request that is being served, or was served last
        self._current: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection, and the timer of its first head."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and notify the request that is being served."""
        self._stop_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)
        if self._current is not None and not self._current.response_complete:
            # uvicorn notifies only the last received request, which may still wait for its turn.
            self._current.disconnected = True
            self._current.message_event.set()

    def pause_writing(self) -> None:
        """Start to check for unsent bytes, because the client reads nothing at the moment."""
        super().pause_writing()
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(self._linger_s, self._check_unsent, None)

    def _check_unsent(self, before: int | None) -> None:
        """Abort a closing connection of which nothing was sent since the last check.

        A transport closes when all bytes are sent, which never happens if the client reads nothing. `before`: unsent
        bytes at the last check; None if the connection was not closing then.
        """
        unsent = self.transport.get_write_buffer_size()
        self._linger_timer = None
        if self.transport.is_closing() and before is not None and unsent >= before:
            self.transport.abort()
        elif unsent:
            seen = unsent if self.transport.is_closing() else None
            self._linger_timer = self.loop.call_later(self._linger_s, self._check_unsent, seen)

    def data_received(self, data: bytes) -> None:
        """Pass complete heads, and any parts of bodies, to the parser."""
        if self._expects_head:
            data = self._collect_head(data)
        if not data:
            return
        self._has_body_data = False
        super().data_received(data)
        self._expects_head = self._is_between_messages
        if self._expects_head or self.transport.is_closing():
            return
        if self._is_in_head:
            self._bound_pipelined(len(data))
        else:
            self._bound_framing(len(data))

    def _bound_pipelined(self, size: int) -> None:
        """Limit the size of a head that followed another message.

        The parser already has its first part, so it is counted from its second part on.
        """
        self._pipelined_bytes = self._pipelined_bytes + size if self._pipelined_bytes else 1
        if self._pipelined_bytes > self._max_head_bytes:
            self._refuse_size()
        elif self._head_timer is None:
            self._start_head_timer()

    def _bound_framing(self, size: int) -> None:
        """Limit the trailers and extensions of a chunked body: the parser keeps a trailer until it is complete."""
        self._framing_bytes = 0 if self._has_body_data else self._framing_bytes + size
        if self._framing_bytes > self._max_head_bytes:
            limit = f"{self._max_head_bytes // 1024} KiB (server.max_header_kb)"
            message = f"The trailers or extensions of the chunked body are over the limit of {limit}. Send less."
            self._refuse(431, "headers_too_large", message)

    def _collect_head(self, data: bytes) -> bytes:
        """Return the bytes for the parser, or empty bytes while the head is incomplete."""
        self._unset_keepalive_if_required()
        head = self._head + data if self._head else data
        end = head.find(_END_OF_HEAD)
        if end < 0 and len(head) <= self._max_head_bytes and _METHOD.match(head):
            self._head = head
            if self._head_timer is None:
                self._start_head_timer()
            return b""
        self._head = b""
        if (len(head) if end < 0 else end) > self._max_head_bytes or head.count(b"\n", 0, end) > MAX_HEADERS:
            self._refuse_size()
            return b""
        if b"pgrade" in head[:end]:
            self._is_handshake = _HANDSHAKE.match(head, 0, end) is not None
            if not self._is_handshake:
                head = _UPGRADE_HEADER.sub(b"", head[:end]) + head[end:]
        return head

    def on_message_begin(self) -> None:
        """Handle the start of a request."""
        self._is_between_messages = False
        self._is_in_head = True
        self._pipelined_bytes = 0
        self._framing_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are ignored: the caller and the call are decided before the body ends."""
        if self._is_in_head:
            self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body."""
        self._has_body_data = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Serve the request, or queue it until the response to the previous one is complete."""
        self._is_in_head = False
        self._pipelined_bytes = 0
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
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        """Handle the end of the body."""
        self._is_between_messages = True
        super().on_message_complete()

    def _should_upgrade_to_ws(self) -> bool:
        """Return True for a handshake. After a request without a complete response, the upgrade would lose it."""
        return self._is_handshake and (self.cycle is None or self.cycle.response_complete)

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to the WebSocket protocol, which is imported only when it is needed."""
        from gateway.server.socket_protocol import SocketProtocol  # noqa: PLC0415

        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self.ws_protocol_class = SocketProtocol
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Send an error for a request that cannot be parsed, and close. uvicorn's own text `msg` is not used."""
        del msg
        self._refuse(400, "invalid_request", "This is not a valid HTTP/1.1 request.")

    def _refuse_size(self) -> None:
        limit = f"{self._max_head_bytes // 1024} KiB (server.max_header_kb) or {MAX_HEADERS} headers"
        self._refuse(431, "headers_too_large", f"The request's headers are over the limit of {limit}. Send fewer.")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._refuse_late_head)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_late_head(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._head and not self._pipelined_bytes:
            # No request was started, so there is nothing to respond to.
            self.transport.close()
        else:
            # Not 408, because SDKs would retry.
            seconds = f"{self._head_timeout_s:g} s (server.header_timeout_s)"
            self._refuse(400, "header_timeout", f"The request's head was not complete within {seconds}.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body):
            # The response to the previous request is due or incomplete. This error would be treated as a part of it.
            self.transport.close()
            return
        headers, body = error_response(code, message)
        fields = b"".join(b"%b: %b\r\n" % pair for pair in headers)
        self.transport.write(
            b"HTTP/1.1 %d %b\r\n%bconnection: close\r\n\r\n%b" % (status, _REASONS[status], fields, body)
        )
        self.transport.close()


def is_continue_expected(headers: Headers) -> bool:
    """Return True if the client waits for 100 Continue before it sends the body (RFC 9110, section 10.1.1)."""
    return b"expect" in dict(headers) and b"100-continue" in [
        value.lower() for name, value in headers if name == b"expect"
    ]


def error_response(code: str, message: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return headers and body of the response to a request that does not reach the application."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (GATEWAY_REQUEST_ID, uuid.uuid4().hex.encode()),
        (SHOULD_RETRY, b"false"),
    ]
    return headers, body
