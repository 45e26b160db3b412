"""Check that a provider would accept the elements of a changed request.

What is checked is the format's own grammar, read off the bytes to be sent, independently of how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import Hashed, decode, hashed, read
from gateway.core.counting.measure import Wire
from gateway.core.views.view import ElementCache, entries

_NOTHING: Final[Mapping[str, Any]] = {}


def new_faults(
    wire: Wire, before: Sequence[bytes] | Hashed, after: Sequence[bytes] | Hashed, book: ElementCache | None = None
) -> list[str]:
    """What a provider would refuse in the elements `after`, and not in those that came; empty where nothing.

    `book`: remembers of each element what matters here.
    """
    if wire not in _CHECKS:
        return []
    check, bare, size = _CHECKS[wire]
    original, sent = hashed(before), hashed(after)
    may_think = wire == "messages" and any(b"thinking" in raw for raw in original.raws)

    def all_of(some: Hashed) -> Counter[str]:
        elements = entries(f"bare {wire}", some, book, lambda raw: bare(_value(raw)), size, marks=False)
        # Whether thinking is on, and must be there, is not said in the messages.
        return Counter([*check(elements), *(_thinking(elements) if may_think else ())])

    found = all_of(sent)
    return [*(found - all_of(original))] if found else []


class _Served(NamedTuple):
    """A block that has to do with what runs where the model does, and the ids that it names."""

    kind: str
    asks: str | None
    answers: str | None
    caller: str | None


class _Said(NamedTuple):
    """What of one of Anthropic's Messages matters here: all but its texts.

    `blocks`: how many there are, `blanks` of them texts without text; `calls` and `answers`: ids; `thinks`: it begins
    with thinking; `has_words`: it is the user's, and more than results.
    """

    role: Any
    is_object: bool
    blocks: int
    blanks: int
    calls: tuple[str, ...]
    answers: tuple[str, ...]
    served: tuple[_Served, ...]
    thinks: bool
    has_words: bool


def _value(raw: bytes) -> Any:
    """The value of any bytes; None for what is no JSON."""
    try:
        return decode(raw)
    except (ValueError, RecursionError):
        return read(raw)[0]


def _messages(elements: Sequence[_Said]) -> Iterator[str]:
    """Messages: it begins with the user, and all that must stand beside something else does."""
    yield from _misplaced([element.role for element in elements])
    yield from _in_turns(elements)
    yield from _served([block for element in elements for block in element.served])


def _misplaced(roles: Sequence[Any]) -> Iterator[str]:
    """System messages anywhere but behind the user's, and before the assistant's or at the end."""
    for place, role in enumerate(roles):
        if role == "system":
            behind = roles[place + 1] if place + 1 < len(roles) else "assistant"
            if not place or (roles[place - 1], behind) != ("user", "assistant"):
                yield "a system message in another place"


def _thinking(elements: Sequence[_Said]) -> Iterator[str]:
    """The assistant's last turn, all it said since the user's last words, begins with thinking, if there is one.

    So does each part of it that has a message with thinking at its beginning: neighbours of one role are read as one.
    Whether words beside results begin a turn is said nowhere, so that its beginning is looked at both ways. Words in a
    message of their own are taken to begin one also where a cut leaves them behind results.
    """
    messages = [element for element in elements if element.is_object]
    words = [place for place, message in enumerate(messages) if message.has_words]
    alone = [place for place in words if not messages[place].answers]
    last, longer = (_thinks(messages[max(places, default=-1) + 1 :]) for places in (words, alone))
    if not _begins_well(last):
        yield "the last turn does not begin with thinking"
    elif (False, True) in pairwise(last):
        yield "words before the thinking of a turn"
    if not _begins_well(longer):
        yield "what was said since words that stand alone does not begin with thinking"


def _thinks(messages: Sequence[_Said]) -> Sequence[bool | None]:
    """Of each of the assistant's messages, whether it begins with thinking."""
    return [message.thinks if message.role == "assistant" else None for message in messages]


def _begins_well(thinks: Sequence[bool | None]) -> bool:
    return next((one for one in thinks if one is not None), True)


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _in_turns(elements: Sequence[_Said]) -> Iterator[str]:
    """It begins with the user, and each call is answered in the user's very next words."""
    turns = list(_turns(elements))
    # An empty message of the user counts here, though it is read as a part of the next message.
    if not turns or "user" not in (turns[0].role, elements[0].role):
        yield "the first message is not the user's"
    waiting: tuple[str, ...] = ()
    for turn in turns:
        if turn.answers != waiting:
            yield from (f"result of {one} without its call" for one in Counter(turn.answers) - Counter(waiting))
            yield from (f"call {one} without its result" for one in Counter(waiting) - Counter(turn.answers))
        waiting = turn.calls if turn.role == "assistant" else ()
        if not turn.blocks:
            yield f"a message ({turn.role}) without content"
        yield from ("a text block without text",) * turn.blanks
    yield from (f"call {one} without its result" for one in dict.fromkeys(waiting))


def _turns(elements: Sequence[_Said]) -> Iterator[_Said]:
    """Neighbours of one role are read as one."""
    turn: _Said | None = None
    for one in elements:
        if turn is None or (turn.blocks and one.role != turn.role):
            if turn is not None:
                yield turn
            turn = one
        else:
            turn = one._replace(
                blocks=turn.blocks + one.blocks,
                blanks=turn.blanks + one.blanks,
                calls=turn.calls + one.calls,
                answers=turn.answers + one.answers,
            )
    if turn is not None:
        yield turn


