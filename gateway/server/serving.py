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

#: longer than SDKs keep an idle connection, so that it is rarely we who close it under a request
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
#: seconds in which the client of a WebSocket has to answer a ping; one is sent every 20 s
_PONG_S = 60.0
#: Clients that wait are asked whether they are still there: phones and laptops leave without a word, and NATs forget
#: whom they wait for. Three minutes are a tunnel, or another network.
_ASKING = KeepaliveSettings(after_s=60, every_s=15, times=8)
#: seconds without a sign of life after which a client has gone that something was sent to
_UNHEARD_S = 180.0
#: seconds for a worker to take notice of one signal before the next
_HURRY_S = 0.2
#: seconds for a worker to say whether it takes calls
_ANSWERS_S = 1.0
#: seconds for a worker that loads its modules to give a first sign of life, on a busy machine
_STARTS_S = 120.0
#: seconds between two tries to start a worker that could not, as the store is away: each takes a second of a core
_AGAIN_S = 5.0
#: seconds to wait for the first sign of life at each look; a signal to stop waits no longer than that
_LOOKS_S = 0.1
#: seconds of the grace that are left for calls to write their last, once the listeners are closed
_LAST_S = 1


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
    """The configuration of a server of `app`: an ASGI application, or the import path of a function that makes one."""
    config = ServerConfig(
        app,
        factory=factory,
        workers=workers,
        http=GatewayProtocol,
        loop="auto",
        ws="none",
        ws_max_size=max_body,
        # One message may be a whole conversation, and who sends it answers no ping meanwhile.
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
        # With 0, uvicorn would not even let a finished call write its answer.
        timeout_graceful_shutdown=max(1, math.ceil(grace_s)),
    )
    config.max_head_bytes = max_head_bytes
    config.head_timeout_s = head_timeout_s
    config.arriving = MemoryPool(BODIES_AT_ONCE * max_body)
    return config


