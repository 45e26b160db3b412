"""Pass a stream on to the client inside the callback that receives its bytes, without waking a task.

To wake a task for each chunk would cost more than all other work on the chunk. Therefore the connection to the provider
calls a `StreamPassage` with each piece: the bytes of one read. It reads the events in the piece and writes them to the
client's connection at once:

    provider's socket -> HttpResponse -> StreamPassage.take -> StreamMeter -> client's socket

Meanwhile the task of the call sleeps in `pass_pieces`. If a step has to wait for something, `take` returns False, which
wakes the task:

| reason to wake the task | what the task does |
|---|---|
| the first piece | checks that it is not JSON; writes a postponed hold |
| the hold is nearly used up, or progress must be saved | asks the store; ends the stream at the budget |
| the client's connection is full | waits until the client has read |
| the end mark was read | settles the call, then sends the end mark |
| there is no connection to write to (WebSocket, tests) | yields each piece to its reader |

The end of the stream, an error and a cancellation wake it too. While the task is awake, further pieces wait in the
response. If they become too many, the provider's socket is paused, and continues when the task sleeps again.

The task reads its pieces with the same functions. A body without a socket, such as one from litellm, has no callback:
the task iterates over it, and calls `take` itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.budget.accounts import Accounts
from gateway.call.state import CallState
from gateway.call.types import DirectOutput
from gateway.core.http.headers import mask
from gateway.dialects.base import StreamMeter
from gateway.stores.leases import Lease

#: A lease that lets nothing pass: it is used until the task has handled the start of the stream.
_CLOSED: Final = Lease("", 0.0, 0, is_over=True)
#: part of every event that is an error
_ERROR: Final = b'"error"'


class StreamPassage:
    """Reads one stream and writes it to the client, with or without the task of the call.

    Args:
        state: the call.
        accounts: finds the lease, which says how much may be passed on before the store is asked.
        meter: reads the events.
        secrets: the gateway's keys, which are masked because an error may repeat one.
    """

    __slots__ = (
        *("_accounts", "_lease", "_response", "_secrets", "_state"),
        *("has_rest", "meter", "output", "unread", "unsent"),
    )

    def __init__(self, state: CallState, accounts: Accounts, meter: StreamMeter, secrets: Sequence[bytes]) -> None:
        self._state = state
        self._response = state.response
        self._accounts = accounts
        self.meter = meter
        self._secrets = secrets
        #: writes to the client without the task
        self.output = DirectOutput()
        #: its `free_until`: up to this number of bytes, pieces are passed on without the task
        self._lease = _CLOSED
        #: a piece for the task, which was not read yet
        self.unread = b""
        #: events for the task, which were read but not passed on yet
        self.unsent = b""
        #: True while the task has not read its piece to the end
        self.has_rest = False

    def open(self) -> None:
        """Let pieces pass without the task from now on, as far as the lease allows."""
        self._lease = self._accounts.lease_of(self._state)
        self._lease.free_up(self._response.bytes_sent)

    def take(self, piece: bytes) -> bool:
        """Read a piece and write it to the client; return False if the task has to continue."""
        lease, response = self._lease, self._response
        come = response.bytes_sent + len(piece)
        if come >= lease.free_until and not self._may_read(come, len(piece)):
            self.unread = piece
            return False
        events = self._read(piece)
        # The meter returns an event when it is complete. So a piece can release more bytes than it has itself.
        is_due = self.meter.ended or response.bytes_sent >= lease.free_until
        if is_due or (events and not self.output.write(events)):
            self.unsent = events
            return False
        return True

    def _may_read(self, come: int, size: int) -> bool:
        """Return whether a piece may be passed on without the task. `come`: bytes of the response with it."""
        self._lease.free_up(come, size)
        return come < self._lease.free_until

    def events_for_task(self) -> Iterator[bytes]:
        """Yield the events that wait for the task. Those that were read together with the end mark stay in `unsent`.

        A piece is read in slices. So a stream that arrives in a single piece can still be ended in the middle.
        """
        if self.unsent and not self.meter.ended:
            events, self.unsent = self.unsent, b""
            yield events
        piece, self.unread = self.unread, b""
        while piece:
            size = self._accounts.bytes_at_once(self._state)
            read, piece = (piece, b"") if size is None else (piece[:size], piece[size:])
            self.has_rest = bool(piece)
            events = self._read(read)
            if self.meter.ended:
                self.unsent += events
            else:
                yield events

    def take_after_end(self, piece: bytes) -> bool:
        """Read a piece after the end mark and pass nothing on, as the call is settled; return True to continue."""
        self.meter.feed(piece)
        return True

    def _read(self, piece: bytes) -> bytes:
        """Read a piece and return the events to pass on."""
        events = self.meter.feed(piece)
        if _ERROR in events:
            events = self.without_keys(events)
        self._response.bytes_sent += len(events)
        return events

    def without_keys(self, events: bytes) -> bytes:
        """Return events with the gateway's keys masked."""
        return mask(events, self._secrets) if _ERROR in events else events
