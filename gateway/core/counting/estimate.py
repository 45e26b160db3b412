"""Estimate the input tokens of a request with the token overheads of its model family.

Each message is counted once and cached by a hash of its bytes, so that a turn only costs its new messages. No JSON
value raises an error. `calibration.py` then corrects the estimate by what providers reported earlier.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, Final, Literal

from gateway.core.conversation.message import IGNORED, keys_of, without_cache_marks
from gateway.core.counting.cache import CountCache
from gateway.core.counting.context import ContextCounts
from gateway.core.counting.definitions import NO_TOOLS, ToolDefinitions, count_tools, shown_schema
from gateway.core.counting.families import TokenizerFamilies, TokenizerFamily
from gateway.core.counting.images import image_doubt, image_tokens
from gateway.core.counting.measure import (
    ContentTokens,
    MeasuredMessage,
    TokenCounter,
    Wire,
    measure,
    other_measure,
    text_measure,
)
from gateway.core.counting.media import Media
from gateway.core.counting.overhead import Overhead, marks_of
from gateway.core.counting.request import Piece, RequestParts, decode_piece
from gateway.core.counting.run_cache import RunCache
from gateway.core.counting.sums import MessageSums
from gateway.core.counting.tools import compact
from gateway.core.repeated import cached_digest
from gateway.core.values import dataclass

#: Quality of an estimate:
#: - `exact`: requests of this kind are predicted to the token;
#: - `calibrated`: computed with the numbers of the model family;
#: - `learned`: corrected by earlier reports of the provider.
Source = Literal["exact", "calibrated", "learned"]

#: marks of a request shape that come from single messages; dropping these messages removes the mark
MESSAGE_MARKS: Final = frozenset({"sealed", "image", "media", "other"})

#: all marks of a shape, in the order in which it lists them
_MARKS: Final = ("tools", "forced", "schema", "thinking", "system", "sealed", "image", "media", "server", "other")

#: bytes that a cached measure takes, and for each of its media, results and calls
_MEASURE_BYTES: Final = 400
_PART_BYTES: Final = 200
#: the text around the declarations of functions
_NAMESPACE: Final = "namespace functions {\n\n} // namespace functions"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated input tokens of a request.

    Attributes:
        tokens: input tokens that the provider is expected to report.
        source: `exact` or `calibrated`.
        spread: how far the report may exceed `tokens` before anything is learned, as a share of `tokens`.
        doubt: tokens by which images and files of unknown size may exceed their estimate.
        shape: the features that the request uses; requests of one shape have the same offset.
        family: name of the model family.
        counter: name of the token counter.
        context: the parts of the context.
        overhead: the part of `tokens` that belongs to no message: frame of the request, tools, schema, separate system
            prompt. `message_tokens` adds up to the rest, plus the thinking that the provider drops.
        frames: number of tool calls, or number of messages if no tools are offered. What a provider adds beyond the
            numbers of its family is added once per frame, or once per request.
        newest: the part of `tokens` after the last assistant message; 0 if there is none.
    """

    tokens: int
    source: Source
    spread: float
    doubt: int
    shape: str
    family: str
    counter: str
    context: ContextCounts
    overhead: int = 0
    frames: int = 0
    newest: int = 0

    def with_frames(self, frames: int) -> Estimate:
        """Return a copy with another number of frames."""
        return Estimate(
            self.tokens, self.source, self.spread, self.doubt, self.shape, self.family, self.counter, self.context,
            self.overhead, frames, self.newest,
        )  # fmt: skip

    @property
    def has_tools(self) -> bool:
        """Return True if the request offers tools."""
        return "tools" in self.shape.split("+")


#: Formats that are trimmed as chat messages, so that their texts are counted in two formats.
_CONVERTED_FORMATS: Final = frozenset[Wire]({"messages", "responses"})
#: Length of a text, in characters, from which a cache lookup is faster than counting again.
_CACHED_LENGTH: Final = 200


class _CachedCounter:
    """Count tokens, and cache the counts of long texts."""

    def __init__(self, counter: TokenCounter, cache: CountCache) -> None:
        self.name = counter.name
        self._counter = counter
        self._cache = cache

    def count(self, text: str) -> int:
        """Return the token count of a text."""
        return self._counter.count(text) if len(text) < _CACHED_LENGTH else self._cache.tokens(self._counter, text)


