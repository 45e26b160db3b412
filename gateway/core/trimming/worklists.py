"""Find the values of a list that the agent has not used in a tool call yet (open values).

An agent that looked up the first of five reservations will probably look up the others. The list is in one message: in
a tool result, or in the user's words. If one value of the list was an argument of a call, the others are open. A value
is no longer open after a call had it as an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Final

from gateway.core.conversation.message import SYSTEM_ROLES
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.reader import KnownBlocks
from gateway.core.trimming.terms import IDENTIFIER, shapes_of

#: A block with more open values is treated as a table, of which the agent needs only a few rows.
_MAX_VALUES: Final = 12
#: A number with fewer digits is treated as an amount, not as an identifier.
_MIN_DIGITS: Final = 5


def find_open_values(draft: Draft, size: int) -> Mapping[int, frozenset[str]]:
    """Return the open values in the first `size` messages, by message; messages without open values are left out."""
    outlines = draft.conversation.outlines[:size]
    calling = [index for index, one in enumerate(outlines) if one.calls and one.role == "assistant"]
    used = frozenset(chain.from_iterable(draft.known(index).fixed for index in calling))
    found: dict[int, frozenset[str]] = {}
    for index, one in enumerate(outlines) if used else ():
        if one.role == "assistant" or one.role in SYSTEM_ROLES:
            continue
        known = draft.known(index)
        draft.deadline.tick()
        if not used.isdisjoint(known.named) and (values := _open_values(known, used)):
            found[index] = values
    return found


def _open_values(known: KnownBlocks, used: AbstractSet[str]) -> frozenset[str]:
    lists = [terms for terms in known.terms if not used.isdisjoint(terms)]
    return frozenset(chain.from_iterable(_siblings(_identifiers(known, terms), used) for terms in lists))


def _identifiers(known: KnownBlocks, terms: Iterable[str]) -> Sequence[str]:
    return [term for term in terms if known.all_terms[term] == IDENTIFIER and _is_specific(term)]


def _is_specific(term: str) -> bool:
    """Return whether a term can identify one thing. Dates, times and amounts cannot."""
    return any(map(str.isalpha, term)) or (term.isdigit() and len(term) >= _MIN_DIGITS)


def _siblings(terms: Sequence[str], used: Collection[str]) -> Sequence[str]:
    """Return the unused identifiers of a block that have the length or the shape of a used one."""
    shapes = dict(zip(terms, shapes_of(terms), strict=True))
    known = {trait for term in terms if term in used for trait in (shapes[term], len(term))}
    similar = [term for term in terms if term not in used and not known.isdisjoint((shapes[term], len(term)))]
    return similar if len(similar) <= _MAX_VALUES else ()
