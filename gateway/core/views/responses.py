"""The input items of a Responses request as chat messages.

Calls that were made together become one message with what was said directly before them, as in a chat request, and
their results follow it, wherever they stand among the items. What a model reasoned or did by itself is bound to what
came of it: a provider refuses one without the other, also where the reasoning is only named. So is a program to the
calls that it made, whose results it reads as they came. All else that is only named, items that nobody here knows, and
results whose call the provider keeps, are held.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gateway.core.counting.parts import COMPACTIONS
from gateway.core.message import Hashed, decode, encode, is_plain_text, key_of, read, text_parts
from gateway.core.views.raw import compact, fields_of, items_of, list_of, object_of
from gateway.core.views.view import SEAL, Book, Changes, View, as_came, entries, opaque, said, says_nothing, sealed

#: A tuple and no set: what is looked up in it may be any JSON, which cannot always be hashed.
_SPEAKERS = ("user", "system", "developer")
#: made by the model, answered by the client
_CALLS = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "shell_call", "apply_patch_call"),
        "tool_search_call",
    }
)
#: made by the model, and answered where it runs
_DEEDS = frozenset(
    {
        *("reasoning", "web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output", "program", "program_output"),
    }
)
_OUTPUT = "_output"
#: code that runs where the model does and makes calls
_PROGRAM = "program"
_RESULTS = frozenset({*(f"{call}{_OUTPUT}" for call in _CALLS), "tool_search_output"})
#: its output is written as JSON, and must stay that
_JSON_OUTPUT = f"local_shell_call{_OUTPUT}"
#: what ids of reasoning begin with
_REASONING_ID = "rs_"
#: bytes that a message takes beside its own
_MESSAGE_BYTES: Final = 300

#: the field of an item that rules may change, by what the item is
_CHANGED: Final = {"result": "output", "said": "content"}
#: calls whose arguments are any text or JSON; those of the others have a form of their own
_FREE: Final = frozenset({"function_call", "custom_tool_call"})


class _Message(NamedTuple):
    """A chat message; see `key_of`."""

    raw: bytes
    key: bytes
    is_marked: bool

    @classmethod
    def of(cls, raw: bytes) -> _Message:
        """With its hash."""
        return cls(raw, *key_of(raw))


_NO_MESSAGE: Final = _Message(b"", b"", is_marked=False)


class _Read(NamedTuple):
    """One item. `message`: where it is one by itself; `part`: a call, or a part of what the model said."""

    kind: str
    message: _Message = _NO_MESSAGE
    part: dict[str, Any] | None = None
    call_id: str = ""
    role: str = ""
    #: the item's own id, where the model made it: by this the provider knows of which reasoning it came
    id: str = ""
    is_reasoning: bool = False
    #: `call_id` of the program that it is, and of the program that it belongs to; empty for none
    program: str = ""
    by: str = ""
    #: words of the assistant's that can be cut
    is_plain: bool = False
    #: a call that cannot be
    is_fixed: bool = False


@dataclass(slots=True)
class _Group:
    """Items that become one message."""

    places: list[int]
    message: dict[str, Any] | _Message
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
    results: list[_Group] = field(default_factory=list)

    def written(self) -> bytes:
        """Its message."""
        message = self.message
        if isinstance(message, _Message):
            return message.raw
        if self.words:
            # The words are not read again: only what they came with is put behind them.
            more = encode({name: value for name, value in message.items() if value and name != "role"})
            return self.words.rstrip()[:-1] + b"," + more[1:]
        return encode({name: value for name, value in message.items() if value or name == "role"})


class ResponsesView(View):
    """The `input` of a Responses request, where it is an array."""

    array = "input"

    def __init__(self, came: Hashed, book: Book | None = None) -> None:
        grouping = _Grouping()
        for place, item in enumerate(entries("responses", came, book, _read, _size)):
            grouping.add(place, item)
        # A message of several items keeps them all; those at the end of the input must stay as they came.
        groups = [one for group in grouping.groups for one in (group, *group.results)]
        kept = {id(group) for group in (*grouping.alone, *grouping.last)}
        old = {id(group) for group in grouping.stale()}
        self._bound = {index for index, group in enumerate(groups) if group.binds}
        messages = _messages(groups, came, book)
        super().__init__(
            came,
            Hashed(
                [one.raw for one in messages],
                [one.key for one in messages],
                marked=[index for index, one in enumerate(messages) if one.is_marked],
            ),
            [group.places for group in groups],
            held=[index for index, group in enumerate(groups) if id(group) in kept],
            stale=[index for index, group in enumerate(groups) if id(group) in old],
            book=book,
        )

    def _changed(self, element: int, forms: Changes) -> bytes | None:
        came = self.elements[element]
        index, form = next((index, form) for index, form in forms.items() if form is not None)
        if index in self._bound:
            return came  # reasoning and what came of it stand as they came or not at all
        item, now, was = decode(came), decode(form), decode(self.messages[index])
        kind = _kind(item)
        if kind == "call":
            number = self.places[index].index(element) - len(self.places[index])
            return _called(came, item, now["tool_calls"][number]) if now.get("tool_calls") else came
        name, content = _CHANGED.get(kind), now.get("content")
        if name is None or content == was.get("content"):
            return came
        if kind == "said" and was.get("tool_calls") and says_nothing(content):
            return None
        fields = fields_of(came)
        if isinstance(content, str):
            return object_of({**fields, name: encode(content)})
        text = "output_text" if item.get("role") == "assistant" else "input_text"
        parts = as_came(content or (), items_of(fields[name]), lambda part: encode(_named(part, text)))
        return object_of({**fields, name: list_of(parts)})

    def _trait(self, index: int) -> Hashable:
        return index in self._bound

    def _added(self, message: Mapping[str, Any], element: int) -> bytes:
        del element  # it may stand anywhere
        return encode({"role": "assistant", "content": message["content"]})


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
        for group in self.groups:
            unit = (group, *group.results)
            if all(one.places[-1] < place for one in unit):
                yield from unit

    def add(self, place: int, item: _Read) -> None:
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
            # It may have come of the item that was only named: the provider alone knows.
            self.alone.append(group)
        elif item.is_plain and self._open is None:
            self._words = group

    def _goes_with(self, words: _Group) -> None:
        """Let the calls that follow be of one message with what was said before them."""
        if isinstance(words.message, _Message):
            words.words, words.message = words.message.raw, _silent()
            self._open = words

    def _made(self, place: int, item: _Read) -> _Group:
        if item.kind == "said":
            return self._said(place, item)
        return self._stands(place, item) if item.kind == "compact" else self._did(place, item)

    def _alone(self, group: _Group) -> None:
        if self._open is not None and self._open.binds and not self._open.is_made:
            # This may be what came of it: nobody here knows.
            self.alone.append(self._open)
        self.alone.append(group)
        self._opened(group, is_open=False)

    def _stands(self, place: int, item: _Read) -> _Group:
        if self._compact is not None:
            self.alone.remove(self._compact)
        self._compact = group = _Group([place], item.message)
        self.alone.append(group)
        self._opened(group, is_open=False)
        return group

    def _opened(self, group: _Group, *, is_open: bool) -> None:
        self.groups.append(group)
        self._open = group if is_open else None

    def _said(self, place: int, item: _Read) -> _Group:
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

    def _did(self, place: int, item: _Read) -> _Group:
        group = self._programs.get(item.by, self._open)
        if group is None or (item.by not in self._programs and not _goes_on(group, item)):
            group = _Group([], _silent())
            self._opened(group, is_open=True)
        if item.by:
            self._of_program(group, item)
        if item.program:
            self._programs[item.program] = group
        if item.kind == "call":
            # OpenAI's own types name a local shell's output by an id alone, and leave open which.
            self._callers.update({name: (group, item.call_id) for name in (item.id, item.call_id) if name})
            group.is_made = True
            self._join(group, place, [], [item.part])
            if item.is_fixed and isinstance(group.message, dict):
                group.message |= SEAL
        else:
            group.binds, group.reasons = True, group.reasons or item.is_reasoning
            self._join(group, place, [item.part])
        return group

    def _of_program(self, group: _Group, item: _Read) -> None:
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

    def _result(self, place: int, item: _Read) -> None:
        caller, call_id = self._callers.get(item.call_id, (None, ""))
        message = item.message
        if caller is not None and call_id != item.call_id:
            message = _Message.of(encode({**decode(message.raw), "tool_call_id": call_id}))
        if item.by or call_id in self._coded:
            message = _Message.of(sealed(message.raw))
        result = _Group([place], message)
        if caller is None:
            self._alone(result)
            return
        caller.results.append(result)
        caller.is_answered = True
        self.last.append(result)


def _read(raw: bytes) -> _Read:
    item, is_odd = read(raw)
    kind = _kind(item)
    # A text alone is read as it stands; what is odd in it seals it there.
    if kind == "" or (is_odd and not (kind == "said" and isinstance(item["content"], str))):
        return _Read("named" if _is_name(item) else "", _Message.of(opaque(raw)))
    if kind == "compact":
        return _Read(kind, _Message.of(encode({"role": "assistant", "content": [item]})))
    if kind == "said":
        content = item["content"]
        parts = [] if isinstance(content, str) else said(content)
        message = raw if isinstance(content, str) else encode({**item, "content": parts})
        is_plain = item["role"] == "assistant" and not is_odd and all(map(is_plain_text, parts))
        return _Read(kind, _Message.of(message), role=item["role"], is_plain=is_plain)
    program, by = _program(item)
    if kind == "deed":
        is_reasoning = _is_name(item) or item["type"] == "reasoning"
        return _Read(kind, part=_deed(item), id=_id(item), is_reasoning=is_reasoning, program=program, by=by)
    call_id = _call_id(item)
    if kind == "call":
        is_fixed = item["type"] not in _FREE
        return _Read(kind, part=_call(item, raw), call_id=call_id, id=_id(item), by=by, is_fixed=is_fixed)
    message = encode({"role": "tool", "tool_call_id": call_id, "content": _output(item)})
    return _Read(kind, _Message.of(message), call_id=call_id, by=by)


def _id(item: Mapping[str, Any]) -> str:
    return str(item.get("id") or "")


def _program(item: Mapping[str, Any]) -> tuple[str, str]:
    """The program that an item is, and the one that it belongs to."""
    kind, caller = item.get("type"), item.get("caller")
    if kind == _PROGRAM:
        return str(item.get("call_id") or ""), ""
    if kind == f"{_PROGRAM}{_OUTPUT}":
        return "", str(item.get("call_id") or "")
    return "", str(caller.get("caller_id") or "") if isinstance(caller, dict) else ""


def _size(found: _Read) -> int:
    return _MESSAGE_BYTES + len(found.message.raw) + (len(encode(found.part)) if found.part is not None else 0)


def _kind(item: Any) -> str:
    """`said`, `call`, `result`, `deed`, `compact`; empty for what is none of them."""
    if not isinstance(item, dict):
        return ""
    if _is_name(item):
        return "deed" if item["id"].startswith(_REASONING_ID) else ""
    kind = item.get("type", "message")
    if kind == "message":
        known = item.get("role") in _SPEAKERS or item.get("role") == "assistant"
        return "said" if known and isinstance(item.get("content"), str | list) else ""
    if isinstance(kind, str) and isinstance(_call_id(item), str) and kind in _CALLS | _RESULTS:
        return "call" if kind in _CALLS else "result"
    if not isinstance(kind, str):
        return ""
    return "deed" if kind in _DEEDS else "compact" if kind in COMPACTIONS else ""


def _is_name(item: Any) -> bool:
    """Whether it only names an item that the provider keeps."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item)


