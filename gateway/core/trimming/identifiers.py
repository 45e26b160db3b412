"""Find short numbers and codes that a question may name: `#42`, `line 88`, `NY`.

Such codes occur everywhere and say little, so they are not terms (see `terms`). If the user's newest message names one,
it counts as a term of the blocks that are labelled with it: as a table cell, a field of a row, an id, or a label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

#: Matches a number after `#` or after a word, and a two-letter code.
_NAMED: Final = re.compile(r"(?:#|\b([^\W\d_]{2,}) #?)([0-9]{1,2})(?!\w|[.,:/-][0-9])|(?<![\w.-])([A-Z]{2})(?![\w-])")
#: Words before a number that is only a quantity, not a name.
_QUANTITY_WORDS: Final = frozenset(
    """
    about after all and any at before both but by each every first for from get give in into is just last least most
    next of on only or over past per show take than the these those to top under until up with within
    """.split()  # noqa: SIM905 - as in `terms`
)
#: A text with more characters, or with more than `_MAX_CODES` codes, is no question about a few things.
MAX_QUESTION_CHARS: Final = 2_000
_MAX_CODES: Final = 4
#: Looks like a code, but is only an interjection.
_INTERJECTION: Final = "OK"
#: Matches a code as a whole cell, a field of a row, a label, mostly with its kind, or the value of a field with a name.
_LABELLED: Final = (
    r"(?m)(?:^|(?<=\| )){0}(?= \||$)"
    r"|(?<=\w: ){0}(?=, \w|\})"
    r"|^(?:\w+ )?#?{0}(?=[:.)\]\t])(?!\.[0-9])"
    r"|(?:(?<![^\W_])(?i:id|index|line|no|nr|number|page)|[a-z]Id)\"?: ?\"?{0}(?![\w.])"
)


def find_codes(question: str) -> Sequence[str]:
    """Return the codes that the user's text names; none if there are too many."""
    found = dict[str, None]()
    for match in _NAMED.finditer(question):
        word, number, letters = match.groups()
        if number and (word or "").lower() not in _QUANTITY_WORDS:
            found[number] = None
        elif letters and letters != _INTERJECTION and not question.isupper():
            found[letters] = None
    return [*found] if len(found) <= _MAX_CODES else ()


def find_labelled(codes: Iterable[str], texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the number of each text with a line that is labelled with one of the codes, and that code."""
    any_code = "|".join(codes)
    mention, label = re.compile(rf"\b(?:{any_code})\b"), re.compile(_LABELLED.replace("{0}", f"({any_code})"))
    for number, text in enumerate(texts):
        if mention.search(text):  # most texts have none of the codes, and this check takes a third of the time
            found = dict.fromkeys(match[match.lastindex or 0] for match in label.finditer(text))
            yield from ((number, code) for code in found)