def _served(blocks: Sequence[_Served]) -> Iterator[str]:
    """What a server is asked stands before what it answers, and before what it calls for; and it is answered."""
    asked: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for kind, asks, answers, caller in blocks:
        if asks is not None:
            asked[asks] += 1
        if answers is not None:
            answered[answers] += 1
            if answered[answers] > asked[answers]:
                yield f"result of {answers} without its call"
        if caller is not None and caller not in asked:
            yield f"{kind} without {caller}, which called for it"
    yield from (f"call {one} without its result" for one in (asked - answered).elements())


def _responses(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Responses: a call and its result need each other, and reasoning what came of it."""
    calls = [item for item in items if item.get("type") == "local_shell_call"]
    names = {str(call.get("id")): call.get("call_id") for call in calls}
    called: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for item in items:
        kind, call_id = str(item.get("type", "message")), _call_id(item, names)
        if isinstance(call_id, str):
            (answered if kind.endswith("_output") else called)[call_id] += 1
    yield from (f"call {one} without its result" for one in (called - answered).elements())
    yield from (f"result of {one} without its call" for one in (answered - called).elements())
    yield from _programs(items)
    for item, following in zip_longest(items, items[1:], fillvalue=_NOTHING):
        if _is_reasoning(item) and not _is_made(following):
            yield f"reasoning {item.get('id')} without what came of it"


def _programs(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a program called for stands behind it."""
    known = set[str]()
    for item in items:
        caller = item.get("caller")
        by = str(caller["caller_id"]) if isinstance(caller, dict) and "caller_id" in caller else None
        if item.get("type") == "program":
            known.add(str(item.get("call_id")))
        elif by is not None and by not in known:
            yield f"{item.get('type')} {item.get('call_id')} without {by}, which called for it"


def _call_id(item: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """A local shell's output may be named by an `id` alone: that of its call, or its `call_id`."""
    if item.get("type") == "local_shell_call_output" and item.get("call_id") is None:
        return names.get(str(item.get("id")), item.get("id"))
    return item.get("call_id")


def _is_reasoning(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "reasoning" or (_is_name(item) and str(item["id"]).startswith("rs_"))


def _is_name(item: Mapping[str, Any]) -> bool:
    """Whether it only names an item that the provider keeps."""
    kind = item.get("type")
    return "id" in item and (kind == "item_reference" or (kind is None and "role" not in item))


def _is_made(item: Mapping[str, Any]) -> bool:
    """Whether the model made it, as far as is known."""
    kind = str(item.get("type", "message"))
    return _is_name(item) or item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


# --- what of an element matters here: all but its texts ---------------------------------------------------------------

_ITEM_FIELDS: Final = ("type", "id", "call_id", "role")
_CALLER_FIELDS: Final = ("tool_id", "caller_id")
#: bytes that an element takes beside its texts, and each of its ids
_BARE_BYTES: Final = 500
_NAME_BYTES: Final = 100


def _said(message: Any) -> _Said:
    element: Mapping[str, Any] = message if isinstance(message, dict) else {}
    role, content = element.get("role"), element.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    types = [_type_of(block) for block in blocks]
    return _Said(
        role=role,
        is_object=isinstance(message, dict),
        blocks=len(blocks),
        blanks=sum(map(_is_blank, blocks)),
        calls=_ids(blocks, "tool_use", "id"),
        answers=_ids(blocks, "tool_result", "tool_use_id"),
        served=tuple(one for one in map(_of_server, blocks) if (one.asks, one.answers, one.caller) != _NO_IDS),
        thinks=isinstance(content, list) and types[:1] in (["thinking"], ["redacted_thinking"]),
        has_words=role == "user" and not (isinstance(content, list) and all(one == "tool_result" for one in types)),
    )


_NO_IDS: Final = (None, None, None)


def _of_server(block: Any) -> _Served:
    kind, caller = str(_type_of(block)), block.get("caller") if isinstance(block, dict) else None
    return _Served(
        kind,
        str(block.get("id")) if kind in ("server_tool_use", "mcp_tool_use") else None,
        str(block.get("tool_use_id")) if kind.endswith("_tool_result") else None,
        str(caller["tool_id"]) if isinstance(caller, dict) and "tool_id" in caller else None,
    )


def _ids(blocks: Sequence[Any], kind: str, name: str) -> tuple[str, ...]:
    return tuple(str(block.get(name)) for block in blocks if _type_of(block) == kind)


def _is_blank(block: Any) -> bool:
    return _type_of(block) == "text" and not str(block.get("text") or "").strip()


def _size_of_said(said: _Said) -> int:
    names = [*said.calls, *said.answers, *(str(name) for one in said.served for name in one)]
    return _BARE_BYTES + len(str(said.role)) + sum(_NAME_BYTES + len(name) for name in names)


def _bare(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        return _NOTHING
    bare = {name: item[name] for name in _ITEM_FIELDS if name in item}
    caller = item.get("caller")
    if isinstance(caller, dict):
        bare["caller"] = {name: str(caller[name]) for name in _CALLER_FIELDS if name in caller}
    return bare


def _size_of_bare(item: Mapping[str, Any]) -> int:
    return _BARE_BYTES + sum(len(str(value)) for value in item.values())


_CHECKS: Final[
    Mapping[Wire, tuple[Callable[[Sequence[Any]], Iterator[str]], Callable[[Any], Any], Callable[[Any], int]]]
] = {
    "messages": (_messages, _said, _size_of_said),
    "responses": (_responses, _bare, _size_of_bare),
}
