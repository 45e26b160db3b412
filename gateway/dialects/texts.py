"""Estimate the tokens of texts in formats and fields that nothing else counts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gateway.core.conversation.json_text import string_end
from gateway.core.counting.heuristic import estimate_tokens, rounded_up
from gateway.core.tools import NAME_CHARACTERS
from gateway.dialects.fields import Fields, decode, unescaped

#: strings of a request that are weighed one by one
_MAX_TEXTS: Final = 100_000
#: characters of texts that are not ASCII that are looked at to weigh them, and how many at once
_MAX_COUNTED: Final = 512 * 1024
_COUNTED_AT_ONCE: Final = 64 * 1024
#: bytes of a list of strings that are decoded at once, and those by which one is known
_AT_ONCE: Final = 8 * 2**20
_GLANCE: Final = 16
_TEXTS_DECODER: Final = msgspec.json.Decoder(list[str])
#: fields that may hold a text as the ids of its tokens
_ID_FIELDS: Final = ("input", "prompt")
#: what a number is written with, and everything else
_NUMBERS: Final = bytes(ord("0" if chr(byte) in "0123456789.-+eE" else " ") for byte in range(256))
#: In a field that nobody knows, so many characters of base64 are data, as of a recording: no word is as long.
_DATA_CHARACTERS: Final = 1024
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\r\n"
#: A string without its quotes, its closing quote, and the colon after it if it is a key. Of a string with more escapes
#: only the first part is matched, and what follows its closing quote is looked for separately.
_STRING: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*){0,100})(?:(")\s*(:)?)?')
_AFTER: Final = re.compile(rb'"\s*(:)?')


def texts(value: object, depth: int = 0) -> Iterator[str]:
    """Every string inside a JSON value that may be prompt text; data and deep nesting are left out.

    A value that is not decoded yet (`Raw`) is read without building it, up to `_MAX_TEXTS` strings; the rest of it is
    taken to go on like that.
    """
    if isinstance(value, msgspec.Raw):
        yield from _texts_of_raw(value)
    elif isinstance(value, str):
        if not _is_data(value):
            yield value
    elif depth < 32:  # noqa: PLR2004  # deeper than any prompt; a guard, not a limit anyone meets
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in items:
            yield from texts(item, depth + 1)


def texts_of_fields(fields: Fields, names: Iterable[str], *, unknown: bool = False) -> Iterator[str]:
    """The strings inside some top-level fields of a body.

    `unknown`: nobody knows what these mean. Names in them may be shown to a model too; long base64 is data.
    """
    for name in names:
        if name in fields:
            yield from _texts_of_raw(fields[name], unknown=unknown)


def beyond(characters: int, parts: Iterator[str]) -> Iterator[str]:
    """Texts that have more characters together; else none."""
    few: list[str] = []
    for text in parts:
        few.append(text)
        characters -= len(text)
        if characters < 0:
            yield from few
            yield from parts


def _is_data(text: str, *, unknown: bool = False) -> bool:
    """Whether a string is what no model reads as text. What has a space is a text, also behind `data:`."""
    if text.startswith("data:"):
        return " " not in text and "\n" not in text
    is_long = unknown and len(text) >= _DATA_CHARACTERS and " " not in text and text.isascii()
    return is_long and not text.encode().translate(None, _BASE64)


def _is_plain_data(written: bytes) -> bool:
    """The same of a string as it stands in the body, where it need not be built to tell."""
    return written.startswith(b"data:") and b" " not in written and b"\\" not in written


def token_ids(fields: Fields) -> int:
    """Tokens that are sent as their ids: the numbers of arrays. They are counted as bytes; nothing is built of them."""
    arrays = (_array(fields[name]) for name in _ID_FIELDS if name in fields)
    return sum(_outside(array).translate(_NUMBERS).count(b" 0") for array in arrays)


def prompts(raw: bytes | msgspec.Raw) -> int:
    """Prompts in a field that may hold several, each a text or a list of ids. As in `token_ids` nothing is built."""
    array = _array(raw)
    return max(1, array.count(b'"') // 2 + _outside(array).count(b"[") - 1)


def _array(raw: bytes | msgspec.Raw) -> bytes:
    """An array, without escapes: every quote in it begins or ends a string. Empty where it is none."""
    view = memoryview(raw)
    if view[0] != ord("["):
        return b""
    return unescaped(bytes(view))


def _outside(array: bytes) -> bytes:
    """What stands between the strings of an array; behind `_MAX_TEXTS` of them everything."""
    return b" ".join(array.split(b'"', 2 * _MAX_TEXTS)[::2])


def _list_of_texts(raw: msgspec.Raw) -> list[str] | None:
    """What is nothing but a list of strings, as embeddings send it: decoding is five times as fast as a search."""
    view = memoryview(raw)
    if view.nbytes > _AT_ONCE or not bytes(view[:_GLANCE]).replace(b" ", b"").startswith(b'["'):
        return None
    content = bytes(view)
    if content.count(b'"') > 2 * _MAX_TEXTS:
        return None
    try:
        return _TEXTS_DECODER.decode(content)
    except msgspec.DecodeError:
        return None


def _texts_of_raw(raw: msgspec.Raw, *, unknown: bool = False) -> Iterator[str]:
    whole = _list_of_texts(raw)
    if whole is not None:
        yield from (text for text in whole if not _is_data(text, unknown=unknown))
        return
    view = memoryview(raw)
    found: list[str] = []
    for number, (written, is_key, end) in enumerate(_strings(view), 1):
        if (unknown or not is_key) and not _is_plain_data(written):
            text = decode(b'"' + written + b'"')
            if isinstance(text, str) and not _is_data(text, unknown=unknown):
                found.append(text)
                yield text
        if number == _MAX_TEXTS:
            yield from _going_on("".join(found), end, view.nbytes - end)
            return


def _strings(view: memoryview) -> Iterator[tuple[bytes, bool, int]]:
    """Yield each string of JSON as it is written, whether it is a key, and the index after it and its colon."""
    at: int | None = 0
    while at is not None:
        begin, at = at, None
        for found in _STRING.finditer(view, begin):
            if found[2] is None:
                end = string_end(view, found.end())
                after = _AFTER.match(view, end)
                if after is not None:
                    at = after.end()
                    yield bytes(view[found.start(1) : end]), after[1] is not None, at
                break
            yield found[1], found[3] is not None, found.end()


def _going_on(text: str, read: int, left: int) -> Iterator[str]:
    """As much of the text, again and again, as bytes are left to those that were read."""
    whole, part = divmod(left, read)
    yield from itertools.repeat(text, whole)
    yield text[: len(text) * part // read]


def estimate(parts: Iterator[str]) -> int:
    """Estimated tokens of several texts, rounded up.

    ASCII weighs by its length alone. Of other texts `_MAX_COUNTED` characters are looked at; the rest weighs like them.
    """
    tokens = other = 0.0
    counted = uncounted = 0
    for text in parts:
        if text.isascii():
            tokens += estimate_tokens(text)
            continue
        length = min(len(text), _MAX_COUNTED - counted)
        for start in range(0, length, _COUNTED_AT_ONCE):
            other += estimate_tokens(text[start : min(start + _COUNTED_AT_ONCE, length)])
        counted += length
        uncounted += len(text) - length
    if counted:
        tokens += other * (1 + uncounted / counted)
    return rounded_up(tokens)


def as_name(text: str) -> str:
    """A foreign name as it may stand in a record or a header: no lone surrogates, no control characters, bounded."""
    if len(text) <= NAME_CHARACTERS and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else "?" for char in text[:NAME_CHARACTERS].encode("utf-8", "replace").decode()
    )
