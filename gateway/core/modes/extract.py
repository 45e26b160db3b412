"""Extract the most informative blocks of a tool result: its start, errors, and lines with rare names.

The choice depends on the text alone, never on the question, so the same result is shown the same way on every turn.
Blocks and terms are those of `gateway.core.trimming`. A gap reads `[...]`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway.core.conversation.message import Message
from gateway.core.counting.heuristic import HeuristicCounter
from gateway.core.modes.handle import ERROR_LINE
from gateway.core.modes.table import table_rows
from gateway.core.trimming.blocks import Block, SlicedMessage, Slot, slice_message
from gateway.core.trimming.terms import IDENTIFIER, NAME, WORD, Lexicon
from gateway.core.trimming.text_blocks import GAP, join_pieces

#: Tokens of an extract: this share of the text's tokens, at least `_MIN_TOKENS` and at most `_MAX_TOKENS`.
_SHARE: Final = 0.15
_MIN_TOKENS: Final = 120
_MAX_TOKENS: Final = 400
#: Characters of the longest extract, whatever its tokens. Gap marks come on top.
MAX_EXTRACT_CHARS: Final = 4000
#: Limits of what is read, about half a second of work: characters of a text and rows of a table. The share
#: `_HEAD_SHARE` of them is taken from the start, the rest from the end.
_MAX_READ_CHARS: Final = 200_000
_MAX_ROWS: Final = 2000
_HEAD_SHARE: Final = 0.75
#: Characters of the column names. A wider table is read like other JSON, with each value next to its key.
_MAX_HEADER_CHARS: Final = 240
#: A text of this length already allows the longest extract, so the characters after that need not be counted.
_MAX_COUNTED_CHARS: Final = 40_000
#: Characters of a block. Only table rows and JSON values are longer, and they are clipped.
_MAX_BLOCK_CHARS: Final = 480

#: Value of a term for the first chosen block that has it.
_TERM_VALUES: Final = {WORD: 0.1, NAME: 0.7, IDENTIFIER: 1.0}
#: Two kinds of identifiers say less than an id: plain numbers, and words in capitals, as in headings.
_NUMBER_VALUE: Final = 0.2
_CAPITALS_VALUE: Final = 0.5
#: Factor for a block that reports an error.
_ERROR_FACTOR: Final = 3.0
#: The first blocks show what a result is, the last ones how it ended. Their factor of 1 grows by these amounts, divided
#: by the distance from the first or the last block.
_FIRST_BONUS: Final = 1.0
_LAST_BONUS: Final = 0.5
#: Tokens that a block costs besides its text: about every second block has a gap mark before it.
_GAP_TOKENS: Final = 1.5

_COUNTER: Final = HeuristicCounter()


def tokens_of(text: str) -> int:
    """Return the estimated tokens of a text; only the first `_MAX_COUNTED_CHARS` are counted."""
    return _COUNTER.count(text[:_MAX_COUNTED_CHARS])


def extract_limit(text: str) -> int:
    """Return the most tokens that an extract of a text may have."""
    return min(_MAX_TOKENS, max(_MIN_TOKENS, int(tokens_of(text) * _SHARE)))


def extract(text: str, limit: int) -> str:
    """Return the most informative blocks of a text in their order, with gap marks, in about `limit` tokens at most."""
    rows = table_rows(text)
    if rows is not None and len(rows[0]) > _MAX_HEADER_CHARS:
        rows = None
    # The extract is short, so it is chosen among single lines: those of a user's text. Results have longer regions.
    message: Message = {"role": "user", "content": text if rows is not None else head_and_tail(text, _MAX_READ_CHARS)}
    sliced = slice_message(message) if rows is None else _sliced_rows(rows)
    if not sliced.blocks:  # JSON of nothing but empty keys
        return GAP
    blocks = [replace(block, text=_clip(block.text)) for block in sliced.blocks]
    chosen = frozenset(_choose_blocks(blocks, limit))
    pieces = ((block.text, number in chosen) for number, block in enumerate(blocks))
    return join_pieces(pieces, is_original=False).rstrip("\n")


def head_and_tail(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than `most` characters."""
    head = int(most * _HEAD_SHARE)
    return f"{text[:head]}\n{GAP}\n{text[head - most :]}" if len(text) > most else text


