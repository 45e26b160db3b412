"""Define the interface of a wire format: `Dialect`, `Call`, `ParsedResponse` and `StreamMeter`.

The body as received stays the truth. It is decoded one level deep; what is written back are its own bytes, with single
top-level fields replaced. Fields nobody here knows survive.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from gateway.core.conversation.message import encode
from gateway.core.errors import GatewayError
from gateway.core.http.headers import OUR_NAMES
from gateway.core.http.sse import EventBuffer, data_of_events, event_data, split_events, without_comments
from gateway.core.values import dataclass
from gateway.dialects.fields import Fields, decode_answer, write_fields
from gateway.dialects.reported import ReportedUsage

#: bytes behind the end mark that are kept until `close`; more is no part of an answer
_HELD_BYTES: Final = 64 * 1024
#: how the totals begin that a gateway behind this one writes of its own sessions
_OUR_COMMENT: Final = b": x-"
#: bytes of events that may wait to be read
_UNREAD_BYTES: Final = 64 * 1024
#: tool calls of one answer that are remembered by name
MAX_TOOLS: Final = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One client request as its dialect reads it.

    `fields`: the top level of the body, values as raw bytes; empty where the body is no JSON object.
    `usage_asked`: the client itself asked for usage in the stream. `model_at`: where the model's name stands in a form.
    """

    operation: str
    model: str | None
    stream: bool
    body: bytes
    fields: Fields
    usage_asked: bool = False
    model_at: tuple[int, int] | None = None

    def written(self, model: str, changes: Mapping[str, object]) -> bytes:
        """The body with this model and these top-level fields; its own bytes where nothing changes."""
        if self.model_at is not None and model != self.model:
            start, stop = self.model_at
            return b"".join((self.body[:start], model.encode(), self.body[stop:]))
        if self.model is not None and model != self.model:
            changes = {**changes, "model": model}
        return write_fields(self.fields, changes) if changes else self.body


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """What a dialect reads from an answer, streamed or not. `output_estimate`: tokens of the delivered text.

    `id`: under which its provider may keep it, where that is so in the format.
    `is_seen`: False where it delivered sound or pictures that nobody here weighs.
    `sets`: of each of the tools the MCP server or namespace that it is one of, where the answer says so.
    `refusal`: the category of the refusal that it ended with; None where it names none.
    `declined`: the same of each model that refused before another one went on, in order.
    """

    usage: ReportedUsage | None = None
    model: str | None = None
    finish_reason: str | None = None
    service_tier: str | None = None
    tools: tuple[str, ...] = ()
    sets: tuple[str | None, ...] = ()
    output_estimate: int = 0
    error: bool = False
    id: str | None = None
    is_seen: bool = True
    refusal: str | None = None
    declined: tuple[str | None, ...] = ()


class Verdict(enum.Enum):
    """What becomes of one event of a stream."""

    PASS = enum.auto()
    DROP = enum.auto()  # asked for by the gateway, not by the client
    LAST = enum.auto()  # the stream's own end mark: held back until the call is settled


class EventReader(Protocol):
    """Reads the events of one stream in one wire format."""

    def plain_prefix(self, region: bytes) -> int:
        """Length of the events at the beginning that surely pass and may be read later; a glance, not a reading."""
        ...

    def read(self, data: bytes) -> Verdict:
        """Take the data of one event; never raises."""
        ...

    def read_all(self, events: Sequence[bytes]) -> None:
        """Take the data of events that surely pass; never raises. A reader may take many in one go."""
        for data in events:
            self.read(data)

    def answer(self) -> ParsedResponse:
        """All that was read so far."""
        ...

    def next_number(self) -> int:
        """The number of the next event, where events have numbers."""
        ...

    def cut_short(self) -> bytes:
        """Events that end the stream here as one whose length limit was reached; empty where there are none."""
        ...

    def failed(self, fault: GatewayError, number: int) -> bytes:
        """Return the events that a format has after the error of a stream; `number`: of the first, if it has one."""
        del fault, number
        return b""


