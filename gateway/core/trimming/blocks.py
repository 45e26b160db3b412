"""Split a message into blocks that can be kept or dropped alone: rows, lines, sentences.

- Text is shortened, never reworded. Neighbouring blocks that are kept stay as they were, and a gap reads `[...]`.
- JSON is rewritten with one `path: value` line or table row per block, because cut JSON is neither valid nor short.
- The split depends on the message alone. So the numbers of the kept blocks fully describe what was sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.conversation.lossless_json import bare_text_of, parse_whole, write
from gateway.core.conversation.message import Message, has_too_many_values, is_deep
from gateway.core.trimming.deadline import Deadline
from gateway.core.values import dataclass

GAP: Final = "[...]"
#: In the last line of a shortened result, before the handle of its full text.
FULL_TEXT_AT: Final = "; full text: GET /api/results/"
_GAP_LINE: Final = f"{GAP}\n"
#: Tags around the model's thinking, where neither the provider nor the client removes it from the text.
_THINKING_TAGS: Final = ("<think>", "</think>")
#: A block longer than this is split at a sentence or a space: about 60 tokens, a sentence or two.
MAX_BLOCK_CHARS: Final = 240
#: Lines shorter than this are joined with the next: a gap mark costs as much as a few words.
MIN_LINE_CHARS: Final = 40
#: A JSON value up to this length stays one block with its key: its fields explain one another.
MAX_COMPACT_CHARS: Final = 160
#: Call arguments up to this length are never split.
LONG_ARGUMENTS: Final = 320
#: This many objects with the same keys make a table: the head is then shorter than the repeated keys.
MIN_TABLE_ROWS: Final = 3

#: JSON nested deeper than this is written unchanged: no key path could show where it belongs.
_MAX_DEPTH: Final = 12

#: Numbers are read as texts and so keep their spelling, because values are written without quotes.
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
_CONSTANTS: Final = {True: "true", False: "false", None: "null"}
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+|(?<=[\u3002\uff01\uff1f\uff1b])")
_BLANKS: Final = re.compile(r"\s+")
#: Characters of one search, about a millisecond.
_SEARCH_CHARS: Final = 32 * 1024


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one slot. `needs`: the block to keep with it, such as a table's head or the line with the handle."""

    text: str
    slot: int
    needs: int = -1


@dataclass(frozen=True, slots=True)
class Slot:
    """A text of the message that can be split: its content, a text part, or a string in the arguments of a call."""

    #: () for the content itself, (part,) for a part of it, (call, key, ...) with `in_arguments`
    path: tuple[int | str, ...]
    in_arguments: bool = False


@dataclass(frozen=True, slots=True)
class SlicedMessage:
    """A message's slots and blocks; the blocks of a slot follow one another."""

    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]
    #: what always stays: names and arguments of calls
    fixed: str
    #: True if all blocks together are the original message, so that it need not be rewritten
    is_verbatim: bool

    @property
    def lines(self) -> tuple[Block, ...]:
        """Return what recall can repeat: the blocks, and as one more block the calls without their split arguments."""
        return (*self.blocks, Block(self.fixed, -1)) if self.fixed else self.blocks

    def with_needed(self, picked: Collection[int]) -> tuple[int, ...]:
        """Return the picked blocks and the blocks that they need, in order."""
        blocks = self.blocks
        # The block of the calls, after all others, needs none.
        needed = [blocks[number].needs for number in picked if number < len(blocks)]
        return tuple(sorted({*picked, *needed} - {-1}))


def slice_message(message: Message, deadline: Deadline | None = None) -> SlicedMessage:
    """Split a message into blocks; a message with nothing to split has none."""
    deadline = deadline or Deadline()
    slots: list[Slot] = []
    blocks: list[Block] = []
    fixed: list[str] = []

    is_verbatim = True

    def add(slot: Slot, pieces: list[tuple[str, int]]) -> None:
        base = len(blocks)
        blocks.extend(Block(text, len(slots), needs + base if needs >= 0 else -1) for text, needs in pieces)
        if pieces:
            slots.append(slot)

    for path, text in _text_slots(message.get("content")):
        pieces = list(
            _split(text, deadline) if message.get("role") != "assistant" else _split_assistant_text(text, deadline)
        )
        is_verbatim = is_verbatim and "".join(piece for piece, _ in pieces) == text
        add(Slot(path), pieces)
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = str(function.get("arguments") or "")
        long = list(_long_strings(_read_arguments(arguments), ()))
        for path, text in long:
            add(Slot((number, *path), in_arguments=True), [(piece, -1) for piece in deadline.over(split_text(text))])
        shown = _with_texts(arguments, [(path, GAP) for path, _ in long]) if long else arguments
        fixed.append(f"{function.get('name')} {shown}")
    return SlicedMessage(tuple(slots), tuple(blocks), "\n".join(fixed), is_verbatim)


