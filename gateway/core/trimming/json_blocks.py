"""Split JSON into blocks, and write the blocks that are kept as JSON again.

A block is read as a `path: value` line, so that each value is next to its key. It is sent as JSON: every value keeps
its keys and its nesting, a number keeps its spelling, and each object or list says how much of it was omitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any, Final, NamedTuple

from gateway.core.conversation.lossless_json import as_bare_value, bare_text_of, has_marks, write
from gateway.core.conversation.message import has_too_many_values, is_deep
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.text_blocks import GAP, MAX_BLOCK_CHARS, join_pieces, split_text
from gateway.core.values import dataclass

#: A JSON value up to this length stays one block with its key: its fields explain one another.
MAX_COMPACT_CHARS: Final = 160
#: A row of a table up to this length stays one block.
_MAX_ROW_CHARS: Final = 640
#: This many objects with the same keys make a table.
_MIN_TABLE_ROWS: Final = 3
#: JSON nested deeper than this is one block: no key path could show where it belongs.
_MAX_DEPTH: Final = 12

#: Numbers keep their spelling. In contrast to `parse_whole`, NaN and Infinity, which Python writes, are allowed.
_DECODER: Final = json.JSONDecoder(parse_int=as_bare_value, parse_float=as_bare_value, parse_constant=as_bare_value)
_CONSTANTS: Final = {True: "true", False: "false", None: "null"}


class JsonPlace(NamedTuple):
    """The place of a block in a JSON value: keys and indices, and the part of the list or string found there.

    `start` and `stop`: of the elements or characters; `stop` 0 means the whole value.
    """

    path: tuple[str | int, ...]
    start: int = 0
    stop: int = 0


class JsonBlock(NamedTuple):
    """A block of JSON: the text to read, and its place."""

    text: str
    place: JsonPlace


def parse_json(text: str) -> dict[str, Any] | list[Any] | None:
    """Return the object or list in a text; None if it is empty, no JSON, nested too deep, or has too many values."""
    if text.lstrip()[:1] not in ("{", "[") or has_too_many_values(text) or has_marks(text):
        return None
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return None if not value or is_deep(value) else value


def split_json(value: dict[str, Any] | list[Any], deadline: Deadline) -> Iterator[JsonBlock]:
    """Yield the blocks of a value in the order of the document."""
    return deadline.over(_blocks("", (), value))


def _blocks(label: str, path: tuple[str | int, ...], value: Any) -> Iterator[JsonBlock]:
    if isinstance(value, str) and bare_text_of(value) is None:
        yield from _string_blocks(label, path, value)
    elif (
        not isinstance(value, dict | list) or len(path) == _MAX_DEPTH or (path and _is_short(value, MAX_COMPACT_CHARS))
    ):
        yield JsonBlock(f"{_lead(label)}{_compact(value)}\n", JsonPlace(path))
    elif isinstance(value, list) and all(_is_plain(inner) for inner in value):
        yield from _list_blocks(label, path, value)
    else:
        most = _MAX_ROW_CHARS if isinstance(value, list) or _is_table(value) else 0
        pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            name = f"{label}[{key}]" if isinstance(key, int) else f"{label}.{key}" if label else key
            if most and _is_short(inner, most):
                lead = _lead(label if isinstance(key, int) else name)
                yield JsonBlock(f"{lead}{_compact(inner)}\n", JsonPlace((*path, key)))
            else:
                yield from _blocks(name, (*path, key), inner)


def _lead(label: str) -> str:
    return f"{label}: " if label else ""


def _is_short(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    # Each element takes at least three characters. A value that is surely too long is not written to measure it.
    return len(value) * 3 <= most and len(_compact(value)) <= most


def _is_plain(value: Any) -> bool:
    return not isinstance(value, dict | list) and (not isinstance(value, str) or len(value) <= MAX_COMPACT_CHARS)


def _is_table(value: dict[str, Any] | list[Any]) -> bool:
    """Return whether a value is a table: some objects with the same keys, in a list or by name."""
    rows = list(value.values()) if isinstance(value, dict) else value
    if len(rows) < _MIN_TABLE_ROWS or not isinstance(rows[0], dict) or len(rows[0]) < 2:  # noqa: PLR2004
        return False
    return all(isinstance(row, dict) and row.keys() == rows[0].keys() for row in rows)


def _string_blocks(label: str, path: tuple[str | int, ...], text: str) -> Iterator[JsonBlock]:
    lead = _lead(label)
    if "\n" not in text and len(text) <= MAX_BLOCK_CHARS:
        yield JsonBlock(f"{lead}{text}\n", JsonPlace(path))
        return
    start = 0
    for piece in split_text(text):
        stop = start + len(piece)
        end = "" if piece.endswith("\n") or stop < len(text) else "\n"
        yield JsonBlock(f"{lead}{piece}{end}", JsonPlace(path, start, stop))
        start, lead = stop, ""


def _list_blocks(label: str, path: tuple[str | int, ...], values: list[Any]) -> Iterator[JsonBlock]:
    """Yield plain values, as many per block as fit; each block starts with their label."""
    lead = _lead(label)
    pending, start = lead, 0
    for stop, value in enumerate(values, 1):
        pending += f"{_compact(value)}, "
        if len(pending) >= MAX_COMPACT_CHARS or stop == len(values):
            yield JsonBlock(pending[:-2] + "\n", JsonPlace(path, start, stop))
            pending, start = lead, stop


def _compact(value: Any) -> str:
    """Return JSON without quotes and escapes: it is for reading, not for parsing."""
    if isinstance(value, str):
        bare = bare_text_of(value)
        return value if bare is None else bare
    if isinstance(value, dict):
        return "{" + ", ".join([f"{key}: {_compact(inner)}" for key, inner in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_compact, value)) + "]"
    return _CONSTANTS[value]


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a value: parts of it, or of the values in it. Without either, it is kept whole."""

    inner: dict[Any, _Kept] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)


