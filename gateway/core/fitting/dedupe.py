"""Replace a repeated tool result by a reference to the first one.

Only whole results are compared here; parts that two results share are the business of the choice of blocks, which
gives nothing for what is kept already.
"""

from __future__ import annotations

from typing import Final

from gateway.core.conversation.units import Item
from gateway.core.fitting.draft import KEEP, Decision, Draft, DuplicateResult

#: a result, or a part of one, that is shorter is not longer than the words that would stand for it
SHORTEST: Final = 200


def dedupe(draft: Draft) -> Draft:
    """Point every result that may be changed at the first result with the same content, if that is sent whole."""
    seen: dict[bytes, int] = {}
    changes: dict[int, Decision] = {}
    free = may_point(draft)
    for item in draft.conversation.items:
        if not may_share(item) or draft.decisions[item.index] != KEEP:
            continue
        first = seen.setdefault(item.text_key, item.index)
        if first != item.index and item.index in free:
            changes[item.index] = DuplicateResult(first)
    return draft.having(changes) if changes else draft


def may_point(draft: Draft) -> set[int]:
    """The messages that may come to point at others: not those that others point at already."""
    free = {index for unit in draft.open_units() if not unit.sealed for index in unit.indices}
    return free - draft.pointing().keys()


def may_share(item: Item) -> bool:
    """Whether it is a result long enough to be compared with others."""
    return item.role == "tool" and not item.sealed and item.length >= SHORTEST
