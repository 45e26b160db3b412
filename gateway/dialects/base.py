"""Define the interface of a wire format: `Dialect`, `Call`, `ParsedResponse` and `StreamMeter`.

The received body is never rebuilt. It is decoded one level deep, and written back as its own bytes with single
top-level fields replaced. Unknown fields are therefore kept.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from gateway.core.conversation.message import encode
from gateway.core.errors import GatewayError
from gateway.core.http.headers import GATEWAY_PREFIXES
from gateway.core.http.sse import EventBuffer, data_of_events, event_data, split_events, without_comments
from gateway.core.values import dataclass
from gateway.dialects.fields import Fields, decode_response, write_fields
from gateway.dialects.reported import ReportedUsage

#: Bytes after the end mark that are kept until `close`. Anything longer is not part of a response.
_HELD_BYTES: Final = 64 * 1024
#: prefix of the comments in which another gateway (the upstream of this one) reports its own session totals
_OUR_COMMENT: Final = b": x-"
#: bytes of events that may wait to be read
_UNREAD_BYTES: Final = 64 * 1024
#: tool calls of one response whose names are kept
MAX_TOOLS: Final = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One client request as its dialect reads it.

    Attributes:
        fields: the top level of the body, with the values as raw bytes. Empty if the body is not a JSON object.
        usage_asked: the client itself asked for usage in the stream.
        model_at: start and end of the model name in the body of a form.
    """

    operation: str
    model: str | None
    stream: bool
    body: bytes
    fields: Fields
    usage_asked: bool = False
    model_at: tuple[int, int] | None = None

    def with_model(self, model: str, changes: Mapping[str, object]) -> bytes:
        """Return the body with this model and these top-level fields; the original bytes if nothing changes."""
        if self.model_at is not None and model != self.model:
            start, stop = self.model_at
            return b"".join((self.body[:start], model.encode(), self.body[stop:]))
        if self.model is not None and model != self.model:
            changes = {**changes, "model": model}
        return write_fields(self.fields, changes) if changes else self.body


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """A response as its dialect reads it, streamed or not.

    Attributes:
        tools: names of the called tools.
        tool_sets: for each called tool, the MCP server or namespace that it belongs to, if the response names one.
        output_estimate: estimated tokens of the delivered text.
        id: the id under which the provider may store the response, if the format has stored responses.
        is_counted: False if it delivered audio or images whose tokens the gateway does not count.
        refusal: category of the refusal that ended the response; None if the response names none.
        fallback_refusals: for each model that refused before another model continued: the category of its refusal, in
            order.
    """

    usage: ReportedUsage | None = None
    model: str | None = None
    finish_reason: str | None = None
    service_tier: str | None = None
    tools: tuple[str, ...] = ()
    tool_sets: tuple[str | None, ...] = ()
    output_estimate: int = 0
    error: bool = False
    id: str | None = None
    is_counted: bool = True
    refusal: str | None = None
    fallback_refusals: tuple[str | None, ...] = ()


class Verdict(enum.Enum):
    """Treatment of one event of a stream."""

    PASS = enum.auto()
    DROP = enum.auto()  # the gateway asked for this event, not the client
    LAST = enum.auto()  # the end mark of the stream: held back until the call is settled


class EventReader(Protocol):
    """Read the events of one stream in one wire format."""

    def plain_prefix(self, region: bytes) -> int:
        """Return the length of the first events that certainly pass, without parsing them. They may be read later."""
        ...

    def read(self, data: bytes) -> Verdict:
        """Read the data of one event; never raises."""
        ...

    def read_all(self, events: Sequence[bytes]) -> None:
        """Read the data of events that certainly pass; never raises. A reader may decode many at once."""
        for data in events:
            self.read(data)

    def answer(self) -> ParsedResponse:
        """Return what was read so far."""
        ...

    def next_number(self) -> int:
        """Return the number of the next event; 0 if events have no numbers."""
        ...

    def cut_short(self) -> bytes:
        """Return events that end the stream now as if the output limit was reached; empty if the format has none."""
        ...

    def failed(self, fault: GatewayError, number: int) -> bytes:
        """Return the events that the format sends after a stream error. `number`: the number of the first of them."""
        del fault, number
        return b""


