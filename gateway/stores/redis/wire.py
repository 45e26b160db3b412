"""Send a batch of commands over one connection, and read the replies in order.

redis-py makes the connection: TLS, password, database. From then on bytes go straight to its transport and replies come
straight from it, without a task, a stream or a lock of their own for each exchange, which cost more than the commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hiredis import Reader, pack_command
from redis.asyncio.connection import AbstractConnection, DefaultParser
from redis.exceptions import InvalidResponse, MasterDownError, ReadOnlyError

from gateway.stores.redis.scripts import Command

#: replies after which another server may be the one to ask
_ELSEWHERE: Final = (ReadOnlyError, MasterDownError)
_ENDED: Final = "Connection closed by server"
_UNASKED: Final = "an answer that nobody asked for"
#: no whole reply yet
_MORE: Final = object()


@dataclass(slots=True, eq=False)
class PendingCommands:
    """Commands as they are sent, how many they are, and who waits for the replies to all of them."""

    compressed: bytes
    count: int
    done: asyncio.Future[list[Any]]

    @classmethod
    def of(cls, commands: Sequence[Command], done: asyncio.Future[list[Any]]) -> PendingCommands:
        """These, packed at once: what cannot be packed fails for whoever asks for it, and for nobody else."""
        return cls(b"".join(map(pack_command, commands)), len(commands), done)  # type: ignore[arg-type]  # its stub says: one word

    def answer(self, replies: list[Any]) -> None:
        """Give the replies to whoever still waits."""
        if not self.done.done():
            self.done.set_result(replies)

    def fail(self, error: Exception) -> None:
        """Say that there are none."""
        if not self.done.done():
            self.done.set_exception(error)


class Owner(Protocol):
    """Who asks, and hears of what becomes of it."""

    def rested(self, wire: Wire) -> None:
        """All was answered. There may be more to ask."""

    def orphaned(self, wire: Wire, unanswered: Sequence[PendingCommands], error: Exception) -> None:
        """The connection is gone, and these have no reply."""

    def sent_elsewhere(self) -> None:
        """The server says that another one is to be asked."""


class Wire(asyncio.Protocol):
    """See the module. `connection` is connected, and nobody else reads from it."""

    def __init__(self, connection: AbstractConnection, owner: Owner) -> None:
        self.connection = connection
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(InvalidResponse, DefaultParser.parse_error, notEnoughData=_MORE)
        self._asked: Sequence[PendingCommands] = ()
        #: requests that are answered, and the replies so far to the one behind them
        self._answered = 0
        self._replies: list[Any] = []
        #: by when (loop time) all must be answered, and the timer that looks: to set one for each batch costs more
        self._deadline = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._is_over = False
        # redis-py has its transport only there. Its own reader has to hear of the end, which redis-py waits for.
        self._transport: asyncio.Transport = connection._writer.transport  # type: ignore[union-attr, assignment]  # noqa: SLF001
        self._end_of_stream: Callable[[Exception | None], None] = self._transport.get_protocol().connection_lost
        self._transport.set_protocol(self)

    def ask(self, batch: Sequence[PendingCommands], deadline: float) -> None:
        """Send these; nothing else is under way. All must be answered by this time of the loop."""
        self._asked, self._answered = batch, 0
        self._deadline = deadline
        if self._watch is None:
            self._watch = self._loop.call_at(deadline, self._look, deadline)
        self._transport.write(b"".join([request.compressed for request in batch]))

    def _look(self, deadline: float) -> None:
        self._watch = None
        if self._answered == len(self._asked):
            return
        if deadline == self._deadline:
            self.close(TimeoutError())
        else:
            self._watch = self._loop.call_at(self._deadline, self._look, self._deadline)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._answered == len(self._asked):
            self.close(InvalidResponse(_UNASKED))
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets(False)) is not _MORE:  # noqa: FBT003  # by place alone: do not decode
                self._take(reply)
        except InvalidResponse as error:
            self.close(error)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, _ELSEWHERE):
            self._owner.sent_elsewhere()
        request = self._asked[self._answered]
        self._replies.append(reply)
        if len(self._replies) == request.count:
            request.answer(self._replies)
            self._replies = []
            self._answered += 1
            if self._answered == len(self._asked):
                self._rest()

    def _rest(self) -> None:
        if self._reader.has_data():
            raise InvalidResponse(_UNASKED)
        self._owner.rested(self)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        self.close(ConnectionError(_ENDED))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_of_stream(exc)
        self.close(exc or ConnectionError(_ENDED))

    def close(self, error: Exception) -> None:
        """Close it, once, and tell the owner why."""
        if self._is_over:
            return
        self._is_over = True
        self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        self._owner.orphaned(self, self._asked[self._answered :], error)
