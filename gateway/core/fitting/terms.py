"""Find the terms of a text (identifiers, names, words), and rank texts by them (BM25).

An identifier is what a model copies and never guesses: a number, an id, a path, an address, a name in code. It weighs
most; a plain word weighs little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

WORD: Final = 0
NAME: Final = 1
IDENTIFIER: Final = 2

#: Letters and digits, and marks between them. As one class, because a repeated group keeps memory for each repetition.
_TERM: Final = re.compile(r"\w[\w./@:#-]*(?<=\w)")
_DENSE: Final = re.compile("[\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]+")
_INNER: Final = re.compile(r"[0-9_/@]|[a-z]\.[a-z]|[a-z][A-Z]")
#: a number within a term
_NUMBER: Final = re.compile("[0-9]+")
_SHORTEST: Final = 3
_SHORTEST_WORD: Final = 4
#: what a term takes beside its letters: two strings, a pair, a slot in the table
_ENTRY_BYTES: Final = 280

#: Words that say nothing about the matter; only those of four letters and more are looked at.
_STOP: Final = frozenset(
    """
    about after again also because been before being between both cannot could does doing down each even from have
    having here into itself just like made make many more most much must need only other over please same should some
    such than that their them then there these they this those through under until upon very want were what when where
    which while will with would your yours true false null none
    """.split()  # noqa: SIM905 - a list would be sixty lines
)


def kind_of(term: str) -> int:
    """IDENTIFIER, NAME, WORD, or -1 for what is too short or too common to mean anything."""
    if len(term) < _SHORTEST:
        return -1
    if term.isdigit() or _INNER.search(term):
        return IDENTIFIER if len(term) >= _SHORTEST_WORD or term.isdigit() else -1
    if len(term) < _SHORTEST_WORD:
        # JFK, USA: codes; other short words are articles and prepositions
        return IDENTIFIER if term.isupper() else -1
    if term.isupper():
        return IDENTIFIER
    if term.lower() in _STOP:
        return -1
    return NAME if term[0].isupper() else WORD


#: in lower case, and its kind
Term = tuple[str, int]


class Lexicon(dict[str, Term | None]):
    """Terms of texts. It remembers every word it has met as a term and its kind, None for what means nothing.

    Up to `limit_bytes`; it has no other state.
    """

    def __init__(self, limit_bytes: int = 8 * 1024 * 1024) -> None:
        super().__init__()
        self._limit = limit_bytes
        self.size_bytes = 0

    def terms(self, text: str) -> dict[str, int]:
        """Term -> its kind, the highest met in this text."""
        return highest(self.found(text))

    def found(self, text: str) -> list[Term]:
        """The terms as they are met; one may be met again as another kind."""
        # in their order, or sums would differ from process to process
        found = list(filter(None, map(self.__getitem__, dict.fromkeys(_TERM.findall(text)))))
        return found if text.isascii() else [*found, *((pair, WORD) for pair in _pairs(text))]

    def __missing__(self, token: str) -> Term | None:
        kind = -1 if not token.isascii() and _DENSE.search(token) else kind_of(token)
        entry = (token.lower(), kind) if kind >= 0 else None
        size = _ENTRY_BYTES + 2 * len(token)
        if self.size_bytes + size > self._limit:
            self.clear()
            self.size_bytes = 0
        if size <= self._limit:
            self[token] = entry
            self.size_bytes += size
        return entry


def highest(terms: Sequence[Term]) -> dict[str, int]:
    """Every term with the highest kind that it was met as."""
    return {**dict(terms), **dict(sorted(terms, key=itemgetter(1)))}


def shapes_of(terms: Sequence[str]) -> list[str]:
    """What each term looks like, whatever its numbers are: `hat001` and `hat12` are both `hat0`."""
    # One search through all of them: there are ten thousand in a long conversation.
    return _NUMBER.sub("0", "\n".join(terms)).split("\n") if terms else []


def _pairs(text: str) -> Iterable[str]:
    """Scripts without spaces: pairs of neighbouring characters stand in for words."""
    for run in _DENSE.findall(text):
        yield from (run[i : i + 2] for i in range(max(1, len(run) - 1)))
