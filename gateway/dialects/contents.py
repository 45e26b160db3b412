"""Split a request into its fields and messages, each as the bytes in the body.

A client may mark a message, or a part of its content such as a `tool_result`, with `"x_gateway": {"priority": …}`. The
priority says how important the message is when the conversation must be trimmed. The mark is removed before the message
is counted, compared or forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import without_cache_marks
from gateway.core.counting.measure import Wire
from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.request import ITEMS
from gateway.core.errors import InvalidRequest
from gateway.core.runaway import ReadRounds
from gateway.core.values import dataclass
from gateway.dialects.base import Call
from gateway.dialects.fields import check_length, decode, join, without_escapes, write_fields

_WITHOUT_MESSAGES: Final = frozenset({"completions"})
#: Limit of messages. No provider accepts as many, and counting each of them would take too long.
MAX_MESSAGES: Final = 20_000
#: Limit of objects, outside of texts. Each object, value or string becomes a Python object: 54 MB of them took 1 GB of
#: memory and 20 s.
MAX_OBJECTS: Final = 200_000
_MAX_COMMAS: Final = 1_000_000
_MAX_QUOTES: Final = 1_000_000
#: how messages to clients name a request that is too large to be parsed
TOO_LARGE: Final = (
    f"A request of more than {MAX_MESSAGES:,} messages, {MAX_OBJECTS:,} objects or {_MAX_COMMAS:,} values"
)
_TOOLS: Final = frozenset({"tools", "functions"})
#: the highest priority as a number; a message that must always be sent is `PINNED` instead
MAX_PRIORITY: Final = 100.0
PINNED: Final = "pinned"
#: priority of a message without a mark
_DEFAULT_PRIORITY: Final = 1.0
_MARK: Final = b'"x_gateway"'
#: size limit of a mark in bytes
_MARK_BYTES: Final = 1024
_NOTHING_KNOWN: Final = PrefixCache(0)
_SPACE: Final = b" \t\r\n"
_BETWEEN: Final = b"," + _SPACE
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Contents:
    """Fields and messages of a request, each as bytes.

    Attributes:
        wire: the format of the request.
        fields: the top level, values as bytes. The messages in it still contain the client's marks.
        array: the messages or input items as bytes, without the client's marks; None if they are not an array.
        cached_prefix: the cached prefix of the messages; None if there is none.
        rest: the array after that prefix, without cache marks.
        new_messages: the messages in `rest`.
        pinned: indices of the messages that the client wants to send unchanged.
        priorities: the priorities that the client gave, by message index; 1 is the default.
        is_unloaded: the messages were released, and are read from the body again if they are needed.
    """

    wire: Wire
    fields: Mapping[str, bytes]
    array: bytes | None = None
    cached_prefix: CachedPrefix | None = None
    rest: bytes = b""
    new_messages: tuple[bytes, ...] = ()
    pinned: frozenset[int] = frozenset()
    priorities: Mapping[int, float] | None = None
    is_unloaded: bool = False

    @property
    def unloaded(self) -> Contents:
        """Return the same without the messages, which take twice the size of the body."""
        fields = {name: value for name, value in self.fields.items() if name != ITEMS[self.wire]}
        return Contents(self.wire, fields, is_unloaded=True)

    @cached_property
    def messages(self) -> tuple[bytes, ...] | None:
        """Return all messages or input items, without the client's marks; None if they are not an array."""
        if self.cached_prefix is None and self.rest is self.array:
            return self.new_messages
        if self.cached_prefix is not None and self.is_split_exact:
            return self.cached_prefix.messages + self.new_messages
        return _split(self.array) if self.array is not None else None

    def between(self, first: int, stop: int) -> tuple[bytes, ...]:
        """Return some of `messages` without parsing the others. Only for contents with an array."""
        if self.cached_prefix is None or not self.is_split_exact or "messages" in self.__dict__:
            return (self.messages or ())[first:stop]
        known = len(self.cached_prefix.keys)
        return (
            *self.cached_prefix.between(first, stop),
            *self.new_messages[max(0, first - known) : max(0, stop - known)],
        )

    @property
    def is_split_exact(self) -> bool:
        """Return True if the array equals the cached prefix plus `rest`: neither part contained cache marks."""
        text = self.cached_prefix.text if self.cached_prefix is not None else b""
        array = self.array or b""
        return len(text) + len(self.rest) == len(array) and array.startswith(text)

    @property
    def text_before_last(self) -> bytes:
        """Return the array without cache marks, up to the end of its second to last message."""
        prefix = self.cached_prefix.text if self.cached_prefix is not None else b""
        return prefix + self.rest[: self.bounds[-1] - len(prefix)] if len(self.new_messages) > 1 else prefix

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Return start and stop in `text_before_last` of each message but the last, in one flat tuple."""
        prefix_length, known = (
            (len(self.cached_prefix.text), self.cached_prefix.bounds) if self.cached_prefix is not None else (0, ())
        )
        bounds, stop = list[int](), 0 if self.cached_prefix is not None else 1
        for raw in self.new_messages[:-1]:
            start = stop
            while self.rest[start] in _BETWEEN:
                start += 1
            stop = start + len(raw)
            bounds += [prefix_length + start, prefix_length + stop]
        return (*known, *bounds)

    @property
    def rounds(self) -> ReadRounds | None:
        """Return what `keep_rounds` kept; None if the rounds in these messages were not read."""
        return self.__dict__.get("_rounds")

    def keep_rounds(self, rounds: ReadRounds) -> None:
        """Keep the rounds that were read, for the prefix that is cached of these messages."""
        self.__dict__["_rounds"] = rounds

    @property
    def size(self) -> int:
        """Return the number of messages."""
        return len(self.new_messages) + (len(self.cached_prefix.keys) if self.cached_prefix is not None else 0)

    @property
    def marked(self) -> bool:
        """Return True if the client marked a message, so that the body cannot be forwarded unchanged."""
        return self.priorities is not None


def contents_of(call: Call, wire: Wire, known: PrefixCache | None = None) -> Contents | None:
    """Return the contents of a call; None if it has nothing to count or is too large to be parsed.

    Args:
        call: the call as its dialect read it.
        wire: its format.
        known: cached prefixes of earlier calls.

    Raises:
        InvalidRequest: a client's mark is invalid, or the tools are too large.
    """
    fields = {name: bytes(raw) for name, raw in call.fields.items()}
    array = fields.get(ITEMS[wire])
    if array is None:
        return None
    is_list, is_large = array.startswith(b"["), len(call.body) > MAX_OBJECTS
    # Tools and schemas are parsed for counting too.
    dense = [name for name in fields if name != ITEMS[wire] and is_too_large(fields[name])] if is_large else []
    _refuse_tools(dense)
    if dense:
        if is_list and wire not in _WITHOUT_MESSAGES:
            _refuse_marks(array)
        return None
    if not is_list:
        return Contents(wire, fields)
    if wire in _WITHOUT_MESSAGES:
        return None if is_too_large(array) else Contents(wire, fields)
    try:
        return _of_array(wire, fields, array, known or _NOTHING_KNOWN)
    except (msgspec.DecodeError, RecursionError):
        return None


def _of_array(wire: Wire, fields: Mapping[str, bytes], array: bytes, known: PrefixCache) -> Contents | None:
    start, rest = _split_known_prefix(wire, array, known)
    fresh = None if is_too_large(rest) else _split(rest)
    is_marked = _MARK in rest
    if fresh is None or len(fresh) + (len(start.keys) if start is not None else 0) > MAX_MESSAGES:
        _refuse_marks(rest)
        return None
    marks = _Marks.of(_split(array), ITEMS[wire]) if is_marked else None
    if marks is None:
        return Contents(wire, fields, array, start, rest, fresh)
    array = bytes(join(marks.messages))
    start, rest = _split_known_prefix(wire, array, known)
    return Contents(wire, fields, array, start, rest, _split(rest), frozenset(marks.pinned), marks.priorities)


def is_too_large(array: bytes) -> bool:
    """Return True if a value is too large to be parsed; decided without parsing it."""
    if len(array) <= MAX_OBJECTS or not _is_dense(array):
        return False
    # A long conversation may have as many of them in its texts (logs, tables). Count only outside of strings.
    array = without_escapes(array)
    return array.count(b'"') > _MAX_QUOTES or _is_dense(b"".join(array.split(b'"')[::2]))


def _is_dense(text: bytes) -> bool:
    return text.count(b"{") > MAX_OBJECTS or text.count(b",") > _MAX_COMMAS


def _refuse_tools(dense: Sequence[str]) -> None:
    """Refuse tool definitions that are too large: they are billed, but the gateway could not reserve their tokens.

    Raises:
        InvalidRequest: there are such tools.
    """
    for name in _TOOLS.intersection(dense):
        raise InvalidRequest(
            f'The field "{name}" has more than {MAX_OBJECTS:,} objects or {_MAX_COMMAS:,} values.', param=name
        )


def _refuse_marks(array: bytes) -> None:
    """Refuse client marks in messages that are too large to be parsed.

    Raises:
        InvalidRequest: there is a mark.
    """
    if _MARK in array:
        raise InvalidRequest(
            f"{TOO_LARGE} is not parsed, so x_gateway cannot be applied. Send less, or remove x_gateway.",
            param="messages",
        )


def without_marks(call: Call, wire: Wire) -> Call:
    """Return a request that is forwarded without counting, with the client's marks removed.

    Raises:
        InvalidRequest: a mark is invalid, or the request is too large to be searched for marks.
    """
    contents = contents_of(call, wire) if _MARK in call.body else None
    if contents is None or not contents.marked or contents.messages is None:
        return call
    fields = {**call.fields, ITEMS[wire]: join(contents.messages)}
    return replace(call, body=write_fields(fields, {}), fields=fields)


def with_messages(contents: Contents, messages: Sequence[bytes], known: PrefixCache | None = None) -> Contents:
    """Return contents with these messages instead of its own."""
    array = bytes(join(messages))
    start, rest = _split_known_prefix(contents.wire, array, known or _NOTHING_KNOWN)
    return replace(contents, array=array, cached_prefix=start, rest=rest, new_messages=_split(rest))


def with_inserted(
    contents: Contents, before: Mapping[int, Sequence[bytes]], known: PrefixCache | None = None
) -> Contents:
    """Return contents with inserted messages. `before`: the new messages by the index of the message they precede."""
    messages, moved, sent = contents.messages or (), dict[int, int](), list[bytes]()
    for index, raw in enumerate(messages):
        sent += before.get(index, ())
        moved[index] = len(sent)
        sent.append(raw)
    sent += before.get(len(messages), ())
    priorities = contents.priorities
    return replace(
        with_messages(contents, sent, known),
        pinned=frozenset(moved[index] for index in contents.pinned),
        priorities={moved[index]: value for index, value in priorities.items()} if priorities is not None else None,
    )


def _split_known_prefix(wire: Wire, array: bytes, known: PrefixCache) -> tuple[CachedPrefix | None, bytes]:
    """Return the cached prefix of an array, if any, and the rest of the array without cache marks."""
    start = known.find(wire, array)
    rest = without_cache_marks(array[len(start.text) :] if start is not None else array)
    if start is None and rest is not array:
        start = known.find(wire, rest)
        rest = rest[len(start.text) :] if start is not None else rest
    return start, rest


def _split(array: bytes) -> tuple[bytes, ...]:
    """Return the elements of an array, or of the rest of an array after some of its elements."""
    if not array.startswith(b"["):
        array = b"[" + array.lstrip(_SPACE).removeprefix(b",")
    # No `map`: a single C call would keep all other threads waiting.
    return tuple([bytes(raw) for raw in _LIST.decode(array)])


@dataclass(frozen=True, slots=True)
class _Marks:
    """Messages without the client's marks, and the content of these marks."""

    messages: list[bytes]
    pinned: set[int]
    priorities: dict[int, float]

    @classmethod
    def of(cls, messages: Sequence[bytes], array: str) -> _Marks | None:
        """Remove and read the marks of all messages of an array; None if there are none.

        Raises:
            InvalidRequest: a mark is invalid.
        """
        marks, has_marks = cls(list(messages), set(), {}), False
        for index, raw in enumerate(messages):
            unmarked = _without_marks(raw, f"{array}[{index}]") if _MARK in raw else None
            if unmarked is None:
                continue
            has_marks = True
            marks.messages[index], priority = unmarked
            if priority == math.inf:
                marks.pinned.add(index)
            else:
                marks.priorities[index] = priority
        return marks if has_marks else None


