"""Count the overhead of a request: system prompt, tools and response schema.

An agent sends the same overhead with each turn, so it is cached under the bytes of its fields. The model family turns
the counts into provider tokens (`estimate.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Final, cast

from gateway.core.counting.cache import CountCache
from gateway.core.counting.definitions import ToolDefinitions
from gateway.core.counting.measure import MeasuredMessage, TokenCounter
from gateway.core.counting.media import Media
from gateway.core.counting.request import RequestParts
from gateway.core.counting.sums import MessageSums
from gateway.core.values import dataclass

#: bytes that an overhead takes in addition to the fields it was read from
_BYTES: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """The counted parts of a request that are not messages.

    Attributes:
        request: the parsed request; it need not contain the messages.
        counter: the token counter.
        kind: wire format, counter and system prompt, see `Estimator.kind`.
        system: the separate system prompt, if there is one.
        start: the sums of the separate system prompt, without any message.
        tools: the tool definitions.
        namespace: tokens of the text around the function declarations in OpenAI's notation.
        forced_name: tokens of the name of the tool that must be called.
        schema: tokens of the response schema with its name and description.
        others: the unknown fields.
        media: the media in the unknown fields.
        marks: the marks of the request shape that come from no message, see `Estimate.shape`.
    """

    request: RequestParts
    counter: TokenCounter
    kind: Hashable
    system: tuple[MeasuredMessage, ...]
    start: MessageSums
    tools: ToolDefinitions
    namespace: int
    forced_name: int
    schema: int
    others: tuple[MeasuredMessage, ...]
    media: tuple[Media, ...]
    marks: frozenset[str]


def marks_of(request: RequestParts, tools: ToolDefinitions) -> frozenset[str]:
    """Return the marks of the request shape that come from no message."""
    return frozenset(_marks(request, tools))


def _marks(request: RequestParts, tools: ToolDefinitions) -> Iterator[str]:
    if tools.count > 0:
        yield "tools"
    if request.forced:
        yield "forced"
    if request.schema is not None:
        yield "schema"
    if request.thinking:
        yield "thinking"
    if request.server or tools.server > 0 or tools.deferred > 0:
        yield "server"
    if request.others:
        yield "other"


class RecentOverheads:
    """Cache the overheads of recent requests.

    Args:
        limit_bytes: maximum size of all entries together; 0 stores nothing.
        lock: guards the table if threads share it.
    """

    def __init__(self, limit_bytes: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._cache = CountCache(limit_bytes, lock)

    def find(self, key: Hashable) -> Overhead | None:
        """Return the overhead that `keep` stored under a key, or None."""
        return cast("Overhead | None", self._cache.peek("", key))

    def keep(self, key: Hashable, overhead: Overhead, size: int) -> None:
        """Store an overhead.

        Args:
            key: everything that the request was read from.
            overhead: the overhead.
            size: bytes of the key.
        """
        self._cache.put("", key, overhead, _BYTES + size)

    @property
    def size_bytes(self) -> int:
        """Return the size of all entries in bytes."""
        return self._cache.size_bytes
