"""The way to the servers: few round trips, a bounded number of connections, and an end to all waiting.

What is asked for in one turn of the event loop goes out together over one connection. Waiting for a connection is our
own queue and not the server's silence, so time runs from the moment a request is sent. Nothing is sent again by itself,
but for a script that the server says it does not know.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    MasterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from gateway.core.errors import StoreUnavailable
from gateway.core.redis_url import Address
from gateway.stores.redis.scripts import Command, Scripts

#: requests of one batch: their answers must come within the deadline of one
_BATCH: Final = 128
#: a connection that lay unused for so long may have been closed by the server meanwhile
_IDLE_S: Final = 0.5
#: another server has to be asked next time
_ELSEWHERE: Final = (ReadOnlyError, MasterDownError, BusyLoadingError)
_FOREIGN: Final = (RedisError, OSError, EOFError, TimeoutError)


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


def single_link(address: Address, scripts: Scripts, *, timeout_s: float, connections: int) -> SingleLink:
    """The way to one server."""
    return SingleLink(_pool(address, timeout_s), scripts, address.shown, timeout_s, connections)


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "driver_info": None,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }


def _pool(address: Address, timeout_s: float) -> ConnectionPool:
    """Only makes connections for us."""
    options = _options(timeout_s) | {"username": address.username, "password": address.password, "db": address.db}
    if address.kind == "sentinel":
        asked = _options(timeout_s) | ({"ssl": True} if address.tls else {})
        sentinel = Sentinel(address.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
        return SentinelConnectionPool(  # type: ignore[no-untyped-call]
            address.service, sentinel, ssl=address.tls, **options
        )
    [(host, port)] = address.hosts
    kind: dict[str, Any] = {"connection_class": SSLConnection} if address.tls else {}
    return ConnectionPool(host=host, port=port, **kind, **options)


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
        if isinstance(reply, Exception):
            raise unavailable(shown, reply) from reply
    return replies


@dataclass(slots=True, eq=False)
class _Request:
    commands: Sequence[Command]
    done: asyncio.Future[list[Any]]


class SingleLink:
    """To one server, or to the one that the sentinels name."""

    def __init__(self, pool: ConnectionPool, scripts: Scripts, shown: str, timeout_s: float, connections: int) -> None:
        self._pool = pool
        self._scripts = scripts
        self._shown = shown
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: list[tuple[AbstractConnection, float]] = []
        self._free = connections
        self._waiting: deque[_Request] = deque()
        self._flushing = False
        self._exchanges: set[asyncio.Task[None]] = set()

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`."""
        return checked(self._shown, await self.ask(*commands))

    async def ask(self, *commands: Command) -> list[Any]:
        """What the server says to each; an error is said, too.

        Raises:
            StoreUnavailable: there was no answer in time.
        """
        request = _Request(commands, self._loop.create_future())
        self._waiting.append(request)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return await request.done

    def _flush(self) -> None:
        self._flushing = False
        while self._waiting and self._free:
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            self._free -= 1
            task = self._loop.create_task(self._exchange(batch))
            self._exchanges.add(task)
            task.add_done_callback(self._exchanges.discard)

    async def _exchange(self, batch: list[_Request]) -> None:
        connection, used_at = self._idle.pop() if self._idle else (_made(self._pool), -math.inf)
        commands = [command for request in batch for command in request.commands]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect(connection, used_at)
                replies = await self._ask(connection, commands)
        except _FOREIGN as error:
            await connection.disconnect(nowait=True)
            # Those behind have waited for the same silence: each of them would wait as long once more.
            behind, self._waiting = self._waiting, deque()
            self._fail([*batch, *behind], unavailable(self._shown, error))
        except BaseException as error:
            await connection.disconnect(nowait=True)
            self._fail(batch, unavailable(self._shown, error))
            raise
        else:
            await self._keep(connection, replies)
            self._answer(batch, replies)
        finally:
            self._free += 1
            self._flush()

    async def _connect(self, connection: AbstractConnection, used_at: float) -> None:
        if (
            self._loop.time() - used_at > _IDLE_S
            and connection.is_connected
            and await connection.can_read_destructive()
        ):
            await connection.disconnect(nowait=True)
        await connection.connect()  # type: ignore[no-untyped-call]

    async def _ask(self, connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
        replies = await _exchange(connection, commands)
        unknown = [number for number, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            again = await _exchange(connection, [self._scripts.spelled_out(commands[number]) for number in unknown])
            for number, reply in zip(unknown, again, strict=True):
                replies[number] = reply
        return replies

    async def _keep(self, connection: AbstractConnection, replies: Iterable[Any]) -> None:
        if any(isinstance(reply, _ELSEWHERE) for reply in replies):
            await connection.disconnect(nowait=True)
            for other, _ in self._idle:
                await other.disconnect(nowait=True)
        self._idle.append((connection, self._loop.time()))

    def _answer(self, batch: Iterable[_Request], replies: Sequence[Any]) -> None:
        start = 0
        for request in batch:
            end = start + len(request.commands)
            if not request.done.done():
                request.done.set_result(list(replies[start:end]))
            start = end

    def _fail(self, batch: Iterable[_Request], error: StoreUnavailable) -> None:
        for request in batch:
            if not request.done.done():
                request.done.set_exception(error)

    async def aclose(self) -> None:
        """See `Link.aclose`. What was asked for is answered first."""
        while self._exchanges or self._waiting:
            self._flush()
            await asyncio.gather(*self._exchanges, return_exceptions=True)
        for connection, _ in self._idle:
            await connection.disconnect()
        await self._pool.aclose()
        if isinstance(self._pool, SentinelConnectionPool):
            for sentinel in self._pool.sentinel_manager.sentinels:
                await sentinel.aclose()


def _made(pool: ConnectionPool) -> AbstractConnection:
    made: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    return made


async def _exchange(connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
    await connection.send_packed_command(b"".join(map(pack_command, commands)), check_health=False)
    replies: list[Any] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response(disable_decoding=True, timeout=math.inf))
        except ResponseError as error:
            replies.append(error)
    return replies
