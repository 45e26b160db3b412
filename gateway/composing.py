"""What is sent of a call: its tool results as the budget allows, its messages as they fit, its body as it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gateway.core.context_budget import LengthLimit, Wishes, least
from gateway.core.counting.calibration import Residual
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.core.errors import GatewayError, InvalidRequest, StoreUnavailable
from gateway.core.forwarding import Provider
from gateway.core.modes import ResponseMode, mode_for, stricter
from gateway.core.plan import Plan
from gateway.core.ports import Store
from gateway.core.routing import ModelFacts, Route
from gateway.core.spending import (
    affordable_input,
    bounds_answers,
    dearest,
    rate_of,
    remaining_fraction,
    room_in,
)
from gateway.core.views import VIEWED
from gateway.dialects.base import Call
from gateway.dialects.contents import TOO_MUCH, Contents, with_messages
from gateway.dialects.fields import join
from gateway.dialects.length_error import LengthError
from gateway.dialects.limits import asks_no_answer, is_loose, output_limit, with_limit
from gateway.planning import Asked, Planner, Weighing
from gateway.progress import Progress
from gateway.result_summaries import ResultSummaries
from gateway.results import Results
from gateway.stores.learner import Learner
from gateway.summaries import NoSummaryError, Summaries

#: tokens; a provider that names a smaller limit means something else by the number
_LEAST_LIMIT: Final = 256
#: Share of the request's tokens that it is cut to where a provider refused it for its length and named no limit.
_SHORTER: Final = 0.8
#: tokens; every model that is served today has a window at least so large
_LEAST_KNOWN: Final = 4_096
_UNKEPT: Final = "decision not kept: the store is away"


class Composer:
    """Composes what is sent. Shared by all calls. `has_modes`: whether tool results shrink as the budget does."""

    def __init__(
        self,
        *,
        planner: Planner,
        results: Results,
        summaries: Summaries,
        result_summaries: ResultSummaries,
        learner: Learner,
        store: Store,
        facts: Callable[[Route], ModelFacts],
        has_modes: bool,
    ) -> None:
        self._planner = planner
        self._results = results
        self._summaries = summaries
        self._result_summaries = result_summaries
        self._learner = learner
        self._store = store
        self._facts = facts
        self._has_modes = has_modes

    def modes(self, progress: Progress) -> tuple[ResponseMode, ...]:
        """The modes to show tool results in: as the budget and the call ask for, and one for when that is too much."""
        incoming, budgets = progress.incoming, progress.book.budgets
        asked = incoming.directives.mode
        if incoming.endpoint.wire not in VIEWED or incoming.purpose is not None:
            return ("raw",)
        if not self._has_modes or not budgets:
            return (asked,)
        mode = stricter(asked, mode_for(remaining_fraction(budgets)))
        return (mode,) if mode == "handle_only" else (mode, "handle_only")

    async def compose(self, progress: Progress, call: Call, mode: ResponseMode) -> None:
        """Weigh the request and decide what of it is sent.

        Raises:
            InvalidRequest: it has too many messages for the budget that it asks for.
            ContextOverflow: what must stay of it is over its budget.
        """
        contents = await self._contents(progress, call)
        if contents is None:
            return
        progress.mode = mode
        contents = await self._shown(progress, contents, mode)
        route, asked = progress.route, progress.incoming.directives.context
        facts, output = self._facts(route), progress.output_limit(contents.fields, contents.wire)
        if progress.taken is None:
            progress.affordable = self._left_for_input(progress, output)
        affordable = self._affordable(progress)
        step = progress.step.context_budget if progress.step is not None else None
        budget = least(asked.budget, affordable, step)
        # Decisions for a fallback are kept apart: it goes on from none of the first model's, and replaces none.
        salt = "" if route is progress.routes[0] else f"{route.provider}/{route.model}"
        wishes, weighing = Wishes(asked.trim, budget, output, asked.betas), self._weighing(progress, contents)
        progress.asked = Asked(contents, route, facts, wishes, len(call.body), salt, weighing)
        progress.plan = await self._plan(progress, progress.asked)
        # Where it is the session's budget that is too small, the ledger says so, with its arithmetic.
        is_ledgers = progress.taken is None and progress.plan.context.budget == affordable
        if progress.plan.overflow is not None and not is_ledgers:
            raise progress.plan.overflow
        await self._remember(progress, progress.plan)

    def _left_for_input(self, progress: Progress, output: int | None) -> int | None:
        """Input tokens that the budgets leave, at the dearest price of the models that may be called."""
        route, budgets = progress.route, progress.book.budgets
        if not bounds_answers(budgets):
            return None
        rate = dearest(rate_of(self._facts(one).price, 0, None) for one in (route, *progress.instead(route)))
        return affordable_input(budgets, output, rate)

    @staticmethod
    def _weighing(progress: Progress, contents: Contents) -> Weighing | None:
        """What the contents weigh, where the steps have weighed them for the same model; None else.

        Used once: on a second try the provider may have taught something, and they are weighed again.
        """
        weighing, progress.weighing = progress.weighing, None
        if weighing is None or contents is not progress.contents:
            return None
        request, route = weighing.came.request, progress.route
        return weighing if (request.provider, request.model) == (route.provider, route.model) else None

    def _affordable(self, progress: Progress) -> int | None:
        """Input tokens that the budgets leave for this try; None where no budget says anything.

        Before the hold: `Progress.affordable`, less the tokens by which summaries of results, which are made after
        the hold, may be longer than what is shown until then (`Showing.more`). After it, on the first route: all of
        that. After it, on a fallback: what is held, as nothing is held anew.
        """
        taken = progress.taken
        if taken is not None and progress.route is not progress.routes[0]:
            return self._held(progress)
        if taken is not None or progress.affordable is None or progress.showing is None:
            return progress.affordable
        return max(1, progress.affordable - progress.showing.more)

    async def _contents(self, progress: Progress, call: Call) -> Contents | None:
        """What can be weighed; None where nothing can. A call of our own is sent as it was written."""
        incoming = progress.incoming
        wire = incoming.endpoint.wire
        if wire is None or incoming.purpose is not None:
            return None
        contents = progress.contents or await self._planner.contents(call, wire)
        if contents is not None and progress.narrowed.weighed:
            contents = replace(contents, fields={**contents.fields, **progress.narrowed.weighed})
        if contents is None and wire in VIEWED and incoming.directives.context.budget is not None:
            raise InvalidRequest(
                f"{TOO_MUCH} is not weighed, so that x-context-budget cannot be kept. Send less, or no budget.",
                param=ITEMS[wire],
            )
        return contents

    async def _shown(self, progress: Progress, contents: Contents, mode: ResponseMode) -> Contents:
        """The contents with tool results in this mode."""
        progress.showing = None
        if mode == "raw" or contents.messages is None:
            return contents
        view = self._planner.view(contents)
        # Nobody waits for a store that is known to be away: without it nothing can be kept, and nothing is left out.
        session = None if progress.book.is_blind else progress.session
        # Full texts that the agent asked for by handle go out, unless the budget is so low that the call were refused.
        is_asked, left = mode == progress.incoming.directives.mode, remaining_fraction(progress.book.budgets)
        is_answered = mode != "handle_only" or (is_asked and mode_for(left) != "handle_only")
        showing = progress.showing = await self._results.show(
            view.messages, mode, session, is_summed=self._result_summaries.is_on, is_answered=is_answered
        )
        if showing is None:
            return contents
        return with_messages(contents, view.shown(showing.messages), self._planner.known)

    async def sum_up(self, progress: Progress, call: Call) -> bool:
        """Have results summed up, now that the call is to be sent; whether it must be composed anew with that."""
        if progress.showing is None or not progress.showing.open:
            return False
        contents = await self._contents(progress, call)
        if contents is None or contents.messages is None:
            return False
        return await self._result_summaries.make(self._planner.view(contents).messages, progress)

    async def keep(self, progress: Progress) -> bool:
        """Have in the store what handles stand for, now that the call is to be sent.

        False where it cannot be: then the call must be composed anew, which leaves out nothing that is not kept.
        """
        showing, session = progress.showing, progress.session
        return showing is None or session is None or await self._results.keep(showing, session)

    async def _plan(self, progress: Progress, asked: Asked, said: LengthLimit | None = None) -> Plan:
        """What to send, after a summary was made where one is needed; a call waits for one summary at most."""
        plan = await self._planner.plan(asked, progress.remembered, said, use=progress.use)
        if plan.needs is None:
            return plan
        progress.use = "off"
        try:
            await self._summaries.make(plan.needs, progress)
        except (GatewayError, NoSummaryError) as error:
            progress.notes["summary"] = f"none: {error}"
        return await self._planner.plan(asked, progress.remembered, said, use=progress.use)

    async def _remember(self, progress: Progress, plan: Plan) -> None:
        """Keep a new decision before it is sent: another worker, or this one after a restart, must send the same."""
        epoch, session = plan.epoch, progress.session
        if epoch is None or session is None:
            return
        if progress.book.is_blind:
            progress.notes["context"] = _UNKEPT
            return
        texts = progress.remembered.state.summaries
        try:
            await self._store.update(
                session, lambda state: state.with_epoch(epoch, instead_of=plan.resumed, summaries=texts)
            )
        except StoreUnavailable:
            # The next turn decides anew: it costs the provider's cache, and is no reason to refuse this one.
            progress.notes["context"] = _UNKEPT

    def body(self, progress: Progress, call: Call, provider: Provider, *, ask_usage: bool) -> bytes:
        """What is sent: the client's own bytes where nothing has to change."""
        plan, asked, model = progress.plan, progress.asked, progress.route.model
        messages = plan.messages if plan is not None else None
        if messages is None and asked is not None and (progress.showing is not None or asked.contents.marked):
            messages = asked.contents.messages
        wire = progress.incoming.endpoint.wire
        changes: dict[str, object] = dict(progress.narrowed.fields)
        if wire is not None:
            changes |= self._limited(progress, call, wire, provider)
            if messages is not None:
                changes[ITEMS[wire]] = join(messages)
        if ask_usage:
            changes |= progress.dialect.usage_wish(call)
        return call.written(model, changes)

    def _limited(self, progress: Progress, call: Call, wire: Wire, provider: Provider) -> dict[str, object]:
        """The fields that bound the answer: as the budget allows, else as the step has it, else as is held for it."""
        taken, plan = progress.taken, progress.plan
        is_held = taken is not None and taken.hold is not None and bounds_answers(progress.book.budgets)
        limit, why = taken.limit if taken is not None else None, "as the budget allows"
        if limit is None:
            limit, why = progress.limit_to_set(call.fields, wire), "as the step has it"
        if limit is None and taken is not None and is_held and is_loose(call.fields, wire, provider.limit_field):
            limit, why = taken.whole, "as is held for it"
        if limit is None or asks_no_answer(call.fields, wire):
            return {}
        limit = min(limit, self._facts(progress.route).output or limit)
        if plan is not None and output_limit(call.fields, wire) is None:
            limit = min(limit, room_in(plan.window, plan.safe_tokens) or limit)
        progress.notes["output_limit"] = f"{limit}, {why}"
        return with_limit(call.fields, wire, limit, provider.limit_field, is_held=is_held)

    @staticmethod
    def _held(progress: Progress) -> int | None:
        """Tokens that are held for the input; None where no budget in tokens or USD is in force."""
        hold = progress.taken.hold if progress.taken is not None else None
        return hold.fixed.tokens if hold is not None and bounds_answers(progress.book.budgets) else None

    @staticmethod
    def may_be_too_long(progress: Progress) -> bool:
        """Whether its provider may yet refuse it for its length, and it could be fitted again.

        What is far below every window that is known, or may be, goes through without a look at how its answer begins.
        """
        plan = progress.plan
        if plan is None or progress.asked is None:
            return False
        return plan.context.tokens > (_LEAST_KNOWN if plan.window is None else plan.window // 2)

    async def fit_again(self, progress: Progress, found: LengthError) -> bool:
        """Learn from a provider's refusal for length; whether there is now something shorter to send."""
        asked, plan = progress.asked, progress.plan
        if asked is None or plan is None:
            return False
        held = self._held(progress)
        within = replace(asked, wishes=replace(asked.wishes, budget=least(asked.wishes.budget, held)))
        again = await self._plan(progress, within, self._learn_limit(progress, asked, plan, found))
        progress.notes["context"] = "the provider refused it for its length"
        is_shorter = again.messages not in (None, plan.messages) or self._has_less_room(progress, asked, plan, again)
        # What the provider said of its count may make even the least that can be sent weigh more than is held.
        is_over = held is not None and again.context.tokens > held
        if again.overflow is not None or not is_shorter or is_over:
            return False
        progress.plan = again
        progress.notes["context"] += ", and it was fitted again"
        await self._remember(progress, again)
        return True

    @staticmethod
    def _has_less_room(progress: Progress, asked: Asked, plan: Plan, again: Plan) -> bool:
        """Whether sending the same messages again helps, as the output limit that we set will be lower now.

        Input and answer share the window: now that it is known to be smaller, less of it is left for the answer.
        """
        limit = progress.taken.limit if progress.taken is not None else None
        if limit is None or again.messages != plan.messages or output_limit(asked.contents.fields, asked.contents.wire):
            return False
        limit, room = min(limit, asked.facts.output or limit), room_in(again.window, again.safe_tokens)
        before = room_in(plan.window, plan.safe_tokens) or limit
        return room is not None and room < min(limit, before)

    def _learn_limit(self, progress: Progress, asked: Asked, plan: Plan, found: LengthError) -> LengthLimit:
        """What to fit it into now. What the provider said of it, and of its count, is learned for all calls."""
        context = plan.context
        if found.asked is not None:
            last = context.reported(found.asked)
            self._learner.report(context.key, Residual(last.residual, context.estimate))
            progress.remembered = replace(progress.remembered, last_turn=last)
        output = 0 if found.of_input else found.output or asked.wishes.output or 0
        if found.limit is not None and _LEAST_LIMIT <= found.limit < max(found.asked or 0, context.tokens) + output:
            said = LengthLimit(found.limit, of_input=found.of_input)
            self._learner.report_limit(asked.route.provider, asked.limited, said)
            return said
        return LengthLimit(int((context.tokens - context.kept) * _SHORTER))