def _text_slots(content: object) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield the texts of a content, each with its path."""
    if isinstance(content, str):
        yield (), content
    elif isinstance(content, list):
        yield from (((number,), part["text"]) for number, part in enumerate(content))


def render(message: Message, sliced: SlicedMessage, picked: Sequence[int]) -> dict[str, Any]:
    """Return the message with the picked blocks only; every other field is unchanged."""
    texts = _slot_texts(sliced, sliced.with_needed(picked))
    out = dict(message)
    calls: dict[int, list[tuple[tuple[int | str, ...], str]]] = {}
    parts: dict[int, str] = {}
    for slot, text in zip(sliced.slots, texts, strict=True):
        if slot.in_arguments:
            calls.setdefault(int(slot.path[0]), []).append((slot.path[1:], text))
        elif slot.path:
            parts[int(slot.path[0])] = text
        else:
            out["content"] = text if text != GAP or message.get("role") != "assistant" else _empty_content(message)
    if parts:
        out["content"] = [{**part, "text": parts.get(i, part["text"])} for i, part in enumerate(message["content"])]
    if calls:
        out["tool_calls"] = [
            _with_arguments(call, calls[number]) if number in calls else call
            for number, call in enumerate(message["tool_calls"])
        ]
    return out


def without_blocks(message: Message) -> dict[str, Any]:
    """Return a message that makes no calls, without any of its blocks. The message need not be split for this."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": part["text"] and GAP} for part in content]}
    return {**message, "content": content and GAP}


def _empty_content(message: Message) -> str | None:
    """Return the content of an assistant message without blocks: a gap mark, or None if it makes calls."""
    return None if message.get("tool_calls") or message.get("function_call") else GAP


def _slot_texts(sliced: SlicedMessage, picked: Sequence[int]) -> list[str]:
    """Return the remaining text of each slot, with gap marks."""
    kept = set(picked)
    pieces: list[list[str]] = [[] for _ in sliced.slots]
    gap = [False] * len(sliced.slots)
    for number, block in enumerate(sliced.blocks):
        if number in kept:
            if gap[block.slot] and not block.text.startswith(_GAP_LINE):
                pieces[block.slot].append(_gap_before(pieces[block.slot], block.text))
            pieces[block.slot].append(block.text)
            gap[block.slot] = False
        else:
            gap[block.slot] = True
    for slot, texts in enumerate(pieces):
        if gap[slot]:
            texts.append(_gap_before(texts, ""))
    return ["".join(texts) for texts in pieces]


def _gap_before(before: Sequence[str], text: str) -> str:
    """Return a gap mark: on its own line between lines, between spaces inside a line; empty after another mark."""
    last = before[-1] if before else "\n"
    if f"\n{last}".endswith(f"\n{_GAP_LINE}"):
        return ""
    lead = "" if last[-1:].isspace() or not before else " "
    if not text:
        return lead + GAP
    return f"{lead}{GAP}\n" if last.endswith("\n") else f"{lead}{GAP} "


def _with_arguments(call: Mapping[str, Any], changes: Sequence[tuple[tuple[int | str, ...], str]]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _with_texts(function["arguments"], changes)}}


# --- call arguments ---------------------------------------------------------------------------------------------------


