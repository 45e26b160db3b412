"""Keep bounded caches of conversations, so that a turn costs only its new messages.

It belongs to no session and to no configuration: all of it follows from the messages alone, so that a reload keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from gateway.core.counting.cache import CountCache
from gateway.core.counting.overhead import RecentOverheads
from gateway.core.counting.prefix_cache import PrefixCache
from gateway.core.fitting.reader import Reader

#: What a worker has unless it is told otherwise. A conversation of 100,000 tokens takes 0.5 MB, one that was cut 1.5 to
#: 2 MB more, in all formats but chat most of it as chat messages (`views`).
DEFAULT_BYTES: Final = 256 * 2**20


class ContextCaches:
    """The tables. Threads may share them.

    Args:
        limit_bytes: what all of them may take together.

    Attributes:
        counts: token counts of the messages seen last.
        known: beginnings of requests, as bytes with what they weigh.
        overhead: what stood beside the messages of requests, with what it weighs.
        views: messages of other formats as chat messages.
        book: what is known of chat messages (blocks, terms, what they were cut to) and of whole conversations.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.counts = CountCache(limit_bytes // 8, Lock())
        self.overhead = RecentOverheads(limit_bytes // 32, Lock())
        self.known = PrefixCache(limit_bytes // 4, Lock())
        self.views = CountCache(limit_bytes * 3 // 16, Lock())
        self.book = Reader(_no_weights, limit_bytes=limit_bytes * 13 // 32, lock=Lock())

    @property
    def size_bytes(self) -> int:
        """About what they take now."""
        return sum(table.size_bytes for table in (self.counts, self.known, self.overhead, self.views, self.book))


def _no_weights(messages: Sequence[bytes]) -> Sequence[int]:
    """Weights depend on the model, see `Planner._reader`."""
    raise AssertionError(f"{len(messages)} messages are weighed without a model")
