"""Handle one HTTP/1.1 request and its response, based on uvicorn's own class.

uvicorn checks each header with two regular expressions. Checking and writing all headers at once takes half the time.
This module decides how a response ends: by its length, its last chunk or with its connection (RFC 9112, section 6.3).
"""

from __future__ import annotations

import string
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.core.http.headers import BODILESS

#: Key that is added to the message which starts a response: the function that sends parts of the body without waiting.
#: In the scope of the request it would be a reference cycle.
WRITE: Final = "gateway.write"
#: octets that a header name may contain; ASGI's names are lower-case (RFC 9110, section 5.6.2)
_NAME_OCTETS: Final = (string.ascii_lowercase + string.digits + "!#$%&'*+-.^_`|~").encode()
#: octets that a header value may contain (RFC 9110, section 5.5)
_VALUE_OCTETS: Final = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])
_LINE_END: Final = b"\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Cycle(RequestResponseCycle):
    """Receive one request and send its response. No headers are added except those for the end of the response."""

    #: the client's HTTP version has no chunked encoding: a response of unknown length ends with its connection
    without_chunks = False
    #: bytes of the body that are still to be sent; None: unknown
    _due: int | None = 0

    async def send(self, message: Any) -> None:
        """Send an ASGI message. Wait while the client reads nothing.

        Raises:
            RuntimeError: the body does not have the announced length, or a header is invalid.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self.response_started = True
            self.waiting_for_100_continue = False
            self._send_head(message["status"], message.get("headers", []))
            message[WRITE] = self.write
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""))
            if not message.get("more_body", False):
                self._end()
        else:
            raise RuntimeError(f"{kind} cannot be sent at this point of a response")

    def write(self, body: bytes) -> bool:
        """Send a part of the body at once; return False, and send nothing, if the client has to read first."""
        if self.disconnected or self.flow.write_paused:
            return self.disconnected
        self._send_body(body)
        return True

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        named = dict(headers)
        fields = _LINE_END.join([*map(b": ".join, headers), b""])
        # Only line ends remain, one for each header. More of them would be an injected header.
        ends = fields.translate(None, _VALUE_OCTETS)
        if b"".join(named).translate(None, _NAME_OCTETS) or ends != _LINE_END * len(headers):
            raise RuntimeError("a header of the response contains invalid characters")
        if b"connection" in named and _closes(named[b"connection"]):
            self.keep_alive = False
        elif not self.keep_alive:
            fields += b"connection: close\r\n"
        if self.scope["method"] == "HEAD" or status in BODILESS:
            pass
        elif b"content-length" in named:
            self._due = int(named[b"content-length"])
        elif self.without_chunks:
            self._due = None
        else:
            self.chunked_encoding, self._due = True, None
            fields += b"transfer-encoding: chunked\r\n"
        self.transport.write(b"%b%b\r\n" % (STATUS_LINE[status], fields))

    def _send_body(self, body: bytes) -> None:
        if not body:
            return
        if self.chunked_encoding:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        elif self.scope["method"] != "HEAD":
            if self._due is not None:
                self._due -= len(body)
                if self._due < 0:
                    raise RuntimeError("the body of the response is longer than its content-length")
            self.transport.write(body)

    def _end(self) -> None:
        if self._due:
            raise RuntimeError("the body of the response is shorter than its content-length")
        if self.chunked_encoding:
            self.transport.write(_LAST_CHUNK)
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _closes(connection: bytes) -> bool:
    """Return True if the value of the header `Connection` closes the connection."""
    return b"close" in [token.strip() for token in connection.lower().split(b",")]
