"""Read the last user message of a request, for conditions of steps.

While an agent works, this message moves away from the end with each call. But each request starts with the messages of
the one before it. So the last user message of a known prefix is cached and not searched again.
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
#: number of cached prefixes
_MAX_PREFIXES: Final = 256
#: Conditions see this many characters of a message, the last ones.
_CHARACTERS: Final = 16 * 1024
#: Bytes of messages that are searched in the event loop. Searching more would block other calls.
_INLINE_BYTES: Final = 64 * 1024


class NewestMessages:
    """Finds the last user message of requests. Each worker has one, with a bounded cache."""

    def __init__(self) -> None:
        self._known = BoundedDict[bytes, str | None](_MAX_PREFIXES)
        self._lock = Lock()

    async def ahead_of(self, contents: Contents) -> str | Callable[[], str | None] | None:
        """Return a function that finds the text when a condition needs it; if that takes long, return the text."""
        if self._size(contents) > _INLINE_BYTES:
            return await asyncio.to_thread(self.of, contents)
        return partial(self.of, contents)

    def _size(self, contents: Contents) -> int:
        """Return the bytes that `of` may have to read."""
        if contents.array is None:
            return len(bytes(contents.fields[ITEMS[contents.wire]]))
        prefix = contents.cached_prefix.keys if contents.cached_prefix is not None else ()
        is_known = not prefix or _key(prefix) in self._known
        return sum(map(len, contents.new_messages if is_known else contents.messages or ()))

    def of(self, contents: Contents) -> str | None:
        """Return the text of the last user message, only its end if it is long; None if there is no user message."""
        if contents.array is None:
            value = decode(contents.fields[ITEMS[contents.wire]])
            return value[-_CHARACTERS:] if isinstance(value, str) else None
        last, before = contents.new_messages[-1:], contents.new_messages[:-1]
        text = _newest(last)
        if text is None:
            text = _newest(before)
            prefix = contents.cached_prefix.keys if contents.cached_prefix is not None else ()
            if text is None and prefix:
                text = self._in_prefix(contents, prefix)
            if is_worth_keeping(contents.array):
                self._keep((*prefix, *keys_of(before)), text)
        return text

    def _in_prefix(self, contents: Contents, prefix: tuple[bytes, ...]) -> str | None:
        try:
            return self._known[_key(prefix)]
        except KeyError:
            return _newest(contents.messages or ())

    def _keep(self, prefix: tuple[bytes, ...], text: str | None) -> None:
        key = _key(prefix)
        with self._lock:
            self._known[key] = text


def _key(prefix: tuple[bytes, ...]) -> bytes:
    return blake2b(b"".join(prefix), digest_size=16).digest()


def _newest(messages: tuple[bytes, ...]) -> str | None:
    for raw in reversed(messages):
        text = _user_text(decode(raw)) if _USER in raw else None
        if text is not None:
            return text[-_CHARACTERS:]
    return None


def _user_text(message: Any) -> str | None:
    """Return the text that a user wrote in a message; None if there is none, as in a tool result."""
    if not isinstance(message, dict) or message.get("role") != "user":
        return None
    content = message.get("content")
    if not isinstance(content, list) or not content:
        return text_parts(content)
    words = [part for part in content if not _is_not_by_user(part)]
    return text_parts(words) if words else None


def _is_not_by_user(part: Any) -> bool:
    """Return whether a part is a tool result, or a reminder that Claude Code adds to one."""
    if not isinstance(part, dict):
        return False
    text = part.get("text")
    return part.get("type") == "tool_result" or (isinstance(text, str) and text.lstrip().startswith(_REMINDER))
