"""Write the line that describes a tool result and names the handle of its full text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from gateway.core.conversation.lossless_json import bare_text_of, parse, write
from gateway.core.trimming.blocks import FULL_TEXT_AT, FULL_TEXT_IN_PROGRAM

#: characters that a handle may have
_HANDLE: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
#: Characters of a description, without the size and the handle after it.
_MAX_DESCRIPTION_CHARS: Final = 240
#: Characters that a description quotes from the start of a text, and from the line that reports an error.
_MAX_START_CHARS: Final = 120
_MAX_ERROR_CHARS: Final = 80
#: Characters at the end of a text that are searched for that line.
_SEARCH_CHARS: Final = 100_000
#: Characters of the longest value that a description quotes.
_MAX_VALUE_CHARS: Final = 32
#: Characters of a key or column name in a description.
_MAX_NAME_CHARS: Final = 40
_HANDLE_LINE: Final = re.compile(
    r"\[.{1,300} [\d,]{1,20} characters"
    rf"(?:{re.escape(FULL_TEXT_AT)}|{re.escape(FULL_TEXT_IN_PROGRAM)})[A-Za-z0-9_-]{{1,128}}\]"
)
#: Matches a line that reports an error. In most languages the last such line is the clearest.
ERROR_LINE: Final = re.compile(
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
    return _HANDLE_LINE.fullmatch(text, text.rfind("\n") + 1) is not None


def describe(text: str) -> str:
    """Return a description of a result in one line: kind, rows or lines, column names, short values, first words."""
    parsed = parse(text)
    if parsed is None:
        return _clip(_of_text(text), _MAX_DESCRIPTION_CHARS)
    value = parsed.value
    summary = ", ".join(_fields(value)) if isinstance(value, dict) else _list(value)
    kind = "JSON lines" if parsed.is_lines else "JSON"
    return _clip(f"{kind}, {summary}", _MAX_DESCRIPTION_CHARS)


def _fields(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in islice(value.items(), _MAX_DESCRIPTION_CHARS):
        name = _one_line(key, _MAX_NAME_CHARS)
        if isinstance(inner, dict | list):
            yield f"{name} ({_list(inner) if isinstance(inner, list) else f'{len(inner)} keys'})"
        else:
            short = _scalar(inner)
            yield f"{name} {short}" if len(short) <= _MAX_VALUE_CHARS else name


def _list(values: list[Any], depth: int = 1) -> str:
    """Return how many values a list has, and a description of the first one."""
    first = values[0] if values else None
    count = len(values)
    if isinstance(first, dict):
        columns = ", ".join(_one_line(name, _MAX_NAME_CHARS) for name in islice(first, _MAX_DESCRIPTION_CHARS))
        return f"{_count_of(count, 'row')} with columns {columns}"
    if isinstance(first, list):
        return f"{_count_of(count, 'list')}{f', the first of {_list(first, depth - 1)}' if depth else ''}"
    return f"{_count_of(count, 'value')}{f', first {_one_line(_scalar(first), _MAX_VALUE_CHARS)}' if values else ''}"


def _scalar(value: Any) -> str:
    text = bare_text_of(value) if isinstance(value, str) else None
    return text if text is not None else write(value)


def _of_text(text: str) -> str:
    last_lines = text[-_SEARCH_CHARS:].splitlines()
    error_line = next((line for line in reversed(last_lines) if ERROR_LINE.search(line)), "")
    start = _one_line(text.lstrip(), _MAX_START_CHARS)
    error = _one_line(error_line, _MAX_ERROR_CHARS)
    lines = _count_of(text.rstrip("\n").count("\n") + 1, "line")
    return f'text, {lines}, begins "{start}"' + (f', says "{error}"' if error not in start else "")


def _count_of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _one_line(text: str, most: int) -> str:
    """Return the start of a text on one line."""
    return _clip(" ".join(text[: 4 * most].split()), most)


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
