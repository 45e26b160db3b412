"""Serve the provider on a real port, in its own thread."""

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
#: Seconds a stop waits for answers still under way: none, as one may hang for ever on purpose.
_GRACE_S: Final = 0
_BACKLOG: Final = 2048
#: Longer than any client keeps an idle connection, so that it is never this side that closes it under a request.
_KEEP_ALIVE_S: Final = 300


class _Config(uvicorn.Config):
    """A configuration that leaves the process's logging alone; another server may live in it."""

    def configure_logging(self) -> None:
        """Do nothing."""


class MockServer:
    """Serves a provider on `host`:`port` (0: a free one) from `start` to `stop`, or as a context manager.

    `url` is there from the constructor on: the port is bound, and connections wait in its backlog until `start`.
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
        """Begin to serve."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close the port and every connection, in well under a second."""
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

        def elsewhere(record: logging.LogRecord) -> bool:
            return record.thread != ident

        # uvicorn's loggers are global, so what this server says is recognised by its thread.
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(elsewhere)
        try:
            self._server.run(sockets=[self._socket])
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(elsewhere)
