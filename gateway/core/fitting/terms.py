"""What a text is about: its identifiers, names and words, and how well one text answers another (BM25).

An identifier is what a model copies and never guesses: a number, an id, a path, an address, a name in code. It weighs
most; a plain word weighs little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

WORD: Final = 0
NAME: Final = 1
IDENTIFIER: Final = 2

_TERM: Final = re.compile(r"[^\W_][\w./@:#-]*\w|\w[\w./@:#-]*\w|\w")
_DENSE: Final = re.compile("[\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff]+")
_INNER: Final = re.compile(r"[0-9_/@]|[a-z]\.[a-z]|[a-z][A-Z]")
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


class Lexicon:
    """Terms of texts. It remembers the kind of every term it has met, up to `limit_bytes`; it has no other state."""

    def __init__(self, limit_bytes: int = 8 * 1024 * 1024) -> None:
        self._known: dict[str, tuple[str, int]] = {}
        self._limit = limit_bytes
        self.size_bytes = 0

    def terms(self, text: str) -> dict[str, int]:
        """Term in lower case -> its kind (the highest met in this text)."""
        found: dict[str, int] = {}
        known = self._known
        for token in dict.fromkeys(_TERM.findall(text)):  # in their order, or sums would differ from process to process
            entry = known.get(token)
            if entry is None:
                entry = self._learn(token)
            term, kind = entry
            if kind >= 0 and found.get(term, -1) < kind:
                found[term] = kind
        if not text.isascii():
            found.update((pair, WORD) for pair in _pairs(text))
        return found

    def _learn(self, token: str) -> tuple[str, int]:
        entry = token.lower(), -1 if _DENSE.search(token) else kind_of(token)
        size = _ENTRY_BYTES + 2 * len(token)
        if self.size_bytes + size > self._limit:
            self._known.clear()
            self.size_bytes = 0
        if size <= self._limit:
            self._known[token] = entry
            self.size_bytes += size
        return entry


def _pairs(text: str) -> Iterable[str]:
    """Scripts without spaces: pairs of neighbouring characters stand in for words."""
    for run in _DENSE.findall(text):
        yield from (run[i : i + 2] for i in range(max(1, len(run) - 1)))
