"""Show the input items of a Responses request as chat messages, and apply changes to them.

Calls that were made together become one message with what was said directly before them, as in a chat request, and
their results follow it, wherever they stand among the items. What a model reasoned or did by itself is bound to what
came of it: a provider refuses one without the other, also where the reasoning is only named. So is a program to the
calls that it made, whose results it reads as they came. All else that is only named, items that nobody here knows, and
results whose call the provider keeps, are held.

What comes of one reasoning between results stays or goes together as well, but is a message for each answer of the
model: what there is of an agent's run does not change while it goes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.core.conversation.message import Hashed, decode, encode
from gateway.core.views.raw import fields_of, items_of, list_of, object_of
from gateway.core.views.read_items import MESSAGE_BYTES, Name, ReadItem, read_item, size_of
from gateway.core.views.view import (
    SEAL,
    Changes,
    ChatMessage,
    ElementCache,
    View,
    as_came,
    entries,
    loaders,
    says_nothing,
    sealed,
    together,
)

#: the field of an item that rules may change, by what the item is
_CHANGED: Final = {"result": "output", "said": "content"}

#: the field in which a model says whether a message is its answer or goes with its work
_PHASE: Final = b'"phase"'

#: what a message is sent as, and what it was
_Form = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(slots=True)
class _Group:
    """Items that become one message."""

    places: list[int]
    message: dict[str, Any] | ChatMessage
    #: the message of what was said directly before its calls
    words: bytes = b""
    #: reasoning or deeds are in it: what follows belongs to them
    binds: bool = False
    #: reasoning is in it
    reasons: bool = False
    #: something has come of that reasoning or those deeds
    is_made: bool = False
    #: results of its calls have come: nothing more belongs to it
    is_answered: bool = False
    #: it came of what the group before it came of
    follows: bool = False
    results: list[_Group] = field(default_factory=list)

    def written(self) -> bytes:
        """Its message."""
        message = self.message
        if isinstance(message, ChatMessage):
            return message.raw
        if self.words:
            # The words are not read again: only what they came with is put behind them.
            more = encode({name: value for name, value in message.items() if value and name != "role"})
            return self.words.rstrip()[:-1] + b"," + more[1:]
        return encode({name: value for name, value in message.items() if value or name == "role"})


class ResponsesView(View):
    """The `input` of a Responses request, where it is an array."""

    array = "input"

    def __init__(self, original: Hashed, book: ElementCache | None = None) -> None:
        grouping, items = _Grouping(), entries("responses", original, book, read_item, size_of)
        for place, item in enumerate(items):
            grouping.add(place, item)
        # A message of several items keeps them all; those at the end of the input must stay as they came.
        groups = [one for group in grouping.groups for one in (group, *group.results)]
        kept = {id(group) for group in (*grouping.alone, *grouping.last)}
        old = {id(group) for group in grouping.stale()}
        self._bound = {index for index, group in enumerate(groups) if group.binds}
        self._items = items
        #: what messages were changed to last, with both read: a message may be several items
        self._forms: dict[int, tuple[bytes, _Form]] = {}
        super().__init__(
            original,
            together(_messages(groups, original, book)),
            [group.places for group in groups],
            held=[index for index, group in enumerate(groups) if id(group) in kept],
            stale=[index for index, group in enumerate(groups) if id(group) in old],
            needed=loaders(_tools(items, group.places) for group in groups) if any(one.loads for one in items) else (),
            following=[index for index, group in enumerate(groups) if group.follows],
            book=book,
        )

    def _changed(self, element: int, forms: Changes) -> bytes | None:
        original = self.elements[element]
        index, form = next((index, form) for index, form in forms.items() if form is not None)
        if index in self._bound:
            return original  # reasoning and what came of it stand as they came or not at all
        item, (now, was) = self._items[element], self._form(index, form)
        if item.kind == "call":
            number = self.places[index].index(element) - len(self.places[index])
            return _called(original, item, now["tool_calls"][number]) if now.get("tool_calls") else original
        name, content = _CHANGED.get(item.kind), now.get("content")
        if name is None or content == was.get("content"):
            return original
        if item.kind == "said" and was.get("tool_calls") and says_nothing(content):
            return None
        fields = fields_of(original)
        if isinstance(content, str):
            return object_of({**fields, name: encode(content)})
        text = "output_text" if item.role == "assistant" else "input_text"
        parts = as_came(content or (), items_of(fields[name]), lambda part: encode(_named(part, text)))
        return object_of({**fields, name: list_of(parts)})

    def _form(self, index: int, form: bytes) -> _Form:
        """What a message is sent as, and what it was, read."""
        raw, read = self._forms.get(index, (b"", None))
        if read is None or raw is not form:
            read = decode(form), decode(self.messages[index])
            self._forms[index] = form, read
        return read

    def _trait(self, index: int) -> Hashable:
        return index in self._bound

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        del element  # it may stand anywhere
        # Models that write phases read a message without one as another answer of theirs.
        pairs = zip(self._items, self.elements, strict=True)
        has_phases = any(item.role == "assistant" and _PHASE in raw for item, raw in pairs)
        phase = {"phase": "commentary"} if has_phases else {}
        return encode({"role": "assistant", "content": message["content"], **phase})


class _Grouping:
    """Items in groups, as they are read from the first to the last."""

    def __init__(self) -> None:
        self.groups: list[_Group] = []
        #: the results at the end of the input so far
        self.last: list[_Group] = []
        #: what cannot be left out
        self.alone: list[_Group] = []
        self._open: _Group | None = None
        #: by the `id` and the `call_id` of a call: the group that it is in, and its `call_id`
        self._callers: dict[str, tuple[_Group, str]] = {}
        #: the group that a program is in, by its `call_id`
        self._programs: dict[str, _Group] = {}
        #: `call_id` of each call that a program made
        self._coded: set[str] = set()
        #: the last compaction, which stands for all before it
        self._compact: _Group | None = None
        #: the item before only named one that the provider keeps
        self._is_after_name = False
        #: what the item before said: calls that follow belong to it
        self._words: _Group | None = None

    def stale(self) -> Iterator[_Group]:
        """The groups before the last compaction, which stands for them: those of which no part stands behind it."""
        if self._compact is None:
            return
        place = self._compact.places[0]
        for unit in self._units():
            if all(one.places[-1] < place for one in unit):
                yield from unit

    def _units(self) -> Sequence[Sequence[_Group]]:
        """The groups that stay or go together."""
        units: list[list[_Group]] = []
        for group in self.groups:
            if not group.follows:
                units.append([])
            units[-1] += (group, *group.results)
        return units

    def add(self, place: int, item: ReadItem) -> None:
        """Take the next item."""
        was_after_name, self._is_after_name = self._is_after_name, item.kind == "named"
        words, self._words = self._words, None
        if item.kind == "result":
            self._result(place, item)
            return
        self.last = []
        if item.kind in ("", "named"):
            self._alone(_Group([place], item.message))
            return
        if words is not None and item.kind == "call" and not item.by:
            self._goes_with(words)
        group = self._made(place, item)
        if was_after_name and item.role in ("", "assistant"):
            # It may have come of the item that was only named, or that cannot be read: the provider alone knows.
            self.alone.append(group)
        elif item.is_plain and self._open is None:
            self._words = group

    def _goes_with(self, words: _Group) -> None:
        """Let the calls that follow be of one message with what was said before them."""
        if isinstance(words.message, ChatMessage):
            words.words, words.message = words.message.raw, _silent()
            self._open = words

    def _made(self, place: int, item: ReadItem) -> _Group:
        if item.kind == "said":
            return self._said(place, item)
        return self._balance(place, item) if item.kind == "compact" else self._did(place, item)

    def _alone(self, group: _Group) -> None:
        if self._open is not None and self._open.binds and not self._open.is_made:
            # This may be what came of it: nobody here knows.
            self.alone.append(self._open)
        self.alone.append(group)
        self._opened(group, is_open=False)

    def _balance(self, place: int, item: ReadItem) -> _Group:
        if self._compact is not None:
            self.alone.remove(self._compact)
        self._compact = group = _Group([place], item.message)
        self.alone.append(group)
        self._opened(group, is_open=False)
        return group

    def _opened(self, group: _Group, *, is_open: bool) -> None:
        self.groups.append(group)
        self._open = group if is_open else None

    def _said(self, place: int, item: ReadItem) -> _Group:
        group = self._open
        if item.role == "assistant" and group is not None and group.binds and not group.is_answered:
            content = decode(item.message.raw)["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            group.is_made = True
            self._join(group, place, parts)
            return group
        group = _Group([place], item.message)
        self._opened(group, is_open=False)
        return group

    def _did(self, place: int, item: ReadItem) -> _Group:
        group = self._group_for(item)
        if item.by:
            self._of_program(group, item)
        if item.program:
            self._programs[item.program] = group
        if item.kind == "call":
            # OpenAI's own types name a local shell's output by an id alone, and leave open which.
            for name in (item.id, item.call_id):
                if name:
                    self._callers[name] = group, item.call_id
            group.is_made = True
            self._join(group, place, [], [item.part])
            if item.is_fixed and isinstance(group.message, dict):
                group.message |= SEAL
        else:
            group.binds, group.reasons = True, group.reasons or item.is_reasoning
            self._join(group, place, [item.part])
        return group

    def _group_for(self, item: ReadItem) -> _Group:
        """The group that what the model did is of."""
        if item.by in self._programs:
            return self._programs[item.by]
        group = self._open
        if group is None or not _goes_on(group, item):
            group = _Group([], _silent())
        elif not group.is_answered:
            return group
        else:
            group = _Group([], {**_silent(), **SEAL}, binds=True, reasons=group.reasons, is_made=True, follows=True)
        self._opened(group, is_open=True)
        return group

    def _of_program(self, group: _Group, item: ReadItem) -> None:
        group.is_made = True
        if item.by not in self._programs:
            # The provider keeps the program, and goes on with it.
            self.alone.append(group)
        if item.kind == "call":
            self._coded.add(item.call_id)

    def _join(self, group: _Group, place: int, parts: Sequence[Any], calls: Sequence[Any] = ()) -> None:
        group.places.append(place)
        if isinstance(group.message, dict):
            group.message["content"].extend(parts)
            group.message["tool_calls"].extend(calls)

    def _result(self, place: int, item: ReadItem) -> None:
        caller, call_id = self._callers.get(item.call_id, (None, ""))
        message = item.message
        if caller is not None and call_id != item.call_id:
            message = ChatMessage.of(encode({**decode(message.raw), "tool_call_id": call_id}))
        if item.by or call_id in self._coded:
            message = ChatMessage.of(sealed(message.raw))
        result = _Group([place], message)
        if caller is None:
            self._alone(result)
            return
        caller.results.append(result)
        caller.is_answered = True
        self.last.append(result)


def _tools(items: Sequence[ReadItem], places: Sequence[int]) -> tuple[list[Name], list[Name]]:
    """The tools that some items load, and those that they call."""
    mine = [items[place] for place in places]
    return [name for one in mine for name in one.loads], [name for one in mine for name in one.calls]


def _goes_on(group: _Group, item: ReadItem) -> bool:
    """Whether what the model did belongs to what it did before.

    Clients may put each result directly behind its call. What stands behind results may then have come of the reasoning
    before them, and a provider that knows it refuses it without that.
    """
    if item.kind == "call":
        return not group.is_answered or (group.binds and item.id != "")
    if group.reasons and not item.is_reasoning:
        return not group.is_answered or item.id != ""
    # Reasoning behind calls is that of the next answer.
    return not (group.is_answered or group.follows or _calls_of(group))


def _calls_of(group: _Group) -> bool:
    return isinstance(group.message, dict) and bool(group.message["tool_calls"])


def _called(original: bytes, item: ReadItem, call: Mapping[str, Any]) -> bytes:
    """A call with the arguments that it has in a chat message."""
    arguments = call["function"]["arguments"]
    if item.part is not None and item.part["function"]["arguments"] == arguments:
        return original
    is_text = isinstance(decode(original).get("arguments"), str)
    return object_of(
        fields_of(original) | ({"arguments": encode(arguments)} if is_text else fields_of(arguments.encode()))
    )


def _silent() -> dict[str, Any]:
    """An assistant's message of which nothing is known yet."""
    return {"role": "assistant", "content": [], "tool_calls": []}


def _is_sealed(group: _Group) -> bool:
    return isinstance(group.message, dict) and SEAL.keys() <= group.message.keys()


def _messages(groups: Sequence[_Group], original: Hashed, book: ElementCache | None) -> list[ChatMessage]:
    """The message of each group; one of several items is written once for all that it is made of."""
    joined = [group for group in groups if isinstance(group.message, dict)]

    def compute(missing: Sequence[int]) -> Iterator[ChatMessage]:
        return (ChatMessage.of(joined[number].written()) for number in missing)

    if book is None:
        written = iter([*compute(range(len(joined)))])
    else:
        # What stands before a group may have sealed it.
        names = [(_is_sealed(group), *(original.digests[at] for at in group.places)) for group in joined]
        written = iter(book.get_keyed("joined items", names, compute, lambda one: MESSAGE_BYTES + len(one.raw)))
    return [group.message if isinstance(group.message, ChatMessage) else next(written) for group in groups]


def _named(part: Any, name: str) -> Any:
    """A part as this format writes it: a `text` under this name, all else as it is."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return part
    return {**part, "type": name, **({"annotations": []} if name == "output_text" else {})}
