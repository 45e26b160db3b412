"""Send a call to a cheaper model when little of its budget is left, unless that could break it.

A call keeps its model if something in it is bound to that model: reasoning that the other one cannot read, tools that
the provider runs, images, a size or a setting that the other model does not accept. The routes of the own model follow
those of the cheaper one, for the case that the cheaper one refuses the request all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from gateway.call.state import CallState
from gateway.call.types import PlanRequest
from gateway.context.planner import Planner
from gateway.context.thinking_origins import ThinkingOrigins
from gateway.core.counting.families import TokenizerFamily
from gateway.core.counting.measure import Wire
from gateway.core.errors import InvalidRequest
from gateway.core.ledger.charging import DowngradePolicy, budgets_used_by, remaining_fraction
from gateway.core.ports import Sessions
from gateway.core.pricing import Price
from gateway.core.routing import ModelFacts, Route
from gateway.core.views import VIEWED
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.fields import AnyFields
from gateway.dialects.portable import bound_to_model, has_model_reasoning
from gateway.dialects.reasoning import turns_thinking_on
from gateway.dialects.tool_restriction import accepts_forced
from gateway.dialects.tools import ToolOffer, read_offer

#: the statuses with which a provider refuses a request that its model does not accept
REFUSED_BY_MODEL: Final = frozenset({400, 404, 413, 422})
#: parameters that some models accept only with their default value
_SAMPLING: Final = ("temperature", "top_p", "top_k")


class Downgrades:
    """Decide for each call whether a cheaper model serves it. `policy`: when, and which one; None for never."""

    def __init__(
        self,
        policy: DowngradePolicy | None,
        *,
        planner: Planner,
        facts: Callable[[Route], ModelFacts],
        thinking: ThinkingOrigins,
        store: Sessions,
    ) -> None:
        self.policy = policy
        self._planner = planner
        self._facts = facts
        self._thinking = thinking
        self._store = store

    def is_due(self, state: CallState, call: Call) -> bool:
        """Return whether so little of a budget is left that a cheaper model should serve the call."""
        if self.policy is None or not state.budget.accounts.budgets:
            return False
        incoming, budgets, step = state.incoming, state.budget.accounts.budgets, state.steps.step
        wire = incoming.endpoint.wire
        if wire not in VIEWED or incoming.purpose is not None:
            return False
        has_own_choice = step is not None and step.model is not None
        is_summary = state.context.compaction is not None or asks_for_compaction(call.fields, wire)
        if has_own_choice or is_summary or state.is_billed_later or call.model == self.policy.model:
            return False
        price = self._facts(state.routing.route).price
        return remaining_fraction(budgets_used_by(budgets, price)) < self.policy.below

    async def obstacle(self, state: CallState, call: Call, wire: Wire, own: Route, cheaper: Route) -> str | None:
        """Return why the call keeps its model; None if the cheaper one can serve it."""
        facts = self._facts(cheaper)
        if not _is_cheaper(self._facts(own).price, facts.price):
            return "the other model does not cost less"
        found = await self._planner.read(len(call.body), lambda: self._obstacle_in(state, call, wire, cheaper, facts))
        if found is not None or facts.window is None:
            return found
        contents = await self._planner.contents(call, wire)
        if contents is None:
            return "its tokens cannot be counted"
        request = PlanRequest(contents, cheaper, facts, state.incoming.directives.context, len(call.body))
        counts = await self._planner.count_tokens(request, state.context.remembered)
        needed = counts.original.tokens + (state.output_asked.limit or 0)
        return f"it needs a window of {needed:,} tokens" if needed > facts.window else None

    def _obstacle_in(self, state: CallState, call: Call, wire: Wire, cheaper: Route, facts: ModelFacts) -> str | None:
        bound = bound_to_model(call.fields, wire)
        if bound is not None:
            return f"it contains {bound}"
        is_sticky = state.context.remembered.state.cheaper_model == cheaper.model
        if has_model_reasoning(call.fields, wire) and not (
            is_sticky or self._thinking.is_readable(state, call, cheaper)
        ):
            return "it contains reasoning of another model"
        return _unaccepted_setting(call.fields, wire, self._planner.family(cheaper, wire), facts)

    async def remember(self, state: CallState, cheaper: Route) -> None:
        """Note in the session that its reasoning comes from the cheaper model from now on.

        Raises:
            StoreUnavailable: the note could not be stored.
        """
        session = state.stored_session
        if session is not None and state.context.remembered.state.cheaper_model != cheaper.model:
            await self._store.update(session, lambda kept: kept.with_cheaper_model(cheaper.model))


def _is_cheaper(own: Price | None, other: Price | None) -> bool:
    """Return whether the other model costs less. With an unknown price, the operator's choice counts."""
    if own is None or other is None:
        return True
    before, after = own.rates, other.rates
    is_dearer = after.input > before.input or after.output > before.output
    return not is_dearer and (after.input, after.output) != (before.input, before.output)


def _unaccepted_setting(fields: AnyFields, wire: Wire, family: TokenizerFamily, facts: ModelFacts) -> str | None:
    """Return which setting of a request the model does not accept, as far as that is known; None if none."""
    offer = _offer(fields, wire)
    if offer is not None and offer.mode == "required" and not accepts_forced(family, offer):
        return "it forces a tool call"
    if family.sampling == "fixed" and any(name in fields for name in _SAMPLING):
        return "it sets a sampling parameter"
    if facts.reasoning is False and turns_thinking_on(fields):
        return "it turns reasoning on"
    return None


def _offer(fields: AnyFields, wire: Wire) -> ToolOffer | None:
    try:
        return read_offer(fields, wire)
    except InvalidRequest:
        return None


def with_fallback(cheaper: Sequence[Route], own: Sequence[Route], most: int) -> tuple[Route, ...]:
    """Return the routes of the cheaper model, then those of the call's own, each once and at most so many."""
    return tuple(dict.fromkeys([*cheaper, *own]))[:most]
