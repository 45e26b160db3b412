"""A request's messages in the words of a chat request, and the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from gateway.core.fitting.blocks import GAP
from gateway.core.fitting.receipt import UNCHANGED, Fate, Fates
from gateway.core.message import decode, digest, encode

T = TypeVar("T")

#: by index of a chat message, what it became: its bytes, None where it is left out
Changes = Mapping[int, bytes | None]

#: the role of what must be sent as it came, because nobody here knows what it is
OPAQUE = "opaque"

#: bytes that a changed element takes beside its own, and each of its messages in the key
_MADE_BYTES = 200
_PART_BYTES = 300

#: fields that make a chat message one that no rule may change, see `is_signed`
SEAL: Mapping[str, Any] = {"thinking_blocks": True}


class Book(Protocol):
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
    kind: str, elements: Sequence[bytes], book: Book | None, compute: Callable[[bytes], T], size: Callable[[T], int]
) -> Sequence[T]:
    """What `compute` reads in each element, once for each content where there is a book."""
    if book is None:
        return [compute(raw) for raw in elements]
    keys = [digest(raw) for raw in elements]
    return book.get_keyed(kind, keys, lambda missing: (compute(elements[index]) for index in missing), size)


class View(ABC):
    """The elements of a request's array as chat messages.

    An element may be several messages (an answer to three calls at once), and a message several elements (reasoning and
    the calls that came of it). The elements stay the truth: one that nobody changes goes out as the bytes that came.

    Attributes:
        elements: as they stand in the body.
        messages: chat messages, each result directly behind the message that called for it.
        places: of each message, the elements it is made of, ascending.
        held: messages that must be sent as they came, whatever the rules would do with them.
        stale: messages that the provider does not read any more, because something else stands for them.
        array: the field they stand in.
        book: remembers what was read of elements.
    """

    array = "messages"

    def __init__(
        self,
        elements: Sequence[bytes],
        messages: Sequence[bytes],
        places: Sequence[Sequence[int]],
        *,
        held: Collection[int] = (),
        stale: Collection[int] = (),
        book: Book | None = None,
    ) -> None:
        self.elements = tuple(elements)
        self.messages = tuple(messages)
        self.places = tuple(map(tuple, places))
        self.held = frozenset(held)
        self.stale = frozenset(stale)
        self.book = book

    @cached_property
    def owned(self) -> Sequence[Sequence[int]]:
        """Of each element, its messages."""
        owned: list[list[int]] = [[] for _ in self.elements]
        for message, places in enumerate(self.places):
            for place in places:
                owned[place].append(message)
        return owned

    def restored(self, changes: Changes, new: Collection[int] = ()) -> tuple[bytes, ...]:
        """The elements to send.

        Args:
            changes: the messages that are not sent as they came.
            new: those among them in whose place another message stands, such as a summary.
        """
        return tuple([raw for _, raw in self._sent(changes, new)])

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[tuple[int | None, bytes]]:
        """The elements to send, each with the place where it stood; None for a new one."""
        for element, (raw, mine) in enumerate(zip(self.elements, self.owned, strict=True)):
            for index in mine:
                added = changes.get(index) if index in new and self.places[index][0] == element else None
                if added is not None:
                    yield None, self._added(decode(added), element)
            forms = {index: None if index in new else changes[index] for index in mine if index in changes}
            if not forms:
                yield element, raw
            elif len(forms) < len(mine) or any(form is not None for form in forms.values()):
                changed = self._made(element, forms)
                if changed is not None:
                    yield element, changed

    def shown(self, messages: Sequence[bytes]) -> tuple[bytes, ...]:
        """The elements when each message is sent in another form."""
        pairs = enumerate(zip(self.messages, messages, strict=True))
        return self.restored({index: now for index, (was, now) in pairs if now != was})

    def indices(self, elements: Collection[int]) -> frozenset[int]:
        """The messages of some elements."""
        return frozenset(index for place in elements if 0 <= place < len(self.owned) for index in self.owned[place])

    def fates(self, fates: Fates) -> Fates:
        """The fates of messages as fates of elements. A message's tokens count at the first element it is made of."""
        each = tuple(fates)
        return Fates.of([self._fate(element, each) for element in range(len(self.elements))])

    def _fate(self, element: int, fates: Sequence[Fate]) -> Fate:
        owned = self.owned[element]
        if len(owned) == 1 and self.places[owned[0]][0] == element:
            return fates[owned[0]]
        mine = [fates[index] for index in owned]
        first = [fates[index] for index in owned if self.places[index][0] == element]
        told = next((fate for fate in mine if fate.rule not in UNCHANGED), mine[0])
        before, after = sum(fate.tokens_before for fate in first), sum(fate.tokens_after for fate in first)
        return Fate(told.role, before, after, told.rule)

    def _made(self, element: int, forms: Changes) -> bytes | None:
        """`_changed`, once for all that it is made of: what a cut made of an element is sent on every turn."""
        if self.book is None:
            return self._changed(element, forms)
        parts = [self._part(index, element, forms) for index in self.owned[element]]
        made: list[tuple[bytes | None]] = self.book.get_keyed(
            f"changed {self.array}",
            [(digest(self.elements[element]), *parts)],
            lambda _: [(self._changed(element, forms),)],
            lambda one: _MADE_BYTES + _PART_BYTES * len(parts) + len(one[0] or b""),
        )
        return made[0][0]

    def _part(self, index: int, element: int, forms: Changes) -> Hashable:
        """All that `_changed` knows of one of the messages of an element."""
        about = tuple([place - element for place in self.places[index]]), self._trait(index)
        if index not in forms:
            return about
        form = forms[index]
        return *about, digest(self.messages[index]), digest(form) if form is not None else None

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

    def __init__(self, elements: Sequence[bytes], book: Book | None = None) -> None:
        del book  # nothing has to be read
        super().__init__(elements, elements, list(zip(range(len(elements)))))

    def restored(self, changes: Changes, new: Collection[int] = ()) -> tuple[bytes, ...]:
        """See `View.restored`."""
        del new
        forms: list[bytes | None] = list(self.elements)
        for index, form in changes.items():
            forms[index] = form
        return tuple([form for form in forms if form is not None])

    def fates(self, fates: Fates) -> Fates:
        """See `View.fates`."""
        return fates

    def _changed(self, element: int, forms: Changes) -> bytes:
        raise AssertionError(f"chat message {element} is changed by its {len(forms)} forms alone")

    def _trait(self, index: int) -> Hashable:
        raise AssertionError(f"chat message {index} is changed by its form alone")

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        raise AssertionError(f"chat message {element} is replaced by {len(message)} fields as they are")


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


def as_came(parts: Iterable[Any], came: Sequence[bytes], write: Callable[[Any], bytes] = encode) -> Iterator[bytes]:
    """Parts of a changed message as bytes; one that was not changed, as the bytes in `came` that it was read of."""
    known = dict(zip(map(encode, said([decode(raw) for raw in came])), came, strict=True))
    for part in parts:
        yield known.get(encode(part)) or write(part)


#: What other APIs call a text. A tuple and no set: a part's type may be any JSON, which cannot always be hashed.
_TEXTS = ("text", "input_text", "output_text")


def _part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in _TEXTS:
        return part
    return {**{name: value for name, value in part.items() if value not in (None, [])}, "type": "text"}
