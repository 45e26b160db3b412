"""Run uvicorn with the gateway's protocols and time limits."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, cast

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess
from uvicorn.supervisors.multiprocess import Process

from gateway.server.body import BODIES_AT_ONCE, MemoryPool
from gateway.server.protocol import STOPPING, GatewayProtocol, ServerConfig
from gateway.upstream.keepalive import KeepaliveSettings, bound_unacknowledged

logger = logging.getLogger("gateway")

#: longer than SDKs keep an idle connection, so that the gateway rarely closes one while a request is sent
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
#: seconds in which a WebSocket client must answer a ping; a ping is sent every 20 s
_PONG_S = 60.0
#: TCP keepalive for waiting clients: phones and laptops vanish without closing, and NATs drop idle connections. Three
#: minutes allow for a tunnel or a change of the network.
_CLIENT_KEEPALIVE = KeepaliveSettings(after_s=60, every_s=15, times=8)
#: seconds without an acknowledgement of sent data after which a client counts as gone
_UNACKNOWLEDGED_S = 180.0
#: seconds for a worker to handle one signal before the next
_SIGNAL_GAP_S = 0.2
#: seconds for a worker to report whether it accepts calls
_READY_TIMEOUT_S = 1.0
#: seconds for the first sign of life of a worker that loads its modules on a busy machine
_START_TIMEOUT_S = 120.0
#: seconds between two attempts to start a failed worker, for example without a store; each takes a CPU second
_RESTART_DELAY_S = 5.0
#: seconds that one check waits for a sign of life; a stop signal is delayed by this at most
_POLL_S = 0.1
#: seconds of the grace period for the last bytes of calls, after the listeners are closed
_FINISH_S = 1


def make_config(
    app: Any,
    *,
    factory: bool = False,
    workers: int = 1,
    max_head_bytes: int,
    max_body: int,
    head_timeout_s: float,
    grace_s: float,
) -> ServerConfig:
    """Return the configuration of a server.

    `app`: an ASGI application, or with `factory` the import path of a function that creates one.
    """
    config = ServerConfig(
        app,
        factory=factory,
        workers=workers,
        http=GatewayProtocol,
        loop="auto",
        ws="none",
        ws_max_size=max_body,
        # One message can be a whole conversation. A client answers no ping while it sends a message.
        ws_ping_timeout=_PONG_S,
        ws_per_message_deflate=False,
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # With 0, uvicorn would not let even a finished call write its response.
        timeout_graceful_shutdown=max(1, math.ceil(grace_s)),
    )
    config.max_head_bytes = max_head_bytes
    config.head_timeout_s = head_timeout_s
    config.arriving = MemoryPool(BODIES_AT_ONCE * max_body)
    return config


def bind(host: str, port: int, *, write_timeout_s: float = 0.0) -> socket.socket:
    """Return a listening socket that detects vanished clients.

    A client is not treated as gone before it has read nothing for `write_timeout_s`.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    _CLIENT_KEEPALIVE.begin(listener)
    bound_unacknowledged(listener, max(_UNACKNOWLEDGED_S, write_timeout_s))
    return listener


def stop_with_supervisor() -> None:
    """Stop this worker, with its calls, when its supervisor is gone.

    Otherwise no process would reload, replace or stop the worker, and it would keep the port. Call this in the event
    loop. In a process without a supervisor it does nothing.
    """
    parent, loop = multiprocessing.parent_process(), asyncio.get_running_loop()
    if parent is None:
        return

    def stop() -> None:
        loop.remove_reader(parent.sentinel)
        logger.error("the parent process of the workers was killed; this worker ends its calls and stops")
        signal.raise_signal(signal.SIGTERM)

    loop.add_reader(parent.sentinel, stop)


class WorkerServer(uvicorn.Server):
    """The server of one worker. `ready` is called when it accepts calls."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop the server; on a second signal, stop it at once."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal like uvicorn, but do not raise the signal again: a clean stop is a success."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the listeners."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new calls with an error while the running ones end; then stop like uvicorn.

        uvicorn would close the listeners first. Until load balancers notice, connections would then be refused.
        """
        config, state = self.config, self.server_state
        stopping = self.lifespan.state.get(STOPPING)
        if stopping is not None:
            stopping()
        grace_s = config.timeout_graceful_shutdown or 0
        until = time.monotonic() + grace_s - _FINISH_S
        running = set(state.tasks)
        for connection in list(state.connections):
            # A connection without a request stays open, so that its first request gets the error too.
            if getattr(connection, "cycle", connection) is not None:
                connection.shutdown()
        while running and not self.force_exit and time.monotonic() < until:
            _, running = await asyncio.wait(running, timeout=_POLL_S)
        config.timeout_graceful_shutdown = max(1, math.ceil(until + _FINISH_S - time.monotonic()))
        await super().shutdown(sockets)


class WorkerProcess(Process):
    """A worker process, from the view of its parent. It runs `WorkerServer` instead of uvicorn's own server."""

    @property
    def server(self) -> WorkerServer:
        """Return the server in the process. The parent asks the process itself whether it accepts calls."""
        if self._server is None:
            self._server = WorkerServer(self.config, lambda: None)
        return cast("WorkerServer", self._server)


