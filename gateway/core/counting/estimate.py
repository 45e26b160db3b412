"""Estimate the input tokens that a provider will report, with the numbers of the model's family.

Every message is measured once and kept in the cache under its own bytes; a turn costs its new messages. Nothing here
raises on any JSON. What was learned from reported usage comes on top: `calibration.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, Final, Literal

from gateway.core.conversation.message import IGNORED, keys_of, plain
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
from gateway.core.counting.request import Piece, RequestParts, decoded
from gateway.core.counting.run_cache import RunCache
from gateway.core.counting.sums import MessageSums
from gateway.core.counting.tools import compact
from gateway.core.repeated import digest_again
from gateway.core.values import dataclass

#: How good a number is. exact: this kind of request is predicted to the token; calibrated: by the family's numbers;
#: learned: corrected by what the provider reported before.
Source = Literal["exact", "calibrated", "learned"]

#: marks of a request's shape that come from single messages: they are gone once those messages are left out
OF_MESSAGES: Final = frozenset({"sealed", "image", "media", "other"})

#: all marks, in the order in which a shape names them
_MARKS: Final = ("tools", "forced", "schema", "thinking", "system", "sealed", "image", "media", "server", "other")

#: bytes that a kept measure takes, and more for each of its media, results and calls
_MEASURE_BYTES: Final = 400
_PART_BYTES: Final = 200
#: what stands round the declarations of functions
_NAMESPACE: Final = "namespace functions {\n\n} // namespace functions"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A request's prompt tokens.

    Attributes:
        tokens: what the provider is expected to report.
        source: `exact` or `calibrated`.
        spread: how far above `tokens` the report may lie, as a share of them, while nothing is learned.
        doubt: how many tokens more its images and files may cost, where their sizes are not known.
        shape: what the request makes use of; requests of one shape are wrong by the same offset.
        family: the name of the family whose numbers were used.
        counter: the name of the token counter.
        context: the parts of the context.
        overhead: the part of `tokens` that belongs to no message: what frames the request, tools, schema, a system text
            that is no message. `message_tokens` adds up to the rest, and to the thinking that the provider drops.
        frames: the number of its tool calls, or of its messages where no tools are offered. What a provider adds beyond
            its family's numbers comes once for each of these, or once for the request.
        newest: the part of `tokens` after the last message of an assistant; 0 where there is none.
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
        """The same for a request of so many frames."""
        return Estimate(
            self.tokens, self.source, self.spread, self.doubt, self.shape, self.family, self.counter, self.context,
            self.overhead, frames, self.newest,
        )  # fmt: skip

    @property
    def has_tools(self) -> bool:
        """Whether tools are offered."""
        return "tools" in self.shape.split("+")


#: formats of which a cut chooses among their messages in the words of a chat
_SEEN_TWICE: Final = frozenset[Wire]({"messages", "responses"})
#: characters of a text that takes longer to be counted again than to be found
_LONG: Final = 200


class _CountsOnce:
    """A counter that remembers what long texts come to."""

    def __init__(self, counter: TokenCounter, cache: CountCache) -> None:
        self.name = counter.name
        self._counter = counter
        self._cache = cache

    def count(self, text: str) -> int:
        """See `TokenCounter.count`."""
        return self._counter.count(text) if len(text) < _LONG else self._cache.tokens(self._counter, text)


class Estimator:
    """Weighs requests.

    Args:
        families: the numbers.
        counter_for: the name of a tokenizer -> its counter.
        cache: where measures are kept; shared with whoever else counts.
        read: the value of a message's bytes, as `decoded` says it; a faster one may be at hand.
    """

    def __init__(
        self,
        families: TokenizerFamilies,
        counter_for: Callable[[str], TokenCounter],
        cache: CountCache,
        read: Callable[[bytes], Any] = decoded,
    ) -> None:
        self.families = families
        self._counter_for = counter_for
        self._cache = cache
        self._read = read
        self._runs = RunCache(cache)

    def estimate(self, request: RequestParts, *, keys: Sequence[bytes] | None = None) -> Estimate:
        """The prompt tokens of a request. `keys`: what `keys_of` says of its messages, where it was asked before."""
        overhead = self.overhead(request)
        if keys is None:
            return self.of(overhead, self.sums(overhead, request.messages))
        return self.having(overhead, request.messages, keys)

    def having(self, overhead: Overhead, messages: Sequence[Piece], keys: Sequence[bytes]) -> Estimate:
        """The prompt tokens of a request with these messages, of which `keys_of` says `keys`.

        The sums of the messages go on from those of a shorter conversation.
        """

        def extend(start: int, known: MessageSums | None) -> MessageSums:
            return self.sums(overhead, messages[start:], keys[start:], known)

        sums = self._runs.extended(f"sums\0{overhead.kind}", tuple(keys), extend, lambda sums: sums.size_bytes)
        return self.of(overhead, sums)

    def of(self, overhead: Overhead, total: MessageSums) -> Estimate:
        """The prompt tokens of a request. `total`: the sums of its messages, which the request need not hold then."""
        request, counter, tools = overhead.request, overhead.counter, overhead.tools
        family = self.family(request)
        counts, media, system = total.kept(family.thoughts), total.media, total.system
        said = counts_tokens(counts, family) + sum([media_tokens(item, family) for item in media])
        system_field = sum([_measure_tokens(item, family) for item in overhead.system])
        tokens = (
            said
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
            context=total.parts(tools.typescript if family.rendering == "typescript" else tools.json),
            overhead=math.ceil(tokens - said + system_field),
            frames=counts.calls if tools.count else counts.messages,
            newest=round(counts_tokens(total.new, family)) if total.new is not None else 0,
        )

    def overhead(self, request: RequestParts) -> Overhead:
        """What stands beside the messages of a request, measured."""
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
        """Format, counter and system text: sums may go on from those of a request where these are the same."""
        system = _content(request.system) if request.system is not None else None
        return request.wire, self.counter(request).name, digest_again(system) if system is not None else None

    def counter(self, request: RequestParts) -> TokenCounter:
        """What counts the texts of a request."""
        return self._counter_for(self.tokenizer(request))

    def family(self, request: RequestParts) -> TokenizerFamily:
        """The family whose numbers a request is weighed with."""
        return self.families.of(request.model, request.provider, request.wire)

    def tokenizer(self, request: RequestParts) -> str:
        """The name of the tokenizer a request is counted with."""
        return request.tokenizer or self.family(request).tokenizer

    def message_tokens(
        self, request: RequestParts, messages: Sequence[Piece] | None = None, *, read_as: Wire | None = None
    ) -> list[int]:
        """What each message of a request adds, in order; without its tools and what frames the whole.

        `messages`: others than its own; `read_as`: the format they are written in, where it is not the request's.
        """
        family, counter = self.family(request), self._once(self.counter(request), request.wire)
        pieces = request.messages if messages is None else messages
        measures = self._of_messages(read_as or request.wire, pieces, counter)
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
        """Sums of messages of a request, and of its system text where that is none of them.

        Args:
            overhead: what stands beside them.
            messages: to be measured.
            keys: what `keys_of` says of them, where it was asked before.
            before: the sums of all that come before them; of one kind with the request's, see `Overhead.kind`.
        """
        wire = overhead.request.wire
        measures = self._of_messages(wire, messages, self._once(overhead.counter, wire), keys)
        starts = [place for place, item in enumerate(measures) if item.is_all]
        if starts:
            measures, before = measures[starts[-1] :], None
        return (overhead.start if before is None else before).plus(measures)

    def _system(self, request: RequestParts, counter: TokenCounter) -> tuple[MeasuredMessage, ...]:
        if request.system is None:
            return ()
        kind = f"system\0{counter.name}"
        return (self._kept(kind, request.system, lambda value: text_measure(value, counter), _measure_bytes),)

    def _of_messages(
        self, wire: Wire, pieces: Sequence[Piece], counter: TokenCounter, keys: Sequence[bytes] | None = None
    ) -> list[MeasuredMessage]:
        """Measures of the messages, most of them from the cache; what cannot be a key is measured anew."""
        if keys is not None:
            return self._of_keyed(wire, pieces, counter, keys)
        contents = [_content(piece) for piece in pieces]
        keyed = [content for content in contents if content is not None]
        found = self._of_keyed(wire, keyed, counter, keys_of(keyed))
        for index, content in enumerate(contents):
            if content is None:
                found.insert(index, measure(wire, pieces[index], counter))
        return found

    def _once(self, counter: TokenCounter, wire: Wire) -> TokenCounter:
        """A counter for a conversation of this format: where it is weighed as a chat, too, it is the same texts."""
        return _CountsOnce(counter, self._cache) if wire in _SEEN_TWICE else counter

    def _of_keyed(
        self, wire: Wire, contents: Sequence[Piece], counter: TokenCounter, keys: Sequence[bytes]
    ) -> list[MeasuredMessage]:
        return self._cache.get_keyed(
            f"{wire}\0{counter.name}",
            keys,
            lambda missing: [measure(wire, self._read(plain(contents[index])), counter) for index in missing],
            _measure_bytes,
        )

    def _kept(self, kind: str, piece: Piece, compute: Callable[[Any], Any], size: Callable[[Any], int]) -> Any:
        content = _content(piece)
        if content is None:
            return compute(piece)
        return self._cache.get(kind, content, lambda: compute(decoded(piece)), size)

    def _tools(self, request: RequestParts, counter: TokenCounter) -> ToolDefinitions:
        kind = f"tools\0{counter.name}"
        found = [
            self._kept(kind, piece, lambda value: count_tools(value, counter), lambda _: 100) for piece in request.tools
        ]
        return reduce(ToolDefinitions.plus, found) if found else NO_TOOLS

    def _others(self, request: RequestParts, counter: TokenCounter) -> tuple[MeasuredMessage, ...]:
        """Measures of the fields nobody here knows: a provider may show them to the model."""
        kind = f"field\0{counter.name}"
        measures = [
            self._kept(kind, piece, lambda value: other_measure(value, counter), _measure_bytes)
            for piece in request.others
        ]
        return tuple(measures)

    def _schema(self, request: RequestParts, counter: TokenCounter) -> int:
        """Tokens of the schema an answer must follow, as far as models are shown it, with its name and description."""
        if request.schema is None:
            return 0
        tokens: int = self._kept(
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
    """What the texts and the frames of messages cost in a family."""
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
    """What an image, a recording or a file costs in a family, as far as public rules go."""
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
    """How many tokens more a part may cost whose size or text cannot be seen."""
    if item.kind == "image":
        return image_doubt(item, family.image)
    return 0.0 if item.kind == "text" else media_tokens(item, family)


#: compressed speech at 64 kbit/s
_AUDIO_BYTES_A_SECOND: Final = 8_000
#: a page of a PDF whose pages cannot be seen, on average
_PDF_BYTES_A_PAGE: Final = 50_000
#: 300 tokens a second (https://ai.google.dev/gemini-api/docs/video-understanding) of video with 1 Mbit/s
_VIDEO_BYTES_A_TOKEN: Final = 400
#: office files are packed: recorded spreadsheets and letters of 5 kB made 50 tokens, photos of text far less
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


def _content(value: object) -> bytes | None:
    """A piece's bytes, to be hashed as its key; None where it cannot be written as JSON."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    except (ValueError, TypeError, RecursionError):
        return None
