"""Group the messages of a conversation into units that are kept or dropped together.

- An `Item` describes a message as it is, never what a trim makes of it.
- A `Unit` is kept or dropped as a whole: a call with all its results and those that came from the same reasoning, or a
  single message.

Only the keys of the messages are computed at once. Everything else is computed on first use, so that the messages of a
request that fits are never parsed. Parsing never fails: a message that is no chat message becomes an item with an
unknown role, and stays unchanged. `gateway.core.trimming` decides what to keep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from math import inf
from typing import NamedTuple, Protocol

from gateway.core.conversation.message import (
    RESULT_ROLES,
    SYSTEM_ROLES,
    Hashed,
    Message,
    MessageOutline,
    digest,
    encode,
    hashed,
    outline_of,
)
from gateway.core.values import dataclass


@dataclass(frozen=True, slots=True)
class ConversationOutline:
    """The properties of the messages of a conversation, and the spans of messages that belong together.

    It depends only on the messages and their order.
    """

    outlines: tuple[MessageOutline, ...] = ()
    roles: tuple[str, ...] = ()
    #: see `MessageOutline.identity`
    identities: tuple[bytes, ...] = ()
    #: number of calls of each message
    calls: tuple[int, ...] = ()
    #: sum over all messages, see `MessageOutline.text_size`
    letters: int = 0
    #: where each unit starts and stops
    spans: tuple[tuple[int, int], ...] = ()
    #: indices of system messages, and of messages that cannot be parsed
    fixed: frozenset[int] = frozenset()
    #: indices of the user's messages
    users: tuple[int, ...] = ()

    def plus(self, more: Sequence[MessageOutline]) -> ConversationOutline:
        """Return the outline after adding these messages at the end."""
        outlines = (*self.outlines, *more)
        numbered = list(enumerate(more, len(self.outlines)))
        fixed = [index for index, one in numbered if one.role in SYSTEM_ROLES or not one.is_known]
        users = [index for index, one in numbered if one.role == "user"]
        # only the last unit may continue in the new messages
        closed, start = self.spans[:-1], self.spans[-1][0] if self.spans else 0
        return ConversationOutline(
            outlines,
            (*self.roles, *[one.role for one in more]),
            (*self.identities, *[one.identity for one in more]),
            (*self.calls, *[len(one.calls) for one in more]),
            self.letters + sum([one.text_size for one in more]),
            (*closed, *_spans(outlines, start)),
            self.fixed.union(fixed),
            (*self.users, *users),
        )


class MessageParser(Protocol):
    """Parse messages, and possibly cache the results under their keys."""

    def outline(self, keys: tuple[bytes, ...], messages: Sequence[bytes]) -> ConversationOutline:
        """Return the outline of these messages."""


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a conversation. `MessageOutline` explains the fields that do not depend on the other messages."""

    index: int
    role: str
    calls: tuple[str, ...]
    result_of: str | None
    #: length of its text in characters, and a hash of it
    length: int
    text_key: bytes
    #: True if it must be sent unchanged
    pinned: bool
    sealed: bool
    #: True if the client asks the provider to cache the prompt up to this message
    breakpoint: bool
    #: hash of the message without its cache marks
    key: bytes

    @property
    def is_assistant_text(self) -> bool:
        """Return True if it is an assistant message without calls, so that an assistant's gap mark can replace it."""
        return self.role == "assistant" and not self.calls


