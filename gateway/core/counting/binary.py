"""Recognize binary data that is written as text: base64 of images, PDFs, audio, video and archives.

A field that no rule knows may hold any of them. A model is not shown the base64, so it must not be counted as text. The
first bytes say what the data is. Data without known first bytes is an encrypted blob if its characters are as evenly
mixed as those of random bytes.
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
#: Characters of the shortest base64 that is told from text. Ids and hashes are shorter, and cost little either way.
_SHORTEST: Final = 256
#: Characters at each end that are checked. Data of many megabytes is not read through.
_CHECKED: Final = 65_536
_BASE64: Final = re.compile(r"[A-Za-z0-9+/_-]+={0,2}", re.ASCII)
#: lines of base64 have one length, at least this
_SHORTEST_LINE: Final = 60
#: Characters of a sample, which is also the shortest encrypted blob, and distinct ones in it. Random base64 has about
#: 64. Words written together, hexadecimal digits and filler have far fewer.
_SAMPLE: Final = 512
_LEAST_DISTINCT: Final = 52


def binary_of(text: str) -> Media | None:
    """Return what the binary data in a text is, or None for a text.

    An encrypted blob has the kind `SEALED`.
    """
    if text.startswith("data:"):
        return media.from_url(text)
    if len(text) < _SHORTEST or not _is_base64(text[:_CHECKED]) or not _is_base64(text[-_CHECKED:]):
        return None
    found = media.from_base64(text, kind=SEALED)
    return found if found.kind != SEALED or _is_mixed(text) else None


def readable(value: object) -> tuple[str, Sequence[tuple[str, Media]]]:
    """Return a JSON value as a text, and the binary data that the text leaves out, each with what it is."""
    strings = strings_of(value)
    found = [(text, binary_of(text)) for text in strings]
    binaries = [(text, item) for text, item in found if item is not None]
    return "\n".join(text for text, item in found if item is None) if binaries else compact(value), binaries


def _is_base64(text: str) -> bool:
    if "\n" not in text:
        return _BASE64.fullmatch(text) is not None
    # The first and the last line may be cut.
    lines = text.split()
    whole = lines[1:-1] or lines[:1]
    return len({len(line) for line in whole}) == 1 and len(whole[0]) >= _SHORTEST_LINE and all(
        map(_BASE64.fullmatch, lines)
    )  # fmt: skip


def _is_mixed(text: str) -> bool:
    middle = len(text) // 2
    samples = text[:_SAMPLE], text[middle - _SAMPLE // 2 : middle + _SAMPLE // 2]
    return len(text) >= _SAMPLE and all(len({*sample}) >= _LEAST_DISTINCT for sample in samples)
