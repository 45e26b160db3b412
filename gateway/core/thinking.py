"""Find which thinking blocks stay valid after a change, on models that bind them to their prefix.

Claude models from 5.5 and 5.1 on sign a thinking block together with everything before it: system prompt, tools and
messages. If message *p* changes, the provider refuses every thinking block after *p* that already existed. Blocks
before *p* stay valid. Blocks created after the change are valid too. A block that was removed once must stay
removed, because later blocks were created without it.
(https://platform.claude.com/docs/en/build-with-claude/preserved-thinking)

`BoundConversation` reads the messages of one request. `SentPrefix` is what a session remembers of an earlier request of
the same conversation: what was sent instead of it, and which thinking was removed.

A position is an index into the messages as received, not counting messages that contain only thinking: a client may
omit those later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import compress
from typing import Any, Final, NamedTuple

from gateway.core.conversation.message import (
    Hashed,
    digest,
    encode,
    is_thinking,
    outline_of,
    parse_bytes,
    without_thinking,
)
from gateway.core.counting.measure import Wire
from gateway.core.counting.parts import is_compaction
from gateway.core.modes import MODES, ResponseMode
from gateway.core.modes.unread import after_last_reply
from gateway.core.values import dataclass
from gateway.core.views.raw import fields_of, items_of, list_of, object_of
from gateway.core.views.read_messages import changed_tool
from gateway.core.views.view import ElementCache, parsed_elements

#: Positions `start` to `stop - 1`.
Span = tuple[int, int]

#: version of the remembered JSON; other versions are ignored
VERSION: Final = 1
#: Checkpoints of one conversation. Without the oldest ones, a later change may remove more thinking than needed.
MAX_CHECKPOINTS: Final = 16
#: Spans and modes of one conversation. With more spans, the oldest thinking is removed as well, which leaves later
#: blocks valid. A session that changes its mode more often keeps the last of the remembered modes.
MAX_SPANS: Final = 64
#: How thinking is written in the bytes of a message, in any format.
_MARKS: Final = (b"thinking", b"reasoning")
_COMPACTION: Final = b'"compaction"'
_HASH_BYTES: Final = 16
_BARE_BYTES: Final = 250
#: fields of a chat message that hold a list of thinking blocks
_CHAT_BLOCKS: Final = ("thinking_blocks", "reasoning_details")
_SAYS_NOTHING: Final = ("role", "provider_specific_fields")


class StrippedMessage(NamedTuple):
    """A message without its thinking: its bytes, None if nothing is left, and the number of blocks removed.

    `identity`: a hash of the rest. It ignores cache marks, and whether the text is a string or a list of parts.
    """

    raw: bytes | None
    identity: bytes
    blocks: int


def bare_message(wire: Wire, raw: bytes) -> StrippedMessage:
    """Return a message of this format without its thinking. All its other bytes stay unchanged."""
    if not any(mark in raw for mark in _MARKS):
        return StrippedMessage(raw, outline_of(raw).identity, 0)
    message, is_odd = parse_bytes(raw)
    if not isinstance(message, dict) or is_odd:
        return StrippedMessage(raw, digest(raw), 0)
    if wire == "responses":
        is_reasoning = message.get("type") == "reasoning"
        return StrippedMessage(None, b"", 1) if is_reasoning else StrippedMessage(raw, outline_of(raw).identity, 0)
    if message.get("role") != "assistant":
        return StrippedMessage(raw, outline_of(raw).identity, 0)
    bare, blocks = _of_chat(raw, message) if wire == "chat" else _of_messages(raw, message)
    return StrippedMessage(bare, outline_of(bare).identity if bare is not None else b"", blocks)


def _of_messages(raw: bytes, message: Mapping[str, Any]) -> tuple[bytes | None, int]:
    content = message.get("content")
    kept = [not is_thinking(part) for part in content] if isinstance(content, list) else []
    blocks = kept.count(False)
    if not blocks:
        return raw, 0
    fields = fields_of(raw)
    left = list(compress(items_of(fields["content"]), kept))
    return object_of({**fields, "content": list_of(left)}) if left else None, blocks


def _of_chat(raw: bytes, message: Mapping[str, Any]) -> tuple[bytes | None, int]:
    bare = without_thinking(message)
    if bare is message:
        return raw, 0
    lists = (message[name] for name in _CHAT_BLOCKS if isinstance(message.get(name), list))
    says_something = any(bare.get(name) for name in bare if name not in _SAYS_NOTHING)
    return encode(bare) if says_something else None, max(map(len, lists), default=1)


class Checkpoint(NamedTuple):
    """A moment at which something was changed: positions received, messages sent for them, and a hash of these."""

    size: int
    sent: int
    hash: str


@dataclass(frozen=True, slots=True)
class SentPrefix:
    """The messages sent for the first `size` positions of a conversation, as a session remembers them.

    Attributes:
        received: hash of these positions as the client sent them, without thinking.
        size: the number of positions.
        removed: spans whose thinking is no longer sent.
        checkpoints: what was sent at each change, the oldest first.
        modes: positions from which tool results are shown in another response mode, with this mode.
        tools: hash of the tools that were sent instead of the client's; empty if they were the client's.
        provider_drops: the provider has to drop invalid blocks itself: it refuses an open tool round without its
            thinking, or removing blocks here would have removed valid ones too.
    """

    received: str
    size: int
    removed: tuple[Span, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    modes: tuple[tuple[int, ResponseMode], ...] = ()
    tools: str = ""
    provider_drops: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible value."""
        value = {"v": VERSION, "received": self.received, "size": self.size, "removed": self.removed,
                 "checkpoints": self.checkpoints, "modes": self.modes, "tools": self.tools}  # fmt: skip
        return {**value, "provider_drops": True} if self.provider_drops else value

    @classmethod
    def from_json(cls, value: Any) -> SentPrefix | None:
        """Return the prefix, or None if the value is not of this version."""
        if not isinstance(value, Mapping) or value.get("v") != VERSION:
            return None
        try:
            return cls(
                str(value["received"]),
                int(value["size"]),
                tuple((int(start), int(stop)) for start, stop in value["removed"]),
                tuple(Checkpoint(int(size), int(sent), str(name)) for size, sent, name in value["checkpoints"]),
                tuple((int(start), _mode(mode)) for start, mode in value["modes"]),
                str(value["tools"]),
                value.get("provider_drops") is True,
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


def _mode(name: object) -> ResponseMode:
    return next(mode for mode in MODES if mode == name) if name in MODES else "raw"


class BoundConversation:
    """The messages of one request to a model that binds thinking to its prefix.

    `cache`: a cache of what was read of each message.
    """

    def __init__(self, wire: Wire, received: Hashed, *, cache: ElementCache | None = None) -> None:
        self._wire = wire
        self._received = received
        self._cache = cache
        self._bare = self._read(received)

    def _read(self, messages: Hashed) -> Sequence[StrippedMessage]:
        return parsed_elements(
            f"without thinking {self._wire}", messages, self._cache, lambda raw: bare_message(self._wire, raw), _size_of
        )

    @cached_property
    def positions(self) -> Sequence[int]:
        """Return the position of each message. A message of only thinking has the position of the next message."""
        positions, at = [], 0
        for bare in self._bare:
            positions.append(at)
            at += bare.raw is not None
        return positions

    @cached_property
    def _identities(self) -> Sequence[bytes]:
        return [bare.identity for bare in self._bare if bare.raw is not None]

    @property
    def size(self) -> int:
        """Return the number of positions."""
        return len(self._identities)

    @property
    def messages(self) -> Sequence[bytes]:
        """Return the messages as received."""
        return self._received.raws

    def index_of(self, position: int) -> int:
        """Return the index of the first message at a position; the number of messages if it is after the last one."""
        return bisect_left(self.positions, position)

    def hashes_at(self, sizes: Collection[int]) -> Mapping[int, str]:
        """Return the hash of the first positions as received, without thinking, for each of these sizes."""
        hashed, done, hashes = blake2b(digest_size=_HASH_BYTES), 0, dict[int, str]()
        for size in sorted(size for size in sizes if 0 <= size <= self.size):
            hashed.update(b"".join(self._identities[done:size]))
            hashes[size], done = hashed.hexdigest(), size
        return hashes

    @cached_property
    def thinking(self) -> Mapping[int, int]:
        """Number of thinking blocks by position, for positions that have any."""
        blocks: dict[int, int] = {}
        for position, bare in zip(self.positions, self._bare, strict=True):
            if bare.blocks:
                blocks[position] = blocks.get(position, 0) + bare.blocks
        return blocks

    @cached_property
    def is_compacted(self) -> bool:
        """Return whether the first message holds a compaction, so that messages before it are no longer sent."""
        first = next(iter(self._received.raws), b"")
        message = parse_bytes(first)[0] if _COMPACTION in first else None
        content = message.get("content") if isinstance(message, dict) else None
        return isinstance(content, list) and any(is_compaction(block) for block in content if isinstance(block, dict))

    def find(self, prefixes: Iterable[Mapping[str, Any]]) -> SentPrefix | None:
        """Return the remembered prefix that covers most of this conversation, or None."""
        known = [prefix for value in prefixes if (prefix := SentPrefix.from_json(value)) is not None]
        for prefix in sorted(known, key=lambda prefix: -prefix.size):
            if 0 < prefix.size <= self.size and self._hash(self._identities[: prefix.size]) == prefix.received:
                return prefix
        return None

    def as_unknown(self) -> SentPrefix:
        """Return the conversation as one whose thinking, all of it, may have been created after other messages."""
        return SentPrefix(self._hash(self._identities), self.size, ((0, self.size),))

    def without(self, removed: Collection[Span]) -> tuple[bytes, ...]:
        """Return the messages, without the thinking in these spans."""
        if not removed:
            return self._received.raws
        pairs = list(zip(self.positions, self._received.raws, self._bare, strict=True))
        chosen = [bare.raw if _is_in(position, removed) else raw for position, raw, bare in pairs]
        return tuple(raw for index in self.indices_without(removed) if (raw := chosen[index]) is not None)

    def positions_without(self, removed: Collection[Span]) -> Sequence[int]:
        """Return the position of each message that `without` returns."""
        return [self.positions[index] for index in self.indices_without(removed)]

    def indices_without(self, removed: Collection[Span]) -> Sequence[int]:
        """Return the indices of the received messages that `without` returns, in its order."""
        pairs = enumerate(zip(self.positions, self._bare, strict=True))
        kept = [index for index, (place, bare) in pairs if bare.raw is not None or not _is_in(place, removed)]
        return kept if len(kept) == len(self._bare) else self._with_changes_placed(kept)

    def _with_changes_placed(self, indices: Sequence[int]) -> Sequence[int]:
        """Return these indices with changes of tools where the provider accepts them.

        A message of nothing but thinking was left out. A change before it moves before the next assistant message, or
        to the end.
        """
        placed, waiting = list[int](), list[int]()
        for index in indices:
            message, _ = parse_bytes(self._received.raws[index])
            role = message.get("role") if isinstance(message, dict) else None
            if role == "system" and isinstance(message, dict) and _changes_tools(message.get("content")):
                waiting.append(index)
                continue
            if role == "assistant":
                placed += waiting
                waiting = []
            placed.append(index)
        return [*placed, *waiting]

    def first_change(self, known: SentPrefix | None, sent: Sequence[bytes], tools: str) -> int | None:
        """Return the first position where `sent` differs from the messages that later thinking was created after.

        Thinking after it is refused. None if nothing differs. `sent`: all messages to be sent now; `tools`: see
        `SentPrefix`.
        """
        if tools != (known.tools if known is not None else ""):
            return 0
        identities, lost_from = self._sent_identities(sent), self.size
        for size, count, name in (*reversed(known.checkpoints if known is not None else ()), Checkpoint(0, 0, "")):
            if count and (count > len(identities) or self._hash(identities[:count]) != name):
                # This checkpoint is no longer sent: all later thinking was created after other messages.
                lost_from = size
                continue
            # Between that change and the next one, everything was sent as received.
            change = min(size + _common_length(identities[count:], self._identities[size:]), lost_from)
            is_whole = change == self.size and len(identities) - count == self.size - size
            return None if is_whole else change
        return 0

    def stale(self, start: int, removed: Collection[Span]) -> int:
        """Return the number of thinking blocks at or after `start` that would still be sent."""
        return sum(blocks for place, blocks in self.thinking.items() if place >= start and not _is_in(place, removed))

    def is_kept(self, position: int, removed: Collection[Span]) -> bool:
        """Return whether the thinking at a position is outside of these spans."""
        return not _is_in(position, removed)

    def blocks_in(self, sent: Sequence[bytes]) -> int:
        """Return the number of thinking blocks in some messages."""
        return sum(bare.blocks for bare in self._read(self._hashed(sent)))

    def is_continued(self, known: SentPrefix, sent: Sequence[bytes]) -> bool:
        """Return whether `sent` is what was sent at the last change, and after that what was received."""
        if not known.checkpoints:
            return False
        size, count, name = known.checkpoints[-1]
        identities = self._sent_identities(sent)
        return self._hash(identities[:count]) == name and [*identities[count:]] == [*self._identities[size:]]

    def position_of(self, raw: bytes) -> int | None:
        """Return the position of a message with thinking by its bytes, or None."""
        pairs = zip(self.positions, self._received.raws, strict=True)
        return next((position for position, received in pairs if received == raw), None)

    @cached_property
    def open_turn(self) -> int:
        """Return the position after the last user text, where the current turn begins; `size` if no reply follows."""
        raws = self._received.raws
        last = next((index for index in reversed(range(len(raws))) if _is_user_text(parse_bytes(raws[index])[0])), -1)
        return self.positions[last + 1] if last + 1 < len(raws) else self.size

    @cached_property
    def after_last_reply(self) -> int:
        """Return the position after the model's last message: the model has not read results from there on."""
        place = after_last_reply(self._received.raws)
        return self.positions[place] if place < len(self.positions) else self.size

    def remember(
        self,
        known: SentPrefix | None,
        sent: Sequence[bytes],
        *,
        removed: Sequence[Span],
        modes: Sequence[tuple[int, ResponseMode]],
        tools: str,
        provider_drops: bool,
    ) -> SentPrefix:
        """Return what to remember of this request, now that `sent` goes out instead of what was received."""
        identities = self._sent_identities(sent)
        now = Checkpoint(self.size, len(identities), self._hash(identities))
        before = [point for point in known.checkpoints if self._holds(point, identities)] if known is not None else []
        return SentPrefix(
            self._hash(self._identities),
            self.size,
            _bounded(merged(removed)),
            (*before[-MAX_CHECKPOINTS + 1 :], now),
            tuple(modes)[:MAX_SPANS],
            tools,
            provider_drops,
        )

    def _holds(self, checkpoint: Checkpoint, identities: Sequence[bytes]) -> bool:
        size, count, name = checkpoint
        return count <= len(identities) and size < self.size and self._hash(identities[:count]) == name

    def _sent_identities(self, sent: Sequence[bytes]) -> Sequence[bytes]:
        return [bare.identity for bare in self._read(self._hashed(sent)) if bare.raw is not None]

    def _hashed(self, sent: Sequence[bytes]) -> Hashed:
        return self._received if sent is self._received.raws else Hashed(sent)

    @staticmethod
    def _hash(identities: Sequence[bytes]) -> str:
        return blake2b(b"".join(identities), digest_size=_HASH_BYTES).hexdigest()


def _common_length(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _changes_tools(content: object) -> bool:
    return isinstance(content, list) and bool(content) and all(changed_tool(block) for block in content)


def _is_user_text(message: object) -> bool:
    """Return whether a message is a user message without a tool result.

    Text next to a tool result belongs to its tool round, so that the thinking of this round is kept.
    """
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return not any(isinstance(part, dict) and part.get("type") == "tool_result" for part in parts)


def _size_of(bare: StrippedMessage) -> int:
    return _BARE_BYTES + len(bare.raw or b"")


def _is_in(position: int, spans: Collection[Span]) -> bool:
    return any(start <= position < stop for start, stop in spans)


def _bounded(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return at most `MAX_SPANS` spans that remove no less than these."""
    if len(spans) <= MAX_SPANS:
        return spans
    return ((0, spans[-MAX_SPANS][1]), *spans[-MAX_SPANS + 1 :])


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the same positions in as few spans as possible, in order."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
