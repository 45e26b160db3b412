"""Split JSON objects and lists into the bytes of their values, and join them with some values replaced.

Numbers and escapes can be written in several ways, and decoding loses the original one. So an unchanged value is copied
as bytes without decoding it. The input must be JSON that `gateway.core.conversation.message.decode` can parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gateway.core.conversation.lossless_json import parse_whole, write
from gateway.core.conversation.message import encode

_SPACE: Final = re.compile(r"[ \t\n\r]*")
#: finds where a value ends; numbers are not converted
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def fields_of(raw: bytes) -> dict[str, bytes]:
    """Return the fields of an object, each with the unchanged bytes of its value."""
    values = list(_values(raw.decode()))
    return {str(name): text.encode() for (name, _), (_, text) in zip(values[::2], values[1::2], strict=True)}


def items_of(raw: bytes) -> list[bytes]:
    """Return the unchanged bytes of each item of a list; empty if the value is not a list."""
    text = raw.decode()
    return [item.encode() for _, item in _values(text)] if text.lstrip().startswith("[") else []


def object_of(fields: Mapping[str, bytes]) -> bytes:
    """Return an object with these fields."""
    return b"{" + b",".join(encode(name) + b":" + value for name, value in fields.items()) + b"}"


def list_of(items: Iterable[bytes]) -> bytes:
    """Return a list of these items."""
    return b"[" + b",".join(items) + b"]"


def compact(raw: bytes) -> str:
    """Return an object or list without white space, with its numbers unchanged; other values are returned unchanged."""
    text = raw.decode()
    value = parse_whole(text)
    return write(value) if value is not None else text


def _values(text: str) -> Iterator[tuple[object, str]]:
    """Yield the values between the brackets, including field names, each with its text."""
    at = _after_spaces(text, _after_spaces(text, 0) + 1)
    while text[at] not in "]}":
        value, end = _DECODER.raw_decode(text, at)
        yield value, text[at:end]
        at = _after_spaces(text, end)
        if text[at] in ",:":
            at = _after_spaces(text, at + 1)


def _after_spaces(text: str, at: int) -> int:
    """Return the index of the next character that is no white space."""
    spaces = _SPACE.match(text, at)
    return spaces.end() if spaces is not None else at
