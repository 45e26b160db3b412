"""Keep the order of roles valid when messages are left out.

Some providers and chat templates accept a user message only after an assistant message, or require the two to
alternate. The gateway does not know which do, but it knows what they accepted: the order that the client keeps. Where a
trim would break that order, something that was left out there stays as a gap mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from typing import Final

from gateway.core.conversation.message import RESULT_ROLES, SYSTEM_ROLES
from gateway.core.conversation.units import Conversation, Item, Unit
from gateway.core.trimming.draft import DROP, KEEP, SUMMARIZED, Decision, Draft, SummaryEntry

#: pairs of neighbouring roles that not every provider accepts
_QUESTIONABLE_PAIRS: Final = frozenset({("tool", "user"), ("user", "user"), ("assistant", "assistant")})
#: a text up to this length is not longer than a gap mark
_GAP_MARK_CHARS: Final = len("[...]")

_Pairs = frozenset[tuple[str, str]]


def restore_role_order(draft: Draft) -> Draft:
    """Return the draft with a gap mark wherever its roles would break the client's order.

    What was sent before has its marks already: it was in order when less of the conversation was known. What follows
    it was not sent yet.
    """
    conversation = draft.conversation
    if not conversation.needs_alternating_roles:
        return draft
    roles = _roles(conversation)
    questionable = _QUESTIONABLE_PAIRS - set(pairwise(role for role in roles if role))
    units = {unit.start: unit for unit in conversation.units}
    changes: dict[int, Decision] = {}
    for before, after in pairwise(_turns(draft, roles)) if questionable else ():
        pair = ("assistant" if isinstance(draft.decisions[before], SummaryEntry) else roles[before], roles[after])
        if pair in questionable:
            left_out = [
                units[i]
                for i in range(before + 1, after)
                if i in units and _keeps_order(units[i], roles, pair, questionable)
            ]
            dropped, summarized = (
                [unit for unit in left_out if draft.decisions[unit.start] == how] for how in (DROP, SUMMARIZED)
            )
            changes.update(_gap_mark(draft, dropped or summarized))
    return _without_counting(draft, changes.keys()).with_decisions(changes) if changes else draft


def _without_counting(draft: Draft, marks: AbstractSet[int]) -> Draft:
    """Return the draft with a summary that does not count the messages that are sent as gap marks."""
    summarized = {index for index in marks if draft.decisions[index] == SUMMARIZED}
    if not summarized or draft.summary is None:
        return draft
    index, summary = draft.summary
    return draft.with_decisions({index: replace(summary, count=summary.count - len(summarized))})


def without_marks(draft: Draft) -> Draft:
    """Return the draft without units that are only gap marks, if they may be changed and are not the task.

    What was left out stays left out in a new choice. The mark may not be needed any more; if it is, it is added again.
    """
    decisions = draft.decisions
    may_go = [unit for unit in draft.open_units() if not unit.bound]
    marks = [unit for unit in may_go if all(decisions[index] == () for index in unit.indices)]
    changes = {i: DROP for unit in marks for i in unit.indices if unit.start != draft.conversation.task}
    return draft.with_decisions(dict[int, Decision](changes)) if changes else draft


def _roles(conversation: Conversation) -> Sequence[str]:
    """Return the role of each message; all tool results have one role, and system messages none: they take no turn."""
    same = {**dict.fromkeys(RESULT_ROLES, "tool"), **dict.fromkeys(SYSTEM_ROLES, "")}
    return [same.get(one.role, one.role) for one in conversation.outlines]


def _turns(draft: Draft, roles: Sequence[str]) -> Sequence[int]:
    """Return the messages that are sent and take a turn."""
    return [i for i, decision in enumerate(draft.decisions) if decision not in (DROP, SUMMARIZED) and roles[i]]


def _keeps_order(unit: Unit, roles: Sequence[str], neighbours: tuple[str, str], questionable: _Pairs) -> bool:
    before, after = neighbours
    return questionable.isdisjoint(pairwise((before, *roles[unit.start : unit.stop], after)))


def _gap_mark(draft: Draft, dropped: Sequence[Unit]) -> dict[int, Decision]:
    """Return the decisions that send a gap mark for the newest of the smallest units that were left out."""
    items = draft.conversation.items

    def size(unit: Unit) -> tuple[bool, int]:
        return unit.sealed and not items[unit.start].is_assistant_text, len(unit.indices)

    unit = min(reversed(dropped), key=size, default=None)
    return {one.index: _least_decision(one) for one in items[unit.start : unit.stop]} if unit is not None else {}


def _least_decision(item: Item) -> Decision:
    """Return the least that can be sent of a message. A signed message can only be replaced or sent as a whole."""
    if item.sealed:
        return () if item.is_assistant_text else KEEP
    return KEEP if item.length <= _GAP_MARK_CHARS and not item.calls else ()
