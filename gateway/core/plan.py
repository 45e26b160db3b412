"""Trim a request that is over its context budget.

`make_room` chooses what to keep and returns a `Plan`. A plan can also say that a summary has to be made first.
`context_budget.py` computes the budget and `counting/counted.py` counts the tokens. The caller chooses the thread and
makes the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gateway.core.context_budget import ContextPolicy, SummaryModel
from gateway.core.conversation.message import Hashed, Message, encode
from gateway.core.conversation.units import Conversation
from gateway.core.counting.calibration import can_be_trimmed_to, largest_estimate
from gateway.core.counting.counted import CountedRequest, LearnedCorrections, count_tokens
from gateway.core.counting.estimate import Estimator
from gateway.core.counting.overhead import Overhead
from gateway.core.counting.request import RequestParts
from gateway.core.record import ContextRecord
from gateway.core.session import SessionState
from gateway.core.trimming.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.core.trimming.reader import Reader
from gateway.core.trimming.report import MessageOutcomes, TrimmedConversation
from gateway.core.trimming.summary import Passage, SummaryNeeded, SummaryRequest, SummaryUse, summary_prompt
from gateway.core.trimming.trim_conversation import find, trim_conversation
from gateway.core.trimming.trim_decision import TrimDecision
from gateway.core.values import dataclass
from gateway.core.views import View, new_faults

#: Messages are chosen by their token counts as chat messages. In the request's own format the choice can have more
#: tokens. Then it is repeated with a limit that is lower by the difference, at most this many times.
_TRIES: Final = 3
#: a limit, in tokens, at which only what must stay is kept
_NOTHING: Final = 0
#: shared empty values, which are never changed
_NO_FATES: Final = MessageOutcomes()
_NOTHING_SAVED: Final[Mapping[str, int]] = {}


class InvalidPlan(Exception):
    """The chosen messages are invalid in the request's format: a bug in the gateway, not an error of the client."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The messages to send for a request, with their token counts.

    Attributes:
        context: the token counts and the decision.
        safe_tokens: upper bound of the tokens sent: expected tokens and margin, without what the provider keeps.
        messages: the messages to send; None: those received, unchanged.
        trim_decision: a new trim decision to remember, as JSON; None if nothing new was decided.
        resumed: the prefix of the trim decision that was continued.
        overflow: why the request must not be sent at all.
        needs: a summary that has to be made first. Then a new plan is made; this one changes nothing.
        window: the context window of the model; None if unknown.
        overhead: tokens that belong to no message (tools, schema, frame), see `Estimate.overhead`.
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
        """Return whether the request is certainly within its budget."""
        budget = self.context.budget
        return self.overflow is None and (budget is None or self.safe_tokens <= budget)


def unchanged_plan(
    counted: CountedRequest, budget: int | None, safety: float | None = None, *, window: int | None = None
) -> Plan:
    """Return the plan that sends a request unchanged."""
    record, overhead = _record(counted, counted, budget, safety), counted.estimate.overhead
    return Plan(record, counted.expected.safe_tokens, window=window, overhead=overhead)


def _record(
    original: CountedRequest,
    sent: CountedRequest,
    budget: int | None,
    safety: float | None,
    *,
    fates: MessageOutcomes = _NO_FATES,
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
        kept=sent.stored_tokens,
        newest=sent.estimate.newest,
    )


@dataclass(frozen=True, slots=True)
class TokenCounters:
    """Count the tokens of a choice: `estimator` for whole requests, `reader` for single messages of the same model.

    `overhead`: the overhead of the request, if it was measured before.
    """

    estimator: Estimator
    reader: Reader
    overhead: Overhead | None = None


@dataclass(frozen=True, slots=True)
class ChoiceBudget:
    """The budget and the settings for a choice.

    Attributes:
        budget: input tokens of the whole request.
        policy: the settings.
        shadow: decide and report, but send the request unchanged.
        state: what the session remembers: trim decisions of earlier turns, and summaries.
        learned: corrections of estimates, learned from earlier calls.
        expired: returns True once the choice has taken too long.
        use: whether a summary may be requested, or an existing one used; ignored with `shadow`.
        salt: part of the name of a trim decision, so that decisions for another model or in shadow are not continued.
        window: the context window of the model; None if unknown.
    """

    budget: int
    policy: ContextPolicy
    shadow: bool
    state: SessionState
    learned: LearnedCorrections
    expired: Callable[[], bool]
    use: SummaryUse = "off"
    salt: str = ""
    window: int | None = None