class StreamMeter:
    """Reads a stream on its way through. The bytes it returns are those that came in, less the dropped events.

    Dropped as well is what another gateway says of its own sessions in comments, as its headers are.

    The end mark is held back, so that what the client takes for the end comes after the settlement. Events that surely
    pass are read later, many at once: a piece that waits for nothing reaches the client sooner, and reading a hundred
    events in one go costs a third of reading them one by one between other calls.
    """

    __slots__ = ("_answer", "_buffer", "_held", "_is_silent", "_reader", "_rest", "_unread", "_unread_bytes", "ended")

    def __init__(self, reader: EventReader) -> None:
        self.ended = False
        self._reader = reader
        self._buffer = EventBuffer()
        self._held = b""
        #: no event has said anything yet
        self._is_silent = True
        #: what no blank line closed, as it came and as it is passed on
        self._rest = (b"", b"")
        #: the answer, once the end mark was read and usage was reported before it: what follows changes nothing
        self._answer: ParsedResponse | None = None
        self._unread: list[bytes] = []
        self._unread_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on now."""
        region = self._buffer.feed(chunk)
        return self._pass(region) if region else region

    def _pass(self, region: bytes) -> bytes:
        if _OUR_COMMENT in region:
            region = without_comments(region, OUR_NAMES)
        if self.ended:
            for block in split_events(region):
                self._hold(block)
            return b""
        plain = self._reader.plain_prefix(region)
        if plain:
            self._unread.append(region[:plain])
            self._unread_bytes += plain
            if self._unread_bytes > _UNREAD_BYTES:
                self._catch_up()
            if plain == len(region):
                return region
        self._catch_up()
        passed = [block for block in split_events(region[plain:]) if self._passes(block)]
        return b"".join([region[:plain], *passed])

    def _passes(self, block: bytes) -> bool:
        if self.ended:
            self._hold(block)
            return False
        verdict = self._read(block)
        if verdict is Verdict.LAST:
            self.ended = True
            self._held = block
            self._answer = _if_complete(self._reader.answer())
        return verdict is Verdict.PASS

    def _hold(self, block: bytes) -> None:
        """Keep what comes behind the end mark; some providers report usage only there."""
        if self._read(block) is not Verdict.DROP and len(self._held) < _HELD_BYTES:
            self._held += block

    def _catch_up(self) -> None:
        if self._unread:
            region, self._unread, self._unread_bytes = b"".join(self._unread), [], 0
            events = data_of_events(region)
            self._is_silent = self._is_silent and not events
            self._reader.read_all(events)

    def _read(self, block: bytes) -> Verdict:
        data = event_data(block)
        self._is_silent = self._is_silent and not data
        return self._reader.read(data) if data else Verdict.PASS

    def lacks_end(self) -> bool:
        """Whether a stream that has come to its end said nothing, or began an answer and said not that it ended.

        Servers say so in many ways: a reason, an end mark, an error, or the usage, which is known at the end only. A
        stream of which nothing could be read may have a way of its own.
        """
        self._read_rest()
        answer = self.answer()
        if self.ended or answer.error or answer.finish_reason is not None or _if_complete(answer) is not None:
            return False
        has_begun = answer.output_estimate or answer.tools or answer.id is not None or answer.usage is not None
        return self._is_silent or bool(has_begun)

    def _read_rest(self) -> None:
        if rest := self._buffer.rest():
            self._rest = rest, self._pass(rest)

    def close(self) -> bytes:
        """The end of the stream: the end mark if there was one, and what no blank line closed."""
        self._read_rest()
        (_, rest), self._rest = self._rest, (b"", b"")
        held, self._held = self._held, b""
        return held + rest

    def broken_off(self) -> bytes:
        """The same where the stream broke off; the event that tells so can follow.

        An event that lacks nothing but its blank line gets one. Half of one would be taken for a part of the next.
        """
        self._read_rest()
        (rest, passed), self._rest = self._rest, (b"", b"")
        is_whole = isinstance(decode_answer(event_data(rest)), dict)
        held, self._held = self._held, b""
        return b"".join([block.rstrip(b"\r\n") + b"\n\n" for block in (held, passed if is_whole else b"") if block])

    def answer(self) -> ParsedResponse:
        """All that was read so far."""
        if self._answer is not None:
            return self._answer
        self._catch_up()
        return self._reader.answer()

    def next_number(self) -> int:
        """See `EventReader.next_number`. An event that is not whole has none."""
        self._catch_up()
        return self._reader.next_number()

    def failure(self, dialect: Dialect, fault: GatewayError, request_id: str) -> bytes:
        """Return the events that end the stream here with an error."""
        number = self.next_number()
        return dialect.error_event(fault, request_id, number) + self._reader.failed(fault, number + 1)

    def cut_short(self) -> bytes:
        """See `EventReader.cut_short`. What had come of an event that is not whole is left out."""
        self._catch_up()
        return self._reader.cut_short()


def _if_complete(answer: ParsedResponse) -> ParsedResponse | None:
    """An answer whose usage was reported, else None."""
    return answer if answer.usage is not None and answer.usage.output_tokens is not None else None


def plain_before(region: bytes, marks: Iterable[bytes]) -> int:
    """Length of the events that come before the first of these marks; 0 where lines may end in another way."""
    if b"\r" in region:
        return 0
    for mark in marks:
        region, _, _ = region.partition(mark)
    last = region.rfind(b"\n\n")
    return last + 2 if last >= 0 else 0


def named_event(event: Mapping[str, object]) -> bytes:
    """An event as the APIs write it that name each one by its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode(event))


class Dialect(Protocol):
    """One wire format. Pure: nothing here waits, and only `read` raises."""

    name: str

    def read(self, body: bytes) -> Call:
        """Read a request body.

        Raises:
            InvalidRequest: the body is not a request of this format.
        """
        ...

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """The fields to set so that a stream reports its usage; none where it does so anyway, or is no stream."""
        ...

    def opening(self, call: Call) -> list[str] | None:
        """System texts and the first user item, for a derived session id; None where the format has none."""
        ...

    def input_text(self, call: Call) -> Iterator[str]:
        """Texts of the request, for an estimate where the provider reports nothing."""
        ...

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole answer; never raises."""
        ...

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """A reader for the events of one stream.

        `drop_usage`: the usage chunk was not asked for by the client; `input_tokens`: what was sent, where it was
        weighed, should the stream be ended before it says so.
        """
        ...

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """The error body in this format; details of the fault stand beside the message."""
        ...

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """The error as the last event of a stream that has begun; `number`: of the event, where events have one."""
        ...