def _without_marks(raw: bytes, place: str) -> tuple[bytes, float] | None:
    """Return a message without its marks, and the highest priority in them; None if it has no marks.

    The mark may be on the message or on its parts. Parts are trimmed together, as one message. If some parts are
    marked, the others count with the default priority. `math.inf`: the message is pinned.

    Raises:
        InvalidRequest: a mark is invalid.
    """
    fields = _object(raw)
    if fields is None:
        return None
    given = [_pop_priority(fields, place)]
    content = fields.get("content", msgspec.Raw())
    parts = _list(content) if _MARK in bytes(content) else ()
    objects = [_object(part) for part in parts]
    of_parts = [_pop_priority(part, f"{place}.content[{at}]") for at, part in enumerate(objects) if part is not None]
    if any(priority is not None for priority in of_parts):
        given += [_DEFAULT_PRIORITY if priority is None else priority for priority in of_parts]
        shorter = [
            bytes(was) if now is None else msgspec.json.encode(now) for was, now in zip(parts, objects, strict=True)
        ]
        fields["content"] = join(shorter)
    priorities = [priority for priority in given if priority is not None]
    return (msgspec.json.encode(fields), max(priorities)) if priorities else None


def _pop_priority(fields: dict[str, msgspec.Raw], place: str) -> float | None:
    """Remove the mark and return its priority; None if there is no mark.

    Raises:
        InvalidRequest: the mark is invalid.
    """
    mark = fields.pop("x_gateway", None)
    if mark is None:
        return None
    mark_name = f"{place}.x_gateway"
    check_length(mark_name, mark, _MARK_BYTES)
    return _priority(decode(mark), mark_name)


def _object(raw: bytes) -> dict[str, msgspec.Raw] | None:
    try:
        return _MESSAGE.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None


def _list(raw: bytes) -> Sequence[bytes]:
    try:
        return _LIST.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return ()


def _priority(mark: Any, mark_name: str) -> float:
    """Return the priority in a mark; `math.inf`: the message is pinned.

    Raises:
        InvalidRequest: the mark is not of a known form.
    """
    if not isinstance(mark, dict) or set(mark) - {"priority"}:
        raise InvalidRequest(f'{mark_name} must be an object with the field "priority" only.', param=mark_name)
    value = mark.get("priority", _DEFAULT_PRIORITY)
    if value == PINNED:
        return math.inf
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_PRIORITY:  # NaN fails this comparison too
        raise InvalidRequest(
            f'{mark_name}.priority must be "{PINNED}" or a number from 0 (dropped first) over 1 (default) to '
            f"{MAX_PRIORITY:.0f}.",
            param=f"{mark_name}.priority",
        )
    return float(value)
