"""Send commands in few round trips, over a bounded number of connections, with a deadline.

Connections are redis-py's; what goes over them is put together here. What is asked for in one turn of the event loop
goes out together, and its answers are read as they come: a command by itself costs several times as much of this
process. Time runs from the moment a request is sent: waiting for a connection is our own queue and not the
server's silence. Nothing is sent again by itself, but for a script that the server says it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

from redis import exceptions
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import NoScriptError, RedisError

from gateway.core.errors import StoreDamaged, StoreUnavailable
from gateway.core.redis_url import Address
from gateway.stores.damage import MENDING, unreadable
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.servers import pool_of
from gateway.stores.redis.wire import PendingCommands, Wire

#: requests of one batch, at most: all their answers must come within the deadline of one
_BATCH: Final = 128
#: seconds between two looks at whom the sentinels name: what a former master takes before it hears of that is lost
_LOOK_S: Final = 1.0
_SILENCE: Final = (TimeoutError, exceptions.TimeoutError)
#: what can go wrong on the way to a server
_FAULTS: Final = (RedisError, OSError, EOFError)
_MOVED_ON: Final = ConnectionError("another server is to be asked")
#: a script failed by itself; behind an @ is the place of a command that the server refused, maybe for its own reasons
_SCRIPT_FAILED: Final = re.compile(r"(?<!@)user_script:\d+: |WRONGTYPE")
#: what a script says of an account that it cannot read
_NO_ACCOUNT: Final = re.compile(r"account (\S+) cannot be read")


class ScriptFailed(StoreDamaged):
    """A script of ours failed at what it found or was given; the server is well."""


class Link(Protocol):
    """Sends commands. All of one call are sent together, in their order."""

    async def call(self, *commands: Command) -> list[Any]:
        """What the server says to each.

        Raises:
            StoreUnavailable: there was no answer in time, or one of them is an error.
        """
        ...

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """The replies of each server to all of them, errors among them.

        Raises:
            StoreUnavailable: one of the servers did not answer in time.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


def unavailable(shown: str, error: BaseException) -> StoreUnavailable:
    """What callers are told; `shown`: the address of the store as it may be shown."""
    code = getattr(error, "status_code", None)
    reason = f"{code or ''} {error}".strip() or type(error).__name__
    reason = "no answer in time" if isinstance(error, _SILENCE) else reason
    account = _NO_ACCOUNT.search(reason)
    if account is not None:
        return ScriptFailed(unreadable(account[1], shown))
    if _SCRIPT_FAILED.search(reason):
        return ScriptFailed(f"What the store {shown} holds cannot be used: {reason.rstrip('.')}. {MENDING}.")
    return StoreUnavailable(f"The store {shown} cannot be used: {reason.rstrip('.')}. Try again shortly.")


def checked(shown: str, replies: list[Any]) -> list[Any]:
    """The replies.

    Raises:
        StoreUnavailable: one is an error.
    """
    for reply in replies:
        if isinstance(reply, RedisError):
            raise unavailable(shown, reply) from reply
    return replies


async def each(link: Link, commands: Sequence[Command]) -> list[Any]:
    """The reply to each; StoreDamaged in the place of one that meets what cannot be used.

    Raises:
        StoreUnavailable: there was no answer in time, or one of them is another error.
    """
    try:
        return await link.call(*commands) if commands else []
    except StoreDamaged:
        return await asyncio.gather(*(_alone(link, command) for command in commands))


def sound(reply: Any) -> Any:
    """What `each` gives, if it is what was asked for.

    Raises:
        StoreDamaged: it is not.
    """
    if isinstance(reply, StoreDamaged):
        raise reply
    return reply


async def _alone(link: Link, command: Command) -> Any:
    try:
        [reply] = await link.call(command)
    except StoreDamaged as error:
        return error
    return reply


