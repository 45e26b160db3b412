"""Show tool results in a response mode, and store the full text of what is left out.

A message is shown by `gateway.core.modes`, always the same way; here what was shown is remembered, and no handle goes
out before its text is in the store. A session keeps so many bytes of texts: a result that there is no room for is sent
in the strictest form that needs no handle. What is kept stays, and so does what each message looks like.

Where a model makes summaries, results of which nobody decided yet what stands for them are named, and shown as extracts
until that is done (`gateway.context.summary_choices`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from threading import Lock
from typing import Final, NamedTuple

from gateway.call.types import KeptContent, PendingExtract, ShownResults
from gateway.context.summary_choices import SummaryChoices
from gateway.core.conversation.message import digest, encode, read
from gateway.core.counting.cache import CountCache
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode, ShownResult, milder, show, show_blocks, with_summary
from gateway.core.modes.extract import LONGEST
from gateway.core.modes.summary import MOST, SummaryLimits
from gateway.core.ports import Results

#: the field of a message that calls tools, and a handle among their arguments, which asks for a full text
_CALLS: Final = b'"tool_calls"'
_HANDLE: Final = re.compile(rb"\btr_[0-9a-f]{32}\b")
#: size of the cache of messages as they were shown
_CACHE_BYTES: Final = 32 * 2**20
#: what an entry takes beside its bytes
_ENTRY_BYTES: Final = 200
#: bytes of messages that are shown in the loop; more are shown in a thread
_INLINE_BYTES: Final = 32 * 1024
#: bytes of all summaries that one call may need, as UTF-8
_SAID_BYTES: Final = MOST * LONGEST * 4
_NO_BLOCKS: Final[Mapping[int, Sequence[int]]] = {}


class _Shown(NamedTuple):
    """What is sent in the place of a message, None for itself; the handle that it names, and the bytes of its text.

    `form`: how it is shown; `summing`: what a model's summary of it may take, where it is worth one.
    """

    raw: bytes | None = None
    form: ResponseMode = "raw"
    handle: str | None = None
    size: int = 0
    summing: SummaryLimits | None = None


_AS_RECEIVED: Final = _Shown()


class ToolResultRenderer:
    """Shows tool results. Shared by all calls. `most`: bytes of texts that a session keeps; 0: none are kept."""

    def __init__(self, store: Results, most: int) -> None:
        self.most = most
        self._store = store
        self._decisions = SummaryChoices(store)
        self._cache = CountCache(_CACHE_BYTES, Lock())

    async def show(
        self,
        messages: Sequence[bytes],
        modes: Sequence[ResponseMode],
        session: SessionKey | None,
        *,
        blocks: Mapping[int, Sequence[int]] = _NO_BLOCKS,
        is_summed: bool = False,
        is_answered: bool = True,
    ) -> ShownResults | None:
        """Return the messages, each in its mode; None if none of them changes.

        `blocks`: extracts to show instead, by the index of the message (`show_blocks`); `is_summed`: a model makes
        summaries; `is_answered`: what a call asked for by its handle is sent whole, also in `handle_only`.

        Without a session, or while the store is unavailable, nothing can be kept, and so nothing is left out: tables
        at most.
        """
        is_short = bool(blocks) or not {*modes} <= {"raw", "table"}
        if is_short and session is not None and self.most:
            with contextlib.suppress(StoreUnavailable):
                shown = await self._shown(messages, modes, session, blocks)
                shown = await self._answered(messages, modes, shown, is_answered=is_answered)
                texts, refused = await self._missing(messages, shown, session)
                shown = await self._without(refused, messages, shown)
                if not is_summed:
                    return _showing(messages, shown, texts)
                return await self._summed(messages, shown, texts, session)
        lossless = [milder(mode, "table") for mode in modes]
        return _showing(messages, await self._shown(messages, lossless, None, _NO_BLOCKS), {})

    async def decide(self, said: Mapping[str, str], session: SessionKey) -> bool:
        """What stands for results from now on, see `SummaryChoices.decide`; False where that cannot be kept."""
        try:
            await self._decisions.decide(session, said, self.most)
        except StoreUnavailable:
            return False
        return True

    async def keep(self, showing: ShownResults, session: SessionKey) -> bool:
        """Have the texts in the store; False where that cannot be, so that the messages must be shown anew.

        Not before the call is sure to be sent: what refused calls leave in the store nobody would ever pay for.
        """
        if not showing.texts:
            return True
        is_long = sum(len(one.raw) for one in showing.texts.values()) > _INLINE_BYTES
        texts = await asyncio.to_thread(_texts, showing) if is_long else _texts(showing)
        try:
            return not await self._store.keep_results(session, texts, self.most)
        except StoreUnavailable:
            return False

    async def _shown(
        self,
        messages: Sequence[bytes],
        modes: Sequence[ResponseMode],
        session: SessionKey | None,
        blocks: Mapping[int, Sequence[int]],
    ) -> Sequence[_Shown]:
        """Return what is shown instead of each message."""
        shown = [_AS_RECEIVED] * len(messages)
        for mode in {*modes} - {"raw"}:
            places = [place for place, its in enumerate(modes) if its == mode and place not in blocks]
            found = await self._in_mode([messages[place] for place in places], mode, session)
            for place, one in zip(places, found, strict=True):
                shown[place] = one
        if blocks:
            extracts = await self._extracts([(messages[place], tuple(its)) for place, its in blocks.items()], session)
            for place, one in zip(blocks, extracts, strict=True):
                shown[place] = one
        return shown

    async def _in_mode(
        self, messages: Sequence[bytes], mode: ResponseMode, session: SessionKey | None
    ) -> Sequence[_Shown]:
        owner = _owner(session) if mode != "table" else ""
        handle_of = _handles(owner)

        def work() -> Sequence[_Shown]:
            return self._cache.get_keyed(
                f"{mode}\0{owner}",
                [digest(raw) for raw in messages],
                lambda missing: (_of(show(messages[index], mode, handle_of)) for index in missing),
                _shown_bytes,
            )

        return await asyncio.to_thread(work) if sum(map(len, messages)) > _INLINE_BYTES else work()

    async def _extracts(
        self, chosen: Sequence[tuple[bytes, tuple[int, ...]]], session: SessionKey | None
    ) -> Sequence[_Shown]:
        """Return results as these blocks of them, see `show_blocks`."""
        owner = _owner(session)
        handle_of = _handles(owner)

        def work() -> Sequence[_Shown]:
            return self._cache.get_keyed(
                f"blocks\0{owner}",
                [(digest(raw), blocks) for raw, blocks in chosen],
                lambda missing: (_of(show_blocks(*chosen[index], handle_of)) for index in missing),
                _shown_bytes,
            )

        return await asyncio.to_thread(work) if sum(len(raw) for raw, _ in chosen) > _INLINE_BYTES else work()

    async def _missing(
        self, messages: Sequence[bytes], shown: Sequence[_Shown], session: SessionKey
    ) -> tuple[Mapping[str, KeptContent], Collection[str | None]]:
        """The texts that the store does not have, and the handles of those that it has no room for.

        Even if a text was there once, it may be gone.
        """
        pairs = zip(messages, shown, strict=True)
        originals = {one.handle: (KeptContent(raw, one.form), one.size) for raw, one in pairs if one.handle}
        missing = await self._store.missing_results(session, list(originals)) if originals else ()
        if not missing:
            return {}, ()
        room = self.most - await self._store.results_size(session)
        texts = {}
        for handle in missing:
            kept, size = originals[handle]
            if size <= room:
                room -= size
                texts[handle] = kept
        return texts, {*missing} - {*texts}

    async def _without(
        self, refused: Collection[str | None], messages: Sequence[bytes], shown: Sequence[_Shown]
    ) -> Sequence[_Shown]:
        """What is shown, without handles that have no text."""
        places = [place for place, one in enumerate(shown) if one.handle in refused]
        return await self._with_tables(places, messages, shown)

    async def _answered(
        self,
        messages: Sequence[bytes],
        modes: Sequence[ResponseMode],
        shown: Sequence[_Shown],
        *,
        is_answered: bool,
    ) -> Sequence[_Shown]:
        """Return what is shown, complete where a call asked for it by its handle: the model would never see it else.

        `is_answered`: also in `handle_only`.
        """
        if not any(one.handle for one in shown):
            return shown
        places = [
            place
            for place in _asked_for(messages)
            if shown[place].handle and (is_answered or modes[place] != "handle_only")
        ]
        return await self._with_tables(places, messages, shown)

    async def _with_tables(
        self, places: Sequence[int], messages: Sequence[bytes], shown: Sequence[_Shown]
    ) -> Sequence[_Shown]:
        if not places:
            return shown
        tables = await self._in_mode([messages[place] for place in places], "table", None)
        instead = dict(zip(places, tables, strict=True))
        return [instead.get(place, one) for place, one in enumerate(shown)]

    async def _summed(
        self, messages: Sequence[bytes], shown: Sequence[_Shown], texts: Mapping[str, KeptContent], session: SessionKey
    ) -> ShownResults | None:
        """What is shown, with summaries where it is decided what they are, and with what is to be decided."""
        summable = {one.handle for one in shown if one.handle and one.summing}
        # Where a full text is gone, the store has forgotten the session, and its decisions too.
        said = await self._decisions.known(session, summable, unsure=texts) if summable else {}
        undecided = {
            one.handle: PendingExtract(place, messages[place], one.handle, one.summing)
            for place, one in enumerate(shown)
            if one.handle and one.summing and one.handle not in said
        }
        if undecided and not await self._has_room(sum(one.size for one in shown if one.handle in texts), session):
            undecided = {}
        showing = _showing(messages, await self._said(said, messages, shown), texts)
        return showing._replace(open=tuple(undecided.values())) if showing is not None else None

    async def _has_room(self, pending: int, session: SessionKey) -> bool:
        """Whether summaries can be kept beside texts of so many bytes. Without room nobody is asked, on any turn."""
        return await self._store.results_size(session) + pending + _SAID_BYTES <= self.most

    async def _said(
        self, said: Mapping[str, str], messages: Sequence[bytes], shown: Sequence[_Shown]
    ) -> Sequence[_Shown]:
        """What is shown, with these summaries in the place of extracts."""
        places = [place for place, one in enumerate(shown) if one.summing and said.get(one.handle or "")]
        if not places:
            return shown

        def one(place: int) -> _Shown:
            handle = shown[place].handle or ""
            return shown[place]._replace(raw=with_summary(messages[place], said[handle], handle))

        def work() -> Sequence[_Shown]:
            return self._cache.get_keyed(
                "said",
                [(digest(messages[place]), shown[place].handle, said[shown[place].handle or ""]) for place in places],
                lambda missing: (one(places[index]) for index in missing),
                lambda made: _ENTRY_BYTES + 2 * len(made.raw or b""),
            )

        is_long = sum(len(messages[place]) for place in places) > _INLINE_BYTES
        instead = dict(zip(places, await asyncio.to_thread(work) if is_long else work(), strict=True))
        return [instead.get(place, one) for place, one in enumerate(shown)]


def _owner(session: SessionKey | None) -> str:
    return f"{session.namespace}\0{session.id}" if session is not None else ""


def _handles(owner: str) -> Callable[[str], str]:
    """Return what gives a text its handle. Handles belong to a session, and so does what names them."""
    key = digest(owner.encode())

    def handle_of(text: str) -> str:
        return f"tr_{blake2b(text.encode('utf-8', 'surrogatepass'), key=key, digest_size=16).hexdigest()}"

    return handle_of


def _of(shown: ShownResult | None) -> _Shown:
    if shown is None:
        return _AS_RECEIVED
    return _Shown(shown.raw, shown.form, shown.handle, _size(shown.content or ""), shown.summing)


def _shown_bytes(shown: _Shown) -> int:
    return _ENTRY_BYTES + len(shown.raw or b"")


def _asked_for(messages: Sequence[bytes]) -> Iterator[int]:
    """The places of results whose calls have a handle among their arguments."""
    asking: Collection[object] = ()
    for place, raw in enumerate(messages):
        if _CALLS in raw:
            asking = _asking(raw) if _HANDLE.search(raw) else ()
        elif asking:
            message, _ = read(raw)
            if isinstance(message, dict) and message.get("role") == "tool" and message.get("tool_call_id") in asking:
                yield place


def _asking(raw: bytes) -> Collection[object]:
    """The ids of the calls in a message that have a handle among their arguments."""
    message, _ = read(raw)
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return [
        call.get("id")
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and _HANDLE.search(encode(call.get("function")))
    ]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _texts(showing: ShownResults) -> Mapping[str, str]:
    return {handle: one.text for handle, one in showing.texts.items()}


def _showing(
    messages: Sequence[bytes], shown: Sequence[_Shown], texts: Mapping[str, KeptContent]
) -> ShownResults | None:
    if all(one.raw is None for one in shown):
        return None
    sent = tuple(raw if one.raw is None else one.raw for raw, one in zip(messages, shown, strict=True))
    return ShownResults(sent, tuple("raw" if one.raw is None else one.form for one in shown), texts)