class Estimator:
    """Estimate the input tokens of requests.

    Args:
        families: the model families.
        counter_for: returns the counter of a tokenizer name.
        cache: stores the counts of messages; other components may share it.
        read: decodes the bytes of a message, like `decode_piece` but possibly faster.
    """

    def __init__(
        self,
        families: TokenizerFamilies,
        counter_for: Callable[[str], TokenCounter],
        cache: CountCache,
        read: Callable[[bytes], Any] = decode_piece,
    ) -> None:
        self.families = families
        self._counter_for = counter_for
        self._cache = cache
        self._read = read
        self._runs = RunCache(cache)

    def estimate(self, request: RequestParts, *, keys: Sequence[bytes] | None = None) -> Estimate:
        """Estimate the input tokens of a request.

        Pass `keys` if `keys_of` of its messages is already known.
        """
        overhead = self.overhead(request)
        if keys is None:
            return self.from_sums(overhead, self.sums(overhead, request.messages))
        return self.estimate_with_keys(overhead, request.messages, keys)

    def estimate_with_keys(self, overhead: Overhead, messages: Sequence[Piece], keys: Sequence[bytes]) -> Estimate:
        """Estimate the input tokens of a request with this overhead and these messages.

        The sums of the messages are computed from those of a shorter conversation, if they are cached. `keys` is
        `keys_of` of the messages.
        """

        def extend(start: int, known_sums: MessageSums | None) -> MessageSums:
            return self.sums(overhead, messages[start:], keys[start:], known_sums)

        sums = self._runs.get_extended(f"sums\0{overhead.kind}", tuple(keys), extend, lambda sums: sums.size_bytes)
        return self.from_sums(overhead, sums)

    def from_sums(self, overhead: Overhead, sums: MessageSums) -> Estimate:
        """Compute the estimate from the overhead and the sums of all messages.

        The request in `overhead` need not hold the messages.
        """
        request, counter, tools = overhead.request, overhead.counter, overhead.tools
        family = self.family(request)
        counts, media, system = sums.counts_with_kept_thinking(family.thoughts), sums.media, sums.system
        message_tokens = counts_tokens(counts, family) + sum([media_tokens(item, family) for item in media])
        system_field = sum([_measure_tokens(item, family) for item in overhead.system])
        tokens = (
            message_tokens
            + family.start
            + family.system * system
            + _tools_tokens(overhead, family, system=system)
            + (family.with_schema + family.schema * overhead.schema if request.schema is not None else 0)
            + family.thinking_on * request.thinking
            + sum([_measure_tokens(item, family) for item in overhead.others])
        )
        shape = _shape(overhead, counts, media, system=system)
        exact = (
            family.exact and shape in ("", "system") and not counts.calls and counter.name.endswith(family.tokenizer)
        )
        return Estimate(
            tokens=max(0, round(tokens)),
            source="exact" if exact else "calibrated",
            spread=0.0 if exact else family.spread,
            doubt=round(sum([media_doubt(item, family) for item in (*media, *overhead.media)])),
            shape=shape,
            family=family.name,
            counter=counter.name,
            context=sums.parts(tools.typescript if family.rendering == "typescript" else tools.json),
            overhead=math.ceil(tokens - message_tokens + system_field),
            frames=counts.calls if tools.count else counts.messages,
            newest=round(counts_tokens(sums.new, family)) if sums.new is not None else 0,
        )

    def overhead(self, request: RequestParts) -> Overhead:
        """Count the parts of a request that are not messages."""
        counter = self.counter(request)
        system, tools, others = (
            self._system(request, counter),
            self._tools(request, counter),
            self._others(request, counter),
        )
        name = request.forced_name
        return Overhead(
            request=request,
            counter=counter,
            kind=self.kind(request),
            system=system,
            start=MessageSums().plus(system),
            tools=tools,
            namespace=self._cache.tokens(counter, _NAMESPACE) if tools.count else 0,
            forced_name=self._cache.tokens(counter, name) if name else 0,
            schema=self._schema(request, counter),
            others=others,
            media=tuple([part for item in others for part in item.media]),
            marks=marks_of(request, tools),
        )

    def kind(self, request: RequestParts) -> Hashable:
        """Return the key of compatible sums: wire format, token counter and system prompt.

        The sums of a request can be continued for another request if both have the same kind.
        """
        system = _bytes_of(request.system) if request.system is not None else None
        return request.wire, self.counter(request).name, cached_digest(system) if system is not None else None

    def counter(self, request: RequestParts) -> TokenCounter:
        """Return the token counter for a request."""
        return self._counter_for(self.tokenizer(request))

    def family(self, request: RequestParts) -> TokenizerFamily:
        """Return the model family of a request."""
        return self.families.find(request.model, request.provider, request.wire)

    def tokenizer(self, request: RequestParts) -> str:
        """Return the name of the tokenizer for a request."""
        return request.tokenizer or self.family(request).tokenizer

    def message_tokens(
        self, request: RequestParts, messages: Sequence[Piece] | None = None, *, read_as: Wire | None = None
    ) -> list[int]:
        """Return the tokens that each message adds, in order; without tools and the frame of the request.

        Args:
            request: the request.
            messages: other messages to count instead of those of the request.
            read_as: the wire format of the messages if it is not that of the request.
        """
        family, counter = self.family(request), self._conversation_counter(self.counter(request), request.wire)
        pieces = request.messages if messages is None else messages
        measures = self._measures(read_as or request.wire, pieces, counter)
        return [
            0 if piece == IGNORED else round(_measure_tokens(item, family))
            for piece, item in zip(pieces, measures, strict=True)
        ]

    def sums(
        self,
        overhead: Overhead,
        messages: Sequence[Piece],
        keys: Sequence[bytes] | None = None,
        before: MessageSums | None = None,
    ) -> MessageSums:
        """Add up the counts of messages, and of the separate system prompt if there is one.

        Args:
            overhead: the overhead of the request.
            messages: the messages to count.
            keys: `keys_of` of the messages, if known.
            before: the sums of all earlier messages, of the same kind (see `Estimator.kind`).
        """
        wire = overhead.request.wire
        measures = self._measures(wire, messages, self._conversation_counter(overhead.counter, wire), keys)
        starts = [place for place, item in enumerate(measures) if item.replaces_earlier]
        if starts:
            measures, before = measures[starts[-1] :], None
        return (overhead.start if before is None else before).plus(measures)

    def _system(self, request: RequestParts, counter: TokenCounter) -> tuple[MeasuredMessage, ...]:
        if request.system is None:
            return ()
        kind = f"system\0{counter.name}"
        return (self._cached(kind, request.system, lambda value: text_measure(value, counter), _measure_bytes),)

    def _measures(
        self, wire: Wire, pieces: Sequence[Piece], counter: TokenCounter, keys: Sequence[bytes] | None = None
    ) -> list[MeasuredMessage]:
        """Return the measures of messages, most of them from the cache.

        A message that cannot be written as JSON has no key and is always measured.
        """
        if keys is not None:
            return self._measures_of_keys(wire, pieces, counter, keys)
        contents = [_bytes_of(piece) for piece in pieces]
        keyed = [content for content in contents if content is not None]
        measures = self._measures_of_keys(wire, keyed, counter, keys_of(keyed))
        for index, content in enumerate(contents):
            if content is None:
                measures.insert(index, measure(wire, pieces[index], counter))
        return measures

    def _conversation_counter(self, counter: TokenCounter, wire: Wire) -> TokenCounter:
        """Return a counter for messages of this format, which caches long texts if they are counted in two formats."""
        return _CachedCounter(counter, self._cache) if wire in _CONVERTED_FORMATS else counter

    def _measures_of_keys(
        self, wire: Wire, contents: Sequence[Piece], counter: TokenCounter, keys: Sequence[bytes]
    ) -> list[MeasuredMessage]:
        return self._cache.get_many(
            f"{wire}\0{counter.name}",
            keys,
            lambda missing: [
                measure(wire, self._read(without_cache_marks(contents[index])), counter) for index in missing
            ],
            _measure_bytes,
        )

    def _cached(self, kind: str, piece: Piece, compute: Callable[[Any], Any], size: Callable[[Any], int]) -> Any:
        content = _bytes_of(piece)
        if content is None:
            return compute(piece)
        return self._cache.get(kind, content, lambda: compute(decode_piece(piece)), size)

    def _tools(self, request: RequestParts, counter: TokenCounter) -> ToolDefinitions:
        kind = f"tools\0{counter.name}"
        definitions = [
            self._cached(kind, piece, lambda value: count_tools(value, counter), lambda _: 100)
            for piece in request.tools
        ]
        return reduce(ToolDefinitions.plus, definitions) if definitions else NO_TOOLS

    def _others(self, request: RequestParts, counter: TokenCounter) -> tuple[MeasuredMessage, ...]:
        """Return the measures of unknown fields, because a provider may show them to the model."""
        kind = f"field\0{counter.name}"
        measures = [
            self._cached(kind, piece, lambda value: other_measure(value, counter), _measure_bytes)
            for piece in request.others
        ]
        return tuple(measures)

    def _schema(self, request: RequestParts, counter: TokenCounter) -> int:
        """Return the tokens of the response schema as models see it, with its name and description."""
        if request.schema is None:
            return 0
        tokens: int = self._cached(
            f"schema\0{counter.name}",
            request.schema,
            lambda value: counter.count(compact(shown_schema(value))),
            lambda _: 0,
        )
        return tokens + sum(
            self._cache.tokens(counter, text) for text in (request.schema_name, request.schema_about) if text
        )


