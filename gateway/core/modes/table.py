"""Write JSON lists of objects as tables, with each key named once.

Nothing is lost.

    [JSON list as a table, 2 rows, nothing left out; empty cell: no such key]
    id|name|price.net|tags
    1|Ada|12.50|["x","y"]
    2|"3"||null

- A cell is JSON. A string that cannot be mistaken for another value has no quotes.
- A column such as `price.net` is a field of the object under `price`, if all rows have the same fields there.
- A list deeper in a document is written below it, and a mark replaces it in the document.
- JSON without lists of objects only loses its white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from gateway.core.conversation.lossless_json import Parsed, as_bare_value, bare_text_of, parse, write
from gateway.core.values import dataclass

SEPARATOR: Final = "|"
#: Characters that a table in a document must save: its own line costs some, and the reader has to look it up.
_MIN_SAVED: Final = 40
#: Characters that all tables of a text must save together: the first line takes a hundred and must be understood.
_MIN_SAVED_IN_TOTAL: Final = 150
_LIST: Final = "[JSON list as a table, "
_LINES: Final = "[JSON lines as a table, "
_DOCUMENT: Final = "[JSON with its lists as tables below it, "
_LEGEND: Final = "nothing left out; empty cell: no such key]"
#: Characters of the quotes and the colon of a key.
_KEY_FRAME: Final = 3
#: A list of one object names each key only once already.
_MIN_ROWS: Final = 2
#: A reader cannot follow a table with more columns than this.
_MAX_COLUMNS: Final = 100
#: Lists nested deeper than this in a document stay JSON.
_MAX_DEPTH: Final = 8
#: Levels of objects in cells that are written as columns.
_MAX_FLATTENED: Final = 3
#: Matches a string that needs no quotes: it does not end a cell, and does not look like another JSON value.
_PLAIN: Final = re.compile(
    r"""(?!(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\Z)  # a value
        [^\s|"{\[\x00-\x1f]  # the beginning of a string, an object, a list
        (?:[^|\x00-\x1f]*[^\s|\x00-\x1f])?""",
    re.VERBOSE,
)
_PLAIN_KEY: Final = re.compile(r'[^\s|."\x00-\x1f](?:[^|."\x00-\x1f]*[^\s|."\x00-\x1f])?')

#: marks a key that a row does not have
_MISSING: Final = object()
#: keys from the row inwards -> the value in each row
_Columns = dict[tuple[str, ...], list[Any]]


def write_as_table(text: str) -> str | None:
    """Return a JSON text in its shortest lossless form, or None for any other text."""
    parsed = parse(text)
    shaped = _write(parsed) if parsed is not None else None
    # JSON can escape half of a surrogate pair, which no encoded text can hold.
    return shaped if shaped is None or "\\u" not in text or _is_writable(shaped) else None


def is_table(text: str) -> bool:
    """Return whether a text begins like a table that this module writes."""
    return text.startswith((_LIST, _LINES, _DOCUMENT)) and text.partition("\n")[0].endswith(_LEGEND)


def table_rows(text: str) -> list[str] | None:
    """Return the lines of a JSON list of objects as a table, column names first; None for any other text."""
    parsed = parse(text)
    grid = _grid(parsed.value) if parsed is not None else None
    return grid.lines if grid is not None else None


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write(parsed: Parsed) -> str:
    grid = _grid(parsed.value)
    if grid is not None and grid.saved >= _MIN_SAVED_IN_TOTAL:
        kind = _LINES if parsed.is_lines else _LIST
        return "\n".join([f"{kind}{len(parsed.value)} rows, {_LEGEND}", *grid.lines])
    return "\n".join(map(write, parsed.value)) if parsed.is_lines else _with_tables(parsed.value)


def _with_tables(value: dict[str, Any] | list[Any]) -> str:
    tables = list(_tables_in(value))
    if sum(grid.saved for *_, grid in tables) < _MIN_SAVED_IN_TOTAL:
        return write(value)
    below: list[str] = []
    for number, (node, key, grid) in enumerate(tables, 1):
        below += [f"<table {number}> {len(node[key])} rows", *grid.lines]
        node[key] = as_bare_value(f"<table {number}>")
    return "\n".join([_DOCUMENT + _LEGEND, write(value), *below])


def _tables_in(value: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any, _Grid]]:
    """Yield each list of a document that is shorter as a table: its parent, its key there, and the table."""
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        inward: list[Any] = []
        for node, key, inner in chain.from_iterable(map(_members, level)):
            grid = _grid(inner)
            if grid is not None:
                yield node, key, grid
            else:
                inward.append(inner)
        level = inward


def _members(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the node, a key and the value there, for every object and list directly inside the node."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    return ((node, key, inner) for key, inner in pairs if type(inner) is dict or type(inner) is list)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The lines of a table, and the characters that it saves compared with the list."""

    lines: list[str]
    saved: int


def _grid(rows: Any) -> _Grid | None:
    """Return a list of objects as a table; None for another value, or if the table saves too little."""
    if not isinstance(rows, list) or len(rows) < _MIN_ROWS or not all(type(row) is dict for row in rows):
        return None
    columns: _Columns = {(name,): [row.get(name, _MISSING) for row in rows] for name in _names(rows)}
    for _ in range(_MAX_FLATTENED):
        flat = dict(_flattened(columns))
        if len(flat) == len(columns) or len(flat) > _MAX_COLUMNS:
            break
        columns = flat
    saved = _saved_chars(columns)
    if saved < _MIN_SAVED:
        return None
    head = SEPARATOR.join(".".join(map(_key, path)) for path in columns)
    cells = ([_cell(value) for value in column] for column in columns.values())
    return _Grid([head, *map(SEPARATOR.join, zip(*cells, strict=True))], saved)


def _names(rows: Sequence[dict[str, Any]]) -> Sequence[str]:
    """Return the keys of all rows, in the order of the rows where possible.

    Returns none if there are too many keys, or if most cells would be empty.
    """
    names: list[str] = []
    known: set[str] = set()
    used = 0
    for row in rows:
        used += len(row)
        if row.keys() <= known:
            continue
        place = 0
        for name in row:
            if name in known:
                place = names.index(name) + 1
                continue
            names.insert(place, name)
            known.add(name)
            place += 1
            if len(names) > _MAX_COLUMNS:
                return ()
    return names if used * 2 >= len(names) * len(rows) else ()


def _flattened(columns: _Columns) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Yield the columns; a column of objects with the same keys in every row becomes one column per key."""
    for path, column in columns.items():
        keys = list(column[0]) if isinstance(column[0], dict) else []
        if 0 < len(keys) <= _MAX_COLUMNS and all(isinstance(value, dict) and list(value) == keys for value in column):
            yield from (((*path, key), [value[key] for value in column]) for key in keys)
        else:
            yield path, column


def _saved_chars(columns: _Columns) -> int:
    """Return the characters of the keys in all rows, minus the characters that the columns need."""
    saved = 0
    for path, column in columns.items():
        framed = len(path[-1]) + _KEY_FRAME
        saved += framed * (len(column) - column.count(_MISSING)) - column.count(_MISSING) - len(".".join(path))
    return saved


def _key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _cell(value: object) -> str:
    if isinstance(value, str):
        text = bare_text_of(value)
        if text is not None:
            return text
        return value if _PLAIN.fullmatch(value) else write(value)
    return "" if value is _MISSING else write(value)
