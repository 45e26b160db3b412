"""Map the elements of a request to chat messages and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

from gateway.core.conversation.message import Hashed, decode, encode, instead, key_of
from gateway.core.fitting.blocks import GAP
from gateway.core.fitting.report import UNCHANGED, Fate, Fates

T = TypeVar("T")

#: by index of a chat message, what it became: its bytes, None where it is left out
Changes = Mapping[int, bytes | None]

#: the role of what must be sent as it came, because nobody here knows what it is
OPAQUE = "opaque"

#: bytes that a changed element takes beside its own, and each of its messages in the key
_MADE_BYTES = 300
_PART_BYTES = 300

#: fields that make a chat message one that no rule may change, see `is_signed`
SEAL: Mapping[str, Any] = {"thinking_blocks": True}


class ElementCache(Protocol):
    """Remembers what was read of elements, by a hash of each."""

    def get_keyed(
        self,
        kind: str,
        keys: Sequence[Hashable],
        compute: Callable[[Sequence[int]], Iterable[T]],
        size: Callable[[T], int] | None = None,
    ) -> list[T]:
        """See `CountCache.get_keyed`."""


def entries(
    kind: str,
    elements: Hashed,
    book: ElementCache | None,
    compute: Callable[[bytes], T],
    size: Callable[[T], int],
    *,
    marks: bool = True,
) -> Sequence[T]:
    """What `compute` reads in each element, once for each content where there is a book.

    `marks`: whether it reads anything else where there are cache marks.
    """
    raws = elements.raws
    if book is None:
        return [compute(raw) for raw in raws]
    keys = elements.digests if marks else elements.keys
    return book.get_keyed(kind, keys, lambda missing: (compute(raws[index]) for index in missing), size)


class ChatMessage(NamedTuple):
    """A chat message; its hash without cache marks, and whether it has any."""

    raw: bytes
    key: bytes
    is_marked: bool

    @classmethod
    def of(cls, raw: bytes) -> ChatMessage:
        """With its hash."""
        return cls(raw, *key_of(raw))


def together(messages: Sequence[ChatMessage]) -> Hashed:
    """Messages of a conversation."""
    marked = [index for index, one in enumerate(messages) if one.is_marked]
    return Hashed([one.raw for one in messages], [one.key for one in messages], marked=marked)


class SentElement(NamedTuple):
    """An element to send: the place where it stood, None for a new one; its bytes; their hash without cache marks."""

    place: int | None
    raw: bytes
    key: bytes

    @classmethod
    def of(cls, place: int | None, raw: bytes) -> SentElement:
        """An element that was written just now."""
        return cls(place, raw, key_of(raw)[0])


def to_send(sent: Sequence[SentElement]) -> Hashed:
    """Elements of a request."""
    return Hashed([one.raw for one in sent], [one.key for one in sent])


class _Made(NamedTuple):
    """What became of an element that was changed, None where nothing is left; its hash; bytes that it takes."""

    raw: bytes | None
    key: bytes
    size: int


class View(ABC):
    """The elements of a request's array as chat messages.

    An element may be several messages (an answer to three calls at once), and a message several elements (reasoning and
    the calls that came of it). The elements stay the truth: one that nobody changes goes out as the bytes that came.

    Attributes:
        original: the elements as they stand in the body.
        chat: chat messages, each result directly behind the message that called for it.
        places: of each message, the elements it is made of, ascending.
        held: messages that must be sent as they came, whatever the rules would do with them.
        stale: messages that the provider does not read any more, because something else stands for them.
        needed: messages that should stay as long as they fit, because later ones make use of what is in them.
        following: messages that came of what the one before them in the conversation came of: they stay or go with it.
        leading: messages that cannot be left out, but be cut where they are not sealed, as the results of their calls
            can be.
        bound: messages that must stay unchanged where the provider checks what thinking blocks were created after.
        array: the field they stand in.
        book: remembers what was read of elements.
    """

    array = "messages"

    def __init__(
        self,
        original: Hashed,
        chat: Hashed,
        places: Sequence[Sequence[int]],
        *,
        held: Collection[int] = (),
        stale: Collection[int] = (),
        needed: Collection[int] = (),
        following: Collection[int] = (),
        leading: Collection[int] = (),
        bound: Collection[int] = (),
        book: ElementCache | None = None,
    ) -> None:
        self.original = original
        self.chat = chat
        self.places = tuple(map(tuple, places))
        self.held = frozenset(held)
        self.stale = frozenset(stale)
        self.needed = frozenset(needed)
        self.following = frozenset(following)
        self.leading = frozenset(leading)
        self.bound = frozenset(bound)
        self.book = book

    @property
    def elements(self) -> tuple[bytes, ...]:
        """The elements as they stand in the body."""
        return self.original.raws

    @property
    def messages(self) -> tuple[bytes, ...]:
        """The chat messages."""
        return self.chat.raws

    @cached_property
    def owned(self) -> Sequence[Sequence[int]]:
        """Of each element, its messages."""
        owned: list[list[int]] = [[] for _ in self.elements]
        for message, places in enumerate(self.places):
            for place in places:
                owned[place].append(message)
        return owned

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """The elements to send.

        Args:
            changes: the messages that are not sent as they came.
            new: those among them in whose place another message stands, such as a summary.
        """
        if new:
            return to_send(list(self._sent(changes, new)))
        made = self._made(changes)
        original = enumerate(zip(self.elements, self.original.keys, strict=True))
        sent = [made.get(place, element) for place, element in original]
        left = list(filter(None, sent))
        return Hashed([raw for raw, _ in left], [key for _, key in left])

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[SentElement]:
        """The elements to send, where other messages stand in the place of some; what these stand for is left out."""
        made = self._made({index: None if index in new else form for index, form in changes.items()})
        for place, element in enumerate(zip(self.elements, self.original.keys, strict=True)):
            for index in self.owned[place]:
                added = changes.get(index) if index in new and self.places[index][0] == place else None
                if added is not None:
                    yield SentElement.of(None, self._added(decode(added), place))
            sent = made.get(place, element)
            if sent is not None:
                yield SentElement(place, *sent)

    def shown(self, messages: Sequence[bytes]) -> tuple[bytes, ...]:
        """The elements when each message is sent in another form."""
        pairs = enumerate(zip(self.messages, messages, strict=True))
        return self.restored({index: now for index, (was, now) in pairs if now != was}).raws

    def indices(self, elements: Collection[int]) -> frozenset[int]:
        """The messages of some elements."""
        return frozenset(index for place in elements if 0 <= place < len(self.owned) for index in self.owned[place])

    def fates(self, fates: Fates) -> Fates:
        """The fates of messages as fates of elements. A message's tokens count at the first element it is made of."""
        each, places = tuple(fates), self.places
        return Fates.of(
            [
                each[owned[0]] if len(owned) == 1 and places[owned[0]][0] == element else self._fate(element, each)
                for element, owned in enumerate(self.owned)
            ]
        )

    def _fate(self, element: int, fates: Sequence[Fate]) -> Fate:
        """The fate of one that is several messages, or a part of one."""
        owned = self.owned[element]
        mine = [fates[index] for index in owned]
        first = [fates[index] for index in owned if self.places[index][0] == element]
        told = next((fate for fate in mine if fate.rule not in UNCHANGED), mine[0])
        before, after = sum(fate.tokens_before for fate in first), sum(fate.tokens_after for fate in first)
        return Fate(told.role, before, after, told.rule)

    def _made(self, changes: Changes) -> dict[int, tuple[bytes, bytes] | None]:
        """What the elements of changed messages become, with their hashes; None for those of which nothing is left.

        `_changed`, once for all that it is made of: what a cut made of an element is sent on every turn.
        """
        forms: dict[int, dict[int, bytes | None]] = {}
        stay = set[int]()
        for index in sorted(changes):
            form, places = changes[index], self.places[index]
            for place in places:
                forms.setdefault(place, {})[index] = form
            if form is not None:
                stay.update(places)
        left = [place for place, mine in forms.items() if place in stay or len(mine) < len(self.owned[place])]

        def compute(missing: Iterable[int]) -> Iterator[_Made]:
            for element in (left[number] for number in missing):
                raw = self._changed(element, forms[element])
                written = sum(map(len, filter(None, (raw, *forms[element].values()))))
                size = _MADE_BYTES + _PART_BYTES * len(self.owned[element]) + written
                yield _Made(raw, key_of(raw)[0] if raw is not None else b"", size)

        if self.book is None:
            made = list(compute(range(len(left))))
        else:
            keys = [self._parts(element, forms[element]) for element in left]
            made = self.book.get_keyed(f"changed {self.array}", keys, compute, lambda one: one.size)
        sent = {place: (one.raw, one.key) for place, one in zip(left, made, strict=True) if one.raw is not None}
        return {**dict.fromkeys(forms), **sent}

    def _parts(self, element: int, forms: Changes) -> Hashable:
        """All that `_changed` knows of an element."""
        mine = self.owned[element]
        if len(mine) == len(forms) == 1 and len(self.places[mine[0]]) == 1:
            index = mine[0]
            return self.original.digests[element], self._trait(index), self.chat.digests[index], forms[index]
        return self.original.digests[element], *(self._part(index, element, forms) for index in mine)

    def _part(self, index: int, element: int, forms: Changes) -> Hashable:
        """All that `_changed` knows of one of the messages of an element."""
        about = tuple([place - element for place in self.places[index]]), self._trait(index)
        return about if index not in forms else (*about, self.chat.digests[index], forms[index])

    @abstractmethod
    def _trait(self, index: int) -> Hashable:
        """What else `_changed` knows of a message."""

    @abstractmethod
    def _changed(self, element: int, forms: Changes) -> bytes | None:
        """An element of which some messages are changed or left out, but not all left out; None where nothing stays."""

    @abstractmethod
    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        """A text of the assistant's that stands for what is left out, as an element in the place of another."""


