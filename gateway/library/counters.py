"""Provide token counters for a budget in one program.

| counter | needs | counts |
|---|---|---|
| `CharacterCounter()` | nothing | four characters per token, more tokens for other scripts than Latin |
| `tiktoken_counter("o200k_base")` | tiktoken, no network | as this encoding of OpenAI does |
| `model_counter("claude-opus-4-5")` | the gateway's tables | text as the gateway estimates it for this model |

A counter of your own is any object with `name` and `count(text) -> int`.
"""

from __future__ import annotations

from functools import cache

from gateway.core.counting.heuristic import CharacterCounter, rounded_up
from gateway.core.counting.measure import TokenCounter

__all__ = ["CharacterCounter", "TokenCounter", "model_counter", "tiktoken_counter"]


@cache
def tiktoken_counter(encoding: str = "o200k_base") -> TokenCounter:
    """Return the counter of an OpenAI encoding. The first call loads its table, which takes some tenths of a second.

    Raises:
        ValueError: the encoding is unknown, or its rank file is missing or damaged.
    """
    from gateway.counters import tiktoken  # noqa: PLC0415  # only if it is used

    if encoding not in tiktoken.TABLES:
        raise ValueError(f"unknown encoding {encoding!r}; the known ones are {', '.join(tiktoken.TABLES)}")
    counters = (tiktoken.load(folder, encoding) for folder in tiktoken.rank_folders())
    counter = next(filter(None, counters), None)
    if counter is None:
        raise ValueError(f"the rank file of {encoding} is missing or damaged; reinstall the package")
    return counter


@cache
def model_counter(model: str) -> TokenCounter:
    """Return a counter of plain text for a model, with the tokenizer and the factor that the gateway uses for it.

    The overhead of messages and tools is not counted. The first call takes about half a second.

    Args:
        model: the name of the model, with or without its provider: `gpt-5.1`, `anthropic/claude-opus-4-5`.
    """
    from gateway import config  # noqa: PLC0415  # reads tables with heavy packages, only if it is used
    from gateway.counters.registry import Counters  # noqa: PLC0415

    counters = Counters()
    provider = model.rpartition("/")[0]
    family = config.families(vocabularies=counters.vocabularies).find(model, provider, "chat")
    return ModelCounter(counters.counter(family.tokenizer), family.text)


class ModelCounter:
    """Multiply the counts of a tokenizer by the factor of a model family."""

    def __init__(self, counter: TokenCounter, factor: float) -> None:
        self.name = counter.name if factor == 1 else f"{counter.name} x {factor:g}"
        self._counter = counter
        self._factor = factor

    def count(self, text: str) -> int:
        """Return the token count of a text, rounded up."""
        return rounded_up(self._counter.count(text) * self._factor)
