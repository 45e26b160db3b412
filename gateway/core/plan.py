"""Decide what of a request is sent if it is over its budget.

`make_room` chooses what to keep. A `Plan` is the outcome, or that a summary has to be made first. What the budget is
stands in `context_budget.py`, what the request weighs in `counting/weighed.py`. Who calls these, on which thread, and
who makes the summary is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.conversation.message import Hashed, Message, encode
from gateway.core.conversation.units import Conversation
from gateway.core.counting.calibration import ceiling, may_become
from gateway.core.counting.counted import CountedRequest, Learned, count_tokens
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.overhead import Overhead
from gateway.core.counting.request import RequestParts
from gateway.core.fitting.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.core.fitting.reader import Reader
from gateway.core.fitting.report import Fates, TrimmedConversation
from gateway.core.fitting.summary import Passage, SummaryNeeded, SummaryRequest, Use, asking
from gateway.core.fitting.trim_decision import TrimDecision
from gateway.core.fitting.trim_decisions import find, fit
from gateway.core.record import ContextRecord
from gateway.core.session import SessionState
from gateway.core.values import dataclass
from gateway.core.views import View, new_faults

#: Messages are chosen by what they weigh as chat messages. In the request's own format the choice may weigh more: then
#: it is made again for a limit that is lower by the difference, so many times.
_TRIES: Final = 3
#: a limit, in tokens, that only what must stay is left at
_NOTHING: Final = 0
#: nobody changes these
_NO_FATES: Final = Fates()
_NOTHING_SAVED: Final[Mapping[str, int]] = {}


class InvalidPlan(Exception):
    """What was chosen must not be sent, as its format does not allow it: our own mistake, and not the request's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send.

    Attributes:
        context: what was weighed and decided.
        safe_tokens: the most that what is sent may weigh: expected tokens and margin, without what the provider keeps.
        messages: to send instead of those that came; None: as they came.
        trim_decision: a decision to remember, as JSON; None where nothing new was decided.
        resumed: the prefix of the epoch it goes on from.
        overflow: why it must not be sent at all.
        needs: the summary that has to be made first. Then the plan is to be made again; this one changes nothing.
        window: of the model, as far as anyone knows.
        overhead: tokens of what is sent that belong to no message (tools, schema, frame), see `Estimate.overhead`.
    """

    context: ContextRecord
    safe_tokens: int
    messages: tuple[bytes, ...] | None = None
    trim_decision: Mapping[str, Any] | None = None
    resumed: str | None = None
    overflow: ContextOverflow | BudgetTooSmall | TextTooLong | None = None
    needs: SummaryRequest | None = None
    window: int | None = None
    overhead: int = 0

    @property
    def is_safe(self) -> bool:
        """Whether what is sent surely is within its budget."""
        budget = self.context.budget
        return self.overflow is None and (budget is None or self.safe_tokens <= budget)


def as_it_came(
    counted: CountedRequest, budget: int | None, safety: float | None = None, *, window: int | None = None
) -> Plan:
    """The plan that changes nothing."""
    record, overhead = _record(counted, counted, budget, safety), counted.estimate.overhead
    return Plan(record, counted.expected.safe_tokens, window=window, overhead=overhead)


def _record(
    original: CountedRequest,
    sent: CountedRequest,
    budget: int | None,
    safety: float | None,
    *,
    fates: Fates = _NO_FATES,
    saved: Mapping[str, int] = _NOTHING_SAVED,
    shadow: bool = False,
) -> ContextRecord:
    return ContextRecord(
        tokens=sent.tokens,
        original_tokens=original.tokens,
        source=sent.expected.source,
        budget=budget,
        conversation_tokens=sent.estimate.context.conversation_tokens,
        tool_tokens=sent.estimate.context.tool_tokens,
        key=sent.key,
        estimate=sent.estimate.tokens,
        frames=sent.estimate.frames,
        before=sent.expected.last,
        tool_weights=sent.estimate.context.tools,
        trimmed=fates.actions if fates else {},
        saved=saved,
        shadow=shadow,
        message_fates=fates,
        margin=sent.margin(safety),
        kept=sent.kept,
        newest=sent.estimate.newest,
    )


@dataclass(frozen=True, slots=True)
class Scales:
    """What weighs a choice: whole requests, and single messages with the numbers of the same model.

    `overhead`: what stands beside the messages of the request, where that was measured before.
    """

    estimator: Estimator
    reader: Reader
    overhead: Overhead | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What a choice is made with.

    Attributes:
        budget: input tokens of the whole request.
        policy: the settings.
        shadow: decide and report, but send what came.
        state: what the session remembers: decisions of earlier turns, and summaries.
        learned: what earlier calls taught.
        expired: says True once the choice has taken too long.
        use: whether a summary may be asked for, or one that was made be used; with `shadow`, neither.
        salt: part of the name of a decision: one for another model, or of a shadow, is not gone on from.
        window: of the model, as far as anyone knows.
    """

    budget: int
    policy: ContextPolicy
    shadow: bool
    state: SessionState
    learned: Learned
    expired: Callable[[], bool]
    use: Use = "off"
    salt: str = ""
    window: int | None = None


