"""What is known of a message, worked out once: its tokens, its blocks, their terms.

All of it depends on the message alone, so it is kept under the hash of the message, bounded, and shared by every
conversation that holds the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.conversation import Item, Message, key_of
from gateway.core.fitting.blocks import Sliced, render, slice_message
from gateway.core.fitting.terms import Lexicon

#: tokens of a text
Count = Callable[[str], int]
#: tokens of a message, framing included
Weigh = Callable[[Message], int]

#: tokens of the frame around a message: role and separators
FRAME: Final = 4


def weigher(count: Count) -> Weigh:
    """A `Weigh` for those who have nothing better: role, text, calls and ids, and four tokens around them.

    What is no text is counted as written, which is far too much for an image and so never too little.
    """

    def weigh(message: Message) -> int:
        texts = [str(message.get("role", "")), "\n", _content(message.get("content"))]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            texts.append(f"\n{call.get('id', '')} {function.get('name', '')} {function.get('arguments', '')}")
        if message.get("tool_call_id"):
            texts.append(f"\n{message['tool_call_id']}")
        known = ("role", "content", "tool_calls", "tool_call_id", "cache_control")
        texts.extend(f"\n{name} {value}" for name, value in message.items() if name not in known and value)
        return count("".join(texts)) + FRAME

    return weigh


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


@dataclass(frozen=True, slots=True)
class Known:
    """A message's blocks, the terms of each with their kinds, and about how many tokens each takes."""

    sliced: Sliced
    terms: tuple[dict[str, int], ...]
    #: terms of what cannot be cut: names and arguments of calls; of everything where nothing can be cut
    fixed: dict[str, int]
    #: all of these together
    all_terms: dict[str, int]
    #: estimated from the message's own tokens per character: exact counts are taken of the result only
    tokens: tuple[float, ...]


class Reader:
    """Reads messages and remembers, up to `limit` entries of each kind; the oldest go first."""

    def __init__(self, weigh: Weigh, *, limit: int = 20_000) -> None:
        self._weigh = weigh
        self._limit = limit
        self._lexicon = Lexicon()
        self._weights: dict[str, int] = {}
        self._known: dict[str, Known] = {}
        self._cut: dict[tuple[str, tuple[int, ...]], tuple[Message, int]] = {}

    def weight(self, item: Item, message: Message) -> int:
        """Tokens of the message as it came."""
        weight = self._weights.get(item.key)
        if weight is None:
            weight = self._weights[item.key] = self._weigh(message)
            _bound(self._weights, self._limit)
        return weight

    def weigh_new(self, message: Message) -> int:
        """Tokens of a message that was just made."""
        key = key_of(message)
        weight = self._weights.get(key)
        if weight is None:
            weight = self._weights[key] = self._weigh(message)
            _bound(self._weights, self._limit)
        return weight

    def know(self, item: Item, message: Message) -> Known:
        """Its blocks and terms."""
        known = self._known.get(item.key)
        if known is None:
            known = self._known[item.key] = self._read(item, message)
            _bound(self._known, self._limit)
        return known

    def cut(self, item: Item, message: Message, picked: tuple[int, ...]) -> tuple[Message, int]:
        """The message with the picked blocks only, and its tokens.

        Cache marks are not part of the key, so a marked message is made anew.
        """
        if item.breakpoint:
            made = render(message, self.know(item, message).sliced, picked)
            return made, self.weigh_new(made)
        entry = self._cut.get((item.key, picked))
        if entry is None:
            made = render(message, self.know(item, message).sliced, picked)
            entry = self._cut[item.key, picked] = made, self._weigh(made)
            _bound(self._cut, self._limit)
        return entry

    def terms(self, text: str) -> dict[str, int]:
        """The terms of any text."""
        return self._lexicon.terms(text)

    def _read(self, item: Item, message: Message) -> Known:
        if item.sealed:
            terms = self._lexicon.terms(item.text)
            return Known(Sliced((), (), "", is_verbatim=True), (), terms, terms, ())
        sliced = slice_message(message)
        length = len(item.text) + sum(len(str(call)) for call in message.get("tool_calls") or ()) + 8
        density = self.weight(item, message) / length
        of_blocks = tuple(self._lexicon.terms(block.text) for block in sliced.blocks)
        fixed = self._lexicon.terms(sliced.fixed)
        tokens = tuple(len(block.text) * density for block in sliced.blocks)
        return Known(sliced, of_blocks, fixed, _merged((fixed, *of_blocks)), tokens)


def _merged(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Every term with the highest kind it has anywhere."""
    found: dict[str, int] = {}
    for terms in parts:
        for term, kind in terms.items():
            if found.get(term, -1) < kind:
                found[term] = kind
    return found


def _bound(cache: dict[Any, Any], limit: int) -> None:
    if len(cache) > limit:
        for key in list(cache)[: limit // 4]:
            del cache[key]