def _call_id(item: Mapping[str, Any]) -> Any:
    """The `call_id`; a local shell's output may have an `id` in its place."""
    call_id = item.get("call_id")
    return item.get("id") if call_id is None and item.get("type") == _JSON_OUTPUT else call_id


def _goes_on(group: _Group, item: _Read) -> bool:
    """Whether what the model did belongs to what it did before.

    Clients may put each result directly behind its call. What stands behind results may then have come of the reasoning
    before them, and a provider that knows it refuses it without that.
    """
    if item.kind == "call":
        return not group.is_answered or (group.binds and item.id != "")
    if group.reasons and not item.is_reasoning:
        return not group.is_answered or item.id != ""
    # Reasoning behind calls is that of the next answer.
    return not group.is_answered and not _calls_of(group)


def _calls_of(group: _Group) -> bool:
    return isinstance(group.message, dict) and bool(group.message["tool_calls"])


def _called(came: bytes, item: Mapping[str, Any], call: Mapping[str, Any]) -> bytes:
    """A call with the arguments that it has in a chat message."""
    arguments = call["function"]["arguments"]
    if _arguments(item, came) == arguments:
        return came
    is_text = isinstance(item.get("arguments"), str)
    return object_of(fields_of(came) | ({"arguments": encode(arguments)} if is_text else fields_of(arguments.encode())))


