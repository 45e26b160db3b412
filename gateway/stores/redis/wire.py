"""Send a batch of commands over one connection, and read the replies in order.

redis-py opens the connection: TLS, password, database. After that, commands are written directly to its transport, and
replies are read directly from it. A task, a stream or a lock for each exchange would cost more than the commands.
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

#: replies that mean that another server may have to be used
_SERVER_CHANGED: Final = (ReadOnlyError, MasterDownError)
_ENDED: Final = "Connection closed by server"
_UNEXPECTED: Final = "an unexpected reply"
#: no complete reply yet
_MORE: Final = object()


@dataclass(slots=True, eq=False)
class PendingCommands:
    """Encoded commands, their number, and the future that waits for all replies."""

    encoded: bytes
    count: int
    done: asyncio.Future[list[Any]]

    @classmethod
    def of(cls, commands: Sequence[Command], done: asyncio.Future[list[Any]]) -> PendingCommands:
        """Encode commands at once, so that commands that cannot be encoded fail for their own caller only."""
        return cls(b"".join(map(pack_command, commands)), len(commands), done)  # type: ignore[arg-type]  # its stub says: one word

    def answer(self, replies: list[Any]) -> None:
        """Return the replies to the caller, if it still waits."""
        if not self.done.done():
            self.done.set_result(replies)

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller instead of replies, if it still waits."""
        if not self.done.done():
            self.done.set_exception(error)


class WireOwner(Protocol):
    """The owner of a `Wire`, which is notified of its events."""

    def batch_done(self, wire: Wire) -> None:
        """Take back a connection whose batch has all its replies; it may get the next batch."""

    def wire_closed(self, wire: Wire, unanswered: Sequence[PendingCommands], error: Exception) -> None:
        """Drop a closed connection; these requests have no reply."""

    def server_changed(self) -> None:
        """Stop using connections to a server that replied that it is not the master."""


class Wire(asyncio.Protocol):
    """One connection, see the module. `connection` is open, and only this object reads from it."""

    def __init__(self, connection: AbstractConnection, owner: WireOwner) -> None:
        self.connection = connection
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(InvalidResponse, DefaultParser.parse_error, notEnoughData=_MORE)
        self._batch: Sequence[PendingCommands] = ()
        #: requests of the batch with all replies, and the replies so far to the next request
        self._answered = 0
        self._replies: list[Any] = []
        #: The deadline of the batch (loop time), and one timer for many batches: setting one for each batch costs more.
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        # redis-py keeps its transport only there. It waits for its own reader to notice the end, see `connection_lost`.
        self._transport: asyncio.Transport = connection._writer.transport  # type: ignore[union-attr, assignment]  # noqa: SLF001
        self._end_of_stream: Callable[[Exception | None], None] = self._transport.get_protocol().connection_lost
        self._transport.set_protocol(self)

    def ask(self, batch: Sequence[PendingCommands], deadline: float) -> None:
        """Send a batch while no other one is running. All replies have to arrive by `deadline` (loop time)."""
        self._batch, self._answered = batch, 0
        self._deadline = deadline
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_deadline, deadline)
        self._transport.write(b"".join([request.encoded for request in batch]))

    def _check_deadline(self, deadline: float) -> None:
        self._timer = None
        if self._answered == len(self._batch):
            return
        if deadline == self._deadline:
            self.close(TimeoutError())
        else:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline, self._deadline)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._answered == len(self._batch):
            self.close(InvalidResponse(_UNEXPECTED))
            return
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets(False)) is not _MORE:  # noqa: FBT003  # by place alone: do not decode
                self._add_reply(reply)
        except InvalidResponse as error:
            self.close(error)

    def _add_reply(self, reply: Any) -> None:
        if isinstance(reply, _SERVER_CHANGED):
            self._owner.server_changed()
        request = self._batch[self._answered]
        self._replies.append(reply)
        if len(self._replies) == request.count:
            request.answer(self._replies)
            self._replies = []
            self._answered += 1
            if self._answered == len(self._batch):
                self._finish_batch()

    def _finish_batch(self) -> None:
        if self._reader.has_data():
            raise InvalidResponse(_UNEXPECTED)
        self._owner.batch_done(self)

    def eof_received(self) -> None:
        """See `asyncio.Protocol`."""
        self.close(ConnectionError(_ENDED))

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_of_stream(exc)
        self.close(exc or ConnectionError(_ENDED))

    def close(self, error: Exception) -> None:
        """Close the connection, once, and notify the owner."""
        if self._is_closed:
            return
        self._is_closed = True
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        self._owner.wire_closed(self, self._batch[self._answered :], error)
