"""A conversation as the rules see it: a view onto the raw chat messages, which stay the truth.

An `Item` says what a message is, never what it becomes; a `Unit` is what stays or goes together: a call with all its
results, or one message alone. Reading never fails: what is not a chat message is an item of an unknown role, and is
left alone. What to keep is the business of `gateway.core.fitting`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

#: a chat message as decoded JSON
Message = Mapping[str, Any]

SYSTEM_ROLES: Final = frozenset({"system", "developer"})
RESULT_ROLES: Final = frozenset({"tool", "function"})
#: where providers put reasoning that they check, or read back, byte for byte
_REASONING_FIELDS: Final = ("reasoning_details", "thinking_blocks", "reasoning_signature", "encrypted_content")
_REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})


@dataclass(frozen=True, slots=True)
class Item:
    """One message: where it stands, what it says, which calls it makes or answers."""

    index: int
    role: str
    #: its text parts, joined; other parts are not text
    text: str
    #: ids of the calls it makes, in order
    calls: tuple[str, ...]
    #: id of the call it answers
    answers: str | None
    #: it must be sent as it came
    pinned: bool
    #: it may be dropped with its unit, but never be rewritten: signed reasoning, images, unknown parts
    sealed: bool
    #: the client asked the provider to cache everything up to here
    breakpoint: bool
    #: hash of the message without its cache mark: the same text, the same key
    key: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Items `start` to `stop - 1`: a call and its results, or a single message."""

    start: int
    stop: int
    pinned: bool
    sealed: bool

    @property
    def indices(self) -> range:
        """Of its items."""
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The items of a request, in order, and how they belong together."""

    messages: tuple[Message, ...]
    items: tuple[Item, ...]
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, messages: Sequence[Message], *, pinned: Collection[int] = ()) -> Conversation:
        """Read the messages of a chat request; `pinned` adds indices that a client wants kept as they are."""
        raw = tuple(messages)
        spans = tuple(_spans(raw))
        must = _must_keep(raw, spans) | set(pinned)
        items = tuple(_item(index, message, pinned=index in must) for index, message in enumerate(raw))
        units = []
        for start, stop in spans:
            inside = items[start:stop]
            # One pinned item holds its whole unit: a result cannot stand without its call.
            unit = Unit(start, stop, any(item.pinned for item in inside), any(item.sealed for item in inside))
            units.append(unit)
        return cls(raw, items, tuple(units))

    @property
    def task(self) -> int | None:
        """Index of the first user message: what the agent was asked to do."""
        return next((item.index for item in self.items if item.role == "user"), None)

    @property
    def last_breakpoint(self) -> int | None:
        """Index of the last message the client marked for the provider's cache."""
        return next((item.index for item in reversed(self.items) if item.breakpoint), None)

    def prefix_hashes(self, salt: str = "") -> tuple[str, ...]:
        """One hash per message, over everything up to and with it; `salt` separates tenants, models or settings."""
        running = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16)
        hashes = []
        for item in self.items:
            running.update(item.key.encode())
            hashes.append(running.hexdigest())
        return tuple(hashes)


def key_of(message: object) -> str:
    """Hash of a message as JSON, without cache marks, which clients move from turn to turn."""
    text = json.dumps(message, ensure_ascii=False)
    if '"cache_control"' in text:
        text = json.dumps(_without_marks(message), ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_marks(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_marks(inner) for name, inner in value.items() if name != "cache_control"}
    return [_without_marks(inner) for inner in value] if isinstance(value, list) else value


def text_parts(content: object) -> str:
    """The text of a message's content, whether a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def call_ids(message: Message) -> tuple[str, ...]:
    """Ids of the calls a message makes; a call of the old `function_call` kind is known by its function's name."""
    calls = message.get("tool_calls")
    ids = [str(call.get("id")) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    old = message.get("function_call")
    if isinstance(old, Mapping):
        ids.append(f"function:{old.get('name')}")
    return tuple(ids)


def answered_id(message: Message) -> str | None:
    """Id of the call a message answers."""
    role = message.get("role")
    if role == "tool":
        return str(message.get("tool_call_id"))
    return f"function:{message.get('name')}" if role == "function" else None


def _spans(messages: Sequence[Message]) -> Iterator[tuple[int, int]]:
    """Calls with the results that follow them; everything else alone."""
    start = 0
    while start < len(messages):
        stop = start + 1
        open_ids = list(call_ids(messages[start]))
        while open_ids and stop < len(messages) and answered_id(messages[stop]) in open_ids:
            open_ids.remove(str(answered_id(messages[stop])))
            stop += 1
        yield start, stop
        start = stop


def _must_keep(messages: Sequence[Message], spans: Sequence[tuple[int, int]]) -> set[int]:
    """System texts, the last user message, and what the conversation ends with, its call included."""
    must = {index for index, message in enumerate(messages) if message.get("role") in SYSTEM_ROLES}
    must.update(index for index, message in enumerate(messages) if not _is_known(message))
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    must.update(users[-1:])
    if spans:
        must.update(range(*spans[-1]))
    return must


def _is_known(message: Message) -> bool:
    return message.get("role") in SYSTEM_ROLES | RESULT_ROLES | {"user", "assistant"}


def _item(index: int, message: Message, *, pinned: bool) -> Item:
    content = message.get("content")
    return Item(
        index=index,
        role=str(message.get("role")),
        text=text_parts(content),
        calls=call_ids(message),
        answers=answered_id(message),
        pinned=pinned,
        sealed=_is_sealed(message, content),
        breakpoint=_is_breakpoint(message, content),
        key=key_of(message),
    )


def _is_sealed(message: Message, content: object) -> bool:
    if any(message.get(name) for name in _REASONING_FIELDS):
        return True
    calls = message.get("tool_calls")
    if isinstance(calls, list) and any(_is_signed_call(call) for call in calls):
        return True
    if content is None or isinstance(content, str):
        return False
    return not isinstance(content, list) or not all(_is_plain_text(part) for part in content)


def _is_signed_call(call: object) -> bool:
    """A call that is not a plain function call, or carries a signature of the model's thought beside it."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return True
    return bool(call.get("extra_content") or call.get("thought_signature") or call.get("provider_specific_fields"))


def _is_plain_text(part: object) -> bool:
    """Text and nothing that depends on its exact wording (annotations point at characters)."""
    if not isinstance(part, Mapping) or part.get("type") in _REASONING_PARTS:
        return False
    return isinstance(part.get("text"), str) and set(part) <= {"type", "text", "cache_control"}


def _is_breakpoint(message: Message, content: object) -> bool:
    if message.get("cache_control"):
        return True
    return isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("cache_control") for part in content
    )
