"""Show Anthropic's Messages as chat messages, and apply changes to them.

What one of them is by itself is said in `read_messages.py`; here is what they are together. Where the last turn began
with thinking, it must still do so. Instructions of the operator between the messages stay in any case, and are moved to
where they may stand.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gateway.core.conversation.message import IGNORED, Hashed, decode, encode
from gateway.core.fitting.blocks import GAP
from gateway.core.views.raw import compact, fields_of, items_of, list_of, object_of
from gateway.core.views.read_messages import (
    SPOKEN,
    SYSTEM,
    USERS,
    Piece,
    ReadMessage,
    after_signed,
    arguments_of,
    called,
    changed_tool,
    is_call,
    kind_of,
    listed,
    loaded,
    read_message,
    size_of,
    spoken,
)
from gateway.core.views.view import (
    SEAL,
    Changes,
    ChatMessage,
    ElementCache,
    SentElement,
    View,
    as_came,
    entries,
    loaders,
    says_nothing,
    sealed,
    to_send,
    together,
)

_IGNORED = ChatMessage.of(IGNORED)


class _Form(NamedTuple):
    """What a message is sent as.

    `is_other`: it says something else than the message; `had_calls`: that calls tools; `calls`: the calls to send.
    """

    message: Mapping[str, Any]
    is_other: bool
    had_calls: bool
    calls: Iterator[Mapping[str, Any]]

    @classmethod
    def of(cls, now: Mapping[str, Any], was: Mapping[str, Any]) -> _Form:
        """`now` in the place of `was`."""
        is_other = any(now.get(name) != was.get(name) for name in ("content", "tool_calls"))
        return cls(now, is_other, bool(was.get("tool_calls")), iter(now.get("tool_calls") or ()))


class MessagesView(View):
    """The `messages` of a Messages request."""

    def __init__(self, original: Hashed, book: ElementCache | None = None) -> None:
        reads = entries("messages", original, book, read_message, size_of)
        found = _pieces(original.raws, reads)
        self._blocks = [piece.blocks for piece, _ in found]
        self._kinds = [one.kind for one in reads]
        begins = _Begins.of(reads)
        self._alone = begins.alone
        self._system = _well_placed(self._kinds)
        compact = max((place for place, one in enumerate(reads) if one.is_compact), default=-1)
        must = {compact, *_overhead(self._kinds, self._system), *_asked(begins), *_unread(reads)}
        leaders = {*_leaders(reads, begins), *_unread_calls(reads)}
        overhead = {*_beside_results(reads, leaders, begins)}
        kept = after_signed(reads)
        super().__init__(
            original,
            # What lies before a compaction is neither read nor billed: it stays, and is no part of any choice.
            together([_IGNORED if places[-1] < compact else piece.message for piece, places in found]),
            [places for _, places in found],
            held=[i for i, (piece, places) in enumerate(found) if piece.is_held or not must.isdisjoint(places)],
            needed=loaders([(piece.loads, piece.calls) for piece, _ in found]),
            leading=[i for i, (_, places) in enumerate(found) if not leaders.isdisjoint(places)] if leaders else (),
            following=[i for i, (piece, places) in enumerate(found) if not piece.is_result and places[0] in overhead]
            if overhead
            else (),
            bound=[i for i, (_, places) in enumerate(found) if kept and places[-1] in kept],
            book=book,
        )

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """See `View.restored`. System messages go where they may stand: after the user, and before the assistant."""
        if not self._system:
            return super().restored(changes, new)
        found: list[SentElement] = []
        waiting: list[SentElement] = []
        is_after_user = False
        for one in self._sent(changes, new):
            if one.place in self._system:
                waiting.append(one)
                continue
            kind = kind_of(decode(one.raw)) if one.place is None else self._kinds[one.place]
            if waiting and is_after_user and kind in SPOKEN:
                found.append(_merged(waiting))
                waiting = []
            found.append(one)
            is_after_user = kind in USERS
        if waiting:
            found.append(_merged(waiting))
        return to_send(found)

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[SentElement]:
        sent = list(super()._sent(changes, new))
        for number, one in enumerate(sent):
            # An assistant's turn with words before its thinking is refused. A new message that would be such words is
            # made the user's, so that the turn begins behind it, with its thinking.
            is_before = one.place is None and self._is_thought(sent[number + 1 :])
            yield SentElement.of(None, encode({**decode(one.raw), "role": "user"})) if is_before else one

    def _is_thought(self, sent: Sequence[SentElement]) -> bool:
        """Whether the next element that is not the operator's begins with thinking."""
        kinds = (self._kinds[one.place] for one in sent if one.place is not None)
        return next((kind for kind in kinds if kind not in SYSTEM), "") == "thought"

    def _changed(self, element: int, forms: Changes) -> bytes:
        original = self.elements[element]
        others = {index: form for index, form in self._others(forms) if form is None or form.is_other}
        if not others or any(len(self.places[index]) > 1 for index in others):
            return original
        fields = fields_of(original)
        left = list(self._left(element, fields["content"], others))
        return object_of({**fields, "content": list_of(left)}) if left else original

    def _others(self, forms: Changes) -> Iterator[tuple[int, _Form | None]]:
        """What messages are sent as, read."""
        for index, form in forms.items():
            yield index, _Form.of(decode(form), decode(self.messages[index])) if form is not None else None

    def _trait(self, index: int) -> Hashable:
        return self._blocks[index]

    def _left(self, element: int, content: bytes, forms: Mapping[int, _Form | None]) -> Iterator[bytes]:
        blocks = items_of(content)
        if not blocks:
            yield from map(encode, _texts(next(filter(None, forms.values())).message.get("content")))
        whose = {block: index for index in self.owned[element] for block in self._of(index, len(blocks))}
        done: set[int] = set()
        for number, raw in enumerate(blocks):
            index = whose[number]
            form = forms.get(index)
            if index not in forms:
                yield raw
            elif form is not None and form.had_calls and is_call(decode(raw)):
                call = next(form.calls, None)
                yield raw if call is None else _called(raw, call["function"]["arguments"])
            elif form is not None and index not in done:
                done.add(index)
                original = [blocks[mine] for mine in self._of(index, len(blocks))]
                yield from _formed(original, form.message)

    def _of(self, index: int, count: int) -> Iterable[int]:
        """The blocks that a message is made of, by their place among the `count` blocks of its element."""
        blocks = self._blocks[index]
        return range(count) if blocks is None else blocks

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        # Where thinking is on, an assistant's turn must begin with it, and turns of one role are read as one. Words of
        # the user's would be the beginning of another turn where one that began with thinking goes on.
        # A mark is of the assistant's own words, and stands there for a provider that takes no user's in their place.
        role = "assistant" if message["content"] == GAP or self._goes_on(element) else "user"
        return encode({"role": role, "content": message["content"]})

    def _goes_on(self, element: int) -> bool:
        """Whether a turn that began with thinking goes on there, see `_Begins`."""
        first = ""
        for place in reversed(range(element)):
            if self._kinds[place] in SPOKEN:
                first = self._kinds[place]
            elif self._kinds[place] == "words" and (first == "thought" or place in self._alone):
                break
        return first == "thought"


