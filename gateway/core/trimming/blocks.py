"""Split a message into blocks that can be kept or dropped alone: rows, lines, sentences.

- Text is shortened, never reworded. Neighbouring blocks that are kept stay as they were, and a gap is marked.
- JSON is read with one `path: value` line or table row per block, and stays JSON: see `json_blocks`.
- The split depends on the message alone. So the numbers of the kept blocks fully describe what was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Final, NamedTuple

from gateway.core.conversation.lossless_json import bare_text_of, parse_whole, write
from gateway.core.conversation.message import RESULT_ROLES, Message
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.json_blocks import MAX_COMPACT_CHARS, JsonPlace, parse_json, split_json, write_kept
from gateway.core.trimming.result_blocks import split_result
from gateway.core.trimming.text_blocks import GAP, MAX_BLOCK_CHARS, join_pieces, split_text
from gateway.core.values import dataclass

#: In the last line of a shortened result, before the handle of its full text: one shortened by the gateway, and one
#: shortened in a program that uses the gateway as a library.
FULL_TEXT_AT: Final = "; full text: GET /api/results/"
FULL_TEXT_IN_PROGRAM: Final = "; full text: handle "
#: Tags around the model's thinking, where neither the provider nor the client removes it from the text.
_THINKING_TAGS: Final = ("<think>", "</think>")
#: A gap of at most this many characters in a tool result is closed.
_SMALL_GAP_CHARS: Final = 160
#: Call arguments up to this length are never split.
LONG_ARGUMENTS: Final = 320


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one slot.

    `needs`: the block to keep with it, such as the line with the handle; `place`: only of a block of JSON.
    """

    text: str
    slot: int
    needs: int = -1
    place: JsonPlace | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """A text of the message that can be split: its content, a text part, or a string in the arguments of a call."""

    #: () for the content itself, (part,) for a part of it, (call, key, ...) with `in_arguments`
    path: tuple[int | str, ...]
    in_arguments: bool = False
    #: True for the text of a tool result: regions with small gaps between them are sent as one region
    closes_gaps: bool = False


@dataclass(frozen=True, slots=True)
class SlicedMessage:
    """A message's slots and blocks; the blocks of a slot follow one another."""

    slots: tuple[Slot, ...]
    blocks: tuple[Block, ...]
    #: what always stays: names and arguments of calls
    fixed: str
    #: True if all blocks together are the original message, so that it need not be rewritten
    is_verbatim: bool
    #: the factors of the relevance of blocks for which it is not 1
    factors: Mapping[int, float] = field(default_factory=dict)

    @property
    def lines(self) -> tuple[Block, ...]:
        """Return what recall can repeat: the blocks, and as one more block the calls without their split arguments."""
        return (*self.blocks, Block(self.fixed, -1)) if self.fixed else self.blocks

    def without_small_gaps(self, picked: Collection[int]) -> tuple[int, ...]:
        """Return the picked blocks with those that they need, and with blocks of text that are a small gap."""
        kept = self.with_needed(picked)
        chosen = frozenset(kept)
        more: list[int] = []
        gap: list[int] = []
        size, slot = 0, -1
        for number, block in enumerate(self.blocks) if kept else ():
            if block.slot != slot:
                slot, gap, size = block.slot, [], 0
            if number not in chosen:
                gap.append(number)
                size += len(block.text)
                continue
            if gap and size <= _SMALL_GAP_CHARS and self.slots[slot].closes_gaps:
                more += gap
            gap, size = [], 0
        return tuple(sorted([*kept, *more])) if more else kept

    def with_needed(self, picked: Collection[int]) -> tuple[int, ...]:
        """Return the picked blocks and the blocks that they need, in order."""
        blocks = self.blocks
        # The block of the calls, after all others, needs none.
        needed = [blocks[number].needs for number in picked if number < len(blocks)]
        return tuple(sorted({*picked, *needed} - {-1}))


def slice_message(message: Message, deadline: Deadline | None = None) -> SlicedMessage:
    """Split a message into blocks; a message with nothing to split has none."""
    deadline = deadline or Deadline()
    found = _Found()
    fixed: list[str] = []
    is_verbatim = True
    role = str(message.get("role"))
    for path, text in _text_slots(message.get("content")):
        pieces = list(_split(role, text, deadline))
        is_verbatim = is_verbatim and "".join([piece.text for piece in pieces]) == text
        is_region = role in RESULT_ROLES and bool(pieces) and pieces[0].place is None
        found.add(Slot(path, closes_gaps=is_region), pieces)
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        arguments = str(function.get("arguments") or "")
        long = list(_long_strings(_read_arguments(arguments), ()))
        for path, text in long:
            found.add(Slot((number, *path), in_arguments=True), _plain_pieces(text, deadline))
        shown = _with_texts(arguments, [(path, GAP) for path, _ in long]) if long else arguments
        fixed.append(f"{function.get('name')} {shown}")
    return SlicedMessage(tuple(found.slots), tuple(found.blocks), "\n".join(fixed), is_verbatim, found.factors)