def make_room(original: CountedRequest, view: View, conversation: Conversation, room: Room, scales: Scales) -> Plan:
    """Choose what to keep of a request that is over its budget.

    Args:
        original: the request as it is weighed.
        view: its messages as chat messages.
        conversation: those.
        room: what there is for it.
        scales: to weigh choices with.

    Raises:
        ContextOverflow: what must stay is over the budget alone, and nothing may be.
        BudgetTooSmall: so is what stands beside the messages.
    """
    request, is_over = original.request, original.estimate.overhead >= room.budget
    is_beside = request.tools or request.schema is not None or request.others or request.system is not None
    if is_over and room.policy.overflow != "least" and (is_beside or not conversation.messages):
        raise BudgetTooSmall(needed=original.estimate.overhead, budget=room.budget)
    if not conversation.messages:
        # There is nothing to leave out.
        return as_it_came(original, room.budget, room.policy.safety, window=room.window)
    case = _Case(original, view, conversation, scales)
    try:
        return _decided(case, room)
    except ContextOverflow as overflow:
        raise overflow.at(view.places[overflow.index][0], view.array) from None


@dataclass(frozen=True, slots=True)
class _Case:
    """A request that is over its budget, see `make_room`."""

    original: CountedRequest
    view: View
    conversation: Conversation
    scales: Scales


def _decided(case: _Case, room: Room) -> Plan:
    try:
        return _roomy(case, room)
    except SummaryNeeded as wanted:
        needs = _needs(wanted.passage, room.policy.summary, case.scales.estimator)
    if needs is None:
        return _roomy(case, replace(room, use="off"))
    original = as_it_came(case.original, room.budget, room.policy.safety, window=room.window)
    return replace(original, needs=needs)


def _needs(passage: Passage, model: SummaryModel | None, estimator: Estimator) -> SummaryRequest | None:
    """What the model is to be asked; None where there is no model, or what it can take is too little."""
    if model is None:
        return None
    route, facts = model.route, model.facts

    def count(messages: Sequence[Message]) -> int:
        raws = [encode(message) for message in messages]
        request = RequestParts(
            wire="chat", model=route.model, provider=route.provider, tokenizer=facts.tokenizer or "", messages=raws
        )
        return estimator.estimate(request).tokens

    most = min(model.max_tokens, facts.output or model.max_tokens)
    messages = asking(passage, most, model.room, count)
    return SummaryRequest(passage.id, model.name, messages, most, passage.count) if messages is not None else None


