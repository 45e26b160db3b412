"""Check that a provider would accept the elements of a changed request.

It checks the grammar of the wire format on the bytes to be sent, independently of the code that wrote them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import Hashed, decode, hashed, parse_bytes
from gateway.core.counting.measure import Wire
from gateway.core.views.view import ElementCache, parsed_elements

_NO_ITEM: Final[Mapping[str, Any]] = {}


def new_faults(
    wire: Wire, before: Sequence[bytes] | Hashed, after: Sequence[bytes] | Hashed, cache: ElementCache | None = None
) -> list[str]:
    """Return the faults for which a provider would refuse `after` but not `before`; empty if there are none.

    `cache` caches the facts of each element that the check needs.
    """
    if wire not in _CHECKS:
        return []
    check, read_facts, size = _CHECKS[wire]
    original, sent = hashed(before), hashed(after)
    may_think = wire == "messages" and any(b"thinking" in raw for raw in original.raws)

    def faults_of(elements: Hashed) -> Counter[str]:
        facts = parsed_elements(
            f"bare {wire}", elements, cache, lambda raw: read_facts(_value_of(raw)), size, marks=False
        )
        # The messages do not show whether thinking is on, and so required.
        return Counter([*check(facts), *(_thinking_faults(facts) if may_think else ())])

    faults = faults_of(sent)
    return [*(faults - faults_of(original))] if faults else []


class _ServerBlock(NamedTuple):
    """A block of a tool that the provider runs, and the IDs in it.

    Attributes:
        kind: its type.
        asks: the ID of the call that it makes.
        answers: the ID of the call that it is the result of.
        caller: the ID of the call that made this one.
    """

    kind: str
    asks: str | None
    answers: str | None
    caller: str | None


class _MessageFacts(NamedTuple):
    """The facts of an Anthropic message that the check needs: everything except its texts.

    Attributes:
        role: its role, any JSON value.
        is_object: True if the message is an object.
        blocks: number of blocks.
        blanks: number of text blocks without text.
        calls: IDs of tool calls.
        answers: IDs of calls whose results are in it.
        served: blocks of tools that the provider runs.
        thinks: True if it starts with thinking.
        has_words: True if it is a user message with other blocks than tool results.
    """

    role: Any
    is_object: bool
    blocks: int
    blanks: int
    calls: tuple[str, ...]
    answers: tuple[str, ...]
    served: tuple[_ServerBlock, ...]
    thinks: bool
    has_words: bool


def _value_of(raw: bytes) -> Any:
    """Return the value of any bytes, or None if they are not JSON."""
    try:
        return decode(raw)
    except (ValueError, RecursionError):
        return parse_bytes(raw)[0]


def _messages_faults(elements: Sequence[_MessageFacts]) -> Iterator[str]:
    """Yield the faults of Anthropic messages, except for thinking: order of roles, and calls without results."""
    yield from _system_faults([element.role for element in elements])
    yield from _turn_faults(elements)
    yield from _server_faults([block for element in elements for block in element.served])


def _system_faults(roles: Sequence[Any]) -> Iterator[str]:
    """Yield a fault for each system message that is not between a user message and an assistant message or the end."""
    for place, role in enumerate(roles):
        if role == "system":
            next_role = roles[place + 1] if place + 1 < len(roles) else "assistant"
            if not place or (roles[place - 1], next_role) != ("user", "assistant"):
                yield "a system message in a forbidden place"


def _thinking_faults(elements: Sequence[_MessageFacts]) -> Iterator[str]:
    """Yield faults if the last turn, or a part of it, has thinking but does not start with it.

    The last turn is everything from the assistant since the last words of the user. Consecutive messages of one role
    are read as one. A message that starts with thinking must therefore not follow one without.

    The documentation does not say whether words next to tool results start a turn. So both readings are checked. Words
    in a separate message count as the start of a turn, even if a trim leaves them directly after results.
    """
    messages = [element for element in elements if element.is_object]
    words = [place for place, message in enumerate(messages) if message.has_words]
    separate = [place for place in words if not messages[place].answers]
    since_words, since_separate = (
        _thinking_starts(messages[max(places, default=-1) + 1 :]) for places in (words, separate)
    )
    if not _starts_with_thinking(since_words):
        yield "the last turn does not start with thinking"
    elif (False, True) in pairwise(since_words):
        yield "text before the thinking of a turn"
    if not _starts_with_thinking(since_separate):
        yield "the turn since the last user message without tool results does not start with thinking"


def _thinking_starts(messages: Sequence[_MessageFacts]) -> Sequence[bool | None]:
    """Return for each message whether it starts with thinking; None for messages that are not from the assistant."""
    return [message.thinks if message.role == "assistant" else None for message in messages]


def _starts_with_thinking(thinks: Sequence[bool | None]) -> bool:
    """Return True if the first assistant message starts with thinking, or if there is none."""
    return next((one for one in thinks if one is not None), True)


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _turn_faults(elements: Sequence[_MessageFacts]) -> Iterator[str]:
    """Yield faults if the user is not first, or a call has no result in the user turn that follows it."""
    turns = list(_turns(elements))
    # An empty user message counts as the first message here, although it is read as a part of the next message.
    if not turns or "user" not in (turns[0].role, elements[0].role):
        yield "the first message is not from the user"
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


def _turns(elements: Sequence[_MessageFacts]) -> Iterator[_MessageFacts]:
    """Yield consecutive messages of one role as one turn."""
    turn: _MessageFacts | None = None
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


def _server_faults(blocks: Sequence[_ServerBlock]) -> Iterator[str]:
    """Yield faults in the order of server blocks.

    A call of a server tool must precede its result, and the calls that it made. It must have a result.
    """
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


def _responses_faults(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the faults of Responses items: calls without results, and reasoning without the item that it led to."""
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
    yield from _program_faults(items)
    for item, following in zip_longest(items, items[1:], fillvalue=_NO_ITEM):
        if _is_reasoning(item) and not _is_by_model(following):
            yield f"reasoning {item.get('id')} without the item that follows it"


