"""Read an error about a request that is too long, if its wording is unknown, by its key terms and numbers.

A sentence is used only if every word is in a fixed list of words from length errors. Identifiers (with a digit or an
underscore) are ignored. Text that is quoted from the request has other words, and quotes around several of them.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: characters of the first sentence that are read
_MAX_CHARACTERS: Final = 300
_FLAGS: Final = re.IGNORECASE | re.ASCII
_END: Final = re.compile(r"[.!?;](?:\s|$)")
_WORD: Final = re.compile(r"[^\W\d]+(?:'s)?")
#: an identifier, such as a parameter or a model, in quotes or without
_NAME: Final = re.compile(r"[`'\"]?[\w./-]*[\d_][\w./-]*[`'\"]?")
_QUOTED: Final = re.compile(r"(?<!\w)([\"'`])[^\"'`]*\s[^\"'`]*\1")
_NUMBER: Final = re.compile(r"(?<![\w.-])\d[\d,]{0,14}(?![\w-]|\.\d)")
_WORDS: Final = frozenset(
    {
        *("a", "about", "above", "allowed", "an", "and", "are", "as", "at", "available"),
        *("be", "been", "beyond", "but", "by"),
        *("can", "cannot", "capacity", "chat", "combined", "configured", "contain", "contained", "contains"),
        *("context", "conversation", "could", "count", "current", "currently", "do", "does", "enough", "exceed"),
        *("exceeded", "exceeding", "exceeds", "fewer", "fit", "fits", "for", "given", "got", "greater", "had", "has"),
        *("have", "history", "however", "hit", "in", "input", "inputs", "into", "is", "it", "its", "larger", "large"),
        *("length", "lengths", "less", "limit", "limits", "long", "longer", "longest", "many", "max", "maximal"),
        *("maximum", "message", "messages", "model", "models", "more", "most", "must", "not", "number", "of", "on"),
        *("only", "or", "out", "over", "overflow", "overflowed", "overflows", "passed", "plus", "prompt"),
        *("prompts", "provided", "query", "reached", "received", "request", "requested", "requests"),
        *("required", "requires", "resulted", "resulting", "room", "sent", "sequence", "sequences", "server"),
        *("should", "size", "space", "submitted", "sum", "supported", "supports", "text", "than", "that", "the"),
        *(
            "this",
            "to",
            "token",
            "tokens",
            "too",
            "total",
            "up",
            "was",
            "were",
            "which",
            "window",
            "with",
            "within",
            "you",
        ),
        *("your"),
    }
)
#: names of a length or of its limit; other names have no meaning here
_TERM: Final = re.compile(
    r"\b(?:context|prompt|length|tokens?|sequence|seq|max_model_len|max_seq_len|n_ctx|num_ctx|\w*_tokens|\w*_length)\b",
    _FLAGS,
)
_EXCESS: Final = re.compile(
    r"exceed|too (?:long|large|many|big)|(?:longer|larger|greater|more) than|overflow|not fit|\bover\b|beyond|at most"
    r"|(?:must|should) (?:be|have)|cannot (?:be|have)|maximum|\blimit|[<>]=?|\bbut\b",
    _FLAGS,
)
#: The error is about an output limit, a rate or another unit, not about the length of a request.
_OTHER: Final = re.compile(
    r"\b(?:max_tokens|max_completion_tokens|max_output_tokens|max_new_tokens|max(?:imum)? tokens|output|completion"
    r"|per|rate|batch)\b",
    _FLAGS,
)
#: Words that precede a limit, with few words between. Other words precede the length of the request.
_LIMIT: Final = re.compile(
    r"(?:\b(?:max\w*|limit\w*|window|capacity|than|exceed\w*|most|to|only|size|n_ctx|num_ctx)\b|<=?)\W+"
    r"(?:[a-z_]+\W+){0,4}?(?P<number>\d[\d,]{0,14})(?![\w-])",
    _FLAGS,
)


class Lengths(NamedTuple):
    """Limit in an error and the length that was refused, in tokens; None for what it does not say."""

    limit: int | None = None
    asked: int | None = None


def lengths_in(text: str) -> Lengths | None:
    """Return the lengths in the first sentence of a message, or None if it is about something else."""
    end = _END.search(text[:_MAX_CHARACTERS])
    sentence = text[: end.start() if end is not None else _MAX_CHARACTERS]
    if _QUOTED.search(sentence) or not (_TERM.search(sentence) and _EXCESS.search(sentence)) or _OTHER.search(sentence):
        return None
    if not all(word.lower() in _WORDS for word in _WORD.findall(_NAME.sub(" ", sentence))):
        return None
    numbers = sorted({int(digits.replace(",", "")) for digits in _NUMBER.findall(sentence)} - {0})
    if len(numbers) == 2:  # noqa: PLR2004
        # The refused length is larger than the limit.
        return Lengths(*numbers)
    limit = _LIMIT.search(sentence)
    return Lengths(int(limit["number"].replace(",", "")) or None if limit is not None else None)
