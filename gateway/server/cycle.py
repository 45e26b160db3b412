"""Handle one HTTP/1.1 request and its response, based on uvicorn's own class.

uvicorn looks at each header by two regular expressions and more; checked and written in one go, a head takes half the
time. How an answer ends is decided here: by its length, by its last chunk or with its connection (RFC 9112, section
6.3).
"""

from __future__ import annotations

import string
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.core.http.headers import BODILESS

#: what may stand in the name of a header: they are lower-case, as ASGI has them (RFC 9110, section 5.6.2)
_IN_NAMES: Final = (string.ascii_lowercase + string.digits + "!#$%&'*+-.^_`|~").encode()
#: what may stand in the value of one (RFC 9110, section 5.5)
_IN_VALUES: Final = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])
_LINE_END: Final = b"\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Cycle(RequestResponseCycle):
    """What an application receives and sends of one request. It gets no header that the application did not send."""

    #: the client's version of HTTP knows no chunks: an answer of unknown length ends with its connection
    without_chunks = False
    #: bytes of the body that are still to come; None: as many as there are
    _due: int | None = 0

    async def send(self, message: Any) -> None:
        """See ASGI. Waits while the client takes nothing.

        Raises:
            RuntimeError: the answer would not be what its head says, or be read as another one.
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
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""))
            if not message.get("more_body", False):
                self._end()
        else:
            raise RuntimeError(f"{kind} is not what comes next in an answer")

    def _send_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        named = dict(headers)
        fields = _LINE_END.join([*map(b": ".join, headers), b""])
        # What is left of the fields are the ends of their lines, of which nobody may have brought more.
        ends = fields.translate(None, _IN_VALUES)
        if b"".join(named).translate(None, _IN_NAMES) or ends != _LINE_END * len(headers):
            raise RuntimeError("a header of the answer holds what cannot be sent in one")
        if b"connection" in named and _is_close(named[b"connection"]):
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
        if not body or self.scope["method"] == "HEAD":
            return
        if self._due is not None:
            self._due -= len(body)
            if self._due < 0:
                raise RuntimeError("the body of the answer is longer than its head says")
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self.chunked_encoding else body)

    def _end(self) -> None:
        if self._due:
            raise RuntimeError("the body of the answer is shorter than its head says")
        if self.chunked_encoding:
            self.transport.write(_LAST_CHUNK)
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()


def _is_close(connection: bytes) -> bool:
    """Whether a header `Connection` has the connection closed."""
    return b"close" in [token.strip() for token in connection.lower().split(b",")]
