"""Count tokens with the vocabularies of other vendors, if one of two optional packages is installed.

Both packages work offline. Each is imported only when one of its counters is first needed.

- `splintr-rs` contains published vocabularies of open models. Their counts equal those of the vendors' tokenizers.
- `ctok` contains vocabularies of Claude, which Anthropic does not publish. Its author measured them with Anthropic's
  count_tokens. Claude's counts of the same text are equal, except in rare cases.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Final, NamedTuple

from gateway.core.counting.measure import TokenCounter
from gateway.counters.chunks import count_in_chunks

logger = logging.getLogger("gateway")


class Vocabulary(NamedTuple):
    """The place of a vocabulary: a package, the distribution that installs it, and the vocabulary's name in it.

    `substitute`: the tokenizer that is used if the package is not installed.
    """

    package: str
    distribution: str
    name: str
    substitute: str


_OPEN: Final = ("splintr", "splintr-rs")
_CLAUDE: Final = ("ctok", "ctok")
#: the vocabularies by name of the tokenizer
VOCABULARIES: Final[Mapping[str, Vocabulary]] = {
    "llama3": Vocabulary(*_OPEN, "llama3", "o200k_base"),
    "qwen3": Vocabulary(*_OPEN, "qwen3", "o200k_digits"),
    "glm4": Vocabulary(*_OPEN, "glm4", "o200k_base"),
    "kimi_k2": Vocabulary(*_OPEN, "kimi_k2", "o200k_base"),
    "deepseek_v3": Vocabulary(*_OPEN, "deepseek_v3", "o200k_base"),
    "mistral_v3": Vocabulary(*_OPEN, "mistral_v3", "o200k_digits"),
    "gemma3": Vocabulary(*_OPEN, "gemma3", "o200k_digits"),
    "claude_v3": Vocabulary(*_CLAUDE, "3.0", "o200k_base"),
    "claude_v4.8": Vocabulary(*_CLAUDE, "4.8", "o200k_base"),
}
#: Characters given to splintr at once. It holds the interpreter lock while it works, for 1 to 4 ms with this length.
_SPLINTR_CHUNK: Final = 16_000
#: characters of a text that are counted with splintr; the count of a longer text is extrapolated
_SPLINTR_MOST_COUNTED: Final = 4_000_000
#: The same two limits for ctok. It is written in Python, and counts only 0.5 MB of new words a second.
_CTOK_CHUNK: Final = 64_000
_CTOK_MOST_COUNTED: Final = 400_000
#: entries of each cache of counts, about 100 bytes each, and the characters of the longest text that is cached
_KNOWN_LIMIT: Final = 100_000
_LONGEST_KNOWN: Final = 40
#: A word of ASCII letters that can be counted alone. It is not the end of a contraction such as "it's". Next to it is
#: neither a letter of another script nor a control character, which Claude's tokenizer removes.
_WORD: Final = re.compile(
    r"((?<![^\t\n\x20-\x40\x5b-\x60\x7b-\x7e])(?!(?<=')(?:[stdm]|ll|re|ve)(?![A-Za-z]))[A-Za-z]+"
    r"(?![^\t\n\x20-\x40\x5b-\x60\x7b-\x7e]))"
)
#: Claude's vocabularies have a token for each number of one to three digits, and no other token with a digit. So
#: numbers of the same length have the same count, and a text between two words is known although its numbers are new.
_SAME_DIGITS: Final = str.maketrans("123456789", "000000000")


class SplintrCounter:
    """Count tokens with a vocabulary in splintr. Threads can share it."""

    def __init__(self, tokenizer: str, encode: Callable[[str], list[int]]) -> None:
        self.name = f"splintr:{tokenizer}"
        self._encode = encode

    def count(self, text: str) -> int:
        """Return the tokens of a text. Names of special tokens in it count as ordinary text."""
        return count_in_chunks(text, self._count_chunk, chunk=_SPLINTR_CHUNK, most=_SPLINTR_MOST_COUNTED)

    def _count_chunk(self, chunk: str) -> int:
        try:
            return len(self._encode(chunk))
        except UnicodeEncodeError:  # half of a surrogate pair, which JSON may contain
            return len(self._encode(chunk.encode("utf-8", "replace").decode()))


class ClaudeCounter:
    """Count tokens with a vocabulary of Claude in ctok. Threads can share it.

    No token of Claude spans two words, so the counts of words and of the text between them are cached and added up. The
    sums equal ctok's counts of the whole text. Text with known words is counted ten to twenty times faster.

    Args:
        tokenizer: name of the tokenizer.
        count_message: returns the tokens of a text as the only message of a request.
    """

    def __init__(self, tokenizer: str, count_message: Callable[[str], int]) -> None:
        self.name = f"ctok:{tokenizer}"
        self._count_message = count_message
        #: tokens that a message adds to those of its words
        self._frame = count_message("x") - 1
        self._words: dict[str, int] = {}
        self._between: dict[str, int] = {}

    def count(self, text: str) -> int:
        """Return the tokens of a text, without those of a message around it."""
        return count_in_chunks(text, self._count_chunk, chunk=_CTOK_CHUNK, most=_CTOK_MOST_COUNTED) if text else 0

    def _count_chunk(self, chunk: str) -> int:
        head, *rest = _WORD.split(chunk.translate(_SAME_DIGITS))
        if not rest:
            return self._count(chunk)
        words, between, tail = rest[::2], rest[1:-1:2], rest[-1]
        total = self._count(f"{head}x") - 1 if head else 0
        total += _sum_known(words, self._words, self._count)
        total += _sum_known(between, self._between, lambda text: self._count(f"x{text}x") - 2)
        return total + (self._count(f"x{tail}") - 1 if tail else 0)

    def _count(self, text: str) -> int:
        return self._count_message(text) - self._frame


def _sum_known(texts: Iterable[str], known: dict[str, int], count: Callable[[str], int]) -> int:
    """Return the sum of the counts of texts, most of them from the cache `known`."""
    total = 0
    for text, times in Counter(texts).items():
        tokens = known.get(text)
        if tokens is None:
            tokens = count(text)
            if len(known) >= _KNOWN_LIMIT:
                known.clear()
            if len(text) <= _LONGEST_KNOWN:
                known[text] = tokens
        total += times * tokens
    return total


def installed() -> frozenset[str]:
    """Return the tokenizers whose package is installed. Imports nothing."""
    packages = {found.package for found in VOCABULARIES.values()}
    present = {package for package in packages if _is_installed(package)}
    return frozenset(name for name, found in VOCABULARIES.items() if found.package in present)


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. A folder of the same name in the working directory has no origin."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load(tokenizer: str) -> TokenCounter | None:
    """Return the process-wide counter of a tokenizer, or None if its package is missing or cannot be used.

    The first caller loads it, and all others wait: up to 0.1 s for splintr, 0.3 s for ctok.
    """
    with _LOADING:
        if tokenizer not in LOADED:
            try:
                LOADED[tokenizer] = _build(tokenizer)
            except ModuleNotFoundError:
                return None
            except Exception:  # a package that does not fit this machine or has changed must not fail a call
                logger.exception("the vocabulary %s cannot be loaded; an estimate counts instead", tokenizer)
                LOADED[tokenizer] = None
        return LOADED[tokenizer]


def _build(tokenizer: str) -> TokenCounter:
    package, _, name, _ = VOCABULARIES[tokenizer]
    if package == "splintr":
        import splintr  # noqa: PLC0415  # optional

        return SplintrCounter(tokenizer, splintr.Tokenizer.from_pretrained(name).encode_ordinary)
    import ctok  # noqa: PLC0415  # optional

    return ClaudeCounter(tokenizer, lambda text: ctok.token_count(text, name))


_LOADING: Final = Lock()
#: loaded counters by tokenizer; None if loading failed
LOADED: Final[dict[str, TokenCounter | None]] = {}
