"""Store the summary that stands for a tool result, so that it stays the same on later turns.

A provider's cache holds only as long as what was sent is sent again, so the first decision stays, whoever made it: a
text, or none, where the result is shown as an extract. What was read once is remembered here.
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
#: for decisions: some thousands of the usual length
_CACHE_BYTES: Final = 8 * 2**20
#: a character may take so many bytes
_CHARACTER_BYTES: Final = 4


class SummaryChoices:
    """The decisions of all sessions, by the handles of their results."""

    def __init__(self, store: Results) -> None:
        self._store = store
        self._cache = CountCache(_CACHE_BYTES, Lock())

    async def known(
        self, session: SessionKey, handles: Collection[str], *, unsure: Collection[str] = ()
    ) -> Mapping[str, str]:
        """What was decided, by handle; a result that nobody decided on is missing.

        `unsure`: handles that are looked up in the store again, as it may have deleted their decisions since.

        Raises:
            StoreUnavailable: some of them nobody knows.
        """
        remembered = {handle: self._cache.peek(_owner(session), handle) for handle in handles if handle not in unsure}
        known = {handle: said for handle, said in remembered.items() if isinstance(said, str)}
        return {**known, **await self._read(session, [handle for handle in handles if handle not in known])}

    async def decide(self, session: SessionKey, said: Mapping[str, str], most: int) -> None:
        """Decide on results. A decision that stands already stays, and without room for it nothing is decided.

        `said`: the summaries by handle, or `EXTRACT`; `most`: bytes of texts that the session may keep.

        Raises:
            StoreUnavailable: nothing was decided, or it is not known whether.
        """
        await self._store.keep_results(session, {_name(handle): text for handle, text in said.items()}, most)
        await self._read(session, list(said))

    async def _read(self, session: SessionKey, handles: Sequence[str]) -> Mapping[str, str]:
        if not handles:
            return {}
        texts = await self._store.results(session, list(map(_name, handles)))
        found = {handle: texts[_name(handle)] for handle in handles if _name(handle) in texts}
        for handle, said in found.items():
            self._cache.put(_owner(session), handle, said, len(said) * _CHARACTER_BYTES)
        return found


def _name(handle: str) -> str:
    """Under which the decision is kept: no other handle looks like it."""
    return f"{handle}_s"


def _owner(session: SessionKey) -> str:
    return f"{session.namespace}\0{session.id}"
