"""Define what a session remembers besides its totals: trim decisions, steps and its last turn.

Of the conversations' text it remembers only summaries that are sent in the place of old messages, as long as a decision
refers to them.

Changed by pure functions only; a store applies them to what it holds, and again if somebody else was faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from hashlib import blake2b
from typing import Any, Final

from gateway.core.counting.calibration import LastTurn
from gateway.core.modes.unread import UnreadForm
from gateway.core.steps.machine import StepState
from gateway.core.thinking_origin import ThinkingOrigin
from gateway.core.tool_changes import ToolChange, remember_change
from gateway.core.values import dataclass

#: Conversations of one session that are remembered: the agent's own, and those of its helpers that share its id. Each
#: takes a few characters for each of its messages.
MAX_DECISIONS: Final = 32
#: Characters of all summaries of a session: eight of its conversations may have one of the usual size, of 800 tokens.
MAX_SUMMARIES: Final = 64 * 1024
#: Tool results that keep the form in which they were shown before the model read them, and the blocks of all extracts
#: among them. With more, the oldest are shown as any other result.
MAX_UNREAD: Final = 256
MAX_BLOCKS: Final = 4096
#: agents of which a session remembers where they are in their steps
MAX_AGENTS: Final = 8
#: Providers keep answers and conversations that a later request may go on from without repeating them. A session
#: remembers for the newest 16 how many input tokens such a request has beside its own, in one text: for each a hash of
#: its id and the tokens, in hexadecimal digits, so that any store can put a new one before the others and cut the end.
_NAME_DIGITS: Final = 16
_TOKEN_DIGITS: Final = 8
_WIDTH: Final = _NAME_DIGITS + _TOKEN_DIGITS
MAX_KEPT: Final = 16 * _WIDTH

#: where each agent is in its steps, by its name; the one that called last at the end
Places = Mapping[str, StepState]


@dataclass(frozen=True, slots=True)
class SessionState:
    """The fitted beginnings of a session's conversations, as `Epoch.to_json` gives them, by prefix; the newest last.

    `summaries`: the texts they refer to by id, and those that were made last. `parent`: the session that called for
    this one, whose budgets it spends too. `steps`: where its agents are in theirs. `sent_prefixes`: what was sent of
    conversations whose thinking is bound to it (`SentPrefix.to_json`), by the hash of what was received; newest last.
    `thinking`: who made the thinking blocks of its conversations, by a key of each. `tool_changes`: system messages of
    the gateway that withdraw tools in the middle of its conversations. `unread`: how tool results were shown before the
    model read them, by the name of each (`ResultsIn.names`); newest last.
    """

    trim_decisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    summaries: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    steps: Places = field(default_factory=dict)
    sent_prefixes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinking: Mapping[str, tuple[ThinkingOrigin, ...]] = field(default_factory=dict)
    tool_changes: tuple[ToolChange, ...] = ()
    unread: Mapping[str, UnreadForm] = field(default_factory=dict)

    def with_steps(self, steps: Places) -> SessionState:
        """This state with its agents at these places."""
        return replace(self, steps=steps)

    def with_step(self, agent: str, step: StepState) -> SessionState:
        """This state with an agent somewhere else in its steps."""
        return self.with_steps(moved(self.steps, agent, step))

    def with_thinking(self, conversation: str, origins: tuple[ThinkingOrigin, ...]) -> SessionState:
        """Return this state with other origins of a conversation's thinking; the oldest conversations give way."""
        kept = {key: known for key, known in self.thinking.items() if key != conversation}
        kept[conversation] = origins
        return replace(self, thinking=dict(list(kept.items())[-MAX_DECISIONS:]))

    def with_parent(self, parent: str) -> SessionState:
        """This state with a parent; the first that was named stays."""
        return self if self.parent is not None else replace(self, parent=parent)

    def without_parent(self, parent: str) -> SessionState:
        """This state without that parent, if it has it."""
        return replace(self, parent=None) if self.parent == parent else self

    def with_trim_decision(
        self,
        trim_decision: Mapping[str, Any],
        *,
        instead_of: str | None = None,
        summaries: Mapping[str, str] | None = None,
    ) -> SessionState:
        """This state with one more epoch, `instead_of` the one it goes on from; the oldest give way.

        `summaries`: where the text it refers to is, should it not be here. Those that no epoch refers to are forgotten.
        """
        kept = {
            prefix: old
            for prefix, old in self.trim_decisions.items()
            if prefix not in (instead_of, trim_decision["prefix"])
        }
        kept[trim_decision["prefix"]] = trim_decision
        trim_decisions = dict(list(kept.items())[-MAX_DECISIONS:])
        texts = {**(summaries or {}), **self.summaries}
        named = [
            name for one in trim_decisions.values() if isinstance(name := one.get("summary"), str) and name in texts
        ]
        return replace(self, trim_decisions=trim_decisions, summaries=_newest(texts, named))

    def with_sent_prefix(self, prefix: Mapping[str, Any], *, instead_of: str | None = None) -> SessionState:
        """Return this state with one more sent prefix, `instead_of` an earlier one of the same conversation."""
        received = prefix["received"]
        kept = {name: old for name, old in self.sent_prefixes.items() if name not in (instead_of, received)}
        kept[received] = prefix
        return replace(self, sent_prefixes=dict(list(kept.items())[-MAX_DECISIONS:]))

    def with_tool_change(self, change: ToolChange) -> SessionState:
        """Return this state with one more change of the tools that are offered."""
        return replace(self, tool_changes=remember_change(self.tool_changes, change))

    def with_unread(self, shown: Mapping[str, UnreadForm]) -> SessionState:
        """Return this state with more results that the model has not read; the oldest give way."""
        unread = {**{name: one for name, one in self.unread.items() if name not in shown}, **shown}
        blocks, kept = MAX_BLOCKS, dict[str, UnreadForm]()
        for name, one in list(unread.items())[: -MAX_UNREAD - 1 : -1]:
            blocks -= len(one.blocks or ())
            if blocks < 0:
                break
            kept[name] = one
        return replace(self, unread=dict(reversed(kept.items())))

    def with_summary(self, name: str, text: str) -> SessionState:
        """This state with one more summary; the first that was made of the same messages is the one."""
        texts = {name: text, **self.summaries}
        return replace(self, summaries=_newest(texts, [*self.summaries, name]))