def _roomy(case: _Case, room: Room) -> Plan:
    """The first plan that can be made of four.

    That of the very same request before; one that is within the budget with its margin; one that is within it without;
    the least that can be sent.

    The margin and what was learned may be wrong. So a request that would only be over the budget because of them is
    sent all the same: what the provider says to it is learned.
    """
    original, trim_decision = _as_sent_last(case.original, room.learned), _trim_decision(case, room)
    bare = room.budget - (original.beyond if original.expected.last is not None else 0)
    again = _again(case, room, trim_decision, bare)
    if again is not None:
        return again
    with suppress(ContextOverflow):
        return _fitted(case, room, trim_decision, _safely(original, room), original.key)
    try:
        return _fitted(case, room, trim_decision, bare, original.key)
    except ContextOverflow as overflow:
        return _least(case, room, trim_decision, overflow)


def _as_sent_last(original: CountedRequest, learned: Learned) -> CountedRequest:
    """What came, weighed as if it were of the kind that this session sent last, where it may become that by a cut.

    A request that came with images, say, is of another kind once they are cut. What this session was reported last is
    of the cut kind, and the cut will mostly leave out the same things again; so the limit for the choice is better
    worked out with what was learned of that kind, and with the number of frames that was sent then.
    """
    last = learned.last_turn
    if last is None or not may_become(original.key, last.key):
        return original
    frames = original.estimate.frames if last.frames is None else last.frames
    return count_tokens(original.request, original.estimate.with_frames(frames), learned, last.key)


def _safely(original: CountedRequest, room: Room) -> int:
    """The limit for `CountedRequest.framed`, in tokens, so that what is sent is within the budget with its margin."""
    if room.policy.safety is not None:
        return int(room.budget / room.policy.safety) - original.beyond
    known = room.learned
    return ceiling(
        original.estimate, original.key, known.offsets, known.last_turn, known.surprises,
        frames=known.frames, budget=room.budget,
    )  # fmt: skip


def _again(case: _Case, room: Room, trim_decision: TrimDecision | None, most: int) -> Plan | None:
    """What was sent when this very request came before (a client's retry), if it is within `most` tokens.

    The same bytes are in the provider's cache; others would be paid in full. So no margin is asked for, and no old
    lines are recalled into room that is left: last time there may have been reasons to leave it.
    """
    if trim_decision is None or trim_decision.size != len(case.conversation.keys):
        return None
    whole = sum(case.scales.reader.weights(case.conversation))
    policy = replace(room.policy, fit=replace(room.policy.fit, recall="off"))
    try:
        limit = min(whole - 1, most - case.original.estimate.overhead)
        fitted = _fit(case, replace(room, policy=policy, use="off"), trim_decision, limit)
    except ContextOverflow:
        return None
    if fitted.trim_decision is not trim_decision:
        return None
    chosen = _chosen(case, room, fitted)
    return _plan(case, chosen, room, trim_decision) if chosen.sent.framed <= most else None


def _fitted(case: _Case, room: Room, trim_decision: TrimDecision | None, most: int, key: str) -> Plan:
    """The plan of a choice that weighs no more than `most` tokens in the request's own format.

    `key`: the kind of request that `most` was worked out for. A choice that comes out as another kind must also be
    expected to be within the whole budget.

    Raises:
        ContextOverflow: there is none; its numbers are of what must stay, as chat messages.
    """
    overhead = case.original.estimate.overhead
    limit = most - overhead
    for _ in range(_TRIES):
        chosen = _chosen(case, room, _fit(case, room, trim_decision, limit))
        sent = chosen.sent
        # What comes out as another kind of request is expected to weigh something else.
        over = max(sent.framed - most, sent.expected.tokens - room.budget if sent.key != key else 0)
        if over <= 0:
            return _plan(case, chosen, room, trim_decision)
        # As much less as this choice takes more in its own form than as chat messages.
        limit = min(limit - 1, chosen.fitted.tokens - over)
    return _plan(case, _chosen(case, room, _fit(case, room, trim_decision, _NOTHING)), room, trim_decision)


