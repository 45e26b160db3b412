"""Read the newest user message of a request, for conditions of steps.

While an agent works it stands further from the end with each call. Each request begins as the one before it did: for
such a beginning the newest text of a user is remembered, so that it need not be searched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from threading import Lock
from typing import Any, Final

from gateway.core.bounded import BoundedDict
from gateway.core.conversation.message import keys_of, text_parts
from gateway.core.counting.prefix_cache import is_worth_keeping
from gateway.core.counting.request import ITEMS
from gateway.dialects.contents import Contents
from gateway.dialects.fields import decode

_USER: Final = b'"user"'
_REMINDER: Final = "<system-reminder>"
#: beginnings that are remembered
_MOST: Final = 256
#: characters that conditions see of a message: the last ones
_CHARACTERS: Final = 16 * 1024
#: bytes of messages that are searched in the event loop; more of them would keep other calls waiting
_INLINE_BYTES: Final = 64 * 1024


class NewestMessages:
    """Finds the newest message of a user. One for each worker; what it remembers is bounded."""

    def __init__(self) -> None:
        self._known = BoundedDict[bytes, str | None](_MOST)
        self._lock = Lock()

    async def ahead_of(self, contents: Contents) -> str | Callable[[], str | None] | None:
        """A function that finds the text when a condition asks for it; where that takes long, the text itself."""
        if self._size(contents) > _INLINE_BYTES:
            return await asyncio.to_thread(self.of, contents)
        return partial(self.of, contents)

    def _size(self, contents: Contents) -> int:
        """Bytes that `of` may have to read."""
        if contents.array is None:
            return len(bytes(contents.fields[ITEMS[contents.wire]]))
        begun = contents.start.keys if contents.start is not None else ()
        is_known = not begun or _name(begun) in self._known
        return sum(map(len, contents.fresh if is_known else contents.messages or ()))

    def of(self, contents: Contents) -> str | None:
        """The message's text, the end of it where it is long; None where there is no message of a user."""
        if contents.array is None:
            value = decode(contents.fields[ITEMS[contents.wire]])
            return value[-_CHARACTERS:] if isinstance(value, str) else None
        last, before = contents.fresh[-1:], contents.fresh[:-1]
        text = _newest(last)
        if text is None:
            text = _newest(before)
            begun = contents.start.keys if contents.start is not None else ()
            if text is None and begun:
                text = self._at_the_beginning(contents, begun)
            if is_worth_keeping(contents.array):
                self._keep((*begun, *keys_of(before)), text)
        return text

    def _at_the_beginning(self, contents: Contents, begun: tuple[bytes, ...]) -> str | None:
        try:
            return self._known[_name(begun)]
        except KeyError:
            return _newest(contents.messages or ())

    def _keep(self, begun: tuple[bytes, ...], text: str | None) -> None:
        name = _name(begun)
        with self._lock:
            self._known[name] = text


def _name(begun: tuple[bytes, ...]) -> bytes:
    return blake2b(b"".join(begun), digest_size=16).digest()


def _newest(messages: tuple[bytes, ...]) -> str | None:
    for raw in reversed(messages):
        text = _user_text(decode(raw)) if _USER in raw else None
        if text is not None:
            return text[-_CHARACTERS:]
    return None


def _user_text(message: Any) -> str | None:
    """What a user says in a message; None where it is nobody's words, such as the result of a tool."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return None
    content = message.get("content")
    if not isinstance(content, list) or not content:
        return text_parts(content)
    words = [part for part in content if not _is_nobodys(part)]
    return text_parts(words) if words else None


def _is_nobodys(part: Any) -> bool:
    """The result of a tool, or what Claude Code puts beside it to remind the model of something."""
    if not isinstance(part, dict):
        return False
    text = part.get("text")
    return part.get("type") == "tool_result" or (isinstance(text, str) and text.lstrip().startswith(_REMINDER))