class _Piece(NamedTuple):
    """A block before it is numbered. `needs`: the number of another piece of the same text, or -1."""

    text: str
    needs: int = -1
    place: JsonPlace | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class _Found:
    """The slots and blocks that were found so far."""

    slots: list[Slot] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    factors: dict[int, float] = field(default_factory=dict)

    def add(self, slot: Slot, pieces: Sequence[_Piece]) -> None:
        """Add a slot with its blocks; a slot without blocks is left out."""
        base = len(self.blocks)
        for number, (text, needs, place, factor) in enumerate(pieces, base):
            self.blocks.append(Block(text, len(self.slots), needs + base if needs >= 0 else -1, place))
            if factor != 1:
                self.factors[number] = factor
        if pieces:
            self.slots.append(slot)


def _text_slots(content: object) -> Iterator[tuple[tuple[int | str, ...], str]]:
    """Yield the texts of a content, each with its path."""
    if isinstance(content, str):
        yield (), content
    elif isinstance(content, list):
        yield from (((number,), part["text"]) for number, part in enumerate(content))


def render(message: Message, sliced: SlicedMessage, picked: Sequence[int]) -> dict[str, Any]:
    """Return the message with the picked blocks only; every other field is unchanged."""
    texts = _slot_texts(message, sliced, sliced.without_small_gaps(picked))
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


def _slot_texts(message: Message, sliced: SlicedMessage, picked: Sequence[int]) -> list[str]:
    """Return the remaining text of each slot, with gap marks."""
    kept = set(picked)
    pieces: list[list[tuple[Block, bool]]] = [[] for _ in sliced.slots]
    for number, block in enumerate(sliced.blocks):
        pieces[block.slot].append((block, number in kept))
    return [_slot_text(message, slot, blocks) for slot, blocks in zip(sliced.slots, pieces, strict=True)]


def _slot_text(message: Message, slot: Slot, blocks: Sequence[tuple[Block, bool]]) -> str:
    places = [block.place for block, is_kept in blocks if is_kept and block.place is not None]
    value = parse_json(_text_at(message, slot.path)) if places else None
    if value is not None:
        return write_kept(value, places)
    return join_pieces((block.text, is_kept) for block, is_kept in blocks)


def _text_at(message: Message, path: Sequence[int | str]) -> str:
    """Return the text of the content, or of one of its parts."""
    content = message["content"]
    return str(content[path[0]]["text"] if path else content)


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


# --- texts ------------------------------------------------------------------------------------------------------------


def _split(role: str, text: str, deadline: Deadline) -> Iterator[_Piece]:
    """Yield the pieces of a text.

    Thinking at the start of an assistant's text stays one block. Chat templates remove everything up to the end tag.
    With only one of the two tags left, they would treat the thinking as the response, or the response as thinking.
    """
    end = _thinking_end(text) if role == "assistant" else 0
    value = parse_json(text) if not end and len(text) > MAX_COMPACT_CHARS else None
    if value is not None:
        yield from (_Piece(block.text, place=block.place) for block in split_json(value, deadline))
    elif role in RESULT_ROLES:
        yield from _result_pieces(text, deadline)
    else:
        yield from [_Piece(text[:end])] if end else ()
        yield from _plain_pieces(text[end:], deadline)


def _plain_pieces(text: str, deadline: Deadline) -> list[_Piece]:
    return list(map(_Piece, deadline.over(split_text(text))))


def _result_pieces(text: str, deadline: Deadline) -> Iterator[_Piece]:
    """Yield the pieces of a result. If its last line names a handle, all other pieces need that line."""
    end = text.rfind("\n") + 1
    handle = text[end:] if _is_handle_line(text[end:]) else ""
    found = list(deadline.over(split_result(text[:end] if handle else text)))
    for piece, needs, factor in found:
        yield _Piece(piece, len(found) if handle else needs, factor=factor)
    if handle:
        yield _Piece(handle)


def _thinking_end(text: str) -> int:
    """Return the end of the thinking at the start of a text, including the blanks after it; 0 if there is none."""
    begins, head_and_tail = _THINKING_TAGS
    if not (text.lstrip().startswith(begins) and head_and_tail in text):
        return 0
    return len(text) - len(text[text.index(head_and_tail) + len(head_and_tail) :].lstrip())


def _is_handle_line(text: str) -> bool:
    """Return whether a last line names the handle: a reader of the rest must be able to ask for the full text."""
    return (FULL_TEXT_AT in text or FULL_TEXT_IN_PROGRAM in text) and text.endswith("]")
