"""Cache what is known of the first messages of a request by the bytes of its array.

To compare bytes is fifty times faster than to hash them, so the text is kept. It belongs to no session: whoever sends
the same bytes goes on from the same sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Final, cast

from gateway.core.counting.cache import CountCache
from gateway.core.counting.measure import Wire
from gateway.core.counting.sums import MessageSums
from gateway.core.values import dataclass

#: Bytes of the shortest text that is kept: a shorter one is weighed anew in less time than it takes to find it.
_LEAST_BYTES: Final = 4096
#: A beginning is found by its sign: the last of some fixed places (offsets in bytes) that its text reaches, and the
#: bytes right before that place. Each place is so many times as far as the one before it.
_GROWTH: Final = 1.2
_SIGN_BYTES: Final = 64
#: beginnings with the same sign that are remembered: of conversations that are about as long and alike at that place
_OF_ONE_SIGN: Final = 16
#: bytes that a beginning takes beside its text, and for each message
_BYTES: Final = 600
_KEY_BYTES: Final = 144


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first messages of an array.

    Attributes:
        text: the array without cache marks, from its bracket to the end of the last of these messages.
        bounds: where each of them starts and stops in the text, one after the other.
        keys: what `keys_of` says of them.
        kind: the kind of the request they were weighed for, see `Beside.kind`.
        sums: the sums of these messages.
        elsewhere: the names by which these messages refer to content that only the provider has
            (`dialects/server_state.py`).
    """

    text: bytes
    bounds: tuple[int, ...]
    keys: tuple[bytes, ...]
    kind: Hashable
    sums: MessageSums
    elsewhere: frozenset[str] = frozenset()

    @property
    def messages(self) -> tuple[bytes, ...]:
        """The messages themselves."""
        return self.between(0, len(self.keys))

    def between(self, first: int, stop: int) -> tuple[bytes, ...]:
        """Some of them."""
        bounds = self.bounds[2 * first : 2 * stop]
        return tuple(map(self.text.__getitem__, map(slice, bounds[::2], bounds[1::2])))

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return _BYTES + len(self.text) + _KEY_BYTES * len(self.keys) + self.sums.size_bytes


class PrefixCache:
    """Beginnings of arrays, bounded in bytes. Of two that threads keep at once, one may be lost: it is weighed anew.

    Args:
        limit_bytes: bytes that all may take together; 0 keeps none.
        lock: guards the table where threads share it.
    """

    def __init__(self, limit_bytes: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._cache = CountCache(limit_bytes, lock)

    def of(self, wire: Wire, array: bytes) -> CachedPrefix | None:
        """The longest known beginning of an array that is JSON, without cache marks."""
        for place in _places(len(array)):
            fits = [known for known in self._at(wire, _sign(array, place)) if _begins(array, known.text)]
            if fits:
                return max(fits, key=lambda known: len(known.text))
        return None

    def keep(self, wire: Wire, beginning: CachedPrefix, instead_of: CachedPrefix | None = None) -> None:
        """Remember a beginning; the shorter one it goes on from is given up for it."""
        if instead_of is not None:
            self._put(wire, instead_of.text, ())
        self._put(wire, beginning.text, (beginning,))

    def _put(self, wire: Wire, text: bytes, new: tuple[CachedPrefix, ...]) -> None:
        """Keep `new`, or nothing, in the place of the beginning with this text."""
        places = _places(len(text))
        if not places:
            return
        sign = _sign(text, places[0])
        others = [known for known in self._at(wire, sign) if known.text != text]
        kept = (*others, *new)[-_OF_ONE_SIGN:]
        self._cache.put(wire, sign, kept, sum(known.size_bytes for known in kept))

    def _at(self, wire: Wire, sign: Hashable) -> tuple[CachedPrefix, ...]:
        return cast("tuple[CachedPrefix, ...]", self._cache.peek(wire, sign) or ())

    @property
    def size_bytes(self) -> int:
        """Bytes that all take together."""
        return self._cache.size_bytes


def is_worth_keeping(text: bytes) -> bool:
    """Whether a text is long enough to be kept."""
    return len(text) >= _LEAST_BYTES


def _places(length: int) -> tuple[int, ...]:
    """The places that a text of this length reaches, the last one first."""
    return _PLACES[: bisect_right(_PLACES, length)][::-1]


def _sign(text: bytes, place: int) -> Hashable:
    return place, text[place - _SIGN_BYTES : place]


def _begins(array: bytes, text: bytes) -> bool:
    """Whether the text is the first elements of the array, and not the half of an element."""
    if not array.startswith(text):
        return False
    end = len(text)
    while array[end] in b" \t\r\n":
        end += 1
    return array[end] in b",]"


def _all_places() -> Iterator[int]:
    place = float(_LEAST_BYTES)
    while place < 2**31:  # more than any body
        yield round(place)
        place *= _GROWTH


_PLACES: Final = tuple(_all_places())
