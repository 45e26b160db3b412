"""Cache what is known of a message: tokens, blocks, terms, and its trimmed forms.

All of it depends on the message alone. So it is stored under the hash of the message, in a limited number of bytes, and
shared by every conversation that holds the message.

Facts about whole conversations have a table of their own. They take a tenth of the bytes, and most turns need nothing
else. In one common table, the trims of some conversations would evict them for all others. Then every turn of those
would be as slow as a trim.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, compress
from operator import add
from typing import Any, Final, NamedTuple, TypeVar, cast

from gateway.core.conversation.message import (
    RESULT_ROLES,
    Message,
    MessageOutline,
    decode,
    digest,
    encode,
    outline_of,
    parse_bytes,
    text_of,
    without_cache_marks,
)
from gateway.core.conversation.units import Conversation, ConversationOutline, Item
from gateway.core.counting.cache import CountCache
from gateway.core.counting.run_cache import RunCache
from gateway.core.trimming.blocks import SlicedMessage, render, slice_message, without_blocks
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.parameters import NO_PARAMETERS, Parameters, labelled, parameters_of
from gateway.core.trimming.terms import Lexicon, highest
from gateway.core.trimming.text_blocks import GAP
from gateway.core.values import dataclass

T = TypeVar("T")

#: tokens of a text
Count = Callable[[str], int]
#: tokens of each of some messages, including framing
CountTokens = Callable[[Sequence[bytes]], Sequence[int]]
#: what to render of a message: some of its blocks, or another content
RenderTarget = tuple[int, ...] | str

#: tokens of the frame around a message: role and separators
FRAME: Final = 4

#: replaces an assistant message of which no text can be shown
GAP_MARK: Final = encode({"role": "assistant", "content": GAP})

#: Bytes that objects, tables and references take in memory besides their texts.
_OUTLINE_BYTES: Final = 650
_CALL_BYTES: Final = 400
_BLOCK_BYTES: Final = 250
_TERM_BYTES: Final = 100
_NUMBER_BYTES: Final = 10
_COUNT_BYTES: Final = 40
#: Terms, which all conversations share, take one of so many parts of the memory; so do facts about conversations.
_LEXICON_SHARE: Final = 8
_CONVERSATIONS_SHARE: Final = 2
#: Messages that are counted between two looks at the clock: a counter takes about 10 microseconds for 100 bytes.
_BATCH: Final = 8


def counter_of(count: Count) -> CountTokens:
    """Return a simple `CountTokens`: role, text, calls and ids, and four tokens for the frame.

    Other content is counted as written. For an image this is far too much, and so never too little.
    """

    def count_tokens(messages: Sequence[bytes]) -> list[int]:
        return [count(_text_to_count(raw)) + FRAME for raw in messages]

    return count_tokens


def _text_to_count(raw: bytes) -> str:
    message, _ = parse_bytes(raw)
    if not isinstance(message, dict):
        return raw.decode("utf-8", "replace")
    texts = [str(message.get("role", "")), "\n", _content_text(message.get("content"))]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts.append(f"\n{call.get('id', '')} {function.get('name', '')} {function.get('arguments', '')}")
        else:
            texts.append(f"\n{call}")
    if message.get("tool_call_id"):
        texts.append(f"\n{message['tool_call_id']}")
    known = ("role", "content", "tool_calls", "tool_call_id", "cache_control")
    texts.extend(f"\n{name} {value}" for name, value in message.items() if name not in known and value)
    return "".join(texts)


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    return str(content)


@dataclass(frozen=True, slots=True)
class KnownBlocks:
    """The blocks of a message, the terms of each, and its estimated tokens."""

    sliced: SlicedMessage
    terms: tuple[tuple[str, ...], ...]
    #: how many terms the blocks have in total
    length: int
    #: terms of what cannot be split, such as names and arguments of calls; all terms if nothing can be split
    fixed: tuple[str, ...]
    #: all terms of the message, with their kinds
    all_terms: dict[str, int]
    #: the terms that are more than words
    named: frozenset[str]
    #: only for results: names of values, and the blocks that have one, see `labelled`
    labels: Mapping[str, Sequence[int]]
    #: Tokens of each block, estimated from the message's tokens per character. Only final results are counted exactly.
    tokens: tuple[float, ...]
    #: the same, including the block that each block needs
    costs: tuple[float, ...]


class RenderedMessage(NamedTuple):
    """A rendered message: its bytes (None if it is dropped), its tokens without `Reader.framing`, and its hash."""

    raw: bytes | None
    tokens: int
    key: bytes


class RenderOrder(NamedTuple):
    """An order to render a message: the message, and what to keep of it."""

    item: Item
    raw: bytes
    target: RenderTarget


class Framing(NamedTuple):
    """Tokens to add to a message's count: once per message, and once per tool call."""

    message: int = 0
    call: int = 0

    def added(self, tokens: int, calls: int) -> int:
        """Return the tokens of a message with so many calls, including the framing.

        Framing can be negative. The result is at least 1, because the value per token is computed from it.
        """
        more = self.message + self.call * calls
        return max(1, tokens + more) if more else tokens

    def added_to(self, tokens: Sequence[int], calls: Sequence[int]) -> list[int]:
        """Return the same for many messages, without a Python step per message unless a count falls below 1."""
        found = list(map(add, tokens, map(self.message.__add__, map(self.call.__mul__, calls))))
        return found if min(found, default=1) > 0 else list(map(self.added, tokens, calls))


