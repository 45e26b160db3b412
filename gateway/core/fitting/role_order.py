"""Keep the order of roles valid when messages are left out.

Some providers and chat templates take a user's words only behind the assistant's, or one of the two by turns. Which do
is not known here, but what they took is: the order that the client keeps. Where it would be broken, something that was
left out there stays as a gap mark.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from typing import Final

from gateway.core.conversation.message import RESULT_ROLES, SYSTEM_ROLES
from gateway.core.conversation.units import Conversation, Item, Unit
from gateway.core.fitting.draft import DROP, KEEP, SUMMED, Decision, Draft, SummaryEntry

#: neighbours that not everyone takes
_ODD: Final = frozenset({("tool", "user"), ("user", "user"), ("assistant", "assistant")})
#: a text of no more letters than a gap mark has
_SHORT: Final = len("[...]")

_Pairs = frozenset[tuple[str, str]]


def in_order(draft: Draft) -> Draft:
    """The draft with a gap mark wherever its roles would not be in the order that came.

    What was sent before has its marks already, as it was in order with less of the conversation known; what stands
    behind it is not sent yet.
    """
    conversation = draft.conversation
    if not conversation.takes_turns:
        return draft
    roles = _roles(conversation)
    odd = _ODD - set(pairwise(role for role in roles if role))
    units = {unit.start: unit for unit in conversation.units}
    changes: dict[int, Decision] = {}
    for before, behind in pairwise(_told(draft, roles)) if odd else ():
        now = ("assistant" if isinstance(draft.decisions[before], SummaryEntry) else roles[before], roles[behind])
        if now in odd:
            left = [units[i] for i in range(before + 1, behind) if i in units and _fits(units[i], roles, now, odd)]
            gone, told = ([unit for unit in left if draft.decisions[unit.start] == how] for how in (DROP, SUMMED))
            changes.update(_mark(draft, gone or told))
    return _uncounted(draft, changes.keys()).having(changes) if changes else draft


def _uncounted(draft: Draft, marks: AbstractSet[int]) -> Draft:
    """The draft with a summary that does not count the messages in whose place there are marks."""
    told = {index for index in marks if draft.decisions[index] == SUMMED}
    if not told or draft.summary is None:
        return draft
    index, summary = draft.summary
    return draft.having({index: replace(summary, count=summary.count - len(told))})


def without_marks(draft: Draft) -> Draft:
    """The draft with all that may be changed left out of which no more than a mark is sent, but for the task.

    What was left out stays so in a new choice, and the mark may be needed no more; where it is, it comes back.
    """
    decisions = draft.decisions
    may_go = [unit for unit in draft.open_units() if not unit.bound]
    marks = [unit for unit in may_go if all(decisions[index] == () for index in unit.indices)]
    changes = {i: DROP for unit in marks for i in unit.indices if unit.start != draft.conversation.task}
    return draft.having(dict[int, Decision](changes)) if changes else draft


def _roles(conversation: Conversation) -> Sequence[str]:
    """Of each message; those of all results are one, and the system has none, as it takes no turns."""
    same = {**dict.fromkeys(RESULT_ROLES, "tool"), **dict.fromkeys(SYSTEM_ROLES, "")}
    return [same.get(one.role, one.role) for one in conversation.outlines]


def _told(draft: Draft, roles: Sequence[str]) -> Sequence[int]:
    """What is sent and takes a turn."""
    return [i for i, decision in enumerate(draft.decisions) if decision not in (DROP, SUMMED) and roles[i]]


def _fits(unit: Unit, roles: Sequence[str], between: tuple[str, str], odd: _Pairs) -> bool:
    before, behind = between
    return odd.isdisjoint(pairwise((before, *roles[unit.start : unit.stop], behind)))


def _mark(draft: Draft, gone: Sequence[Unit]) -> dict[int, Decision]:
    """Of what was left out, the newest of the smallest, with nothing of it that can be spared."""
    items = draft.conversation.items

    def size(unit: Unit) -> tuple[bool, int]:
        return unit.sealed and not items[unit.start].is_talk, len(unit.indices)

    unit = min(reversed(gone), key=size, default=None)
    return {one.index: _least(one) for one in items[unit.start : unit.stop]} if unit is not None else {}


def _least(item: Item) -> Decision:
    """The least that can stand in its place. What is signed goes with all of it, or stays so."""
    if item.sealed:
        return () if item.is_talk else KEEP
    return KEEP if item.length <= _SHORT and not item.calls else ()