def make_room(
    original: CountedRequest, view: View, conversation: Conversation, room: ChoiceBudget, scales: TokenCounters
) -> Plan:
    """Choose what to keep of a request that is over its budget.

    Args:
        original: the request with its token counts.
        view: its messages as chat messages.
        conversation: these chat messages in units.
        room: the budget and the settings.
        scales: counts the tokens of choices.

    Raises:
        ContextOverflow: what must stay exceeds the budget, and the settings do not allow that.
        BudgetTooSmall: the overhead (tools, schema, system) exceeds the budget.
    """
    request, is_over = original.request, original.estimate.overhead >= room.budget
    has_overhead = request.tools or request.schema is not None or request.others or request.system is not None
    if is_over and room.policy.overflow != "least" and (has_overhead or not conversation.messages):
        raise BudgetTooSmall(needed=original.estimate.overhead, budget=room.budget)
    if not conversation.messages:
        return unchanged_plan(original, room.budget, room.policy.safety, window=room.window)
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
    scales: TokenCounters


def _decided(case: _Case, room: ChoiceBudget) -> Plan:
    try:
        return _first_plan(case, room)
    except SummaryNeeded as wanted:
        needs = _needs(wanted.passage, room.policy.summary, case.scales.estimator)
    if needs is None:
        return _first_plan(case, replace(room, use="off"))
    original = unchanged_plan(case.original, room.budget, room.policy.safety, window=room.window)
    return replace(original, needs=needs)


def _needs(passage: Passage, model: SummaryModel | None, estimator: Estimator) -> SummaryRequest | None:
    """Return the request for a summary, or None if there is no summary model or its window is too small."""
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
    messages = summary_prompt(passage, most, model.room, count)
    return SummaryRequest(passage.id, model.name, messages, most, passage.count) if messages is not None else None


def _first_plan(case: _Case, room: ChoiceBudget) -> Plan:
    """Return the first of these plans that is possible.

    1. The plan of the identical request before, for a client's retry.
    2. A plan within the budget, including the margin.
    3. A plan within the budget, without the margin.
    4. The least that can be sent.

    The margin and learned corrections can be wrong. A request that exceeds the budget only because of them is sent
    anyway, and the gateway learns from the provider's response.
    """
    original, trim_decision = _as_sent_last(case.original, room.learned), _trim_decision(case, room)
    bare = room.budget - (original.constant_offset if original.expected.last is not None else 0)
    repeated = _repeated(case, room, trim_decision, bare)
    if repeated is not None:
        return repeated
    with suppress(ContextOverflow):
        return _fitted(case, room, trim_decision, _safely(original, room), original.key)
    try:
        return _fitted(case, room, trim_decision, bare, original.key)
    except ContextOverflow as overflow:
        return _least(case, room, trim_decision, overflow)


def _as_sent_last(original: CountedRequest, learned: LearnedCorrections) -> CountedRequest:
    """Count the request as the kind that this session sent last, if trimming can turn it into that kind.

    For example, a request with images is of another kind once its images are trimmed. The usage last reported for the
    session is of the trimmed kind, and trimming will mostly leave out the same things again. The limit is therefore
    computed with what was learned about that kind, and with the number of frames sent then.
    """
    last = learned.last_turn
    if last is None or not can_be_trimmed_to(original.key, last.key):
        return original
    frames = original.estimate.frames if last.frames is None else last.frames
    return count_tokens(original.request, original.estimate.with_frames(frames), learned, last.key)


def _safely(original: CountedRequest, room: ChoiceBudget) -> int:
    """Return the largest `CountedRequest.estimate_with_frames` with which request and margin are in the budget."""
    if room.policy.safety is not None:
        return int(room.budget / room.policy.safety) - original.constant_offset
    known = room.learned
    return largest_estimate(
        original.estimate, original.key, known.offsets, known.last_turn, known.surprises,
        frames=known.frames, budget=room.budget,
    )  # fmt: skip


def _repeated(case: _Case, room: ChoiceBudget, trim_decision: TrimDecision | None, most: int) -> Plan | None:
    """Return the plan for a repeated request (a client's retry): the same bytes as before, if at most `most` tokens.

    The same bytes are in the provider's cache; other bytes would be billed in full. No margin is needed, and no old
    lines are recalled into free room, because the last plan may have left it free for a reason.
    """
    if trim_decision is None or trim_decision.size != len(case.conversation.keys):
        return None
    whole = sum(case.scales.reader.token_counts(case.conversation))
    policy = replace(room.policy, fit=replace(room.policy.fit, recall="off"))
    try:
        limit = min(whole - 1, most - case.original.estimate.overhead)
        fitted = _fit(case, replace(room, policy=policy, use="off"), trim_decision, limit)
    except ContextOverflow:
        return None
    if fitted.trim_decision is not trim_decision:
        return None
    chosen = _chosen(case, room, fitted)
    return _plan(case, chosen, room, trim_decision) if chosen.sent.estimate_with_frames <= most else None