def _sliced_rows(rows: Sequence[str]) -> SlicedMessage:
    """Return a table as blocks: first its column names, which are always taken, then its rows."""
    lines = rows[1:]
    head = f"[some of {len(lines)} rows; empty cell: no such key]\n{rows[0]}\n"
    if len(lines) > _MAX_ROWS:
        first = int(_MAX_ROWS * _HEAD_SHARE)
        lines = [*lines[:first], *lines[first - _MAX_ROWS :]]
    blocks = (Block(head, 0), *(Block(f"{line}\n", 0) for line in lines))
    return SlicedMessage((Slot(()),), blocks, "", is_verbatim=False)


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_BLOCK_CHARS else f"{text[: _MAX_BLOCK_CHARS - 2]}…\n"


def _choose_blocks(blocks: Sequence[Block], limit: int) -> Sequence[int]:
    """Return the numbers of the blocks with the highest value per token that fit; block 0 is always taken."""
    choice = _Choice(blocks, limit)
    heap = [(-choice.ratio(number), number) for number in range(1, len(blocks))]
    heapq.heapify(heap)
    choice.take(0)
    while heap:
        stale, number = heapq.heappop(heap)
        ratio = choice.ratio(number)
        if heap and -ratio > stale and -ratio > heap[0][0]:
            # Chosen blocks share some of its terms, so its ratio fell: look at it again later.
            heapq.heappush(heap, (-ratio, number))
        elif ratio > 0 and choice.has_room(number):
            choice.take(number)
    return sorted(choice.picked)


class _Choice:
    """Hold the chosen blocks, and the value that each other block would add by terms that no chosen block has."""

    def __init__(self, blocks: Sequence[Block], limit: int) -> None:
        lexicon = Lexicon()
        self.picked: list[int] = []
        self._blocks = blocks
        self._terms = [lexicon.terms(block.text) for block in blocks]
        self._left = _term_values(self._terms)
        self._factors = [_block_factor(block.text, number, len(blocks)) for number, block in enumerate(blocks)]
        self._costs = [_COUNTER.count(block.text) + _GAP_TOKENS for block in blocks]
        self._tokens = float(limit)
        self._characters = MAX_EXTRACT_CHARS

    def ratio(self, number: int) -> float:
        """Return the value of a block per token."""
        return sum(map(self._left.__getitem__, self._terms[number])) * self._factors[number] / self._costs[number]

    def has_room(self, number: int) -> bool:
        """Return whether there is room for a block."""
        return self._costs[number] <= self._tokens and len(self._blocks[number].text) <= self._characters

    def take(self, number: int) -> None:
        """Choose a block. From now on its terms add no value to other blocks."""
        self.picked.append(number)
        self._left.update(dict.fromkeys(self._terms[number], 0.0))
        self._tokens -= self._costs[number]
        self._characters -= len(self._blocks[number].text)


def _block_factor(text: str, number: int, count: int) -> float:
    place = 1 + _FIRST_BONUS / (1 + number) + _LAST_BONUS / (count - number)
    return place * _ERROR_FACTOR if ERROR_LINE.search(text) else place


def _term_values(terms: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Return the value of each term.

    A word or name in many blocks is the subject of the text, so its value rises. An identifier in many blocks says
    little about each of them, so its value falls.
    """
    block_counts = Counter(term for found in terms for term in found)
    kinds = {term: kind for found in terms for term, kind in found.items()}
    return {
        term: _term_value(term, kinds[term]) * (1 + math.log(count)) ** (-1 if kinds[term] == IDENTIFIER else 1)
        for term, count in block_counts.items()
    }


def _term_value(term: str, kind: int) -> float:
    if kind == IDENTIFIER and term.isalpha():
        return _CAPITALS_VALUE
    return _NUMBER_VALUE if term.replace(".", "").isdigit() else _TERM_VALUES[kind]