_UNFRAMED: Final = Framing()


class Reader:
    """Read messages and cache what was read.

    Args:
        count_tokens: counts tokens of messages; the same bytes must always have the same count.
        limit_bytes: the memory for everything that is cached.
        lock: guards the tables if threads share them.
    """

    def __init__(
        self,
        count_tokens: CountTokens,
        *,
        limit_bytes: int = 64 * 1024 * 1024,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._count_tokens = count_tokens
        self._counter_name = ""
        #: Added only to counts that are returned. It is learned and changes from turn to turn, so cached counts and
        #: rendered messages are without it.
        self.framing = _UNFRAMED
        terms, conversations = limit_bytes // _LEXICON_SHARE, limit_bytes // _CONVERSATIONS_SHARE
        self._lexicon = Lexicon(terms)
        self._cache = CountCache(limit_bytes - terms - conversations, lock)
        self._conversations = CountCache(conversations, lock)
        self._runs = RunCache(self._conversations)

    def with_counter(self, count_tokens: CountTokens, name: str, framing: Framing = _UNFRAMED) -> Reader:
        """Return a reader with the same cache and another counter; `name` must be unique per `count_tokens`."""
        other = Reader(count_tokens, limit_bytes=0)
        other.framing = framing
        other._counter_name, other._lexicon, other._runs = name, self._lexicon, self._runs
        other._cache, other._conversations = self._cache, self._conversations
        return other

    @property
    def size_bytes(self) -> int:
        """Return the approximate size of everything that is cached."""
        return self._cache.size_bytes + self._conversations.size_bytes + self._lexicon.size_bytes

    def outlines(self, keys: Sequence[bytes], messages: Sequence[bytes]) -> Sequence[MessageOutline]:
        """Return the outline of each message."""
        return self._cache.get_many(
            "message outline", keys, lambda missing: [outline_of(messages[index]) for index in missing], _message_bytes
        )

    def outline(self, keys: tuple[bytes, ...], messages: Sequence[bytes]) -> ConversationOutline:
        """Return the outline of a conversation."""

        def extend(start: int, known: ConversationOutline | None) -> ConversationOutline:
            return (known or ConversationOutline()).plus(self.outlines(keys[start:], messages[start:]))

        return self._runs.get_extended("outline", keys, extend, _conversation_bytes)

    def token_counts(self, conversation: Conversation) -> list[int]:
        """Return the tokens of each message before a trim, including the framing."""
        keys, messages = conversation.keys, conversation.messages

        def extend(start: int, known: tuple[int, ...] | None) -> tuple[int, ...]:
            return (*(known or ()), *self._count_messages(keys[start:], messages[start:]))

        found: tuple[int, ...] = self._runs.get_extended(f"weights\0{self._counter_name}", keys, extend, _numbers_bytes)
        return self.framing.added_to(found, conversation.outline.calls) if self.framing != _UNFRAMED else list(found)

    def _count_messages(self, keys: Sequence[bytes], messages: Sequence[bytes]) -> list[int]:
        return self._cache.get_many(
            f"tokens\0{self._counter_name}",
            keys,
            lambda missing: self._count_tokens([messages[index] for index in missing]),
        )

    def sliced(self, item: Item, raw: bytes, deadline: Deadline) -> SlicedMessage:
        """Return the blocks of a message."""
        return self._sliced(item.key, raw, deadline, sealed=item.sealed)

    def _sliced(self, key: bytes, raw: bytes, deadline: Deadline, *, sealed: bool) -> SlicedMessage:

        def compute() -> SlicedMessage:
            deadline.tick()
            return _UNCUT if sealed else slice_message(decode(without_cache_marks(raw)), deadline)

        return self._cache.get_by_key("sliced", key, compute, _sliced_bytes)

    def parameters(self, tools: Sequence[bytes]) -> Parameters:
        """Return the parameters of tools, see `parameters_of`."""
        if not tools:
            return NO_PARAMETERS
        key = tuple(map(digest, tools))
        return self.cached("parameters", key, lambda: parameters_of(tools), lambda found: found.size_bytes)

    def read_blocks(self, keys: Sequence[bytes], raws: Sequence[bytes], deadline: Deadline) -> list[KnownBlocks]:
        """Return the blocks and terms of messages."""

        def compute(missing: Sequence[int]) -> Iterator[KnownBlocks]:
            # The keys leave out cache marks, so the cached values are read without the marks too.
            outlines = self.outlines([keys[index] for index in missing], [raws[index] for index in missing])
            return (
                self._read_message(keys[i], without_cache_marks(raws[i]), one, deadline)
                for i, one in zip(missing, outlines, strict=True)
            )

        return self._cache.get_many(f"known\0{self._counter_name}", keys, compute, _known_bytes)

    def render(self, orders: Sequence[RenderOrder], deadline: Deadline) -> list[RenderedMessage]:
        """Return rendered messages with their tokens."""
        # Keys leave out cache marks, so a marked message is rendered again with the marks that it has now.
        keys = [(digest(raw) if item.breakpoint else item.key, what) for item, raw, what in orders]
        return self._cache.get_many(
            f"made\0{self._counter_name}",
            keys,
            lambda missing: self._count_rendered(
                [self._render(orders[index], deadline) for index in missing], deadline
            ),
            _rendered_bytes,
        )

    def rendered(self, message: Message) -> RenderedMessage:
        """Return a message with its tokens that is used only once, and so is not cached."""
        return self._count_rendered([encode(message)], Deadline())[0]

    def cached(self, kind: str, key: Hashable, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return a cached fact about a conversation, computed on a miss; the cache key includes the counter's name."""
        return self._conversations.get_by_key(f"{kind}\0{self._counter_name}", key, compute, size)

    def cached_for_message(self, kind: str, key: bytes, compute: Callable[[], T], size: Callable[[T], int]) -> T:
        """Return a cached fact about a single message, computed on a miss."""
        return self._cache.get_by_key(f"{kind}\0{self._counter_name}", key, compute, size)

    def extend_cached(self, kind: str, key: Hashable, renew: Callable[[T | None], T], size: Callable[[T], int]) -> T:
        """Return a cached fact that grows: `renew` gets the cached value, or None, and returns the current one."""
        kind = f"{kind}\0{self._counter_name}"
        known = cast("T | None", self._conversations.peek(kind, key))
        new = renew(known)
        if new is not known:
            self._conversations.put(kind, key, new, size(new))
        return new

    def _render(self, order: RenderOrder, deadline: Deadline) -> bytes:
        item, raw, target = order
        deadline.tick()
        if item.sealed:
            return GAP_MARK  # signed messages cannot be changed, only replaced as a whole
        message = decode(raw)
        if isinstance(target, str):
            return encode({**message, "content": target})
        if not target and not item.calls:
            return encode(without_blocks(message))
        return encode(render(message, self.sliced(item, raw, deadline), target))

    def _count_rendered(self, messages: Sequence[bytes], deadline: Deadline) -> list[RenderedMessage]:
        keys = [digest(raw) for raw in messages]
        counts_so_far: list[int] = []
        for start in range(0, len(messages), _BATCH):
            deadline.tick(_BATCH)
            counts_so_far += self._count_messages(keys[start : start + _BATCH], messages[start : start + _BATCH])
        return list(map(RenderedMessage, messages, counts_so_far, keys))

    def _read_message(self, key: bytes, raw: bytes, one: MessageOutline, deadline: Deadline) -> KnownBlocks:
        sliced = self._sliced(key, raw, deadline, sealed=one.sealed)
        if one.sealed:
            found = self._lexicon.terms(text_of(raw))
            return KnownBlocks(sliced, (), 0, tuple(found), found, _named(found), {}, (), ())
        calls = decode(raw).get("tool_calls") if one.calls else None
        length = one.length + sum(len(str(call)) for call in calls or ()) + 8
        density = self._count_messages((key,), (raw,))[0] / length
        of_blocks = [self._lexicon.occurrences(block.text) for block in deadline.over(sliced.blocks)]
        fixed = self._lexicon.occurrences(sliced.fixed)
        tokens = tuple([len(block.text) * density for block in sliced.blocks])
        costs = tuple(
            [
                size + tokens[block.needs] if block.needs >= 0 else size
                for size, block in zip(tokens, sliced.blocks, strict=True)
            ]
        )
        terms = tuple([tuple(dict(found)) for found in of_blocks])
        size = sum(map(len, terms))
        all_terms = highest([*fixed, *chain.from_iterable(of_blocks)])
        labels = labelled([block.text for block in sliced.blocks]) if one.role in RESULT_ROLES else {}
        return KnownBlocks(sliced, terms, size, tuple(dict(fixed)), all_terms, _named(all_terms), labels, tokens, costs)


#: the blocks of a message that must not be split
_UNCUT: Final = SlicedMessage((), (), "", is_verbatim=True)


def _named(terms: Mapping[str, int]) -> frozenset[str]:
    return frozenset(compress(terms, terms.values()))  # of all kinds `WORD` alone is 0


def _message_bytes(found: MessageOutline) -> int:
    return _OUTLINE_BYTES + _CALL_BYTES * len(found.calls) + found.text_size


def _conversation_bytes(found: ConversationOutline) -> int:
    # Count the outlines in full: they may be cached only here, because the table of messages is not asked again.
    return _OUTLINE_BYTES * len(found.outlines) + _CALL_BYTES * sum(found.calls) + found.letters


def _numbers_bytes(found: Sequence[int]) -> int:
    return _COUNT_BYTES * len(found)


def _sliced_bytes(found: SlicedMessage) -> int:
    return len(found.fixed) + sum(_BLOCK_BYTES + len(block.text) for block in found.blocks)


def _known_bytes(found: KnownBlocks) -> int:
    terms = len(found.all_terms) + len(found.named)
    letters = sum(map(len, found.all_terms))
    numbers = 2 * found.length + len(found.fixed)
    blocks = _BLOCK_BYTES * (3 + len(found.terms))
    labels = sum(_TERM_BYTES + len(label) + _NUMBER_BYTES * len(found.labels[label]) for label in found.labels)
    return _sliced_bytes(found.sliced) + blocks + _TERM_BYTES * terms + letters + _NUMBER_BYTES * numbers + labels


def _rendered_bytes(found: RenderedMessage) -> int:
    return _CALL_BYTES + len(found.raw or b"")