class SingleLink:
    """To one server, or to the one that the sentinels name. Connects when it is first used."""

    def __init__(self, address: Address, scripts: Scripts, *, timeout_s: float, connections: int) -> None:
        self._address = address
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._pool = pool_of(address, timeout_s, connections)
        #: how many connections may be taken, made already or not
        self._free = connections
        self._idle: list[Wire] = []
        #: connections that were taken from the pool for good, and are closed now
        self._spare: list[AbstractConnection] = []
        #: connections to the server that is to be asked: any other is closed once its batch is answered
        self._good: set[Wire] = set()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PendingCommands] = deque()
        self._is_starting = False
        self._running: set[asyncio.Future[list[Any]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: whom the sentinels named when they were asked last
        self._master: object = None
        self._looked_at = -math.inf

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`."""
        return checked(self._address.shown, await self.ask(*commands))

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """See `Link.everywhere`."""
        return [await self.ask(*commands)]

    async def ask(self, *commands: Command) -> list[Any]:
        """The reply to each, errors among them.

        Raises:
            StoreUnavailable: there was no answer in time.
        """
        replies = await self._send(commands) if commands else []
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            # What was to be read after it was read before it.
            after = range(unknown[0], len(commands))
            missed = [one for one in after if one in unknown or self._scripts.is_reading(commands[one])]
            again = await self._send(tuple(self._scripts.spelled_out(commands[number]) for number in missed))
            for number, reply in zip(missed, again, strict=True):
                replies[number] = reply
        return replies

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        done: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiting.append(PendingCommands.of(commands, done))
        self._start()
        self._running.add(done)
        try:
            return await done
        finally:
            self._running.discard(done)

    def _start(self) -> None:
        if self._waiting and self._free and not self._is_starting:
            # In the next turn of the loop: what comes meanwhile goes out together.
            self._is_starting = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._is_starting = False
        if not (self._waiting and self._free):
            return
        self._free -= 1
        if self._idle:
            self._idle.pop().ask(self._taken(), self._loop.time() + self._timeout_s)
        else:
            self._go(self._connect(self._taken()))
        if isinstance(self._pool, SentinelConnectionPool) and self._loop.time() - self._looked_at >= _LOOK_S:
            self._looked_at = self._loop.time()
            self._go(self._look(self._pool))

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, pool: SentinelConnectionPool) -> None:
        """Leave a master in whose place the sentinels have put another: it answers until it hears of that."""
        with contextlib.suppress(*_FAULTS):
            async with asyncio.timeout(self._timeout_s):
                master = await pool.get_master_address()  # type: ignore[no-untyped-call]
            known, self._master = self._master, master
            if known not in (None, master):
                self.sent_elsewhere()

    def _taken(self) -> list[PendingCommands]:
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        self._start()
        return batch

    async def _connect(self, batch: Sequence[PendingCommands]) -> None:
        deadline = self._loop.time() + self._timeout_s
        connection = self._spare.pop() if self._spare else self._pool.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout_at(deadline):
                await connection.disconnect(nowait=True)
                await self._pool.ensure_connection(connection)
        except BaseException as error:
            self._spare.append(connection)
            self._free += 1
            if not isinstance(error, _FAULTS):
                self._fail(batch, ConnectionError("the gateway is stopping"))
                raise
            self._fail(batch, error)
            self._start()
        else:
            wire = Wire(connection, self)
            self._good.add(wire)
            wire.ask(batch, deadline)

    def rested(self, wire: Wire) -> None:
        """See `Owner`."""
        if wire not in self._good:
            wire.close(_MOVED_ON)
        elif self._waiting:
            wire.ask(self._taken(), self._loop.time() + self._timeout_s)
        else:
            self._idle.append(wire)
            self._free += 1

    def orphaned(self, wire: Wire, unanswered: Sequence[PendingCommands], error: Exception) -> None:
        """See `Owner`."""
        self._good.discard(wire)
        if wire in self._idle:
            self._idle.remove(wire)
        else:
            self._free += 1
        self._spare.append(wire.connection)
        if isinstance(error, _SILENCE):
            # What took this one away without a word has done so with those that were as quiet.
            for idle in [*self._idle]:
                idle.close(_MOVED_ON)
        if unanswered:  # else it was idle, and those that wait are about to have another
            self._fail(unanswered, error)
        self._start()

    def sent_elsewhere(self) -> None:
        """See `Owner`."""
        self._good.clear()
        for wire in [*self._idle]:
            wire.close(_MOVED_ON)

    def _fail(self, batch: Sequence[PendingCommands], error: BaseException) -> None:
        if isinstance(error, _SILENCE):
            # Those that wait for a connection would each wait for the same silence once more.
            batch = [*batch, *self._waiting]
            self._waiting.clear()
        for request in batch:
            request.fail(unavailable(self._address.shown, error))

    async def aclose(self) -> None:
        """See `Link.aclose`. What was asked for is answered first."""
        while self._running or self._tasks:
            under_way: list[asyncio.Future[Any]] = [*self._running, *self._tasks]
            # `gather` would not let their callbacks run, from Python 3.12 on, once all of them are done.
            await asyncio.wait(under_way)
        # A connection that is slow to close is closed all the same.
        with contextlib.suppress(*_FAULTS):
            await self._pool.aclose()
        if isinstance(self._pool, SentinelConnectionPool):
            with contextlib.suppress(*_FAULTS):
                await self._pool.sentinel_manager.aclose()


OpenNode = Callable[[Address], SingleLink]
