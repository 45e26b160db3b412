"""Read old messages a few at a time on the turns before a trim, so that the trim is fast.

It decides nothing. A trim without it reads all messages itself and has the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final

from gateway.core.conversation.message import Hashed
from gateway.core.conversation.units import Conversation, ConversationOutline
from gateway.core.trimming.deadline import Deadline, DeadlinePassed, never
from gateway.core.trimming.dedupe import is_comparable
from gateway.core.trimming.overlap import parts_of
from gateway.core.trimming.reader import Reader, RenderOrder

#: Reading starts at this share of the budget and is complete at the second one. A trim is needed when a turn exceeds
#: the budget, and the turn before was below it by what one turn adds.
START: Final = 0.5
END: Final = 0.95
#: Messages (elements, in other formats) and bytes that are read per turn, a few times what a turn adds. Messages that
#: the turn before has read are cheap. A message that was cut off at the edge then is mostly complete now.
MOST_MESSAGES: Final = 16
MOST_BYTES: Final = 32 * 1024


class _UncachedParser:
    """Read messages that are not a whole conversation, without caching what they are together."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def outline(self, keys: Sequence[bytes], messages: Sequence[bytes]) -> ConversationOutline:
        """Return the outline of the messages together, as `MessageParser.outline` does."""
        return ConversationOutline().plus(self._reader.outlines(keys, messages))


def messages_to_read(count: int, filled: float) -> range:
    """Return which of `count` messages to read by now. `filled`: the share of the budget that they take."""
    stop = max(0, math.ceil(count * min(1.0, (filled - START) / (END - START))))
    return range(max(0, stop - MOST_MESSAGES), stop)


def read_ahead(messages: Hashed, reader: Reader, expired: Callable[[], bool] = never) -> int:
    """Read what a trim will need of these messages, only the last ones if they are large; return how many."""
    few = sum(1 for size in accumulate(len(raw) for raw in reversed(messages.raws)) if size <= MOST_BYTES)
    if not few:
        return 0
    some = slice(len(messages.raws) - few, None)
    part = Conversation.of(Hashed(messages.raws[some], messages.keys[some]), _UncachedParser(reader))
    deadline = Deadline(expired)
    with suppress(DeadlinePassed):
        reader.read_blocks(part.keys, part.messages, deadline)
        # A choice starts with all blocks of these messages left out.
        orders = [
            RenderOrder(item, raw, ()) for item, raw in zip(part.items, part.messages, strict=True) if not item.sealed
        ]
        made = reader.render(orders, deadline)
        reader.outlines([one.key for one in made], [one.raw or b"" for one in made])
        for item, raw in zip(part.items, part.messages, strict=True):
            if is_comparable(item):
                parts_of(item, raw, reader, deadline)
    return few
