"""The last look at the elements of a changed request: would the provider of this format take them?

What is checked is the format's own grammar, read off the bytes to be sent, independently of how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from gateway.core.counting.measure import Wire
from gateway.core.message import read


def new_faults(wire: Wire, before: Sequence[bytes], after: Sequence[bytes]) -> list[str]:
    """What a provider would refuse in the elements `after`, and not in those that came; empty where nothing."""
    check = _CHECKS.get(wire)
    if check is None:
        return []
    now = [read(raw)[0] for raw in after]
    found = Counter(check(now))
    may_lack = wire == "messages" and any(b"thinking" in raw for raw in before) and not _begins_with_thinking(now)
    if not found and not may_lack:
        return []
    was = [read(raw)[0] for raw in before]
    # Whether thinking is on, and must be there, is not said in the messages.
    lacks = ["the last turn does not begin with thinking"] if may_lack and _begins_with_thinking(was) else []
    return [*(found - Counter(check(was))), *lacks]


def _messages(elements: Sequence[Any]) -> Iterator[str]:
    """Messages: it begins with the user, and all that must stand beside something else does."""
    yield from _misplaced(elements)
    yield from _in_turns(elements)


def _misplaced(elements: Sequence[Any]) -> Iterator[str]:
    """System messages anywhere but behind the user's, and before the assistant's or at the end."""
    roles = [element.get("role") if isinstance(element, dict) else None for element in elements]
    for before, role, behind in zip([None, *roles], roles, [*roles[1:], "assistant"], strict=False):
        if role == "system" and (before, behind) != ("user", "assistant"):
            yield "a system message in another place"


def _begins_with_thinking(elements: Sequence[Any]) -> bool:
    """Whether the assistant's last turn, all it said since the user's last words, does, or there is none."""
    messages = [element for element in elements if isinstance(element, dict)]
    words = max((place for place, message in enumerate(messages) if _has_words(message)), default=-1)
    said = (message.get("content") for message in messages[words + 1 :] if message.get("role") == "assistant")
    content = next(said, None)
    return content is None or (
        isinstance(content, list) and _type_of(next(iter(content), None)) in ("thinking", "redacted_thinking")
    )


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
    waiting: Counter[str] = Counter()
    for role, blocks in turns:
        answers = Counter(_ids(blocks, "tool_result", "tool_use_id"))
        yield from (f"result of {one} without its call" for one in answers - waiting)
        yield from (f"call {one} without its result" for one in waiting - answers)
        waiting = Counter(_ids(blocks, "tool_use", "id")) if role == "assistant" else Counter()
        if not blocks:
            yield f"a message ({role}) without content"
        yield from ("a text block without text" for block in blocks if _is_blank(block))
    yield from (f"call {one} without its result" for one in waiting)


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
    called: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    for item in items:
        kind, call_id = str(item.get("type", "message")), item.get("call_id")
        if isinstance(call_id, str):
            (answered if kind.endswith("_output") else called)[call_id] += 1
    yield from (f"call {one} without its result" for one in (called - answered).elements())
    yield from (f"result of {one} without its call" for one in (answered - called).elements())
    for item, following in zip_longest(items, items[1:], fillvalue=nothing):
        if _is_reasoning(item) and not _is_made(following):
            yield f"reasoning {item.get('id')} without what came of it"


def _is_reasoning(item: Mapping[str, Any]) -> bool:
    return item.get("type") == "reasoning" or (_is_name(item) and str(item["id"]).startswith("rs_"))


def _is_name(item: Mapping[str, Any]) -> bool:
    """Of an item that the provider keeps."""
    kind = item.get("type")
    return "id" in item and (kind == "item_reference" or (kind is None and "role" not in item))


def _is_made(item: Mapping[str, Any]) -> bool:
    """By the model, as far as is known."""
    kind = str(item.get("type", "message"))
    return _is_name(item) or item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


_CHECKS: Final[Mapping[Wire, Callable[[Sequence[Any]], Iterator[str]]]] = {
    "messages": _messages,
    "responses": _responses,
}