def _program_faults(items: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a fault for each item of a program that does not follow the program."""
    programs = set[str]()
    for item in items:
        caller = item.get("caller")
        caller_id = str(caller["caller_id"]) if isinstance(caller, dict) and "caller_id" in caller else None
        if item.get("type") == "program":
            programs.add(str(item.get("call_id")))
        elif caller_id is not None and caller_id not in programs:
            yield f"{item.get('type')} {item.get('call_id')} without {caller_id}, which called for it"


def _call_id(item: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """Return the call ID of an item.

    The output of a local shell may only have an `id`, which is the `id` or the `call_id` of its call.
    """
    if item.get("type") == "local_shell_call_output" and item.get("call_id") is None:
        return names.get(str(item.get("id")), item.get("id"))
    return item.get("call_id")


def _is_reasoning(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "reasoning" or (_is_reference(item) and str(item["id"]).startswith("rs_"))


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Return True if the item only names an item that the provider stores."""
    kind = item.get("type")
    return "id" in item and (kind == "item_reference" or (kind is None and "role" not in item))


def _is_by_model(item: Mapping[str, Any]) -> bool:
    """Return True if the model made the item, or may have made it."""
    kind = str(item.get("type", "message"))
    return _is_reference(item) or item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


# --- facts of an element: everything except its texts -----------------------------------------------------------------

_ITEM_FIELDS: Final = ("type", "id", "call_id", "role")
_CALLER_FIELDS: Final = ("tool_id", "caller_id")
#: bytes that the facts of an element take, and for each of its IDs
_FACTS_BYTES: Final = 500
_ID_BYTES: Final = 100


def _message_facts(message: Any) -> _MessageFacts:
    element: Mapping[str, Any] = message if isinstance(message, dict) else {}
    role, content = element.get("role"), element.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    types = [_type_of(block) for block in blocks]
    return _MessageFacts(
        role=role,
        is_object=isinstance(message, dict),
        blocks=len(blocks),
        blanks=sum(map(_is_blank, blocks)),
        calls=_ids(blocks, "tool_use", "id"),
        answers=_ids(blocks, "tool_result", "tool_use_id"),
        served=tuple(one for one in map(_server_block, blocks) if (one.asks, one.answers, one.caller) != _NO_IDS),
        thinks=isinstance(content, list) and types[:1] in (["thinking"], ["redacted_thinking"]),
        has_words=role == "user" and not (isinstance(content, list) and all(one == "tool_result" for one in types)),
    )


_NO_IDS: Final = (None, None, None)


def _server_block(block: Any) -> _ServerBlock:
    kind, caller = str(_type_of(block)), block.get("caller") if isinstance(block, dict) else None
    return _ServerBlock(
        kind,
        str(block.get("id")) if kind in ("server_tool_use", "mcp_tool_use") else None,
        str(block.get("tool_use_id")) if kind.endswith("_tool_result") else None,
        str(caller["tool_id"]) if isinstance(caller, dict) and "tool_id" in caller else None,
    )


def _ids(blocks: Sequence[Any], kind: str, name: str) -> tuple[str, ...]:
    return tuple(str(block.get(name)) for block in blocks if _type_of(block) == kind)


def _is_blank(block: Any) -> bool:
    return _type_of(block) == "text" and not str(block.get("text") or "").strip()


def _size_of_message_facts(facts: _MessageFacts) -> int:
    names = [*facts.calls, *facts.answers, *(str(name) for one in facts.served for name in one)]
    return _FACTS_BYTES + len(str(facts.role)) + sum(_ID_BYTES + len(name) for name in names)


def _item_facts(item: Any) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        return _NO_ITEM
    bare = {name: item[name] for name in _ITEM_FIELDS if name in item}
    caller = item.get("caller")
    if isinstance(caller, dict):
        bare["caller"] = {name: str(caller[name]) for name in _CALLER_FIELDS if name in caller}
    return bare


def _size_of_item_facts(item: Mapping[str, Any]) -> int:
    return _FACTS_BYTES + sum(len(str(value)) for value in item.values())


_CHECKS: Final[
    Mapping[Wire, tuple[Callable[[Sequence[Any]], Iterator[str]], Callable[[Any], Any], Callable[[Any], int]]]
] = {
    "messages": (_messages_faults, _message_facts, _size_of_message_facts),
    "responses": (_responses_faults, _item_facts, _size_of_item_facts),
}
