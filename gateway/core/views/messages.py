"""Convert Anthropic's Messages to chat messages, and apply changes to them.

`read_messages.py` converts a single message; this module handles what depends on several messages:

- If the last turn started with thinking, it must still start with thinking after a trim.
- System messages in the middle of the conversation are always kept, and moved to where the provider allows them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gateway.core.conversation.message import IGNORED, Hashed, decode, encode
from gateway.core.trimming.text_blocks import GAP
from gateway.core.views.raw import compact, fields_of, items_of, list_of, object_of
from gateway.core.views.read_messages import (
    SPOKEN,
    SYSTEM,
    USERS,
    Piece,
    ReadMessage,
    after_signed,
    arguments_of,
    as_blocks,
    assistant_message,
    called_tools,
    changed_tool,
    is_call,
    kind_of,
    loaded_tools,
    read_message,
    size_of,
)
from gateway.core.views.view import (
    SEAL,
    Changes,
    ChatMessage,
    ElementCache,
    MessageMarks,
    SentElement,
    View,
    hashed_elements,
    hashed_messages,
    is_empty_content,
    loaders,
    parsed_elements,
    parts_as_bytes,
    sealed,
)

_IGNORED = ChatMessage.of(IGNORED)


class _SentMessage(NamedTuple):
    """The form in which a message is sent.

    Attributes:
        message: the chat message.
        is_other: True if it differs from the original message.
        had_calls: True if the original message calls tools.
        calls: the calls to send.
    """

    message: Mapping[str, Any]
    is_other: bool
    had_calls: bool
    calls: Iterator[Mapping[str, Any]]

    @classmethod
    def of(cls, new: Mapping[str, Any], old: Mapping[str, Any]) -> _SentMessage:
        """Create the form of a message that is sent as `new` instead of `old`."""
        is_other = any(new.get(name) != old.get(name) for name in ("content", "tool_calls"))
        return cls(new, is_other, bool(old.get("tool_calls")), iter(new.get("tool_calls") or ()))


class MessagesView(View):
    """The `messages` of a Messages request."""

    def __init__(self, original: Hashed, cache: ElementCache | None = None) -> None:
        reads = parsed_elements("messages", original, cache, read_message, size_of)
        messages = _messages_of(original.raws, reads)
        self._blocks = [piece.blocks for piece, _ in messages]
        self._kinds = [one.kind for one in reads]
        starts = _TurnStarts.of(reads)
        self._separate_words = starts.alone
        self._system = _well_placed_system(self._kinds)
        compact = max((place for place, one in enumerate(reads) if one.is_compact), default=-1)
        must_stay = {
            compact,
            *_neighbors_of_system(self._kinds, self._system),
            *_task_before_results(starts),
            *_neighbors_of_unparsed(reads),
        }
        leaders = {*_leaders(reads, starts), *_calls_with_unread_results(reads)}
        with_results = {*_words_with_results(reads, leaders, starts)}
        bound = after_signed(reads)
        marks = MessageMarks(
            held=frozenset(
                i for i, (piece, places) in enumerate(messages) if piece.is_held or not must_stay.isdisjoint(places)
            ),
            needed=frozenset(loaders([(piece.loads, piece.calls) for piece, _ in messages])),
            undroppable=frozenset(
                i for i, (_, places) in enumerate(messages) if leaders and not leaders.isdisjoint(places)
            ),
            following=frozenset(
                i
                for i, (piece, places) in enumerate(messages)
                if with_results and not piece.is_result and places[0] in with_results
            ),
            bound=frozenset(i for i, (_, places) in enumerate(messages) if bound and places[-1] in bound),
        )
        super().__init__(
            original,
            # The provider neither reads nor bills anything before a compaction. It stays in the request and is not
            # trimmed.
            hashed_messages([_IGNORED if places[-1] < compact else piece.message for piece, places in messages]),
            [places for _, places in messages],
            marks,
            cache,
        )

    def restored(self, changes: Changes, new: Collection[int] = ()) -> Hashed:
        """Return the elements to send, see `View.restored`.

        System messages are moved to where the provider allows them: after the user and before the assistant.
        """
        if not self._system:
            return super().restored(changes, new)
        moved: list[SentElement] = []
        waiting: list[SentElement] = []
        is_after_user = False
        for element in self._sent(changes, new):
            if element.place in self._system:
                waiting.append(element)
                continue
            kind = kind_of(decode(element.raw)) if element.place is None else self._kinds[element.place]
            if waiting and is_after_user and kind in SPOKEN:
                moved.append(_merged(waiting))
                waiting = []
            moved.append(element)
            is_after_user = kind in USERS
        if waiting:
            moved.append(_merged(waiting))
        return hashed_elements(moved)

    def _sent(self, changes: Changes, new: Collection[int]) -> Iterator[SentElement]:
        sent = list(super()._sent(changes, new))
        for number, element in enumerate(sent):
            # Anthropic refuses an assistant turn with text before its thinking. So a new message directly before
            # thinking gets the role `user`. The turn then starts after it, with the thinking.
            precedes_thinking = element.place is None and self._starts_with_thinking(sent[number + 1 :])
            yield (
                SentElement.of(None, encode({**decode(element.raw), "role": "user"})) if precedes_thinking else element
            )

    def _starts_with_thinking(self, sent: Sequence[SentElement]) -> bool:
        """Return True if the next element that is no system message starts with thinking."""
        kinds = (self._kinds[element.place] for element in sent if element.place is not None)
        return next((kind for kind in kinds if kind not in SYSTEM), "") == "thought"

    def _changed(self, element: int, forms: Changes) -> bytes:
        original = self.elements[element]
        others = {index: form for index, form in self._sent_messages(forms) if form is None or form.is_other}
        if not others or any(len(self.places[index]) > 1 for index in others):
            return original
        fields = fields_of(original)
        content = list(self._changed_content(element, fields["content"], others))
        return object_of({**fields, "content": list_of(content)}) if content else original

    def _sent_messages(self, forms: Changes) -> Iterator[tuple[int, _SentMessage | None]]:
        """Yield the decoded form of each changed message, or None if it is dropped."""
        for index, form in forms.items():
            yield index, _SentMessage.of(decode(form), decode(self.messages[index])) if form is not None else None

    def _extra_key(self, index: int) -> Hashable:
        return self._blocks[index]

    def _changed_content(
        self, element: int, content: bytes, forms: Mapping[int, _SentMessage | None]
    ) -> Iterator[bytes]:
        blocks = items_of(content)
        if not blocks:
            yield from map(encode, _non_empty_parts(next(filter(None, forms.values())).message.get("content")))
        owner_of = {
            block: index
            for index in self.messages_of_elements[element]
            for block in self._blocks_of(index, len(blocks))
        }
        written: set[int] = set()
        for number, raw in enumerate(blocks):
            index = owner_of[number]
            form = forms.get(index)
            if index not in forms:
                yield raw
            elif form is not None and form.had_calls and is_call(decode(raw)):
                call = next(form.calls, None)
                yield raw if call is None else _with_arguments(raw, call["function"]["arguments"])
            elif form is not None and index not in written:
                written.add(index)
                original = [blocks[block] for block in self._blocks_of(index, len(blocks))]
                yield from _changed_blocks(original, form.message)

    def _blocks_of(self, index: int, count: int) -> Iterable[int]:
        """Return the indices of the blocks of a message, among the `count` blocks of its element."""
        blocks = self._blocks[index]
        return range(count) if blocks is None else blocks

    def _new_element(self, message: Mapping[str, Any], element: int) -> bytes:
        # A turn with thinking must start with it, and consecutive messages of one role are one turn. So the new text is
        # a user message, unless that would start another turn in the middle of a turn that started with thinking. A gap
        # mark is always the assistant's own text, for providers that accept no user message there.
        role = "assistant" if message["content"] == GAP or self._continues_thinking_turn(element) else "user"
        return encode({"role": role, "content": message["content"]})

    def _continues_thinking_turn(self, element: int) -> bool:
        """Return True if a turn that started with thinking continues at this element, see `_TurnStarts`."""
        first = ""
        for place in reversed(range(element)):
            if self._kinds[place] in SPOKEN:
                first = self._kinds[place]
            elif self._kinds[place] == "words" and (first == "thought" or place in self._separate_words):
                break
        return first == "thought"


class _TurnStarts(NamedTuple):
    """The user's words that start turns, as indices of messages.

    The documentation does not say whether words next to tool results start a turn.

    Attributes:
        alone: all words without results.
        last: the last words; -1 if there are none.
        last_alone: the last words without results; -1 if there are none.
    """

    alone: frozenset[int]
    last: int
    last_alone: int

    @classmethod
    def of(cls, reads: Sequence[ReadMessage]) -> _TurnStarts:
        """Find the turn starts of a conversation."""
        words = [place for place, one in enumerate(reads) if one.kind == "words"]
        separate = [place for place in words if not reads[place].has_results]
        return cls(frozenset(separate), (words or [-1])[-1], (separate or [-1])[-1])


def _leaders(reads: Sequence[ReadMessage], starts: _TurnStarts) -> Iterator[int]:
    """Yield the message with thinking that starts the last turn, if the provider would refuse the turn without it.

    If all messages of the turn start with thinking, any of them may start it, so none is needed.
    """
    for start in {starts.last, starts.last_alone}:
        spoken = [place for place in range(start + 1, len(reads)) if reads[place].kind in SPOKEN]
        if spoken and reads[spoken[0]].kind == "thought" and any(reads[place].kind != "thought" for place in spoken):
            yield spoken[0]


def _calls_with_unread_results(reads: Sequence[ReadMessage]) -> Iterator[int]:
    """Yield the message with the calls whose results are next to the last words.

    The model has not read any of these results yet. The calls stay, so that it knows what it called. Long results can
    be shortened.
    """
    if reads and reads[-1].has_results and reads[-1].has_words:
        yield from (place for place in range(len(reads) - 1)[-1:] if reads[place].kind in SPOKEN)


def _words_with_results(reads: Sequence[ReadMessage], leaders: Collection[int], starts: _TurnStarts) -> Iterable[int]:
    """Return the messages whose words are kept or dropped with the results next to them.

    Without the results, such words would surely start a turn. This matters in a turn that must start with thinking, and
    whose start depends on how words next to results are read.
    """
    if all(place > starts.last for place in leaders):
        return ()
    places = range(starts.last_alone + 1, starts.last + 1)
    return [place for place in places if reads[place].has_results and reads[place].has_words]


def _task_before_results(starts: _TurnStarts) -> Iterable[int]:
    """Return the user's last words without results, if the very last words are next to results.

    Claude Code adds reminders next to results; the task of the user precedes them.
    """
    return () if starts.last_alone in (starts.last, -1) else (starts.last_alone,)


def _neighbors_of_unparsed(reads: Sequence[ReadMessage]) -> Iterator[int]:
    """Yield what may belong to calls or results in an element that cannot be parsed.

    That is the rest of its turn, and the assistant's turn before it or the user's turn after it.
    """
    if not any(one.may_have_calls for one in reads):
        return
    turns = [[*turn] for _, turn in groupby(range(len(reads)), lambda place: reads[place].kind in SPOKEN)]
    for number, turn in enumerate(turns):
        if any(reads[place].may_have_calls for place in turn):
            yield from turn
            partner = number + 1 if reads[turn[0]].kind in SPOKEN else number - 1
            yield from turns[partner] if 0 <= partner < len(turns) else ()


def _well_placed_system(kinds: Sequence[str]) -> frozenset[int]:
    """Return the system messages at positions that the provider allows, as far as known."""
    places = (place for place, kind in enumerate(kinds) if kind in ("system", "changes"))
    return frozenset(
        place
        for place in places
        if place and kinds[place - 1] in USERS and (place + 1 == len(kinds) or kinds[place + 1] in SPOKEN)
    )


def _neighbors_of_system(kinds: Sequence[str], well_placed: Collection[int]) -> Iterator[int]:
    """Yield the messages that must stay next to system messages.

    These are the neighbors of a system message that must not move, and the message before a final system message. A
    text, or a tool that is withdrawn or offered by name, may move to a later position. The definition of a tool may
    not, because calls of the tool follow it.
    """
    for place, kind in enumerate(kinds):
        if kind in SYSTEM and (kind != "system" or place not in well_placed):
            yield from (place - 1, place, place + 1)
    if len(kinds) - 1 in well_placed:
        yield len(kinds) - 2


def _merged(texts: Sequence[SentElement]) -> SentElement:
    """Merge system messages that became neighbors, which a provider may refuse.

    If several of them change the same tool, only the last change is kept.
    """
    if len(texts) == 1:
        return texts[0]
    messages = [fields_of(one.raw) for one in texts]
    blocks = [block for message in messages for block in _blocks(message["content"])]
    names = [changed_tool(decode(block)) for block in blocks]
    kept = [block for number, block in enumerate(blocks) if names[number] not in (set(names[number + 1 :]) - {None})]
    return SentElement.of(None, object_of({**messages[-1], "content": list_of(kept)}))


def _blocks(content: bytes) -> Iterable[bytes]:
    return items_of(content) or map(encode, as_blocks(decode(content)))


def _messages_of(elements: Sequence[bytes], reads: Sequence[ReadMessage]) -> list[tuple[Piece, Sequence[int]]]:
    """Return the chat messages, each with the indices of its elements."""
    messages: list[tuple[Piece, Sequence[int]]] = []
    for span in _grouped(reads):
        if len(span) == 1:
            messages += [(piece, span) for piece in reads[span.start].pieces]
        else:
            messages += _joined(elements, reads, span)
    coded = frozenset[str]().union(*[one.coded for one in reads if one.coded])
    return [(_sealed_if_coded(piece, coded), places) for piece, places in messages] if coded else messages


def _sealed_if_coded(piece: Piece, coded: Collection[str]) -> Piece:
    """Seal the result of a call that code made: code reads it, so any change would break the value."""
    if not (piece.is_result and decode(piece.message.raw)["tool_call_id"] in coded):
        return piece
    return piece._replace(message=ChatMessage.of(sealed(piece.message.raw)))


def _joined(
    elements: Sequence[bytes], reads: Sequence[ReadMessage], span: range
) -> Iterator[tuple[Piece, Sequence[int]]]:
    """Yield one message for all that the assistant said, then the results of its calls, then the rest."""
    spoken = {place: None for place in span if reads[place].kind in SPOKEN and not reads[place].is_opaque}
    # The end of the conversation stays, and so does everything that may belong to an element that cannot be parsed.
    is_last = span.stop == len(reads) and reads[-1].kind != "words"
    is_held = is_last or any(reads[place].is_opaque for place in span)
    if spoken:
        yield _as_one_message([elements[place] for place in spoken], is_held=is_held), [*spoken]
    rest = [(piece, (place,)) for place in span if place not in spoken for piece in reads[place].pieces]
    yield from sorted(rest, key=lambda pair: not pair[0].is_result)


def _grouped(reads: Sequence[ReadMessage]) -> Iterator[range]:
    """Yield ranges of elements whose calls are kept or dropped together."""
    partners = _last_partners(reads)
    start = 0
    while start < len(reads):
        stop, place = start, start
        while place <= stop:
            stop, place = max(stop, partners[place]), place + 1
        if place - start > 1 and place < len(reads) and reads[place].has_results:
            place += 1  # the results of the last calls belong to them, and are put before other words in between
        yield range(start, place)
        start = place


def _last_partners(reads: Sequence[ReadMessage]) -> Sequence[int]:
    """Return for each element the last element whose calls are kept or dropped together with its own.

    Calls of an assistant are answered together, even if several messages contain them, or if words are between them and
    some results. A call of a server tool may have its result in a later message, and may call a client tool in between.
    """
    partners = list(range(len(reads)))
    server_calls: dict[str, int] = {}
    #: `waiting`: the last message with calls, as long as results may follow. `has_words_between`: other content than
    #: results follows it.
    waiting: int | None = None
    has_words_between = False
    for place, one in enumerate(reads):
        for name in one.needs:
            if name in server_calls:
                partners[server_calls[name]] = place
        if one.kind in USERS:
            if waiting is not None and has_words_between and one.has_results:
                partners[waiting] = place
            has_words_between = has_words_between or one.has_words
        else:
            previous = waiting if place and one.kind in SPOKEN and reads[place - 1].kind in SPOKEN else None
            if previous is not None and one.calls:
                partners[previous] = place
            waiting, has_words_between = (place, False) if one.calls else (previous, True)
        for name in one.served:
            server_calls[name] = place
    return partners


def _as_one_message(elements: Sequence[bytes], *, is_held: bool) -> Piece:
    """Return calls of several messages as one message, which is sealed: they are kept or dropped together."""
    blocks = [block for raw in elements for block in as_blocks(decode(raw)["content"])]
    arguments = [text for raw in elements for text in arguments_of(raw)]
    message = ChatMessage.of(encode({**assistant_message({}, blocks, arguments), **SEAL}))
    return Piece(message, is_held=is_held, loads=loaded_tools(blocks), calls=called_tools(blocks))


def _with_arguments(raw: bytes, arguments: str) -> bytes:
    """Return the bytes of a call with these arguments."""
    fields = fields_of(raw)
    is_same = compact(fields.get("input", b"{}")) == arguments
    return raw if is_same else object_of(fields | {"input": arguments.encode()})


def _changed_blocks(original: Sequence[bytes], form: Mapping[str, Any]) -> Iterable[bytes]:
    """Return the blocks that replace the blocks of a message: a result with other content, or other texts."""
    content = form.get("content")
    fields = fields_of(original[0])
    if decode(fields.get("type", b"null")) != "tool_result":
        is_dropped = form.get("tool_calls") and is_empty_content(content)
        return () if is_dropped else parts_as_bytes(_non_empty_parts(content), original)
    if isinstance(content, list):
        written = list_of(parts_as_bytes(content, items_of(fields.get("content", b""))))
    else:
        written = encode(content)
    return [object_of({**fields, "content": written})]


def _non_empty_parts(content: Any) -> Iterable[Any]:
    """Return the blocks of a chat message's content without empty texts, which Anthropic refuses."""
    return [part for part in as_blocks(content or []) if part.get("type") != "text" or part["text"].strip()]