def _call(item: Mapping[str, Any], raw: bytes) -> dict[str, Any]:
    function = {"name": item.get("name", item["type"]), "arguments": _arguments(item, raw)}
    return {"id": item["call_id"], "type": "function", "function": function}


def _arguments(item: Mapping[str, Any], raw: bytes) -> str:
    if isinstance(item.get("arguments"), str):
        return str(item["arguments"])
    fields = fields_of(raw)
    return compact(object_of({key: fields[key] for key in ("input", "action", "operation") if key in fields}))


def _deed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A part that no rule changes, and that weighs about as much as the item."""
    if item.get("type") != "reasoning":
        return {name: value for name, value in item.items() if name != "status"}
    if item.get("encrypted_content"):
        return {"type": "redacted_thinking", "data": item["encrypted_content"], "id": item.get("id")}
    return {"type": "thinking", "thinking": text_parts(item.get("summary")), "id": item.get("id")}


def _output(item: Mapping[str, Any]) -> Any:
    output = item.get("output")
    if item["type"] == _JSON_OUTPUT:
        return [{"type": _JSON_OUTPUT, "output": output}]
    if isinstance(output, list):
        return said(output)
    if isinstance(output, str):
        return output
    return [{name: value for name, value in item.items() if name not in ("id", "call_id", "status")}]


def _silent() -> dict[str, Any]:
    """An assistant's message of which nothing is known yet."""
    return {"role": "assistant", "content": [], "tool_calls": []}


def _messages(groups: Sequence[_Group], came: Hashed, book: Book | None) -> list[_Message]:
    """The message of each group; one of several items is written once for all that it is made of."""
    joined = [group for group in groups if isinstance(group.message, dict)]

    def compute(missing: Sequence[int]) -> Iterator[_Message]:
        return (_Message.of(joined[number].written()) for number in missing)

    if book is None:
        written = iter([*compute(range(len(joined)))])
    else:
        names = [tuple([came.digests[place] for place in group.places]) for group in joined]
        written = iter(book.get_keyed("joined items", names, compute, lambda one: _MESSAGE_BYTES + len(one.raw)))
    return [group.message if isinstance(group.message, _Message) else next(written) for group in groups]


def _named(part: Any, name: str) -> Any:
    """A part as this format writes it: a `text` under this name, all else as it is."""
    if not isinstance(part, dict) or part.get("type") != "text":
        return part
    return {**part, "type": name, **({"annotations": []} if name == "output_text" else {})}
