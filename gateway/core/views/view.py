"""Map the elements of a request to chat messages, and changed chat messages back to elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from gateway.core.conversation.message import Hashed, decode, encode, key_of, with_changes
from gateway.core.trimming.report import UNCHANGED, MessageOutcome, MessageOutcomes
from gateway.core.trimming.text_blocks import GAP

T = TypeVar("T")

#: index of a chat message -> its changed bytes, or None if it is dropped
Changes = Mapping[int, bytes | None]

#: the role of an element of an unknown format, which must be sent unchanged
OPAQUE = "opaque"

#: bytes that a cached changed element takes in addition to its own, and for each of its messages in the key
_CHANGED_BYTES = 300
_PART_BYTES = 300

#: fields that make a chat message signed, so that no rule may change it, see `is_signed`
SEAL: Mapping[str, Any] = {"thinking_blocks": True}


class ElementCache(Protocol):
    """Cache what was parsed of elements by a hash of each."""

    def get_many(
        self,
        kind: str,
        keys: Sequence[Hashable],
        compute: Callable[[Sequence[int]], Iterable[T]],
        size: Callable[[T], int] | None = None,
    ) -> list[T]:
        """Return the results of many keys, see `CountCache.get_many`."""


def parsed_elements(
    kind: str,
    elements: Hashed,
    cache: ElementCache | None,
    compute: Callable[[bytes], T],
    size: Callable[[T], int],
    *,
    marks: bool = True,
) -> Sequence[T]:
    """Return what `compute` returns for each element, computed once for each content if there is a cache (`cache`).

    `marks` is False if the result does not depend on cache marks.
    """
    raws = elements.raws
    if cache is None:
        return [compute(raw) for raw in raws]
    keys = elements.digests if marks else elements.keys
    return cache.get_many(kind, keys, lambda missing: (compute(raws[index]) for index in missing), size)


class ChatMessage(NamedTuple):
    """A chat message, its hash without cache marks, and whether it has cache marks."""

    raw: bytes
    key: bytes
    is_marked: bool

    @classmethod
    def of(cls, raw: bytes) -> ChatMessage:
        """Create a message and compute its hash."""
        return cls(raw, *key_of(raw))


def hashed_messages(messages: Sequence[ChatMessage]) -> Hashed:
    """Return these messages with their hashes."""
    marked = [index for index, one in enumerate(messages) if one.is_marked]
    return Hashed([one.raw for one in messages], [one.key for one in messages], marked=marked)


class SentElement(NamedTuple):
    """An element to send: its original index (None if new), its bytes, and their hash without cache marks."""

    place: int | None
    raw: bytes
    key: bytes

    @classmethod
    def of(cls, place: int | None, raw: bytes) -> SentElement:
        """Create an element and compute its hash."""
        return cls(place, raw, key_of(raw)[0])


def hashed_elements(sent: Sequence[SentElement]) -> Hashed:
    """Return these elements with their hashes."""
    return Hashed([one.raw for one in sent], [one.key for one in sent])


class _ChangedElement(NamedTuple):
    """A changed element: its bytes (None if nothing is left), its hash, and its size in the cache."""

    raw: bytes | None
    key: bytes
    size: int


class MessageMarks(NamedTuple):
    """What the rules may do with the messages of a request. Each mark is a set of their indices.

    Attributes:
        held: messages that must be sent unchanged, whatever the rules decide.
        stale: messages that the provider does not read any more, because a later compaction replaces them.
        needed: messages that should stay as long as they fit, because later messages use their content.
        following: messages that have the same origin as the message before them, and are kept or dropped with it.
        undroppable: messages that cannot be dropped. Parts of them, or of the results of their calls, can be shortened
            if they are not sealed.
        bound: messages that must stay unchanged if the provider checks what precedes a thinking block.
    """

    held: frozenset[int] = frozenset()
    stale: frozenset[int] = frozenset()
    needed: frozenset[int] = frozenset()
    following: frozenset[int] = frozenset()
    undroppable: frozenset[int] = frozenset()
    bound: frozenset[int] = frozenset()


NO_MARKS: Final = MessageMarks()


class View(ABC):
    """Show the elements of a request's array as chat messages.

    An element may become several messages, such as a user message with the results of three calls. A message may come
    from several elements, such as reasoning and the calls that it led to. The elements stay authoritative: an unchanged
    element is sent with its original bytes.

    Attributes:
        original: the elements in the body.
        chat: the chat messages; each result directly follows the message with its call.
        places: for each message, the indices of its elements in ascending order.
        marks: what the rules may do with the messages.
        array: the field of the array.
        cache: caches what was parsed of elements.
    """

    array = "messages"

    def __init__(
        self,
        original: Hashed,
        chat: Hashed,
        places: Sequence[Sequence[int]],
        marks: MessageMarks = NO_MARKS,
        cache: ElementCache | None = None,
    ) -> None:
        self.original = original
        self.chat = chat
        self.places = tuple(map(tuple, places))
        self.marks = marks
        self.cache = cache

    @property
    def elements(self) -> tuple[bytes, ...]:
        """Return the elements in the body."""
        return self.original.raws

    @property
    def messages(self) -> tuple[bytes, ...]:
        """Return the chat messages."""
        return self.chat.raws

    @cached_property
    def messages_of_elements(self) -> Sequence[Sequence[int]]:
        """Return the indices of the messages of each element."""
        message_indices: list[list[int]] = [[] for _ in self.elements]
        for message, places in enumerate(self.places):
            for place in places:
                message_indices[place].append(message)
        return message_indices

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """Return the elements to send.

        Args:
            changes: the messages that are not sent unchanged.
            new: indices in `changes` where another message, such as a summary, replaces the original one.
        """
        if new:
            return hashed_elements(list(self._sent(changes, new)))
        changed = self._changed_elements(changes)
        original = enumerate(zip(self.elements, self.original.keys, strict=True))
        sent = [changed.get(place, element) for place, element in original]
        kept = list(filter(None, sent))
        return Hashed([raw for raw, _ in kept], [key for _, key in kept])

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[SentElement]:
        """Yield the elements to send if new messages replace some of the original ones."""
        changed = self._changed_elements({index: None if index in new else form for index, form in changes.items()})
        for place, element in enumerate(zip(self.elements, self.original.keys, strict=True)):
            for index in self.messages_of_elements[place]:
                replacement = changes.get(index) if index in new and self.places[index][0] == place else None
                if replacement is not None:
                    yield SentElement.of(None, self._new_element(decode(replacement), place))
            sent = changed.get(place, element)
            if sent is not None:
                yield SentElement(place, *sent)

    def with_messages(self, messages: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the elements after replacing each message with the given one."""
        pairs = enumerate(zip(self.messages, messages, strict=True))
        return self.restored({index: new for index, (old, new) in pairs if new != old}).raws

    def indices(self, elements: Collection[int]) -> frozenset[int]:
        """Return the messages of these elements."""
        return frozenset(
            index
            for place in elements
            if 0 <= place < len(self.messages_of_elements)
            for index in self.messages_of_elements[place]
        )

    def fates(self, fates: MessageOutcomes) -> MessageOutcomes:
        """Convert the fates of messages to fates of elements. The tokens of a message count at its first element."""
        all_fates, places = tuple(fates), self.places
        return MessageOutcomes.of(
            [
                all_fates[owned[0]]
                if len(owned) == 1 and places[owned[0]][0] == element
                else self._fate(element, all_fates)
                for element, owned in enumerate(self.messages_of_elements)
            ]
        )

    def _fate(self, element: int, fates: Sequence[MessageOutcome]) -> MessageOutcome:
        """Return the fate of an element that is several messages, or a part of one."""
        owned = self.messages_of_elements[element]
        own = [fates[index] for index in owned]
        counted = [fates[index] for index in owned if self.places[index][0] == element]
        shown = next((fate for fate in own if fate.rule not in UNCHANGED), own[0])
        before, after = sum(fate.tokens_before for fate in counted), sum(fate.tokens_after for fate in counted)
        return MessageOutcome(shown.role, before, after, shown.rule)

    def _changed_elements(self, changes: Changes) -> dict[int, tuple[bytes, bytes] | None]:
        """Return the new bytes and hash of each element with changed messages, or None if nothing of it is left.

        Results are cached, because a trimmed element is sent again on every turn.
        """
        forms: dict[int, dict[int, bytes | None]] = {}
        kept = set[int]()
        for index in sorted(changes):
            form, places = changes[index], self.places[index]
            for place in places:
                forms.setdefault(place, {})[index] = form
            if form is not None:
                kept.update(places)
        changed = [
            place for place, own in forms.items() if place in kept or len(own) < len(self.messages_of_elements[place])
        ]

        def compute(missing: Iterable[int]) -> Iterator[_ChangedElement]:
            for element in (changed[number] for number in missing):
                raw = self._changed(element, forms[element])
                written = sum(map(len, filter(None, (raw, *forms[element].values()))))
                size = _CHANGED_BYTES + _PART_BYTES * len(self.messages_of_elements[element]) + written
                yield _ChangedElement(raw, key_of(raw)[0] if raw is not None else b"", size)

        if self.cache is None:
            results = list(compute(range(len(changed))))
        else:
            keys = [self._cache_key(element, forms[element]) for element in changed]
            results = self.cache.get_many(f"changed {self.array}", keys, compute, lambda one: one.size)
        sent = {place: (one.raw, one.key) for place, one in zip(changed, results, strict=True) if one.raw is not None}
        return {**dict.fromkeys(forms), **sent}

    def _cache_key(self, element: int, forms: Changes) -> Hashable:
        """Return a key of everything that `_changed` uses of an element."""
        own = self.messages_of_elements[element]
        if len(own) == len(forms) == 1 and len(self.places[own[0]]) == 1:
            index = own[0]
            return self.original.digests[element], self._extra_key(index), self.chat.digests[index], forms[index]
        return self.original.digests[element], *(self._part_key(index, element, forms) for index in own)

    def _part_key(self, index: int, element: int, forms: Changes) -> Hashable:
        """Return a key of everything that `_changed` uses of one message of an element."""
        key = tuple([place - element for place in self.places[index]]), self._extra_key(index)
        return key if index not in forms else (*key, self.chat.digests[index], forms[index])

    @abstractmethod
    def _extra_key(self, index: int) -> Hashable:
        """Return what else `_changed` uses of a message."""

    @abstractmethod
    def _changed(self, element: int, forms: Changes) -> bytes | None:
        """Return an element after changing or dropping some of its messages; None if nothing is left.

        It is not called if all messages of the element are dropped.
        """

    @abstractmethod
    def _new_element(self, message: Mapping[str, Any], element: int) -> bytes:
        """Return an assistant text that replaces dropped messages, as an element instead of the given one."""


