"""A request taken apart for weighing and fitting: its fields and messages as the bytes they have in the body.

A client may mark a chat message with `"x_gateway": {"priority": …}`: how much it matters when not everything fits. The
mark is ours and is taken out before anything is weighed, compared or forwarded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gateway.core.counting.measure import Wire
from gateway.core.errors import InvalidRequest
from gateway.dialects.base import Call
from gateway.dialects.fields import decode

#: the field that holds what was said, and where an array of it has elements that are messages
_ITEMS: Final[Mapping[Wire, str]] = {
    "chat": "messages",
    "messages": "messages",
    "responses": "input",
    "completions": "prompt",
}
_WITHOUT_MESSAGES: Final = frozenset({"completions"})
#: No provider takes so many; a body with more is not worth the time it would take to weigh each of them.
MOST_MESSAGES: Final = 20_000
#: a priority above this is as good as pinned
MOST_PRIORITY: Final = 100.0
PINNED: Final = "pinned"
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MARK: Final = b'"x_gateway"'
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Contents:
    """What a request is made of.

    Attributes:
        wire: its format.
        fields: the top level, values as bytes; what the marks of a client were taken out of is not in here.
        messages: the elements of the messages or input items, without marks; None where they are no array.
        pinned: indices of messages that the client wants sent as they are.
        priorities: of messages that the client gave one; 1 is usual.
    """

    wire: Wire
    fields: Mapping[str, bytes]
    messages: tuple[bytes, ...] | None
    pinned: frozenset[int] = frozenset()
    priorities: Mapping[int, float] | None = None

    @property
    def marked(self) -> bool:
        """Whether the client marked a message, so that the body cannot be forwarded as it came."""
        return self.priorities is not None


def contents_of(call: Call, wire: Wire) -> Contents | None:
    """The contents of a call; None where there is nothing to weigh, or far too much.

    Raises:
        InvalidRequest: a mark of a client means nothing.
    """
    fields = {name: bytes(raw) for name, raw in call.fields.items()}
    items = call.fields.get(_ITEMS[wire])
    if items is None:
        return None
    if wire in _WITHOUT_MESSAGES or memoryview(items)[0] != ord("["):
        return Contents(wire, fields, None)
    try:
        messages = tuple(map(bytes, _LIST.decode(items)))
    except (msgspec.DecodeError, RecursionError):
        return None
    if len(messages) > MOST_MESSAGES:
        if wire == "chat" and _MARK in fields["messages"]:
            raise InvalidRequest(
                f"A request of more than {MOST_MESSAGES:,} messages is not looked into, so that x_gateway cannot be "
                "heeded. Send fewer messages, or no such field.",
                param="messages",
            )
        return None
    if wire == "chat" and _MARK in fields["messages"]:
        return _unmarked(Contents(wire, fields, messages))
    return Contents(wire, fields, messages)


def output_limit(fields: Mapping[str, bytes]) -> int | None:
    """The most tokens the answer may have, as the client says; None where it says nothing that is a number."""
    for name in _OUTPUT_LIMITS:
        value = decode(fields[name]) if name in fields else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _unmarked(contents: Contents) -> Contents:
    messages, priorities = list(contents.messages or ()), dict[int, float]()
    pinned = set()
    found = False
    for index, raw in enumerate(messages):
        fields = _marked_fields(raw)
        if fields is None:
            continue
        found = True
        priority = _priority(decode(fields.pop("x_gateway")), f"messages[{index}].x_gateway")
        messages[index] = msgspec.json.encode(fields)
        if priority == PINNED:
            pinned.add(index)
        elif isinstance(priority, float):
            priorities[index] = priority
    if not found:
        return contents
    return Contents(contents.wire, contents.fields, tuple(messages), frozenset(pinned), priorities)


def _marked_fields(raw: bytes) -> dict[str, msgspec.Raw] | None:
    if _MARK not in raw:
        return None
    try:
        fields = _MESSAGE.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    return fields if "x_gateway" in fields else None


def _priority(mark: Any, where: str) -> float | str:
    """What a mark says.

    Raises:
        InvalidRequest: it says nothing that is known.
    """
    if not isinstance(mark, dict) or set(mark) - {"priority"}:
        raise InvalidRequest(f'{where} must be an object with the field "priority" only.', param=where)
    value = mark.get("priority", 1.0)
    if value == PINNED:
        return PINNED
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value <= MOST_PRIORITY:
        raise InvalidRequest(
            f'{where}.priority must be "{PINNED}" or a number from 0 (first to go) over 1 (usual) to '
            f"{MOST_PRIORITY:.0f}.",
            param=f"{where}.priority",
        )
    return float(value)