class _Begins(NamedTuple):
    """The user's words, which begin a turn; whether they do so where results stand beside them is said nowhere.

    `alone`: those without results; `last`: the last words of all, `last_alone`: the last of those. -1 for none.
    """

    alone: frozenset[int]
    last: int
    last_alone: int

    @classmethod
    def of(cls, reads: Sequence[ReadMessage]) -> _Begins:
        """Those of a conversation."""
        words = [place for place, one in enumerate(reads) if one.kind == "words"]
        alone = [place for place in words if not reads[place].has_results]
        return cls(frozenset(alone), (words or [-1])[-1], (alone or [-1])[-1])


def _leaders(reads: Sequence[ReadMessage], begins: _Begins) -> Iterator[int]:
    """The beginning of the last turn, if it is thinking: a provider refuses what does not begin so in the turn without.

    Where all of the turn does, whatever is left of it begins with thinking.
    """
    for words in {begins.last, begins.last_alone}:
        spoken = [place for place in range(words + 1, len(reads)) if reads[place].kind in SPOKEN]
        if spoken and reads[spoken[0]].kind == "thought" and any(reads[place].kind != "thought" for place in spoken):
            yield spoken[0]


def _unread_calls(reads: Sequence[ReadMessage]) -> Iterator[int]:
    """The calls whose results stand beside the last words of all: the model has read none of these yet.

    They stay, so that it knows what it called for; what is long of the results can be cut.
    """
    if reads and reads[-1].has_results and reads[-1].has_words:
        yield from (place for place in range(len(reads) - 1)[-1:] if reads[place].kind in SPOKEN)


