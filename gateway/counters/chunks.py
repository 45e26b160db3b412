"""Count the tokens of a long text in chunks, so that neither one long word nor one huge text takes seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

#: characters at the end of a chunk that are searched for a space
_SEAM: Final = 2_000
_SPACE: Final = re.compile(r"\s(?=\S*\Z)")


def count_in_chunks(text: str, count: Callable[[str], int], *, chunk: int, most: int) -> int:
    """Return the tokens of a text, counted in chunks that end before a space if one is near.

    Args:
        text: the text.
        count: returns the tokens of a chunk.
        chunk: maximum number of characters given to `count` at once.
        most: Characters of the text that are counted. The rest is assumed to be similar, because no context window
            holds it.
    """
    if len(text) <= chunk:
        return count(text)
    if len(text) > most:
        return round(count_in_chunks(text[:most], count, chunk=chunk, most=most) * len(text) / most)
    total = start = 0
    while start < len(text):
        end = _chunk_end(text, start, chunk)
        total += count(text[start:end])
        start = end
    return total


def _chunk_end(text: str, start: int, chunk: int) -> int:
    """Return the end of the chunk that begins at `start`: before its last space, if one is near."""
    end = start + chunk
    if end >= len(text):
        return len(text)
    space = _SPACE.search(text, end - _SEAM, end)
    return space.start() if space and space.start() > start else end
