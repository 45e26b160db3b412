"""Take one call through all its steps, in order. This is the only module that knows the order.

    read the body -> name the session -> find the routes -> read the accounts -> find the active step
    -> decide what to send -> reserve what it may cost -> send it to the provider
    -> meter the response -> settle -> notify the observers

- If a route fails, the request is planned again and sent on the next route.
- If the plan needs a summary of dropped messages first, the gateway makes an exchange of its own for it. Summaries of
  tool results are made after the reservation.
- An `Exchange` is entered on the way to the provider, and left after the response was passed on. Leaving it settles
  the call, exactly once, whatever happened: the client left, the provider broke off, or the process stops.

Each step is a part that all calls share, see `Gateway`. What is known of one call is in its `CallState`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Final, TypeVar

from gateway.background.index import BackgroundIndex
from gateway.background.settlement import BackgroundSettlement
from gateway.budget.accounts import Accounts
from gateway.budget.settlement import CallSettlement
from gateway.call.routing import (
    advisors_of,
    calling_agent_of,
    models_instead,
    named_session,
    provider_first,
    routes_for_format,
    routes_of,
    session_of,
    with_form_model,
)
from gateway.call.state import CallState, RoutingState
from gateway.call.types import ClientResponse, Incoming, SessionPolicy
from gateway.context.planner import READ_IN_LOOP, Planner
from gateway.context.request import LOSSLESS, RequestComposer
from gateway.context.thinking_origins import ThinkingOrigins
from gateway.core.errors import (
    BudgetExhausted,
    GatewayError,
    InvalidRequest,
    StoreUnavailable,
    Unauthenticated,
    UnknownModel,
    UpstreamFault,
)
from gateway.core.http.headers import ProviderAddress, check_credential, is_success
from gateway.core.http.request import WorkObserver, ignore_work
from gateway.core.http.retry_policy import FALLS_BACK, KEY_REFUSED
from gateway.core.modes.unread import ModeTry
from gateway.core.ports import UpstreamReply
from gateway.core.record import CANCEL_REASONS, CallRecord
from gateway.core.routing import MOST_ROUTES, ModelFacts, Route, Routes
from gateway.core.steps import Step
from gateway.core.trimming.overflow import BudgetTooSmall, ContextOverflow, TextTooLong
from gateway.dialects.base import Call
from gateway.dialects.server_state import previous_response_id
from gateway.pipeline.closing import begin_closing, may_close, undo_closing
from gateway.pipeline.compaction import Compactions
from gateway.pipeline.dispatch import Dispatcher
from gateway.pipeline.downgrade import REFUSED_BY_MODEL, Downgrades, with_fallback
from gateway.pipeline.fallback import EarlierFailures
from gateway.pipeline.response import ResponseRelay, read_error
from gateway.pipeline.token_counts import TokenCounts
from gateway.steps.enforcement import Steps
from gateway.steps.runaway import RunawayGuard
from gateway.stores.availability import Availability
from gateway.upstream.body import AlreadyRead, without_compression_headers

T = TypeVar("T")

#: the status with which a provider says that it does not have the response that a request names
_NOT_FOUND: Final = 404
#: the note about another model than the one that the client asked for
_DOWNGRADED: Final = "model"
_PROVIDER_UNKNOWN: Final = (
    "The store is unavailable, so the provider of this response cannot be looked up. Try again shortly."
)


@dataclass(frozen=True, slots=True)
class Gateway:
    """The parts that all calls share. `app.assembly` makes them.

    Attributes:
        routes: which models are at which providers.
        providers: their addresses and keys, by name.
        facts: what is known of a model.
        availability: whether the store is unavailable, so that new calls are refused at once.
        planner: counts and trims.
        policy: how sessions are named and counted.
        steps: which tools may be called now.
        runaway: warns and stops agents that run away; None if no limit is set.
        background: finds calls by the ids of their responses.
        background_settlement: settles a call when its response is fetched later.
        thinking: remembers which model created which thinking.
        accounts: reserves what a call may cost.
        settlement: settles a call once.
        composer: decides what is sent.
        compactions: makes and expands compactions.
        token_counts: counts tokens for providers that cannot.
        dispatcher: sends a call to one provider.
        relay: passes responses on to the client.
        new_id: makes the id of a call.
        downgrades: decides whether a cheaper model serves a call.
        clock: monotonic seconds.
        wall: Unix time in seconds.
    """

    routes: Routes
    providers: Mapping[str, ProviderAddress]
    facts: Callable[[Route], ModelFacts]
    availability: Availability
    planner: Planner
    policy: SessionPolicy
    steps: Steps
    runaway: RunawayGuard | None
    background: BackgroundIndex
    background_settlement: BackgroundSettlement
    thinking: ThinkingOrigins
    accounts: Accounts
    settlement: CallSettlement
    composer: RequestComposer
    compactions: Compactions
    token_counts: TokenCounts
    dispatcher: Dispatcher
    relay: ResponseRelay
    new_id: Callable[[], str]
    downgrades: Downgrades
    clock: Callable[[], float]
    wall: Callable[[], float]

    def handle(self, incoming: Incoming, observer: WorkObserver = ignore_work) -> Exchange:
        """Return the exchange for one request: `async with gateway.handle(incoming) as response`.

        Entering it raises no `GatewayError`: errors are responses. If its task is cancelled, the call is charged for
        what was delivered. The message of the cancellation becomes the outcome in its record if it is one of
        `CANCEL_REASONS`. Otherwise the outcome is `client_left`.

        Args:
            incoming: the request.
            observer: is notified whether a provider may be working on the call. If none is, a cancellation loses
                nothing.
        """
        return Exchange(self, incoming, observer)


class Exchange:
    """One call: a context manager that sends the call when it is entered, and settles it when it is left."""

    def __init__(self, gateway: Gateway, incoming: Incoming, observer: WorkObserver) -> None:
        self._gateway = gateway
        self._state = CallState.of(incoming, gateway.wall())
        self._state.dispatch.observer = observer

    def client_left(self) -> None:
        """Note that the client left. The response may still be read to its end."""
        self._state.client_left()

    async def __aenter__(self) -> ClientResponse:
        try:
            try:
                return await self._run()
            except GatewayError as fault:
                await self._state.dispatch.hang_up()
                if self._state.call is not None:
                    await self._gateway.composer.find_at_provider(self._state, self._state.call)
                return await self._gateway.relay.refusal(self._state, fault)
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
            state.response.outcome = next(
                (cut for cut in CANCEL_REASONS if error.args == (cut,)), state.response.outcome
            )
        try:
            await self._gateway.settlement.settle(state)
        finally:
            # A second cancellation interrupts `settle`, and an open lease would be renewed until the worker ends.
            self._gateway.settlement.end(state)
            await state.dispatch.hang_up()

    async def _run(self) -> ClientResponse:
        """Take the call to a provider, and return the response for the client."""
        state, gateway, incoming = self._state, self._gateway, self._state.incoming
        metered = incoming.endpoint.metered
        if metered:
            # Before the body is read, so that the response to a refused body has its session's totals as well.
            state.session = named_session(incoming, gateway.policy.id_headers)
        if incoming.refused is not None:
            raise incoming.refused
        call = state.call = await self._read(lambda: with_form_model(incoming, state.dialect.read(incoming.body)))
        earlier = previous_response_id(call.fields) if incoming.endpoint.may_continue else None
        before = await self._find_previous_call(earlier) if earlier is not None else None
        if metered:
            if state.session is None:
                read = partial(session_of, incoming, call, gateway.policy, before)
                state.session, state.is_session_derived = await self._read(read)
            gateway.availability.check()
        call = state.call = await gateway.compactions.begin(state, call)
        if metered:
            is_compaction = state.context.compaction is not None
            state.agent = await self._read(partial(calling_agent_of, incoming, call, is_compaction=is_compaction))
        stored_id = incoming.endpoint.response_id
        lookup_error = await self._route_to_response(stored_id) if stored_id is not None else None
        try:
            await self._read(partial(self._find_routes, call))
        except UnknownModel as fault:
            raise (lookup_error or fault) from None
        if metered:
            await self._open_session(call)
        response = await self._send(call)
        if lookup_error is not None and response.status == _NOT_FOUND:
            raise lookup_error
        if not is_success(response.status):
            return await gateway.relay.failure(state, response)
        state.response.is_billed = metered
        await gateway.thinking.note_origin(state, call)
        return await gateway.relay.success(state, call, response)

    async def _open_session(self, call: Call) -> None:
        """Open the session's accounts and its step, which may choose the model and the order of the routes."""
        state, gateway = self._state, self._gateway
        state.context.remembered = await gateway.accounts.open(state)
        await gateway.steps.begin(state, call)
        if gateway.runaway is not None:
            await gateway.runaway.check(state, call)
        step = state.steps.step
        if step is not None and step.model is not None:
            self._route_to_step_model(step, call)
        if gateway.thinking.may_prefer(state):
            state.routing.routes = await self._read(partial(gateway.thinking.preferred, state, call))
            state.routing.route = state.routing.routes[0]
        if gateway.downgrades.is_due(state, call):
            await self._route_to_cheaper_model(call)

    async def _read(self, work: Callable[[], T]) -> T:
        """Do work that reads the whole body, in a thread if the body is large."""
        size = len(self._state.incoming.body)
        return work() if size <= READ_IN_LOOP else await self._gateway.planner.read(size, work)

    async def _find_previous_call(self, response_id: str) -> CallRecord | None:
        """Return the call of the same client key whose response this one continues; prefer the provider that keeps it.

        Returns None if that call is unknown, or the store is unavailable.

        Raises:
            StoreUnavailable: the session of this call cannot be known, and no calls are taken without the store.
        """
        state, before = self._state, None
        try:
            before = await self._gateway.background.call_of_response(response_id, state.incoming.caller.namespace)
        except StoreUnavailable:
            if state.incoming.endpoint.metered and state.session is None:
                self._gateway.availability.check()
        state.routing.kept_at = before.provider if before is not None else None
        return before

    async def _route_to_response(self, response_id: str) -> StoreUnavailable | None:
        """Send a request about an earlier response to the provider that keeps it.

        A credential that may be for another provider is never sent there. If the response belongs to a client key that
        is limited to some models, its model is not checked again: the key was allowed this model when it made the call.

        Returns:
            The error to raise instead of "there is no such response" if the provider cannot be looked up; else None.
        """
        try:
            name, namespace = await self._gateway.background.origin(response_id, self._state.incoming.caller.namespace)
        except StoreUnavailable:
            return StoreUnavailable(_PROVIDER_UNKNOWN)
        caller, provider = self._state.incoming.caller, self._gateway.providers.get(name or "")
        if caller.models and namespace == caller.namespace:
            self._state.incoming = replace(self._state.incoming, caller=replace(caller, models=()))
        if provider is not None and provider.holds_credential:
            self._state.incoming = replace(self._state.incoming, provider=name)
        return None

    def _find_routes(self, call: Call) -> None:
        """Find where the call may go. The caller's own credential is only ever sent to the first provider.

        Raises:
            UnknownModel: no provider has the model, or the client key may not use it.
            InvalidRequest: no provider of the model takes the call's format.
            Unauthenticated: the caller's credential plainly belongs to another provider.
        """
        incoming, routing, providers = self._state.incoming, self._state.routing, self._gateway.providers
        found = routes_of(incoming, call, self._gateway.routes, self._state.session)
        if len(found) > 1:
            first = found[0].provider
            found = tuple(
                [route for route in found if route.provider == first or providers[route.provider].holds_credential]
            )
        if routing.kept_at is not None:
            found = provider_first(routing.kept_at, found)
        routing.routes = routes_for_format(found, incoming.endpoint.format, providers)
        routing.route = routing.home = routing.routes[0]
        routing.others = models_instead(call, routing.routes, self._gateway.routes)
        routing.advisors = advisors_of(call, routing.routes, self._gateway.routes)
        for route in routing.routes:
            # Only one provider can need the caller's credential. It is not always the first, because of `kept_at`.
            check_credential(incoming.headers, incoming.query, providers[route.provider], providers.values())

    def _route_to_step_model(self, step: Step, call: Call) -> None:
        """Find where the call may go with the step's model instead of its own.

        Raises:
            UnknownModel: no provider has the model, or the client key may not use it.
            Unauthenticated: the caller's credential would go to a provider for which it is not meant.
        """
        state, provider_before = self._state, self._state.routing.route.provider
        try:
            self._find_routes(replace(call, model=step.model))
        except UnknownModel as fault:
            raise UnknownModel(f'{fault.message} The step "{step.name}" calls it.', param=fault.param) from None
        provider = self._gateway.providers[state.routing.route.provider]
        if provider.name != provider_before and not provider.holds_credential:
            raise Unauthenticated(
                f'The step "{step.name}" calls {step.model} at the provider {provider.name}, for which this gateway '
                "has no key; the one of this request is for another provider."
            )
        state.notes["model"] = f"{step.model}, set by the step"

    async def _route_to_cheaper_model(self, call: Call) -> None:
        """Put the routes of the cheaper model before those of the call's own, unless that could break the call."""
        state, downgrades, wire = self._state, self._gateway.downgrades, self._state.incoming.endpoint.wire
        policy, own = downgrades.policy, self._state.routing
        if policy is None or wire is None:
            return
        cheaper: tuple[Route, ...] = ()
        state.routing = RoutingState()
        try:
            await self._read(partial(self._find_routes, replace(call, model=policy.model)))
            cheaper = state.routing.routes
            why = self._credential_obstacle(own.route, cheaper[0])
            why = why or await downgrades.obstacle(state, call, wire, own.route, cheaper[0])
        except (UnknownModel, InvalidRequest, Unauthenticated) as fault:
            why = fault.message
        finally:
            # The record of a call that is cancelled here names its own route.
            state.routing = own
        if why is not None:
            state.notes["downgrade"] = f"keeps its model: {why}"
            return
        own.routes, own.cheaper = with_fallback(cheaper, own.routes, MOST_ROUTES), cheaper
        own.route = own.routes[0]
        with contextlib.suppress(StoreUnavailable):
            await downgrades.remember(state, own.route)
        state.notes[_DOWNGRADED] = f"{policy.model}, as less than {policy.below * 100:g} % of a budget is left"

    def _credential_obstacle(self, own: Route, cheaper: Route) -> str | None:
        """Return an obstacle if the caller's own credential would go to a provider for which it is not meant."""
        if cheaper.provider == own.provider or self._gateway.providers[cheaper.provider].holds_credential:
            return None
        return f"the gateway has no key for the provider {cheaper.provider}"

    async def _send(self, call: Call) -> UpstreamReply:
        """Return the response of the first provider that has one, or the failure that `EarlierFailures` chooses.

        Raises:
            UpstreamFault: no provider responded.
            ContextOverflow, BudgetTooSmall, TextTooLong: the request cannot be trimmed to its budget.
        """
        state, earlier, position = self._state, EarlierFailures(), 0
        routing = state.routing
        while True:
            routing.route = routing.routes[position]
            position += 1
            try:
                response = await self._send_to_current_route(call)
            except (UpstreamFault, ContextOverflow, BudgetTooSmall, TextTooLong) as fault:
                if position >= len(routing.routes) or earlier.is_enough(fault):
                    return earlier.instead_of(fault)
                reason = fault.code
                earlier.add(fault)
            else:
                is_last, is_key_refused = position >= len(routing.routes), self._refuses_our_key(response)
                is_unfit = state.dispatch.is_too_long or is_key_refused or self._is_refused_by_cheaper(response)
                if not is_unfit and (is_last or response.status not in FALLS_BACK):
                    return response
                if is_last:
                    return earlier.refusal or response
                reason = str(response.status)
                if response.status in FALLS_BACK or is_key_refused:
                    with contextlib.suppress(UpstreamFault):
                        body = await read_error(response)
                        earlier.add(AlreadyRead(response.status, without_compression_headers(response.headers), body))
            await state.dispatch.hang_up()
            state.dispatch.work(is_so=False)
            # If the client has left, the cancellation takes effect here, before another provider is called.
            await asyncio.sleep(0)
            state.note_failed_route(reason)
            if routing.cheaper and routing.routes[position] not in routing.cheaper:
                state.notes.pop(_DOWNGRADED, None)

    def _is_refused_by_cheaper(self, response: UpstreamReply) -> bool:
        """Return whether the cheaper model does not accept the request. The call's own model may."""
        routing = self._state.routing
        return routing.route in routing.cheaper and response.status in REFUSED_BY_MODEL

    def _refuses_our_key(self, response: UpstreamReply) -> bool:
        """Return whether the provider refuses the gateway's own key. Another provider has another key."""
        provider = self._gateway.providers[self._state.routing.route.provider]
        return response.status in KEY_REFUSED and provider.has_key

    async def _send_to_current_route(self, call: Call) -> UpstreamReply:
        """Return the response of the provider of the current route."""
        state, gateway = self._state, self._gateway
        state.dispatch.is_too_long = False
        if gateway.compactions.is_made_here(state):
            return await gateway.compactions.make(state, call)
        if (counted := await gateway.token_counts.instead(state, call)) is not None:
            return counted
        if gateway.steps.may_restrict(state):
            await self._read(partial(gateway.steps.restrict, state))
        await self._compose_and_reserve(call)
        if call.stream and state.budget.totals_before is None:
            state.budget.totals_before = await gateway.accounts.totals_now(state)
        response = await gateway.compactions.checked(state, call, await gateway.dispatcher.send(state, call))
        return await gateway.token_counts.checked(state, call, response)

    async def _compose_and_reserve(self, call: Call) -> None:
        """Decide what is sent, and reserve what it may cost. Tool results are shortened before a call is refused.

        The reservation is enough for every route of the call, so it is made once.

        Raises:
            BudgetFault: too little is left even with the shortest tool results.
            StoreUnavailable: the content of handles cannot be stored, and without handles the call needs more than is
                reserved.
        """
        state, composer, accounts = self._state, self._gateway.composer, self._gateway.accounts
        try:
            tried = await self._compose_and_hold(call)
        except BudgetExhausted as refusal:
            policy = accounts.closing
            if policy is None or not may_close(state, refusal):
                raise
            before = begin_closing(state, policy)
            try:
                tried = await self._compose_and_hold(call)
            except GatewayError:
                undo_closing(state, before)
                raise
            state.notes["closing_call"] = "the last call that the budget of the session allows"
        if state.context.shown is not None:
            # Tool results are sent in another form, so the full texts for their handles must be stored.
            if await composer.summarize_results(state, call):
                await composer.compose(state, call, tried)
            if not await composer.store_texts(state):
                # Another call used the room in the store, or the store became unavailable: send full texts or tables.
                await composer.compose(state, call, LOSSLESS)
                accounts.check_held(state)
        await composer.remember_unread(state)

    async def _compose_and_hold(self, call: Call) -> ModeTry:
        """Reserve what the call may cost with the first way to show tool results that fits; return this way.

        Raises:
            BudgetFault: too little is left even with the shortest tool results.
        """
        state, composer, accounts = self._state, self._gateway.composer, self._gateway.accounts
        *longer, shortest = composer.mode_tries(state)
        for tried in longer:
            await composer.compose(state, call, tried)
            with contextlib.suppress(BudgetExhausted):
                if state.budget.hold is None:
                    state.routing.routes = await accounts.hold(state, call)
                return tried
        await composer.compose(state, call, shortest)
        if state.budget.hold is None:
            state.routing.routes = await accounts.hold(state, call)
        return shortest