def _read_arguments(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, numbers as bare values; empty if they are short or no JSON object."""
    value = parse_whole(arguments) if len(arguments) > LONG_ARGUMENTS else None
    return value if isinstance(value, dict) else {}


def _long_strings(value: Any, path: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield the long strings inside arguments, with their paths."""
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if isinstance(inner, str) and len(inner) > MAX_BLOCK_CHARS and bare_text_of(inner) is None:
            yield (*path, key), inner
        elif isinstance(inner, dict | list):
            yield from _long_strings(inner, (*path, key))


def _with_texts(arguments: str, changes: Iterable[tuple[tuple[int | str, ...], str]]) -> str:
    """Return the arguments as JSON, with other texts at some paths."""
    value = _read_arguments(arguments)
    for path, text in changes:
        _set_text(value, path, text)
    return write(value)


def _set_text(value: Any, path: Sequence[int | str], text: str) -> None:
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = text


# --- text -------------------------------------------------------------------------------------------------------------


def _split_assistant_text(text: str, deadline: Deadline) -> Iterator[tuple[str, int]]:
    """Split the text of an assistant message.

    Thinking at its start stays one block. Chat templates remove everything up to the end tag. With only one of the two
    tags left, they would treat the thinking as the response, or the response as thinking.
    """
    end = _thinking_end(text)
    if end:
        yield text[:end], -1
    yield from ((piece, needs + 1 if end and needs >= 0 else needs) for piece, needs in _split(text[end:], deadline))


def _thinking_end(text: str) -> int:
    """Return the end of the thinking at the start of a text, including the blanks after it; 0 if there is none."""
    begins, head_and_tail = _THINKING_TAGS
    if not (text.lstrip().startswith(begins) and head_and_tail in text):
        return 0
    return len(text) - len(text[text.index(head_and_tail) + len(head_and_tail) :].lstrip())


def _split(text: str, deadline: Deadline) -> Iterator[tuple[str, int]]:
    """Yield the pieces of a text, each with the number of the piece that it needs, or -1."""
    value = _parse_json(text) if len(text) > MAX_COMPACT_CHARS and text.lstrip()[:1] in ("{", "[") else None
    if isinstance(value, dict | list) and value:
        yield from _json_lines(value, deadline)
    else:
        pieces = [*deadline.over(split_text(text))]
        last = len(pieces) - 1
        needs = last if pieces and _is_handle_line(pieces[last]) else -1
        yield from ((piece, needs if number < last else -1) for number, piece in enumerate(pieces))


def _is_handle_line(text: str) -> bool:
    """Return whether a last piece names the handle: a reader of the rest must be able to ask for the full text."""
    return FULL_TEXT_AT in text and text.endswith("]")


def _parse_json(text: str) -> Any:
    """Return the JSON value, numbers as texts; None if it is no JSON, nested too deep, or has far too many values."""
    if has_too_many_values(text):
        return None
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return None if is_deep(value) else value


def split_text(text: str) -> Iterator[str]:
    """Yield lines, short ones joined and long ones split; together they are the text."""
    pending = ""
    for line in text.splitlines(keepends=True):
        if len(pending) + len(line) > MAX_BLOCK_CHARS and pending:
            yield pending
            pending = ""
        if len(line) > MAX_BLOCK_CHARS:
            yield from _split_line(line)
            continue
        pending += line
        if len(pending) >= MIN_LINE_CHARS:
            yield pending
            pending = ""
    if pending:
        yield pending


def _split_line(line: str) -> Iterator[str]:
    """Yield sentences, joined up to MAX_BLOCK_CHARS; a longer one is split at its last space, or anywhere."""
    begin = start = 0
    for end in _sentence_ends(line):
        if start > begin and end - begin > MAX_BLOCK_CHARS:
            yield line[begin:start]
            begin = start
        while end - begin > MAX_BLOCK_CHARS:
            at = line.rfind(" ", begin + MAX_BLOCK_CHARS // 2, begin + MAX_BLOCK_CHARS) + 1 or begin + MAX_BLOCK_CHARS
            yield line[begin:at]
            begin = at
        start = end
    yield line[begin:]


def _sentence_ends(line: str) -> Iterator[int]:
    """Yield the ends of sentences and of the line. Each search reads a part: one long search would block threads."""
    start = 0
    while start < len(line):
        stop = end = min(start + _SEARCH_CHARS, len(line))
        for match in _SENTENCE_END.finditer(line, start, stop):
            end = match.end()
            if match.start() < end == stop and (blanks := _BLANKS.match(line, stop)):
                end = blanks.end()
            yield end
        start = max(stop, end)
    yield len(line)


# --- JSON -------------------------------------------------------------------------------------------------------------


#: the name of a table's row, if it has one, and its cells
_Row = tuple[str | None, Any]


class _Lines(list[tuple[str, int]]):
    """A list of lines that reports each added line to the deadline."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def append(self, line: tuple[str, int]) -> None:
        self._deadline.tick()
        super().append(line)


def _json_lines(value: Any, deadline: Deadline) -> Iterator[tuple[str, int]]:
    """Yield one line per block, each with its newline, in the order of the document."""
    lines = _Lines(deadline)
    _add_json(lines, "", value)
    yield from lines


def _add_json(lines: list[tuple[str, int]], path: str, value: Any, depth: int = 0) -> None:
    if isinstance(value, str):
        _add_string(lines, path, value)
    elif not isinstance(value, dict | list) or depth == _MAX_DEPTH or (path and _is_short(value)):
        lines.append((f"{path}: {_compact(value)}\n", -1))
    elif (rows := _table(value)) is not None:
        _add_table(lines, path, rows)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _add_json(lines, f"{path}.{key}" if path else key, inner, depth + 1)
    elif all(_is_plain(inner) for inner in value):
        _add_list(lines, path, value)
    else:
        for number, inner in enumerate(value):
            _add_json(lines, f"{path}[{number}]", inner, depth + 1)


def _is_short(value: dict[str, Any] | list[Any]) -> bool:
    # Each element takes at least three characters. A value that is surely too long is not written to measure it.
    return len(value) * 3 <= MAX_COMPACT_CHARS and len(_compact(value)) <= MAX_COMPACT_CHARS


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, str) and len(value) <= MAX_COMPACT_CHARS)


def _add_string(lines: list[tuple[str, int]], path: str, text: str) -> None:
    label = f"{path}: " if path else ""
    if "\n" not in text and len(text) <= MAX_BLOCK_CHARS:
        lines.append((f"{label}{text}\n", -1))
        return
    pieces = list(split_text(text))
    for number, piece in enumerate(pieces):
        end = "" if piece.endswith("\n") or number < len(pieces) - 1 else "\n"
        lines.append((f"{label if number == 0 else ''}{piece}{end}", -1))


def _table(value: dict[str, Any] | list[Any]) -> list[_Row] | None:
    """Return the rows of a table, that is, objects with the same keys; None if the value is no table."""
    rows = _rows(value)
    if len(rows) < MIN_TABLE_ROWS or not isinstance(rows[0][1], dict):
        return None
    keys = list(rows[0][1])
    return rows if len(keys) > 1 and all(isinstance(row, dict) and list(row) == keys for _, row in rows) else None


def _rows(value: dict[str, Any] | list[Any]) -> list[_Row]:
    """Return the possible rows of a value: an object's fields by name, a list's elements, or those of inner lists."""
    if isinstance(value, dict):
        return list(value.items())
    if all(isinstance(inner, list) for inner in value):
        return [(f"[{at}][{number}]", row) for at, inner in enumerate(value) for number, row in enumerate(inner)]
    return [(None, row) for row in value]


def _add_table(lines: list[tuple[str, int]], path: str, rows: Sequence[_Row]) -> None:
    head = len(lines)
    lines.append((_row_text([path or "rows", *rows[0][1]]), -1))
    for name, row in rows:
        cells = map(_compact, row.values())
        lines.append((_row_text(cells if name is None else [name, *cells]), head))


def _row_text(cells: Iterable[str]) -> str:
    return " | ".join(cells).replace("\n", " ") + "\n"


def _add_list(lines: list[tuple[str, int]], path: str, values: Sequence[Any]) -> None:
    """Write plain values, as many per line as fit; the first line starts with their path."""
    pending = f"{path}: " if path else ""
    for value in values:
        pending += f"{_compact(value)}, "
        if len(pending) >= MAX_COMPACT_CHARS:
            lines.append((pending.rstrip() + "\n", -1))
            pending = ""
    if pending:
        lines.append((pending.rstrip(", ") + "\n", -1))


def _compact(value: Any) -> str:
    """Return JSON without quotes and escapes, which are a quarter of its tokens: it is for reading, not for parsing."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "{" + ", ".join([f"{key}: {_compact(inner)}" for key, inner in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_compact, value)) + "]"
    return _CONSTANTS[value]
