"""Keep bounded caches of conversations, so that a turn costs only its new messages.

The content depends on the messages only, not on a session or a configuration, so the caches survive a reload.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Final

from gateway.core.counting.cache import CountCache
from gateway.core.counting.overhead import RecentOverheads
from gateway.core.counting.prefix_cache import PrefixCache
from gateway.core.trimming.reader import Reader

#: Default size of all caches of a worker. A conversation of 100,000 tokens takes 0.5 MB. If it was trimmed, it takes
#: 1.5 to 2 MB more. In all formats except chat, most of that is its chat messages (`views`).
DEFAULT_BYTES: Final = 256 * 2**20


class ContextCaches:
    """The caches of a worker. Threads may share them.

    Args:
        limit_bytes: maximum bytes of all caches together.

    Attributes:
        counts: token counts of recent messages.
        prefixes: prefixes of requests: their bytes and token counts.
        overhead: the parts of requests outside their messages, with their token counts.
        views: messages of other formats as chat messages.
        reader: what was read of chat messages (blocks, terms, trimmed forms) and of whole conversations.
    """

    def __init__(self, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.counts = CountCache(limit_bytes // 8, Lock())
        self.overhead = RecentOverheads(limit_bytes // 32, Lock())
        self.prefixes = PrefixCache(limit_bytes // 4, Lock())
        self.views = CountCache(limit_bytes * 3 // 16, Lock())
        self.reader = Reader(_refuse_to_count, limit_bytes=limit_bytes * 13 // 32, lock=Lock())

    @property
    def size_bytes(self) -> int:
        """Return the approximate bytes that the caches use now."""
        return sum(table.size_bytes for table in (self.counts, self.prefixes, self.overhead, self.views, self.reader))


def _refuse_to_count(messages: Sequence[bytes]) -> Sequence[int]:
    """Raise an error: token counts depend on the model, which `Planner._reader` adds."""
    raise AssertionError(f"{len(messages)} messages are counted without a model")
