"""What every wire format offers, and the values it gives: `Dialect`, `Call`, `Answer`, `StreamMeter`.

The body as received stays the truth. It is decoded one level deep; what is written back are its own bytes, with single
top-level fields replaced. Fields nobody here knows survive.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.identity import text_of
from gateway.core.sse import EventBuffer, data_of_events, event_data, split_events
from gateway.dialects.reported import Reported

Fields = Mapping[str, msgspec.Raw]

_FIELDS_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS_DECODER: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ANY_DECODER: Final = msgspec.json.Decoder()
#: what may follow the end mark before `close`; more is nobody's answer
_HELD_BYTES: Final = 64 * 1024
#: events of a stream that may wait to be read
_UNREAD_BYTES: Final = 64 * 1024
#: tool calls of one answer that are remembered by name
MAX_TOOLS: Final = 256
_SPACE: Final = re.compile(rb"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Call:
    """One client request as its dialect reads it.

    `fields`: the top level of the body, values as raw bytes; empty where the body is no JSON object.
    `usage_asked`: the client itself asked for usage in the stream.
    """

    operation: str
    model: str | None
    stream: bool
    body: bytes
    fields: Fields
    usage_asked: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a dialect reads from an answer, streamed or not. `output_estimate`: tokens of the delivered text."""

    usage: Reported | None = None
    model: str | None = None
    finish_reason: str | None = None
    service_tier: str | None = None
    tools: tuple[str, ...] = ()
    output_estimate: int = 0
    error: bool = False


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

    def answer(self) -> Answer:
        """All that was read so far."""
        ...


class StreamMeter:
    """Reads a stream on its way through. The bytes it returns are those that came in, less the dropped events.

    The end mark is held back, so that what the client takes for the end comes after the settlement. Events that surely
    pass are read later, many at once: a piece that waits for nothing reaches the client sooner, and reading a hundred
    events in one go costs a third of reading them one by one between other calls.
    """

    __slots__ = ("_buffer", "_held", "_reader", "_unread", "_unread_bytes", "ended")

    def __init__(self, reader: EventReader) -> None:
        self.ended = False
        self._reader = reader
        self._buffer = EventBuffer()
        self._held = b""
        self._unread: list[bytes] = []
        self._unread_bytes = 0

    def feed(self, chunk: bytes) -> bytes:
        """The bytes to pass on now."""
        region = self._buffer.feed(chunk)
        return self._pass(region) if region else region

    def _pass(self, region: bytes) -> bytes:
        if self.ended:
            self._hold(region)
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
        return verdict is Verdict.PASS

    def _hold(self, after_end: bytes) -> None:
        if len(self._held) < _HELD_BYTES:
            self._held += after_end

    def _catch_up(self) -> None:
        unread, self._unread, self._unread_bytes = self._unread, [], 0
        for region in unread:
            for data in data_of_events(region):
                self._reader.read(data)

    def _read(self, block: bytes) -> Verdict:
        data = event_data(block)
        return self._reader.read(data) if data else Verdict.PASS

    def close(self) -> bytes:
        """The end of the stream: the end mark if there was one, and what no blank line closed."""
        rest = self._pass(self._buffer.rest())
        held, self._held = self._held, b""
        return held + rest

    def answer(self) -> Answer:
        """All that was read so far."""
        self._catch_up()
        return self._reader.answer()


