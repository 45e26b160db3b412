"""Read old messages a few at a time on the turns before a trim, so that the trim is fast.

It decides nothing: a cut that finds nothing read reads all of it and comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Final

from gateway.core.conversation.message import Hashed
from gateway.core.conversation.units import Conversation, ConversationOutline
from gateway.core.fitting.deadline import Deadline, DeadlinePassed, never
from gateway.core.fitting.dedupe import may_share
from gateway.core.fitting.overlap import parts_of
from gateway.core.fitting.reader import Reader, RenderOrder

#: A cut is near enough from here on, as a share of the budget, and by the end all was read once: the turn that is over
#: the budget comes after one that was below it by what a turn adds.
START: Final = 0.5
END: Final = 0.95
#: Messages (elements, in other formats) and bytes of a turn: a few times what a turn adds. Those that were read on the
#: turn before are cheap, and what stands at the edge as a part of something is mostly whole then.
MOST_MESSAGES: Final = 16
MOST_BYTES: Final = 32 * 1024


class _Passing:
    """Reads messages that are no whole conversation: what they are together is not worth being remembered."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def outline(self, keys: Sequence[bytes], messages: Sequence[bytes]) -> ConversationOutline:
        """See `SketchBook.outline`."""
        return ConversationOutline().plus(self._reader.outlines(keys, messages))


def due(count: int, filled: float) -> range:
    """Which of `count` messages are to be read by now; `filled`: their share of the budget."""
    stop = max(0, math.ceil(count * min(1.0, (filled - START) / (END - START))))
    return range(max(0, stop - MOST_MESSAGES), stop)


def read_ahead(messages: Hashed, reader: Reader, expired: Callable[[], bool] = never) -> int:
    """Read what a cut has to know of these messages, of the last of them if they are large; how many were looked at."""
    few = sum(1 for size in accumulate(len(raw) for raw in reversed(messages.raws)) if size <= MOST_BYTES)
    if not few:
        return 0
    some = slice(len(messages.raws) - few, None)
    part = Conversation.of(Hashed(messages.raws[some], messages.keys[some]), _Passing(reader))
    watch = Deadline(expired)
    with suppress(DeadlinePassed):
        reader.know(part.keys, part.messages, watch)
        # as a choice begins: with nothing of them taken
        orders = [
            RenderOrder(item, raw, ()) for item, raw in zip(part.items, part.messages, strict=True) if not item.sealed
        ]
        made = reader.make(orders, watch)
        reader.outlines([one.key for one in made], [one.raw or b"" for one in made])
        for item, raw in zip(part.items, part.messages, strict=True):
            if may_share(item):
                parts_of(item, raw, reader, watch)
    return few