def write_kept(value: dict[str, Any] | list[Any], places: Iterable[JsonPlace]) -> str:
    """Return the JSON of a value with only what is at these places, which are in the order of the document."""
    kept = _Kept()
    for place in places:
        node = kept
        for step in place.path:
            node = node.inner.setdefault(step, _Kept())
        if place.stop:
            node.spans.append((place.start, place.stop))
    return write(_reduced(value, kept))


def _reduced(value: Any, kept: _Kept) -> Any:
    if isinstance(value, str) and kept.spans:
        return join_pieces(_string_pieces(value, kept.spans))
    if kept.spans:
        return list(_list_parts(value, kept.spans))
    if not kept.inner:
        return value
    if isinstance(value, list):
        return _with_mark([_reduced(value[index], inner) for index, inner in kept.inner.items()], len(value))
    fields = {key: _reduced(value[key], inner) for key, inner in kept.inner.items()}
    return fields | {GAP: f"{len(value) - len(fields)} omitted"} if len(fields) < len(value) else fields


def _with_mark(values: list[Any], count: int) -> list[Any]:
    return [*values, f"[{count - len(values)} omitted]"] if len(values) < count else values


def _list_parts(values: list[Any], spans: Iterable[tuple[int, int]]) -> Iterator[Any]:
    """Yield the kept elements of a list, and marks of the gaps: plain values are often a series."""
    end = 0
    shown = 0
    for start, stop in spans:
        if start > end:
            yield GAP
        yield from values[start:stop]
        end, shown = stop, shown + stop - start
    if shown < len(values):
        yield f"[{len(values) - shown} omitted]"


def _string_pieces(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a string, each with whether it is kept."""
    end = 0
    for start, stop in spans:
        if start > end:
            yield text[end:start], False
        yield text[start:stop], True
        end = stop
    if end < len(text):
        yield text[end:], False