def moved(places: Places, agent: str, step: StepState) -> Places:
    """Places with an agent somewhere else in its steps; those that were not seen longest give way."""
    after = {**places}
    after.pop(agent, None)
    while len(after) >= MAX_AGENTS:
        del after[next(iter(after))]
    after[agent] = step
    return after


def _newest(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The texts of these names, as many of the last ones as there is room for."""
    room, kept = MAX_SUMMARIES, dict[str, str]()
    for name in reversed(names):
        if name not in kept:
            room -= len(texts[name])
            if room < 0:
                break
            kept[name] = texts[name]
    return dict(reversed(kept.items()))


Change = Callable[[SessionState], SessionState]


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a call needs to know of its session before it is planned.

    `kept`: how many tokens the answers stand for that its providers keep, as `kept_as` wrote it, the newest first.
    """

    state: SessionState = SessionState()
    last_turn: LastTurn | None = None
    kept: str = ""

    def kept_by(self, provider: str, ids: Sequence[str]) -> int:
        """Input tokens that these ids stand for in a request to this provider; 0 where that is not known."""
        return max((_found(self.kept, _name(provider, one)) for one in ids), default=0)


def kept_as(provider: str, ids: Sequence[str], tokens: int) -> str:
    """What a session is to remember: that these ids of its provider stand for so many input tokens."""
    number = min(max(tokens, 0), 16**_TOKEN_DIGITS - 1)
    return "".join(f"{_name(provider, one)}{number:0{_TOKEN_DIGITS}x}" for one in ids)


def _name(provider: str, named: str) -> str:
    """The hash an id is remembered by: ids may be of any length, and two providers may have the same one."""
    text = f"{provider}\n{named}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_NAME_DIGITS // 2).hexdigest()


def _found(kept: str, name: str) -> int:
    place = next((start for start in range(0, len(kept), _WIDTH) if kept.startswith(name, start)), None)
    if place is None:
        return 0
    try:
        return int(kept[place + _NAME_DIGITS : place + _WIDTH], 16)
    except ValueError:  # damaged
        return 0
