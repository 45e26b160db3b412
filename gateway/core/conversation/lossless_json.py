"""Read JSON so that it can be written back unchanged, with the spelling of its numbers.

A number is carried as a text between two marks, which encoders and tables pass on untouched; the same marks carry any
other text that is to stand among JSON without quotes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from gateway.core.conversation.message import DEEPEST
from gateway.core.values import dataclass

#: A text with more values than this is left alone: about half a second of work. Each has a comma or a
#: bracket before it; a line costs as much as a value.
_MOST_VALUES: Final = 500_000
_COUNTED: Final = (",", "{", "[", "\n{")
#: Unicode keeps these two for programs' own use. A text that holds them all the same is not read.
_OPEN: Final = "\ufdd0"
_CLOSE: Final = "\ufdd1"
_ESCAPED: Final = re.compile(r"\\u[fF][dD][dD][01]")
#: what was encoded between the marks, with the quotes around it
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":"))


def bare(text: str) -> str:
    """A value that is written as this text, without quotes."""
    return f"{_OPEN}{text}{_CLOSE}"


def bared(value: str) -> str | None:
    """The text of a bare value; None for a string."""
    return value[1:-1] if value[:1] == _OPEN else None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=bare, parse_float=bare, parse_constant=_constant)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The object or list that a text is, numbers as bare values; or the list of the objects that stand on its lines."""

    value: dict[str, Any] | list[Any]
    is_lines: bool = False


def parse(text: str) -> Parsed | None:
    """What a text says as JSON or JSON lines; None for all else, and for what is odd or huge."""
    if not _may_be_read(text):
        return None
    values = _parsed([text])
    if values is not None:
        return Parsed(values[0])
    values = _parsed([line for line in text.split("\n") if line and not line.isspace()])
    if values is None or not all(isinstance(value, dict) for value in values):
        return None
    return Parsed(values, is_lines=True)


def parse_whole(text: str) -> dict[str, Any] | list[Any] | None:
    """The object or list that a text is, numbers as bare values; None for all else, JSON lines among it."""
    values = _parsed([text]) if _may_be_read(text) else None
    return values[0] if values is not None else None


def _may_be_read(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[") and sum(map(text.count, _COUNTED)) <= _MOST_VALUES and not _is_marked(text)


def _is_marked(text: str) -> bool:
    return _OPEN in text or _CLOSE in text or ("\\u" in text and _ESCAPED.search(text) is not None)


def _parsed(texts: list[str]) -> list[Any] | None:
    """Each text's value, None if one of them has none that could be relied on."""
    try:
        values = [_DECODER.decode(text) for text in texts]
    except (ValueError, RecursionError):
        return None
    return None if _is_deep(values) else values


def _is_deep(values: list[Any]) -> bool:
    """Nested deeper than encoders surely go; told fast, because it is asked of every value."""
    level: list[Any] = [values]
    for _ in range(DEEPEST):
        level = [
            inner
            for node in level
            for inner in (node.values() if type(node) is dict else node)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return False
    return True


def written(value: object) -> str:
    """A value as compact JSON."""
    text = _ENCODER.encode(value)
    return text.replace(f'"{_OPEN}', "").replace(f'{_CLOSE}"', "")
