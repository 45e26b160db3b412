"""Rank old messages of the user and the assistant by how well they answer the newest question.

A question has few words in common with the message that answers it, and often in other forms: "when did you start to
dance" and "dancing since May". One block has too few words to compare. So whole messages are ranked with BM25, by the
first letters of their words. A message also gets a share of the score of the message before or after it, because an
answer follows its question.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final

from gateway.core.conversation.message import text_of
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.relevance import rarity
from gateway.core.trimming.terms import STOP_WORDS, character_pairs
from gateway.core.values import dataclass

#: First letters of a word that are compared. In most languages with an alphabet, they are the same for all forms of a
#: word, such as dance and dancing. In one conversation, few different words begin with the same letters.
_ROOT_CHARS: Final = 4
_WORD: Final = re.compile(r"\w+")
#: Short words that are ignored, because they occur in most messages. `STOP_WORDS` has longer ones.
_SHORT_STOP_WORDS: Final = frozenset(
    """
    a all am an and any are as at be but by can did do for from get got had has he her him his how i if in is it its ll
    may me my no not of on or our out re s she so t the to too up us ve was way we who why yes you
    """.split()  # noqa: SIM905 - as in `terms`
)
_STOP_ROOTS: Final = _SHORT_STOP_WORDS | STOP_WORDS
#: The parameters k1 and b of BM25: how fast further uses of a word lose value, and how much a long message does.
_SATURATION: Final = 1.2
_LENGTH_PENALTY: Final = 0.75
#: Share of the score of its neighbour that a message gains.
_NEIGHBOUR: Final = 0.4
#: A longer message of the user, in characters, is treated as a document and not as a question.
_MAX_QUESTION_CHARS: Final = 2_000
#: A message with less than this share of the best score does not count as an answer.
_MIN_SCORE_SHARE: Final = 0.2
#: An answer that takes more than this share of the room is not sent whole.
MAX_ANSWER_SHARE: Final = 0.1
#: bytes in memory of an entry of `WordRoots.counts`
_ENTRY_BYTES: Final = 120


@dataclass(frozen=True, slots=True)
class WordRoots:
    """The beginnings of the words of a message, with the number of times that each occurs."""

    counts: Mapping[str, int]
    length: int

    @classmethod
    def of(cls, text: str) -> WordRoots:
        """Return the roots of a text, without common words."""
        words = [word for word in _WORD.findall(text.lower()) if word not in _STOP_ROOTS]
        if not text.isascii():
            words += character_pairs(text)
        return cls(Counter([word[:_ROOT_CHARS] for word in words]), len(words))

    @property
    def size_bytes(self) -> int:
        """Return the approximate size in memory."""
        return _ENTRY_BYTES * (1 + len(self.counts))


def rank_answers(draft: Draft) -> Sequence[int]:
    """Return the messages that answer the newest question, best first; none if the user did not speak last."""
    if not draft.memo.answers:
        draft.memo.answers.append(_rank(draft))
    return draft.memo.answers[0]


def _rank(draft: Draft) -> Sequence[int]:
    last = len(draft.decisions) - 1
    outlines = draft.conversation.outlines
    if outlines[last].role != "user" or outlines[last].length > _MAX_QUESTION_CHARS:
        return ()
    asked = WordRoots.of(text_of(draft.conversation.messages[last])).counts
    spoken = [i for i, one in enumerate(outlines[:last]) if one.role in ("user", "assistant") and one.length]
    priorities = draft.conversation.priorities
    scores = _with_neighbours(_scores(asked, _roots(draft, spoken)))
    weighted = [(score * priorities.get(index, 1.0), index) for score, index in zip(scores, spoken, strict=True)]
    ranked = sorted(weighted, reverse=True)
    least = _MIN_SCORE_SHARE * ranked[0][0] if ranked else 0.0
    return [index for score, index in ranked if score > 0 and score >= least]


def _roots(draft: Draft, indices: Sequence[int]) -> Sequence[WordRoots]:
    keys, messages, reader = draft.conversation.keys, draft.conversation.messages, draft.reader
    size_of = attrgetter("size_bytes")
    return [
        reader.cached_for_message("roots", keys[index], partial(_roots_of, messages[index]), size_of)
        for index in draft.deadline.over(indices)
    ]


def _roots_of(raw: bytes) -> WordRoots:
    return WordRoots.of(text_of(raw))


def _scores(asked: Iterable[str], messages: Sequence[WordRoots]) -> list[float]:
    """Return the BM25 score of each message."""
    scores = [0.0] * len(messages)
    mean = sum(one.length for one in messages) / (len(messages) or 1)
    for root in asked:
        found = [(place, one.counts[root]) for place, one in enumerate(messages) if root in one.counts]
        if 2 * len(found) >= len(messages):
            continue  # a word in half of the messages does not show which of them answers the question
        gain = rarity(1.0, len(messages), len(found))
        for place, count in found:
            damped = _SATURATION * (1 - _LENGTH_PENALTY + _LENGTH_PENALTY * messages[place].length / mean)
            scores[place] += gain * count * (_SATURATION + 1) / (count + damped)
    return scores


def _with_neighbours(scores: Sequence[float]) -> list[float]:
    neighbours = zip(scores, [0.0, *scores], [*scores[1:], 0.0], strict=False)
    return [score + _NEIGHBOUR * max(before, after) for score, before, after in neighbours]