def _beside_results(reads: Sequence[ReadMessage], leaders: Collection[int], begins: _Begins) -> Iterable[int]:
    """Where words stay or go with the results beside them, as without these they would surely begin a turn.

    That matters in a turn that must begin with thinking, and that they do not begin if they are not taken to.
    """
    if all(place > begins.last for place in leaders):
        return ()
    places = range(begins.last_alone + 1, begins.last + 1)
    return [place for place in places if reads[place].has_results and reads[place].has_words]


def _asked(begins: _Begins) -> Iterable[int]:
    """The user's last words without results beside them, where the very last ones have results beside them.

    Claude Code puts reminders beside results: what the user wants done was said before.
    """
    return () if begins.last_alone in (begins.last, -1) else (begins.last_alone,)


def _unread(reads: Sequence[ReadMessage]) -> Iterator[int]:
    """What may belong to the calls or results in an element that nobody here can read.

    That is the rest of its turn, and the assistant's turn before it or the user's behind it.
    """
    if not any(one.is_tied for one in reads):
        return
    turns = [[*turn] for _, turn in groupby(range(len(reads)), lambda place: reads[place].kind in SPOKEN)]
    for number, turn in enumerate(turns):
        if any(reads[place].is_tied for place in turn):
            yield from turn
            overhead = number + 1 if reads[turn[0]].kind in SPOKEN else number - 1
            yield from turns[overhead] if 0 <= overhead < len(turns) else ()


def _well_placed(kinds: Sequence[str]) -> frozenset[int]:
    """The system messages that stand where they may stand, as far as that is known here."""
    places = (place for place, kind in enumerate(kinds) if kind in ("system", "changes"))
    return frozenset(
        place
        for place in places
        if place and kinds[place - 1] in USERS and (place + 1 == len(kinds) or kinds[place + 1] in SPOKEN)
    )


def _overhead(kinds: Sequence[str], well_placed: Collection[int]) -> Iterator[int]:
    """What must stay beside system messages: all that is next to one that must not move, and what the last one ends.

    A text, or a tool that is withdrawn or offered by name, may as well stand a message later. The definition of a tool
    may not: calls of the tool come after it.
    """
    for place, kind in enumerate(kinds):
        if kind in SYSTEM and (kind != "system" or place not in well_placed):
            yield from (place - 1, place, place + 1)
    if len(kinds) - 1 in well_placed:
        yield len(kinds) - 2


def _merged(texts: Sequence[SentElement]) -> SentElement:
    """System messages that have come to stand side by side, which a provider may not take.

    Of several changes of one tool, the last one counts.
    """
    if len(texts) == 1:
        return texts[0]
    messages = [fields_of(one.raw) for one in texts]
    blocks = [block for message in messages for block in _blocks(message["content"])]
    names = [changed_tool(decode(block)) for block in blocks]
    kept = [block for number, block in enumerate(blocks) if names[number] not in (set(names[number + 1 :]) - {None})]
    return SentElement.of(None, object_of({**messages[-1], "content": list_of(kept)}))


def _blocks(content: bytes) -> Iterable[bytes]:
    return items_of(content) or map(encode, listed(decode(content)))


def _pieces(elements: Sequence[bytes], reads: Sequence[ReadMessage]) -> list[tuple[Piece, Sequence[int]]]:
    """The messages, each with the elements it is made of."""
    found: list[tuple[Piece, Sequence[int]]] = []
    for span in _spans(reads):
        if len(span) == 1:
            found += [(piece, span) for piece in reads[span.start].pieces]
        else:
            found += _tied(elements, reads, span)
    coded = frozenset[str]().union(*[one.coded for one in reads if one.coded])
    return [(_uncut(piece, coded), places) for piece, places in found] if coded else found