def bind(host: str, port: int, *, write_timeout_s: float = 0.0) -> socket.socket:
    """A listening socket. Clients that vanish are noticed, none before it has taken nothing for `write_timeout_s`.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    _ASKING.begin(listener)
    bound_unacknowledged(listener, max(_UNHEARD_S, write_timeout_s))
    return listener


def stop_without_parent() -> None:
    """Have this worker end its calls and stop once its supervisor is gone: nobody would reload, replace or stop it.

    It would keep the port, too. To be called in the loop; a process that nobody supervises stays as it is.
    """
    parent, loop = multiprocessing.parent_process(), asyncio.get_running_loop()
    if parent is None:
        return

    def stop() -> None:
        loop.remove_reader(parent.sentinel)
        logger.error("the parent of all workers was killed: this one ends its calls and stops")
        signal.raise_signal(signal.SIGTERM)

    loop.add_reader(parent.sentinel, stop)


class WorkerServer(uvicorn.Server):
    """One worker. `ready` is called once calls are taken."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once where we were stopping already, whichever signal came second."""
        if self.should_exit:
            self.force_exit = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop by a signal as uvicorn does, but do not raise it again at the end: a clean stop is a success."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the listeners."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new calls while those under way end, each with an answer that says so; then stop as uvicorn does.

        uvicorn closes the listeners first. Until whoever sends calls here has noticed, they would find nobody.
        """
        config, state = self.config, self.server_state
        stopping = self.lifespan.state.get(STOPPING)
        if stopping is not None:
            stopping()
        grace_s = config.timeout_graceful_shutdown or 0
        until = time.monotonic() + grace_s - _LAST_S
        under_way = set(state.tasks)
        for connection in list(state.connections):
            # Who has just connected is told so, too: the request is on its way.
            if getattr(connection, "cycle", connection) is not None:
                connection.shutdown()
        while under_way and not self.force_exit and time.monotonic() < until:
            _, under_way = await asyncio.wait(under_way, timeout=_LOOKS_S)
        config.timeout_graceful_shutdown = max(1, math.ceil(until + _LAST_S - time.monotonic()))
        await super().shutdown(sockets)


class WorkerProcess(Process):
    """One of several worker processes, as its parent knows it; uvicorn's own would run uvicorn's server."""

    @property
    def server(self) -> WorkerServer:
        """What runs in the process. Its parent learns by other means that it takes calls."""
        if self._server is None:
            self._server = WorkerServer(self.config, lambda: None)
        return cast("WorkerServer", self._server)


class Supervisor(Multiprocess):
    """Several workers. SIGHUP is passed on to them: each reads the configuration anew and keeps its calls.

    So is a second signal to stop, which ends a worker at once. `ready` is called once a worker takes calls.
    """

    def __init__(self, config: ServerConfig, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready = ready
        self._is_ready = self._stopping = self._hurry = False
        self._again_at = -math.inf
        #: since when those have been waited for that have not given a sign of life yet; None: they have
        self._awaited: dict[Process, float | None] = {}
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._stopping:
            self._hurry = True
            self._interrupt_all()
        self._stopping = True
        self.signal_queue.append(number)

    def keep_subprocess_alive(self) -> None:
        """Replace workers that died, and call `ready` once the first worker takes calls.

        Workers that do not answer are replaced, too, and one that is only starting does not. So nobody looks while one
        is starting, unless another has died, which is to be replaced without waiting.
        """
        if self.should_exit.is_set():
            return
        self._try_again()
        starting = [process for process in self.processes if self._is_starting(process)]
        if not starting or not all(process.process.is_alive() for process in self.processes):
            self._replace()
            if self._goes_on_without():
                # One that cannot start, as for a store that is away, is no reason to end those that serve.
                self.should_exit.clear()
        if not self._is_ready and not self.should_exit.is_set():
            up = (process for process in self.processes if self._awaited.get(process, 0.0) is None)
            self._is_ready = any(process.is_ready(_ANSWERS_S) for process in up)
            if self._is_ready:
                self._ready()

    def _goes_on_without(self) -> bool:
        """Whether there are workers that could not start, beside others that serve."""
        return self._is_ready and 0 < len(self._not_failed()) < len(self.processes)

    def _not_failed(self) -> list[Process]:
        """The workers that have not failed to start."""
        return [process for process in self.processes if process.exitcode != STARTUP_FAILURE]

    def _try_again(self) -> None:
        """Start a worker in the place of one that could not, after a while."""
        if self._goes_on_without():
            self.processes = self._not_failed()
            self._again_at = time.monotonic() + _AGAIN_S
        elif self._is_ready and len(self.processes) < self.processes_num and time.monotonic() >= self._again_at:
            self.processes.append(self._started())

    def init_processes(self) -> None:
        """Start the workers."""
        self.processes += [self._started() for _ in range(self.processes_num)]

    def handle_ttin(self) -> None:
        """SIGTTIN: one worker more."""
        self.processes_num += 1
        self.processes.append(self._started())

    def _started(self) -> WorkerProcess:
        worker = WorkerProcess(self.config, self.sockets)
        worker.start()
        return worker

    def _replace(self) -> None:
        """Start a worker in the place of each that died or does not answer; stop all where one could not start."""
        for number, process in enumerate(self.processes):
            if process.is_alive(self.config.timeout_worker_healthcheck):
                continue
            process.kill()
            process.join()
            if process.exitcode == STARTUP_FAILURE:
                self.should_exit.set()
            if self.should_exit.is_set():
                return
            self.processes[number] = self._started()

    def _is_starting(self, process: Process) -> bool:
        """Whether a worker has given no sign of life yet, and may still take its time."""
        if process not in self._awaited:
            self._awaited = {known: since for known, since in self._awaited.items() if known in self.processes}
            self._awaited[process] = time.monotonic()
            # Once: each question is answered in the end, and an old answer would be taken for that to a later one.
            process.parent_conn.send(b"ping")
        since = self._awaited[process]
        if since is None or not process.process.is_alive():
            return False
        if process.parent_conn.poll(_LOOKS_S):
            process.parent_conn.recv()
            self._awaited[process] = None
            return False
        return time.monotonic() - since < _STARTS_S

    def _interrupt_all(self) -> None:
        """A worker that is stopping already takes only this signal for "at once"."""
        self._pass_on(signal.SIGINT)

    def terminate_all(self) -> None:
        """Stop the workers; at once where the second signal came before they heard of the first.

        With them the listener is closed here: as long as a process has it open that serves nobody, the system goes on
        accepting clients, and leaves them waiting until the last call has ended.
        """
        super().terminate_all()
        for listener in self.sockets:
            listener.close()
        if self._hurry:
            time.sleep(_HURRY_S)
            self._interrupt_all()

    def handle_hup(self) -> None:
        """Pass SIGHUP on to the workers."""
        self._pass_on(signal.SIGHUP)

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the workers; not to one that has died and was not replaced yet: its id may be another's."""
        for process in self.processes:
            if process.pid is not None and process.process.is_alive():
                os.kill(process.pid, number)


def run(config: ServerConfig, listener: socket.socket, ready: Callable[[], None]) -> bool:
    """Serve until told to stop; `ready` is called once calls are taken. False: it could not start."""
    if config.workers > 1:
        supervisor = Supervisor(config, [listener], ready)
        supervisor.run()
        return all(process.exitcode != STARTUP_FAILURE for process in supervisor.processes)
    server = WorkerServer(config, ready)
    try:
        server.run(sockets=[listener])
    except SystemExit:
        return False  # uvicorn's way to say that the lifespan failed to start; the application has said why
    return True


class ServerThread:
    """A server in a thread of this process, for the demo and for tests. A context manager."""

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
        """Start it; RuntimeError where the application cannot start, which says why itself."""
        self._thread.start()
        self._up.wait()
        if self._has_failed:
            self._listener.close()
            raise RuntimeError("the server cannot start")
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
