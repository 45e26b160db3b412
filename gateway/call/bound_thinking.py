"""Choose which thinking blocks of a call are sent to a model that binds them to their prefix.

The rules are in `gateway.core.thinking`. Here they are applied to what was planned: a plan that changes something
before thinking blocks of an earlier turn is made again without these blocks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from gateway.call.types import PlanRequest, ShownResults
from gateway.core.counting.prefix_cache import PrefixCache
from gateway.core.modes import ResponseMode
from gateway.core.modes.unread import ResponseModes
from gateway.core.plan import Plan
from gateway.core.record import ThinkingReason, ThinkingRecord
from gateway.core.thinking import MAX_SPANS, BoundConversation, SentPrefix, Span, merged
from gateway.core.tool_changes import ToolChange
from gateway.dialects.contents import Contents, with_messages
from gateway.dialects.thinking_error import ThinkingRefusal

#: Maximum number of plans of one call: removing thinking can move the first change to an earlier position. After these,
#: all thinking is removed.
_MOST_PLANS: Final = 4
#: Removing the oldest thinking is enough if it leaves this share of the budget free. With less, the next call trims.
_FREE_SHARE: Final = 0.15
#: share of the thinking blocks that is removed first, the oldest of them: later ones stay valid then
_OLDEST_SHARE: Final = 0.75


class SendChoice(NamedTuple):
    """How a conversation is sent: spans whose thinking is removed, and response modes by the position they begin at."""

    removed: tuple[Span, ...] = ()
    modes: tuple[tuple[int, ResponseMode], ...] = ((0, "raw"),)


class PlanResult(NamedTuple):
    """One plan of a call, and its request. `affordable`: input tokens that the budgets leave; None: no limit."""

    request: PlanRequest
    plan: Plan
    shown: ShownResults | None
    affordable: int | None

    @property
    def sent(self) -> tuple[bytes, ...]:
        """Return the messages that would be sent."""
        messages = self.plan.messages
        return messages if messages is not None else self.request.contents.messages or ()


class MakePlan(Protocol):
    """Makes a plan. `may_sum_up`: a model may write a summary; `most`: input tokens, if fewer than the budget."""

    def __call__(
        self, choice: SendChoice, /, *, may_sum_up: bool = True, most: int | None = None
    ) -> Awaitable[PlanResult]:
        """Return the plan for a choice."""


@dataclass(slots=True)
class BoundCall:
    """One call to a model that accepts a thinking block only if nothing before the block has changed.

    Attributes:
        received: what the client sent, with the gateway's changes of the tools.
        conversation: the same as positions.
        known: what was sent of the conversation before; None if it was sent as received.
        tools: see `SentPrefix`.
        choice: how the conversation is sent.
        reason: why thinking was removed on this call; empty if none was.
        provider_drops: see `SentPrefix`.
        original: what the client sent.
        tool_change: the change of the tools at the end of the conversation; None if there is none.
        is_summary: the call asks for a compaction. No thinking is created after what is sent for it.
    """

    received: Contents
    conversation: BoundConversation
    known: SentPrefix | None
    tools: str
    choice: SendChoice = field(default_factory=SendChoice)
    reason: ThinkingReason = ""
    provider_drops: bool = False
    original: Contents = field(init=False)
    tool_change: ToolChange | None = None
    is_summary: bool = False
    _bare: tuple[tuple[Span, ...], Contents] = field(init=False)

    def __post_init__(self) -> None:
        self.original = self.received
        self._bare = (), self.received

    @property
    def adds_tool_changes(self) -> bool:
        """Return whether the gateway added system messages that change the tools."""
        return self.received is not self.original

    def without(self, choice: SendChoice, known: PrefixCache) -> Contents:
        """Return what was received, without the thinking that this choice removes. `known`: see `contents_of`."""
        if not choice.removed:
            return self.received
        if choice.removed != self._bare[0]:
            self._bare = choice.removed, self._without(choice.removed, known)
        return self._bare[1]

    def _without(self, removed: tuple[Span, ...], known: PrefixCache) -> Contents:
        contents = with_messages(self.received, self.conversation.without(removed), known)
        kept = self.conversation.indices_without(removed)
        if len(kept) == len(self.received.messages or ()):
            return contents
        # Messages that had only thinking are removed, so the client's marks move to new indices.
        pinned = frozenset(new for new, old in enumerate(kept) if old in self.received.pinned)
        priorities = self.received.priorities or {}
        moved = {new: priorities[old] for new, old in enumerate(kept) if old in priorities}
        return replace(contents, pinned=pinned, priorities=moved if self.received.marked else None)

    @property
    def bare(self) -> Contents:
        """Return what was received, without the thinking that is not sent."""
        return self._bare[1] if self.choice.removed else self.received

    def first_choice(self, modes: ResponseModes, *, all_results: bool) -> SendChoice:
        """Return the choice that changes nothing of what was sent before.

        `all_results`: show all results in these modes, also those that were sent in another one.
        """
        removed = self.known.removed if self.known is not None else ()
        known = self.known.modes if self.known is not None else ((0, "raw"),)
        has_history = self.known is not None or self.conversation.thinking
        if all_results or not known or not has_history:
            return SendChoice(removed, self._modes_from((), 0, modes))
        if known[-1][1] == modes.unread or self.is_summary:
            # Turns that a client keeps after a summary are bound to the results as they were shown before it.
            return SendChoice(removed, known)
        # Only results that the model has not read yet can change without an effect on its thinking.
        return SendChoice(removed, _with_mode(known, self.conversation.after_last_reply, modes.unread))

    def _modes_from(
        self, before: tuple[tuple[int, ResponseMode], ...], start: int, modes: ResponseModes
    ) -> tuple[tuple[int, ResponseMode], ...]:
        """Return these modes of positions with those of results from `start` on changed."""
        unread = self.conversation.after_last_reply
        changed = _with_mode(before, start, modes.read) if start < unread else before
        return _with_mode(changed, max(start, unread), modes.unread)

    async def choose(self, first: SendChoice, modes: ResponseModes, plan: MakePlan) -> PlanResult:
        """Make plans until one sends no thinking block that the provider would refuse; return that plan."""
        has_no_thinking = not self._stale(0, first)
        planned = await plan(first, may_sum_up=has_no_thinking)
        change = self._change(planned)
        if planned.plan.overflow is not None and not has_no_thinking:
            return await self._without_any(planned, first, modes, plan)
        if change is None or not self._stale(change, first):
            return self._accept(planned, first)
        self.reason = self._reason(planned, first, modes)
        older = self._without_oldest(first) if self.reason == "trim" else None
        if older is not None:
            planned = await plan(older, may_sum_up=False)
            if self._is_enough(planned, older):
                return self._accept(planned, older)
        return await self._without_stale(first, change, modes, plan)

    async def _without_stale(self, choice: SendChoice, change: int, modes: ResponseModes, plan: MakePlan) -> PlanResult:
        """Plan without the thinking after the first change. That can move the first change to an earlier position."""
        most: int | None = None
        for _ in range(_MOST_PLANS):
            choice = self._from(choice, change, modes)
            planned = await plan(choice, most=most)
            earlier_change = self._change(planned)
            if earlier_change is not None and self._stale(earlier_change, choice):
                change = earlier_change
            elif most is None and self.reason == "trim" and not self._has_room(planned):
                # Removing thinking alone made it fit, but the next call would trim, and lose the thinking until then.
                most = planned.plan.context.tokens - 1
            else:
                return self._accept(planned, choice)
        choice = self._from(choice, 0, modes)
        return self._accept(await plan(choice, most=most), choice)

    async def _without_any(
        self, planned: PlanResult, first: SendChoice, modes: ResponseModes, plan: MakePlan
    ) -> PlanResult:
        """Plan again without thinking, as the first plan does not fit. Keep the first plan if that does not help."""
        choice = self._from(first, 0, modes)
        again = await plan(choice)
        change = self._change(planned)
        if again.plan.overflow is not None and (change is None or not self._stale(change, first)):
            return self._accept(planned, first)
        # Where a session's budget is too small, the ledger may still let the call through, so it must be valid.
        self.reason = "trim"
        return self._accept(again, choice)

    async def repaired(
        self, refusal: ThinkingRefusal, first: int, modes: ResponseModes, plan: MakePlan, *, may_drop: bool
    ) -> PlanResult:
        """Plan again after the provider refused thinking blocks.

        `first`: the position of the first one; `may_drop`: the provider can be asked to drop blocks itself.
        """
        if may_drop and self._has_later_thinking(first):
            # The provider drops no more than what is invalid, and newer blocks are valid.
            self.provider_drops = True
            choice = self.choice
        elif refusal.kind == "round":
            self.provider_drops = True
            stop = self.conversation.open_turn
            removed = merged((start, min(end, stop)) for start, end in self.choice.removed if start < stop)
            choice = SendChoice(removed, self.choice.modes)
        else:
            choice = self._from(self.choice, first, modes)
        planned = await self.choose(choice, modes, plan)
        self.reason = "refused"
        return planned

    def _has_later_thinking(self, first: int) -> bool:
        """Return whether thinking was created since the last change, after a refused block from before it."""
        changed = self.known.checkpoints[-1].size if self.known is not None and self.known.checkpoints else 0
        return first < changed and self._stale(changed, self.choice) > 0

    def _accept(self, planned: PlanResult, choice: SendChoice) -> PlanResult:
        self.choice = choice
        return planned

    def _change(self, planned: PlanResult) -> int | None:
        return self.conversation.first_change(self.known, planned.sent, self.tools)

    def _stale(self, start: int, choice: SendChoice) -> int:
        return self.conversation.stale(start, self._all_but_round(choice.removed, start))

    def _all_but_round(self, removed: tuple[Span, ...], start: int) -> tuple[Span, ...]:
        """Return these spans and, where the provider drops the thinking of an open tool round itself, that round."""
        if not self.provider_drops:
            return removed
        return (*removed, (max(start, self.conversation.open_turn), self.conversation.size))

    def _reason(self, planned: PlanResult, choice: SendChoice, modes: ResponseModes) -> ThinkingReason:
        if self.tools != (self.known.tools if self.known is not None else ""):
            return "tools"
        is_trimmed = planned.plan.trim_decision is not None
        is_first = choice == self.first_choice(modes, all_results=False)
        return "trim" if is_trimmed or is_first else "mode"

    def _from(self, choice: SendChoice, start: int, modes: ResponseModes) -> SendChoice:
        """Return the choice without thinking from `start` on; results from there on may change as well."""
        stop = self.conversation.open_turn if self.provider_drops else self.conversation.size
        removed = merged((*choice.removed, (start, stop)))
        return SendChoice(removed, self._modes_from(choice.modes, start, modes))

    def _without_oldest(self, choice: SendChoice) -> SendChoice | None:
        """Return the choice without the oldest thinking, which leaves later blocks valid; None if there are few."""
        conversation = self.conversation
        places = [place for place in sorted(conversation.thinking) if conversation.is_kept(place, choice.removed)]
        count = int(len(places) * _OLDEST_SHARE)
        return choice._replace(removed=merged((*choice.removed, (0, places[count])))) if count else None

    def _is_enough(self, planned: PlanResult, choice: SendChoice) -> bool:
        change = self._change(planned)
        if planned.plan.overflow is not None or (change is not None and self._stale(change, choice)):
            return False
        return self._has_room(planned)

    def _has_room(self, planned: PlanResult) -> bool:
        """Return whether some turns fit until the next trim. After a summary there are none."""
        budget = planned.plan.context.budget
        return (
            self.is_summary
            or planned.plan.trim_decision is not None
            or budget is None
            or planned.plan.safe_tokens <= (1 - _FREE_SHARE) * budget
        )

    def to_remember(self, sent: tuple[bytes, ...]) -> SentPrefix | None:
        """Return what the session is to remember before this is sent; None if nothing new was decided."""
        known, (removed, modes) = self.known, self.choice
        if self.is_summary:
            return None
        if known is None:
            if sent == self.received.messages and not (self.tools or self.provider_drops):
                return None
        elif (removed, modes, self.tools, self.provider_drops) == (
            known.removed, known.modes, known.tools, known.provider_drops,
        ) and self.conversation.is_continued(known, sent):  # fmt: skip
            return None
        return self.conversation.remember(
            known, sent, removed=removed, modes=modes, tools=self.tools, provider_drops=self.provider_drops
        )

    def record(self, sent: tuple[bytes, ...]) -> ThinkingRecord | None:
        """Return what became of the call's thinking blocks; None if it has none."""
        received = sum(self.conversation.thinking.values())
        if not received:
            return None
        left = self.conversation.blocks_in(sent)
        return ThinkingRecord(received, left, self.reason or ("earlier" if left < received else ""))


def mode_at(modes: Sequence[tuple[int, ResponseMode]], position: int) -> ResponseMode:
    """Return the response mode at a position."""
    return next((mode for start, mode in reversed(modes) if start <= position), "raw")


def _with_mode(
    modes: tuple[tuple[int, ResponseMode], ...], start: int, mode: ResponseMode
) -> tuple[tuple[int, ResponseMode], ...]:
    """Return the modes with another one from `start` on."""
    before = tuple(span for span in modes if span[0] < start)
    # A session remembers at most MAX_SPANS: beyond that, results would change again on the next call.
    is_same = bool(before) and before[-1][1] == mode
    return before if is_same or len(before) >= MAX_SPANS else (*before, (start, mode))
