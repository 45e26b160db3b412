"""Find values that the agent has still to work through.

An agent that looks up the first of five reservations will mostly look up the others. The list came in one message, as a
value of a result or in the user's words. If a call already had one value of the list as an argument, the others are
open until a call has them too.
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

#: A block with more open values is no list to work through, but a table of which a few rows are wanted.
_MAX_VALUES: Final = 12
#: A number with fewer digits is mostly an amount.
_MIN_DIGITS: Final = 5


def find_open_values(draft: Draft, size: int) -> Mapping[int, frozenset[str]]:
    """Return the open values of each of the first `size` messages that has some."""
    outlines = draft.conversation.outlines[:size]
    calling = [index for index, one in enumerate(outlines) if one.calls and one.role == "assistant"]
    passed = frozenset(chain.from_iterable(draft.known(index).fixed for index in calling))
    found: dict[int, frozenset[str]] = {}
    for index, one in enumerate(outlines) if passed else ():
        if one.role == "assistant" or one.role in SYSTEM_ROLES:
            continue
        known = draft.known(index)
        draft.deadline.tick()
        if not passed.isdisjoint(known.named) and (values := _open_values(known, passed)):
            found[index] = values
    return found


def _open_values(known: KnownBlocks, passed: AbstractSet[str]) -> frozenset[str]:
    lists = [terms for terms in known.terms if not passed.isdisjoint(terms)]
    return frozenset(chain.from_iterable(_siblings(_identifiers(known, terms), passed) for terms in lists))


def _identifiers(known: KnownBlocks, terms: Iterable[str]) -> Sequence[str]:
    return [term for term in terms if known.all_terms[term] == IDENTIFIER and _is_specific(term)]


def _is_specific(term: str) -> bool:
    """Return whether a term can name one thing of many: dates, times and amounts all look alike."""
    return any(map(str.isalpha, term)) or (term.isdigit() and len(term) >= _MIN_DIGITS)


def _siblings(terms: Sequence[str], passed: Collection[str]) -> Sequence[str]:
    """Return the identifiers of a block that look like one that a call had: as long, or of the same shape."""
    shapes = dict(zip(terms, shapes_of(terms), strict=True))
    known = {look for term in terms if term in passed for look in (shapes[term], len(term))}
    alike = [term for term in terms if term not in passed and not known.isdisjoint((shapes[term], len(term)))]
    return alike if len(alike) <= _MAX_VALUES else ()
