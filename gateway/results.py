"""Tool results in the mode that a session's budget leaves room for, and the full texts behind what is left out.

A message is shown by `gateway.core.modes`, always the same way; here what was shown is remembered, and no handle goes
out before its text is in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock
from typing import Final, NamedTuple

from gateway.core.counting.cache import CountCache
from gateway.core.errors import StoreUnavailable
from gateway.core.message import decode, digest, text_parts
from gateway.core.modes import ResponseMode, show
from gateway.core.ports import SessionKey, Store

#: for messages as they were shown
_CACHE_BYTES: Final = 32 * 2**20
#: what an entry takes beside its bytes
_ENTRY_BYTES: Final = 200
#: bytes of messages that are shown in the loop; more are shown in a thread
_INLINE_BYTES: Final = 32 * 1024


class _Shown(NamedTuple):
    """What is sent in the place of a message, None for the message itself, and the handle that it names."""

    raw: bytes | None
    handle: str | None


class Results:
    """Shows tool results. Shared by all calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache = CountCache(_CACHE_BYTES, Lock())

    async def show(
        self, messages: Sequence[bytes], mode: ResponseMode, session: SessionKey | None
    ) -> tuple[bytes, ...] | None:
        """The messages in a mode; None where none of them changes.

        Without a session, or while the store is away, nothing can be kept, and so nothing is left out: tables at most.
        """
        if mode not in ("raw", "table") and session is not None:
            shown = await self._shown(messages, mode, session)
            try:
                await self._keep(messages, shown, session)
            except StoreUnavailable:
                pass
            else:
                return _changed(messages, shown)
        if mode == "raw":
            return None
        return _changed(messages, await self._shown(messages, "table", session))

    async def _shown(
        self, messages: Sequence[bytes], mode: ResponseMode, session: SessionKey | None
    ) -> Sequence[_Shown]:
        owner = f"{session.namespace}\0{session.id}" if session is not None and mode != "table" else ""
        # Handles belong to a session, and so does what names them.
        key = digest(owner.encode())

        def handle_of(text: str) -> str:
            return f"tr_{blake2b(text.encode('utf-8', 'surrogatepass'), key=key, digest_size=16).hexdigest()}"

        def one(raw: bytes) -> _Shown:
            shown = show(raw, mode, handle_of)
            return _Shown(shown.raw, shown.handle) if shown is not None else _Shown(None, None)

        def work() -> Sequence[_Shown]:
            return self._cache.get_keyed(
                f"{mode}\0{owner}",
                [digest(raw) for raw in messages],
                lambda missing: (one(messages[index]) for index in missing),
                lambda shown: _ENTRY_BYTES + len(shown.raw or b""),
            )

        return await asyncio.to_thread(work) if sum(map(len, messages)) > _INLINE_BYTES else work()

    async def _keep(self, messages: Sequence[bytes], shown: Sequence[_Shown], session: SessionKey) -> None:
        """Have every text in the store that a handle stands for; even if it was there once, it may be gone."""
        raws = {one.handle: raw for raw, one in zip(messages, shown, strict=True) if one.handle is not None}
        missing = await self._store.missing_results(session, list(raws)) if raws else ()
        if missing:
            texts = {handle: text_parts(decode(raws[handle])["content"]) for handle in missing}
            await self._store.keep_results(session, texts)


def _changed(messages: Sequence[bytes], shown: Sequence[_Shown]) -> tuple[bytes, ...] | None:
    if all(one.raw is None for one in shown):
        return None
    return tuple(raw if one.raw is None else one.raw for raw, one in zip(messages, shown, strict=True))
