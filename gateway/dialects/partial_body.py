"""Read usage and texts from a JSON response that is incomplete or too large.

The usage that it reports counts as in a whole one. Without it texts are weighed, as far as they can be told from
numbers and pictures: the bytes of a vector or of an image are no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from gateway.core.conversation.json_text import string_end
from gateway.core.counting.heuristic import estimate_tokens
from gateway.dialects.base import Dialect, ParsedResponse
from gateway.dialects.fields import decode_answer

#: bytes in which texts are looked for
_LOOKED_AT: Final = 1024 * 1024
#: of a long answer: bytes of its end that are kept
_TAIL: Final = 64 * 1024
#: names of fields that hold what a model says, up to the content of their strings
_TEXT: Final = re.compile(rb'"(?:content|text|arguments|reasoning|reasoning_content|thinking|refusal)"\s*:\s*"')
_CUT_ESCAPE: Final = re.compile(r"\\u[0-9a-fA-F]{0,3}\Z")
#: what may stand before a value: a byte order mark, and blank space
_BEFORE: Final = b"\xef\xbb\xbf \t\r\n"
#: names of fields; within a text their quotes would be escaped
_USAGE: Final = b'"usage"'
_PICTURE: Final = b'"b64_json"'
#: bytes of white space that may stand behind a whole answer
_TRAILING: Final = 64
#: how many fields `usage` are tried, the last one first
_TRIES: Final = 8
_NOTHING: Final = ParsedResponse()
_decoder: Final = json.JSONDecoder()


class PartialBody:
    """Keeps the beginning and the end of an answer that is passed on. `has_texts`: its texts are what a model made."""

    def __init__(self, dialect: Dialect, *, has_texts: bool) -> None:
        self._dialect = dialect
        self._has_texts = has_texts
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, piece: bytes) -> None:
        """Take a piece that came."""
        if len(self._head) < _LOOKED_AT:
            self._head += piece[: _LOOKED_AT - len(self._head)]
        self._tail += piece[-_TAIL:]
        if len(self._tail) > 2 * _TAIL:
            del self._tail[:-_TAIL]

    def answer(self) -> ParsedResponse:
        """What it says."""
        return _seen(self._dialect, bytes(self._head), bytes(self._tail), has_texts=self._has_texts)


def read_whole(dialect: Dialect, body: bytes, *, has_texts: bool) -> ParsedResponse:
    """What a whole answer says; see `PartialBody`. Its JSON may have a flaw: it is billed all the same."""
    answer = dialect.answer(body)
    if answer != _NOTHING or not body.lstrip(_BEFORE).startswith((b"{", b"[")) or decode_answer(body) is not None:
        return answer
    return _seen(dialect, body[:_LOOKED_AT], body, has_texts=has_texts)


def glimpsed(dialect: Dialect, body: bytes, *, has_texts: bool) -> ParsedResponse:
    """What an answer says that broke off; see `PartialBody`. `body`: what had come of it."""
    # To read megabytes of which a part is missing takes seconds, and says nothing.
    whole = dialect.answer(body) if body[-_TRAILING:].rstrip().endswith(b"}") else ParsedResponse()
    if whole.usage is not None or whole.output_estimate:
        # Only its end was missing, not a part of what it says.
        return whole
    return _seen(dialect, body[:_LOOKED_AT], body, has_texts=has_texts)


def _seen(dialect: Dialect, head: bytes, end: bytes, *, has_texts: bool) -> ParsedResponse:
    usage = _last_usage(end) or _last_usage(head)
    answer = dialect.answer(b'{"usage":%b}' % usage) if usage is not None else ParsedResponse()
    output = int(_weight(head)) if has_texts else 0
    return replace(answer, output_estimate=output, is_seen=_PICTURE not in head)


def _weight(head: bytes) -> float:
    """Tokens of its texts. What is no JSON has no numbers and pictures that could be told from them."""
    if not head.lstrip(_BEFORE).startswith((b"{", b"[")):
        return estimate_tokens(head.decode("utf-8", "replace"))
    return sum(map(estimate_tokens, map(_text, _texts(head))))


def _texts(head: bytes) -> Iterator[bytes]:
    """Yield the content of each string that the model wrote, also of one that breaks off."""
    end = 0
    while (found := _TEXT.search(head, end)) is not None:
        end = string_end(head, found.end())
        yield head[found.end() : end]


def _text(raw: bytes) -> str:
    """The text of a JSON string, without an escape that was cut off at its end."""
    written = _CUT_ESCAPE.sub("", raw.decode("utf-8", "replace"))
    try:
        return str(json.loads(f'"{written}"', strict=False))
    except ValueError:
        return written


def _last_usage(body: bytes) -> bytes | None:
    """The last object `usage` that can be read."""
    place = len(body)
    for _ in range(_TRIES):
        place = body.rfind(_USAGE, 0, place)
        if place < 0:
            return None
        text = body[place + len(_USAGE) : place + len(_USAGE) + _TAIL].decode("utf-8", "replace").lstrip(" \t\r\n:")
        if text.startswith("{"):
            try:
                value, length = _decoder.raw_decode(text)
            except (ValueError, RecursionError):
                continue
            if value:
                return text[:length].encode()
    return None
