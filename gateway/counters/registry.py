"""Find the token counter of a tokenizer by name.

An unknown tokenizer is replaced by o200k_base, whose counts differ from most others by a few per cent, except for
numbers. The vocabularies of Gemini, Gemma, Mistral and Qwen have one token per digit, so o200k_base counts a quarter
too few tokens in their tables and logs. o200k_digits corrects this. Without the rank file of o200k_base, the heuristic
counts instead. The name of a counter says which one it is.

With an optional package, models of other vendors are counted with their own vocabularies (vocabularies.py).
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Final

from gateway.core.counting.heuristic import CharacterCounter, HeuristicCounter
from gateway.core.counting.measure import TokenCounter
from gateway.core.errors import ConfigError
from gateway.counters import tiktoken, vocabularies

logger = logging.getLogger("gateway")

#: the tokenizer of most models, and of unknown ones
FALLBACK: Final = "o200k_base"
#: the same with one token per digit
DIGITS: Final = "o200k_digits"
#: Bytes that are counted in the event loop: a few milliseconds if all their words are new. Claude's counter is slower.
_LOOP_BYTES: Final = 32 * 1024
_CLAUDE_LOOP_BYTES: Final = 4 * 1024
#: counters that need no rank file
_BARE: Final = (HeuristicCounter(), CharacterCounter())
#: names of known tokenizers
NAMES: Final = (*tiktoken.TABLES, DIGITS, *vocabularies.VOCABULARIES, *(counter.name for counter in _BARE))


class Counters:
    """The token counters of this process.

    Args:
        folder: the folder with the rank files. None: TIKTOKEN_CACHE_DIR, and for missing files the package.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folders = (folder,) if folder is not None else tiktoken.rank_folders()
        self._known: dict[str, TokenCounter] = {counter.name: counter for counter in _BARE}
        #: the optional tokenizers that are installed
        self.vocabularies = vocabularies.installed()

    def add(self, path: str) -> None:
        """Add a user's own counter under its dotted path, `package.module:Class`.

        Raises:
            ConfigError: it cannot be imported, or is not a TokenCounter.
        """
        if path not in self._known:
            self._known[path] = _own_counter(path)

    def counter(self, tokenizer: str) -> TokenCounter:
        """Return the counter of a tokenizer: exact if its table or package is available, otherwise an estimate."""
        counter = self._known.get(tokenizer)
        if counter is None:
            name = self._name(tokenizer)
            counter = self._known.get(name)
            if counter is None:
                counter = self._known[name] = self._create(name)
        return counter

    def _create(self, name: str) -> TokenCounter:
        vocabulary = vocabularies.VOCABULARIES.get(name)
        if vocabulary is not None:
            return vocabularies.load(name) or self.counter(vocabulary.substitute)
        if name != DIGITS:
            counters = (tiktoken.load(folder, name) for folder in self._folders)
            return next(filter(None, counters), _BARE[0])
        base = self.counter(FALLBACK)
        if isinstance(base, tiktoken.TiktokenCounter):
            return base.splitting_digits(DIGITS)
        return HeuristicCounter(splits_digits=True)

    def notes(self) -> list[str]:
        """Return a note for each tokenizer that cannot count exactly because its rank file is missing."""
        return [
            f"the rank file {file} is missing or damaged in the gateway's package and in "
            f"{tiktoken.FOLDER_VARIABLE}: tokens "
            f"of {name} are estimated from characters; reinstall the gateway, or put the file there"
            for name, file in tiktoken.missing(self._folders).items()
        ]

    def is_loaded(self, tokenizer: str) -> bool:
        """Return whether the counter is loaded. If not, the first caller waits some tenths of a second."""
        name = self._name(tokenizer)
        return (FALLBACK if name == DIGITS else name) in self._known

    def loop_bytes(self, tokenizer: str) -> int:
        """Return how many bytes may be counted in the event loop. Before the counter is loaded, these are none."""
        counter = self._known.get(tokenizer)
        if counter is None:
            if not self.is_loaded(tokenizer):
                return 0
            counter = self.counter(tokenizer)
        return _CLAUDE_LOOP_BYTES if isinstance(counter, vocabularies.ClaudeCounter) else _LOOP_BYTES

    def _name(self, tokenizer: str) -> str:
        return tokenizer if tokenizer in self._known or tokenizer in NAMES else FALLBACK


def is_dotted_path(tokenizer: str) -> bool:
    """Return whether the name of a tokenizer is the path of a user's own counter."""
    return ":" in tokenizer


class _OwnCounter:
    """A user's own counter. If it fails, the heuristic counts instead, so that no call fails.

    Its name includes its path, so that cached counts of two counters with the same name are not confused.
    """

    def __init__(self, path: str, counter: TokenCounter) -> None:
        self.name = f"{counter.name} ({path})"
        self._path = path
        self._counter = counter
        self._has_failed = False

    def count(self, text: str) -> int:
        """Return the tokens of a text, counted by the user's counter, or by the heuristic if that fails."""
        try:
            tokens = int(self._counter.count(text))
            if tokens < 0:
                raise ValueError(f"it returned {tokens} tokens")
        except (Exception, SystemExit):
            if not self._has_failed:
                self._has_failed = True
                logger.exception("the token counter %s failed; the heuristic counts instead", self._path)
            return _BARE[0].count(text)
        return tokens


def _own_counter(path: str) -> TokenCounter:
    module, _, name = path.partition(":")
    try:
        counter = getattr(importlib.import_module(module), name)()
        is_counter = isinstance(getattr(counter, "name", None), str) and callable(getattr(counter, "count", None))
    except (Exception, SystemExit) as error:
        raise ConfigError([f"tokenizer {path}: cannot be created: {type(error).__name__}: {error}"]) from error
    if not is_counter:
        raise ConfigError([f"tokenizer {path}: is not a token counter; it needs `name` and `count(text) -> int`"])
    return _OwnCounter(path, counter)
