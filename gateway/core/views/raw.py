"""Split JSON objects and lists into their bytes, and join them with some values replaced.

Numbers and escapes have more than one spelling, and reading them forgets which it was. What is not changed therefore
goes from one value to the other without being read. All of it must be JSON that
`gateway.core.conversation.message.read` can read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from gateway.core.conversation.lossless_json import parse_whole, written
from gateway.core.conversation.message import encode

_SPACE: Final = re.compile(r"[ \t\n\r]*")
#: finds where a value ends; numbers are not made
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)


def fields_of(raw: bytes) -> dict[str, bytes]:
    """The fields of an object, each value as it came."""
    found = list(_values(raw.decode()))
    return {str(name): text.encode() for (name, _), (_, text) in zip(found[::2], found[1::2], strict=True)}


def items_of(raw: bytes) -> list[bytes]:
    """The items of a list, each as it came; none of what is no list."""
    text = raw.decode()
    return [item.encode() for _, item in _values(text)] if text.lstrip().startswith("[") else []


def object_of(fields: Mapping[str, bytes]) -> bytes:
    """The object with these fields."""
    return b"{" + b",".join(encode(name) + b":" + value for name, value in fields.items()) + b"}"


def list_of(items: Iterable[bytes]) -> bytes:
    """The list of these items."""
    return b"[" + b",".join(items) + b"]"


def compact(raw: bytes) -> str:
    """An object or list without its white space, and numbers as they are spelled; all else as it came."""
    text = raw.decode()
    value = parse_whole(text)
    return written(value) if value is not None else text


def _values(text: str) -> Iterator[tuple[object, str]]:
    """The values between the brackets, names of fields among them, and how each is written."""
    at = _behind(text, _behind(text, 0) + 1)
    while text[at] not in "]}":
        value, end = _DECODER.raw_decode(text, at)
        yield value, text[at:end]
        at = _behind(text, end)
        if text[at] in ",:":
            at = _behind(text, at + 1)


def _behind(text: str, at: int) -> int:
    """The next place that is no space."""
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at
