"""Anthropic's Messages as chat messages.

A user's message may hold the results of several calls and words of the user's: each result becomes a message of its
own, what is left becomes one. Thinking is a part that no rule changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.message import decode, encode, read
from gateway.core.views.view import Book, Changes, View, entries, opaque, said

_ROLES = frozenset({"user", "assistant"})


class _Piece(NamedTuple):
    """One chat message, and the blocks of its element where it is not made of all of them."""

    message: bytes
    blocks: frozenset[int] | None = None


class _Read(NamedTuple):
    """One element: the messages it is made of where it stands alone, and whether it is an assistant's with calls."""

    pieces: tuple[_Piece, ...]
    calls: bool


class MessagesView(View):
    """The `messages` of a Messages request."""

    def __init__(self, elements: Sequence[bytes], book: Book | None = None) -> None:
        found = list(_pieces(elements, entries("messages", elements, book, _read, _size)))
        self._blocks = [piece.blocks for piece, _ in found]
        super().__init__(elements, [piece.message for piece, _ in found], [places for _, places in found])

    def _changed(self, element: int, forms: Changes) -> bytes:
        if any(len(self.places[index]) > 1 for index in forms):
            return self.elements[element]
        message = decode(self.elements[element])
        left = list(self._left(element, message["content"], forms))
        return encode({**message, "content": left}) if left else self.elements[element]

    def _left(self, element: int, content: Any, forms: Changes) -> Iterable[Any]:
        if isinstance(content, str):
            yield from _texts(decode(next(filter(None, forms.values()))).get("content"))
            return
        whose = {block: index for index in self.owned[element] for block in self._of(index, len(content))}
        done: set[int] = set()
        for number, block in enumerate(content):
            index = whose[number]
            form = forms.get(index, b"")
            if form == b"" or (form and _stays(block)):
                yield block
            elif form is not None and index not in done:
                done.add(index)
                yield from _formed(block, decode(form).get("content"))

    def _of(self, index: int, count: int) -> Iterable[int]:
        blocks = self._blocks[index]
        return range(count) if blocks is None else blocks

    def _added(self, message: Mapping[str, Any]) -> bytes:
        # Where thinking is on, an assistant's turn must begin with it, and turns of one role are read as one.
        return encode({"role": "user", "content": message["content"]})


def _pieces(elements: Sequence[bytes], reads: Sequence[_Read]) -> Iterator[tuple[_Piece, Sequence[int]]]:
    """The messages, each with the elements it is made of."""
    place = 0
    while place < len(reads):
        stop = place + 1
        # An assistant's calls are answered together, also where they stand in several messages.
        while stop < len(reads) and reads[place].calls and reads[stop].calls:
            stop += 1
        if stop - place > 1:
            yield _together(elements[place:stop]), range(place, stop)
        else:
            yield from ((piece, (place,)) for piece in reads[place].pieces)
        place = stop


def _together(elements: Sequence[bytes]) -> _Piece:
    """Calls of several messages. None of these is changed: they stand together or not at all."""
    blocks = [block for raw in elements for block in decode(raw)["content"]]
    return _Piece(encode(_spoken({}, blocks) | {"thinking_blocks": True}))


def _size(found: _Read) -> int:
    return sum(len(piece.message) for piece in found.pieces)


def _read(raw: bytes) -> _Read:
    message, is_odd = read(raw)
    if isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str):
        # As in a chat request; what cannot be written anew is sealed wherever it is read.
        return _Read((_Piece(raw),), calls=False)
    if is_odd or not _is_listed(message):
        return _Read((_Piece(opaque(raw)),), calls=False)
    content = message["content"]
    if message["role"] == "user":
        return _Read(tuple(_of_user(message, content)), calls=False)
    return _Read((_Piece(encode(_spoken(message, content))),), calls=any(map(_stays, content)))


def _is_listed(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        return False
    content = message.get("content")
    return isinstance(content, list) and all(isinstance(block, dict) for block in content)


def _spoken(message: Mapping[str, Any], content: Sequence[Any]) -> dict[str, Any]:
    calls = [_call(block) for block in content if _stays(block)]
    parts = said([block for block in content if not _stays(block)])
    found: dict[str, Any] = {"role": "assistant", "content": parts}
    if calls:
        found |= {"content": parts or None, "tool_calls": calls}
    return found | _other(message)


def _stays(block: Mapping[str, Any]) -> bool:
    """A call: it is never changed, only left out with its message."""
    return block.get("type") == "tool_use"


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = encode(block.get("input", {})).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function} | _marks(block)


def _of_user(message: Mapping[str, Any], content: Sequence[Any]) -> Iterator[_Piece]:
    results = [number for number, block in enumerate(content) if block.get("type") == "tool_result"]
    words = frozenset(range(len(content))).difference(results)
    for number in results:
        yield _Piece(encode(_result(content[number])), frozenset({number}))
    if words or not content:
        parts = said([content[number] for number in sorted(words)])
        yield _Piece(encode({"role": "user", "content": parts} | _other(message)), words)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    shown = said(content) if isinstance(content, list) else content if isinstance(content, str) else ""
    found = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
    return found | _marks(block) | ({"is_error": True} if block.get("is_error") is True else {})


def _marks(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("role", "content")}


def _formed(block: Mapping[str, Any], content: Any) -> Iterable[Any]:
    """What stands in the place of a block: a result with another content, or other texts."""
    if block.get("type") == "tool_result":
        yield {**block, "content": content}
    else:
        yield from _texts(content)


def _texts(content: Any) -> Iterable[Any]:
    """Blocks of a chat message's content; Anthropic takes none without a text."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [part for part in parts if part.get("type") != "text" or part["text"].strip()]
