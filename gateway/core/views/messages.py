"""Anthropic's Messages as chat messages.

A user's message may hold the results of several calls and words of the user's: each result becomes a message of its
own, what is left becomes one. Thinking is a part that no rule changes, and where the last turn began with it, it must
go on to. Instructions of the operator's between the messages stay in any case, and move where they may stand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.counting.measure import is_compaction
from gateway.core.message import decode, encode, read
from gateway.core.views.view import Book, Changes, View, entries, opaque, said

#: no set: what stands there may be no name at all
_ROLES = ("user", "assistant")

#: What an element is: `words` of the user's, or `results` alone; `said` by the assistant, or `thought`, which begins
#: with thinking; a `system` text, or one with `changes` that the operator makes besides, or a `sealed` one, which
#: nobody here can write anew; nothing where it is none of them.
_USERS = ("words", "results")
_SPOKEN = ("said", "thought")
_SYSTEM = ("system", "changes", "sealed")
_THINKING = ("thinking", "redacted_thinking")


class _Piece(NamedTuple):
    """One chat message, and the blocks of its element where it is not made of all of them."""

    message: bytes
    blocks: frozenset[int] | None = None
    #: an instruction of the operator's is in it
    is_held: bool = False


class _Read(NamedTuple):
    """One element: the messages it is made of where it stands alone, and what it is."""

    pieces: tuple[_Piece, ...]
    kind: str
    #: it is an assistant's with calls
    calls: bool = False
    #: it stands for all before it
    is_compact: bool = False


class MessagesView(View):
    """The `messages` of a Messages request."""

    def __init__(self, elements: Sequence[bytes], book: Book | None = None) -> None:
        reads = entries("messages", elements, book, _read, _size)
        found = list(_pieces(elements, reads))
        self._blocks = [piece.blocks for piece, _ in found]
        self._kinds = [one.kind for one in reads]
        self._system = _well_placed(self._kinds)
        compact = max((place for place, one in enumerate(reads) if one.is_compact), default=-1)
        must = {compact, *_leader(self._kinds), *_beside(self._kinds, self._system)}
        super().__init__(
            elements,
            [piece.message for piece, _ in found],
            [places for _, places in found],
            [index for index, (piece, places) in enumerate(found) if piece.is_held or not must.isdisjoint(places)],
            [index for index, (_, places) in enumerate(found) if places[-1] < compact],
        )

    def restored(self, changes: Changes, new: Collection[int] = ()) -> tuple[bytes, ...]:
        """See `View.restored`. System messages go where they may stand: after the user, and before the assistant."""
        if not self._system:
            return super().restored(changes, new)
        found: list[bytes] = []
        waiting: list[bytes] = []
        is_after_user = False
        for place, raw in self._sent(changes, new):
            if place in self._system:
                waiting.append(raw)
                continue
            kind = _kind(decode(raw)) if place is None else self._kinds[place]
            if waiting and is_after_user and kind in _SPOKEN:
                found.append(_merged(waiting))
                waiting = []
            found.append(raw)
            is_after_user = kind in _USERS
        return (*found, _merged(waiting)) if waiting else tuple(found)

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

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        # Where thinking is on, an assistant's turn must begin with it, and turns of one role are read as one. Words of
        # the user's would be the beginning of another turn where one that began with thinking goes on.
        role = "assistant" if self._goes_on(element) else "user"
        return encode({"role": role, "content": message["content"]})

    def _goes_on(self, element: int) -> bool:
        """Whether a turn that began with thinking goes on there."""
        first = ""
        for kind in reversed(self._kinds[:element]):
            if kind == "words":
                break
            first = kind if kind in _SPOKEN else first
        return first == "thought"


def _leader(kinds: Sequence[str]) -> Iterable[int]:
    """The beginning of the last turn, if it is thinking: a provider refuses the rest of the turn without."""
    words = max((place for place, kind in enumerate(kinds) if kind == "words"), default=-1)
    spoken = (place for place in range(words + 1, len(kinds)) if kinds[place] in _SPOKEN)
    return [place for place in [next(spoken, None)] if place is not None and kinds[place] == "thought"]


def _well_placed(kinds: Sequence[str]) -> frozenset[int]:
    """The system messages that stand where they may stand, as far as that is known here."""
    places = (place for place, kind in enumerate(kinds) if kind in ("system", "changes"))
    return frozenset(
        place
        for place in places
        if place and kinds[place - 1] in _USERS and (place + 1 == len(kinds) or kinds[place + 1] in _SPOKEN)
    )


def _beside(kinds: Sequence[str], well_placed: Collection[int]) -> Iterator[int]:
    """What must stay beside system messages: all that is next to one that must not move, and what the last one ends.

    What tools there are is a question of the place; a text is as good behind what it stood before.
    """
    for place, kind in enumerate(kinds):
        if kind in _SYSTEM and (kind != "system" or place not in well_placed):
            yield from (place - 1, place, place + 1)
    if len(kinds) - 1 in well_placed:
        yield len(kinds) - 2


def _merged(texts: Sequence[bytes]) -> bytes:
    """System messages that have come to stand side by side, which a provider may not take."""
    if len(texts) == 1:
        return texts[0]
    messages = [decode(raw) for raw in texts]
    blocks = [block for message in messages for block in _listed(message["content"])]
    return encode({**messages[-1], "content": blocks})


def _listed(content: Any) -> Iterable[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


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
        return _Read((_Piece(raw),), _kind(message))
    if is_odd or not _is_listed(message):
        kind = _kind(message)
        return _Read((_Piece(opaque(raw)),), "sealed" if is_odd and kind in _SYSTEM else kind)
    content = message["content"]
    if message["role"] == "user":
        return _Read(tuple(_of_user(message, content)), _kind(message))
    return _Read(
        (_Piece(encode(_spoken(message, content))),),
        _kind(message),
        calls=any(map(_stays, content)),
        is_compact=any(map(is_compaction, content)),
    )


def _kind(message: Any) -> str:
    """See `_USERS`."""
    if not isinstance(message, dict):
        return ""
    role, content = message.get("role"), message.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text"}]
    types = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    if role == "user":
        return "results" if all(one == "tool_result" for one in types) else "words"
    if role == "assistant":
        return "thought" if types and types[0] in _THINKING else "said"
    return _kind_of_system(content, types) if role == "system" else ""


def _kind_of_system(content: Any, types: Sequence[Any]) -> str:
    if not isinstance(content, str | list):
        return "sealed"
    return "system" if all(one == "text" for one in types) else "changes"


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
        is_held = any(content[number].get("type") == "mid_conv_system" for number in words)
        yield _Piece(encode({"role": "user", "content": parts} | _other(message)), words, is_held)


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
    return [part for part in _listed(content or []) if part.get("type") != "text" or part["text"].strip()]
