"""Parse JSON and write it back without changing how its numbers are written.

A number is stored as a string between two marker characters, which JSON encoders and tables do not change. The same
markers can hold any other text that is to be written without quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from gateway.core.conversation.message import MAX_DEPTH
from gateway.core.values import dataclass

#: A text with more values than this is not parsed; parsing that many takes about half a second. Each value follows a
#: comma or a bracket. In JSON lines, a line takes as long as a value.
_MAX_VALUES: Final = 500_000
_BEFORE_VALUES: Final = (",", "{", "[", "\n{")
#: Unicode reserves these two characters for internal use by programs. A text that contains them is not parsed.
_START_MARK: Final = "\ufdd0"
_END_MARK: Final = "\ufdd1"
_ESCAPED_MARK: Final = re.compile(r"\\u[fF][dD][dD][01]")
#: writes bare values as strings; `write` then removes the markers and their quotes
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


def as_bare_value(text: str) -> str:
    """Return a value that is written as this text, without quotes."""
    return f"{_START_MARK}{text}{_END_MARK}"


def bare_text_of(value: str) -> str | None:
    """Return the text of a bare value, or None for a string."""
    return value[1:-1] if value[:1] == _START_MARK else None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_int=as_bare_value, parse_float=as_bare_value, parse_constant=_constant
)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed object or list with numbers as bare values, or the objects of JSON lines as a list."""

    value: dict[str, Any] | list[Any]
    is_lines: bool = False


def parse(text: str) -> Parsed | None:
    """Parse a text as JSON or JSON lines.

    Return None if it is neither, if it has too many values, or if it could not be written back unchanged.
    """
    if not _is_parsable(text):
        return None
    values = _decode_all([text])
    if values is not None:
        return Parsed(values[0])
    values = _decode_all([line for line in text.split("\n") if line and not line.isspace()])
    if values is None or not all(isinstance(value, dict) for value in values):
        return None
    return Parsed(values, is_lines=True)


def parse_whole(text: str) -> dict[str, Any] | list[Any] | None:
    """Parse a text that is one JSON object or list, with numbers as bare values; return None for anything else."""
    values = _decode_all([text]) if _is_parsable(text) else None
    return values[0] if values is not None else None


def _is_parsable(text: str) -> bool:
    return (
        text.lstrip()[:1] in ("{", "[") and sum(map(text.count, _BEFORE_VALUES)) <= _MAX_VALUES and not has_marks(text)
    )


def has_marks(text: str) -> bool:
    """Return whether a text has the marker characters of bare values, so that it cannot be parsed reliably."""
    return _START_MARK in text or _END_MARK in text or ("\\u" in text and _ESCAPED_MARK.search(text) is not None)


def _decode_all(texts: list[str]) -> list[Any] | None:
    """Return the value of each text, or None if one of them cannot be parsed reliably."""
    try:
        values = [_DECODER.decode(text) for text in texts]
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(values) else values


def _is_deep(values: list[Any]) -> bool:
    """Return True if a value is nested deeper than encoders support. It is fast, because every value is checked."""
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for node in level
            for inner in (node.values() if type(node) is dict else node)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def write(value: object) -> str:
    """Return a value as compact JSON."""
    text = _ENCODER.encode(value)
    return text.replace(f'"{_START_MARK}', "").replace(f'{_END_MARK}"', "")