class Dialect(Protocol):
    """One wire format. Pure: nothing here waits, and only `read` raises."""

    name: str

    def read(self, body: bytes) -> Call:
        """Read a request body.

        Raises:
            InvalidRequest: the body is not a request of this format.
        """
        ...

    def write(self, call: Call, model: str, *, ask_usage: bool) -> bytes:
        """The body to send: the call's own bytes where nothing changes."""
        ...

    def opening(self, call: Call) -> list[str] | None:
        """System texts and the first user item, for a derived session id; None where the format has none."""
        ...

    def input_text(self, call: Call) -> Iterator[str]:
        """Texts of the request, for an estimate where the provider reports nothing."""
        ...

    def answer(self, body: bytes) -> Answer:
        """Read a whole answer; never raises."""
        ...

    def reader(self, call: Call, *, drop_usage: bool) -> EventReader:
        """A reader for the events of one stream; `drop_usage`: the usage chunk was not asked for by the client."""
        ...

    def error(self, fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
        """The error body in this format; `details` stand beside the message."""
        ...

    def error_event(self, fault: GatewayError, request_id: str) -> bytes:
        """The error as the last event of a stream that has begun."""
        ...


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object.

    Raises:
        InvalidRequest: not UTF-8, not JSON, not an object, nested too deep, or a key stands twice.
    """
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid UTF-8 (byte {error.start}). Send JSON encoded as UTF-8."
        ) from None
    try:
        fields = _FIELDS_DECODER.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest('The request body is JSON, but not an object. Send an object like {"model": …}.') from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deep to be read.") from None
    _refuse_duplicates(body, fields)
    return fields


def _refuse_duplicates(body: bytes, fields: Fields) -> None:
    """A body whose keys stand twice means one thing to us and may mean another to the provider.

    The common case is decided by walking the values in order, a comparison of bytes; only a body that does not match
    (escaped keys, or a duplicate) is decoded again.
    """
    if _is_written_in_order(body, fields):
        return

    def once(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                duplicates.add(name)
            seen.add(name)

    duplicates: set[str] = set()
    try:
        # The hook runs for inner objects first and for the top level last: only that one counts.
        top: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        raise InvalidRequest("The request body is not valid JSON.") from None
    once(top)
    if duplicates:
        name = min(duplicates)
        raise InvalidRequest(
            f'The field "{name[:80]}" stands more than once in the request body. Send it once.', param=name[:80]
        )


def _is_written_in_order(body: bytes, fields: Fields) -> bool:
    position = body.index(b"{") + 1
    skip = _SPACE.match
    for name, raw in fields.items():
        key = b'"' + name.encode("utf-8", "surrogatepass") + b'"'
        position = skip(body, position).end()  # type: ignore[union-attr]  # the pattern matches the empty text
        if not body.startswith(key, position):
            return False
        position = skip(body, position + len(key)).end()  # type: ignore[union-attr]
        position = skip(body, position + 1).end()  # type: ignore[union-attr]
        value = bytes(raw)
        if not body.startswith(value, position):
            return False
        position = skip(body, position + len(value)).end() + 1  # type: ignore[union-attr]
    return not fields or position == len(body.rstrip(b" \t\r\n"))


def write_fields(fields: Fields, changes: Mapping[str, object]) -> bytes:
    """The object again, with some top-level fields replaced or added; all others keep their bytes and their order."""
    merged: dict[str, object] = {**fields, **changes}
    return msgspec.json.encode(merged)


def decode(raw: bytes | msgspec.Raw) -> Any:
    """Any JSON value; None where it cannot be read. For foreign values that may be anything."""
    try:
        return _ANY_DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        # Knows NaN and numbers beyond a double, which some providers send.
        return json.loads(bytes(raw))
    except (ValueError, RecursionError):
        return None


def string_field(fields: Fields, name: str) -> str | None:
    """A top-level string, or None where it is absent or null.

    Raises:
        InvalidRequest: it is there and is something else.
    """
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        return None
    value = decode(raw)
    if not isinstance(value, str):
        raise InvalidRequest(f'The field "{name}" must be a string.', param=name)
    return value


def flag_field(fields: Fields, name: str) -> bool:
    """A top-level boolean; absent and null are False.

    Raises:
        InvalidRequest: it is there and is something else.
    """
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequest(f'The field "{name}" must be true or false.', param=name)
    return value == b"true"


def opening_items(raw: msgspec.Raw | None) -> list[str]:
    """What identifies a conversation: the system texts before the first user item, and that whole item."""
    found: list[str] = []
    try:
        items = _ITEMS_DECODER.decode(raw) if raw is not None else []
    except (msgspec.DecodeError, RecursionError):
        return [opening_text(raw)] if raw is not None else []
    for item_raw in items:
        item = decode(item_raw)
        role = item.get("role") if isinstance(item, dict) else None
        if role in ("system", "developer", "user"):
            found.append(_text_or_bytes(item.get("content"), item_raw))
        if role == "user":
            break
    return found


def opening_text(raw: msgspec.Raw) -> str:
    """What identifies a conversation in one value: a text, or parts of one."""
    return _text_or_bytes(decode(raw), raw)


def _text_or_bytes(content: object, raw: msgspec.Raw) -> str:
    try:
        return text_of(content)
    except RecursionError:
        return bytes(raw).decode("utf-8", "replace")


def texts(value: object, depth: int = 0) -> Iterator[str]:
    """Every string inside a decoded JSON value that may be prompt text; data URLs and deep nesting are left out."""
    if isinstance(value, str):
        if not value.startswith("data:"):
            yield value
    elif depth < 32:  # noqa: PLR2004  # deeper than any prompt; a guard, not a limit anyone meets
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in items:
            yield from texts(item, depth + 1)


def estimate(parts: Iterator[str]) -> int:
    """Estimated tokens of several texts, rounded up."""
    return int(sum(map(estimate_tokens, parts)) + 0.999)