class StreamMeter:
    """Read a stream while it passes through. It returns the received bytes, without the dropped events.

    Comments in which another gateway reports its own sessions are dropped too, like the headers with that content.

    The end mark is held back, so that the client sees the end only after the settlement. Events that certainly pass
    are read later, many at once, so the client gets each chunk sooner. Reading a hundred events at once takes a third
    of the time that they take one by one.
    """

    __slots__ = ("_buffer", "_held", "_is_silent", "_reader", "_response", "_rest", "_unread", "ended")

    def __init__(self, reader: EventReader) -> None:
        self.ended = False
        self._reader = reader
        self._buffer = EventBuffer()
        self._held = b""
        #: True until an event with data was read
        self._is_silent = True
        #: the incomplete last event, without its blank line: as received, and as passed on
        self._rest = (b"", b"")
        #: The response, set when the end mark was read and usage was reported before it. Later events cannot change it.
        self._response: ParsedResponse | None = None
        #: events that pass and are read later
        self._unread = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on now."""
        region = self._buffer.feed(chunk)
        return self._pass(region) if region else region

    def _pass(self, region: bytes) -> bytes:
        if _OUR_COMMENT in region:
            region = without_comments(region, GATEWAY_PREFIXES)
        if self.ended:
            for block in split_events(region):
                self._hold(block)
            return b""
        plain = self._reader.plain_prefix(region)
        if plain:
            self._unread += region[:plain]
            if len(self._unread) > _UNREAD_BYTES:
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
            self._response = _if_complete(self._reader.answer())
        return verdict is Verdict.PASS

    def _hold(self, block: bytes) -> None:
        """Keep an event after the end mark; some providers report usage only there."""
        if self._read(block) is not Verdict.DROP and len(self._held) < _HELD_BYTES:
            self._held += block

    def _catch_up(self) -> None:
        if self._unread:
            events = data_of_events(bytes(self._unread))
            self._unread.clear()
            self._is_silent = self._is_silent and not events
            self._reader.read_all(events)

    def _read(self, block: bytes) -> Verdict:
        data = event_data(block)
        self._is_silent = self._is_silent and not data
        return self._reader.read(data) if data else Verdict.PASS

    def lacks_end(self) -> bool:
        """Return True if a finished stream is incomplete: it had no event, or a response began and has no end.

        Servers mark the end in different ways: a finish reason, an end mark, an error, or the usage, which is only
        known at the end. If nothing in the stream could be read, it may have an unknown end mark: return False.
        """
        self._read_rest()
        response = self.response()
        if self.ended or response.error or response.finish_reason is not None or _if_complete(response) is not None:
            return False
        has_begun = response.output_estimate or response.tools or response.id is not None or response.usage is not None
        return self._is_silent or bool(has_begun)

    def _read_rest(self) -> None:
        if rest := self._buffer.rest():
            self._rest = rest, self._pass(rest)

    def close(self) -> bytes:
        """Return the end of the stream: the held end mark, if there was one, and an incomplete last event."""
        self._read_rest()
        (_, rest), self._rest = self._rest, (b"", b"")
        held, self._held = self._held, b""
        return held + rest

    def close_broken(self) -> bytes:
        """Return the end of a stream that broke off, so that an error event can follow.

        If only the blank line of the last event is missing, it is added. A partial event is dropped, because the
        client would join it with the next one.
        """
        self._read_rest()
        (rest, passed), self._rest = self._rest, (b"", b"")
        is_whole = isinstance(decode_response(event_data(rest)), dict)
        held, self._held = self._held, b""
        return b"".join([block.rstrip(b"\r\n") + b"\n\n" for block in (held, passed if is_whole else b"") if block])

    def response(self) -> ParsedResponse:
        """Return what was read so far."""
        if self._response is not None:
            return self._response
        self._catch_up()
        return self._reader.answer()

    def next_number(self) -> int:
        """Return the number of the next event. An incomplete event is not counted."""
        self._catch_up()
        return self._reader.next_number()

    def failure(self, dialect: Dialect, fault: GatewayError, request_id: str) -> bytes:
        """Return the events that end the stream now with an error."""
        number = self.next_number()
        return dialect.error_event(fault, request_id, number) + self._reader.failed(fault, number + 1)

    def end_at_limit(self) -> bytes:
        """Return the events that end the stream now at the output limit. An incomplete event is dropped."""
        self._catch_up()
        return self._reader.cut_short()


def _if_complete(response: ParsedResponse) -> ParsedResponse | None:
    """Return the response if its output usage was reported, else None."""
    return response if response.usage is not None and response.usage.output_tokens is not None else None


def length_before(region: bytes, marks: Iterable[bytes]) -> int:
    """Return the length of the events before the first of these marks; 0 if lines may end with CR."""
    if b"\r" in region:
        return 0
    for mark in marks:
        region, _, _ = region.partition(mark)
    last = region.rfind(b"\n\n")
    return last + 2 if last >= 0 else 0


def named_event(event: Mapping[str, object]) -> bytes:
    """Return an event in the form of the APIs that name each event by its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode(event))


class Dialect(Protocol):
    """One wire format. Pure: no method waits, and only `read` raises."""

    name: str

    def read(self, body: bytes) -> Call:
        """Read a request body.

        Raises:
            InvalidRequest: the body is not a request of this format.
        """
        ...

    def usage_option(self, call: Call) -> Mapping[str, object]:
        """Return the fields to set so that a stream reports its usage; empty if not needed or not streamed."""
        ...

    def opening(self, call: Call) -> list[str] | None:
        """Return the system texts and the first user item, for a derived session id; None if the format has none."""
        ...

    def input_text(self, call: Call) -> Iterator[str]:
        """Yield the texts of the request, for an estimate if the provider reports no usage."""
        ...

    def answer(self, body: bytes) -> ParsedResponse:
        """Read a whole response; never raises."""
        ...

    def reader(self, call: Call, *, drop_usage: bool, input_tokens: int | None = None) -> EventReader:
        """Return a reader for the events of one stream.

        `drop_usage`: the client did not ask for the usage chunk. `input_tokens`: tokens of the sent request, if they
        were counted; used if the gateway ends the stream before the provider has reported the input tokens.
        """
        ...

    def error(self, fault: GatewayError, request_id: str) -> bytes:
        """Return the error body in this format, with the details of the error next to the message."""
        ...

    def error_event(self, fault: GatewayError, request_id: str, number: int = 0) -> bytes:
        """Return the error as the last event of a started stream. `number`: its number, if events have numbers."""
        ...
