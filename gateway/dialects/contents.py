"""Split a request into its fields and messages, each as the bytes in the body.

A client may mark a message, or a part of its content such as a `tool_result`, with `"x_gateway": {"priority": …}`: how
much the message matters when not everything fits. The mark is ours and is taken out before anything is weighed,
compared or forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import plain
from gateway.core.counting.measure import Wire
from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.request import ITEMS
from gateway.core.errors import InvalidRequest
from gateway.core.values import dataclass
from gateway.dialects.base import Call
from gateway.dialects.fields import check_length, decode, join, unescaped, write_fields

_WITHOUT_MESSAGES: Final = frozenset({"completions"})
#: No provider takes so many; a body with more is not worth the time it would take to weigh each of them.
MOST_MESSAGES: Final = 20_000
#: Nor one of so many objects, values or strings, each of which becomes an object of ours: 54 MB of them took a gigabyte
#: and 20 s. What stands within texts does not count.
MOST_OBJECTS: Final = 200_000
_MOST_COMMAS: Final = 1_000_000
_MOST_QUOTES: Final = 1_000_000
#: what a request is called that is not taken apart
TOO_MUCH: Final = (
    f"A request of more than {MOST_MESSAGES:,} messages, {MOST_OBJECTS:,} objects or {_MOST_COMMAS:,} values"
)
_TOOLS: Final = frozenset({"tools", "functions"})
#: a priority above this is as good as pinned
MOST_PRIORITY: Final = 100.0
PINNED: Final = "pinned"
#: of a message without a mark
_USUAL: Final = 1.0
_MARK: Final = b'"x_gateway"'
#: bytes of what it may say
_MARK_BYTES: Final = 1024
_NOTHING_KNOWN: Final = PrefixCache(0)
_SPACE: Final = b" \t\r\n"
_BETWEEN: Final = b"," + _SPACE
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Contents:
    """What a request is made of.

    Attributes:
        wire: its format.
        fields: the top level, values as bytes; what the marks of a client were taken out of is not in here.
        array: the messages or input items as they stand in the body, without the client's marks; None where they are
            no array.
        start: what is known of its first messages.
        rest: the array behind those, without cache marks.
        fresh: the messages in it.
        pinned: indices of messages that the client wants sent as they are.
        priorities: of messages that the client gave one; 1 is usual.
        is_unloaded: the messages were let go of, to be read again from the body if they are needed.
    """

    wire: Wire
    fields: Mapping[str, bytes]
    array: bytes | None = None
    start: CachedPrefix | None = None
    rest: bytes = b""
    fresh: tuple[bytes, ...] = ()
    pinned: frozenset[int] = frozenset()
    priorities: Mapping[int, float] | None = None
    is_unloaded: bool = False

    @property
    def unloaded(self) -> Contents:
        """The same without the messages, which take twice the size of the body."""
        fields = {name: value for name, value in self.fields.items() if name != ITEMS[self.wire]}
        return Contents(self.wire, fields, is_unloaded=True)

    @cached_property
    def messages(self) -> tuple[bytes, ...] | None:
        """All messages or input items, without the client's marks; None where they are no array."""
        if self.start is None and self.rest is self.array:
            return self.fresh
        if self.start is not None and self.is_as_known:
            return self.start.messages + self.fresh
        return _split(self.array) if self.array is not None else None

    def between(self, first: int, stop: int) -> tuple[bytes, ...]:
        """Some of `messages`, without all the others having to be taken apart. Only where these are an array."""
        if self.start is None or not self.is_as_known or "messages" in self.__dict__:
            return (self.messages or ())[first:stop]
        known = len(self.start.keys)
        return (*self.start.between(first, stop), *self.fresh[max(0, first - known) : max(0, stop - known)])

    @property
    def is_as_known(self) -> bool:
        """Whether the array is what is known of its beginning and the rest, without cache marks in either."""
        text = self.start.text if self.start is not None else b""
        array = self.array or b""
        return len(text) + len(self.rest) == len(array) and array.startswith(text)

    @property
    def settled(self) -> bytes:
        """The array without cache marks, up to the end of its last message but one."""
        begun = self.start.text if self.start is not None else b""
        return begun + self.rest[: self.bounds[-1] - len(begun)] if len(self.fresh) > 1 else begun

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where each message but the last starts and stops in `settled`, one after the other."""
        begun, known = (len(self.start.text), self.start.bounds) if self.start is not None else (0, ())
        found, stop = list[int](), 0 if self.start is not None else 1
        for raw in self.fresh[:-1]:
            start = stop
            while self.rest[start] in _BETWEEN:
                start += 1
            stop = start + len(raw)
            found += [begun + start, begun + stop]
        return (*known, *found)

    @property
    def marked(self) -> bool:
        """Whether the client marked a message, so that the body cannot be forwarded as it came."""
        return self.priorities is not None


def contents_of(call: Call, wire: Wire, known: PrefixCache | None = None) -> Contents | None:
    """The contents of a call; None where there is nothing to weigh, or far too much.

    Args:
        call: as its dialect read it.
        wire: its format.
        known: where beginnings of earlier calls are looked up.

    Raises:
        InvalidRequest: a mark of a client means nothing, or tools are far too much.
    """
    fields = {name: bytes(raw) for name, raw in call.fields.items()}
    array = fields.get(ITEMS[wire])
    if array is None:
        return None
    is_list, is_large = array.startswith(b"["), len(call.body) > MOST_OBJECTS
    # Tools and schemas are built to be weighed, too.
    dense = [name for name in fields if name != ITEMS[wire] and is_far_too_much(fields[name])] if is_large else []
    _refuse_tools(dense)
    if dense:
        if is_list and wire not in _WITHOUT_MESSAGES:
            _refuse_marks(array)
        return None
    if not is_list:
        return Contents(wire, fields)
    if wire in _WITHOUT_MESSAGES:
        return None if is_far_too_much(array) else Contents(wire, fields)
    try:
        return _of_array(wire, fields, array, known or _NOTHING_KNOWN)
    except (msgspec.DecodeError, RecursionError):
        return None


def _of_array(wire: Wire, fields: Mapping[str, bytes], array: bytes, known: PrefixCache) -> Contents | None:
    start, rest = _behind_known(wire, array, known)
    fresh = None if is_far_too_much(rest) else _split(rest)
    is_marked = _MARK in rest
    if fresh is None or len(fresh) + (len(start.keys) if start is not None else 0) > MOST_MESSAGES:
        _refuse_marks(rest)
        return None
    marks = _Marks.of(_split(array), ITEMS[wire]) if is_marked else None
    if marks is None:
        return Contents(wire, fields, array, start, rest, fresh)
    array = bytes(join(marks.messages))
    start, rest = _behind_known(wire, array, known)
    return Contents(wire, fields, array, start, rest, _split(rest), frozenset(marks.pinned), marks.priorities)


def is_far_too_much(array: bytes) -> bool:
    """Whether a value is not worth being taken apart, which is told without doing so."""
    if len(array) <= MOST_OBJECTS or not _is_dense(array):
        return False
    # A long conversation may have as many in its texts, as logs and tables have: look at what stands outside of them.
    array = unescaped(array)
    return array.count(b'"') > _MOST_QUOTES or _is_dense(b"".join(array.split(b'"')[::2]))


def _is_dense(text: bytes) -> bool:
    return text.count(b"{") > MOST_OBJECTS or text.count(b",") > _MOST_COMMAS


def _refuse_tools(dense: Sequence[str]) -> None:
    """Refuse far too much in what defines tools: their brackets and numbers are billed, and nothing would be held.

    Raises:
        InvalidRequest: there is.
    """
    for name in _TOOLS.intersection(dense):
        raise InvalidRequest(
            f'The field "{name}" has more than {MOST_OBJECTS:,} objects or {_MOST_COMMAS:,} values.', param=name
        )


def _refuse_marks(array: bytes) -> None:
    """What is not looked into has no marks of a client.

    Raises:
        InvalidRequest: it has.
    """
    if _MARK in array:
        raise InvalidRequest(
            f"{TOO_MUCH} is not looked into, so that x_gateway cannot be heeded. Send less, or no such field.",
            param="messages",
        )


def without_marks(call: Call, wire: Wire) -> Call:
    """A request that is forwarded unweighed, without a client's marks.

    Raises:
        InvalidRequest: a mark means nothing, or there is too much to look for them.
    """
    contents = contents_of(call, wire) if _MARK in call.body else None
    if contents is None or not contents.marked or contents.messages is None:
        return call
    fields = {**call.fields, ITEMS[wire]: join(contents.messages)}
    return replace(call, body=write_fields(fields, {}), fields=fields)


def with_messages(contents: Contents, messages: Sequence[bytes], known: PrefixCache | None = None) -> Contents:
    """Return contents with these messages instead of their own."""
    array = bytes(join(messages))
    start, rest = _behind_known(contents.wire, array, known or _NOTHING_KNOWN)
    return replace(contents, array=array, start=start, rest=rest, fresh=_split(rest))


def with_inserted(
    contents: Contents, before: Mapping[int, Sequence[bytes]], known: PrefixCache | None = None
) -> Contents:
    """Return contents with more messages. `before`: these, by the index of the message that they precede."""
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
        priorities={moved[index]: one for index, one in priorities.items()} if priorities is not None else None,
    )


def _behind_known(wire: Wire, array: bytes, known: PrefixCache) -> tuple[CachedPrefix | None, bytes]:
    """What is known of an array's beginning, and what comes behind that, without cache marks."""
    start = known.of(wire, array)
    rest = plain(array[len(start.text) :] if start is not None else array)
    if start is None and rest is not array:
        start = known.of(wire, rest)
        rest = rest[len(start.text) :] if start is not None else rest
    return start, rest


