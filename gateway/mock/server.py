"""Serve the mock provider on a real port, in its own thread."""

from __future__ import annotations

import logging
import socket
import threading
from typing import TYPE_CHECKING, Final, Self

import uvicorn

from gateway.mock.app import create_app
from gateway.mock.provider import MockProvider

if TYPE_CHECKING:
    from types import TracebackType

_LOGGERS: Final = ("uvicorn.error", "uvicorn.access", "uvicorn.asgi")
#: Seconds that a stop waits for running responses. Zero, because a test may have asked for a response that never ends.
_GRACE_S: Final = 0
_BACKLOG: Final = 2048
#: Longer than any client keeps an idle connection, so that the server never closes one while a request arrives.
_KEEP_ALIVE_S: Final = 300


class _Config(uvicorn.Config):
    """A configuration of uvicorn that does not change logging, because the process may run another server."""

    def configure_logging(self) -> None:
        """Do nothing."""


class MockServer:
    """Serve a provider on `host`:`port` (0: a free port) from `start` to `stop`, or as a context manager.

    The constructor binds the port and sets `url`. Connections wait in the backlog until `start`.
    """

    def __init__(self, provider: MockProvider | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.provider = provider if provider is not None else MockProvider()
        self._socket = socket.create_server((host, port), backlog=_BACKLOG)
        self.url: str = f"http://{host}:{self._socket.getsockname()[1]}"
        config = _Config(
            create_app(self.provider),
            access_log=False,
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="mock-provider", daemon=True)

    def start(self) -> Self:
        """Start to serve requests."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close the port and all connections. This takes much less than a second."""
        if not self._thread.is_alive():
            self._socket.close()
            return
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        ident = threading.get_ident()

        def is_of_other_thread(record: logging.LogRecord) -> bool:
            return record.thread != ident

        # uvicorn's loggers are global, so the messages of this server are recognised by their thread.
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(is_of_other_thread)
        try:
            self._server.run(sockets=[self._socket])
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(is_of_other_thread)
