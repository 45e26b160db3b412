"""Write JSON lists of objects as tables, with each key named once.

Nothing is lost.

    [JSON list as a table, 2 rows, nothing left out; empty cell: no such key]
    id|name|price.net|tags
    1|Ada|12.50|["x","y"]
    2|"3"||null

A cell is JSON, but a string that cannot be taken for anything else stands without its quotes. Columns `price.net` are
the objects under `price`, where every row has the same. Lists deeper in a document stand below it, and a mark where
they were. JSON without lists of objects only loses its white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from gateway.core.conversation.lossless_json import Parsed, bare, bared, parse, written
from gateway.core.values import dataclass

SEPARATOR: Final = "|"
#: Characters that a table in a document has to save: its own line costs some, and so does it to look it up.
_SAVED: Final = 40
#: and that all tables of a text have to save together: its first line takes a hundred and has to be understood
_SAVED_TOGETHER: Final = 150
_LIST: Final = "[JSON list as a table, "
_LINES: Final = "[JSON lines as a table, "
_DOCUMENT: Final = "[JSON with its lists as tables below it, "
_LEGEND: Final = "nothing left out; empty cell: no such key]"
#: quotes and colon of a key
_KEY_FRAME: Final = 3
#: a list of one object names its keys but once already
_LEAST_ROWS: Final = 2
#: more columns than this are no table that anybody could read
_MOST_COLUMNS: Final = 100
#: lists deeper than this in a document stay JSON
_DEEPEST: Final = 8
#: levels of objects in cells that are laid out as columns
_FLATTENED: Final = 3
#: a string that can stand without quotes: nothing in it that ends a cell, nothing about it that looks like other JSON
_PLAIN: Final = re.compile(
    r"""(?!(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\Z)  # a value
        [^\s|"{\[\x00-\x1f]  # the beginning of a string, an object, a list
        (?:[^|\x00-\x1f]*[^\s|\x00-\x1f])?""",
    re.VERBOSE,
)
_PLAIN_KEY: Final = re.compile(r'[^\s|."\x00-\x1f](?:[^|."\x00-\x1f]*[^\s|."\x00-\x1f])?')

#: no such key in this row
_MISSING: Final = object()
#: keys from the row inward -> a value for each row
_Columns = dict[tuple[str, ...], list[Any]]


def tabled(text: str) -> str | None:
    """A text that is JSON, written as briefly as can be; None for any other text."""
    parsed = parse(text)
    shaped = _written(parsed) if parsed is not None else None
    # JSON can name half a surrogate pair, and no text can hold it.
    return shaped if shaped is None or "\\u" not in text or _is_writable(shaped) else None


def is_tabled(text: str) -> bool:
    """Whether a text begins as a table of ours does."""
    return text.startswith((_LIST, _LINES, _DOCUMENT)) and text.partition("\n")[0].endswith(_LEGEND)


def rows_of(text: str) -> list[str] | None:
    """The lines of the table that a text is, columns first; None for a text that is no list of objects."""
    parsed = parse(text)
    grid = _grid(parsed.value) if parsed is not None else None
    return grid.lines if grid is not None else None


def _is_writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _written(parsed: Parsed) -> str:
    grid = _grid(parsed.value)
    if grid is not None and grid.saved >= _SAVED_TOGETHER:
        kind = _LINES if parsed.is_lines else _LIST
        return "\n".join([f"{kind}{len(parsed.value)} rows, {_LEGEND}", *grid.lines])
    return "\n".join(map(written, parsed.value)) if parsed.is_lines else _with_tables(parsed.value)


def _with_tables(value: dict[str, Any] | list[Any]) -> str:
    found = list(_found(value))
    if sum(grid.saved for *_, grid in found) < _SAVED_TOGETHER:
        return written(value)
    below: list[str] = []
    for number, (node, key, grid) in enumerate(found, 1):
        below += [f"<table {number}> {len(node[key])} rows", *grid.lines]
        node[key] = bare(f"<table {number}>")
    return "\n".join([_DOCUMENT + _LEGEND, written(value), *below])


def _found(value: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any, _Grid]]:
    """The lists of a document that are better off as tables: what holds each, under which key, and its table."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inward: list[Any] = []
        for node, key, inner in chain.from_iterable(map(_members, level)):
            grid = _grid(inner)
            if grid is not None:
                yield node, key, grid
            else:
                inward.append(inner)
        level = inward


def _members(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The node, a key of it and what is there, for every object and list in it."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    return ((node, key, inner) for key, inner in pairs if type(inner) is dict or type(inner) is list)


@dataclass(frozen=True, slots=True)
class _Grid:
    """The lines of a table, and by how many characters it is shorter than the list."""

    lines: list[str]
    saved: int


def _grid(rows: Any) -> _Grid | None:
    """The table that a value is, None if it is none or would not be worth it."""
    if not isinstance(rows, list) or len(rows) < _LEAST_ROWS or not all(type(row) is dict for row in rows):
        return None
    columns: _Columns = {(name,): [row.get(name, _MISSING) for row in rows] for name in _names(rows)}
    for _ in range(_FLATTENED):
        flat = dict(_flattened(columns))
        if len(flat) == len(columns) or len(flat) > _MOST_COLUMNS:
            break
        columns = flat
    saved = _saved(columns)
    if saved < _SAVED:
        return None
    head = SEPARATOR.join(".".join(map(_key, path)) for path in columns)
    cells = ([_cell(value) for value in column] for column in columns.values())
    return _Grid([head, *map(SEPARATOR.join, zip(*cells, strict=True))], saved)


def _names(rows: Sequence[dict[str, Any]]) -> Sequence[str]:
    """The keys of all rows, in their order where that can be; none if they are too many or most cells are empty."""
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
            if len(names) > _MOST_COLUMNS:
                return ()
    return names if used * 2 >= len(names) * len(rows) else ()


def _flattened(columns: _Columns) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The columns, with those that hold objects of the same keys in every row replaced by a column for each key."""
    for path, column in columns.items():
        keys = list(column[0]) if isinstance(column[0], dict) else []
        if 0 < len(keys) <= _MOST_COLUMNS and all(isinstance(value, dict) and list(value) == keys for value in column):
            yield from (((*path, key), [value[key] for value in column]) for key in keys)
        else:
            yield path, column


def _saved(columns: _Columns) -> int:
    """Characters that the keys take in every row, less those that the columns take."""
    saved = 0
    for path, column in columns.items():
        framed = len(path[-1]) + _KEY_FRAME
        saved += framed * (len(column) - column.count(_MISSING)) - column.count(_MISSING) - len(".".join(path))
    return saved


def _key(name: str) -> str:
    return name if _PLAIN_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _cell(value: object) -> str:
    if isinstance(value, str):
        text = bared(value)
        if text is not None:
            return text
        return value if _PLAIN.fullmatch(value) else written(value)
    return "" if value is _MISSING else written(value)
