"""Anthropic's Messages as chat messages.

A user's message may hold the results of several calls and words of the user's: each result becomes a message of its
own, what is left becomes one. Thinking is a part that no rule changes, and where the last turn began with it, it must
still do so. Instructions of the operator between the messages stay in any case, and are moved to where they may stand.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.counting.parts import is_compaction
from gateway.core.message import Hashed, decode, encode, key_of, read
from gateway.core.views.raw import compact, fields_of, items_of, list_of, object_of
from gateway.core.views.view import (
    SEAL,
    Book,
    Changes,
    Sent,
    View,
    as_came,
    entries,
    opaque,
    said,
    says_nothing,
    sealed,
)

#: A tuple and no set: what is looked up in it may be any JSON, which cannot always be hashed.
_ROLES = ("user", "assistant")

#: The kinds of an element. Of the user: `words`, with results or without, or `results` alone. Of the assistant: `said`,
#: or `thought` where it begins with thinking. Of the operator: a `system` text; `changes` where it holds more than
#: texts, such as other tools; `sealed` where it cannot be written anew. The kind is empty where it is none of these.
_USERS = ("words", "results")
_SPOKEN = ("said", "thought")
_SYSTEM = ("system", "changes", "sealed")
_THINKING = ("thinking", "redacted_thinking")
_CALL = "tool_use"
#: calls that run where the model does; their results are the assistant's words
_SERVED = ("server_tool_use", "mcp_tool_use")
#: bytes that a piece takes beside its message
_PIECE_BYTES = 250


class _Piece(NamedTuple):
    """One chat message, and the blocks of its element where it is not made of all of them."""

    message: bytes
    #: see `key_of`
    key: bytes
    is_marked: bool
    blocks: frozenset[int] | None = None
    #: an instruction of the operator's is in it, or it belongs to what nobody here can read
    is_held: bool = False
    is_result: bool = False

    @classmethod
    def of(
        cls, message: bytes, blocks: frozenset[int] | None = None, *, is_held: bool = False, is_result: bool = False
    ) -> _Piece:
        """With its hash."""
        return cls(message, *key_of(message), blocks, is_held, is_result)


class _Read(NamedTuple):
    """One element: the messages it is made of where it stands alone, and what it is."""

    pieces: tuple[_Piece, ...]
    kind: str
    #: it is an assistant's and holds calls
    calls: bool = False
    #: it stands for all before it
    is_compact: bool = False
    is_opaque: bool = False
    #: ids of the calls in it that run where the model does, and of such calls in earlier elements that it needs
    served: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    #: ids of the calls in it that were made by code which runs where the model does
    coded: frozenset[str] = frozenset()


class MessagesView(View):
    """The `messages` of a Messages request."""

    def __init__(self, came: Hashed, book: Book | None = None) -> None:
        reads = entries("messages", came, book, _read, _size)
        found = list(_pieces(came.raws, reads))
        self._blocks = [piece.blocks for piece, _ in found]
        self._kinds = [one.kind for one in reads]
        self._system = _well_placed(self._kinds)
        compact = max((place for place, one in enumerate(reads) if one.is_compact), default=-1)
        must = {compact, *_leader(self._kinds), *_beside(self._kinds, self._system), *_asked(reads)}
        super().__init__(
            came,
            Hashed(
                [piece.message for piece, _ in found],
                [piece.key for piece, _ in found],
                marked=[index for index, (piece, _) in enumerate(found) if piece.is_marked],
            ),
            [places for _, places in found],
            held=[i for i, (piece, places) in enumerate(found) if piece.is_held or not must.isdisjoint(places)],
            stale=[index for index, (_, places) in enumerate(found) if places[-1] < compact],
            book=book,
        )

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """See `View.restored`. System messages go where they may stand: after the user, and before the assistant."""
        if not self._system:
            return super().restored(changes, new)
        found: list[Sent] = []
        waiting: list[Sent] = []
        is_after_user = False
        for one in self._sent(changes, new):
            if one.place in self._system:
                waiting.append(one)
                continue
            kind = _kind(decode(one.raw)) if one.place is None else self._kinds[one.place]
            if waiting and is_after_user and kind in _SPOKEN:
                found.append(_merged(waiting))
                waiting = []
            found.append(one)
            is_after_user = kind in _USERS
        if waiting:
            found.append(_merged(waiting))
        return Hashed([one.raw for one in found], [one.key for one in found])

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[Sent]:
        sent = list(super()._sent(changes, new))
        for number, one in enumerate(sent):
            # An assistant's turn with words before its thinking is refused. A new message that would be such words is
            # made the user's, so that the turn begins behind it, with its thinking.
            is_before = one.place is None and self._is_thought(sent[number + 1 :])
            yield Sent.of(None, encode({**decode(one.raw), "role": "user"})) if is_before else one

    def _is_thought(self, sent: Sequence[Sent]) -> bool:
        """Whether the next element that is not the operator's begins with thinking."""
        kinds = (self._kinds[one.place] for one in sent if one.place is not None)
        return next((kind for kind in kinds if kind not in _SYSTEM), "") == "thought"

    def _changed(self, element: int, forms: Changes) -> bytes:
        came = self.elements[element]
        forms = {index: form for index, form in forms.items() if form is None or self._is_other(index, form)}
        if not forms or any(len(self.places[index]) > 1 for index in forms):
            return came
        fields = fields_of(came)
        left = list(self._left(element, fields["content"], forms))
        return object_of({**fields, "content": list_of(left)}) if left else came

    def _trait(self, index: int) -> Hashable:
        return self._blocks[index]

    def _is_other(self, index: int, form: bytes) -> bool:
        """Whether a form says something else than its message."""
        now, was = decode(form), decode(self.messages[index])
        return any(now.get(name) != was.get(name) for name in ("content", "tool_calls"))

    def _left(self, element: int, content: bytes, forms: Changes) -> Iterator[bytes]:
        blocks = items_of(content)
        if not blocks:
            yield from map(encode, _texts(decode(next(filter(None, forms.values()))).get("content")))
        whose = {block: index for index in self.owned[element] for block in self._of(index, len(blocks))}
        calls = {index: iter(decode(form).get("tool_calls") or ()) for index, form in forms.items() if form}
        done: set[int] = set()
        for number, raw in enumerate(blocks):
            index = whose[number]
            form = forms.get(index, b"")
            if form == b"":
                yield raw
            elif form and _stays(decode(raw)):
                call = next(calls[index], None)
                yield raw if call is None else _called(raw, call["function"]["arguments"])
            elif form is not None and index not in done:
                done.add(index)
                came = [blocks[mine] for mine in self._of(index, len(blocks))]
                yield from _formed(came, decode(form))

    def _of(self, index: int, count: int) -> Iterable[int]:
        """The blocks that a message is made of, by their place among the `count` blocks of its element."""
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
    """The beginning of the last turn, if it is thinking: a provider refuses what does not begin so in the turn without.

    Where all of the turn does, whatever is left of it begins with thinking.
    """
    words = max((place for place, kind in enumerate(kinds) if kind == "words"), default=-1)
    spoken = [place for place in range(words + 1, len(kinds)) if kinds[place] in _SPOKEN]
    is_needed = any(kinds[place] != "thought" for place in spoken)
    return [place for place in spoken[:1] if is_needed and kinds[place] == "thought"]


