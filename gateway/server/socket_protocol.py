"""uvicorn's WebSocket connection with the bounds it lacks. Imported where the first one is opened.

Compression is not offered: what a message takes is then what was sent of it, and on the events of a stream it costs
more time than it saves.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from gateway.server.protocol import SOCKET_STOPS, ServerConfig

#: "try again later" (IANA's registry of close codes)
_TRY_LATER = 1013


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
        bounds = config if isinstance(config, ServerConfig) else ServerConfig
        self._pool = bounds.arriving
        self._linger_s = bounds.linger_s
        #: bytes of a message that is not whole yet
        self._held = 0
        self._end_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Read on. Messages that are not whole yet are held in memory, those of all connections up to a bound."""
        if self._pool.used + len(data) > self._pool.limit:
            self.conn.fail(_TRY_LATER, "too much is being sent to the gateway")
            self.handle_parser_exception()
            self._break_soon()
            return
        super().data_received(data)
        self._hold(len(self.conn.reader.buffer) + sum(map(len, self.frames)))

    def _hold(self, size: int) -> None:
        self._pool.used += size - self._held
        self._held = size

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._hold(0)
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
