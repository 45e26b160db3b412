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
    found = Counter(check([read(raw)[0] for raw in after]))
    return list(found - Counter(check([read(raw)[0] for raw in before]))) if found else []


def _messages(elements: Sequence[Any]) -> Iterator[str]:
    """Messages: it begins with the user, and each call is answered in the user's very next words."""
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
        if item.get("type") == "reasoning" and not _is_made(following):
            yield f"reasoning {item.get('id')} without what came of it"


def _is_made(item: Mapping[str, Any]) -> bool:
    """By the model."""
    kind = str(item.get("type", "message"))
    return item.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


_CHECKS: Final[Mapping[Wire, Callable[[Sequence[Any]], Iterator[str]]]] = {
    "messages": _messages,
    "responses": _responses,
}
