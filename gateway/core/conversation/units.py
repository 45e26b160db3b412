"""Group the messages of a conversation into units that are kept or dropped together.

An `Item` says what a message is, never what it becomes; a `Unit` is what stays or goes together: a call with all its
results, with those that came of the same reasoning, or one message alone. Only the keys of the messages are worked out
at once; all else waits until it is asked for, so that a request that fits is never read. Reading never fails: what is
not a chat message is an item of an unknown role, and is left alone. What to keep is the business of
`gateway.core.fitting`.
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
    """What messages are, and which belong together: all that depends on nothing but themselves and their order."""

    outlines: tuple[MessageOutline, ...] = ()
    roles: tuple[str, ...] = ()
    #: see `MessageOutline.identity`
    identities: tuple[bytes, ...] = ()
    #: how many calls each of them makes
    calls: tuple[int, ...] = ()
    #: of all of them, see `MessageOutline.letters`
    letters: int = 0
    #: where each unit starts and stops
    spans: tuple[tuple[int, int], ...] = ()
    #: indices of system texts, and of what nobody can read
    fixed: frozenset[int] = frozenset()
    #: indices of the user's messages
    users: tuple[int, ...] = ()

    def plus(self, more: Sequence[MessageOutline]) -> ConversationOutline:
        """The outline with these messages behind the others."""
        outlines = (*self.outlines, *more)
        numbered = list(enumerate(more, len(self.outlines)))
        fixed = [index for index, one in numbered if one.role in SYSTEM_ROLES or not one.is_known]
        users = [index for index, one in numbered if one.role == "user"]
        # only the last unit may go on in what follows
        closed, start = self.spans[:-1], self.spans[-1][0] if self.spans else 0
        return ConversationOutline(
            outlines,
            (*self.roles, *[one.role for one in more]),
            (*self.identities, *[one.identity for one in more]),
            (*self.calls, *[len(one.calls) for one in more]),
            self.letters + sum([one.letters for one in more]),
            (*closed, *_spans(outlines, start)),
            self.fixed.union(fixed),
            (*self.users, *users),
        )


class MessageParser(Protocol):
    """Reads messages, and may remember what it has read under their keys."""

    def outline(self, keys: tuple[bytes, ...], messages: Sequence[bytes]) -> ConversationOutline:
        """What the messages are together."""


@dataclass(frozen=True, slots=True)
class Item:
    """One message of a conversation. What says nothing of the others is explained in `MessageOutline`."""

    index: int
    role: str
    calls: tuple[str, ...]
    answers: str | None
    #: characters of its text, and a hash of it
    length: int
    text_key: bytes
    #: it must be sent as it came
    pinned: bool
    sealed: bool
    #: the client asked the provider to cache everything up to here
    breakpoint: bool
    #: hash of the message without its cache marks: the same text, the same key
    key: bytes

    @property
    def is_talk(self) -> bool:
        """Whether the assistant only talks in it: then a gap mark of the assistant's can stand in its place."""
        return self.role == "assistant" and not self.calls


class Unit(NamedTuple):
    """Items `start` to `stop - 1`: a call and its results, or a single message; with those that follow them."""

    start: int
    stop: int
    pinned: bool
    sealed: bool
    #: it follows what must be sent, or that follows it: what is not sealed of it can be cut, and nothing be left out
    bound: bool = False

    @property
    def indices(self) -> range:
        """The indices of its items."""
        return range(self.start, self.stop)


