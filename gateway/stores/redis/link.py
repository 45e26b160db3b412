"""Send commands in few round trips, over a bounded number of connections, with a deadline.

redis-py makes the connections, and this module batches the commands. Commands of one turn of the event loop are sent
together, as a command on its own costs several times as much processor time.

The deadline starts when a request is sent. The time before, in which it waits for a free connection, says nothing about
the server. Nothing is retried, except a script that the server has not cached.
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
from gateway.stores.damage import REPAIR, unreadable
from gateway.stores.redis.scripts import Command, Scripts
from gateway.stores.redis.servers import pool_of
from gateway.stores.redis.wire import PendingCommands, Wire

#: Maximum number of requests in one batch, whose replies must all arrive within one deadline.
_BATCH: Final = 128
#: Seconds between two questions to the sentinels: writes to a former master before it notices the change are lost.
_MASTER_CHECK_S: Final = 1.0
_TIMEOUTS: Final = (TimeoutError, exceptions.TimeoutError)
#: errors of connections and commands
_FAULTS: Final = (RedisError, OSError, EOFError)
_SERVER_CHANGED: Final = ConnectionError("another server has to be used")
#: An error of the script itself. After an @, the position is that of a command that the server refused, maybe for its
#: own reasons.
_SCRIPT_FAILED: Final = re.compile(r"(?<!@)user_script:\d+: |WRONGTYPE")
#: the error of a script that cannot read an account
_NO_ACCOUNT: Final = re.compile(r"account (\S+) cannot be read")


class ScriptFailed(StoreDamaged):
    """A script of the gateway failed because of stored data or its arguments; the server works."""


class Link(Protocol):
    """Sends commands. The commands of one call are sent together, in order."""

    async def call(self, *commands: Command) -> list[Any]:
        """Return the reply to each command.

        Raises:
            StoreUnavailable: there was no reply in time, or a reply is an error.
        """
        ...

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """Send all commands to each server, and return each server's replies, including errors.

        Raises:
            StoreUnavailable: one of the servers did not reply in time.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections."""
        ...


def unavailable(shown: str, error: BaseException) -> StoreUnavailable:
    """Return the error for callers. `shown`: the address of the store without its password."""
    code = getattr(error, "status_code", None)
    reason = f"{code or ''} {error}".strip() or type(error).__name__
    reason = "no reply in time" if isinstance(error, _TIMEOUTS) else reason
    account = _NO_ACCOUNT.search(reason)
    if account is not None:
        return ScriptFailed(unreadable(account[1], shown))
    if _SCRIPT_FAILED.search(reason):
        return ScriptFailed(f"What the store {shown} holds cannot be used: {reason.rstrip('.')}. {REPAIR}.")
    return StoreUnavailable(f"The store {shown} cannot be used: {reason.rstrip('.')}. Try again shortly.")


def checked(shown: str, replies: list[Any]) -> list[Any]:
    """Return the replies.

    Raises:
        StoreUnavailable: one of them is an error.
    """
    for reply in replies:
        if isinstance(reply, RedisError):
            raise unavailable(shown, reply) from reply
    return replies


async def call_each(link: Link, commands: Sequence[Command]) -> list[Any]:
    """Return the reply to each command; a StoreDamaged instead of a reply if its data cannot be used.

    Raises:
        StoreUnavailable: there was no reply in time, or a reply is another error.
    """
    try:
        return await link.call(*commands) if commands else []
    except StoreDamaged:
        return await asyncio.gather(*(_reply_or_damage(link, command) for command in commands))


def undamaged(reply: Any) -> Any:
    """Return a reply of `call_each`, or raise the error that it is.

    Raises:
        StoreDamaged: the data of the command cannot be used.
    """
    if isinstance(reply, StoreDamaged):
        raise reply
    return reply


async def _reply_or_damage(link: Link, command: Command) -> Any:
    try:
        [reply] = await link.call(command)
    except StoreDamaged as error:
        return error
    return reply


class SingleLink:
    """A `Link` to one server, or to the master that the sentinels name. Connects when it is first used."""

    def __init__(self, address: Address, scripts: Scripts, *, timeout_s: float, connections: int) -> None:
        self._address = address
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._pool = pool_of(address, timeout_s, connections)
        #: connections that may be used for a batch, whether they are open or not
        self._free = connections
        self._idle: list[Wire] = []
        #: closed connections that are not given back to the pool, but opened again
        self._spare: list[AbstractConnection] = []
        #: connections to the current server: any other connection is closed after its batch
        self._current: set[Wire] = set()
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[PendingCommands] = deque()
        self._is_scheduled = False
        self._running: set[asyncio.Future[list[Any]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        #: address of the master that the sentinels named last
        self._master: object = None
        self._master_checked_at = -math.inf

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`."""
        return checked(self._address.shown, await self.ask(*commands))

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """See `Link.everywhere`."""
        return [await self.ask(*commands)]

    async def ask(self, *commands: Command) -> list[Any]:
        """Return the reply to each command, including errors.

        Raises:
            StoreUnavailable: there was no reply in time.
        """
        replies = await self._send(commands) if commands else []
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            # Reads after the first unknown script have run before that script, so they are sent again as well.
            after = range(unknown[0], len(commands))
            missed = [one for one in after if one in unknown or self._scripts.is_reading(commands[one])]
            again = await self._send(tuple(self._scripts.with_source(commands[number]) for number in missed))
            for number, reply in zip(missed, again, strict=True):
                replies[number] = reply
        return replies

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        done: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiting.append(PendingCommands.of(commands, done))
        self._schedule_batch()
        self._running.add(done)
        try:
            return await done
        finally:
            self._running.discard(done)

    def _schedule_batch(self) -> None:
        if self._waiting and self._free and not self._is_scheduled:
            # In the next turn of the loop, so that requests of this turn are sent together.
            self._is_scheduled = True
            self._loop.call_soon(self._send_batch)

    def _send_batch(self) -> None:
        self._is_scheduled = False
        if not (self._waiting and self._free):
            return
        self._free -= 1
        if self._idle:
            self._idle.pop().ask(self._next_batch(), self._loop.time() + self._timeout_s)
        else:
            self._start_task(self._connect(self._next_batch()))
        now = self._loop.time()
        if isinstance(self._pool, SentinelConnectionPool) and now - self._master_checked_at >= _MASTER_CHECK_S:
            self._master_checked_at = now
            self._start_task(self._check_master(self._pool))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_master(self, pool: SentinelConnectionPool) -> None:
        """Stop using a master that the sentinels have replaced: it still replies until it notices the change."""
        with contextlib.suppress(*_FAULTS):
            async with asyncio.timeout(self._timeout_s):
                master = await pool.get_master_address()  # type: ignore[no-untyped-call]
            known, self._master = self._master, master
            if known not in (None, master):
                self.server_changed()

    def _next_batch(self) -> list[PendingCommands]:
        batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
        self._schedule_batch()
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
            self._schedule_batch()
        else:
            wire = Wire(connection, self)
            self._current.add(wire)
            wire.ask(batch, deadline)

    def batch_done(self, wire: Wire) -> None:
        """See `WireOwner`."""
        if wire not in self._current:
            wire.close(_SERVER_CHANGED)
        elif self._waiting:
            wire.ask(self._next_batch(), self._loop.time() + self._timeout_s)
        else:
            self._idle.append(wire)
            self._free += 1

    def wire_closed(self, wire: Wire, unanswered: Sequence[PendingCommands], error: Exception) -> None:
        """See `WireOwner`."""
        self._current.discard(wire)
        if wire in self._idle:
            self._idle.remove(wire)
        else:
            self._free += 1
        self._spare.append(wire.connection)
        if isinstance(error, _TIMEOUTS):
            # Whatever broke this connection silently has probably broken the idle ones too.
            for idle in [*self._idle]:
                idle.close(_SERVER_CHANGED)
        if unanswered:  # otherwise it was idle, and waiting requests are about to get another connection
            self._fail(unanswered, error)
        self._schedule_batch()

    def server_changed(self) -> None:
        """See `WireOwner`."""
        self._current.clear()
        for wire in [*self._idle]:
            wire.close(_SERVER_CHANGED)

    def _fail(self, batch: Sequence[PendingCommands], error: BaseException) -> None:
        if isinstance(error, _TIMEOUTS):
            # Requests that wait for a connection would each run into the same timeout.
            batch = [*batch, *self._waiting]
            self._waiting.clear()
        for request in batch:
            request.fail(unavailable(self._address.shown, error))

    async def aclose(self) -> None:
        """See `Link.aclose`. Waits for the replies of running requests first."""
        while self._running or self._tasks:
            unfinished: list[asyncio.Future[Any]] = [*self._running, *self._tasks]
            # Not `gather`: from Python 3.12 on it does not let callbacks run if all of them are done.
            await asyncio.wait(unfinished)
        # redis-py drops a connection that fails to close in time as well.
        with contextlib.suppress(*_FAULTS):
            await self._pool.aclose()
        if isinstance(self._pool, SentinelConnectionPool):
            with contextlib.suppress(*_FAULTS):
                await self._pool.sentinel_manager.aclose()


OpenNode = Callable[[Address], SingleLink]
