"""Estimate the tokens of texts in formats and fields that have no token counter."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from gateway.core.conversation.json_text import string_end
from gateway.core.counting.heuristic import estimate_tokens, rounded_up
from gateway.core.tools import NAME_CHARACTERS
from gateway.dialects.fields import Fields, decode, without_escapes

#: strings of a request whose tokens are estimated one by one
_MAX_TEXTS: Final = 100_000
#: characters of non-ASCII texts that are examined for the estimate, and how many at once
_MAX_COUNTED: Final = 512 * 1024
_COUNTED_AT_ONCE: Final = 64 * 1024
#: bytes of a list of strings that are decoded at once, and the leading bytes that identify such a list
_AT_ONCE: Final = 8 * 2**20
_GLANCE: Final = 16
_TEXTS_DECODER: Final = msgspec.json.Decoder(list[str])
#: fields that may hold a text as its token ids
_ID_FIELDS: Final = ("input", "prompt")
#: translates the characters of numbers to "0" and all others to a space
_NUMBERS: Final = bytes(ord("0" if chr(byte) in "0123456789.-+eE" else " ") for byte in range(256))
#: In an unknown field, this many characters of base64 are data, such as a recording. No word is as long.
_DATA_CHARACTERS: Final = 1024
_BASE64: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_=\r\n"
#: A string without its opening quote, its closing quote, and the colon after it if it is a key. If the string has many
#: escapes, only its first part is matched, and the code after its closing quote is matched separately by `_AFTER`.
_STRING: Final = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*){0,100})(?:(")\s*(:)?)?')
_AFTER: Final = re.compile(rb'"\s*(:)?')


def texts(value: object, depth: int = 0) -> Iterator[str]:
    """Yield every string in a JSON value that may be prompt text; skip data and deep nesting.

    A value that is not decoded yet (`Raw`) is read without decoding it, up to `_MAX_TEXTS` strings. The rest is assumed
    to have as much text per byte.
    """
    if isinstance(value, msgspec.Raw):
        yield from _texts_of_raw(value)
    elif isinstance(value, str):
        if not _is_data(value):
            yield value
    elif depth < 32:  # noqa: PLR2004  # deeper than any prompt; only a guard against recursion
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for item in items:
            yield from texts(item, depth + 1)


def texts_of_fields(fields: Fields, names: Iterable[str], *, unknown: bool = False) -> Iterator[str]:
    """Yield the strings in some top-level fields of a body.

    `unknown`: the meaning of the fields is not known. A model may see their keys too; long base64 is data.
    """
    for name in names:
        if name in fields:
            yield from _texts_of_raw(fields[name], unknown=unknown)


def texts_if_longer(characters: int, parts: Iterator[str]) -> Iterator[str]:
    """Yield all texts if they have more characters in total than this; else none."""
    few: list[str] = []
    for text in parts:
        few.append(text)
        characters -= len(text)
        if characters < 0:
            yield from few
            yield from parts


def _is_data(text: str, *, unknown: bool = False) -> bool:
    """Return True if no model reads this string as text. A string with a space is text, even if it begins `data:`."""
    if text.startswith("data:"):
        return " " not in text and "\n" not in text
    is_long = unknown and len(text) >= _DATA_CHARACTERS and " " not in text and text.isascii()
    return is_long and not text.encode().translate(None, _BASE64)


def _is_plain_data(written: bytes) -> bool:
    """Return True if an encoded string is certainly data, so that it need not be decoded."""
    return written.startswith(b"data:") and b" " not in written and b"\\" not in written


def token_ids(fields: Fields) -> int:
    """Return the number of tokens that are sent as ids: the numbers in arrays. Counted as bytes, without decoding."""
    arrays = (_array(fields[name]) for name in _ID_FIELDS if name in fields)
    return sum(_outside_strings(array).translate(_NUMBERS).count(b" 0") for array in arrays)


def prompts(raw: bytes | msgspec.Raw) -> int:
    """Return the number of prompts in a field with one or several, each a text or a list of ids. Not decoded."""
    array = _array(raw)
    return max(1, array.count(b'"') // 2 + _outside_strings(array).count(b"[") - 1)


def _array(raw: bytes | msgspec.Raw) -> bytes:
    """Return an array without escapes, so that every quote begins or ends a string; empty if it is not an array."""
    view = memoryview(raw)
    if view[0] != ord("["):
        return b""
    return without_escapes(bytes(view))


def _outside_strings(array: bytes) -> bytes:
    """Return the bytes between the strings of an array; after `_MAX_TEXTS` strings, everything."""
    return b" ".join(array.split(b'"', 2 * _MAX_TEXTS)[::2])


def _list_of_texts(raw: msgspec.Raw) -> list[str] | None:
    """Return a plain list of strings, as embeddings send it, else None. Decoding is five times as fast as a search."""
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
    decoded: list[str] = []
    for number, (written, is_key, end) in enumerate(_strings(view), 1):
        if (unknown or not is_key) and not _is_plain_data(written):
            text = decode(b'"' + written + b'"')
            if isinstance(text, str) and not _is_data(text, unknown=unknown):
                decoded.append(text)
                yield text
        if number == _MAX_TEXTS:
            yield from _repeated("".join(decoded), end, view.nbytes - end)
            return


def _strings(view: memoryview) -> Iterator[tuple[bytes, bool, int]]:
    """Yield each encoded string of JSON, whether it is a key, and the index after the string and its colon."""
    at: int | None = 0
    while at is not None:
        begin, at = at, None
        for match in _STRING.finditer(view, begin):
            if match[2] is None:
                end = string_end(view, match.end())
                after = _AFTER.match(view, end)
                if after is not None:
                    at = after.end()
                    yield bytes(view[match.start(1) : end]), after[1] is not None, at
                break
            yield match[1], match[3] is not None, match.end()


def _repeated(text: str, read: int, left: int) -> Iterator[str]:
    """Repeat the text of the bytes read so far for the remaining bytes, in proportion."""
    whole, part = divmod(left, read)
    yield from itertools.repeat(text, whole)
    yield text[: len(text) * part // read]


def estimate(parts: Iterator[str]) -> int:
    """Return the estimated tokens of several texts, rounded up.

    The tokens of ASCII text depend only on its length. Of other texts `_MAX_COUNTED` characters are examined, and the
    rest is assumed to have as many tokens per character.
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


def safe_name(text: str) -> str:
    """Return an external name made safe for records and headers: printable, bounded, without lone surrogates."""
    if len(text) <= NAME_CHARACTERS and text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else "?" for char in text[:NAME_CHARACTERS].encode("utf-8", "replace").decode()
    )