def _asked(reads: Sequence[_Read]) -> Iterable[int]:
    """The user's last words without results beside them, where the very last ones have results beside them.

    Claude Code puts reminders beside results: what the user wants done was said before.
    """
    places = [place for place, one in enumerate(reads) if one.kind == "words"]
    alone = [place for place in places if not any(piece.is_result for piece in reads[place].pieces)]
    return alone[-1:] if alone[-1:] != places[-1:] else ()


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

    A change of the tools holds from its place on, so that it must not move; a text may as well stand a message later.
    """
    for place, kind in enumerate(kinds):
        if kind in _SYSTEM and (kind != "system" or place not in well_placed):
            yield from (place - 1, place, place + 1)
    if len(kinds) - 1 in well_placed:
        yield len(kinds) - 2


def _merged(texts: Sequence[Sent]) -> Sent:
    """System messages that have come to stand side by side, which a provider may not take."""
    if len(texts) == 1:
        return texts[0]
    messages = [fields_of(one.raw) for one in texts]
    blocks = [block for message in messages for block in _blocks(message["content"])]
    return Sent.of(None, object_of({**messages[-1], "content": list_of(blocks)}))


def _blocks(content: bytes) -> Iterable[bytes]:
    return items_of(content) or map(encode, _listed(decode(content)))


def _listed(content: Any) -> Iterable[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _pieces(elements: Sequence[bytes], reads: Sequence[_Read]) -> Iterator[tuple[_Piece, Sequence[int]]]:
    """The messages, each with the elements it is made of."""
    coded = frozenset[str]().union(*(one.coded for one in reads))
    for span in _spans(reads):
        alone = len(span) == 1
        found = ((piece, span) for piece in reads[span.start].pieces) if alone else _tied(elements, reads, span)
        yield from ((_uncut(piece, coded), places) for piece, places in found)


def _uncut(piece: _Piece, coded: Collection[str]) -> _Piece:
    """What code reads is no text for a model: in any other form it would be a broken or a wrong value."""
    if not (coded and piece.is_result and decode(piece.message)["tool_call_id"] in coded):
        return piece
    return _Piece.of(sealed(piece.message), piece.blocks, is_held=piece.is_held, is_result=piece.is_result)


def _tied(elements: Sequence[bytes], reads: Sequence[_Read], span: range) -> Iterator[tuple[_Piece, Sequence[int]]]:
    """All that the assistant said as one message; directly behind it the results of its calls; then the rest."""
    spoken = {place: None for place in span if reads[place].kind in _SPOKEN and not reads[place].is_opaque}
    # What ends the conversation stays, and so does what belongs to something that nobody here can read.
    is_last = span.stop == len(reads) and reads[-1].kind != "words"
    is_held = is_last or any(reads[place].is_opaque for place in span)
    if spoken:
        yield _together([elements[place] for place in spoken], is_held=is_held), [*spoken]
    rest = [(piece, (place,)) for place in span if place not in spoken for piece in reads[place].pieces]
    yield from sorted(rest, key=lambda found: not found[0].is_result)


def _spans(reads: Sequence[_Read]) -> Iterator[range]:
    """Elements whose calls stay or go together.

    An assistant's calls are answered together, also where they stand in several messages, or where words stand between
    them and some of the results. What a server was asked in one message may be answered in a later one, and call for
    something of the client's between the two.
    """
    reach = list(range(len(reads)))
    served: dict[str, int] = {}
    #: the last calls, as long as they may still be answered; whether more than results stands behind them
    waiting: int | None = None
    is_parted = False
    for place, one in enumerate(reads):
        tied = [served[name] for name in one.needs if name in served]
        if one.kind in _USERS:
            if waiting is not None and is_parted and any(piece.is_result for piece in one.pieces):
                tied.append(waiting)
            is_parted = is_parted or not all(piece.is_result for piece in one.pieces)
        else:
            before = waiting if place and {one.kind, reads[place - 1].kind} <= {*_SPOKEN} else None
            if before is not None and one.calls:
                tied.append(before)
            waiting, is_parted = (place, False) if one.calls else (before, True)
        for first in tied:
            reach[first] = place
        served |= dict.fromkeys(one.served, place)
    start = 0
    while start < len(reads):
        stop, place = start, start
        while place <= stop:
            stop, place = max(stop, reach[place]), place + 1
        if place - start > 1 and place < len(reads) and any(piece.is_result for piece in reads[place].pieces):
            place += 1  # the results of the last calls belong to them, and are put before other words in between
        yield range(start, place)
        start = place


def _together(elements: Sequence[bytes], *, is_held: bool) -> _Piece:
    """Calls of several messages. None of these is changed: they stand together or not at all."""
    blocks = [block for raw in elements for block in _listed(decode(raw)["content"])]
    arguments = [text for raw in elements for text in _arguments(raw)]
    return _Piece.of(encode({**_spoken({}, blocks, arguments), **SEAL}), is_held=is_held)


def _size(found: _Read) -> int:
    return sum(_PIECE_BYTES + len(piece.message) for piece in found.pieces)


def _read(raw: bytes) -> _Read:
    message, is_odd = read(raw)
    if isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str):
        # As in a chat request; what cannot be written anew is sealed wherever it is read.
        return _Read((_Piece.of(raw),), _kind(message))
    kind = _kind(message)
    content = message["content"] if _is_listed(message) else []
    served, needs = _served(content) if kind in _SPOKEN else ((), ())
    if is_odd or not _is_listed(message):
        kind = "sealed" if is_odd and kind in _SYSTEM else kind
        return _Read((_Piece.of(opaque(raw)),), kind, is_opaque=True, served=served, needs=needs)
    if message["role"] == "user":
        return _Read(tuple(_of_user(message, content)), kind)
    return _Read(
        (_Piece.of(encode(_spoken(message, content, _arguments(raw) if any(map(_stays, content)) else ()))),),
        kind,
        calls=any(map(_stays, content)),
        is_compact=any(map(is_compaction, content)),
        served=served,
        needs=needs,
        coded=frozenset(str(block.get("id")) for block in content if _stays(block) and _by_code(block)),
    )


def _by_code(block: Mapping[str, Any]) -> bool:
    caller = block.get("caller")
    return isinstance(caller, dict) and "tool_id" in caller


def _served(content: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids of calls that run where the model does, and those that stand in an earlier message."""
    served: dict[str, None] = {}
    needs: list[str] = []
    for block in content:
        kind, caller = block.get("type"), block.get("caller")
        names = [caller.get("tool_id")] if isinstance(caller, dict) else []
        if isinstance(kind, str) and kind.endswith("_tool_result"):
            names.append(block.get("tool_use_id"))
        needs.extend(name for name in names if isinstance(name, str) and name not in served)
        if kind in _SERVED and isinstance(block.get("id"), str):
            served[block["id"]] = None
    return tuple(served), tuple(needs)


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


