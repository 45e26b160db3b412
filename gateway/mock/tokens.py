"""Count tokens in a fixed way, without a tokenizer.

One token is a run of ASCII letters and underscores, a run of ASCII digits, or any other single character that is not
ASCII whitespace (so each CJK character is one). `count` and `pieces` agree on this; `count` never builds the pieces,
which keeps a body of 4 MB well under 100 ms.
"""

from __future__ import annotations

import re
import string
from itertools import islice
from typing import Final

#: What an inlined file (`data:` URL) costs, whatever its size: nobody bills base64 as text.
FILE_TOKENS: Final = 85
#: What each message costs beyond its text.
MESSAGE_TOKENS: Final = 4

_PIECE: Final = re.compile(r"\s*(?:[A-Za-z_]+|[0-9]+|[^\sA-Za-z_0-9])", re.ASCII)

_LETTERS: Final = frozenset((string.ascii_letters + "_").encode())
_DIGITS: Final = frozenset(string.digits.encode())
_SPACE: Final = frozenset(b" \t\n\r\f\v")
_CONTINUATION: Final = frozenset(range(0x80, 0xC0))

_WORD_TABLE: Final = bytes(ord("x") if byte in _LETTERS else ord(" ") for byte in range(256))
_DIGIT_TABLE: Final = bytes(ord("x") if byte in _DIGITS else ord(" ") for byte in range(256))
#: UTF-8 bytes that do not begin a token of their own: a character outside ASCII counts once, by its first byte.
_NOT_SINGLE: Final = bytes(sorted(_LETTERS | _DIGITS | _SPACE | _CONTINUATION))


def count(text: str) -> int:
    """Tokens of `text`, >= 0."""
    data = b" " + text.encode("utf-8", "surrogatepass")
    words = data.translate(_WORD_TABLE).count(b" x")
    digits = data.translate(_DIGIT_TABLE).count(b" x")
    return words + digits + len(data.translate(None, _NOT_SINGLE))


def pieces(text: str) -> list[str]:
    """The tokens of `text`, each with the whitespace before it; whitespace at the end joins the last one."""
    found = _PIECE.findall(text)
    tail = text[sum(map(len, found)) :]
    if found:
        found[-1] += tail
    elif tail:
        found.append(tail)
    return found


def truncate(text: str, limit: int | None) -> tuple[str, bool]:
    """The first `limit` tokens of `text` (None: all), and whether anything was cut."""
    if limit is None or count(text) <= limit:
        return text, False
    kept = islice(_PIECE.finditer(text), limit)
    end = max((match.end() for match in kept), default=0)
    return text[:end], True


def count_json(value: object) -> int:
    """Tokens of all text inside a decoded JSON value; keys and the tags `type` and `role` are not text."""
    total = 0
    waiting = [value]  # No function that calls itself: JSON can be read deeper than functions may call each other.
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += FILE_TOKENS if item.startswith("data:") else count(item)
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += (inner for key, inner in item.items() if key not in {"type", "role"})
        else:
            total += item is not None
    return total
