"""What every wire format offers, and the values it gives: `Dialect`, `Call`, `Answer`, `StreamMeter`.

The body as received stays the truth. It is decoded one level deep; what is written back are its own bytes, with single
top-level fields replaced. Fields nobody here knows survive.
"""

from __future__ import annotations

import enum
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.identity import hash_of, text_of
from gateway.core.sse import EventBuffer, data_of_events, event_data, split_events
from gateway.dialects.reported import Reported

Fields = Mapping[str, msgspec.Raw]

_ANY_DECODER: Final = msgspec.json.Decoder()
#: what may follow the end mark before `close`; more is nobody's answer
_HELD_BYTES: Final = 64 * 1024
#: events of a stream that may wait to be read
_UNREAD_BYTES: Final = 64 * 1024
#: tool calls of one answer that are remembered by name
MAX_TOOLS: Final = 256
#: top-level fields of a body; no API has a hundred
_MAX_FIELDS: Final = 4096
#: a body of so many bytes cannot have more fields than that: each takes five (`"":1,`)
_FEW_FIELDS: Final = 4 * _MAX_FIELDS
_ABSENT: Final = msgspec.Raw(b"")
#: content that is decoded to find what identifies a conversation; text that needs no decoding is not counted
_DECODED_BYTES: Final = 32 * 1024
#: bytes of the longest role that is looked at, however it is escaped
_LONGEST_ROLE: Final = 64
#: strings of a request that are weighed one by one
_MAX_TEXTS: Final = 100_000
#: characters of texts that are not ASCII that are looked at to weigh them, and how many at once
_MAX_WEIGHED: Final = 512 * 1024
_WEIGHED_AT_ONCE: Final = 64 * 1024
#: a string, without its quotes, and the colon behind it if it is a key
_STRING: Final = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+(:)?')


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

    def write(self, call: Call, model: str, *, ask_usage: bool, messages: Sequence[bytes] | None = None) -> bytes:
        """The body to send: the call's own bytes where nothing changes. `messages`: instead of the call's own."""
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


class _Name:
    """A key as it stands in the body: two of the same spelling are still two."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _name(_: type, text: str) -> _Name:
    return _Name(text)


def _counting_decoder() -> msgspec.json.Decoder[dict[_Name, msgspec.Raw]]:
    """Reads one body and counts its keys, so that millions of them are refused before they are held."""
    count = itertools.count(1)

    def name(_: type, text: str) -> _Name:
        if next(count) > _MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {_MAX_FIELDS} fields.")
        return _Name(text)

    return msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=name)


_FIELDS_DECODER: Final = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=_name)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object.

    Raises:
        InvalidRequest: not UTF-8, not JSON, not an object, nested too deep, a key stands twice, or far too many keys.
    """
    try:
        str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid UTF-8 (byte {error.start}). Send JSON encoded as UTF-8."
        ) from None
    try:
        decoder = _FIELDS_DECODER if len(body) <= _FEW_FIELDS else _counting_decoder()
        named = decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest('The request body is JSON, but not an object. Send an object like {"model": …}.') from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deep to be read.") from None
    fields = {name.text: raw for name, raw in named.items()}
    if len(fields) != len(named):
        _refuse_duplicates([name.text for name in named])
    return fields


def _refuse_duplicates(names: list[str]) -> None:
    """A body whose keys stand twice means one thing to us and may mean another to the provider."""
    name = min(name for name, times in Counter(names).items() if times > 1)
    raise InvalidRequest(
        f'The field "{name[:80]}" stands more than once in the request body. Send it once.', param=name[:80]
    )


def write_fields(fields: Fields, changes: Mapping[str, object]) -> bytes:
    """The object again, with some top-level fields replaced or added; all others keep their bytes and their order."""
    merged: dict[str, object] = {**fields, **changes}
    return msgspec.json.encode(merged)


def join(items: Sequence[bytes]) -> msgspec.Raw:
    """The JSON array of these values."""
    return msgspec.Raw(b"[" + b",".join(items) + b"]")


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


class _Item(msgspec.Struct, gc=False):
    role: msgspec.Raw = _ABSENT
    content: msgspec.Raw = _ABSENT


class _Part(msgspec.Struct, gc=False):
    text: msgspec.Raw = _ABSENT


def _head_decoder(length: int) -> msgspec.json.Decoder[msgspec.Struct]:
    """Reads the first elements of an array; the others are skipped without becoming objects."""
    elements = [(f"element{place}", msgspec.Raw, _ABSENT) for place in range(length)]
    return msgspec.json.Decoder(msgspec.defstruct("_Head", elements, array_like=True, gc=False))


_ITEM_DECODER: Final = msgspec.json.Decoder(_Item)
_PART_DECODER: Final = msgspec.json.Decoder(_Part)
#: elements of an array that are looked at: nearly always enough, and the most there ever are
_NEAR: Final = 16
_FAR: Final = 1024
_NEAR_DECODER: Final = _head_decoder(_NEAR)
_FAR_DECODER: Final = _head_decoder(_FAR)


def _elements(array: msgspec.Raw) -> Iterator[msgspec.Raw]:
    """The first `_FAR` elements of an array.

    Raises:
        DecodeError: it is none.
        RecursionError: it is nested too deep to be read from here.
    """
    near = msgspec.structs.astuple(_NEAR_DECODER.decode(array))
    yield from itertools.takewhile(_is_there, near)
    if _is_there(near[-1]):
        far = msgspec.structs.astuple(_FAR_DECODER.decode(array))
        yield from itertools.takewhile(_is_there, far[_NEAR:])


