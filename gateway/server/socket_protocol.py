"""Serve WebSockets with limits, based on uvicorn's own class.

Imported when the first WebSocket is opened, to save memory.

Compression is not offered. The memory of a message is then the number of received bytes, and compression of streamed
events costs more time than it saves.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from gateway.server.protocol import SOCKET_STOPS, bounds_of

#: "try again later" (IANA's registry of close codes)
_TRY_LATER: Final = 1013
#: seconds for which one connection is read before others get their turn, and bytes between two looks at the clock
_READ_TURN_S: Final = 0.005
_SLICE: Final = 4096


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection, starting with its handshake."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        bounds = bounds_of(config)
        self._pool = bounds.arriving
        self._linger_s = bounds.linger_s
        #: received bytes that were not parsed yet
        self._unread = bytearray()
        self._next_turn: asyncio.Handle | None = None
        #: frames of an incomplete message
        self._message = bytearray()
        #: bytes that this connection holds of the pool
        self._held = 0
        #: answer to the last ping, while the client reads nothing
        self._pong = b""
        self._end_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Receive bytes. Incomplete messages of all connections together have a memory limit."""
        if self._pool.used + len(data) > self._pool.limit:
            self.conn.fail(_TRY_LATER, "the gateway's memory for incoming messages is full")
            self.handle_parser_exception()
            self._break_soon()
            return
        self._unread += data
        if self._next_turn is None:
            self._read()

    def _read(self) -> None:
        """Parse for one turn. Thousands of frames may arrive at once, and other connections must not wait for them."""
        self._next_turn = None
        unread, at = self._unread, 0
        end = self.loop.time() + _READ_TURN_S
        while at < len(unread) and not self.transport.is_closing() and self.loop.time() < end:
            super().data_received(bytes(unread[at : at + _SLICE]))
            at += _SLICE
        del unread[:at]
        self._hold(len(self.conn.reader.buffer) + sum(map(len, self.frames)) + len(self._message) + len(unread))
        if self.transport.is_closing():
            return
        if unread:
            self.transport.pause_reading()
            self._next_turn = self.loop.call_soon(self._read)
            return
        if not self.read_paused:
            self.transport.resume_reading()
        if not self.handshake_initiated:
            # The library websockets refused the headers. Send its response, because uvicorn does not.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_text(self, event: Any) -> None:
        """Handle a text message, or its first frame."""
        super().handle_text(event)
        _release(event)

    def handle_bytes(self, event: Any) -> None:
        """Handle a binary message, or its first frame."""
        super().handle_bytes(event)
        _release(event)

    def handle_cont(self, event: Any) -> None:
        """Handle a further frame of a message. Frames are joined at once, because many tiny ones take more memory."""
        if self.frames:
            self._message += self.frames.pop()
        self._message += event.data
        _release(event)
        if event.fin:
            self.frames = [bytes(self._message)]
            self._message = bytearray()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping. While the client reads nothing, keep only the last answer (RFC 6455, section 5.5.3)."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send()) or self._pong

    def resume_writing(self) -> None:
        """Send the waiting answer to a ping, because the client reads again."""
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong:
            self.transport.write(pong)

    def _hold(self, size: int) -> None:
        self._pool.used += size - self._held
        self._held = size

    def connection_lost(self, exc: Exception | None) -> None:
        """Release memory and timers after the end of the connection."""
        self._hold(0)
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        """Abort the connection. A client that answers no ping answers no close either, so a close would never end."""
        super().keepalive_timeout()
        self.transport.abort()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Give the remaining bytes some seconds to be sent, because the application has finished."""
        super().on_task_complete(task)
        self._break_soon()

    def _break_soon(self) -> None:
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(self._linger_s, self.transport.abort)

    def shutdown(self) -> None:
        """Notify the application that the server stops. It closes the connection after the running calls."""
        if self.handshake_complete and not self.close_sent:
            # A message of the gateway, in addition to those of ASGI.
            self.queue.put_nowait(cast("Any", {"type": SOCKET_STOPS}))
        else:
            super().shutdown()


def _release(frame: Any) -> None:
    """Empty a handled frame: the library websockets keeps the last one until the next arrives, perhaps for an hour."""
    frame.data = b""