class Unit(NamedTuple):
    """The items `start` to `stop - 1`, which are kept or dropped together.

    They are a call and its results, or a single message, with the messages that follow them.
    """

    start: int
    stop: int
    pinned: bool
    sealed: bool
    #: True if it belongs to messages that must be sent: parts that are not sealed can be shortened, but none can be
    #: dropped
    bound: bool = False

    @property
    def indices(self) -> range:
        """Return the indices of its items."""
        return range(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Conversation:
    """The messages of a request in order, and how they belong together."""

    messages: tuple[bytes, ...]
    #: hash of each message without its cache marks
    keys: tuple[bytes, ...]
    #: indices of messages with cache marks
    marked: frozenset[int]
    #: indices of messages that the client wants to keep unchanged
    pinned_by_client: frozenset[int] = frozenset()
    #: indices of messages that later messages need; they stay unchanged as long as they fit
    needed: frozenset[int] = frozenset()
    #: indices of messages that are kept or dropped together with the unit before them
    following: frozenset[int] = frozenset()
    #: indices of messages that cannot be dropped, see `all_undroppable`, in addition to those that are found here
    undroppable: frozenset[int] = frozenset()
    priorities: Mapping[int, float] = field(default_factory=dict)
    keep_last_turns: int = 1
    parser: MessageParser | None = None
    #: True if the provider may refuse two consecutive messages of one role, such as two of the user, unless the
    #: original messages had them
    needs_alternating_roles: bool = True
    #: the fields of the request that define its tools, as bytes
    tools: tuple[bytes, ...] = ()
    #: cached results of `prefix`
    _prefixes: dict[tuple[int, str], str] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        messages: Sequence[bytes] | Hashed,
        reader: MessageParser | None = None,
        *,
        pinned: Collection[int] = (),
        priorities: Mapping[int, float] | None = None,
        keep_last_turns: int = 1,
        takes_turns: bool = True,
        tools: Sequence[bytes] = (),
        needed: Collection[int] = (),
        following: Collection[int] = (),
        leading: Collection[int] = (),
    ) -> Conversation:
        """Create a conversation from the messages of a chat request.

        Args:
            messages: the bytes of each message in the body.
            reader: parses and caches messages; None parses each message once for this conversation.
            pinned: indices of messages that a client wants to keep unchanged.
            priorities: index -> relative value of the text of a message; 1 if not given. Messages with 0 are dropped
                first, before anything else changes. The same holds for a unit whose highest given priority is 0.
            keep_last_turns: number of last turns to keep. A turn starts with a user message. 1 keeps the last user
                message and the last unit of the conversation; 2 also keeps the whole turn before, and so on.
            takes_turns: True if the provider may refuse consecutive messages of one role that these messages do not
                have.
            tools: the fields that define the tools, as bytes. The arguments that the tools take are worth keeping.
            needed: indices of messages that later messages need; they stay unchanged as long as they fit.
            following: indices of messages that are kept or dropped together with the unit before them.
            leading: indices of messages that cannot be dropped. Parts of them, or of the results of their calls, can be
                shortened if they are not sealed.

        Raises:
            ValueError: a priority is negative, infinite or not a number.
        """
        if priorities and not all(0 <= priority < inf for priority in priorities.values()):
            raise ValueError("a priority must be a number of 0 or more")
        original = hashed(messages)
        return cls(
            original.raws,
            original.keys,
            original.marked,
            pinned_by_client=frozenset(pinned),
            needed=frozenset(needed),
            following=frozenset(following),
            undroppable=frozenset(leading),
            priorities=priorities or {},
            keep_last_turns=keep_last_turns,
            parser=reader,
            needs_alternating_roles=takes_turns,
            tools=tuple(tools),
        )

    @classmethod
    def of_messages(
        cls,
        messages: Sequence[Message],
        reader: MessageParser | None = None,
        *,
        pinned: Collection[int] = (),
        priorities: Mapping[int, float] | None = None,
        keep_last_turns: int = 1,
        tools: Sequence[bytes] = (),
    ) -> Conversation:
        """Create a conversation from decoded messages, which are written as JSON first."""
        return cls.of(
            [encode(message) for message in messages],
            reader,
            pinned=pinned,
            priorities=priorities,
            keep_last_turns=keep_last_turns,
            tools=tools,
        )

    def first_messages(self, size: int) -> Conversation:
        """Return a conversation of the first `size` messages, without pins and priorities of the client."""
        marked, following = (frozenset(i for i in some if i < size) for some in (self.marked, self.following))
        return Conversation(self.messages[:size], self.keys[:size], marked, following=following, parser=self.parser)

    @property
    def last_response(self) -> range:
        """Return the range of the last assistant message and the results of its calls."""
        outlines = self.outlines
        return next((range(*span) for span in reversed(self.spans) if outlines[span[0]].role == "assistant"), range(0))

    @property
    def last_turn(self) -> Sequence[int]:
        """Return the indices of the assistant messages after the last user message."""
        roles = self.outline.roles
        return [index for index in range(self._after_user, len(roles)) if roles[index] == "assistant"]

    @property
    def _after_user(self) -> int:
        """Return the index after the last user message."""
        users = self.outline.users
        return users[-1] + 1 if users else 0

    @cached_property
    def all_undroppable(self) -> frozenset[int]:
        """Return the messages that cannot be dropped.

        Parts of them, or of the results of their calls, can be shortened if they are not sealed.

        The message with the thinking that starts the last turn is one of them, because the provider refuses the rest of
        the turn without it: Claude may think only once per turn, before its first call. If all messages of the turn
        start with thinking, any of them may start it, so none is needed.
        """
        roles, outlines = self.outline.roles, self.outlines
        # Checked first because turns are long and most have no thinking.
        first = next((index for index in range(self._after_user, len(roles)) if roles[index] == "assistant"), None)
        if first is None or not outlines[first].thinks or all(outlines[index].thinks for index in self.last_turn):
            return self.undroppable
        return self.undroppable | {first}

    @cached_property
    def outline(self) -> ConversationOutline:
        """Return the outline of all messages."""
        if self.parser is None:
            return ConversationOutline().plus([outline_of(raw) for raw in self.messages])
        return self.parser.outline(self.keys, self.messages)

    @property
    def outlines(self) -> Sequence[MessageOutline]:
        """Return the outline of each message."""
        return self.outline.outlines

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Return where each unit starts and stops."""
        return self.outline.spans

    @cached_property
    def pinned(self) -> frozenset[int]:
        """Return the indices of the messages that must be sent unchanged.

        - system messages, and messages with an unknown role;
        - the last turns, and the last unit of the conversation;
        - the thinking that starts the last turn;
        - messages that the client pinned.
        """
        outline = self.outline
        pinned, users = set(outline.fixed), outline.users
        if users:
            pinned.update(range(users[-max(1, self.keep_last_turns) :][0], users[-1] + 1))
        if outline.spans:
            pinned.update(range(*outline.spans[-1]))
        pinned.update(index for index in self.all_undroppable if outline.outlines[index].sealed)
        pinned.update(index for index in self.pinned_by_client if 0 <= index < len(outline.outlines))
        return frozenset(pinned)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """Return one item for each message."""
        pinned, marked = self.pinned, self.marked
        return tuple(
            Item(
                index,
                one.role,
                one.calls,
                one.result_of,
                one.length,
                one.text_key,
                pinned=index in pinned,
                sealed=one.sealed,
                breakpoint=index in marked,
                key=key,
            )
            for index, (one, key) in enumerate(zip(self.outlines, self.keys, strict=True))
        )

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Return the units of the conversation."""
        return tuple(chain.from_iterable(map(self._units_of, self.runs)))

    @property
    def runs(self) -> Iterator[Sequence[tuple[int, int]]]:
        """Return the spans of messages that are kept or dropped together, one sequence for each run."""
        run: list[tuple[int, int]] = []
        for span in self.spans:
            if run and span[0] not in self.following:
                yield run
                run = []
            run.append(span)
        if run:
            yield run

    @cached_property
    def _unit_pins(self) -> frozenset[int]:
        """Return the messages that keep their whole unit, because a result needs its call.

        The call with the thinking that starts a turn is no such message. The result of that call is not part of what
        was signed, so it can be shortened.
        """
        return self.pinned - (self.all_undroppable - self.pinned_by_client)

    def _units_of(self, run: Sequence[tuple[int, int]]) -> Iterator[Unit]:
        """Yield one unit for a whole run of spans.

        If some messages of the run must be sent, yield one unit for each span, so that the other spans can be
        shortened.
        """
        unit_pins, leaders, outlines = self._unit_pins, self.all_undroppable, self.outlines
        is_pinned = [any(index in unit_pins for index in range(*span)) for span in run]
        is_kept = any(is_pinned) or not leaders.isdisjoint(range(run[0][0], run[-1][1]))
        if not is_kept:
            run, is_pinned = [(run[0][0], run[-1][1])], [False]
        for (start, stop), pinned in zip(run, is_pinned, strict=True):
            sealed = any(one.sealed for one in outlines[start:stop])
            yield Unit(start, stop, pinned=pinned, sealed=sealed, bound=is_kept and not pinned)

    @cached_property
    def task(self) -> int | None:
        """Return the index of the first user message, which is the task of the agent."""
        return next(iter(self.outline.users), None)

    def priority(self, unit: Unit) -> float:
        """Return the highest priority of the unit's messages, or 1 if none has one."""
        priorities = [self.priorities[index] for index in unit.indices if index in self.priorities]
        return max(priorities, default=1.0)

    def prefix(self, size: int, salt: str = "") -> str:
        """Return a hash of the first `size` messages; `salt` separates tenants, models or settings."""
        prefix = self._prefixes.get((size, salt))
        if prefix is None:
            salted = digest(salt.encode("utf-8", "surrogatepass"))
            identities = b"".join(self.outline.identities[:size])
            prefix = self._prefixes[size, salt] = blake2b(identities, digest_size=16, key=salted).hexdigest()
        return prefix


def _spans(outlines: Sequence[MessageOutline], start: int) -> Iterator[tuple[int, int]]:
    """Yield the span of each unit: a call with the results that follow it, or a single message.

    It starts at index `start`, which must be the start of a unit.
    """
    while start < len(outlines):
        stop = start + 1
        if outlines[start].calls:
            calls = outlines[start].calls
            stop = _end_of_results(outlines, stop, Counter(calls) if len(calls) > 1 else dict.fromkeys(calls, 1))
        yield start, stop
        start = stop


def _end_of_results(outlines: Sequence[MessageOutline], stop: int, waiting: dict[str, int]) -> int:
    """Return the index after the results of the waiting calls.

    Results without a call and messages that cannot be parsed stay with the results around them.
    """
    while stop < len(outlines) and waiting:
        answers = outlines[stop].result_of
        if answers is not None and answers in waiting:
            waiting[answers] -= 1
            if not waiting[answers]:
                del waiting[answers]
        elif outlines[stop].is_known and outlines[stop].role not in RESULT_ROLES:
            break
        stop += 1
    return stop