def _tools_tokens(overhead: Overhead, family: TokenizerFamily, *, system: bool) -> float:
    tools, request = overhead.tools, overhead.request
    tokens = tools.server * family.server_tool + tools.server_json * family.other
    if not tools.count and not (tools.server and family.server_tool):
        return tokens
    tokens += family.tools_system if system and family.tools_system is not None else family.tools
    if family.rendering == "typescript":
        tokens += family.tool_text * (tools.typescript + overhead.namespace)
    else:
        tokens += family.tool_text * tools.json
    tokens += family.per_tool * tools.count + family.forced * request.forced
    if request.forced_name:
        tokens += family.forced_name + (overhead.forced_name if family.forced_name else 0)
    return tokens


def _measure_tokens(item: MeasuredMessage, family: TokenizerFamily) -> float:
    return counts_tokens(item.counts, family) + sum([media_tokens(part, family) for part in item.media])


def counts_tokens(counts: ContentTokens, family: TokenizerFamily) -> float:
    """Return the provider tokens of texts and frames, by the factors of a model family."""
    return (
        family.text * counts.text
        + family.result * counts.result
        + family.call * counts.call
        + family.called * counts.called
        + family.thinking * counts.thinking
        + family.inline * counts.inline
        + family.sealed * max(0.0, counts.sealed - family.seal * counts.seals)
        + family.other * counts.other
        + family.message * counts.messages
        + family.per_call * counts.calls
        + family.per_result * counts.results
        + family.parallel * counts.parallel
    )


