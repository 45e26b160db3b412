"""Store which summary replaces a tool result, so that it stays the same on later turns.

A provider's prompt cache is valid only if the same text is sent again. So the first decision about a result stays,
whichever worker made it: a summary, or an extract if there is no summary. Decisions that were read are cached here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Final

from gateway.core.counting.cache import CountCache
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Results

#: the decision that there is no summary: the result is shown as an extract
EXTRACT: Final = ""
#: bytes of cached decisions: some thousands of the usual length
_CACHE_BYTES: Final = 8 * 2**20
#: maximum bytes of a character in memory
_CHARACTER_BYTES: Final = 4


class SummaryChoices:
    """The decisions of all sessions, by the handles of their results."""

    def __init__(self, store: Results) -> None:
        self._store = store
        self._cache = CountCache(_CACHE_BYTES, Lock())

    async def known(
        self, session: SessionKey, handles: Collection[str], *, unsure: Collection[str] = ()
    ) -> Mapping[str, str]:
        """Return the decisions by handle. A result without a decision is missing.

        `unsure`: handles that are looked up in the store again, as it may have deleted their decisions since.

        Raises:
            StoreUnavailable: some decisions are not cached, and cannot be read.
        """
        remembered = {handle: self._cache.peek(_owner(session), handle) for handle in handles if handle not in unsure}
        known = {handle: summary for handle, summary in remembered.items() if isinstance(summary, str)}
        return {**known, **await self._read(session, [handle for handle in handles if handle not in known])}

    async def decide(self, session: SessionKey, summaries: Mapping[str, str], max_bytes: int) -> None:
        """Store decisions on results. An earlier decision stays. Without room, nothing is stored.

        `summaries`: by handle, or `EXTRACT` for none; `max_bytes`: of texts that the session may store.

        Raises:
            StoreUnavailable: the decisions were not stored, or this is unknown.
        """
        await self._store.keep_results(session, {_name(handle): text for handle, text in summaries.items()}, max_bytes)
        await self._read(session, list(summaries))

    async def _read(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        if not handles:
            return {}
        texts = await self._store.results(session, list(map(_name, handles)))
        decisions = {handle: texts[_name(handle)] for handle in handles if _name(handle) in texts}
        for handle, summary in decisions.items():
            self._cache.put(_owner(session), handle, summary, len(summary) * _CHARACTER_BYTES)
        return decisions


def _name(handle: str) -> str:
    """Return the name that the decision is stored under. It cannot be a handle of another result."""
    return f"{handle}_s"


def _owner(session: SessionKey) -> str:
    return f"{session.namespace}\0{session.id}"