def _uncut(piece: Piece, coded: Collection[str]) -> Piece:
    """What code reads is no text for a model: in any other form it would be a broken or a wrong value."""
    if not (piece.is_result and decode(piece.message.raw)["tool_call_id"] in coded):
        return piece
    return piece._replace(message=ChatMessage.of(sealed(piece.message.raw)))


def _tied(
    elements: Sequence[bytes], reads: Sequence[ReadMessage], span: range
) -> Iterator[tuple[Piece, Sequence[int]]]:
    """All that the assistant said as one message; directly behind it the results of its calls; then the rest."""
    spoken = {place: None for place in span if reads[place].kind in SPOKEN and not reads[place].is_opaque}
    # What ends the conversation stays, and so does what belongs to something that nobody here can read.
    is_last = span.stop == len(reads) and reads[-1].kind != "words"
    is_held = is_last or any(reads[place].is_opaque for place in span)
    if spoken:
        yield _together([elements[place] for place in spoken], is_held=is_held), [*spoken]
    rest = [(piece, (place,)) for place in span if place not in spoken for piece in reads[place].pieces]
    yield from sorted(rest, key=lambda found: not found[0].is_result)


def _spans(reads: Sequence[ReadMessage]) -> Iterator[range]:
    """Elements whose calls stay or go together."""
    reach = _reach(reads)
    start = 0
    while start < len(reads):
        stop, place = start, start
        while place <= stop:
            stop, place = max(stop, reach[place]), place + 1
        if place - start > 1 and place < len(reads) and reads[place].has_results:
            place += 1  # the results of the last calls belong to them, and are put before other words in between
        yield range(start, place)
        start = place


def _reach(reads: Sequence[ReadMessage]) -> Sequence[int]:
    """Of each element, the last one whose calls stay or go together with its own.

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
        for name in one.needs:
            if name in served:
                reach[served[name]] = place
        if one.kind in USERS:
            if waiting is not None and is_parted and one.has_results:
                reach[waiting] = place
            is_parted = is_parted or one.has_words
        else:
            before = waiting if place and one.kind in SPOKEN and reads[place - 1].kind in SPOKEN else None
            if before is not None and one.calls:
                reach[before] = place
            waiting, is_parted = (place, False) if one.calls else (before, True)
        for name in one.served:
            served[name] = place
    return reach


def _together(elements: Sequence[bytes], *, is_held: bool) -> Piece:
    """Calls of several messages. None of these is changed: they stand together or not at all."""
    blocks = [block for raw in elements for block in listed(decode(raw)["content"])]
    arguments = [text for raw in elements for text in arguments_of(raw)]
    message = ChatMessage.of(encode({**spoken({}, blocks, arguments), **SEAL}))
    return Piece(message, is_held=is_held, loads=loaded(blocks), calls=called(blocks))


def _called(raw: bytes, arguments: str) -> bytes:
    """A call with these arguments."""
    fields = fields_of(raw)
    is_same = compact(fields.get("input", b"{}")) == arguments
    return raw if is_same else object_of(fields | {"input": arguments.encode()})


def _formed(original: Sequence[bytes], form: Mapping[str, Any]) -> Iterable[bytes]:
    """What stands in the place of a message's blocks: a result with another content, or other texts."""
    content = form.get("content")
    fields = fields_of(original[0])
    if decode(fields.get("type", b"null")) != "tool_result":
        is_gone = form.get("tool_calls") and says_nothing(content)
        return () if is_gone else as_came(_texts(content), original)
    if isinstance(content, list):
        written = list_of(as_came(content, items_of(fields.get("content", b""))))
    else:
        written = encode(content)
    return [object_of({**fields, "content": written})]


def _texts(content: Any) -> Iterable[Any]:
    """Blocks of a chat message's content; Anthropic takes none without a text."""
    return [part for part in listed(content or []) if part.get("type") != "text" or part["text"].strip()]
