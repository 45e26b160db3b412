"""Convert the input items of a Responses request to chat messages, and apply changes to them.

- Calls that were made together become one message, with the text that directly precedes them. Their results follow this
  message, even if other items are between them.
- Reasoning and other items of the model stay with the items that they led to, because a provider refuses one without
  the other. This also holds for reasoning that is only referenced by its ID.
- A program stays with the calls that it made. It reads their results, so these are never changed.
- Other references, items of unknown types, and results whose call the provider stores are always kept unchanged.

Items that came from one reasoning, with results between them, are kept or dropped together as well. But each response
of the model becomes a separate message, so that the existing messages do not change while an agent's run continues.
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
    MessageMarks,
    View,
    hashed_messages,
    is_empty_content,
    loaders,
    parsed_elements,
    parts_as_bytes,
    sealed,
)

#: the field of an item that rules may change, by the kind of the item
_CHANGED: Final = {"result": "output", "said": "content"}

#: the field in which a model marks a message as the final response or as part of its work
_PHASE: Final = b'"phase"'

#: a message in its new and its original form
_Form = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(slots=True)
class _Group:
    """A group of items that becomes one message."""

    places: list[int]
    message: dict[str, Any] | ChatMessage
    #: the text message directly before its calls
    words: bytes = b""
    #: True if it has reasoning or other model items, so that the items after them belong to it
    binds: bool = False
    #: True if it has reasoning
    reasons: bool = False
    #: True if the group has an item that came from that reasoning or those model items
    has_product: bool = False
    #: True if results of its calls follow, so that no more items belong to it
    is_answered: bool = False
    #: True if it came from the same reasoning as the group before it
    follows: bool = False
    results: list[_Group] = field(default_factory=list)

    def written(self) -> bytes:
        """Return the message of the group as bytes."""
        message = self.message
        if isinstance(message, ChatMessage):
            return message.raw
        if self.words:
            # The text message is not decoded again; the other fields are appended to its bytes.
            more = encode({name: value for name, value in message.items() if value and name != "role"})
            return self.words.rstrip()[:-1] + b"," + more[1:]
        return encode({name: value for name, value in message.items() if value or name == "role"})


class ResponsesView(View):
    """The `input` of a Responses request, if it is an array."""

    array = "input"

    def __init__(self, original: Hashed, cache: ElementCache | None = None) -> None:
        grouping, items = _Grouping(), parsed_elements("responses", original, cache, read_item, size_of)
        for place, item in enumerate(items):
            grouping.add(place, item)
        # Each message keeps all its items. Results at the end of the input must stay unchanged.
        groups = [one for group in grouping.groups for one in (group, *group.results)]
        kept_ids = {id(group) for group in (*grouping.kept, *grouping.last)}
        stale_ids = {id(group) for group in grouping.stale()}
        self._bound = {index for index, group in enumerate(groups) if group.binds}
        self._items = items
        #: The last new form of each message, encoded and decoded, because several items may share one message.
        self._forms: dict[int, tuple[bytes, _Form]] = {}
        marks = MessageMarks(
            held=frozenset(index for index, group in enumerate(groups) if id(group) in kept_ids),
            stale=frozenset(index for index, group in enumerate(groups) if id(group) in stale_ids),
            needed=frozenset(
                loaders(_tools(items, group.places) for group in groups) if any(one.loads for one in items) else ()
            ),
            following=frozenset(index for index, group in enumerate(groups) if group.follows),
        )
        super().__init__(
            original,
            hashed_messages(_messages_of(groups, original, cache)),
            [group.places for group in groups],
            marks,
            cache,
        )

    def _changed(self, element: int, forms: Changes) -> bytes | None:
        original = self.elements[element]
        index, form = next((index, form) for index, form in forms.items() if form is not None)
        if index in self._bound:
            return original  # reasoning and the items that it led to are only sent unchanged
        item, (new, old) = self._items[element], self._decoded_form(index, form)
        if item.kind == "call":
            number = self.places[index].index(element) - len(self.places[index])
            return _with_arguments(original, item, new["tool_calls"][number]) if new.get("tool_calls") else original
        name, content = _CHANGED.get(item.kind), new.get("content")
        if name is None or content == old.get("content"):
            return original
        if item.kind == "said" and old.get("tool_calls") and is_empty_content(content):
            return None
        fields = fields_of(original)
        if isinstance(content, str):
            return object_of({**fields, name: encode(content)})
        text = "output_text" if item.role == "assistant" else "input_text"
        parts = parts_as_bytes(content or (), items_of(fields[name]), lambda part: encode(_input_part(part, text)))
        return object_of({**fields, name: list_of(parts)})

    def _decoded_form(self, index: int, form: bytes) -> _Form:
        """Return the new and the original form of a message, decoded."""
        raw, forms = self._forms.get(index, (b"", None))
        if forms is None or raw is not form:
            forms = decode(form), decode(self.messages[index])
            self._forms[index] = form, forms
        return forms

    def _extra_key(self, index: int) -> Hashable:
        return index in self._bound

    def _new_element(self, message: Mapping[str, Any], element: int) -> bytes:
        del element  # the text may be at any position
        # A model that writes phases treats a message without a phase as another final response.
        pairs = zip(self._items, self.elements, strict=True)
        has_phases = any(item.role == "assistant" and _PHASE in raw for item, raw in pairs)
        phase = {"phase": "commentary"} if has_phases else {}
        return encode({"role": "assistant", "content": message["content"], **phase})


class _Grouping:
    """Group items, from the first to the last."""

    def __init__(self) -> None:
        self.groups: list[_Group] = []
        #: the results at the end of the input so far
        self.last: list[_Group] = []
        #: groups that cannot be dropped
        self.kept: list[_Group] = []
        self._open: _Group | None = None
        #: `id` and `call_id` of a call -> the group of the call, and its `call_id`
        self._callers: dict[str, tuple[_Group, str]] = {}
        #: `call_id` of a program -> the group that it is in
        self._programs: dict[str, _Group] = {}
        #: `call_id` of each call that a program made
        self._coded: set[str] = set()
        #: the last compaction, which replaces everything before it
        self._compact: _Group | None = None
        #: True if the previous item is a reference to an item that the provider stores, or cannot be parsed
        self._is_after_name = False
        #: the previous item if it is a text to which following calls belong
        self._words: _Group | None = None

    def stale(self) -> Iterator[_Group]:
        """Yield the groups that the last compaction replaces: those without any part after it."""
        if self._compact is None:
            return
        place = self._compact.places[0]
        for unit in self._units():
            if all(one.places[-1] < place for one in unit):
                yield from unit

    def _units(self) -> Sequence[Sequence[_Group]]:
        """Return the groups that are kept or dropped together."""
        units: list[list[_Group]] = []
        for group in self.groups:
            if not group.follows:
                units.append([])
            units[-1] += (group, *group.results)
        return units

    def add(self, place: int, item: ReadItem) -> None:
        """Add the next item."""
        was_after_name, self._is_after_name = self._is_after_name, item.kind == "named"
        words, self._words = self._words, None
        if item.kind == "result":
            self._add_result(place, item)
            return
        self.last = []
        if item.kind in ("", "named"):
            self._add_kept(_Group([place], item.message))
            return
        if words is not None and item.kind == "call" and not item.made_by:
            self._start_calls_after_text(words)
        group = self._add_item(place, item)
        if was_after_name and item.role in ("", "assistant"):
            # It may have come from the previous item, whose content only the provider knows.
            self.kept.append(group)
        elif item.is_plain and self._open is None:
            self._words = group

    def _start_calls_after_text(self, words: _Group) -> None:
        """Put the calls that follow into one message with the text before them."""
        if isinstance(words.message, ChatMessage):
            words.words, words.message = words.message.raw, _empty_message()
            self._open = words

    def _add_item(self, place: int, item: ReadItem) -> _Group:
        if item.kind == "said":
            return self._add_text(place, item)
        return self._add_compaction(place, item) if item.kind == "compact" else self._add_model_item(place, item)

    def _add_kept(self, group: _Group) -> None:
        if self._open is not None and self._open.binds and not self._open.has_product:
            # This item may have come from the open group, but it cannot be parsed.
            self.kept.append(self._open)
        self.kept.append(group)
        self._start_group(group, is_open=False)

    def _add_compaction(self, place: int, item: ReadItem) -> _Group:
        if self._compact is not None:
            self.kept.remove(self._compact)
        self._compact = group = _Group([place], item.message)
        self.kept.append(group)
        self._start_group(group, is_open=False)
        return group

    def _start_group(self, group: _Group, *, is_open: bool) -> None:
        self.groups.append(group)
        self._open = group if is_open else None

    def _add_text(self, place: int, item: ReadItem) -> _Group:
        group = self._open
        if item.role == "assistant" and group is not None and group.binds and not group.is_answered:
            content = decode(item.message.raw)["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            group.has_product = True
            self._append(group, place, parts)
            return group
        group = _Group([place], item.message)
        self._start_group(group, is_open=False)
        return group

    def _add_model_item(self, place: int, item: ReadItem) -> _Group:
        group = self._group_for(item)
        if item.made_by:
            self._link_to_program(group, item)
        if item.program:
            self._programs[item.program] = group
        if item.kind == "call":
            # OpenAI's types identify the output of a local shell by one ID, and do not say which.
            for name in (item.id, item.call_id):
                if name:
                    self._callers[name] = group, item.call_id
            group.has_product = True
            self._append(group, place, [], [item.part])
            if item.is_fixed and isinstance(group.message, dict):
                group.message |= SEAL
        else:
            group.binds, group.reasons = True, group.reasons or item.is_reasoning
            self._append(group, place, [item.part])
        return group

    def _group_for(self, item: ReadItem) -> _Group:
        """Return the group that an item of the model belongs to."""
        if item.made_by in self._programs:
            return self._programs[item.made_by]
        group = self._open
        if group is None or not _continues(group, item):
            group = _Group([], _empty_message())
        elif not group.is_answered:
            return group
        else:
            group = _Group(
                [], {**_empty_message(), **SEAL}, binds=True, reasons=group.reasons, has_product=True, follows=True
            )
        self._start_group(group, is_open=True)
        return group

    def _link_to_program(self, group: _Group, item: ReadItem) -> None:
        group.has_product = True
        if item.made_by not in self._programs:
            # The provider stores the program, and continues it.
            self.kept.append(group)
        if item.kind == "call":
            self._coded.add(item.call_id)

    def _append(self, group: _Group, place: int, parts: Sequence[Any], calls: Sequence[Any] = ()) -> None:
        group.places.append(place)
        if isinstance(group.message, dict):
            group.message["content"].extend(parts)
            group.message["tool_calls"].extend(calls)

    def _add_result(self, place: int, item: ReadItem) -> None:
        caller, call_id = self._callers.get(item.call_id, (None, ""))
        message = item.message
        if caller is not None and call_id != item.call_id:
            message = ChatMessage.of(encode({**decode(message.raw), "tool_call_id": call_id}))
        if item.made_by or call_id in self._coded:
            message = ChatMessage.of(sealed(message.raw))
        result = _Group([place], message)
        if caller is None:
            self._add_kept(result)
            return
        caller.results.append(result)
        caller.is_answered = True
        self.last.append(result)


def _tools(items: Sequence[ReadItem], places: Sequence[int]) -> tuple[list[Name], list[Name]]:
    """Return the tools that these items load, and the tools that they call."""
    group_items = [items[place] for place in places]
    return [name for one in group_items for name in one.loads], [name for one in group_items for name in one.calls]


def _continues(group: _Group, item: ReadItem) -> bool:
    """Return True if an item of the model belongs to the same group as the previous ones.

    Clients may put each result directly after its call. Then an item after results may have come from the reasoning
    before them. A provider that stores the item refuses it without that reasoning.
    """
    if item.kind == "call":
        return not group.is_answered or (group.binds and item.id != "")
    if group.reasons and not item.is_reasoning:
        return not group.is_answered or item.id != ""
    # Reasoning after calls belongs to the next response.
    return not (group.is_answered or group.follows or _has_calls(group))


def _has_calls(group: _Group) -> bool:
    return isinstance(group.message, dict) and bool(group.message["tool_calls"])


def _with_arguments(original: bytes, item: ReadItem, call: Mapping[str, Any]) -> bytes:
    """Return the bytes of a call with the arguments of its chat message."""
    arguments = call["function"]["arguments"]
    if item.part is not None and item.part["function"]["arguments"] == arguments:
        return original
    is_text = isinstance(decode(original).get("arguments"), str)
    return object_of(
        fields_of(original) | ({"arguments": encode(arguments)} if is_text else fields_of(arguments.encode()))
    )


def _empty_message() -> dict[str, Any]:
    """Return an assistant message without content."""
    return {"role": "assistant", "content": [], "tool_calls": []}


def _is_sealed(group: _Group) -> bool:
    return isinstance(group.message, dict) and SEAL.keys() <= group.message.keys()


def _messages_of(groups: Sequence[_Group], original: Hashed, cache: ElementCache | None) -> list[ChatMessage]:
    """Return the message of each group. A message of several items is encoded once and then cached."""
    joined = [group for group in groups if isinstance(group.message, dict)]

    def compute(missing: Sequence[int]) -> Iterator[ChatMessage]:
        return (ChatMessage.of(joined[number].written()) for number in missing)

    if cache is None:
        written = iter([*compute(range(len(joined)))])
    else:
        # Items before a group may have sealed it.
        names = [(_is_sealed(group), *(original.digests[at] for at in group.places)) for group in joined]
        written = iter(cache.get_many("joined items", names, compute, lambda one: MESSAGE_BYTES + len(one.raw)))
    return [group.message if isinstance(group.message, ChatMessage) else next(written) for group in groups]


def _input_part(part: Any, name: str) -> Any:
    """Return a part as Responses writes it: a text gets the type `name`, other parts stay unchanged."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return part
    return {**part, "type": name, **({"annotations": []} if name == "output_text" else {})}
