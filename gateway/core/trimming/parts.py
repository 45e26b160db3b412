"""Split a tool result into parts that can be compared with other results: list elements, paragraphs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

from gateway.core.conversation.lossless_json import parse_whole, write

_PARAGRAPHS: Final = "\n\n"


def without_parts(content: object, removed: Collection[int], source: str | None) -> str:
    """Return a content without some of its parts, with a mark instead of them.

    Raises:
        ValueError: the content has no such parts.
    """
    parts, noun, join = split_parts(content)
    if not removed or not set(removed) <= set(range(len(parts))):
        raise ValueError("no such parts")
    mark = f"[{len(removed)} {noun if len(removed) == 1 else noun + 's'} as in the result of {source}]"
    first = min(removed)
    return join([mark if n == first else part for n, part in enumerate(parts) if n == first or n not in removed])


def split_parts(content: object) -> tuple[list[Any], str, Callable[[list[Any]], str]]:
    """Return the parts of a text, the noun for one of them, and the function that joins them again.

    A content that is not a text has no parts. Numbers are bare values, see `gateway.core.conversation.lossless_json`.
    """
    text = content if isinstance(content, str) else ""
    value = parse_whole(text)
    if isinstance(value, list):
        return value, "item", write
    if isinstance(value, dict):
        lists = [name for name, inner in value.items() if isinstance(inner, list)]
        if lists:
            longest = max(lists, key=lambda name: len(value[name]))
            return value[longest], "item", lambda left: write({**value, longest: left})
    return text.split(_PARAGRAPHS), "paragraph", _PARAGRAPHS.join