def _least(case: _Case, room: Room, trim_decision: TrimDecision | None, overflow: ContextOverflow) -> Plan:
    """The plan of what must stay: where its estimate, with nothing learned, is within the budget, or may be over it.

    Raises:
        ContextOverflow: it is over the budget, and `on_overflow` is not `least`.
    """
    overhead = case.original.estimate.overhead
    chosen = _chosen(case, room, _fit(case, room, trim_decision, overflow.needed))
    sent = chosen.sent
    is_over = sent.estimate.tokens > room.budget
    if is_over and room.policy.overflow != "least":
        raise ContextOverflow(
            needed=sent.estimate.tokens - overhead,
            limit=room.budget - overhead,
            index=overflow.index,
            role=overflow.role,
            tokens=overflow.tokens,
        )
    plan = _plan(case, chosen, room, trim_decision)
    # One turn that is too long is no reason to go without what was left out for it on the turns behind it.
    return replace(plan, trim_decision=None) if is_over else plan


def _salt(case: _Case, room: Room) -> str:
    """What a decision must have been made for to be gone on from: a client may have chosen another model meanwhile."""
    salt = f"shadow{room.salt}" if room.shadow else room.salt
    return f"{salt}\0turns" if case.conversation.takes_turns else salt


def _trim_decision(case: _Case, room: Room) -> TrimDecision | None:
    """The decision to go on from."""
    read = [
        trim_decision
        for value in room.state.trim_decisions.values()
        if (trim_decision := TrimDecision.from_json(value)) is not None
    ]
    known = [
        trim_decision
        for trim_decision in read
        if trim_decision.summary is None or trim_decision.summary in room.state.summaries
    ]
    return find(known, case.conversation, _salt(case, room))


def _fit(case: _Case, room: Room, trim_decision: TrimDecision | None, limit: int) -> TrimmedConversation:
    return fit(
        case.conversation, limit, case.scales.reader,
        trim_decision=trim_decision, policy=room.policy.fit, salt=_salt(case, room), expired=room.expired,
        summaries=room.state.summaries, use="off" if room.shadow else room.use,
    )  # fmt: skip


class _Chosen(NamedTuple):
    """A choice, the elements that would be sent, and what the request weighs with them, by the rules of its format."""

    fitted: TrimmedConversation
    elements: Hashed
    sent: CountedRequest


def _chosen(case: _Case, room: Room, fitted: TrimmedConversation) -> _Chosen:
    elements = case.view.restored(fitted.changes, fitted.new)
    if case.original.request.wire == "chat":
        elements = Hashed(elements.raws, fitted.keys)
    request, estimator = case.original.request, case.scales.estimator
    overhead = case.scales.overhead or estimator.overhead(request)
    estimate = estimator.having(overhead, elements.raws, elements.keys)
    return _Chosen(fitted, elements, count_tokens(request, estimate, room.learned))


def _plan(case: _Case, chosen: _Chosen, room: Room, trim_decision: TrimDecision | None) -> Plan:
    original, (fitted, elements, sent) = case.original, chosen
    is_changed = fitted.changed
    if is_changed and (faults := new_faults(original.request.wire, case.view.original, elements, case.view.book)):
        raise InvalidPlan("; ".join(faults))
    counted = original if room.shadow else sent
    fates = case.view.fates(fitted.fates) if is_changed else _NO_FATES
    record = _record(
        original, counted, room.budget, room.policy.safety, fates=fates, saved=fitted.saved_by_rule, shadow=room.shadow
    )
    return Plan(
        record,
        counted.expected.safe_tokens,
        messages=elements.raws if is_changed and not room.shadow else None,
        trim_decision=fitted.trim_decision.to_json()
        if fitted.trim_decision is not None and fitted.trim_decision is not trim_decision
        else None,
        resumed=trim_decision.prefix if trim_decision is not None else None,
        window=room.window,
        overhead=original.estimate.overhead,
    )
