"""The last look at the elements of a changed request: would the provider of this format take them?

What is checked is the format's own grammar, read off the bytes to be sent, independently of how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.message import Hashed, hashed, read
from gateway.core.views.view import Book, entries


def new_faults(
    wire: Wire, before: Sequence[bytes] | Hashed, after: Sequence[bytes] | Hashed, book: Book | None = None
) -> list[str]:
    """What a provider would refuse in the elements `after`, and not in those that came; empty where nothing.

    `book`: remembers of each element what matters here.
    """
    if wire not in _CHECKS:
        return []
    check, bare = _CHECKS[wire]
    came, sent = hashed(before), hashed(after)
    may_think = wire == "messages" and any(b"thinking" in raw for raw in came.raws)

    def all_of(some: Hashed) -> Counter[str]:
        found = entries(f"bare {wire}", some, book, lambda raw: (bare(read(raw)[0]),), _size, marks=False)
        elements = [one for (one,) in found]
        # Whether thinking is on, and must be there, is not said in the messages.
        return Counter([*check(elements), *(_thinking(elements) if may_think else ())])

    found = all_of(sent)
    return [*(found - all_of(came))] if found else []


def _messages(elements: Sequence[Any]) -> Iterator[str]:
    """Messages: it begins with the user, and all that must stand beside something else does."""
    yield from _misplaced(elements)
    yield from _in_turns(elements)
    yield from _served([block for _, blocks in _turns(elements) for block in blocks])


def _misplaced(elements: Sequence[Any]) -> Iterator[str]:
    """System messages anywhere but behind the user's, and before the assistant's or at the end."""
    roles = [element.get("role") if isinstance(element, dict) else None for element in elements]
    for before, role, behind in zip([None, *roles], roles, [*roles[1:], "assistant"], strict=False):
        if role == "system" and (before, behind) != ("user", "assistant"):
            yield "a system message in another place"


def _thinking(elements: Sequence[Any]) -> Iterator[str]:
    """The assistant's last turn, all it said since the user's last words, begins with thinking, if there is one.

    So does each part of it that has a message with thinking at its beginning: neighbours of one role are read as one.
    """
    messages = [element for element in elements if isinstance(element, dict)]
    words = max((place for place, message in enumerate(messages) if _has_words(message)), default=-1)
    last = messages[words + 1 :]
    said = [_begins_with_thinking(message) if message.get("role") == "assistant" else None for message in last]
    if next((one for one in said if one is not None), True) is False:
        yield "the last turn does not begin with thinking"
    elif (False, True) in pairwise(said):
        yield "words before the thinking of a turn"


def _begins_with_thinking(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    first = next(iter(content), None) if isinstance(content, list) else None
    return _type_of(first) in ("thinking", "redacted_thinking")


def _has_words(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    is_results = isinstance(content, list) and all(_type_of(block) == "tool_result" for block in content)
    return message.get("role") == "user" and not is_results


def _type_of(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _in_turns(elements: Sequence[Any]) -> Iterator[str]:
    """It begins with the user, and each call is answered in the user's very next words."""
    turns = list(_turns(elements))
    if not turns or turns[0][0] != "user":
        yield "the first message is not the user's"
    waiting: list[str] = []
    for role, blocks in turns:
        answers = _ids(blocks, "tool_result", "tool_use_id")
        if answers != waiting:
            yield from (f"result of {one} without its call" for one in Counter(answers) - Counter(waiting))
            yield from (f"call {one} without its result" for one in Counter(waiting) - Counter(answers))
        waiting = _ids(blocks, "tool_use", "id") if role == "assistant" else []
        if not blocks:
            yield f"a message ({role}) without content"
        yield from ("a text block without text" for block in blocks if _is_blank(block))
    yield from (f"call {one} without its result" for one in dict.fromkeys(waiting))


def _served(blocks: Sequence[Any]) -> Iterator[str]:
    """What a server is asked stands before what it answers, and before what it calls for; and it is answered."""
    asked: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for block in blocks:
        kind = str(_type_of(block))
        if kind in ("server_tool_use", "mcp_tool_use"):
            asked[str(block.get("id"))] += 1
        elif kind.endswith("_tool_result"):
            answered[str(block.get("tool_use_id"))] += 1
            if answered[str(block.get("tool_use_id"))] > asked[str(block.get("tool_use_id"))]:
                yield f"result of {block.get('tool_use_id')} without its call"
        caller = block.get("caller") if isinstance(block, dict) else None
        if isinstance(caller, dict) and "tool_id" in caller and str(caller["tool_id"]) not in asked:
            yield f"{kind} without {caller['tool_id']}, which called for it"
    yield from (f"call {one} without its result" for one in (asked - answered).elements())


def _turns(elements: Sequence[Any]) -> Iterator[tuple[object, list[Any]]]:
    """Neighbours of one role are read as one."""
    role: object = None
    blocks: list[Any] = []
    for element in elements:
        message: Mapping[str, Any] = element if isinstance(element, dict) else {}
        if blocks and message.get("role") != role:
            yield role, blocks
            blocks = []
        role, content = message.get("role"), message.get("content")
        blocks.extend(content if isinstance(content, list) else [{"type": "text", "text": content}])
    if elements:
        yield role, blocks


def _ids(blocks: Sequence[Any], kind: str, name: str) -> list[str]:
    return [str(block.get(name)) for block in blocks if isinstance(block, dict) and block.get("type") == kind]


def _is_blank(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and not str(block.get("text") or "").strip()


def _responses(elements: Sequence[Any]) -> Iterator[str]:
    """Responses: a call and its result need each other, and reasoning what came of it."""
    nothing: Mapping[str, Any] = {}
    items = [element if isinstance(element, dict) else nothing for element in elements]
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
    for item, following in zip_longest(items, items[1:], fillvalue=nothing):
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

_BLOCK_FIELDS: Final = ("type", "id", "tool_use_id")
_ITEM_FIELDS: Final = ("type", "id", "call_id", "role")
_CALLER_FIELDS: Final = ("tool_id", "caller_id")
#: bytes that an element takes, and each of its blocks, beside their texts
_BARE_BYTES: Final = 500


def _bare_message(element: Any) -> Any:
    if not isinstance(element, dict):
        return None
    content = element.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return {"role": element.get("role"), "content": [_bare_block(block) for block in blocks]}


def _bare_block(block: Any) -> Any:
    if not isinstance(block, dict):
        return None
    bare = _bare(block, _BLOCK_FIELDS)
    return bare if _is_blank(block) else {**bare, "text": "…"}


def _bare_item(item: Any) -> Any:
    return _bare(item, _ITEM_FIELDS) if isinstance(item, dict) else None


def _bare(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    bare = {name: found[name] for name in names if name in found}
    caller = found.get("caller")
    if isinstance(caller, dict):
        bare["caller"] = {name: str(caller[name]) for name in _CALLER_FIELDS if name in caller}
    return bare


def _size(found: tuple[Any]) -> int:
    element = found[0] if isinstance(found[0], dict) else {}
    parts = [element, *filter(None, element.get("content", ()))]
    texts = sum(len(str(value)) for part in parts for name, value in part.items() if name != "content")
    return _BARE_BYTES * len(parts) + texts


_CHECKS: Final[Mapping[Wire, tuple[Callable[[Sequence[Any]], Iterator[str]], Callable[[Any], Any]]]] = {
    "messages": (_messages, _bare_message),
    "responses": (_responses, _bare_item),
}
