"""Write a request again after its provider refused it for its length or its thinking blocks.

What is learned from a refusal is kept: a limit for all calls of the model, removed thinking for the conversation only.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from gateway.call.bound_thinking import BoundCall, MakePlan, PlanResult, SendChoice
from gateway.call.state import CallState
from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.context.request import RequestComposer
from gateway.core.context_budget import ContextOptions, LengthLimit, smallest_limit
from gateway.core.counting.calibration import Residual
from gateway.core.ledger.output_limit import lowest, output_room
from gateway.core.plan import Plan
from gateway.dialects.base import Call
from gateway.dialects.length_error import LengthError
from gateway.dialects.thinking_error import ThinkingRefusal
from gateway.dialects.thinking_fields import DROPPING, manages_thinking, thinking_type
from gateway.stores.learner import Learner

logger = logging.getLogger("gateway")

#: Smallest number in an error that is accepted as a limit, in tokens. A smaller number means something else.
_LEAST_LIMIT: Final = 256
#: Share of the request's tokens that it is trimmed to if the provider named no limit.
_SHORTER: Final = 0.8
#: Tokens. Every model in use today has a window of at least this size.
_LEAST_KNOWN: Final = 4_096
_TOO_LONG: Final = "the provider refused it for its length"


class Recomposer:
    """Composes calls again that their provider refused. Shared by all calls."""

    def __init__(self, composer: RequestComposer, planner: Planner, learner: Learner) -> None:
        self._composer = composer
        self._planner = planner
        self._learner = learner

    async def _planned_again(
        self, state: CallState, request: PlanRequest, options: ContextOptions, reported_limit: LengthLimit
    ) -> PlanResult:
        """Plan a call again that the provider refused for its length."""
        bound, request = state.context.thinking, replace(request, options=options)
        if bound is None:
            return PlanResult(
                request, await self._composer.plan(state, request, reported_limit), state.context.shown, None
            )
        return await bound.choose(
            bound.choice, state.context.tried.modes, self._replan(state, bound, request, reported_limit)
        )

    def _replan(
        self, state: CallState, bound: BoundCall, request: PlanRequest, reported_limit: LengthLimit | None
    ) -> MakePlan:
        """Return a function that plans the call again with other thinking removed, and everything else unchanged."""

        async def plan(choice: SendChoice, *, may_sum_up: bool = True, most: int | None = None) -> PlanResult:
            contents = await self._composer.chosen(state, bound.received, choice)
            received = None if contents is bound.original else bound.original
            again = replace(request, contents=contents, counts=None, received=received)
            planned = await self._composer.plan_within(state, again, most, reported_limit, may_sum_up=may_sum_up)
            return PlanResult(*planned, state.context.shown, None)

        return plan

    @staticmethod
    def may_be_too_long(state: CallState) -> bool:
        """Return whether the provider may refuse the request for its length, and it could be trimmed again.

        The first bytes of a response are not examined if the request is far below the window, or below 4,096 tokens
        where the window is unknown.
        """
        plan = state.context.plan
        if plan is None or state.context.request is None:
            return False
        return plan.context.tokens > (_LEAST_KNOWN if plan.window is None else plan.window // 2)

    async def trim_again(self, state: CallState, error: LengthError) -> bool:
        """Learn from a provider's refusal for length; return whether there is something shorter to send now."""
        request, plan = await self._composer.loaded(state), state.context.plan
        if request is None or plan is None:
            return False
        held = self._composer.held_input(state)
        options = replace(request.options, budget=smallest_limit(request.options.budget, held))
        reported_limit = self._learn_limit(state, request, plan, error)
        before = state.context.shown
        planned = await self._planned_again(state, request, options, reported_limit)
        again = planned.plan
        state.notes["context"] = _TOO_LONG
        is_shorter = (
            again.messages not in (None, plan.messages)
            or (state.context.thinking is not None and planned.sent != state.context.sent_messages)
            or self._has_less_room(state, request, plan, again)
        )
        # By the provider's count, the smallest request that can be sent may exceed the tokens that are held.
        is_over = held is not None and again.context.tokens > held
        if again.overflow is not None or not is_shorter or is_over:
            state.context.shown = before
            return False
        await self._composer.take(state, planned)
        state.notes["context"] = f"{_TOO_LONG}, and it was trimmed again"
        await self._composer.remember(state, again)
        return True

    async def repair_thinking(self, state: CallState, call: Call, refusal: ThinkingRefusal) -> bool:
        """Remove thinking that the provider refused, for the rest of the conversation; return whether to send again.

        Claude Code and clients that set `block_binding` handle refusals of requests that the gateway did not change.
        They cannot handle a refusal caused by a change of the gateway.
        """
        request = await self._composer.loaded(state)
        if request is None:
            return refusal.kind == "binding" and await self._count_without_thinking(state, call)
        if request.contents.messages is None:
            return False
        received = request.received or request.contents
        is_changed = state.context.sent_messages != received.messages or "tools" in state.steps.restriction.fields
        if not is_changed and manages_thinking(state.incoming.headers, call):
            return False
        bound = state.context.thinking or await self._composer.bound(state, received, is_known=True)
        may_drop = self._may_ask_to_drop(state, call)
        if bound is None or (refusal.kind == "round" and not may_drop):
            return False
        state.context.thinking = bound
        messages, index = state.context.sent_messages, refusal.message
        is_named = received.wire == "messages" and index is not None and index < len(messages)
        first = bound.conversation.position_of(messages[index]) if is_named and index is not None else None
        before = messages, bound.provider_drops
        plan = self._replan(state, bound, request, None)
        planned = await bound.repaired(refusal, first or 0, state.context.tried.modes, plan, may_drop=may_drop)
        if planned.plan.overflow is not None or (planned.sent, bound.provider_drops) == before:
            return False
        await self._composer.take(state, planned)
        state.notes["thinking"] = "refused by the provider, removed, and sent again"
        logger.warning(
            "call %s: %s refused thinking blocks (%s); it is sent again without them",
            state.incoming.call_id, state.routing.route.provider, refusal.kind,
        )  # fmt: skip
        return True

    def _may_ask_to_drop(self, state: CallState, call: Call) -> bool:
        """Return whether the provider can be asked to drop blocks: other types of thinking refuse that field."""
        if state.incoming.endpoint.wire != "messages":
            return False
        kind = thinking_type(call)
        return kind in DROPPING or (kind is None and self._planner.is_bound(state.routing.route, "messages"))

    async def accepted(self, state: CallState) -> None:
        """Keep a repair for the conversation, now that the provider has accepted the call with it."""
        if state.context.plan is not None:
            await self._composer.remember(state, state.context.plan)

    async def _count_without_thinking(self, state: CallState, call: Call) -> bool:
        """Ask a provider to count a request without its thinking; return False if it has none.

        This happens only after a trim: the thinking belongs to the trimmed messages, but the client has the original
        ones counted.
        """
        contents = await self._planner.contents(call, "messages") if b"thinking" in call.body else None
        conversation = await self._planner.bound(contents) if contents is not None else None
        if contents is None or conversation is None or not conversation.thinking:
            return False
        bound = state.context.thinking = BoundCall(contents, conversation, None, "")
        bound.choice = SendChoice(removed=((0, conversation.size),))
        await self._planner.read(len(call.body), lambda: bound.without(bound.choice, self._planner.prefixes))
        state.notes["thinking"] = "refused by the provider; counted without it"
        return True

    @staticmethod
    def _has_less_room(state: CallState, request: PlanRequest, plan: Plan, again: Plan) -> bool:
        """Return whether it helps to send the same messages again, because the gateway now sets a lower output limit.

        The provider has named a smaller window than was known. Input and output share it, so less is left for output.
        """
        limit = state.budget.hold.limit if state.budget.hold is not None else None
        if limit is None or again.messages != plan.messages or state.output_asked.limit is not None:
            return False
        before, now = (
            lowest(limit, request.facts.output, output_room(one.window, one.safe_tokens)) for one in (plan, again)
        )
        return now < before

    def _learn_limit(self, state: CallState, request: PlanRequest, plan: Plan, error: LengthError) -> LengthLimit:
        """Return the limit to trim to. The limit and the count that the provider names are learned for all calls."""
        context = plan.context
        if error.input_tokens is not None:
            last = context.reported(error.input_tokens)
            self._learner.report(context.key, Residual(last.residual, context.estimate))
            state.context.remembered = replace(state.context.remembered, last_turn=last)
        output = 0 if error.of_input else error.output or request.options.output or 0
        if (
            error.limit is not None
            and _LEAST_LIMIT <= error.limit < max(error.input_tokens or 0, context.tokens) + output
        ):
            reported_limit = LengthLimit(error.limit, of_input=error.of_input)
            self._learner.report_limit(request.route.provider, request.limit_model, reported_limit)
            return reported_limit
        return LengthLimit(int((context.tokens - context.kept) * _SHORTER))
