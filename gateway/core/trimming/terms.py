"""Find the terms of a text: identifiers, names and words.

An identifier is something that a model copies and cannot guess: a number, an id, a path, an address, a name in code. It
has the highest relevance; a plain word has little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

WORD: Final = 0
NAME: Final = 1
IDENTIFIER: Final = 2

#: Letters and digits with marks between them. One class is used: a repeated group takes memory for each repetition.
_TERM: Final = re.compile(r"\w[\w./@:#-]*(?<=\w)")
_SPACELESS: Final = re.compile("[\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]+")
_IDENTIFIER_MARK: Final = re.compile(r"[0-9_/@]|[a-z]\.[a-z]|[a-z][A-Z]")
#: a number within a term
_NUMBER: Final = re.compile("[0-9]+")
_MIN_CHARS: Final = 3
_MIN_WORD_CHARS: Final = 4
#: Bytes in memory of a term besides its letters: two strings, a pair, and a slot of the table.
_ENTRY_BYTES: Final = 280

#: Common words without meaning of their own; shorter words than four letters are no terms anyway.
STOP_WORDS: Final = frozenset(
    """
    about after again also because been before being between both cannot could does doing down each even from have
    having here into itself just like made make many more most much must need only other over please same should some
    such than that their them then there these they this those through under until upon very want were what when where
    which while will with would your yours true false null none
    """.split()  # noqa: SIM905 - a list would be sixty lines
)


def kind_of(term: str) -> int:
    """Return IDENTIFIER, NAME or WORD, or -1 for a term that is too short or too common to be useful."""
    if len(term) < _MIN_CHARS:
        return -1
    if term.isdigit() or _IDENTIFIER_MARK.search(term):
        return IDENTIFIER if len(term) >= _MIN_WORD_CHARS or term.isdigit() else -1
    if len(term) < _MIN_WORD_CHARS:
        # JFK and USA are codes; other short words are articles and prepositions
        return IDENTIFIER if term.isupper() else -1
    if term.isupper():
        return IDENTIFIER
    if term.lower() in STOP_WORDS:
        return -1
    return NAME if term[0].isupper() else WORD


#: a term in lower case, and its kind
Term = tuple[str, int]


class Lexicon(dict[str, Term | None]):
    """Find terms of texts, and cache each word with its term and kind, or None if it is not a term.

    The cache takes at most `limit_bytes`; a lexicon has no other state.
    """

    def __init__(self, limit_bytes: int = 8 * 1024 * 1024) -> None:
        super().__init__()
        self._limit = limit_bytes
        self.size_bytes = 0

    def terms(self, text: str) -> dict[str, int]:
        """Return each term of a text with its highest kind there."""
        return highest(self.occurrences(text))

    def occurrences(self, text: str) -> list[Term]:
        """Return the terms of a text in their order; a term may occur again as another kind."""
        # Keep their order: sums of floats would otherwise differ between processes.
        found = list(filter(None, map(self.__getitem__, dict.fromkeys(_TERM.findall(text)))))
        return found if text.isascii() else [*found, *((pair, WORD) for pair in character_pairs(text))]

    def __missing__(self, token: str) -> Term | None:
        kind = -1 if not token.isascii() and _SPACELESS.search(token) else kind_of(token)
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
    """Return each term with its highest kind."""
    return {**dict(terms), **dict(sorted(terms, key=itemgetter(1)))}


def shapes_of(terms: Sequence[str]) -> list[str]:
    """Return each term with its numbers replaced by 0: `hat001` and `hat12` both become `hat0`."""
    # One search through all terms at once: a long conversation has ten thousand.
    return _NUMBER.sub("0", "\n".join(terms)).split("\n") if terms else []


def character_pairs(text: str) -> Iterable[str]:
    """Yield pairs of neighbouring characters, which replace words in scripts without spaces."""
    for run in _SPACELESS.findall(text):
        yield from (run[i : i + 2] for i in range(max(1, len(run) - 1)))
