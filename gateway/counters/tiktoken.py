"""Count tokens exactly and offline, with tiktoken and the files in litellm's package.

The files are found without importing litellm, checked, and read here: tiktoken itself would delete a damaged file and
fetch a new one, takes twice as long, and keeps 27 MB of ranks that only building the encoding needs. Nothing here asks
the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from threading import Lock
from typing import Final

from gateway.core.counting.measure import TokenCounter
from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class EncodingTable:
    """What makes an encoding.

    Attributes:
        file: the name tiktoken gives its file of ranks: SHA-1 of the address it would be fetched from.
        sha256: of that file.
        pattern: how text is split before it is encoded. It splits as tiktoken's own does, and is written for speed: the
            alternatives that do not look ahead stand in one group, which the engine below tiktoken (fancy-regex) hands
            as a whole to an automaton; else it tries one after the other. o200k_base takes 27 % less time so, and
            cl100k_base, without the possessive quantifiers that the automaton does not know, half.
    """

    file: str
    sha256: str
    pattern: str


#: by encoding
TABLES: Final[Mapping[str, EncodingTable]] = {
    "o200k_base": EncodingTable(
        "fb374d419588a4632f3f557e76b4b70aebbca790",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        r"(?:[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+)|\s+(?!\S)|\s+",
    ),
    "cl100k_base": EncodingTable(
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        r"(?:'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+$|\s*[\r\n])"
        r"|\s+(?!\S)|\s",
    ),
}
FOLDER_VARIABLE: Final = "TIKTOKEN_CACHE_DIR"
#: Characters given to tiktoken at once. What takes one word of a million letters 0.5 s takes pieces of it 0.01 s each.
_CHUNK: Final = 64_000
#: Characters of one text that are counted: about a million tokens. What is behind them is taken to be like them.
_MOST_COUNTED: Final = 4_000_000
#: characters from a chunk's end back in which a space is looked for
_SEAM: Final = 2_000
_SPACE: Final = re.compile(r"\s(?=\S*\Z)")
#: bytes of a rank file that are read at once: some milliseconds
_READ_BYTES: Final = 2**16
#: each digit as one mark, whatever it is
_MARKS: Final = bytes(ord("1" if chr(byte) in "0123456789" else " ") for byte in range(256))


class TiktokenCounter:
    """Counts with one encoding. Safe to share between threads; tiktoken releases the interpreter while it works."""

    def __init__(self, encoding: str, encode: Callable[[str], list[int]]) -> None:
        self.name = f"tiktoken:{encoding}"
        self._encode = encode

    def count(self, text: str) -> int:
        """Tokens of a text; names of special tokens in it are text like any other."""
        if len(text) <= _CHUNK:
            return self._size(text)
        if len(text) > _MOST_COUNTED:
            # No window holds it; what it weighs to the token is not worth the seconds.
            return round(self.count(text[:_MOST_COUNTED]) * len(text) / _MOST_COUNTED)
        total = start = 0
        while start < len(text):
            end = _seam(text, start)
            total += self._size(text[start:end])
            start = end
        return total

    def _size(self, chunk: str) -> int:
        return len(self._encode(chunk))

    def splitting_digits(self, encoding: str) -> TiktokenCounter:
        """The counter of a vocabulary much like this one, but with a token for each digit of a number."""
        return _DigitsCounter(encoding, self._encode)


class _DigitsCounter(TiktokenCounter):
    """Counts what the encoding makes of a text, and each further digit of what it takes for one number."""

    def _size(self, chunk: str) -> int:
        return super()._size(chunk) + _further_digits(chunk)


def _further_digits(text: str) -> int:
    """Digits of numbers, less the tokens that the tables above have for them: one for three digits, and for the rest.

    Without a list of the numbers: a log is half digits, and a regular expression takes as long for them as tiktoken.
    """
    marks = text.encode("utf-8", "replace").translate(_MARKS)
    return 2 * marks.count(b"111") + marks.replace(b"111", b" ").count(b"11")


def _seam(text: str, start: int) -> int:
    """Where the chunk that begins at `start` ends: before its last space, if there is one near."""
    end = start + _CHUNK
    if end >= len(text):
        return len(text)
    space = _SPACE.search(text, end - _SEAM, end)
    return space.start() if space and space.start() > start else end


def load(folder: Path, encoding: str) -> TiktokenCounter | None:
    """The counter of an encoding, one for the whole process; None where its ranks are not in this folder, or damaged.

    The first to ask reads and builds it, all others wait. For the last half of that time tiktoken keeps the interpreter
    to itself: 0.1 to 0.2 s with o200k_base, half of that with cl100k_base.
    """
    with _LOADING:
        found = LOADED.get((folder, encoding))
        if found is None:
            found = _made(folder, encoding)
            if found is not None:
                LOADED[folder, encoding] = found
    return found


def _made(folder: Path, encoding: str) -> TiktokenCounter | None:
    table = TABLES[encoding]
    try:
        import tiktoken  # noqa: PLC0415  # 40 ms, only where something is counted

        with (folder / table.file).open("rb") as file:
            if not _is_whole(file, table):
                return None
            ranks = _ranks(file)
        # Ordinary text has no special tokens.
        made = tiktoken.Encoding(encoding, pat_str=table.pattern, mergeable_ranks=ranks, special_tokens={})
    except (ImportError, OSError, ValueError):
        return None
    # The encoding keeps this dictionary, and works with a copy of its own.
    ranks.clear()
    return TiktokenCounter(encoding, made.encode_ordinary)


def _is_whole(file: BufferedReader, table: EncodingTable) -> bool:
    is_so = hashlib.file_digest(file, "sha256").hexdigest() == table.sha256
    file.seek(0)
    return is_so


def missing(folders: Sequence[Path]) -> dict[str, str]:
    """Encodings whose ranks are in none of these folders undamaged, and the names of their files. Builds nothing."""
    return {name: table.file for name, table in TABLES.items() if not any(_has(folder, table) for folder in folders)}


def _has(folder: Path, table: EncodingTable) -> bool:
    try:
        with (folder / table.file).open("rb") as file:
            return _is_whole(file, table)
    except OSError:
        return False


def _ranks(file: BufferedReader) -> dict[bytes, int]:
    """Token -> rank, of a file that has them as lines, the token in base64. Other threads get their turn meanwhile."""
    ranks: dict[bytes, int] = {}
    while lines := file.readlines(_READ_BYTES):
        words = b"".join(lines).split()
        ranks.update(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    return ranks


def rank_folders() -> tuple[Path, ...]:
    """Where each rank file is looked for, in this order.

    The user's folder may hold one file and not the other, or none yet: tiktoken would fetch what it lacks.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    folders = (Path(named),) if named else ()
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return folders
    return (*folders, Path(spec.origin).parent / "litellm_core_utils" / "tokenizers")


_LOADING: Final = Lock()
#: by folder and encoding
LOADED: Final[dict[tuple[Path, str], TiktokenCounter]] = {}
_COUNTER: type[TokenCounter] = TiktokenCounter
