"""Find the ends of strings and other runs in JSON text without decoding it.

A repeated group of `re` keeps about 140 bytes for each repetition until the match ends, so a request of 64 MB could
take gigabytes. Possessive repetition would keep nothing, but it matches incorrectly before Python 3.11.5
(https://github.com/python/cpython/issues/106052). Repetition is therefore bounded, and the pattern matched repeatedly.
"""

from __future__ import annotations

import re
from typing import Any, Final, overload

#: matches up to the end of a string, or over its next 1,000 escapes
_IN_STRING: Final = re.compile(rb'[^"\\]*(?:\\.[^"\\]*){0,1000}', re.DOTALL)


@overload
def run_end(pattern: re.Pattern[str], text: str, at: int) -> int: ...
@overload
def run_end(pattern: re.Pattern[bytes], text: bytes | memoryview, at: int) -> int: ...
def run_end(pattern: re.Pattern[Any], text: Any, at: int) -> int:
    """Return where consecutive matches of `pattern` that begin at `at` end; `at` itself if there is no match."""
    while (match := pattern.match(text, at)) is not None and match.end() > at:
        at = match.end()
    return at


def string_end(raw: bytes | memoryview, at: int) -> int:
    """Return the index of the quote that closes the string whose content begins at `at`.

    If the text breaks off inside the string, return the end of the text. Half an escape at the end is left out.
    """
    return run_end(_IN_STRING, raw, at)