class ChatView(View):
    """Chat messages, which need no conversion."""

    def __init__(self, original: Hashed, cache: ElementCache | None = None) -> None:
        del cache  # nothing has to be parsed
        super().__init__(original, original, list(zip(range(len(original.raws)))))

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """Return the elements to send, see `View.restored`."""
        del new
        return Hashed(with_changes(self.elements, changes))

    def fates(self, fates: MessageOutcomes) -> MessageOutcomes:
        """Return the fates unchanged."""
        return fates

    def _changed(self, element: int, forms: Changes) -> bytes:
        raise AssertionError(f"chat message {element} is changed by its {len(forms)} forms alone")

    def _extra_key(self, index: int) -> Hashable:
        raise AssertionError(f"chat message {index} is changed by its form alone")

    def _new_element(self, message: Mapping[str, Any], element: int) -> bytes:
        raise AssertionError(f"chat message {element} is replaced by {len(message)} fields as they are")


def loaders(tools: Iterable[tuple[Iterable[Hashable], Iterable[Hashable]]]) -> Collection[int]:
    """Return the messages that last loaded a tool before its last call.

    The definition of a deferred tool only reaches the model through the message that loaded it.

    Args:
        tools: for each message, the names of the tools that it loads, and of those that it calls.
    """
    loaded: dict[Hashable, int] = {}
    needed: dict[Hashable, int] = {}
    for index, (loads, calls) in enumerate(tools):
        if loaded:
            needed |= {name: loaded[name] for name in calls if name in loaded}
        for name in loads:
            loaded[name] = index
    return needed.values()