def _split(array: bytes) -> tuple[bytes, ...]:
    """The elements of an array, or of what is left of one behind some of its elements."""
    if not array.startswith(b"["):
        array = b"[" + array.lstrip(_SPACE).removeprefix(b",")
    # No `map`: within one call of C no other thread has its turn.
    return tuple([bytes(raw) for raw in _LIST.decode(array)])


@dataclass(frozen=True, slots=True)
class _Marks:
    """Messages without a client's marks, and what those said."""

    messages: list[bytes]
    pinned: set[int]
    priorities: dict[int, float]

    @classmethod
    def of(cls, messages: Sequence[bytes], array: str) -> _Marks | None:
        """Those of all messages of an array; None where there are none.

        Raises:
            InvalidRequest: one means nothing.
        """
        marks, found = cls(list(messages), set(), {}), False
        for index, raw in enumerate(messages):
            taken = _without_marks(raw, f"{array}[{index}]") if _MARK in raw else None
            if taken is None:
                continue
            found = True
            marks.messages[index], priority = taken
            if priority == math.inf:
                marks.pinned.add(index)
            else:
                marks.priorities[index] = priority
        return marks if found else None


def _without_marks(raw: bytes, place: str) -> tuple[bytes, float] | None:
    """A message without marks, of its own or in its parts, and the highest priority that they say; None without marks.

    Parts are cut together, as the message that they are in: where some of them are marked, all others are as usual.
    `math.inf`: it is pinned.

    Raises:
        InvalidRequest: a mark means nothing.
    """
    fields = _object(raw)
    if fields is None:
        return None
    said = [_taken(fields, place)]
    content = fields.get("content", msgspec.Raw())
    parts = _list(content) if _MARK in bytes(content) else ()
    objects = [_object(part) for part in parts]
    of_parts = [_taken(part, f"{place}.content[{at}]") for at, part in enumerate(objects) if part is not None]
    if any(priority is not None for priority in of_parts):
        said += [_USUAL if priority is None else priority for priority in of_parts]
        shorter = [
            bytes(was) if now is None else msgspec.json.encode(now) for was, now in zip(parts, objects, strict=True)
        ]
        fields["content"] = join(shorter)
    priorities = [priority for priority in said if priority is not None]
    return (msgspec.json.encode(fields), max(priorities)) if priorities else None


def _taken(fields: dict[str, msgspec.Raw], place: str) -> float | None:
    """The priority of a mark, which is taken out; None where there is none.

    Raises:
        InvalidRequest: it means nothing.
    """
    mark = fields.pop("x_gateway", None)
    if mark is None:
        return None
    where = f"{place}.x_gateway"
    check_length(where, mark, _MARK_BYTES)
    return _priority(decode(mark), where)


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


def _priority(mark: Any, where: str) -> float:
    """What a mark says; `math.inf`: the message is pinned.

    Raises:
        InvalidRequest: it says nothing that is known.
    """
    if not isinstance(mark, dict) or set(mark) - {"priority"}:
        raise InvalidRequest(f'{where} must be an object with the field "priority" only.', param=where)
    value = mark.get("priority", _USUAL)
    if value == PINNED:
        return math.inf
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_PRIORITY:  # nor is NaN
        raise InvalidRequest(
            f'{where}.priority must be "{PINNED}" or a number from 0 (first to go) over 1 (usual) to '
            f"{MOST_PRIORITY:.0f}.",
            param=f"{where}.priority",
        )
    return float(value)
