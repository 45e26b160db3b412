"""Detect agents that run away: loops, rounds without a new result, and long work without user input.

A round is one or more tool calls of the model and their results. Two rounds are equal if the same tools were called
with the same arguments and had the same results, in the same order. So a status check is not a loop while
its result changes.

Everything is counted from the last new user message. A user message is not new if it repeats the one before it and only
a text of the model lies between them. Such a text and message count as a round, because some programs answer "continue"
to every text.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, get_args
from zlib import crc32

from gateway.core.ledger.session_key import SessionKey
from gateway.core.values import dataclass

Kind = Literal["loop", "no_progress", "rounds", "seconds", "step_seconds"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
Action = Literal["warn", "refuse"]
#: the longest cycle of rounds that is found as a loop, such as A-B-C-A-B-C
MAX_PERIOD: Final = 6
#: a round is known if it equals one of this many rounds before it
RECENT: Final = 32
#: conversations of a session whose work is remembered: of the agent, and of subagents that share its session id
MAX_WORK: Final = 32
#: approximate bytes of `Rounds` in memory
ROUNDS_BYTES: Final = 2048
#: characters of a tool name in messages, and tools that a message names
_NAME: Final = 64
_NAMES: Final = 4
_NO_RUNS: Final = (0,) * MAX_PERIOD
#: a number of rounds that no conversation has
_FAR: Final = 2**40
_PERIODS: Final = range(MAX_PERIOD)
_HASH_BYTES: Final = 8
_HASH_MASK: Final = 2 ** (8 * _HASH_BYTES) - 1
#: bytes of the hashes that stay when another one is added
_OTHER_BYTES: Final = _HASH_BYTES * (RECENT - 1)
#: messages of a round, at least: the calls and the results
ROUND_MESSAGES: Final = 2


class Rounds(NamedTuple):
    """The rounds since the last new user message, as far as the rules need them.

    Hashes are only valid in the process that made them, except for `work`.

    Attributes:
        number: how many rounds.
        recent: hashes of the newest rounds, newest last, 8 bytes each. In bytes, one of them is found fastest.
        tools: the called tools of the newest rounds, newest last.
        runs: for each period, how many of the newest rounds in a row equal the round one period before.
        known: how many of the newest rounds in a row equal one of the `RECENT` rounds before.
        work: a checksum of all user messages so far, which names the current work; 0 without a user message.
        words: the hash of the last user message.
        calls: the hash of the calls of the round that is not closed yet; 0 if there is none.
        results: the hash of its results; 0 without results.
        called: the tools that it calls.
        reply: the hash of the model's text, if it called no tool after it; else 0.
        has_calls: the model called tools since the last user message.
    """

    number: int = 0
    recent: bytes = b""
    tools: tuple[tuple[str, ...], ...] = ()
    runs: tuple[int, ...] = _NO_RUNS
    known: int = 0
    work: int = 0
    words: int = 0
    calls: int = 0
    results: int = 0
    called: tuple[str, ...] = ()
    reply: int = 0
    has_calls: bool = False


NO_ROUNDS: Final = Rounds()


class RoundReader:
    """Continue `Rounds` with the messages that follow. The methods are called in the order of the messages."""

    __slots__ = Rounds._fields

    def __init__(self, rounds: Rounds = NO_ROUNDS) -> None:
        (
            self.number, self.recent, self.tools, self.runs, self.known, self.work, self.words,
            self.calls, self.results, self.called, self.reply, self.has_calls,
        ) = rounds  # fmt: skip

    def user(self, text: bytes) -> None:
        """Read a user message."""
        self.close()
        words = hash(text)
        pair = hash((self.reply, words)) if self.reply else 0
        if pair and words == self.words and not self.has_calls:
            self._append(_as_bytes(pair), ())
        else:
            # The pair may round out to be the first of a loop.
            self.number, self.recent, self.tools = 0, _as_bytes(pair) if pair else b"", ()
            self.runs, self.known, self.work = _NO_RUNS, 0, crc32(text, self.work)
        self.words, self.reply, self.has_calls = words, 0, False

    def text(self, text: bytes) -> None:
        """Read a text of the model."""
        self.reply = hash(text)

    def call(self, tool: str, arguments: Hashable) -> None:
        """Read a tool call of the model."""
        if self.results:
            self.close()
        self.calls, self.has_calls, self.reply = hash((self.calls, tool, arguments)), True, 0
        if len(self.called) < _NAMES:
            self.called = (*self.called, tool[:_NAME])

    def result(self, content: bytes) -> None:
        """Read the result of a tool call. A result without a call is ignored."""
        if self.calls:
            self.results = hash((self.results, content))

    def close(self) -> None:
        """Close the open round if it has results."""
        if self.results:
            self._append(_as_bytes(hash((self.calls, self.results))), self.called)
        self.calls, self.results, self.called = 0, 0, ()

    def _append(self, added: bytes, tools: tuple[str, ...]) -> None:
        recent = self.recent
        if added in recent and (places := _places(recent, added)):
            end = len(recent)
            self.runs = tuple([self.runs[p] + 1 if end - _HASH_BYTES * (p + 1) in places else 0 for p in _PERIODS])
            self.known += 1
        else:
            self.runs, self.known = _NO_RUNS, 0
        self.recent = recent[-_OTHER_BYTES:] + added
        self.tools = (*self.tools[1 - MAX_PERIOD :], tools)
        self.number += 1

    @property
    def rounds(self) -> Rounds:
        """Return the rounds so far. The last one stays open, because more results may follow."""
        return Rounds(
            self.number, self.recent, self.tools, self.runs, self.known, self.work, self.words,
            self.calls, self.results, self.called, self.reply, self.has_calls,
        )  # fmt: skip


def _as_bytes(value: int) -> bytes:
    return (value & _HASH_MASK).to_bytes(_HASH_BYTES, "little")


def _places(recent: bytes, one: bytes) -> list[int]:
    """Return where the hash of a round is among the hashes of others."""
    return [place for place in range(0, len(recent), _HASH_BYTES) if recent.startswith(one, place)]


class Thresholds(NamedTuple):
    """The numbers from which calls carry a warning, and are refused; None: never."""

    warn: float | None = None
    refuse: float | None = None


@dataclass(frozen=True, slots=True)
class RunawayPolicy:
    """The settings under `runaway:`, and the limits in seconds.

    Attributes:
        loop: how often the same rounds are repeated in a row.
        no_progress: rounds in a row that equal earlier ones.
        rounds: rounds since the last new user message.
        seconds: time since the last new user message, or since the session was resumed.
        warn_share: the share of a step's seconds from which calls carry a warning.
        has_step_seconds: a step limits its seconds.
    """

    loop: Thresholds = Thresholds()
    no_progress: Thresholds = Thresholds()
    rounds: Thresholds = Thresholds()
    seconds: Thresholds = Thresholds()
    warn_share: float = 1.0
    has_step_seconds: bool = False

    @property
    def has_clock(self) -> bool:
        """Return whether a limit in seconds is set, so that sessions must remember when their work began."""
        return self.has_step_seconds or self.seconds.refuse is not None

    @property
    def least_messages(self) -> int | None:
        """Return the fewest messages of a request in which a rule can find something; None if no rule is on."""
        limits = [limit for rule in (self.loop, self.no_progress, self.rounds) for limit in rule if limit is not None]
        if self.has_clock:
            return 0
        return ROUND_MESSAGES * int(min(limits)) if limits else None

    def step_seconds(self, most: float | None) -> Thresholds:
        """Return the thresholds of a step that may last `most` seconds."""
        return Thresholds(most * self.warn_share, most) if most is not None else Thresholds()


@dataclass(frozen=True, slots=True)
class WorkState:
    """What a session remembers of its work on one user message.

    Attributes:
        since: Unix time in seconds when the work began, or was resumed.
        step: the step of its last call; None without steps.
        step_since: Unix time in seconds when that step was entered, or resumed.
        warned: the kinds of limits in seconds about which observers were notified.
        stopped: the kind of limit for which its calls are refused; None if they are not.
        rounds: the number of its rounds when it was stopped.
        lifted: the number of first rounds that no rule counts, because a person resumed the session after them.
    """

    since: float
    step: str | None = None
    step_since: float = 0.0
    warned: tuple[str, ...] = ()
    stopped: str | None = None
    rounds: int = 0
    lifted: int = 0

    def in_step(self, step: str | None, now: float) -> WorkState:
        """Return this state in a step, which begins now if it is another one."""
        if step == self.step:
            return self
        return replace(self, step=step, step_since=now, warned=tuple(k for k in self.warned if k != "step_seconds"))

    def resumed(self, now: float) -> WorkState:
        """Return this state after a person resumed the session: everything is counted from here."""
        if self.stopped is None:
            return self
        return WorkState(now, self.step, now, lifted=self.rounds)


class ReadRounds(NamedTuple):
    """The rounds in the first messages of a conversation, and when to read on.

    Attributes:
        rounds: the rounds, with the last one open.
        size: the number of these messages.
        next_at: the number of messages of a request in which a rule can find something. Shorter ones are not read.
        policy: the settings for which that is so.
    """

    rounds: Rounds
    size: int
    next_at: int
    policy: RunawayPolicy


class LowestLimits(NamedTuple):
    """The lower threshold of each rule, see `RunawayPolicy`."""

    loop: int
    no_progress: int
    rounds: int


def lowest_limits(policy: RunawayPolicy) -> LowestLimits:
    """Return the lower threshold of each rule; one that no conversation reaches if the rule is off."""
    return LowestLimits(
        *[
            int(min([limit for limit in rule if limit is not None], default=_FAR))
            for rule in (policy.loop, policy.no_progress, policy.rounds)
        ]
    )


def rounds_until_alarm(rounds: RoundReader, lowest: LowestLimits) -> int:
    """Return the fewest rounds that must follow before a rule can find something; 0 or less if one may find it now."""
    soonest = min(lowest.rounds - rounds.number, lowest.no_progress - rounds.known)
    if not rounds.known:
        return min(soonest, lowest.loop - 1)
    return min(soonest, *[(lowest.loop - 1) * period - run for period, run in enumerate(rounds.runs, 1)])


Works = Mapping[str, WorkState]


def with_work(works: Works, name: str, work: WorkState) -> Works:
    """Return the works with another state of one. With too many, the longest unchanged ones are dropped."""
    after = {known: state for known, state in works.items() if known != name}
    after[name] = work
    return dict(list(after.items())[-MAX_WORK:])


class Finding(NamedTuple):
    """What a rule found.

    Attributes:
        kind: the rule.
        action: what follows.
        number: how often the rounds were repeated; rounds; or seconds.
        limit: the threshold that was reached.
        tools: the tools of the repeated rounds, one entry for each round.
        is_first: the threshold was reached with this round, not before.
    """

    kind: Kind
    action: Action
    number: int
    limit: int
    tools: tuple[tuple[str, ...], ...] = ()
    is_first: bool = False

    @property
    def text(self) -> str:
        """Return what was found: the number, and what repeats. It names tools, but contains no text of the client."""
        return _TEXTS[self.kind](self)

    @property
    def key(self) -> str:
        """Return the path of the setting that was reached."""
        return _KEYS.get(self.kind) or f"runaway.{self.kind}.{self.action}"


_KEYS: Final[Mapping[str, str]] = {"seconds": "budget.seconds", "step_seconds": "max_seconds of the step"}


def _loop_text(found: Finding) -> str:
    if not any(found.tools):
        return f"the same reply was followed by the same message {found.number} times in a row"
    calls = " - ".join(map(_names, found.tools))
    if len(found.tools) == 1:
        return f"the same call ({calls}) had the same result {found.number} times in a row"
    return f"the same {len(found.tools)} calls ({calls}) had the same results {found.number} times in a row"


def _no_progress_text(found: Finding) -> str:
    names = dict.fromkeys(name for tools in found.tools for name in tools)
    named = f" ({_names(tuple(names))})" if names else ""
    return f"the last {found.number} rounds{named} repeated earlier calls with the same results"


def _names(tools: tuple[str, ...]) -> str:
    return " and ".join(tools[:_NAMES]) + (" and others" if len(tools) > _NAMES else "")


_TEXTS: Final[Mapping[Kind, Callable[[Finding], str]]] = {
    "loop": _loop_text,
    "no_progress": _no_progress_text,
    "rounds": lambda found: f"{found.number:,} rounds passed since the last new user message",
    "seconds": lambda found: f"{found.number:,} seconds passed since the last new user message",
    "step_seconds": lambda found: f"{found.number:,} seconds passed since the step was entered",
}


def findings(rounds: RoundReader, policy: RunawayPolicy, lifted: int = 0) -> Iterator[Finding]:
    """Yield what the rules find in the rounds of a request; the last round must be closed.

    `lifted`: the number of first rounds that do not count.
    """
    if rounds.known:
        yield from _loops(rounds, policy.loop, lifted)
        counted = min(rounds.known, rounds.number - lifted) if lifted else rounds.known
        yield from _reached("no_progress", policy.no_progress, counted, rounds.tools)
    yield from _reached("rounds", policy.rounds, rounds.number - lifted)


def _loops(rounds: RoundReader, limits: Thresholds, lifted: int) -> Iterator[Finding]:
    """Yield the loop that was repeated most often, if that is often enough."""
    # The pair before the first round also counts, see `RoundReader.user`.
    most = rounds.number - lifted if lifted else rounds.number + 1
    times, period, length = 0, 0, 0
    for number, run in enumerate(rounds.runs, 1):
        equal = min(run + number, most) if run else 0
        if equal // number > times:
            times, period, length = equal // number, number, equal
    for found in _reached("loop", limits, times, rounds.tools[-period:]):
        yield found._replace(is_first=length == found.limit * period)


def _reached(
    kind: Kind, limits: Thresholds, count: float, tools: tuple[tuple[str, ...], ...] = ()
) -> Iterator[Finding]:
    """Yield the refusal or the warning that a count leads to."""
    for action, limit in (("refuse", limits.refuse), ("warn", limits.warn)):
        if limit is not None and count >= limit:
            yield Finding(kind, action, int(count), int(limit), tools, is_first=count == limit)  # type: ignore[arg-type]
            return


def overtime(work: WorkState, policy: RunawayPolicy, step_limit: float | None, now: float) -> Iterator[Finding]:
    """Yield the limits in seconds that a work has reached. `step_limit`: the most seconds of its step."""
    for kind, limits, since in (
        ("seconds", policy.seconds, work.since),
        ("step_seconds", policy.step_seconds(step_limit), work.step_since),
    ):
        for found in _reached(kind, limits, now - since):  # type: ignore[arg-type]
            yield found._replace(is_first=kind not in work.warned)


@dataclass(frozen=True, slots=True)
class RunawayAlert:
    """A warning or a refusal, for observers.

    Attributes:
        session: the session; None if the call has none.
        call_id: the call that reached the threshold.
        found: what was found.
        at: Unix time in seconds.
    """

    session: SessionKey | None
    call_id: str
    found: Finding
    at: float


def finding_json(found: Finding) -> dict[str, Any]:
    """Return what was found as JSON, for errors and events."""
    return {
        "kind": found.kind,
        "action": found.action,
        "count": found.number,
        "limit": found.limit,
        "setting": found.key,
        "tools": [list(tools) for tools in found.tools],
    }
