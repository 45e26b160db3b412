"""Count the overhead of a request: system prompt, tools and response schema.

An agent sends the same with each turn, so all of it is kept under the bytes of the fields that it is read from. What it
costs is the family's to say (`estimate.py`).
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

#: bytes that one takes beside the fields it was read from
_BYTES: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """What stands beside messages.

    Attributes:
        request: what it was read as; it need not hold the messages.
        counter: what counted it.
        kind: format, counter and system text: sums may go on from those of a request where these are the same.
        system: the system text that is no message, if there is one; `start`: the sums of that, and of no message yet.
        tools: its definitions of tools.
        namespace: tokens of what stands round those of functions, where they are written as OpenAI does.
        forced_name: tokens of the name of the tool that must be called.
        schema: tokens of the schema of the answer, of its name and description.
        others: the fields that nobody here knows; `media`: the media in these.
        marks: those of the request's shape that no message sets, see `Estimate.shape`.
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
    """See `Overhead.marks`."""
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
    """What stood beside the messages of the requests that came last.

    Args:
        limit_bytes: bytes that all may take together; 0 keeps none.
        lock: guards the table where threads share it.
    """

    def __init__(self, limit_bytes: int, lock: AbstractContextManager[object] | None = None) -> None:
        self._cache = CountCache(limit_bytes, lock)

    def find(self, key: Hashable) -> Overhead | None:
        """What is kept under a key, see `keep`."""
        return cast("Overhead | None", self._cache.peek("", key))

    def keep(self, key: Hashable, overhead: Overhead, size: int) -> None:
        """Keep one. `key`: all that its request was read from; `size`: the bytes of that."""
        self._cache.put("", key, overhead, _BYTES + size)

    @property
    def size_bytes(self) -> int:
        """Bytes that they take."""
        return self._cache.size_bytes
