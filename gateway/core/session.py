"""Define the state of a session besides its totals: trim decisions, steps and its last turn.

The only text in it are summaries that are sent instead of old messages, as long as a trim decision refers to them.

The state changes only by pure functions. A store applies such a function again if another call changed the state first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from hashlib import blake2b
from typing import Any, Final

from gateway.core.counting.calibration import LastTurn
from gateway.core.modes.unread import UnreadForm
from gateway.core.runaway import Works, WorkState, with_work
from gateway.core.steps.machine import StepState
from gateway.core.thinking_origin import ThinkingOrigin
from gateway.core.tool_changes import ToolChange, remember_change
from gateway.core.values import dataclass

#: Conversations of one session that are remembered: of the agent, and of subagents that share its session id. Each
#: takes a few characters per message.
MAX_DECISIONS: Final = 32
#: Characters of all summaries of a session: enough for eight summaries of the usual size, 800 tokens.
MAX_SUMMARIES: Final = 64 * 1024
#: Tool results that keep the form in which they were shown before the model read them, and blocks in their extracts. If
#: there are more, the oldest results are shown like any other result.
MAX_UNREAD: Final = 256
MAX_BLOCKS: Final = 4096
#: agents whose steps a session remembers
MAX_AGENTS: Final = 8
#: Providers keep responses and conversations, so that a later request can continue them without repeating them. A
#: session remembers the input tokens of the newest 16 in one text. Each entry is a hash of the id and the tokens, in
#: hexadecimal digits. A store can put a new entry first and cut the end without parsing.
_NAME_DIGITS: Final = 16
_TOKEN_DIGITS: Final = 8
_WIDTH: Final = _NAME_DIGITS + _TOKEN_DIGITS
MAX_KEPT: Final = 16 * _WIDTH

#: the step of each agent by its name; the agent that called last is at the end
Places = Mapping[str, StepState]


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state that a session keeps between calls.

    Attributes:
        trim_decisions: `TrimDecision.to_json` by prefix, newest last.
        summaries: the texts to which trim decisions refer by id, and the newest other ones.
        parent: the session that started this one; its budget is charged as well.
        steps: the step of each agent.
        sent_prefixes: what was sent of conversations whose thinking is bound to their prefix (`SentPrefix.to_json`), by
            the hash of what was received, newest last.
        thinking: which models made the thinking blocks of each conversation, by a key of the conversation.
        tool_changes: system messages of the gateway that withdraw tools within a conversation.
        unread: how tool results were shown before the model read them, by name (`ConversationResults.names`), newest
            last.
        cheaper_model: the model that serves its calls instead of their own, since little of the budget is left; None if
            none has.
        works: the work on each user message, by `Rounds.work`, for limits in seconds and for stopped sessions.
    """

    trim_decisions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    summaries: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    steps: Places = field(default_factory=dict)
    sent_prefixes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinking: Mapping[str, tuple[ThinkingOrigin, ...]] = field(default_factory=dict)
    tool_changes: tuple[ToolChange, ...] = ()
    unread: Mapping[str, UnreadForm] = field(default_factory=dict)
    cheaper_model: str | None = None
    works: Works = field(default_factory=dict)

    def with_cheaper_model(self, model: str) -> SessionState:
        """Return this state with the model that now serves calls instead of their own."""
        return replace(self, cheaper_model=model)

    def with_steps(self, steps: Places) -> SessionState:
        """Return this state with these steps of its agents."""
        return replace(self, steps=steps)

    def with_step(self, agent: str, step: StepState) -> SessionState:
        """Return this state with another step of one agent."""
        return self.with_steps(with_agent_step(self.steps, agent, step))

    def with_thinking(self, conversation: str, origins: tuple[ThinkingOrigin, ...]) -> SessionState:
        """Return this state with new origins of a conversation's thinking; the oldest conversations are dropped."""
        kept = {key: known for key, known in self.thinking.items() if key != conversation}
        kept[conversation] = origins
        return replace(self, thinking=dict(list(kept.items())[-MAX_DECISIONS:]))

    def with_parent(self, parent: str) -> SessionState:
        """Return this state with a parent, unless it has one."""
        return self if self.parent is not None else replace(self, parent=parent)

    def without_parent(self, parent: str) -> SessionState:
        """Return this state without this parent."""
        return replace(self, parent=None) if self.parent == parent else self

    def with_trim_decision(
        self,
        trim_decision: Mapping[str, Any],
        *,
        instead_of: str | None = None,
        summaries: Mapping[str, str] | None = None,
    ) -> SessionState:
        """Return this state with one more trim decision. If there are too many, the oldest are dropped.

        Args:
            trim_decision: the new one.
            instead_of: the prefix of the decision that it continues and replaces.
            summaries: texts that the decision may refer to. Texts without a decision are dropped.
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
            name
            for decision in trim_decisions.values()
            if isinstance(name := decision.get("summary"), str) and name in texts
        ]
        return replace(self, trim_decisions=trim_decisions, summaries=_newest(texts, named))

    def with_sent_prefix(self, prefix: Mapping[str, Any], *, instead_of: str | None = None) -> SessionState:
        """Return this state with one more sent prefix.

        `instead_of`: the prefix of the same conversation it replaces.
        """
        received = prefix["received"]
        kept = {name: old for name, old in self.sent_prefixes.items() if name not in (instead_of, received)}
        kept[received] = prefix
        return replace(self, sent_prefixes=dict(list(kept.items())[-MAX_DECISIONS:]))

    def with_tool_change(self, change: ToolChange) -> SessionState:
        """Return this state with one more change of the tools that are offered."""
        return replace(self, tool_changes=remember_change(self.tool_changes, change))

    def with_unread(self, shown: Mapping[str, UnreadForm]) -> SessionState:
        """Return this state with more results that the model has not read; the oldest are dropped."""
        unread = {**{name: form for name, form in self.unread.items() if name not in shown}, **shown}
        blocks, kept = MAX_BLOCKS, dict[str, UnreadForm]()
        for name, form in list(unread.items())[: -MAX_UNREAD - 1 : -1]:
            blocks -= len(form.blocks or ())
            if blocks < 0:
                break
            kept[name] = form
        return replace(self, unread=dict(reversed(kept.items())))

    def with_work(self, name: str, work: WorkState) -> SessionState:
        """Return this state with another state of one work."""
        return replace(self, works=with_work(self.works, name, work))

    def resumed(self, now: float) -> SessionState:
        """Return this state after a person resumed the session. `now`: Unix time in seconds."""
        return replace(self, works={name: work.resumed(now) for name, work in self.works.items()})

    @property
    def stopped(self) -> WorkState | None:
        """Return the newest work whose calls are refused, or None."""
        return next((work for work in reversed(list(self.works.values())) if work.stopped is not None), None)

    def with_summary(self, name: str, text: str) -> SessionState:
        """Return this state with one more summary. An existing summary of the same messages is kept."""
        texts = {name: text, **self.summaries}
        return replace(self, summaries=_newest(texts, [*self.summaries, name]))


def with_agent_step(places: Places, agent: str, step: StepState) -> Places:
    """Return the steps with another step of one agent. With too many, the longest unused agents are dropped."""
    after = {**places}
    after.pop(agent, None)
    while len(after) >= MAX_AGENTS:
        del after[next(iter(after))]
    after[agent] = step
    return after


def _newest(texts: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the texts of the last of these names that fit into `MAX_SUMMARIES`."""
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
    """The memory of a session that a call reads before it is planned.

    `kept`: input tokens of responses that providers keep, as written by `kept_text`, newest first.
    """

    state: SessionState = SessionState()
    last_turn: LastTurn | None = None
    kept: str = ""

    def kept_tokens(self, provider: str, ids: Sequence[str]) -> int:
        """Return the input tokens of what this provider keeps by one of these ids; 0 if unknown."""
        return max((_tokens_of(self.kept, _name(provider, id_)) for id_ in ids), default=0)


NOTHING_REMEMBERED: Final = Remembered()


def kept_text(provider: str, ids: Sequence[str], tokens: int) -> str:
    """Return the text by which a session remembers the input tokens of these ids of a provider."""
    number = min(max(tokens, 0), 16**_TOKEN_DIGITS - 1)
    return "".join(f"{_name(provider, id_)}{number:0{_TOKEN_DIGITS}x}" for id_ in ids)


def _name(provider: str, id_: str) -> str:
    """Return the hash of an id and its provider. Ids have any length, and two providers can use the same one."""
    text = f"{provider}\n{id_}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_NAME_DIGITS // 2).hexdigest()


def _tokens_of(kept: str, name: str) -> int:
    place = next((start for start in range(0, len(kept), _WIDTH) if kept.startswith(name, start)), None)
    if place is None:
        return 0
    try:
        return int(kept[place + _NAME_DIGITS : place + _WIDTH], 16)
    except ValueError:  # damaged
        return 0
