"""Decide what of a call is sent: response modes, trimmed messages, and the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from gateway.call.bound_thinking import BoundCall, PlanResult, SendChoice, mode_at
from gateway.call.state import CallState
from gateway.call.types import PlanRequest, RequestCounts
from gateway.context.planner import Planner
from gateway.context.summaries import NoSummaryError, Summaries
from gateway.context.tool_result_summaries import ToolResultSummaries
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import ContextOptions, LengthLimit, least
from gateway.core.conversation.message import digest
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.core.errors import GatewayError, InvalidRequest, StoreUnavailable
from gateway.core.fitting.overflow import ContextOverflow
from gateway.core.fitting.summary import Use
from gateway.core.http.headers import ProviderAddress
from gateway.core.ledger.charging import (
    affordable_input,
    bounds_answers,
    dearest,
    rate_of,
    remaining_fraction,
    room_in,
)
from gateway.core.modes import ResponseMode, mode_for
from gateway.core.modes.unread import ModeTry, ResponseModes, UnreadForm, modes_for, tries_for
from gateway.core.plan import Plan
from gateway.core.ports import Sessions
from gateway.core.routing import ModelFacts, Route
from gateway.core.session import SessionState
from gateway.core.tool_changes import changes_of, inserted, may_stand_at, with_wanted, withdrawn_after
from gateway.core.views import VIEWED, View
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.base import Call
from gateway.dialects.contents import TOO_MUCH, Contents, with_inserted, with_messages
from gateway.dialects.fields import join, without_session_id
from gateway.dialects.limits import asks_no_answer, is_loose, output_limit, with_limit
from gateway.dialects.server_state import kept_by_provider
from gateway.dialects.thinking_fields import with_drop_block
from gateway.dialects.tool_changes import withdrawn_by_compaction

_TOO_MANY: Final = "the same tools as before: the names of those to withdraw are too long"
_NO_PLACE: Final = "the same tools as before: they can change only after a message of the user"
_UNKEPT: Final = "decision not kept: the store is away"

#: Extracts are chosen again if they are still too long, so many times in all: their tokens are estimated first.
_EXTRACT_TRIES: Final = 3

#: shows tool results with nothing left out
LOSSLESS: Final = ModeTry(ResponseModes("table", "table"), all_results=True)


class RequestComposer:
    """Composes what is sent. Shared by all calls. `has_modes`: whether tool results shrink as the budget does."""

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

    def tries(self, progress: CallState) -> tuple[ModeTry, ...]:
        """Return how to show tool results: as the budget and the call ask for, then shorter if that is too much."""
        incoming, budgets, route = progress.incoming, progress.book.budgets, progress.route
        asked, wire = incoming.directives.mode, incoming.endpoint.wire
        if progress.taken is not None:
            return (self.again(progress),)
        if wire not in VIEWED or incoming.purpose is not None or progress.compaction is not None:
            return (ModeTry(ResponseModes("raw", "raw")),)
        # A model that binds thinking to its prefix has reasoned about results as they were sent.
        is_bound = self._planner.is_bound(route, wire)
        if not self._has_modes or not budgets:
            return (ModeTry(ResponseModes(asked, asked)),)
        modes = modes_for(asked, mode_for(remaining_fraction(budgets)))
        if progress.call is not None and asks_for_compaction(progress.call.fields, wire):
            # A summary is made of the results as the model has seen them so far, and of nothing shorter.
            return (ModeTry(modes),)
        return tries_for(modes, is_bound=is_bound)

    @staticmethod
    def again(progress: CallState) -> ModeTry:
        """Return how to show tool results of a call that is composed once more."""
        is_bound = progress.thinking is not None
        return progress.tried._replace(all_results=False) if is_bound else progress.tried

    async def compose(self, progress: CallState, call: Call, tried: ModeTry) -> None:
        """Weigh the request and decide what of it is sent. `tried`: how tool results are shown.

        Raises:
            InvalidRequest: it has too many messages for the budget that it asks for.
            ContextOverflow: what must stay of it is over its budget.
        """
        if not self._planner.is_huge(call):
            await self._compose(progress, call, tried)
            return
        async with self._planner.huge_turn:
            try:
                await self._compose(progress, call, tried)
            finally:
                self._unload(progress)

    async def look_elsewhere(self, progress: CallState, call: Call, contents: Contents | None = None) -> None:
        """Find what a large body names that others keep, once; of a small one that is found when it is told."""
        if progress.found_at_provider is None and self._planner.is_large(call):
            look = partial(kept_by_provider, call.fields, progress.incoming.endpoint.wire, contents)
            progress.found_at_provider = await self._planner.read(len(call.body), look)

    @staticmethod
    def _unload(progress: CallState) -> None:
        """Let go of messages that are sent as they stand in the body, until something has to be changed in them."""
        asked, progress.contents = progress.asked, None
        if asked is not None and not (asked.is_changed or asked.contents.marked) and progress.thinking is None:
            progress.asked = replace(asked, contents=asked.contents.unloaded, counts=None)

    async def loaded(self, progress: CallState) -> PlanRequest | None:
        """Return what was planned, its messages read again if they were let go of."""
        asked, call = progress.asked, progress.call
        if asked is None or call is None or not asked.contents.is_unloaded:
            return asked
        contents = await self._contents(progress, call)
        progress.asked = replace(asked, contents=contents) if contents is not None else None
        return progress.asked

    async def _compose(self, progress: CallState, call: Call, tried: ModeTry) -> None:
        contents = await self._contents(progress, call)
        await self.look_elsewhere(progress, call, contents)
        if contents is None:
            return
        if tried.modes != progress.tried.modes:
            progress.extracts, progress.extracts_room = {}, None
        progress.mode, progress.tried = tried.modes.read, tried
        bound = progress.thinking = await self._bound_with_tools(progress, contents)
        contents = bound.received if bound is not None else contents

        async def plan(choice: SendChoice, *, may_sum_up: bool = True, most: int | None = None) -> PlanResult:
            asked, affordable = await self._ask(progress, contents, len(call.body), choice)
            return PlanResult(
                *await self.plan_within(progress, asked, most, may_sum_up=may_sum_up), progress.showing, affordable
            )

        async def planned_so() -> PlanResult:
            if bound is None:
                return await plan(SendChoice(modes=((0, tried.modes.read),)))
            first = bound.first_choice(tried.modes, all_results=tried.all_results)
            return await bound.choose(first, tried.modes, plan)

        planned = await planned_so()
        for _ in range(_EXTRACT_TRIES):
            over = self._over(progress, planned)
            if over <= 0 or progress.session is None or progress.book.is_blind:
                break
            if not await self._extract(progress, planned.asked, contents, over):
                break
            planned = await planned_so()
        await self.take(progress, planned)
        # Where it is the session's budget that is too small, the ledger says so, with its arithmetic.
        if planned.plan.overflow is not None and not self._is_ledgers(progress, planned):
            raise planned.plan.overflow
        await self.remember(progress, planned.plan)

    async def _bound_with_tools(self, progress: CallState, original: Contents) -> BoundCall | None:
        """Return what `bound` does, of a conversation with the system messages that withdraw tools for the step."""
        withdrawal, remembered = progress.restricted.withdrawal, progress.remembered.state.tool_changes
        conversation = None
        if withdrawal is not None and (withdrawal.withdrawn or remembered):
            conversation = await self._planner.bound(original)
        if withdrawal is None or conversation is None:
            return await self.bound(progress, original)
        changes = changes_of(conversation, remembered)
        if withdrawal.withdrawn is not None and not may_stand_at(conversation, conversation.size):
            progress.notes["tool_changes"] = _NO_PLACE
        elif withdrawal.withdrawn is not None:
            at_start = withdrawn_by_compaction(conversation.messages) & withdrawal.tools
            changes = with_wanted(changes, withdrawal.withdrawn, conversation, at_start)
            if withdrawn_after(changes, at_start) != withdrawal.withdrawn:
                progress.notes["tool_changes"] = _TOO_MANY
        before = inserted(conversation, changes, withdrawal.tools)
        received = with_inserted(original, before, self._planner.known) if before else original
        bound = await self.bound(progress, received)
        if bound is not None:
            bound.original = original
            bound.tool_change = changes[-1] if changes and changes[-1].size == conversation.size else None
        return bound

    @staticmethod
    def _is_ledgers(progress: CallState, planned: PlanResult) -> bool:
        """Return whether the session's budget is the one that is too small for a plan."""
        return progress.taken is None and planned.plan.context.budget == planned.affordable

    def _over(self, progress: CallState, planned: PlanResult) -> int:
        """Return by how many tokens the results that the model has not read are to be shorter."""
        (_, unread), _, may_extract = progress.tried
        overflow, affordable = planned.plan.overflow, planned.affordable
        if progress.tried.modes.read == unread or unread not in ("raw", "table"):
            return 0
        is_ledgers = self._is_ledgers(progress, planned)
        if isinstance(overflow, ContextOverflow) and not (is_ledgers and affordable is not None):
            return overflow.needed - overflow.limit
        if affordable is None or progress.taken is not None or not may_extract:
            return 0
        # What is held for the call is to be enough for its fallbacks, which may cost more.
        least = self._left_for_input(progress, planned.asked.options.output, progress.routes) or affordable
        if isinstance(overflow, ContextOverflow):
            return overflow.needed - overflow.limit + affordable - least
        return planned.plan.safe_tokens - least if overflow is None else 0

    async def _extract(self, progress: CallState, asked: PlanRequest, received: Contents, over: int) -> bool:
        """Choose extracts of the results that the model has not read; return whether there are any.

        `over`: tokens by which these results are too long as they are shown now.
        """
        view = self._planner.view(received)
        results = await self._planner.results_in(view)
        if not results.unread:
            return False
        unread, room = sorted(results.unread), progress.extracts_room
        if room is None:
            room = await self._planner.tokens_complete(asked, progress.remembered, [view.messages[i] for i in unread])
        progress.extracts_room = room = max(0, room - over)
        blocks = await self._planner.chosen_blocks(asked, progress.remembered, view, unread, room)
        progress.extracts = {results.names[index]: its for index, its in blocks.items()}
        return bool(blocks)

    async def bound(self, progress: CallState, contents: Contents, *, is_known: bool = False) -> BoundCall | None:
        """Return what is known of a call to a model that binds thinking to its prefix; None for other models.

        `is_known`: the provider has just said that it does. The session remembers that for the conversation.
        """
        route, prefixes = progress.route, progress.remembered.state.sent_prefixes
        is_listed = is_known or (contents.wire in VIEWED and self._planner.is_bound(route, contents.wire))
        conversation = await self._planner.bound(contents) if is_listed or prefixes else None
        known = conversation.find(prefixes.values()) if conversation is not None else None
        if conversation is None or not (is_listed or known):
            return None
        tools = progress.restricted.fields.get("tools")
        name = digest(msgspec.json.encode(tools)).hex() if tools is not None else ""
        is_summary = asks_for_compaction(contents.fields, contents.wire)
        has_changed = bool(prefixes or progress.remembered.state.tool_changes)
        if known is None and has_changed and (is_summary or conversation.is_compacted):
            # A summary leaves out the turns that its client keeps, and replaces the others: what was sent instead of
            # them is not found any more.
            known = conversation.as_unknown()
        bound = BoundCall(contents, conversation, known, name, is_summary=is_summary)
        bound.provider_drops = known is not None and known.provider_drops
        return bound

    async def _ask(
        self, progress: CallState, received: Contents, size: int, choice: SendChoice
    ) -> tuple[PlanRequest, int | None]:
        """Return what is to be planned, and the input tokens that the budgets leave; None where none says anything."""
        contents = await self.chosen(progress, received, choice)
        route, asked, bound = progress.route, progress.incoming.directives.context, progress.thinking
        facts, output = self._facts(route), progress.output_limit(contents.fields, contents.wire)
        if progress.taken is None:
            progress.affordable = self._left_for_input(progress, output, (route,))
        affordable = self._affordable(progress)
        step = progress.step.context_budget if progress.step is not None else None
        # A provider compacts what it is sent, so nothing is left out of that.
        trim = asked.trim if progress.compaction is None else "off"
        options = ContextOptions(trim, least(asked.budget, affordable, step), output, asked.betas)
        original = bound.original if bound is not None else received
        made = PlanRequest(
            contents, route, facts, options, size, _salt(progress), self._counts(progress, contents),
            received=None if contents is original else original,
            keeps_decisions=bound is not None and bound.known is not None,
        )  # fmt: skip
        return made, affordable

    async def plan_within(
        self,
        progress: CallState,
        asked: PlanRequest,
        most: int | None,
        said: LengthLimit | None = None,
        *,
        may_sum_up: bool,
    ) -> tuple[PlanRequest, Plan]:
        """Plan for fewer input tokens than the budget where `most` says so; the record names the budget."""
        if most is None:
            return asked, await self.plan(progress, asked, said, may_sum_up=may_sum_up)
        options = replace(asked.options, budget=least(asked.options.budget, most))
        plan = await self.plan(progress, replace(asked, options=options), said, may_sum_up=may_sum_up)
        unlimited = await self._planner.budget(asked, progress.remembered)
        return asked, replace(plan, context=replace(plan.context, budget=unlimited))

    async def chosen(self, progress: CallState, received: Contents, choice: SendChoice) -> Contents:
        """Return what was received with some of its thinking removed, and its tool results in some modes."""
        bound = progress.thinking
        contents = received if bound is None else bound.without(choice, self._planner.known)
        return await self._shown(progress, contents, choice)

    async def take(self, progress: CallState, planned: PlanResult) -> None:
        """Send what was planned. The record says what response modes and removed thinking left out of it."""
        asked, plan, showing, _ = planned
        progress.asked, progress.plan, progress.showing = asked, plan, showing
        if asked.received is None and progress.thinking is None:
            return
        saved: dict[str, int] = {}
        trimmed = dict(showing.counts) if showing is not None else {}
        thinking = progress.thinking.record(planned.sent) if progress.thinking is not None else None
        tokens, received = plan.context.original_tokens, asked.received or asked.contents
        # Where only changes of tools were added, the count of what is sent is the better one.
        has_added = progress.thinking is not None and asked.contents is progress.thinking.received
        if asked.is_changed and not has_added:
            tokens = await self._tokens(progress, asked, received)
        if trimmed:
            bare = progress.thinking.bare if progress.thinking is not None else received
            with_modes = await self._tokens(progress, asked, bare)
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
        progress.plan = replace(plan, context=context)

    async def _tokens(self, progress: CallState, asked: PlanRequest, contents: Contents) -> int:
        """Return the input tokens that the provider would be expected to report for other contents of a call."""
        counts = await self._planner.count_tokens(replace(asked, contents=contents, counts=None), progress.remembered)
        return counts.original.tokens

    def _left_for_input(self, progress: CallState, output: int | None, routes: Sequence[Route]) -> int | None:
        """Input tokens that the budgets leave, at the dearest price of the models that may be called."""
        budgets = progress.book.budgets
        if not bounds_answers(budgets):
            return None
        rate = dearest(rate_of(self._facts(one).price, 0, None) for one in (*routes, *progress.instead(*routes)))
        return affordable_input(budgets, output, rate)

    @staticmethod
    def _counts(progress: CallState, contents: Contents) -> RequestCounts | None:
        """What the contents weigh, where the steps have weighed them for the same model; None else.

        Used once: on a second try the provider may have taught something, and they are weighed again.
        """
        counts, progress.counts = progress.counts, None
        if counts is None or contents is not progress.contents:
            return None
        request, route = counts.original.request, progress.route
        return counts if (request.provider, request.model) == (route.provider, route.model) else None

    def _affordable(self, progress: CallState) -> int | None:
        """Input tokens that the budgets leave for this try; None where no budget says anything.

        Before the hold: `CallState.affordable`, less the tokens by which summaries of results, which are made after
        the hold, may be longer than what is shown until then (`Showing.more`). After it, on the first route: all of
        that. After it, on a fallback: what is held, as nothing is held again.
        """
        taken = progress.taken
        if taken is not None and progress.route is not progress.routes[0]:
            return self.held_input(progress)
        if taken is not None or progress.affordable is None or progress.showing is None:
            return progress.affordable
        return max(1, progress.affordable - progress.showing.more)

    async def _contents(self, progress: CallState, call: Call) -> Contents | None:
        """What can be weighed; None where nothing can. A call of our own is sent as it was written."""
        incoming = progress.incoming
        wire = incoming.endpoint.wire
        if wire is None or incoming.purpose is not None:
            return None
        contents = progress.contents or await self._planner.contents(call, wire)
        if contents is not None and progress.restricted.counted:
            contents = replace(contents, fields={**contents.fields, **progress.restricted.counted})
        if contents is None and wire in VIEWED and incoming.directives.context.budget is not None:
            raise InvalidRequest(
                f"{TOO_MUCH} is not weighed, so that x-context-budget cannot be kept. Send less, or no budget.",
                param=ITEMS[wire],
            )
        return contents

    async def _shown(self, progress: CallState, contents: Contents, choice: SendChoice) -> Contents:
        """Return the contents with tool results in the modes of this choice."""
        progress.showing, progress.unread = None, {}
        if contents.messages is None or all(mode == "raw" for _, mode in choice.modes):
            return contents
        view = self._planner.view(contents)
        modes, blocks = await self._modes(progress, view, choice)
        # Nobody waits for a store that is known to be away: without it nothing can be kept, and nothing is left out.
        session = None if progress.book.is_blind else progress.session
        # Full texts that the agent asked for by handle go out, unless the budget is so low that the call were refused.
        is_asked, left = progress.incoming.directives.mode == "handle_only", remaining_fraction(progress.book.budgets)
        showing = progress.showing = await self._results.show(
            view.messages, modes, session,
            blocks=blocks,
            is_summed=self._result_summaries.is_on,
            is_answered=is_asked and mode_for(left) != "handle_only",
        )  # fmt: skip
        if showing is None:
            return contents
        return with_messages(contents, view.shown(showing.messages), self._planner.known)

    async def _modes(
        self, progress: CallState, view: View, choice: SendChoice
    ) -> tuple[Sequence[ResponseMode], Mapping[int, tuple[int, ...]]]:
        """Return the mode of each message, and the blocks of results that are shown as an extract, by index."""
        bound, (now, all_results, _) = progress.thinking, progress.tried
        known, size = progress.remembered.state.unread, len(view.messages)
        if bound is None and now.read == now.unread:
            return [now.read] * size, {}
        if bound is None:
            results = await self._planner.results_in(view)
            known = {name: one for name, one in known.items() if one.mode == now.read}
            kept = {index for index, name in results.names.items() if name in known and not all_results}
            modes = [now.unread if i in results.unread else "table" if i in kept else now.read for i in range(size)]
            new = {results.names[index]: UnreadForm(now.read) for index in results.unread}
        else:
            places = bound.conversation.positions_without(choice.removed)
            modes = [mode_at(choice.modes, places[its[0]]) for its in view.places]
            if not (known or progress.extracts):
                return modes, {}
            results, new = await self._planner.results_in(view), {}
        extracts = {name: one.blocks for name, one in known.items() if one.blocks is not None} | {**progress.extracts}
        names = results.names.items()
        blocks = {i: extracts[name] for i, name in names if name in extracts and modes[i] in ("raw", "table")}
        new |= {results.names[i]: UnreadForm(now.read, its) for i, its in blocks.items() if i in results.unread}
        progress.unread = new
        return modes, blocks

    async def remember_unread(self, progress: CallState) -> None:
        """Keep how results were shown that the model has not read yet: they keep this form on later turns."""
        known, session = progress.remembered.state.unread, progress.session
        new = {name: one for name, one in progress.unread.items() if known.get(name) != one}
        if session is None or not new or progress.book.is_blind:
            return
        try:
            await self._store.update(session, lambda state: state.with_unread(new))
        except StoreUnavailable:
            progress.notes["context"] = _UNKEPT

    async def sum_up(self, progress: CallState, call: Call) -> bool:
        """Have results summed up, now that the call is to be sent; return whether it must be composed again."""
        if progress.showing is None or not progress.showing.open:
            return False
        contents, bound = await self._contents(progress, call), progress.thinking
        if contents is None or contents.messages is None:
            return False
        if bound is not None:
            contents = bound.bare
        return await self._result_summaries.make(self._planner.view(contents).messages, progress)

    async def keep(self, progress: CallState) -> bool:
        """Have in the store what handles stand for, now that the call is to be sent.

        False where it cannot be: then the call must be composed again, which leaves out nothing that is not kept.
        """
        showing, session = progress.showing, progress.session
        return showing is None or session is None or await self._results.keep(showing, session)

    async def plan(
        self, progress: CallState, asked: PlanRequest, said: LengthLimit | None = None, *, may_sum_up: bool = True
    ) -> Plan:
        """What to send, after a summary was made where one is needed; a call waits for one summary at most."""
        use: Use = progress.use if may_sum_up else "off"
        plan = await self._planner.plan(asked, progress.remembered, said, use=use)
        if plan.needs is None:
            return plan
        progress.use = "off"
        try:
            await self._summaries.make(plan.needs, progress)
        except (GatewayError, NoSummaryError) as error:
            progress.notes["summary"] = f"none: {error}"
        return await self._planner.plan(asked, progress.remembered, said, use=progress.use)

    async def remember(self, progress: CallState, plan: Plan) -> None:
        """Keep a new decision before it is sent: another worker, or this one after a restart, must send the same."""
        trim_decision, session, bound = plan.trim_decision, progress.session, progress.thinking
        is_sent = bound is not None and plan.overflow is None
        prefix = bound.to_remember(progress.sent_messages) if bound is not None and is_sent else None
        tools = bound.tool_change if bound is not None and is_sent else None
        if tools in progress.remembered.state.tool_changes:
            tools = None
        if session is None or (trim_decision is None and prefix is None and tools is None):
            return
        if progress.book.is_blind:
            progress.notes["context"] = _UNKEPT
            return
        texts = progress.remembered.state.summaries
        before = bound.known.received if bound is not None and bound.known is not None else None

        def change(state: SessionState) -> SessionState:
            if prefix is not None:
                state = state.with_sent_prefix(prefix.to_json(), instead_of=before)
            if tools is not None:
                state = state.with_tool_change(tools)
            return (
                state
                if trim_decision is None
                else state.with_trim_decision(trim_decision, instead_of=plan.resumed, summaries=texts)
            )

        try:
            await self._store.update(session, change)
        except StoreUnavailable:
            # The next turn decides again: it costs the provider's cache, and is no reason to refuse this one.
            progress.notes["context"] = _UNKEPT

    def body(self, progress: CallState, call: Call, provider: ProviderAddress, *, ask_usage: bool) -> bytes:
        """What is sent: the client's own bytes where nothing has to change."""
        plan, asked, model = progress.plan, progress.asked, progress.route.model
        messages = plan.messages if plan is not None else None
        if messages is None and asked is not None and (asked.is_changed or asked.contents.marked):
            messages = asked.contents.messages
        if asked is None and progress.thinking is not None:
            return call.written(model, {"messages": join(progress.thinking.bare.messages or ())})
        wire = progress.incoming.endpoint.wire
        changes: dict[str, object] = dict(progress.restricted.fields)
        if wire is not None:
            changes |= self._limited(progress, call, wire, provider)
            if messages is not None:
                changes[ITEMS[wire]] = join(messages)
        if progress.thinking is not None and progress.thinking.provider_drops:
            changes["thinking"] = with_drop_block(call)
        if ask_usage:
            changes |= progress.dialect.usage_option(call)
        if provider.strict_fields and progress.incoming.endpoint.format is not None:
            changes |= without_session_id(call.fields, in_metadata=progress.incoming.endpoint.anthropic)
        return call.written(model, changes)

    def _limited(self, progress: CallState, call: Call, wire: Wire, provider: ProviderAddress) -> dict[str, object]:
        """The fields that bound the answer: as the budget allows, else as the step has it, else as is held for it."""
        limit = self._limit_to_set(progress, call, wire, provider)
        if limit is None:
            return {}
        tokens, why = limit
        progress.notes["output_limit"] = f"{tokens}, {why}"
        field = progress.output_rule.field or provider.limit_field
        return with_limit(call.fields, wire, tokens, field, is_held=self._is_held(progress))

    def output_limit_sent(self, progress: CallState, call: Call, provider: ProviderAddress) -> int | None:
        """Return the output limit that the gateway sets in a call; None if it leaves the call's own as it is."""
        wire = progress.incoming.endpoint.wire
        limit = self._limit_to_set(progress, call, wire, provider) if wire is not None else None
        return limit[0] if limit is not None else None

    def _limit_to_set(
        self, progress: CallState, call: Call, wire: Wire, provider: ProviderAddress
    ) -> tuple[int, str] | None:
        """Return the output limit that a call is to have and the reason for it; None if it stays as it is."""
        taken, plan, rule = progress.taken, progress.plan, progress.output_rule
        field = rule.field or provider.limit_field
        limit, why = taken.limit if taken is not None else None, "as the budget allows"
        if limit is None:
            limit, why = progress.limit_to_set(call.fields, wire), "as the step has it"
        if limit is None and taken is not None and self._is_held(progress) and is_loose(call.fields, wire, field):
            limit, why = taken.whole, "as is held for it"
        # Clients give a compaction no limit, and one that is cut short is of no use to them.
        if limit is None or progress.compaction is not None or asks_no_answer(call.fields, wire):
            return None
        limit = min(limit, self._facts(progress.route).output or limit, rule.most or limit)
        if plan is not None and output_limit(call.fields, wire) is None:
            limit = min(limit, room_in(plan.window, plan.safe_tokens) or limit)
        return limit, why

    @staticmethod
    def _is_held(progress: CallState) -> bool:
        """Return whether tokens or USD of a budget are held for the answer."""
        taken = progress.taken
        return taken is not None and taken.hold is not None and bounds_answers(progress.book.budgets)

    @staticmethod
    def held_input(progress: CallState) -> int | None:
        """Return the tokens that are held for the input, or None if no budget in tokens or USD is in force."""
        hold = progress.taken.hold if progress.taken is not None else None
        return hold.fixed.tokens if hold is not None and bounds_answers(progress.book.budgets) else None


def _salt(progress: CallState) -> str:
    """Return a name for the route of a fallback: decisions for it are kept apart from those for the first model."""
    route = progress.route
    return "" if route is progress.home else f"{route.provider}/{route.model}"