def opaque(raw: bytes) -> bytes:
    """Return the chat message for an element of an unknown format, which the rules keep unchanged."""
    return encode({"role": OPAQUE, "content": raw.decode("utf-8", "replace")})


def sealed(message: bytes) -> bytes:
    """Return a chat message that may be dropped, but never changed."""
    return encode({**decode(message), **SEAL})


def as_chat_parts(parts: Sequence[Any]) -> list[Any]:
    """Return parts in the form of chat messages.

    Text parts get the type `text`, and fields without a value are removed.
    """
    return [_chat_part(part) for part in parts]


def is_empty_content(content: Any) -> bool:
    """Return True if a shortened content is empty or only has gap marks, so that it can be dropped next to calls."""
    return content is None or (isinstance(content, list) and all(part.get("text") == GAP for part in content))


def parts_as_bytes(
    parts: Iterable[Any], original: Sequence[bytes], write: Callable[[Any], bytes] = encode
) -> Iterator[bytes]:
    """Yield the parts of a changed message as bytes; unchanged parts keep the bytes in `original`."""
    original_of = dict(zip(map(encode, as_chat_parts([decode(raw) for raw in original])), original, strict=True))
    for part in parts:
        yield original_of.get(encode(part)) or write(part)


#: The types of text parts in other APIs. A tuple instead of a set, because the type of a part may be any JSON value,
#: and some are not hashable.
_TEXTS = ("text", "input_text", "output_text")


def _chat_part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return part
    return {**{name: value for name, value in part.items() if value not in (None, [])}, "type": "text"}