@dataclass(frozen=True, eq=False)
class Conversation:
    """The messages of a request, in order, and how they belong together."""

    messages: tuple[bytes, ...]
    #: hash of each message without its cache marks
    keys: tuple[bytes, ...]
    #: indices of messages with cache marks
    marked: frozenset[int]
    #: indices of messages that the client wants kept as they are
    wanted: frozenset[int] = frozenset()
    #: indices of messages that later ones need: they are kept as they are as long as they fit
    needed: frozenset[int] = frozenset()
    #: indices of messages that stay or go with the unit before theirs
    following: frozenset[int] = frozenset()
    #: indices of messages that cannot be left out, see `leaders`, beside those that are found here
    leading: frozenset[int] = frozenset()
    priorities: Mapping[int, float] = field(default_factory=dict)
    keep_last_turns: int = 1
    book: MessageParser | None = None
    #: the provider may refuse roles side by side that did not stand so in what came, such as two of the user's
    takes_turns: bool = True
    #: the fields of the request that define its tools, as bytes
    tools: tuple[bytes, ...] = ()
    #: what `prefix` has said
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
        """The messages of a chat request, each as it stands in the body.

        Args:
            messages: the bytes of each.
            reader: remembers what was read; without one every message is read once for this conversation.
            pinned: indices that a client wants kept as they are.
            priorities: index -> what the message's text is worth in relation to others, 1 where nothing is said. 0 goes
                first, before anything else is touched; so does a unit with a message of 0 and none of more.
            keep_last_turns: a turn begins with a user's message. 1 keeps the last user's message and what the
                conversation ends with; 2 also the whole turn before, and so on.
            takes_turns: whether the provider may refuse roles side by side that do not stand so in these messages.
            tools: the fields that define the request's tools, as bytes: what they take is what is worth keeping.
            needed: indices of messages that later ones need, which are kept as they are as long as they fit.
            following: indices of messages that stay or go with the unit before theirs.
            leading: indices of messages that cannot be left out, but be cut where they are not sealed, as the results
                of their calls can be.

        Raises:
            ValueError: a priority is negative, endless or no number.
        """
        if priorities and not all(0 <= priority < inf for priority in priorities.values()):
            raise ValueError("a priority is a number of 0 or more")
        original = hashed(messages)
        return cls(
            original.raws,
            original.keys,
            original.marked,
            wanted=frozenset(pinned),
            needed=frozenset(needed),
            following=frozenset(following),
            leading=frozenset(leading),
            priorities=priorities or {},
            keep_last_turns=keep_last_turns,
            book=reader,
            takes_turns=takes_turns,
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
        """The same for messages that are decoded already: they are written as JSON first."""
        return cls.of(
            [encode(message) for message in messages],
            reader,
            pinned=pinned,
            priorities=priorities,
            keep_last_turns=keep_last_turns,
            tools=tools,
        )

    def beginning(self, size: int) -> Conversation:
        """A conversation of the first `size` messages alone, without what a client says of them."""
        marked, following = (frozenset(i for i in some if i < size) for some in (self.marked, self.following))
        return Conversation(self.messages[:size], self.keys[:size], marked, following=following, book=self.book)

    @property
    def last_words(self) -> range:
        """What the assistant said last, with the results of its calls."""
        outlines = self.outlines
        return next((range(*span) for span in reversed(self.spans) if outlines[span[0]].role == "assistant"), range(0))

    @property
    def last_turn(self) -> Sequence[int]:
        """What the assistant said since the user's last words."""
        roles = self.outline.roles
        return [index for index in range(self._behind_user, len(roles)) if roles[index] == "assistant"]

    @property
    def _behind_user(self) -> int:
        users = self.outline.users
        return users[-1] + 1 if users else 0

    @cached_property
    def leaders(self) -> frozenset[int]:
        """Messages that cannot be left out, though what is not sealed of them and of the results of their calls is cut.

        Among them is the thinking that the last turn began with, without which the rest of it would be refused: Claude
        may think once in a turn, before its first call. Where all of the turn begins with thinking, so does whatever is
        left of it.
        """
        roles, outlines = self.outline.roles, self.outlines
        # Turns are long, and most have no thinking in them.
        first = next((index for index in range(self._behind_user, len(roles)) if roles[index] == "assistant"), None)
        if first is None or not outlines[first].thinks or all(outlines[index].thinks for index in self.last_turn):
            return self.leading
        return self.leading | {first}

    @cached_property
    def outline(self) -> ConversationOutline:
        """What the messages are together."""
        if self.book is None:
            return ConversationOutline().plus([outline_of(raw) for raw in self.messages])
        return self.book.outline(self.keys, self.messages)

    @property
    def outlines(self) -> Sequence[MessageOutline]:
        """What each message is."""
        return self.outline.outlines

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """Where each unit starts and stops."""
        return self.outline.spans

    @cached_property
    def pinned(self) -> frozenset[int]:
        """What must be sent as it came.

        System texts, unknown roles, the last turns and the thinking that the last one began with, what the conversation
        ends with, what the client wants.
        """
        outline = self.outline
        must, users = set(outline.fixed), outline.users
        if users:
            must.update(range(users[-max(1, self.keep_last_turns) :][0], users[-1] + 1))
        if outline.spans:
            must.update(range(*outline.spans[-1]))
        must.update(index for index in self.leaders if outline.outlines[index].sealed)
        must.update(index for index in self.wanted if 0 <= index < len(outline.outlines))
        return frozenset(must)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """One for each message."""
        pinned, marked = self.pinned, self.marked
        return tuple(
            Item(
                index,
                one.role,
                one.calls,
                one.answers,
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
        """What stays or goes together."""
        return tuple(chain.from_iterable(map(self._units_of, self.runs)))

    @property
    def runs(self) -> Iterator[Sequence[tuple[int, int]]]:
        """The spans that stay or go together."""
        run: list[tuple[int, int]] = []
        for span in self.spans:
            if run and span[0] not in self.following:
                yield run
                run = []
            run.append(span)
        if run:
            yield run

    @cached_property
    def _holding(self) -> frozenset[int]:
        """What holds all of its unit: a result cannot stand without its call.

        The result of a call with the thinking that a turn began with is no part of what was signed, and can be cut.
        """
        return self.pinned - (self.leaders - self.wanted)

    def _units_of(self, run: Sequence[tuple[int, int]]) -> Iterator[Unit]:
        """One for all of a run; where some of it must be sent, one for each span, so that the others can be cut."""
        holding, leaders, outlines = self._holding, self.leaders, self.outlines
        held = [any(index in holding for index in range(*span)) for span in run]
        must = any(held) or not leaders.isdisjoint(range(run[0][0], run[-1][1]))
        if not must:
            run, held = [(run[0][0], run[-1][1])], [False]
        for (start, stop), is_held in zip(run, held, strict=True):
            sealed = any(one.sealed for one in outlines[start:stop])
            yield Unit(start, stop, pinned=is_held, sealed=sealed, bound=must and not is_held)

    @cached_property
    def task(self) -> int | None:
        """Index of the first user message: what the agent was asked to do."""
        return next(iter(self.outline.users), None)

    def priority(self, unit: Unit) -> float:
        """The highest priority that was given to one of its messages; 1 where none was."""
        said = [self.priorities[index] for index in unit.indices if index in self.priorities]
        return max(said, default=1.0)

    def prefix(self, size: int, salt: str = "") -> str:
        """Hash of the first `size` messages; `salt` separates tenants, models or settings."""
        found = self._prefixes.get((size, salt))
        if found is None:
            salted = digest(salt.encode("utf-8", "surrogatepass"))
            identities = b"".join(self.outline.identities[:size])
            found = self._prefixes[size, salt] = blake2b(identities, digest_size=16, key=salted).hexdigest()
        return found


def _spans(outlines: Sequence[MessageOutline], start: int) -> Iterator[tuple[int, int]]:
    """Calls with the results that follow them; everything else alone. From `start` on, where a unit begins."""
    while start < len(outlines):
        stop = start + 1
        if outlines[start].calls:
            calls = outlines[start].calls
            stop = _answered(outlines, stop, Counter(calls) if len(calls) > 1 else dict.fromkeys(calls, 1))
        yield start, stop
        start = stop


def _answered(outlines: Sequence[MessageOutline], stop: int, waiting: dict[str, int]) -> int:
    """Where the results of calls end. A result among them that answers no call, or cannot be read, stays with them."""
    while stop < len(outlines) and waiting:
        answers = outlines[stop].answers
        if answers is not None and answers in waiting:
            waiting[answers] -= 1
            if not waiting[answers]:
                del waiting[answers]
        elif outlines[stop].is_known and outlines[stop].role not in RESULT_ROLES:
            break
        stop += 1
    return stop
