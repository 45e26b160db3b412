"""Count tokens exactly and offline, with tiktoken and the rank files in the package.

This module finds, checks and reads the rank files itself, without the network. tiktoken
would delete a damaged file and download a new one, take twice as long, and keep 27 MB of ranks that are only needed to
build the encoding.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from binascii import a2b_base64
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import Final

from gateway.core.counting.measure import TokenCounter
from gateway.core.values import dataclass
from gateway.counters.chunks import count_in_chunks


@dataclass(frozen=True, slots=True)
class EncodingTable:
    """The data of an encoding.

    Attributes:
        file: the name of its rank file in tiktoken: the SHA-1 of the URL that it is downloaded from.
        sha256: the SHA-256 of the file.
        pattern: splits text before it is encoded, with the same result as tiktoken's own pattern. It is faster because
            all alternatives without lookahead are in one group. The regex engine of tiktoken (fancy-regex) passes the
            group to an automaton instead of trying each alternative. o200k_base takes 27 % less time. cl100k_base takes
            half the time, because the automaton does not support its possessive quantifiers, which were removed.
    """

    file: str
    sha256: str
    pattern: str


#: the tables by encoding
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
#: Characters given to tiktoken at once. A word of a million letters takes 0.5 s, and in chunks 0.01 s per chunk.
_CHUNK: Final = 64_000
#: Characters of one text that are counted: about a million tokens. An exact count of more is not worth the seconds.
_MOST_COUNTED: Final = 4_000_000
#: bytes of a rank file that are read at once, which takes some milliseconds
_READ_BYTES: Final = 2**16
#: maps each digit to "1" and any other byte to a space
_MARKS: Final = bytes(ord("1" if chr(byte) in "0123456789" else " ") for byte in range(256))


class TiktokenCounter:
    """Count tokens with one encoding. Threads can share it; tiktoken releases the interpreter lock while it works."""

    def __init__(self, encoding: str, encode: Callable[[str], list[int]]) -> None:
        self.name = f"tiktoken:{encoding}"
        self._encode = encode

    def count(self, text: str) -> int:
        """Return the tokens of a text. Names of special tokens in it count as ordinary text."""
        return count_in_chunks(text, self._size, chunk=_CHUNK, most=_MOST_COUNTED)

    def _size(self, chunk: str) -> int:
        return len(self._encode(chunk))

    def splitting_digits(self, encoding: str) -> TiktokenCounter:
        """Return the counter of a similar vocabulary that has one token per digit."""
        return _DigitsCounter(encoding, self._encode)


class _DigitsCounter(TiktokenCounter):
    """Count the tokens of the encoding, plus one for each further digit that it merges into one token."""

    def _size(self, chunk: str) -> int:
        return super()._size(chunk) + _further_digits(chunk)


def _further_digits(text: str) -> int:
    """Return the digits of all numbers minus the tokens that the encodings use for them: one per three digits.

    The numbers are not searched with a regular expression: half of a log are digits, so it would take as long as
    tiktoken.
    """
    marks = text.encode("utf-8", "replace").translate(_MARKS)
    return 2 * marks.count(b"111") + marks.replace(b"111", b" ").count(b"11")


def load(folder: Path, encoding: str) -> TiktokenCounter | None:
    """Return the process-wide counter of an encoding, or None if its rank file is missing or damaged.

    The first caller loads it, and all others wait. For the second half of that time tiktoken holds the interpreter
    lock: 0.1 to 0.2 s with o200k_base, half of that with cl100k_base.
    """
    with _LOADING:
        counter = LOADED.get((folder, encoding))
        if counter is None:
            counter = _build(folder, encoding)
            if counter is not None:
                LOADED[folder, encoding] = counter
    return counter


def _build(folder: Path, encoding: str) -> TiktokenCounter | None:
    table = TABLES[encoding]
    try:
        import tiktoken  # noqa: PLC0415  # takes 40 ms, so only if it is needed

        ranks = _ranks(_checked(_read(folder, table), table))
        # Special tokens in a text count as ordinary text.
        built = tiktoken.Encoding(encoding, pat_str=table.pattern, mergeable_ranks=ranks, special_tokens={})
    except (ImportError, OSError, EOFError, zlib.error, ValueError):
        return None
    # The encoding keeps a reference to this dictionary but works with its own copy.
    ranks.clear()
    return TiktokenCounter(encoding, built.encode_ordinary)


def _read(folder: Path, table: EncodingTable) -> bytes:
    """Return the content of a rank file, which is compressed in the package."""
    packed = folder / f"{table.file}.gz"
    return gzip.decompress(packed.read_bytes()) if packed.is_file() else (folder / table.file).read_bytes()


def _checked(content: bytes, table: EncodingTable) -> bytes:
    """Return the content of a rank file.

    Raises:
        ValueError: it is not the content of this file.
    """
    if hashlib.sha256(content).hexdigest() != table.sha256:
        raise ValueError(f"{table.file} is damaged")
    return content


def missing(folders: Sequence[Path]) -> dict[str, str]:
    """Return the encodings without an undamaged rank file in these folders, with the file names. Builds no encoding."""
    return {name: table.file for name, table in TABLES.items() if not any(_has(folder, table) for folder in folders)}


def _has(folder: Path, table: EncodingTable) -> bool:
    if (folder / f"{table.file}.gz").is_file():  # part of the package; it is checked when it is loaded
        return True
    try:
        _checked(_read(folder, table), table)
    except (OSError, ValueError):
        return False
    return True


def _ranks(content: bytes) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank. They are read in pieces, so that other threads can run."""
    ranks: dict[bytes, int] = {}
    file = BytesIO(content)
    while lines := file.readlines(_READ_BYTES):
        words = b"".join(lines).split()
        ranks.update(zip(map(a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    return ranks


def rank_folders() -> tuple[Path, ...]:
    """Return the folders that are searched for rank files, in order: TIKTOKEN_CACHE_DIR, then that of the package.

    The user's folder can lack files, because tiktoken downloads them when they are first needed.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    return (*((Path(named),) if named else ()), _package_folder())


def _package_folder() -> Path:
    """Return the folder of rank files in the package: in config/ of a checkout, in gateway/data/ once installed."""
    package = Path(__file__).parent.parent
    installed = package / "data"
    return (installed if installed.is_dir() else package.parent / "config") / "ranks"


_LOADING: Final = Lock()
#: loaded counters by folder and encoding
LOADED: Final[dict[tuple[Path, str], TiktokenCounter]] = {}
_COUNTER: type[TokenCounter] = TiktokenCounter
