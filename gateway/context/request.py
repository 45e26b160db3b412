"""Decide what of a call is sent: response modes, trimmed messages, and the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from gateway.call.bound_thinking import BoundCall, PlanResult, SendChoice, mode_at
from gateway.call.state import NO_EXTRACTS, CallState, UnreadExtracts
from gateway.call.types import PlanRequest, RequestCounts
from gateway.context.planner import Planner
from gateway.context.summaries import NoSummaryError, Summaries
from gateway.context.tool_result_summaries import ToolResultSummaries
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import ContextOptions, LengthLimit, smallest_limit
from gateway.core.conversation.message import digest
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.core.errors import GatewayError, InvalidRequest, StoreUnavailable
from gateway.core.http.headers import ProviderAddress
from gateway.core.ledger.arithmetic import Balance
from gateway.core.ledger.charging import budgets_used_by, dearest, limits_output, rate_of, remaining_fraction
from gateway.core.ledger.output_limit import (
    LimitToSend,
    affordable_input,
    limit_of_step,
    limit_to_set,
    output_room,
    wanted_output,
)
from gateway.core.modes import ResponseMode, mode_for
from gateway.core.modes.unread import ModeTry, ResponseModes, UnreadForm, modes_for, tries_for
from gateway.core.plan import Plan
from gateway.core.ports import Sessions
from gateway.core.record import NOTE_CACHE_MARKS
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import SessionState
from gateway.core.tool_changes import changes_of, inserted, may_be_inserted_at, with_wanted, withdrawn_after
from gateway.core.trimming.overflow import ContextOverflow
from gateway.core.trimming.summary import SummaryUse
from gateway.core.views import VIEWED, View
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.cache_marks import may_have_marks, with_cache_marks
from gateway.dialects.closing import TASK_BUDGET_FIELD, with_instruction, with_task_budget, without_tool_calls
from gateway.dialects.contents import TOO_LARGE, Contents, with_inserted, with_messages
from gateway.dialects.fields import join, without_session_id
from gateway.dialects.limits import may_be_ignored, with_limit
from gateway.dialects.server_state import references_to_stored
from gateway.dialects.thinking_fields import with_drop_block
from gateway.dialects.tool_changes import withdrawn_by_compaction

_TOO_MANY: Final = "tools unchanged: the names of those to withdraw are too long"
_NO_PLACE: Final = "tools unchanged: they can change only after a user message"
_NOT_STORED: Final = "decision not stored: the store is unavailable"

#: How often extracts are chosen at most. They may be too long at first, because their tokens are estimated.
_EXTRACT_TRIES: Final = 3

#: shows tool results without leaving anything out
LOSSLESS: Final = ModeTry(ResponseModes("table", "table"), all_results=True)


class RequestComposer:
    """Composes the requests of all calls.

    `has_modes`: shorten tool results when little of a budget is left.
    """

    def __init__(
        self,
        *,
        planner: Planner,
        results: ToolResultRenderer,
        summaries: Summaries,
        result_summaries: ToolResultSummaries,
        store: Sessions,
        facts: Callable[[Route], ModelFacts],
        has_modes: bool,
    ) -> None:
        self._planner = planner
        self._results = results
        self._summaries = summaries
        self._result_summaries = result_summaries
        self._store = store
        self._facts = facts
        self._has_modes = has_modes

    def mode_tries(self, state: CallState) -> tuple[ModeTry, ...]:
        """Return the ways to show tool results, in the order to try: as budget and call require, then shorter ones."""
        incoming, budgets, route = state.incoming, self._budgets(state), state.routing.route
        mode, wire = incoming.directives.mode, incoming.endpoint.wire
        if state.budget.hold is not None:
            return (self.last_try(state),)
        if wire not in VIEWED or incoming.purpose is not None or state.context.compaction is not None:
            return (ModeTry(ResponseModes("raw", "raw")),)
        if not self._has_modes or not budgets:
            return (ModeTry(ResponseModes(mode, mode)),)
        modes = modes_for(mode, mode_for(remaining_fraction(budgets)))
        if state.call is not None and asks_for_compaction(state.call.fields, wire):
            # The model must summarize the results as it has seen them, not a shorter form.
            return (ModeTry(modes),)
        # A model that binds thinking to its prefix has reasoned about results as they were sent.
        tries = tries_for(modes, is_bound=self._planner.is_bound(route, wire))
        # A summary of the full results is worth more than the room that shorter ones would leave.
        return (ModeTry(ResponseModes(mode, mode)), *tries) if state.is_compaction else tries

    def _budgets(self, state: CallState) -> tuple[Balance, ...]:
        """Return the balances of the budgets that the call can use up."""
        budgets = state.budget.accounts.budgets
        if all(balance.limits.nano_usd is None for balance in budgets):
            return budgets
        return budgets_used_by(budgets, self._facts(state.routing.route).price)

    @staticmethod
    def last_try(state: CallState) -> ModeTry:
        """Return how to show tool results of a call that is composed once more."""
        is_bound = state.context.thinking is not None
        return state.context.tried._replace(all_results=False) if is_bound else state.context.tried

    async def compose(self, state: CallState, call: Call, tried: ModeTry) -> None:
        """Count the tokens of the request and decide what is sent. `tried`: how tool results are shown.

        Raises:
            InvalidRequest: the request sets a context budget, but has too many messages to be counted.
            ContextOverflow: the messages that must stay exceed the budget.
        """
        if not self._planner.is_huge(call):
            await self._compose(state, call, tried)
            return
        async with self._planner.huge_turn:
            try:
                await self._compose(state, call, tried)
            finally:
                self._unload(state)

    async def find_at_provider(self, state: CallState, call: Call, contents: Contents | None = None) -> None:
        """Find once what in a large body refers to content that only the provider has.

        A small body is searched when `CallState.at_provider` is read.
        """
        if state.context.found_at_provider is None and self._planner.is_large(call):
            search = partial(references_to_stored, call.fields, state.incoming.endpoint.wire, contents)
            state.context.found_at_provider = await self._planner.read(len(call.body), search)

    @staticmethod
    def _unload(state: CallState) -> None:
        """Release the messages if they are sent unchanged. `loaded` reads them from the body again."""
        request = state.context.request
        if (
            request is not None
            and not (request.is_changed or request.contents.marked)
            and state.context.thinking is None
        ):
            state.context.request = replace(request, contents=request.contents.unloaded, counts=None)

    async def loaded(self, state: CallState) -> PlanRequest | None:
        """Return the planned request, with its messages read again if they were released."""
        request, call = state.context.request, state.call
        if request is None or call is None or not request.contents.is_unloaded:
            return request
        contents = await self._contents(state, call)
        state.context.request = replace(request, contents=contents) if contents is not None else None
        return state.context.request

    async def _compose(self, state: CallState, call: Call, tried: ModeTry) -> None:
        contents = await self._contents(state, call)
        await self.find_at_provider(state, call, contents)
        if contents is None:
            return
        if tried.modes != state.context.tried.modes:
            state.context.extracts = NO_EXTRACTS
        state.context.mode, state.context.tried = tried.modes.read, tried
        bound = state.context.thinking = await self._bound_with_tool_changes(state, contents)
        contents = bound.received if bound is not None else contents
        size = len(call.body)
        planned = await self._planned(state, contents, size)
        for _ in range(_EXTRACT_TRIES):
            over = self._excess_of_unread(state, planned)
            if over <= 0 or state.stored_session is None:
                break
            if not await self._extract(state, planned.request, contents, over):
                break
            planned = await self._planned(state, contents, size)
        await self.take(state, planned)
        # If the session's budget is too small, the ledger refuses the call, with the numbers of the account.
        if planned.plan.overflow is not None and not self._is_limited_by_session(state, planned):
            raise planned.plan.overflow
        await self.remember(state, planned.plan)

    async def _planned(self, state: CallState, received: Contents, size: int) -> PlanResult:
        """Return the plan for tool results as they are shown now. `size`: bytes of the body."""
        bound, tried = state.context.thinking, state.context.tried
        if bound is None:
            return await self._plan_choice(state, received, size, SendChoice(modes=((0, tried.modes.read),)))
        first = bound.first_choice(tried.modes, all_results=tried.all_results)
        return await bound.choose(first, tried.modes, partial(self._plan_choice, state, received, size))

    async def _plan_choice(
        self,
        state: CallState,
        received: Contents,
        size: int,
        choice: SendChoice,
        *,
        may_sum_up: bool = True,
        most: int | None = None,
    ) -> PlanResult:
        """Return the plan for one choice of removed thinking and response modes. `most`: see `plan_within`."""
        asked, affordable = await self._plan_request(state, received, size, choice)
        request, plan = await self.plan_within(state, asked, most, may_sum_up=may_sum_up)
        return PlanResult(request, plan, state.context.shown, affordable)

    async def _bound_with_tool_changes(self, state: CallState, original: Contents) -> BoundCall | None:
        """Add the system messages that withdraw tools for the step, and return the bound call.

        None for models that do not bind thinking to its prefix.
        """
        withdrawal = state.steps.restriction.withdrawal
        if withdrawal is None:
            return await self.bound(state, original)
        remembered = state.context.remembered.state.tool_changes
        conversation = await self._planner.bound(original) if withdrawal.withdrawn or remembered else None
        if conversation is None:
            return await self.bound(state, original)
        changes = changes_of(conversation, remembered)
        if withdrawal.withdrawn is not None and not may_be_inserted_at(conversation, conversation.size):
            state.notes["tool_changes"] = _NO_PLACE
        elif withdrawal.withdrawn is not None:
            at_start = withdrawn_by_compaction(conversation.messages) & withdrawal.tools
            changes = with_wanted(changes, withdrawal.withdrawn, conversation, at_start)
            if withdrawn_after(changes, at_start) != withdrawal.withdrawn:
                state.notes["tool_changes"] = _TOO_MANY
        before = inserted(conversation, changes, withdrawal.tools)
        received = with_inserted(original, before, self._planner.prefixes) if before else original
        bound = await self.bound(state, received)
        if bound is not None:
            bound.original = original
            bound.tool_change = changes[-1] if changes and changes[-1].size == conversation.size else None
        return bound

    @staticmethod
    def _is_limited_by_session(state: CallState, planned: PlanResult) -> bool:
        """Return whether the session's budget is the one that limits a plan, before anything is reserved."""
        return state.budget.hold is None and planned.plan.context.budget == planned.affordable

    def _excess_of_unread(self, state: CallState, planned: PlanResult) -> int:
        """Return by how many tokens the unread results must be shorter; 0 or less if they need not be."""
        (_, unread), _, may_extract = state.context.tried
        overflow, affordable = planned.plan.overflow, planned.affordable
        if state.context.tried.modes.read == unread or unread not in ("raw", "table"):
            return 0
        limits_session = self._is_limited_by_session(state, planned)
        if isinstance(overflow, ContextOverflow) and not (limits_session and affordable is not None):
            return overflow.needed - overflow.limit
        if affordable is None or state.budget.hold is not None or not may_extract:
            return 0
        # The hold must be enough for fallbacks, which may cost more.
        least = self._left_for_input(state, planned.request.options.output, state.routing.routes) or affordable
        if isinstance(overflow, ContextOverflow):
            return overflow.needed - overflow.limit + affordable - least
        return planned.plan.safe_tokens - least if overflow is None else 0

    async def _extract(self, state: CallState, request: PlanRequest, received: Contents, over: int) -> bool:
        """Choose extracts of the results that the model has not read; return whether there are any.

        `over`: tokens by which these results are too long as they are shown now.
        """
        view = self._planner.view(received)
        results = await self._planner.results_in(view)
        if not results.unread:
            return False
        unread, room = sorted(results.unread), state.context.extracts.room
        if room is None:
            room = await self._planner.tokens_complete(
                request, state.context.remembered, [view.messages[i] for i in unread]
            )
        room = max(0, room - over)
        blocks = await self._planner.chosen_blocks(request, state.context.remembered, view, unread, room)
        named = {results.names[index]: chosen for index, chosen in blocks.items()}
        state.context.extracts = UnreadExtracts(named, room)
        return bool(blocks)

    async def bound(self, state: CallState, contents: Contents, *, is_known: bool = False) -> BoundCall | None:
        """Return what is known of a call to a model that binds thinking to its prefix; None for other models.

        `is_known`: a refusal has just shown that the model does. The session remembers that for the conversation.
        """
        route, prefixes = state.routing.route, state.context.remembered.state.sent_prefixes
        is_listed = is_known or (contents.wire in VIEWED and self._planner.is_bound(route, contents.wire))
        conversation = await self._planner.bound(contents) if is_listed or prefixes else None
        known = conversation.find(prefixes.values()) if conversation is not None else None
        if conversation is None or not (is_listed or known):
            return None
        tools = state.steps.restriction.fields.get("tools")
        name = digest(msgspec.json.encode(tools)).hex() if tools is not None else ""
        is_summary = state.is_compaction
        has_changed = bool(prefixes or state.context.remembered.state.tool_changes)
        if known is None and has_changed and (is_summary or conversation.is_compacted):
            # A summary replaces some turns, and its request leaves out those that the client keeps. So the earlier
            # request is not found, although the conversation continues.
            known = conversation.as_unknown()
        bound = BoundCall(contents, conversation, known, name, is_summary=is_summary)
        bound.provider_drops = known is not None and known.provider_drops
        return bound

    async def _plan_request(
        self, state: CallState, received: Contents, size: int, choice: SendChoice
    ) -> tuple[PlanRequest, int | None]:
        """Return the request to plan, and the input tokens that the budgets leave, or None if they set no limit."""
        contents = await self.chosen(state, received, choice)
        route, context_options, bound = state.routing.route, state.incoming.directives.context, state.context.thinking
        facts, output = self._facts(route), wanted_output(state.output_asked, state.step_output)
        if state.budget.hold is None:
            state.context.affordable = self._left_for_input(state, output, (route,))
        affordable, is_compaction = self._affordable(state), state.is_compaction
        step = state.steps.step.context_budget if state.steps.step is not None else None
        most = affordable if is_compaction else smallest_limit(context_options.budget, affordable, step)
        # The provider is asked to compact the whole conversation, so nothing is trimmed.
        trim = context_options.trim if state.context.compaction is None else "off"
        options = ContextOptions(trim, most, output, context_options.betas)
        original = bound.original if bound is not None else received
        request = PlanRequest(
            contents, route, facts, options, size, _salt(state), self._counts(state, contents),
            received=None if contents is original else original,
            keeps_decisions=bound is not None and bound.known is not None and not is_compaction,
            is_compaction=is_compaction,
        )  # fmt: skip
        return request, affordable

    async def plan_within(
        self,
        state: CallState,
        request: PlanRequest,
        most: int | None,
        reported_limit: LengthLimit | None = None,
        *,
        may_sum_up: bool,
    ) -> tuple[PlanRequest, Plan]:
        """Return the request and its plan for at most `most` input tokens, or for the budget if that is None.

        The record names the budget in both cases.
        """
        if most is None:
            return request, await self.plan(state, request, reported_limit, may_sum_up=may_sum_up)
        options = replace(request.options, budget=smallest_limit(request.options.budget, most))
        plan = await self.plan(state, replace(request, options=options), reported_limit, may_sum_up=may_sum_up)
        unlimited = await self._planner.budget(request, state.context.remembered)
        return request, replace(plan, context=replace(plan.context, budget=unlimited))

    async def chosen(self, state: CallState, received: Contents, choice: SendChoice) -> Contents:
        """Return the contents with the thinking removed and the tool results shown as this choice says."""
        bound = state.context.thinking
        contents = received if bound is None else bound.without(choice, self._planner.prefixes)
        return await self._shown(state, contents, choice)

    async def take(self, state: CallState, planned: PlanResult) -> None:
        """Accept a plan for sending. Add to its record what response modes and removed thinking left out."""
        request, plan, shown, _ = planned
        state.context.request, state.context.plan, state.context.shown = request, plan, shown
        if request.received is None and state.context.thinking is None:
            return
        saved: dict[str, int] = {}
        trimmed = dict(shown.counts) if shown is not None else {}
        thinking = state.context.thinking.record(planned.sent) if state.context.thinking is not None else None
        tokens, received = plan.context.original_tokens, request.received or request.contents
        # If the gateway only added changes of tools, the tokens of what is sent are the better count.
        has_added = state.context.thinking is not None and request.contents is state.context.thinking.received
        if request.is_changed and not has_added:
            tokens = await self._tokens(state, request, received)
        if trimmed:
            bare = state.context.thinking.bare if state.context.thinking is not None else received
            with_modes = await self._tokens(state, request, bare)
            saved = dict.fromkeys(trimmed, max(0, with_modes - plan.context.original_tokens) // len(trimmed))
        if thinking is not None and thinking.sent < thinking.received:
            trimmed["thinking"] = thinking.received - thinking.sent
            saved["thinking"] = max(0, tokens - plan.context.original_tokens - sum(saved.values()))
        context = replace(
            plan.context,
            original_tokens=tokens,
            trimmed={**trimmed, **plan.context.trimmed},
            saved={**saved, **plan.context.saved},
            thinking=thinking,
        )
        state.context.plan = replace(plan, context=context)

    async def _tokens(self, state: CallState, request: PlanRequest, contents: Contents) -> int:
        """Return the input tokens that the provider is expected to report for other contents of a call."""
        counts = await self._planner.count_tokens(
            replace(request, contents=contents, counts=None), state.context.remembered
        )
        return counts.original.tokens

    def _left_for_input(self, state: CallState, output: int | None, routes: Sequence[Route]) -> int | None:
        """Return the input tokens that the budgets leave; None if no budget in tokens or USD is in force.

        The highest price of the models that may be called is used.
        """
        budgets = state.budget.accounts.budgets
        if not limits_output(budgets):
            return None
        rate = dearest(
            rate_of(self._facts(route).price, 0, None) for route in (*routes, *state.routing.instead(*routes))
        )
        left = affordable_input(budgets, output, rate)
        return left if left is None else max(1, left - state.closing_tokens)

    @staticmethod
    def _counts(state: CallState, contents: Contents) -> RequestCounts | None:
        """Return the token counts of the contents if the steps counted them for the same model, else None.

        They are used once. Before a second try the provider may have reported something, so they are counted again.
        """
        counts, is_used = state.steps.counts, state.context.has_used_counts
        state.context.has_used_counts = True
        if counts is None or is_used or contents is not state.steps.contents:
            return None
        request, route = counts.original.request, state.routing.route
        return counts if (request.provider, request.model) == (route.provider, route.model) else None

    def _affordable(self, state: CallState) -> int | None:
        """Return the input tokens that the budgets leave for this try; None if no budget limits them.

        - Before the hold: `ContextState.affordable` minus `ShownResults.extra_tokens`. Summaries are made after the
          hold, and may be longer by that number of tokens than the extracts that they replace.
        - After it, on the first route: all of `ContextState.affordable`.
        - After it, on a fallback: the tokens that are held, as the hold is not renewed.
        """
        hold = state.budget.hold
        if hold is not None and state.routing.route is not state.routing.routes[0]:
            return self.held_input(state)
        if hold is not None or state.context.affordable is None or state.context.shown is None:
            return state.context.affordable
        return max(1, state.context.affordable - state.context.shown.extra_tokens)

    async def _contents(self, state: CallState, call: Call) -> Contents | None:
        """Return the contents to count and trim; None if they cannot be read.

        Also None for calls of the gateway itself, which are sent unchanged.
        """
        incoming = state.incoming
        wire = incoming.endpoint.wire
        if wire is None or incoming.purpose is not None:
            return None
        contents = state.steps.contents or await self._planner.contents(call, wire)
        if contents is not None and state.steps.restriction.counted:
            contents = replace(contents, fields={**contents.fields, **state.steps.restriction.counted})
        if contents is None and wire in VIEWED and incoming.directives.context.budget is not None:
            raise InvalidRequest(
                f"{TOO_LARGE} is not counted, so x-context-budget cannot be kept. Send less, or omit the header.",
                param=ITEMS[wire],
            )
        return contents

    async def _shown(self, state: CallState, contents: Contents, choice: SendChoice) -> Contents:
        """Return the contents with tool results in the modes of this choice."""
        state.context.shown, state.context.unread = None, ()
        if all(mode == "raw" for _, mode in choice.modes) or contents.messages is None:
            return contents
        view = self._planner.view(contents)
        modes, blocks = await self._modes(state, view, choice)
        # Full texts that the agent asked for by handle are sent, unless the budget is too low for them.
        is_handle_only, left = (
            state.incoming.directives.mode == "handle_only",
            remaining_fraction(self._budgets(state)),
        )
        shown = state.context.shown = await self._results.show(
            view.messages, modes, state.stored_session,
            blocks=blocks,
            is_summarized=self._result_summaries.is_on,
            shows_requested=is_handle_only and mode_for(left) != "handle_only",
        )  # fmt: skip
        if shown is None:
            return contents
        return with_messages(contents, view.with_messages(shown.messages), self._planner.prefixes)

    async def _modes(
        self, state: CallState, view: View, choice: SendChoice
    ) -> tuple[Sequence[ResponseMode], Mapping[int, tuple[int, ...]]]:
        """Return the mode of each message, and the blocks of results that are shown as an extract, by index."""
        bound, (now, all_results, _) = state.context.thinking, state.context.tried
        known, size = state.context.remembered.state.unread, len(view.messages)
        if bound is None and now.read == now.unread:
            return [now.read] * size, {}
        if bound is None:
            results = await self._planner.results_in(view)
            known = {name: form for name, form in known.items() if form.mode == now.read}
            kept = {index for index, name in results.names.items() if name in known and not all_results}
            modes = [now.unread if i in results.unread else "table" if i in kept else now.read for i in range(size)]
            new = {results.names[index]: UnreadForm(now.read) for index in results.unread}
        else:
            places = bound.conversation.positions_without(choice.removed)
            modes = [mode_at(choice.modes, places[indices[0]]) for indices in view.places]
            if not (known or state.context.extracts.blocks):
                return modes, {}
            results, new = await self._planner.results_in(view), {}
        extracts = {name: form.blocks for name, form in known.items() if form.blocks is not None} | {
            **state.context.extracts.blocks
        }
        names = results.names.items()
        blocks = {i: extracts[name] for i, name in names if name in extracts and modes[i] in ("raw", "table")}
        new |= {results.names[i]: UnreadForm(now.read, chosen) for i, chosen in blocks.items() if i in results.unread}
        state.context.unread = tuple(new.items())
        return modes, blocks

    async def remember_unread(self, state: CallState) -> None:
        """Store how unread results are shown, because they keep this form on later turns."""
        if not state.context.unread:
            return
        known, session = state.context.remembered.state.unread, state.stored_session
        new = {name: form for name, form in state.context.unread if known.get(name) != form}
        if session is None or not new:
            return
        try:
            await self._store.update(session, lambda kept: kept.with_unread(new))
        except StoreUnavailable:
            state.notes["context"] = _NOT_STORED

    async def summarize_results(self, state: CallState, call: Call) -> bool:
        """Have results summarized before the call is sent; return whether the call must be composed again."""
        if state.context.shown is None or not state.context.shown.pending:
            return False
        contents, bound = await self._contents(state, call), state.context.thinking
        if contents is None or contents.messages is None:
            return False
        if bound is not None:
            contents = bound.bare
        return await self._result_summaries.make(self._planner.view(contents).messages, state)

    async def store_texts(self, state: CallState) -> bool:
        """Store the texts of all handles before the call is sent; return False if that fails.

        After a failure, compose the call again: it then leaves out only texts that are stored.
        """
        shown, session = state.context.shown, state.session
        return shown is None or session is None or await self._results.keep(shown, session)

    async def plan(
        self,
        state: CallState,
        request: PlanRequest,
        reported_limit: LengthLimit | None = None,
        *,
        may_sum_up: bool = True,
    ) -> Plan:
        """Return the plan of a request. If it needs a summary, request that first; a call waits for one at most."""
        use: SummaryUse = state.context.summary_use if may_sum_up else "off"
        plan = await self._planner.plan(request, state.context.remembered, reported_limit, use=use)
        if plan.needs is None:
            return plan
        state.context.summary_use = "off"
        try:
            await self._summaries.make(plan.needs, state)
        except (GatewayError, NoSummaryError) as error:
            state.notes["summary"] = f"none: {error}"
        return await self._planner.plan(
            request, state.context.remembered, reported_limit, use=state.context.summary_use
        )

    async def remember(self, state: CallState, plan: Plan) -> None:
        """Store a new decision before the call is sent, so that every worker sends the same on later turns."""
        trim_decision, session, bound = plan.trim_decision, state.session, state.context.thinking
        if state.is_compaction:
            trim_decision = None  # the next call has another conversation, or the same as before the compaction
        if trim_decision is None and bound is None:
            return
        is_sent = bound is not None and plan.overflow is None
        prefix = bound.to_remember(state.context.sent_messages) if bound is not None and is_sent else None
        tools = bound.tool_change if bound is not None and is_sent else None
        if tools in state.context.remembered.state.tool_changes:
            tools = None
        if session is None or (trim_decision is None and prefix is None and tools is None):
            return
        if state.stored_session is None:
            state.notes["context"] = _NOT_STORED
            return
        texts = state.context.remembered.state.summaries
        before = bound.known.received if bound is not None and bound.known is not None else None

        def change(kept: SessionState) -> SessionState:
            if prefix is not None:
                kept = kept.with_sent_prefix(prefix.to_json(), instead_of=before)
            if tools is not None:
                kept = kept.with_tool_change(tools)
            return (
                kept
                if trim_decision is None
                else kept.with_trim_decision(trim_decision, instead_of=plan.resumed, summaries=texts)
            )

        try:
            await self._store.update(session, change)
        except StoreUnavailable:
            # The next turn decides again. That may miss the provider's cache, but is no reason to refuse the call.
            state.notes["context"] = _NOT_STORED

    def body(self, state: CallState, call: Call, provider: ProviderAddress, *, ask_usage: bool) -> bytes:
        """Return the body to send: the client's own bytes if nothing changes."""
        plan, request, model = state.context.plan, state.context.request, state.routing.route.model
        messages = plan.messages if plan is not None else None
        if messages is None and request is not None and (request.is_changed or request.contents.marked):
            messages = request.contents.messages
        if request is None and state.context.thinking is not None:
            return call.with_model(model, {"messages": join(state.context.thinking.bare.messages or ())})
        wire = state.incoming.endpoint.wire
        changes: dict[str, object] = dict(state.steps.restriction.fields)
        if wire is not None:
            changes |= self._limited(state, call, wire, provider)
            if messages is not None:
                changes[ITEMS[wire]] = join(messages)
        if state.context.thinking is not None and state.context.thinking.provider_drops:
            changes["thinking"] = with_drop_block(call)
        if state.budget.closing is not None and wire is not None:
            changes |= self._closing_fields(state, call, wire, messages)
            if self.adds_task_budget(state, call, provider):
                changes |= with_task_budget(call.fields, self._left_for_output(state))
        if ask_usage:
            changes |= state.dialect.usage_option(call)
        changes |= self._cache_marks(state, provider, {**call.fields, **changes})
        if provider.strict_fields and state.incoming.endpoint.format is not None:
            changes |= without_session_id(call.fields, in_metadata=state.incoming.endpoint.anthropic)
        return call.with_model(model, changes)

    def _closing_fields(
        self, state: CallState, call: Call, wire: Wire, messages: Sequence[bytes] | None
    ) -> dict[str, object]:
        """Return the fields of a closing call: no tool calls, and how much the model has left."""
        closing = state.budget.closing
        if closing is None:
            return {}
        choices = without_tool_calls(call.fields, wire)
        text = closing.policy.instruction(self._left_for_output(state))
        is_strict = self._planner.family(state.routing.route, wire).turns == "strict"
        return {
            **{name: value for name, value in choices.items() if name not in closing.refused},
            ITEMS[wire]: with_instruction(call.fields, wire, messages, text, is_strict=is_strict),
        }

    def adds_task_budget(self, state: CallState, call: Call, provider: ProviderAddress) -> bool:
        """Return whether a closing call reports to the model what it has left, in a field of Claude's API."""
        closing, wire = state.budget.closing, state.incoming.endpoint.wire
        if closing is None or wire != "messages" or provider.is_translated or TASK_BUDGET_FIELD in closing.refused:
            return False
        family = self._planner.family(state.routing.route, wire)
        return family.task_budget == "accepted" and bool(with_task_budget(call.fields, 0))

    @staticmethod
    def _left_for_output(state: CallState) -> int:
        """Return the output tokens that are reserved for each response."""
        return state.budget.hold.response_tokens if state.budget.hold is not None else 0

    def _cache_marks(
        self, state: CallState, provider: ProviderAddress, fields: Mapping[str, object]
    ) -> dict[str, msgspec.Raw]:
        """Return the fields that get cache marks; empty if they are not set. `fields`: of the request to send."""
        wire, model = state.incoming.endpoint.wire, state.routing.route.model
        if wire is None or not self._planner.policy.sets_cache_marks or state.incoming.purpose is not None:
            return {}
        if not may_have_marks(wire, model, in_chat=provider.chat_cache_marks):
            return {}
        # A model that binds thinking to its prefix may take another form of the same text for a change.
        marks = with_cache_marks(fields, wire, keep_strings=state.context.thinking is not None)
        if marks:
            state.notes[NOTE_CACHE_MARKS] = "set by the gateway"
        return marks

    def _limited(self, state: CallState, call: Call, wire: Wire, provider: ProviderAddress) -> dict[str, object]:
        """Return the fields that set the output limit; empty if it stays as the client set it."""
        limit = self.limit_to_send(state, call, provider)
        if limit is None:
            return {}
        state.notes["output_limit"] = f"{limit.tokens}, {limit.reason}"
        field = state.dispatch.output_rule.field or provider.limit_field
        return with_limit(call.fields, wire, limit.tokens, field, is_held=self._is_held(state))

    def limit_to_send(self, state: CallState, call: Call, provider: ProviderAddress) -> LimitToSend | None:
        """Return the output limit that the gateway sets in a call; None if it keeps the call's own."""
        wire, hold, plan = state.incoming.endpoint.wire, state.budget.hold, state.context.plan
        # Clients set no limit for a compaction, and a truncated one would be useless to them.
        if wire is None or state.context.compaction is not None:
            return None
        asked, rule = state.output_asked, state.dispatch.output_rule
        is_ignored = self._is_held(state) and may_be_ignored(call.fields, wire, rule.field or provider.limit_field)
        limit = limit_to_set(
            asked,
            budget=hold.limit if hold is not None else None,
            step=limit_of_step(asked, state.step_output),
            held=hold.final_response_tokens if hold is not None and is_ignored else None,
        )
        if limit is None:
            return None
        model, room = self._facts(state.routing.route).output, None
        if plan is not None:
            room = output_room(plan.window, plan.safe_tokens + state.closing_tokens)
        return limit.within(asked, model=model, refused=rule.maximum, room=room)

    @staticmethod
    def _is_held(state: CallState) -> bool:
        """Return whether tokens or USD of a budget are held for the response."""
        hold = state.budget.hold
        return hold is not None and hold.hold is not None and limits_output(state.budget.accounts.budgets)

    @staticmethod
    def held_input(state: CallState) -> int | None:
        """Return the tokens that are held for the input, or None if no budget in tokens or USD is in force."""
        hold = state.budget.hold.hold if state.budget.hold is not None else None
        if hold is None or not limits_output(state.budget.accounts.budgets):
            return None
        return hold.fixed.tokens - state.closing_tokens


def _salt(state: CallState) -> str:
    """Return the name of a fallback's route, or "" for the first route: their trim decisions are kept separately."""
    route = state.routing.route
    return "" if route is state.routing.home else f"{route.provider}/{route.model}"
