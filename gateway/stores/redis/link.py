"""The way to the servers: few connections, each with many requests under way, and an end to all waiting.

Time runs from the moment a request is sent: waiting for room is our own queue and not the server's silence. Nothing is
sent again by itself, but for a script that the server says it does not know.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from gateway.core.errors import StoreUnavailable
from gateway.core.redis_url import Address
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.wire import FAULTS, Request, ServerError, Wire, connect, is_error

#: requests under way on one connection from which on another one is made, and beyond which none is sent
_BUSY: Final = 32
_FULL: Final = 128
#: another server may be the one to ask next time
_ELSEWHERE: Final = ("READONLY", "MASTERDOWN", "LOADING")


class Link(Protocol):
    """Sends commands. All of one call are sent together, in their order."""

    async def call(self, *commands: Command) -> list[Any]:
        """What the server says to each.

        Raises:
            StoreUnavailable: there was no answer in time, or one of them is an error.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


def unavailable(shown: str, error: BaseException) -> StoreUnavailable:
    """What an operator is told."""
    reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
    return StoreUnavailable(f"The store {shown} cannot be used: {reason}. Try again shortly.")


def checked(shown: str, replies: list[Any]) -> list[Any]:
    """The replies.

    Raises:
        StoreUnavailable: one is an error.
    """
    for reply in replies:
        if isinstance(reply, ServerError):
            raise unavailable(shown, reply) from reply
    return replies


class SingleLink:
    """To one server, or to the one that the sentinels name. Connects when it is first used."""

    def __init__(self, address: Address, scripts: Scripts, *, timeout_s: float, connections: int) -> None:
        self._address = address
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._wires: list[Wire] = []
        self._connecting: asyncio.Task[None] | None = None
        self._queue: deque[Request] = deque()
        self._running: set[asyncio.Future[list[Any]]] = set()

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`."""
        return checked(self._address.shown, await self.ask(*commands))

    async def ask(self, *commands: Command) -> list[Any]:
        """What the server says to each; an error is said, too.

        Raises:
            StoreUnavailable: there was no answer in time.
        """
        try:
            replies = await self._send(commands)
            unknown = [number for number, reply in enumerate(replies) if is_error(reply, "NOSCRIPT")]
            if unknown:
                again = await self._send(tuple(self._scripts.spelled_out(commands[number]) for number in unknown))
                for number, reply in zip(unknown, again, strict=True):
                    replies[number] = reply
        except FAULTS as error:
            raise unavailable(self._address.shown, error) from error
        if any(is_error(reply, *_ELSEWHERE) for reply in replies):
            self._retire()
        return replies

    def _send(self, commands: tuple[Command, ...]) -> asyncio.Future[list[Any]]:
        done: asyncio.Future[list[Any]] = self._loop.create_future()
        self._running.add(done)
        done.add_done_callback(self._running.discard)
        self._queue.append(Request(commands, done))
        self._pump()
        return done

    def _pump(self) -> None:
        while self._queue:
            wire = min(self._wires, key=_load, default=None)
            load = wire.load if wire is not None else _FULL
            if load >= _BUSY and self._connecting is None and len(self._wires) < self._connections:
                self._connecting = self._loop.create_task(self._connect())
            if wire is None or load >= _FULL:
                return
            wire.send(self._queue.popleft())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                wire = await connect(self._address, self._timeout_s, self._on_progress)
            self._wires.append(wire)
        except FAULTS as error:
            self._give_up(error)
        except BaseException:
            self._give_up(ConnectionError("the gateway is stopping"))
            raise
        finally:
            self._connecting = None
        self._pump()

    def _give_up(self, error: BaseException) -> None:
        """Those who wait have waited for the same silence: each of them would wait as long once more."""
        waiting, self._queue = self._queue, deque()
        for request in waiting:
            request.fail(error)

    def _on_progress(self, wire: Wire) -> None:
        if wire.fault is not None:
            if wire in self._wires:
                self._wires.remove(wire)
            if isinstance(wire.fault, TimeoutError):
                self._give_up(wire.fault)
        if self._queue:
            self._pump()

    def _retire(self) -> None:
        """Connect anew for whatever comes next."""
        wires, self._wires = self._wires, []
        for wire in wires:
            wire.close()

    async def aclose(self) -> None:
        """See `Link.aclose`. What was asked for is answered first."""
        while self._running:
            await asyncio.wait(self._running)
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        wires = list(self._wires)
        self._retire()
        for wire in wires:
            await wire.wait_closed()


def _load(wire: Wire) -> int:
    return wire.load


OpenNode = Callable[[Address], SingleLink]