def _is_there(raw: msgspec.Raw) -> bool:
    return raw is not _ABSENT


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def opening_items(raw: msgspec.Raw | None) -> list[str]:
    """What identifies a conversation: the system texts before the first user item, and that whole item.

    Only the first `_FAR` items are looked at, and none behind the first user item.
    """
    if raw is None:
        return []
    if _first(raw) != b"[":
        return [opening_text(raw)]
    try:
        return _opening_of(_elements(raw))
    except (msgspec.DecodeError, RecursionError):
        return [hash_of(memoryview(raw))]


def _opening_of(items: Iterator[msgspec.Raw]) -> list[str]:
    reader = _OpeningReader()
    found: list[str] = []
    for item in items:
        role, content = _role_and_content(item)
        if role in ("system", "developer", "user"):
            found.append(reader.text(content))
        if role == "user":
            break
    return found


def _role_and_content(raw: msgspec.Raw) -> tuple[str | None, msgspec.Raw]:
    try:
        item = _ITEM_DECODER.decode(raw)
    except msgspec.DecodeError:
        return None, _ABSENT
    role = decode(item.role) if memoryview(item.role).nbytes <= _LONGEST_ROLE else None
    return role if isinstance(role, str) else None, item.content


def opening_text(raw: msgspec.Raw) -> str:
    """What identifies a conversation in one value: a text, or parts of one."""
    return _OpeningReader().text(raw)


class _OpeningReader:
    """Gives the text of what opens a conversation, and decodes only so much of it that is not plain text.

    A string identifies by itself, however long. Other content up to `_DECODED_BYTES` in all is decoded and identified
    by `text_of`; beyond that its parts are identified by their text, and a part without text by a hash of its bytes as
    written. Clients write the opening alike on every turn, so the id stays. `cache_control` may still move from text to
    text; only where it moves on a part without text (an image), in content this large, the id changes.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _DECODED_BYTES

    def text(self, raw: msgspec.Raw) -> str:
        """The text that identifies one value; an absent one is like null."""
        first = _first(raw)
        if first != b'"':
            size = memoryview(raw).nbytes
            if size > self._left:
                return _text_of_parts(raw) if first == b"[" else _text_or_hash(raw)
            self._left -= size
        return _text_or_bytes(decode(raw), raw)


def _text_of_parts(raw: msgspec.Raw) -> str:
    try:
        parts = list(itertools.takewhile(_is_there, msgspec.structs.astuple(_FAR_DECODER.decode(raw))))
    except (msgspec.DecodeError, RecursionError):
        parts = []
    return "\n".join(map(_text_or_hash, parts)) if 0 < len(parts) < _FAR else hash_of(memoryview(raw))


def _text_or_hash(raw: msgspec.Raw) -> str:
    try:
        text = raw if _first(raw) == b'"' else _PART_DECODER.decode(raw).text
    except (msgspec.DecodeError, RecursionError):
        text = _ABSENT
    value = decode(text) if _first(text) == b'"' else None
    return value if isinstance(value, str) else hash_of(memoryview(raw))


def _text_or_bytes(content: object, raw: msgspec.Raw) -> str:
    try:
        return text_of(content)
    except RecursionError:
        return bytes(raw).decode("utf-8", "replace")


def texts(value: object, depth: int = 0) -> Iterator[str]:
    """Every string inside a JSON value that may be prompt text; data URLs and deep nesting are left out.

    A value that is not decoded yet (`Raw`) is read without building it, up to `_MAX_TEXTS` strings; the rest of it is
    taken to go on like that.
    """
    if isinstance(value, msgspec.Raw):
        yield from _texts_of_raw(value)
    elif isinstance(value, str):
        if not value.startswith("data:"):
            yield value
    elif depth < 32:  # noqa: PLR2004  # deeper than any prompt; a guard, not a limit anyone meets
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in items:
            yield from texts(item, depth + 1)


def _texts_of_raw(raw: msgspec.Raw) -> Iterator[str]:
    view = memoryview(raw)
    found: list[str] = []
    for number, match in enumerate(_STRING.finditer(view), 1):
        if match[2] is None and not match[1].startswith(b"data:"):
            text = decode(b'"' + match[1] + b'"')
            if isinstance(text, str) and not text.startswith("data:"):
                found.append(text)
                yield text
        if number == _MAX_TEXTS:
            yield from _going_on("".join(found), match.end(), view.nbytes - match.end())
            return


def _going_on(text: str, read: int, left: int) -> Iterator[str]:
    """As much of the text, again and again, as bytes are left to those that were read."""
    whole, part = divmod(left, read)
    yield from itertools.repeat(text, whole)
    yield text[: len(text) * part // read]


def estimate(parts: Iterator[str]) -> int:
    """Estimated tokens of several texts, rounded up.

    ASCII weighs by its length alone. Of other texts `_MAX_WEIGHED` characters are looked at; the rest weighs like them.
    """
    tokens = other = 0.0
    weighed = unweighed = 0
    for text in parts:
        if text.isascii():
            tokens += estimate_tokens(text)
            continue
        length = min(len(text), _MAX_WEIGHED - weighed)
        for start in range(0, length, _WEIGHED_AT_ONCE):
            other += estimate_tokens(text[start : min(start + _WEIGHED_AT_ONCE, length)])
        weighed += length
        unweighed += len(text) - length
    if weighed:
        tokens += other * (1 + unweighed / weighed)
    return int(tokens + 0.999)