class Supervisor(Multiprocess):
    """Run several worker processes.

    - SIGHUP is forwarded to the workers: each reads the configuration again and keeps its calls.
    - A second stop signal is forwarded too, and ends the workers at once.

    `ready` is called when a worker accepts calls.
    """

    def __init__(self, config: ServerConfig, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready = ready
        self._is_ready = self._stopping = self._is_forced = False
        self._retry_at = -math.inf
        #: start time of each worker without a sign of life; None: the worker gave one
        self._silent_since: dict[Process, float | None] = {}
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._stopping:
            self._is_forced = True
            self._interrupt_all()
        self._stopping = True
        self.signal_queue.append(signum)

    def keep_subprocess_alive(self) -> None:
        """Replace dead workers, and call `ready` when the first worker accepts calls.

        Workers that do not respond are replaced too. A starting worker does not respond either, so the check is skipped
        while one starts, unless another worker has died.
        """
        if self.should_exit.is_set():
            return
        self._retry_failed()
        starting = [process for process in self.processes if self._is_starting(process)]
        if not starting or not all(process.process.is_alive() for process in self.processes):
            self._replace_dead()
            if self._can_serve_without_failed():
                # A worker that cannot start, for example without a store, must not end the serving workers.
                self.should_exit.clear()
        if not self._is_ready and not self.should_exit.is_set():
            up = (process for process in self.processes if self._silent_since.get(process, 0.0) is None)
            self._is_ready = any(process.is_ready(_READY_TIMEOUT_S) for process in up)
            if self._is_ready:
                self._ready()

    def _can_serve_without_failed(self) -> bool:
        """Return True if some workers failed to start while others serve."""
        return self._is_ready and 0 < len(self._not_failed()) < len(self.processes)

    def _not_failed(self) -> list[Process]:
        """Return the workers that did not fail to start."""
        return [process for process in self.processes if process.exitcode != STARTUP_FAILURE]

    def _retry_failed(self) -> None:
        """Remove workers that failed to start, and start new ones after a delay."""
        if self._can_serve_without_failed():
            self.processes = self._not_failed()
            self._retry_at = time.monotonic() + _RESTART_DELAY_S
        elif self._is_ready and len(self.processes) < self.processes_num and time.monotonic() >= self._retry_at:
            self.processes.append(self._start_worker())

    def init_processes(self) -> None:
        """Start the workers."""
        self.processes += [self._start_worker() for _ in range(self.processes_num)]

    def handle_ttin(self) -> None:
        """Start one more worker (SIGTTIN)."""
        self.processes_num += 1
        self.processes.append(self._start_worker())

    def _start_worker(self) -> WorkerProcess:
        worker = WorkerProcess(self.config, self.sockets)
        worker.start()
        return worker

    def _replace_dead(self) -> None:
        """Replace each worker that died or does not respond. Stop all workers if one failed to start."""
        for index, process in enumerate(self.processes):
            if process.is_alive(self.config.timeout_worker_healthcheck):
                continue
            process.kill()
            process.join()
            if process.exitcode == STARTUP_FAILURE:
                self.should_exit.set()
            if self.should_exit.is_set():
                return
            self.processes[index] = self._start_worker()

    def _is_starting(self, process: Process) -> bool:
        """Return True if a worker has given no sign of life yet, and is within the start timeout."""
        if process not in self._silent_since:
            self._silent_since = {
                known: since for known, since in self._silent_since.items() if known in self.processes
            }
            self._silent_since[process] = time.monotonic()
            # Ping only once: every ping is answered, and a late answer would be treated as that to a later ping.
            process.parent_conn.send(b"ping")
        since = self._silent_since[process]
        if since is None or not process.process.is_alive():
            return False
        if process.parent_conn.poll(_POLL_S):
            process.parent_conn.recv()
            self._silent_since[process] = None
            return False
        return time.monotonic() - since < _START_TIMEOUT_S

    def _interrupt_all(self) -> None:
        """Send SIGINT, which ends a worker at once even if it is stopping already."""
        self._forward_signal(signal.SIGINT)

    def terminate_all(self) -> None:
        """Stop the workers; stop them at once if the second signal came before they handled the first.

        The parent closes its listener too. While any process has it open, the system accepts clients, which would wait
        until the last call has ended.
        """
        super().terminate_all()
        for listener in self.sockets:
            listener.close()
        if self._is_forced:
            time.sleep(_SIGNAL_GAP_S)
            self._interrupt_all()

    def handle_hup(self) -> None:
        """Forward SIGHUP to the workers."""
        self._forward_signal(signal.SIGHUP)

    def _forward_signal(self, signum: signal.Signals) -> None:
        """Send a signal to the living workers. The process id of a dead one may belong to another process."""
        for process in self.processes:
            if process.pid is not None and process.process.is_alive():
                os.kill(process.pid, signum)


def run(config: ServerConfig, listener: socket.socket, ready: Callable[[], None]) -> bool:
    """Serve until a stop signal. `ready` is called when calls are accepted. Return False if the server cannot start."""
    if config.workers > 1:
        supervisor = Supervisor(config, [listener], ready)
        supervisor.run()
        return all(process.exitcode != STARTUP_FAILURE for process in supervisor.processes)
    server = WorkerServer(config, ready)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        return False  # uvicorn exits so if the lifespan fails to start; the application has logged why
    return True


class ServerThread:
    """A server in a thread of this process, for the demo and for tests. It is a context manager."""

    def __init__(self, config: ServerConfig, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = bind(host, port)
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._up = threading.Event()
        self._has_failed = False
        self._server = WorkerServer(config, self._up.set)
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except SystemExit:
            self._has_failed = True
            self._up.set()

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            RuntimeError: the application cannot start; it has logged why.
        """
        self._thread.start()
        self._up.wait()
        if self._has_failed:
            self._listener.close()
            raise RuntimeError("the server cannot start; the reason is in the log")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
