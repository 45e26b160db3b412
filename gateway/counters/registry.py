"""Find the token counter of a tokenizer by name.

A tokenizer nobody knows is counted with o200k_base, whose counts are within a few per cent of most others' but for
numbers: the vocabularies of Gemini, Gemma, Mistral and Qwen have a token for each digit, so that o200k_base finds a
quarter less than they do in tables and logs, and o200k_digits does not. Where o200k_base has no rank file, the
heuristic counts, in its place or with a token for each digit. Every counter says by its name which it is.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Final

from gateway.core.counting.heuristic import CharacterCounter, HeuristicCounter
from gateway.core.counting.measure import TokenCounter
from gateway.core.errors import ConfigError
from gateway.counters import tiktoken

logger = logging.getLogger("gateway")

#: what most models are counted with, and all that nothing is known of
FALLBACK: Final = "o200k_base"
#: that, with a token for each digit
DIGITS: Final = "o200k_digits"
#: counters that need no rank file
_BARE: Final = (HeuristicCounter(), CharacterCounter())
#: tokenizers that are known by a name
NAMES: Final = (*tiktoken.TABLES, DIGITS, *(counter.name for counter in _BARE))


class Counters:
    """The counters of this machine.

    Args:
        folder: where the rank files lie; None takes the user's TIKTOKEN_CACHE_DIR, and what is not there from litellm's
            wheel.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folders = (folder,) if folder is not None else tiktoken.rank_folders()
        self._known: dict[str, TokenCounter] = {counter.name: counter for counter in _BARE}

    def add(self, path: str) -> None:
        """Make a user's own counter known under its dotted path, `package.module:Class`.

        Raises:
            ConfigError: there is no such thing, or it is no TokenCounter.
        """
        if path not in self._known:
            self._known[path] = _own_counter(path)

    def counter(self, tokenizer: str) -> TokenCounter:
        """The counter of a tokenizer: exact where its ranks are at hand, else `heuristic`."""
        name = self._name(tokenizer)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._made(name)
        return found

    def _made(self, name: str) -> TokenCounter:
        if name != DIGITS:
            found = (tiktoken.load(folder, name) for folder in self._folders)
            return next(filter(None, found), _BARE[0])
        base = self.counter(FALLBACK)
        if isinstance(base, tiktoken.TiktokenCounter):
            return base.splitting_digits(DIGITS)
        return HeuristicCounter(splits_digits=True)

    def notes(self) -> list[str]:
        """What is not counted exactly because its ranks are not at hand."""
        return [
            f"the table {file} is not in litellm's package nor in {tiktoken.FOLDER_VARIABLE}, or damaged: where {name} "
            "would count, tokens are estimated from characters; install litellm again, or put the file there"
            for name, file in tiktoken.missing(self._folders).items()
        ]

    def is_loaded(self, tokenizer: str) -> bool:
        """Whether its counter is at hand; else the first one who asks waits some tenths of a second."""
        name = self._name(tokenizer)
        return (FALLBACK if name == DIGITS else name) in self._known

    def _name(self, tokenizer: str) -> str:
        return tokenizer if tokenizer in self._known or tokenizer in NAMES else FALLBACK


def is_dotted_path(tokenizer: str) -> bool:
    """Whether a tokenizer's name is the path of a user's own counter."""
    return ":" in tokenizer


class _OwnCounter:
    """A user's counter, of which nothing is taken on trust: no call fails because it does.

    Named by its path too: what it counted must not be taken for the count of another that says its name is the same.
    """

    def __init__(self, path: str, made: TokenCounter) -> None:
        self.name = f"{made.name} ({path})"
        self._path = path
        self._made = made
        self._has_failed = False

    def count(self, text: str) -> int:
        """Tokens of a text, as the user's counter says; where it says nothing of use, as the heuristic does."""
        try:
            tokens = int(self._made.count(text))
            if tokens < 0:
                raise ValueError(f"it counted {tokens} tokens")
        except (Exception, SystemExit):
            if not self._has_failed:
                self._has_failed = True
                logger.exception("the token counter %s failed; where it does, the heuristic counts", self._path)
            return _BARE[0].count(text)
        return tokens


def _own_counter(path: str) -> TokenCounter:
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
        is_one = isinstance(getattr(made, "name", None), str) and callable(getattr(made, "count", None))
    except (Exception, SystemExit) as error:
        raise ConfigError([f"tokenizer {path}: cannot be made: {type(error).__name__}: {error}"]) from error
    if not is_one:
        raise ConfigError([f"tokenizer {path}: is no token counter; it needs a name and count(text) -> int"])
    return _OwnCounter(path, made)
