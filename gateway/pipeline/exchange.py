"""Take one call through all its steps, in order.

This is the only place that knows the order.

Read the body -> name the session -> find its routes -> read its accounts -> find its step -> decide what to send ->
hold what it may cost -> send; decide and send again on the next route where one fails -> meter the answer -> settle ->
tell the observers. Where the plan needs a summary first, an exchange of our own goes the same way before the call does;
where results are to be summed up, once the call is held.

An `Exchange` is entered for the way down and left after the answer was passed on. Whatever happens in between (the
client leaves, the provider breaks off, the process is told to stop), leaving it settles, once.

What each step does is in a part of its own, shared by all calls; what is known of one call is in its `CallState`, which
they are handed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

from gateway.background.index import BackgroundIndex
from gateway.background.settlement import BackgroundSettlement
from gateway.budget.accounts import Accounts
from gateway.budget.reservation import Budgets
from gateway.call.record import RecordBuilder
from gateway.call.routing import (
    advisors_of,
    first_at,
    named_session,
    others_of,
    routes_of,
    session_of,
    speaking,
    with_form_model,
)
from gateway.call.state import CallState
from gateway.call.types import ClientResponse, Incoming, SessionPolicy
from gateway.context.planner import Planner
from gateway.context.repair import Recomposer
from gateway.context.request import LOSSLESS, RequestComposer
from gateway.context.summaries import SUMMARY_S, Summaries
from gateway.context.thinking_origins import ThinkingOrigins
from gateway.context.tool_result_summaries import ToolResultSummaries
from gateway.context.tool_results import ToolResultRenderer
from gateway.core.context_budget import SummaryModel
from gateway.core.errors import (
    BudgetExhausted,
    GatewayError,
    StoreUnavailable,
    Unauthenticated,
    UnknownModel,
    UpstreamFault,
)
from gateway.core.fitting.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.core.http.headers import ProviderAddress, check_credential, is_success, secrets_of
from gateway.core.http.request import WorkObserver, notify_nobody
from gateway.core.http.retry_policy import FAILED, KEY_REFUSED
from gateway.core.ports import Observer, Store, Upstream, UpstreamReply
from gateway.core.record import CUTS, CallRecord
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.steps import Agent, Step
from gateway.core.thinking_origin import ThinkingRules
from gateway.dialects.base import Call
from gateway.dialects.server_state import earlier_answer
from gateway.pipeline.compaction import Compactions
from gateway.pipeline.dispatch import Dispatcher
from gateway.pipeline.fallback import EarlierFailures
from gateway.pipeline.response import ResponseRelay, TotalsComment, read_error
from gateway.steps.enforcement import Steps
from gateway.stores.learner import Learner
from gateway.stores.settler import Settler
from gateway.upstream.body import AlreadyRead, without_packing

T = TypeVar("T")

#: the status of a provider that does not make the answer it is asked for
_UNKNOWN_HERE: Final = 404
_WHOSE: Final = "The store is away, which knows what provider has this answer. Try again shortly."


class Gateway:
    """What every call shares. Everything is handed in; nothing here knows a class of an adapter."""

    def __init__(
        self,
        *,
        routes: Routes,
        providers: Mapping[str, ProviderAddress],
        upstreams: Mapping[str, Upstream],
        facts: Callable[[Route], ModelFacts],
        store: Store,
        settler: Settler,
        planner: Planner,
        budgets: Budgets,
        results: ToolResultRenderer,
        learner: Learner,
        observers: Sequence[Observer],
        policy: SessionPolicy,
        totals_comment: TotalsComment,
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        summary_s: float = SUMMARY_S,
        result_model: SummaryModel | None = None,
        agents: Mapping[str, Agent] | None = None,
        thinking: ThinkingRules | None = None,
    ) -> None:
        self.routes = routes
        self.providers = providers
        self.settler = settler
        self.planner = planner
        self.policy = policy
        self.steps = Steps(
            agents=agents or {},
            store=store,
            planner=planner,
            providers=providers,
            facts=facts,
            observers=observers,
            is_unavailable=lambda: settler.is_unavailable,
            clock=clock,
            wall=wall,
        )
        self.new_id = new_id
        self.clock = clock
        self.wall = wall
        limits = budgets.policy
        records = RecordBuilder(
            facts,
            clock,
            cached_weight=limits.cached_weight,
            estimate_missing=policy.estimate_missing,
            cost_reporters=frozenset(name for name, one in providers.items() if one.reports_cost),
            named_at=routes.named_at,
            billed_refusals={
                name: one.billed_refusals for name, one in providers.items() if one.billed_refusals is not None
            },
        )
        summaries = Summaries(routes, providers, store, self.handle, new_id=new_id, clock=clock, max_wait_s=summary_s)
        self.background = BackgroundIndex(store, records, routes, wall)
        self.thinking = ThinkingOrigins(store, planner.read, thinking or ThinkingRules())
        self.fetched = BackgroundSettlement(settler, self.background, observers)
        self.accounts = Accounts(
            store=store,
            read_body=planner.read,
            settler=settler,
            budgets=budgets,
            records=records,
            facts=facts,
            steps=self.steps,
            observers=observers,
            fetched=self.fetched,
            clock=clock,
        )
        self.composer = RequestComposer(
            planner=planner,
            results=results,
            summaries=summaries,
            result_summaries=ToolResultSummaries(results, summaries, result_model),
            store=store,
            facts=facts,
            has_modes=limits.modes,
        )
        self.compactions = Compactions(
            store=store,
            planner=planner,
            composer=self.composer,
            providers=providers,
            facts=facts,
            most=results.most,
            is_unavailable=lambda: settler.is_unavailable,
            new_id=new_id,
            clock=clock,
            wall=wall,
        )
        self.sender = Dispatcher(
            providers=providers,
            upstreams=upstreams,
            composer=self.composer,
            recomposer=Recomposer(self.composer, planner, learner),
            read_body=planner.read,
            steps=self.steps,
            clock=clock,
        )
        secrets = [secret for one in providers.values() for secret in secrets_of(one)]
        comment = totals_comment if policy.stream_totals else None
        self.answers = ResponseRelay(self.accounts, self.fetched, clock, comment, secrets)

    def handle(self, incoming: Incoming, at_work: WorkObserver = notify_nobody) -> Exchange:
        """The exchange for one request: `async with gateway.handle(incoming) as reply`; raises no GatewayError.

        `at_work` is told whether a provider may be at work on it: where none is, nothing is lost by a cancel.

        If its task is cancelled, the call is charged for what was delivered. The outcome in its record is the message
        of the cancel where that is a `Cut`, else `client_left`.
        """
        return Exchange(self, incoming, at_work)


class Exchange:
    """One call on its way. An async context manager: entering goes down to the provider, leaving settles."""

    def __init__(self, gateway: Gateway, incoming: Incoming, at_work: WorkObserver) -> None:
        self._gateway = gateway
        self._state = CallState.of(incoming, gateway.wall())
        self._state.dispatch.observer = at_work

    def client_left(self) -> None:
        """Nobody waits for the answer any more; it may be read to its end all the same."""
        self._state.client_left()

    async def __aenter__(self) -> ClientResponse:
        try:
            try:
                return await self._down()
            except GatewayError as fault:
                await self._state.dispatch.hang_up()
                if self._state.call is not None:
                    await self._gateway.composer.look_elsewhere(self._state, self._state.call)
                return await self._gateway.answers.refusal(self._state, fault)
        except BaseException as error:
            await self._leave(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        state = self._state
        if isinstance(error, Exception) and not state.settlement.is_settled:
            state.response.outcome, state.response.status = "internal_error", 500
        elif isinstance(error, asyncio.CancelledError):
            state.response.outcome = next((cut for cut in CUTS if error.args == (cut,)), state.response.outcome)
        try:
            await self._gateway.accounts.settle(state)
        finally:
            # A second cancel interrupts it: a lease that stayed open would be renewed for as long as the worker lives.
            self._gateway.accounts.end(state)
            await state.dispatch.hang_up()

    async def _down(self) -> ClientResponse:
        state, gateway, incoming = self._state, self._gateway, self._state.incoming
        metered = incoming.endpoint.metered
        if metered:
            # First what needs no body, so that even a refused one is answered with its session's totals.
            state.session = named_session(incoming, gateway.policy.id_headers)
        if incoming.refused is not None:
            raise incoming.refused
        call = state.call = await self._read(lambda: with_form_model(incoming, state.dialect.read(incoming.body)))
        earlier = earlier_answer(call.fields) if incoming.endpoint.may_go_on else None
        before = await self._before(earlier) if earlier is not None else None
        if metered:
            if state.session is None:
                read = partial(session_of, incoming, call, gateway.policy, before)
                state.session, state.derived = await self._read(read)
            gateway.settler.check()
        call = state.call = await gateway.compactions.begin(state, call)
        about = incoming.endpoint.about
        unsure = await self._go_where_it_is_kept(about) if about is not None else None
        try:
            await self._read(partial(self._find_routes, call))
        except UnknownModel as fault:
            raise (unsure or fault) from None
        if metered:
            await self._open_session(call)
        answer = await self._answered(call)
        if unsure is not None and answer.status == _UNKNOWN_HERE:
            raise unsure
        if not is_success(answer.status):
            return await gateway.answers.failure(state, answer)
        state.response.is_billed = metered
        await gateway.thinking.answered(state, call)
        return await gateway.answers.success(state, call, answer)

    async def _open_session(self, call: Call) -> None:
        """Open the session's account and its step, which may choose the model and the order of the routes."""
        state, gateway = self._state, self._gateway
        await gateway.accounts.open(state)
        await gateway.steps.begin(state, call)
        if state.steps.step is not None and state.steps.step.model is not None:
            self._go_by(state.steps.step, call)
        if gateway.thinking.may_prefer(state):
            await self._read(partial(gateway.thinking.prefer, state, call))

    async def _read(self, work: Callable[[], T]) -> T:
        """Do work that goes over the request's body, in a thread if the body is large."""
        return await self._gateway.planner.read(len(self._state.incoming.body), work)

    async def _before(self, answer_id: str) -> CallRecord | None:
        """The call of the same client key whose answer this one goes on from; the provider that keeps it is preferred.

        None where it is not known, or the store is away.

        Raises:
            StoreUnavailable: no calls are taken while the store is away, and nobody knows the session of this one.
        """
        state, settler, before = self._state, self._gateway.settler, None
        if not settler.is_unavailable:
            try:
                before = await self._gateway.background.answered(answer_id, state.incoming.caller.namespace)
            except StoreUnavailable as error:
                settler.away(error)
        if state.incoming.endpoint.metered and state.session is None:
            settler.check()
        state.routing.kept_at = before.provider if before is not None else None
        return before

    async def _go_where_it_is_kept(self, answer_id: str) -> StoreUnavailable | None:
        """Ask about an answer at the provider that has it; never with a credential that may be for another one.

        A client key that is held to some models was allowed the one of its own answer when it asked for that. Gives
        what is to be told in place of "there is no such answer" where nobody can say who has it.
        """
        if self._gateway.settler.is_unavailable:
            return StoreUnavailable(_WHOSE)
        try:
            name, namespace = await self._gateway.background.origin(answer_id, self._state.incoming.caller.namespace)
        except StoreUnavailable as error:
            self._gateway.settler.away(error)
            return StoreUnavailable(_WHOSE)
        caller, provider = self._state.incoming.caller, self._gateway.providers.get(name or "")
        if caller.models and namespace == caller.namespace:
            self._state.incoming = replace(self._state.incoming, caller=replace(caller, models=()))
        if provider is not None and provider.holds_credential:
            self._state.incoming = replace(self._state.incoming, provider=name)
        return None

    def _find_routes(self, call: Call) -> None:
        """Where the call may go. The caller's own credential is for the first provider and for no other.

        Raises:
            UnknownModel: nobody has its model, or it is not for this client key.
            InvalidRequest: nobody who has it takes the call's format.
            Unauthenticated: the caller's credential is plainly another provider's.
        """
        state, incoming, providers = self._state, self._state.incoming, self._gateway.providers
        found = routes_of(incoming, call, self._gateway.routes, state.session)
        first = found[0].provider
        found = tuple([one for one in found if one.provider == first or providers[one.provider].holds_credential])
        if state.routing.kept_at is not None:
            found = first_at(state.routing.kept_at, found)
        state.routing.routes = speaking(found, incoming.endpoint.format, providers)
        state.routing.route = state.routing.home = state.routing.routes[0]
        state.routing.others = others_of(call, state.routing.routes, self._gateway.routes)
        state.routing.advisors = advisors_of(call, state.routing.routes, self._gateway.routes)
        for route in state.routing.routes:
            # Only one of them can be in want of it; where an answer is kept decides whether that is the first.
            check_credential(incoming.headers, incoming.query, providers[route.provider], providers.values())

    def _go_by(self, step: Step, call: Call) -> None:
        """Find where the call may go with the step's model instead of its own.

        Raises:
            UnknownModel: nobody has it, or it is not for this client key.
            Unauthenticated: the caller's credential would go to a provider for which it is not meant.
        """
        state, asked_for = self._state, self._state.routing.route.provider
        try:
            self._find_routes(replace(call, model=step.model))
        except UnknownModel as fault:
            raise UnknownModel(f'{fault.message} The step "{step.name}" calls it.', param=fault.param) from None
        provider = self._gateway.providers[state.routing.route.provider]
        if provider.name != asked_for and not provider.holds_credential:
            raise Unauthenticated(
                f'The step "{step.name}" calls {step.model} at the provider {provider.name}, for which this gateway '
                "has no key; the one of this request is for another provider."
            )
        state.notes["model"] = f"{step.model}, as the step has it"

    async def _answered(self, call: Call) -> UpstreamReply:
        """Return the response of the first provider that has one, or the failure that `EarlierFailures` chooses.

        Raises:
            UpstreamFault: there is no answer.
            ContextOverflow, BudgetTooSmall, TextTooLong: it cannot be made to fit.
        """
        state, earlier, position = self._state, EarlierFailures(), 0
        while True:
            route = state.routing.route = state.routing.routes[position]
            position += 1
            try:
                answer = await self._tried(call)
            except (UpstreamFault, ContextOverflow, BudgetTooSmall, TextTooLong) as fault:
                if position >= len(state.routing.routes) or earlier.is_enough(fault):
                    return earlier.instead_of(fault)
                reason = fault.code
                earlier.heard(fault)
            else:
                is_last, is_key_refused = position >= len(state.routing.routes), self._refuses_our_key(answer)
                is_unfit = state.dispatch.is_too_long or is_key_refused
                if not is_unfit and (is_last or answer.status not in FAILED):
                    return answer
                if is_last:
                    return earlier.answer or answer
                reason = str(answer.status)
                if answer.status in FAILED or is_key_refused:
                    with contextlib.suppress(UpstreamFault):
                        body = await read_error(answer)
                        earlier.heard(AlreadyRead(answer.status, without_packing(answer.headers), body))
            await state.dispatch.hang_up()
            state.dispatch.work(is_so=False)
            # Where the client has left, the cancel takes effect here, before another provider is asked.
            await asyncio.sleep(0)
            failed = f"{route.provider}/{route.model}: {reason}"
            before = state.notes.get("fallback")
            state.notes["fallback"] = failed if before is None else f"{before}; {failed}"

    def _refuses_our_key(self, answer: UpstreamReply) -> bool:
        """Whether the provider refuses the key that the gateway holds for it; another provider has its own."""
        return answer.status in KEY_REFUSED and self._gateway.providers[self._state.routing.route.provider].has_key

    async def _tried(self, call: Call) -> UpstreamReply:
        """The answer of the provider of the current route."""
        state, gateway = self._state, self._gateway
        state.dispatch.is_too_long = False
        if gateway.compactions.is_made_here(state):
            return await gateway.compactions.make(state, call)
        if gateway.steps.may_restrict(state):
            await self._read(partial(gateway.steps.restrict, state))
        await self._make_ready(call)
        if call.stream and state.budget.totals_before is None:
            state.budget.totals_before = await gateway.accounts.totals_now(state)
        return await gateway.compactions.checked(state, call, await gateway.sender.send(state, call))

    async def _make_ready(self, call: Call) -> None:
        """Decide what is sent, and hold what it may cost. Tool results are shown shorter before a call is refused.

        What is held is enough for every route of the call, so it is held once.

        Raises:
            BudgetFault: even then too little is left.
            StoreUnavailable: what handles stand for cannot be kept, and without handles the call needs more than is
                held.
        """
        state, composer, accounts = self._state, self._gateway.composer, self._gateway.accounts
        tries = composer.tries(state)
        for number, tried in enumerate(tries, 1):
            await composer.compose(state, call, tried)
            try:
                if state.budget.hold is None:
                    await accounts.hold(state, call)
            except BudgetExhausted:
                if number == len(tries):
                    raise
            else:
                break
        if state.context.shown is not None:
            # Otherwise no result is shown shorter.
            if await composer.sum_up(state, call):
                await composer.compose(state, call, tried)
            if not await composer.keep(state):
                # Another call took the room, or the store went away: then nothing is left out.
                await composer.compose(state, call, LOSSLESS)
                accounts.check_held(state)
        await composer.remember_unread(state)