def media_tokens(item: Media, family: TokenizerFamily) -> float:
    """Return the provider tokens of an image, audio or file, by published rules."""
    if item.kind == "image":
        return image_tokens(item, family.image)
    if item.kind == "audio":
        return family.audio_second * (item.seconds or item.size / _AUDIO_BYTES_A_SECOND)
    if item.kind == "pdf":
        return family.pdf_page * (item.pages or max(1, round(item.size / _PDF_BYTES_A_PAGE)))
    if item.kind == "text":
        return family.document
    if item.kind == "video":
        return item.size / _VIDEO_BYTES_A_TOKEN
    return item.size / _FILE_BYTES_A_TOKEN


def media_doubt(item: Media, family: TokenizerFamily) -> float:
    """Return the tokens by which a part of unknown size or text may exceed its estimate."""
    if item.kind == "image":
        return image_doubt(item, family.image)
    return 0.0 if item.kind == "text" else media_tokens(item, family)


#: compressed speech at 64 kbit/s
_AUDIO_BYTES_A_SECOND: Final = 8_000
#: average size of a PDF page, for files whose pages cannot be counted
_PDF_BYTES_A_PAGE: Final = 50_000
#: 300 tokens a second (https://ai.google.dev/gemini-api/docs/video-understanding) of video with 1 Mbit/s
_VIDEO_BYTES_A_TOKEN: Final = 400
#: Office files are compressed: recorded spreadsheets and letters of 5 kB made 50 tokens, photos of text far fewer.
_FILE_BYTES_A_TOKEN: Final = 40


def _shape(overhead: Overhead, counts: ContentTokens, media: Sequence[Media], *, system: bool) -> str:
    marks = {*overhead.marks, *["image" if item.kind == "image" else "media" for item in media]}
    if system:
        marks.add("system")
    if counts.sealed > 0:
        marks.add("sealed")
    if counts.other > 0:
        marks.add("other")
    return "+".join(sorted(marks, key=_MARKS.index))


def _measure_bytes(item: MeasuredMessage) -> int:
    return _MEASURE_BYTES + _PART_BYTES * (len(item.media) + len(item.results) + len(item.called))


def _bytes_of(value: object) -> bytes | None:
    """Return the bytes of a piece to compute its key, or None if it cannot be written as JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        return None