def _fitted(case: _Case, room: ChoiceBudget, trim_decision: TrimDecision | None, most: int, key: str) -> Plan:
    """Return the plan of a choice with at most `most` tokens in the request's own format.

    `key`: the kind of request for which `most` was computed. If the choice is of another kind, its expected tokens must
    also be within the whole budget.

    Raises:
        ContextOverflow: there is no such choice. Its numbers are those of what must stay, as chat messages.
    """
    overhead = case.original.estimate.overhead
    limit = most - overhead
    for _ in range(_TRIES):
        chosen = _chosen(case, room, _fit(case, room, trim_decision, limit))
        sent = chosen.sent
        # A choice of another kind has other expected tokens.
        over = max(sent.estimate_with_frames - most, sent.expected.tokens - room.budget if sent.key != key else 0)
        if over <= 0:
            return _plan(case, chosen, room, trim_decision)
        # Lower the limit by the difference between the request's own format and chat messages.
        limit = min(limit - 1, chosen.fitted.tokens - over)
    return _plan(case, _chosen(case, room, _fit(case, room, trim_decision, _NOTHING)), room, trim_decision)


def _least(case: _Case, room: ChoiceBudget, trim_decision: TrimDecision | None, overflow: ContextOverflow) -> Plan:
    """Return the plan of what must stay, if its uncorrected estimate is within the budget or may exceed it.

    Raises:
        ContextOverflow: it exceeds the budget, and `on_overflow` is not `least`.
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
    # The decision is not remembered: what one long turn displaced should be sent again on later turns.
    return replace(plan, trim_decision=None) if is_over else plan


def _salt(case: _Case, room: ChoiceBudget) -> str:
    """Return the salt of trim decisions. Decisions with another salt, as for another model, are not continued."""
    salt = f"shadow{room.salt}" if room.shadow else room.salt
    return f"{salt}\0turns" if case.conversation.needs_alternating_roles else salt


def _trim_decision(case: _Case, room: ChoiceBudget) -> TrimDecision | None:
    """Return the trim decision to continue, or None."""
    decisions = [
        trim_decision
        for value in room.state.trim_decisions.values()
        if (trim_decision := TrimDecision.from_json(value)) is not None
    ]
    known = [
        trim_decision
        for trim_decision in decisions
        if trim_decision.summary is None or trim_decision.summary in room.state.summaries
    ]
    return find(known, case.conversation, _salt(case, room))


def _fit(case: _Case, room: ChoiceBudget, trim_decision: TrimDecision | None, limit: int) -> TrimmedConversation:
    return trim_conversation(
        case.conversation, limit, case.scales.reader,
        trim_decision=trim_decision, policy=room.policy.fit, salt=_salt(case, room), expired=room.expired,
        summaries=room.state.summaries, use="off" if room.shadow else room.use,
    )  # fmt: skip


class _Chosen(NamedTuple):
    """A choice, the elements that would be sent, and the token counts of the request with them in its own format."""

    fitted: TrimmedConversation
    elements: Hashed
    sent: CountedRequest


def _chosen(case: _Case, room: ChoiceBudget, fitted: TrimmedConversation) -> _Chosen:
    elements = case.view.restored(fitted.changes, fitted.replaced)
    if case.original.request.wire == "chat":
        elements = Hashed(elements.raws, fitted.keys)
    request, estimator = case.original.request, case.scales.estimator
    overhead = case.scales.overhead or estimator.overhead(request)
    estimate = estimator.estimate_with_keys(overhead, elements.raws, elements.keys)
    return _Chosen(fitted, elements, count_tokens(request, estimate, room.learned))


def _plan(case: _Case, chosen: _Chosen, room: ChoiceBudget, trim_decision: TrimDecision | None) -> Plan:
    original, (fitted, elements, sent) = case.original, chosen
    is_changed = fitted.changed
    if is_changed and (faults := new_faults(original.request.wire, case.view.original, elements, case.view.cache)):
        raise InvalidPlan("; ".join(faults))
    counted = original if room.shadow else sent
    fates = case.view.fates(fitted.outcomes) if is_changed else _NO_FATES
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
