"""Replace a repeated tool result by a reference to the first one.

Only whole results are compared here. `overlap` compares parts of results, and the choice of blocks gives no value to
text that another kept block already has.
"""

from __future__ import annotations

from typing import Final

from gateway.core.conversation.units import Item
from gateway.core.trimming.draft import KEEP, Decision, Draft, DuplicateResult

#: Characters of the shortest result, or part, that is worth replacing: the reference is about as long.
MIN_RESULT_CHARS: Final = 200


def dedupe(draft: Draft) -> Draft:
    """Replace each changeable result by a reference to the first equal one, if that one is sent whole."""
    seen: dict[bytes, int] = {}
    changes: dict[int, Decision] = {}
    replaceable = replaceable_results(draft)
    for item in draft.conversation.items:
        if not is_comparable(item) or draft.decisions[item.index] != KEEP:
            continue
        first = seen.setdefault(item.text_key, item.index)
        if first != item.index and item.index in replaceable:
            changes[item.index] = DuplicateResult(first)
    return draft.with_decisions(changes) if changes else draft


def replaceable_results(draft: Draft) -> set[int]:
    """Return the messages that may become references; results that others already refer to may not."""
    replaceable = {index for unit in draft.open_units() if not unit.sealed for index in unit.indices}
    return replaceable - draft.references().keys()


def is_comparable(item: Item) -> bool:
    """Return whether an item is a result that is long enough to be compared with others."""
    return item.role == "tool" and not item.sealed and item.length >= MIN_RESULT_CHARS