def _arguments(raw: bytes) -> list[str]:
    """The arguments of an element's calls, as compact JSON."""
    blocks = [fields_of(block) for block in items_of(fields_of(raw)["content"])]
    return [compact(block.get("input", b"{}")) for block in blocks if decode(block.get("type", b"null")) == _CALL]


def _spoken(message: Mapping[str, Any], content: Sequence[Any], arguments: Sequence[str]) -> dict[str, Any]:
    used = [block for block in content if _stays(block)]
    calls = [_call(block, text) for block, text in zip(used, arguments, strict=True)]
    parts = said([block for block in content if not _stays(block)])
    found: dict[str, Any] = {"role": "assistant", "content": parts}
    if calls:
        found |= {"content": parts or None, "tool_calls": calls}
    return found | _other(message)


def _stays(block: Mapping[str, Any]) -> bool:
    """A call: it is only left out with its message."""
    return block.get("type") == _CALL


def _called(raw: bytes, arguments: str) -> bytes:
    """A call with these arguments."""
    fields = fields_of(raw)
    is_same = compact(fields.get("input", b"{}")) == arguments
    return raw if is_same else object_of(fields | {"input": arguments.encode()})


def _call(block: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function} | _marks(block)


def _of_user(message: Mapping[str, Any], content: Sequence[Any]) -> Iterator[_Piece]:
    results = [number for number, block in enumerate(content) if block.get("type") == "tool_result"]
    words = frozenset(range(len(content))).difference(results)
    for number in results:
        yield _Piece.of(encode(_result(content[number])), frozenset({number}), is_result=True)
    if words or not content:
        parts = said([content[number] for number in sorted(words)])
        is_held = any(content[number].get("type") == "mid_conv_system" for number in words)
        yield _Piece.of(encode({"role": "user", "content": parts} | _other(message)), words, is_held=is_held)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    shown = said(content) if isinstance(content, list) else content if isinstance(content, str) else ""
    found = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}
    return found | _marks(block) | ({"is_error": True} if block.get("is_error") is True else {})


def _marks(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


def _other(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("role", "content")}


def _formed(came: Sequence[bytes], form: Mapping[str, Any]) -> Iterable[bytes]:
    """What stands in the place of a message's blocks: a result with another content, or other texts."""
    content = form.get("content")
    fields = fields_of(came[0])
    if decode(fields.get("type", b"null")) != "tool_result":
        is_gone = form.get("tool_calls") and says_nothing(content)
        return () if is_gone else as_came(_texts(content), came)
    if isinstance(content, list):
        written = list_of(as_came(content, items_of(fields.get("content", b""))))
    else:
        written = encode(content)
    return [object_of({**fields, "content": written})]


def _texts(content: Any) -> Iterable[Any]:
    """Blocks of a chat message's content; Anthropic takes none without a text."""
    return [part for part in _listed(content or []) if part.get("type") != "text" or part["text"].strip()]