class ChatView(View):
    """Chat messages, which are their own view."""

    def __init__(self, original: Hashed, book: ElementCache | None = None) -> None:
        del book  # nothing has to be read
        super().__init__(original, original, list(zip(range(len(original.raws)))))

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """See `View.restored`."""
        del new
        return Hashed(instead(self.elements, changes))

    def fates(self, fates: Fates) -> Fates:
        """See `View.fates`."""
        return fates

    def _changed(self, element: int, forms: Changes) -> bytes:
        raise AssertionError(f"chat message {element} is changed by its {len(forms)} forms alone")

    def _trait(self, index: int) -> Hashable:
        raise AssertionError(f"chat message {index} is changed by its form alone")

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        raise AssertionError(f"chat message {element} is replaced by {len(message)} fields as they are")


def loaders(tools: Iterable[tuple[Iterable[Hashable], Iterable[Hashable]]]) -> Collection[int]:
    """The messages that loaded a tool last before it was called last.

    The definition of a tool that was deferred reaches the model only through the message that loaded it.

    Args:
        tools: of each message, the names of the tools that it loads, and of those that it calls.
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
    """The chat message for an element that nobody here can read; the rules leave it alone."""
    return encode({"role": OPAQUE, "content": raw.decode("utf-8", "replace")})


def sealed(message: bytes) -> bytes:
    """A chat message that may be left out, but never changed."""
    return encode({**decode(message), **SEAL})


def said(parts: Sequence[Any]) -> list[Any]:
    """Parts as a chat request writes them: texts of any name as `text`, without the fields that say nothing."""
    return [_part(part) for part in parts]


def says_nothing(content: Any) -> bool:
    """Whether nothing is left of a content that was cut but gap marks: beside calls they need not be sent."""
    return content is None or (isinstance(content, list) and all(part.get("text") == GAP for part in content))


def as_came(parts: Iterable[Any], original: Sequence[bytes], write: Callable[[Any], bytes] = encode) -> Iterator[bytes]:
    """Parts of a changed message as bytes; one that was not changed, as the bytes in `original` that it was read of."""
    known = dict(zip(map(encode, said([decode(raw) for raw in original])), original, strict=True))
    for part in parts:
        yield known.get(encode(part)) or write(part)


#: What other APIs call a text. A tuple and no set: a part's type may be any JSON, which cannot always be hashed.
_TEXTS = ("text", "input_text", "output_text")


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return part
    return {**{name: value for name, value in part.items() if value not in (None, [])}, "type": "text"}
