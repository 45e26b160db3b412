"""Exact token counts, offline: tiktoken with the rank files that litellm's wheel carries.

The files are found without importing litellm and checked before tiktoken sees them: tiktoken itself would delete a
damaged file and fetch a new one. Nothing here asks the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.core.counting.measure import TokenCounter

#: encoding -> the name tiktoken gives its file (SHA-1 of the address it would be fetched from) and the file's SHA-256
RANK_FILES: Final = {
    "o200k_base": (
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    ),
    "cl100k_base": (
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
}
_FOLDER_VARIABLE: Final = "TIKTOKEN_CACHE_DIR"
#: Characters given to tiktoken at once. What takes one word of a million letters 0.5 s takes pieces of it 0.01 s each.
_CHUNK: Final = 64_000
#: Characters of one text that are counted: about a million tokens. What is behind them is taken to be like them.
_MOST_COUNTED: Final = 4_000_000
#: how far back from a chunk's end a space is looked for
_SEAM: Final = 2_000
_SPACE: Final = re.compile(r"\s(?=\S*\Z)")


class TiktokenCounter:
    """Counts with one encoding. Safe to share between threads; tiktoken releases the interpreter while it works."""

    def __init__(self, encoding: str, encode: Callable[[str], list[int]]) -> None:
        self.name = f"tiktoken:{encoding}"
        self._encode = encode

    def count(self, text: str) -> int:
        """Tokens of a text; names of special tokens in it are text like any other."""
        if len(text) <= _CHUNK:
            return len(self._encode(text))
        if len(text) > _MOST_COUNTED:
            # No window holds it; what it weighs to the token is not worth the seconds.
            return round(self.count(text[:_MOST_COUNTED]) * len(text) / _MOST_COUNTED)
        total = start = 0
        while start < len(text):
            end = _seam(text, start)
            total += len(self._encode(text[start:end]))
            start = end
        return total


def _seam(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends: before its last space, if there is one near."""
    end = start + _CHUNK
    if end >= len(text):
        return len(text)
    space = _SPACE.search(text, end - _SEAM, end)
    return space.start() if space and space.start() > start else end


def load(folder: Path | None, encoding: str) -> TiktokenCounter | None:
    """The counter of an encoding; None where its ranks are not in this folder, or are damaged."""
    if folder is None or not _is_whole(folder, encoding):
        return None
    if os.environ.get(_FOLDER_VARIABLE) != str(folder):
        if _FOLDER_VARIABLE in os.environ:
            return None  # tiktoken would look where the user told it to, and fetch what is not there
        os.environ[_FOLDER_VARIABLE] = str(folder)
    try:
        import tiktoken  # noqa: PLC0415  # optional, and half a second to import

        return TiktokenCounter(encoding, tiktoken.get_encoding(encoding).encode_ordinary)
    except (ImportError, OSError, ValueError):
        return None


def rank_folder() -> Path | None:
    """Where rank files are looked for; None where there is no such place."""
    named = os.environ.get(_FOLDER_VARIABLE)
    if named is not None:
        return Path(named) if named else None  # empty means "keep nothing on disk": tiktoken would fetch every time
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"


def _is_whole(folder: Path, encoding: str) -> bool:
    name, digest = RANK_FILES[encoding]
    try:
        return hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    except OSError:
        return False


_COUNTER: type[TokenCounter] = TiktokenCounter
