"""Reading ahead: what a cut has to know of old messages is read a few at a time, on the turns before it.

It decides nothing: a cut that finds nothing read reads all of it and comes to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from typing import Final

from gateway.core.conversation import Conversation
from gateway.core.fitting.dedupe import may_share
from gateway.core.fitting.overlap import parts_of
from gateway.core.fitting.reader import Order, Reader
from gateway.core.fitting.watch import Expired, Watch, never
from gateway.core.message import Hashed

#: A cut is near enough from here on, as a share of the budget, and by the end all was read once: the turn that is over
#: the budget comes after one that was below it by what a turn adds.
START: Final = 0.5
END: Final = 0.95
#: messages and bytes of a turn: a few times what a turn adds
MOST_MESSAGES: Final = 8
MOST_BYTES: Final = 32 * 1024


def read_ahead(messages: Hashed, filled: float, reader: Reader, expired: Callable[[], bool] = never) -> int:
    """Read a few of the messages ahead of a cut; how many were looked at. `filled`: their share of the budget."""
    stop = math.ceil(len(messages.raws) * min(1.0, (filled - START) / (END - START)))
    raws = messages.raws[max(0, stop - MOST_MESSAGES) : max(0, stop)]
    few = sum(1 for size in accumulate(len(raw) for raw in reversed(raws)) if size <= MOST_BYTES)
    if not few:
        return 0
    some = slice(stop - few, stop)
    part = Conversation.of(Hashed(messages.raws[some], messages.keys[some]), reader)
    watch = Watch(expired)
    with suppress(Expired):
        reader.know(part.keys, part.messages, watch)
        # as a choice begins: with nothing of them taken
        orders = [Order(item, raw, ()) for item, raw in zip(part.items, part.messages, strict=True) if not item.sealed]
        made = reader.make(orders, watch)
        reader.sketches([one.key for one in made], [one.raw or b"" for one in made])
        for item, raw in zip(part.items, part.messages, strict=True):
            if may_share(item):
                parts_of(item, raw, reader, watch)
    return few
