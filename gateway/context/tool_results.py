"""Show tool results in a response mode, and store the full text of what is left out.

- `gateway.core.modes` renders a message, always in the same way. The rendered messages are cached here.
- A handle is sent only after its text was stored.
- A session may store a limited number of bytes. A result without room is sent as a table, which needs no handle.
- Stored texts stay, so a message looks the same on later turns.
- If a model makes summaries, results without a decision are shown as extracts until then (`summary_choices`).
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
from gateway.core.conversation.message import digest, encode, parse_bytes
from gateway.core.counting.cache import CountCache
from gateway.core.errors import StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode, ShownResult, milder, show, show_blocks, with_summary
from gateway.core.modes.extract import MAX_EXTRACT_CHARS
from gateway.core.modes.summary import MAX_SUMMARIES, SummaryLimits
from gateway.core.ports import Results

#: the field of a message that calls tools
_CALLS: Final = b'"tool_calls"'
#: a handle in the arguments of a tool call, which requests the full text
_HANDLE: Final = re.compile(rb"\btr_[0-9a-f]{32}\b")
#: size of the cache of rendered messages
_CACHE_BYTES: Final = 32 * 2**20
#: bytes of a cache entry in addition to its text
_ENTRY_BYTES: Final = 200
#: Bytes of messages that are rendered in the event loop. More are rendered in a thread.
_INLINE_BYTES: Final = 32 * 1024
#: maximum UTF-8 bytes of all summaries that one call may need
_SUMMARIES_BYTES: Final = MAX_SUMMARIES * MAX_EXTRACT_CHARS * 4
_NO_BLOCKS: Final[Mapping[int, Sequence[int]]] = {}


class _Rendered(NamedTuple):
    """A rendered message.

    Attributes:
        raw: the message to send; None if it is sent unchanged.
        form: how the result is shown.
        handle: the handle that it contains; None if it has none.
        size: bytes of the text that the handle refers to.
        limits: how long a summary may be; None if the result is not worth one.
    """

    raw: bytes | None = None
    form: ResponseMode = "raw"
    handle: str | None = None
    size: int = 0
    limits: SummaryLimits | None = None


_AS_RECEIVED: Final = _Rendered()


class ToolResultRenderer:
    """Renders tool results for all calls. `max_bytes`: maximum bytes of stored texts of a session; 0: none."""

    def __init__(self, store: Results, most: int) -> None:
        self.max_bytes = most
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
        is_summarized: bool = False,
        shows_requested: bool = True,
    ) -> ShownResults | None:
        """Return the messages, each in its mode; None if none of them changes.

        Without a session, or while the store is unavailable, no text can be stored. Then nothing is left out, and
        results are shown as tables at most.

        Args:
            messages: the messages of the request.
            modes: the mode of each message.
            session: stores the texts; None if there is none.
            blocks: extracts to show instead, by the index of the message (`show_blocks`).
            is_summarized: a model makes summaries.
            shows_requested: send texts complete that a tool call requested by handle, even in `handle_only`.
        """
        is_short = bool(blocks) or not {*modes} <= {"raw", "table"}
        if is_short and session is not None and self.max_bytes:
            with contextlib.suppress(StoreUnavailable):
                rendered = await self._render(messages, modes, session, blocks)
                rendered = await self._with_requested(messages, modes, rendered, shows_requested=shows_requested)
                texts, refused = await self._texts_to_store(messages, rendered, session)
                rendered = await self._without_handles(refused, messages, rendered)
                if not is_summarized:
                    return _results(messages, rendered, texts)
                return await self._with_decided(messages, rendered, texts, session)
        lossless = [milder(mode, "table") for mode in modes]
        return _results(messages, await self._render(messages, lossless, None, _NO_BLOCKS), {})

    async def decide(self, summaries: Mapping[str, str], session: SessionKey) -> bool:
        """Store which summaries replace results from now on; return False if that fails (`SummaryChoices.decide`)."""
        try:
            await self._decisions.decide(session, summaries, self.max_bytes)
        except StoreUnavailable:
            return False
        return True

    async def keep(self, shown: ShownResults, session: SessionKey) -> bool:
        """Store the texts of the handles. If this returns False, the messages must be shown again.

        Call this only when the call is about to be sent: a refused call must not leave texts in the store.
        """
        if not shown.texts:
            return True
        is_long = sum(len(message.raw) for message in shown.texts.values()) > _INLINE_BYTES
        texts = await asyncio.to_thread(_texts, shown) if is_long else _texts(shown)
        try:
            return not await self._store.keep_results(session, texts, self.max_bytes)
        except StoreUnavailable:
            return False

    async def _render(
        self,
        messages: Sequence[bytes],
        modes: Sequence[ResponseMode],
        session: SessionKey | None,
        blocks: Mapping[int, Sequence[int]],
    ) -> Sequence[_Rendered]:
        """Render each message in its mode, or as its blocks."""
        rendered = [_AS_RECEIVED] * len(messages)
        for mode in {*modes} - {"raw"}:
            indices = [index for index, its_mode in enumerate(modes) if its_mode == mode and index not in blocks]
            shown = await self._render_in_mode([messages[index] for index in indices], mode, session)
            for index, message in zip(indices, shown, strict=True):
                rendered[index] = message
        if blocks:
            extracts = await self._render_extracts(
                [(messages[index], tuple(chosen)) for index, chosen in blocks.items()], session
            )
            for index, message in zip(blocks, extracts, strict=True):
                rendered[index] = message
        return rendered

    async def _render_in_mode(
        self, messages: Sequence[bytes], mode: ResponseMode, session: SessionKey | None
    ) -> Sequence[_Rendered]:
        owner = _owner(session) if mode != "table" else ""
        handle_of = _handles(owner)

        def work() -> Sequence[_Rendered]:
            return self._cache.get_many(
                f"{mode}\0{owner}",
                [digest(raw) for raw in messages],
                lambda missing: (_rendered(show(messages[index], mode, handle_of)) for index in missing),
                _rendered_bytes,
            )

        return await asyncio.to_thread(work) if sum(map(len, messages)) > _INLINE_BYTES else work()

    async def _render_extracts(
        self, chosen: Sequence[tuple[bytes, tuple[int, ...]]], session: SessionKey | None
    ) -> Sequence[_Rendered]:
        """Render results as these blocks of them (`show_blocks`)."""
        owner = _owner(session)
        handle_of = _handles(owner)

        def work() -> Sequence[_Rendered]:
            return self._cache.get_many(
                f"blocks\0{owner}",
                [(digest(raw), blocks) for raw, blocks in chosen],
                lambda missing: (_rendered(show_blocks(*chosen[index], handle_of)) for index in missing),
                _rendered_bytes,
            )

        return await asyncio.to_thread(work) if sum(len(raw) for raw, _ in chosen) > _INLINE_BYTES else work()

    async def _texts_to_store(
        self, messages: Sequence[bytes], rendered: Sequence[_Rendered], session: SessionKey
    ) -> tuple[Mapping[str, KeptContent], Collection[str | None]]:
        """Return the texts to store, and the handles whose texts the session has no room for.

        Texts that were stored earlier are checked too, as the store may have deleted them.
        """
        pairs = zip(messages, rendered, strict=True)
        originals = {
            message.handle: (KeptContent(raw, message.form), message.size) for raw, message in pairs if message.handle
        }
        missing = await self._store.missing_results(session, list(originals)) if originals else ()
        if not missing:
            return {}, ()
        room = self.max_bytes - await self._store.results_size(session)
        texts = {}
        for handle in missing:
            kept, size = originals[handle]
            if size <= room:
                room -= size
                texts[handle] = kept
        return texts, {*missing} - {*texts}

    async def _without_handles(
        self, refused: Collection[str | None], messages: Sequence[bytes], rendered: Sequence[_Rendered]
    ) -> Sequence[_Rendered]:
        """Replace messages whose handle has no text by tables."""
        indices = [index for index, message in enumerate(rendered) if message.handle in refused]
        return await self._with_tables(indices, messages, rendered)

    async def _with_requested(
        self,
        messages: Sequence[bytes],
        modes: Sequence[ResponseMode],
        rendered: Sequence[_Rendered],
        *,
        shows_requested: bool,
    ) -> Sequence[_Rendered]:
        """Replace results that a tool call requested by handle by tables, which are complete.

        Otherwise the model could never see the full text. `shows_requested`: do so even in `handle_only`.
        """
        if not any(message.handle for message in rendered):
            return rendered
        indices = [
            index
            for index in _requested(messages)
            if rendered[index].handle and (shows_requested or modes[index] != "handle_only")
        ]
        return await self._with_tables(indices, messages, rendered)

    async def _with_tables(
        self, indices: Sequence[int], messages: Sequence[bytes], rendered: Sequence[_Rendered]
    ) -> Sequence[_Rendered]:
        if not indices:
            return rendered
        tables = await self._render_in_mode([messages[index] for index in indices], "table", None)
        replacements = dict(zip(indices, tables, strict=True))
        return [replacements.get(index, message) for index, message in enumerate(rendered)]

    async def _with_decided(
        self,
        messages: Sequence[bytes],
        rendered: Sequence[_Rendered],
        texts: Mapping[str, KeptContent],
        session: SessionKey,
    ) -> ShownResults | None:
        """Return the rendered messages with the summaries that are decided, and the results that are pending."""
        summable = {message.handle for message in rendered if message.handle and message.limits}
        # If a full text is missing, the store may have deleted the session and its decisions as well.
        summaries = await self._decisions.known(session, summable, unsure=texts) if summable else {}
        undecided = {
            message.handle: PendingExtract(index, messages[index], message.handle, message.limits)
            for index, message in enumerate(rendered)
            if message.handle and message.limits and message.handle not in summaries
        }
        if undecided and not await self._has_room(
            sum(message.size for message in rendered if message.handle in texts), session
        ):
            undecided = {}
        shown = _results(messages, await self._with_summaries(summaries, messages, rendered), texts)
        return shown._replace(pending=tuple(undecided.values())) if shown is not None else None

    async def _has_room(self, pending: int, session: SessionKey) -> bool:
        """Return whether summaries can be stored in addition to `pending` bytes. Without room none are requested."""
        return await self._store.results_size(session) + pending + _SUMMARIES_BYTES <= self.max_bytes

    async def _with_summaries(
        self, summaries: Mapping[str, str], messages: Sequence[bytes], rendered: Sequence[_Rendered]
    ) -> Sequence[_Rendered]:
        """Replace extracts by these summaries."""
        indices = [
            index for index, message in enumerate(rendered) if message.limits and summaries.get(message.handle or "")
        ]
        if not indices:
            return rendered

        def render(index: int) -> _Rendered:
            handle = rendered[index].handle or ""
            return rendered[index]._replace(raw=with_summary(messages[index], summaries[handle], handle))

        def work() -> Sequence[_Rendered]:
            return self._cache.get_many(
                "summaries",
                [
                    (digest(messages[index]), rendered[index].handle, summaries[rendered[index].handle or ""])
                    for index in indices
                ],
                lambda missing: (render(indices[index]) for index in missing),
                lambda summarized: _ENTRY_BYTES + 2 * len(summarized.raw or b""),
            )

        is_long = sum(len(messages[index]) for index in indices) > _INLINE_BYTES
        replacements = dict(zip(indices, await asyncio.to_thread(work) if is_long else work(), strict=True))
        return [replacements.get(index, message) for index, message in enumerate(rendered)]


def _owner(session: SessionKey | None) -> str:
    return f"{session.namespace}\0{session.id}" if session is not None else ""


def _handles(owner: str) -> Callable[[str], str]:
    """Return a function that makes the handle of a text. Handles differ between sessions."""
    key = digest(owner.encode())

    def handle_of(text: str) -> str:
        return f"tr_{blake2b(text.encode('utf-8', 'surrogatepass'), key=key, digest_size=16).hexdigest()}"

    return handle_of


def _rendered(shown: ShownResult | None) -> _Rendered:
    if shown is None:
        return _AS_RECEIVED
    return _Rendered(shown.raw, shown.form, shown.handle, _size(shown.content or ""), shown.summary_limits)


def _rendered_bytes(rendered: _Rendered) -> int:
    return _ENTRY_BYTES + len(rendered.raw or b"")


def _requested(messages: Sequence[bytes]) -> Iterator[int]:
    """Yield the indices of results whose tool call has a handle in its arguments."""
    requesting: Collection[object] = ()
    for index, raw in enumerate(messages):
        if _CALLS in raw:
            requesting = _requesting_calls(raw) if _HANDLE.search(raw) else ()
        elif requesting:
            message, _ = parse_bytes(raw)
            if (
                isinstance(message, dict)
                and message.get("role") == "tool"
                and message.get("tool_call_id") in requesting
            ):
                yield index


def _requesting_calls(raw: bytes) -> Collection[object]:
    """Return the ids of the tool calls in a message that have a handle in their arguments."""
    message, _ = parse_bytes(raw)
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return [
        call.get("id")
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and _HANDLE.search(encode(call.get("function")))
    ]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _texts(shown: ShownResults) -> Mapping[str, str]:
    return {handle: text.text for handle, text in shown.texts.items()}


def _results(
    messages: Sequence[bytes], rendered: Sequence[_Rendered], texts: Mapping[str, KeptContent]
) -> ShownResults | None:
    if all(message.raw is None for message in rendered):
        return None
    sent = tuple(raw if message.raw is None else message.raw for raw, message in zip(messages, rendered, strict=True))
    return ShownResults(sent, tuple("raw" if message.raw is None else message.form for message in rendered), texts)
