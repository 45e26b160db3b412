"""Write the line that describes a tool result and names the handle of its full text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from gateway.core.conversation.lossless_json import bared, parse, written
from gateway.core.fitting.blocks import FULL_TEXT_AT

#: characters that a handle may have
_HANDLE: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
#: Characters of a description, without the size and the handle after it.
_LONGEST: Final = 240
#: Characters that a description quotes from the start of a text, and from the line that reports an error.
_BEGINNING: Final = 120
_TROUBLE_LINE: Final = 80
#: Characters at the end of a text that are searched for that line.
_SEARCH_CHARS: Final = 100_000
#: Characters of the longest value that a description quotes.
_VALUE: Final = 32
#: Characters of a key or column name in a description.
_NAME: Final = 40
_POINTER: Final = re.compile(rf"\[.{{1,300}} [\d,]{{1,20}} characters{re.escape(FULL_TEXT_AT)}[A-Za-z0-9_-]{{1,128}}\]")
#: Matches a line that reports an error. In most languages the last such line is the clearest.
TROUBLE: Final = re.compile(
    r"(?i)\b(?:\w*error|\w*exception|traceback|fail(?:s|ed|ure)?|fatal|panic|denied|refused|not found|no such"
    r"|cannot|unable|invalid|timed? ?out|undefined)\b"
)


def handle_line(what: str, size: int, handle: str) -> str:
    """Return the line that names what is shown, the characters of the original, and its handle.

    Raises:
        ValueError: the handle has other characters than letters, digits, `_` and `-`. Such a line would not be
            recognized again.
    """
    if _HANDLE.fullmatch(handle) is None:
        raise ValueError("a handle is made of at most 128 letters, digits, _ and -")
    return f"[{what} {size:,} characters{FULL_TEXT_AT}{handle}]"


def ends_with_handle(text: str) -> bool:
    """Return whether a text ends with a line of `handle_line`, that is, whether it was shortened before."""
    return _POINTER.fullmatch(text, text.rfind("\n") + 1) is not None


def describe(text: str) -> str:
    """Return a description of a result in one line: kind, rows or lines, column names, short values, first words."""
    parsed = parse(text)
    if parsed is None:
        return _split(_of_text(text), _LONGEST)
    value = parsed.value
    said = ", ".join(_fields(value)) if isinstance(value, dict) else _list(value)
    kind = "JSON lines" if parsed.is_lines else "JSON"
    return _split(f"{kind}, {said}", _LONGEST)


def _fields(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in islice(value.items(), _LONGEST):
        name = _line(key, _NAME)
        if isinstance(inner, dict | list):
            yield f"{name} ({_list(inner) if isinstance(inner, list) else f'{len(inner)} keys'})"
        else:
            short = _scalar(inner)
            yield f"{name} {short}" if len(short) <= _VALUE else name


def _list(values: list[Any], depth: int = 1) -> str:
    """Return how many values a list has, and a description of the first one."""
    first = values[0] if values else None
    count = len(values)
    if isinstance(first, dict):
        columns = ", ".join(_line(name, _NAME) for name in islice(first, _LONGEST))
        return f"{_many(count, 'row')} with columns {columns}"
    if isinstance(first, list):
        return f"{_many(count, 'list')}{f', the first of {_list(first, depth - 1)}' if depth else ''}"
    return f"{_many(count, 'value')}{f', first {_line(_scalar(first), _VALUE)}' if values else ''}"


def _scalar(value: Any) -> str:
    text = bared(value) if isinstance(value, str) else None
    return text if text is not None else written(value)


def _of_text(text: str) -> str:
    last_lines = text[-_SEARCH_CHARS:].splitlines()
    trouble = next((line for line in reversed(last_lines) if TROUBLE.search(line)), "")
    begins = _line(text.lstrip(), _BEGINNING)
    says = _line(trouble, _TROUBLE_LINE)
    lines = _many(text.rstrip("\n").count("\n") + 1, "line")
    return f'text, {lines}, begins "{begins}"' + (f', says "{says}"' if says not in begins else "")


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _line(text: str, most: int) -> str:
    """Return the start of a text on one line."""
    return _split(" ".join(text[: 4 * most].split()), most)


def _split(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
