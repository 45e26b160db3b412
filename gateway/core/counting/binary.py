"""Recognize binary data that is written as base64: images, PDFs, audio, video and archives.

A field that no rule knows may hold such data. The model never sees the base64, so it must not be counted as text.

- The first bytes show the format of the data.
- Data without known first bytes is an encrypted blob if its characters are as evenly mixed as those of random bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from gateway.core.counting import media
from gateway.core.counting.media import Media
from gateway.core.counting.tools import compact, strings_of

#: `Media.kind` of data that only its provider can read, such as encrypted reasoning
SEALED: Final = "sealed"
#: Shorter texts, in characters, are not checked for base64. IDs and hashes are shorter, and cost little either way.
_SHORTEST: Final = 256
#: Number of characters that are checked at each end. Data of many megabytes is not read completely.
_CHECKED: Final = 65_536
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]+={0,2}", re.ASCII)
#: All lines of base64 have the same length, which is at least this.
_SHORTEST_LINE: Final = 60
#: `_SAMPLE`: characters in a sample; a shorter text is never treated as encrypted. `_LEAST_DISTINCT`: distinct
#: characters in a sample of encrypted data. Random base64 has about 64. Joined words, hexadecimal digits and filler
#: have far fewer.
_SAMPLE: Final = 512
_LEAST_DISTINCT: Final = 52


def binary_of(text: str) -> Media | None:
    """Return what kind of binary data a text holds, or None for ordinary text.

    An encrypted blob has the kind `SEALED`.
    """
    if text.startswith("data:"):
        return media.from_url(text)
    if len(text) < _SHORTEST or not _is_base64(text[:_CHECKED]) or not _is_base64(text[-_CHECKED:]):
        return None
    item = media.from_base64(text, kind=SEALED)
    return item if item.kind != SEALED or _is_mixed(text) else None


def readable(value: object) -> tuple[str, Sequence[tuple[str, Media]]]:
    """Return a JSON value as text, and the binary data that the text leaves out, each with its `Media`."""
    strings = strings_of(value)
    checked = [(text, binary_of(text)) for text in strings]
    binaries = [(text, item) for text, item in checked if item is not None]
    return "\n".join(text for text, item in checked if item is None) if binaries else compact(value), binaries


def _is_base64(text: str) -> bool:
    if "\n" not in text:
        return _BASE64.fullmatch(text) is not None
    # The first and the last line may be incomplete.
    lines = text.split()
    complete = lines[1:-1] or lines[:1]
    return len({len(line) for line in complete}) == 1 and len(complete[0]) >= _SHORTEST_LINE and all(
        map(_BASE64.fullmatch, lines)
    )  # fmt: skip


def _is_mixed(text: str) -> bool:
    middle = len(text) // 2
    samples = text[:_SAMPLE], text[middle - _SAMPLE // 2 : middle + _SAMPLE // 2]
    return len(text) >= _SAMPLE and all(len({*sample}) >= _LEAST_DISTINCT for sample in samples)
