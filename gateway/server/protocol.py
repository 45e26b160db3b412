"""uvicorn's HTTP/1.1 connection with the bounds it lacks: size and number of headers, time to send them.

httptools takes headers of any size and nothing ends a half-sent head (measured on uvicorn 0.54). The answers to what is
refused here have OpenAI's error shape like all others.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, Final, cast

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEADERS: Final = 256
#: An upgrade that nobody here speaks (h2c from Java's client, websockets) would end the reading of the body.
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
_REASONS: Final = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class _HeadTooLarge(Exception):
    """Ends the parsing of a head."""


class ServerConfig(Config):
    """uvicorn's configuration, our bounds beside it. Leaves the process's logging alone."""

    max_head_bytes = 64 * 1024
    head_timeout_s = 20.0

    def configure_logging(self) -> None:
        """Do nothing."""


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    max_head_bytes = ServerConfig.max_head_bytes
    head_timeout_s = ServerConfig.head_timeout_s

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        if isinstance(config, ServerConfig):
            self.max_head_bytes = config.max_head_bytes
            self.head_timeout_s = config.head_timeout_s
        self._head_bytes = 0
        self._received = 0
        self._in_head = True
        self._too_large = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: a head is awaited."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; start the clock where a head came only in part."""
        if self._in_head:
            self._received += len(data)
            if b"pgrade" in data:
                data = _UPGRADE.sub(b"", data)
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # The parser reports a header when it is whole; until then only this counts it.
            if self._received > self.max_head_bytes:
                self._too_large = True
                self.send_400_response("")
            elif self._head_timer is None:
                self._await_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADERS:
            self._too_large = True
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._received = 0
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed and close. `msg` is uvicorn's text; ours says more."""
        del msg
        if self._too_large:
            limit = f"{self.max_head_bytes // 1024} KiB or {MAX_HEADERS} headers"
            self._refuse(431, "headers_too_large", f"The request's headers are over {limit} (server.max_header_kb).")
        else:
            self._refuse(400, "invalid_request", "This is not a valid HTTP/1.1 request.")

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            self._too_large = True
            raise _HeadTooLarge

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self._in_head or self.transport.is_closing():
            return
        if not self._received:
            self.transport.close()
        else:
            # Not 408: SDKs would send the call again.
            seconds = f"{self.head_timeout_s:g} s (server.header_timeout_s)"
            self._refuse(400, "header_timeout", f"The request's head was not complete within {seconds}.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"x-should-retry: false\r\nconnection: close\r\n\r\n%b" % (status, _REASONS[status], len(body), body)
        )
        self.transport.close()


def bounded(max_head_bytes: int, head_timeout_s: float) -> type[GatewayProtocol]:
    """The protocol with these bounds."""
    return type("B", (GatewayProtocol,), {"max_head_bytes": max_head_bytes, "head_timeout_s": head_timeout_s})
