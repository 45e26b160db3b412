"""Serve WebSockets with limits, based on uvicorn's own class.

Imported where the first one is opened.

Compression is not offered: what a message takes is then what was sent of it, and on the events of a stream it costs
more time than it saves.
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
#: how long one connection is read before others have their turn, in seconds; and how much between looks at the clock
_TURN_S: Final = 0.005
_SLICE: Final = 4096


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection, from its handshake on."""

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
        #: what has come and was not read yet
        self._unread = bytearray()
        self._next_turn: asyncio.Handle | None = None
        #: the frames of a message that is not whole yet
        self._message = bytearray()
        #: how much of all that counts in the pool
        self._held = 0
        #: the answer to the last ping, where the client takes nothing just now
        self._pong = b""
        self._end_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Read on. Messages that are not whole yet are held in memory, those of all connections up to a bound."""
        if self._pool.used + len(data) > self._pool.limit:
            self.conn.fail(_TRY_LATER, "too much is being sent to the gateway")
            self.handle_parser_exception()
            self._break_soon()
            return
        self._unread += data
        if self._next_turn is None:
            self._read()

    def _read(self) -> None:
        """Read for a turn: what comes at once may be many thousand frames, and all others would wait for them."""
        self._next_turn = None
        unread, at = self._unread, 0
        end = self.loop.time() + _TURN_S
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
            # Headers that websockets does not take. It has made an answer of its own, which uvicorn does not send.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def handle_text(self, event: Any) -> None:
        """Take a text, or its first frame."""
        super().handle_text(event)
        _let_go(event)

    def handle_bytes(self, event: Any) -> None:
        """Take bytes, or the first frame of them."""
        super().handle_bytes(event)
        _let_go(event)

    def handle_cont(self, event: Any) -> None:
        """Take a further frame of a message. They are joined at once: in parts, tiny ones would take far more."""
        if self.frames:
            self._message += self.frames.pop()
        self._message += event.data
        _let_go(event)
        if event.fin:
            self.frames = [bytes(self._message)]
            self._message = bytearray()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        """Answer a ping; of many, the last one once the client takes something (RFC 6455, section 5.5.3)."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pong = b"".join(self.conn.data_to_send()) or self._pong

    def resume_writing(self) -> None:
        """The client takes something again."""
        super().resume_writing()
        pong, self._pong = self._pong, b""
        if pong:
            self.transport.write(pong)

    def _hold(self, size: int) -> None:
        self._pool.used += size - self._held
        self._held = size

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._hold(0)
        if self._next_turn is not None:
            self._next_turn.cancel()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        """Break the connection: who answers no ping takes no close either, and the rest would wait for it for ever."""
        super().keepalive_timeout()
        self.transport.abort()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """The application has done with the connection: what is left to send has some seconds to go out."""
        super().on_task_complete(task)
        self._break_soon()

    def _break_soon(self) -> None:
        if self._end_timer is None:
            self._end_timer = self.loop.call_later(self._linger_s, self.transport.abort)

    def shutdown(self) -> None:
        """The server begins to stop. The application closes the connection when what is under way is answered."""
        if self.handshake_complete and not self.close_sent:
            # Ours, beside those of ASGI.
            self.queue.put_nowait(cast("Any", {"type": SOCKET_STOPS}))
        else:
            super().shutdown()


def _let_go(frame: Any) -> None:
    """Empty a frame that was taken: websockets holds on to the last one until the next comes, for an hour maybe."""
    frame.data = b""
