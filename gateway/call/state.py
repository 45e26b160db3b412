"""Keep the state of one call while it passes through the pipeline.

Each part of the state is written by one package, named in its class. Other packages only read it. A new part costs
nothing: its values are those of its class until they are set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from gateway.call.bound_thinking import BoundCall
from gateway.call.types import (
    ActiveStep,
    CallAccounts,
    ClosingCall,
    Incoming,
    PlanRequest,
    RequestCounts,
    ShownResults,
    TakenHold,
)
from gateway.core.calling_agent import CallingAgent
from gateway.core.errors import GatewayError
from gateway.core.http.headers import header
from gateway.core.http.request import WorkObserver, ignore_work
from gateway.core.ledger.charging import ChargedAccounts
from gateway.core.ledger.output_limit import OutputAsked
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode
from gateway.core.modes.unread import ModeTry, ResponseModes, UnreadForm
from gateway.core.plan import Plan
from gateway.core.ports import UpstreamReply
from gateway.core.record import NOTE_FALLBACK, NOTE_TRACEPARENT, CallRecord, Outcome
from gateway.core.routing import Route
from gateway.core.runaway import Finding
from gateway.core.session import NOTHING_REMEMBERED, Remembered
from gateway.core.steps import Step
from gateway.core.thinking_origin import UnreadableThinking
from gateway.core.trimming.summary import SummaryUse
from gateway.core.usage import Totals
from gateway.dialects.base import Call, Dialect, ParsedResponse
from gateway.dialects.contents import Contents
from gateway.dialects.limit_error import NO_OUTPUT_RULE, OutputRule
from gateway.dialects.limits import output_asked
from gateway.dialects.server_state import continued_from, is_fetched_later, is_in_background, references_to_stored
from gateway.dialects.tool_restriction import UNRESTRICTED, ToolRestriction

#: the status of a call whose client left before the response
CLIENT_CLOSED: Final = 499
#: https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_NO_ROUTE: Final = Route("", "")
_NO_ACCOUNTS: Final = ChargedAccounts("")
_NOT_READ: Final = CallAccounts()
_UNCHANGED: Final = ModeTry(ResponseModes("raw", "raw"))


@dataclass(init=False)
class RoutingState:
    """Where the call may go, and where it goes. Written by `pipeline.exchange`.

    Attributes:
        routes: the models that may serve the call, at their providers, in the order in which they are tried.
            Once something is reserved, only those that the reservation is enough for.
        route: the route that is tried now, or that has responded.
        home: the first route before any failure, and before thinking blocks moved another route to the front.
        kept_at: the provider that keeps the response which the call continues; None if unknown.
        others: other models that the providers may use instead of the call's model, because the call allows it.
        failed: the routes that were tried before the current one, each with the reason why it was given up.
        advisors: models that the call's model may ask for advice, with a tool of the provider.
        cheaper: the routes of a cheaper model, which precede those of the call's own model; empty without one.
    """

    routes: tuple[Route, ...] = (_NO_ROUTE,)
    route: Route = _NO_ROUTE
    home: Route = _NO_ROUTE
    kept_at: str | None = None
    failed: tuple[str, ...] = ()
    others: tuple[Route, ...] = ()
    advisors: tuple[Route, ...] = ()
    cheaper: tuple[Route, ...] = ()

    @property
    def has_next(self) -> bool:
        """Return whether another route is left after the current one."""
        return self.route is not self.routes[-1]

    def instead(self, *routes: Route, besides: bool = True) -> list[Route]:
        """Return the models that the providers of these routes may use instead of the call's own model.

        `besides`: also return the advisors, which never respond to the client.
        """
        named = (*self.others, *self.advisors) if besides else self.others
        if not named:
            return []
        providers = {route.provider for route in routes}
        return [route for route in named if route.provider in providers]


@dataclass(init=False)
class BudgetState:
    """The accounts of the call and its hold. Written by `budget.accounts`.

    Attributes:
        charged: whose accounts the call is charged to.
        accounts: the balances of these accounts as last read.
        totals_before: the session's totals before the call, for the headers of a stream, whose usage comes later.
        is_holding: the store was asked to reserve something. It may have done so even if its reply was lost.
        hold: what is reserved; None before that.
        text_tokens: estimated tokens of the call's texts, if they were read for the hold.
        usual_output: the usual output tokens of the call, if it may be reserved for; None if unknown.
        output_seen_at: monotonic seconds when a check of the hold first found output in a stream.
        caches_long: the call may ask for a cache of an hour or more, which costs more. Only read under a USD budget.
        closing: set if it is the closing call of its session; `pipeline.closing` sets it.
    """

    charged: ChargedAccounts = _NO_ACCOUNTS
    accounts: CallAccounts = _NOT_READ
    totals_before: Totals | None = None
    is_holding: bool = False
    hold: TakenHold | None = None
    text_tokens: int | None = None
    usual_output: int | None = None
    output_seen_at: float | None = None
    caches_long: bool = False
    closing: ClosingCall | None = None

    @property
    def is_far_over(self) -> bool:
        """Return whether the response exceeds the hold by more than a stream delivers between two checks."""
        lease = self.hold.lease if self.hold is not None else None
        return lease is not None and lease.delivered() > lease.end + lease.check_bytes


@dataclass(init=False)
class StepsState:
    """The step that is active, and how it restricts the tools. Written by `steps.enforcement`.

    Attributes:
        active: the position of the call's agent in its steps; None without steps.
        step: the step that was active when the call came; its record names it.
        restriction: how the request states which tools may be called.
        refused_changes: the route whose model refused a system message that removes tools; None if none did.
        contents: the messages of the call, if they were read for a rule; None if they are to be read for the plan.
        counts: the token counts of `contents`, if a condition needs them.
        warnings: what runaway protection found. Written by `steps.runaway`.
    """

    active: ActiveStep | None = None
    step: Step | None = None
    restriction: ToolRestriction = UNRESTRICTED
    refused_changes: Route | None = None
    contents: Contents | None = None
    counts: RequestCounts | None = None
    warnings: tuple[Finding, ...] = ()


class UnreadExtracts(NamedTuple):
    """Extracts of tool results that the model has not read, because they do not fit.

    Attributes:
        blocks: the blocks to send of each result, by name (`ConversationResults.names`).
        room: the token limit for which they were chosen; None without extracts.
    """

    blocks: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    room: int | None = None


NO_EXTRACTS: Final = UnreadExtracts()


@dataclass(init=False)
class ContextState:
    """What of the conversation is sent. Written by `context`.

    Attributes:
        remembered: what the session keeps from earlier calls; `pipeline.exchange` sets it first.
        compaction: how the call asks that its conversation is compacted; None if it does not.
        has_used_counts: the token counts of the steps were used. They are used once, because the provider may have
            reported something before a second try.
        mode: the response mode of tool results that the model has read; None before the request is composed.
        tried: the response modes that are tried now.
        extracts: what is sent of unread tool results that do not fit.
        unread: how unread tool results are shown, by name, for the session to remember.
        shown: the tool results as they are shown; None if all are unchanged.
        thinking: what is sent of the thinking, if the model accepts it only after an unchanged prefix; else None.
        request: what was planned for: contents, route, limits.
        summary_use: whether a summary of dropped messages may still be requested; a call waits for one at most.
        plan: the messages to send, and their token counts.
        affordable: input tokens that the budgets allowed before anything was reserved; None without a budget.
        found_at_provider: the cached result of `CallState.at_provider` for a large request; None if not searched yet.
        unread_thinking: thinking blocks of the request that the current route cannot read.
    """

    remembered: Remembered = NOTHING_REMEMBERED
    compaction: Literal["path", "trigger"] | None = None
    has_used_counts: bool = False
    mode: ResponseMode | None = None
    tried: ModeTry = _UNCHANGED
    extracts: UnreadExtracts = NO_EXTRACTS
    unread: tuple[tuple[str, UnreadForm], ...] = ()
    shown: ShownResults | None = None
    thinking: BoundCall | None = None
    request: PlanRequest | None = None
    summary_use: SummaryUse = "ask"
    plan: Plan | None = None
    affordable: int | None = None
    found_at_provider: tuple[str, ...] | None = None
    unread_thinking: tuple[UnreadableThinking, ...] = ()

    @property
    def sent_messages(self) -> tuple[bytes, ...]:
        """Return the messages to send, as planned."""
        if self.plan is not None and self.plan.messages is not None:
            return self.plan.messages
        return (self.request.contents.messages if self.request is not None else None) or ()

    @property
    def adds_tool_changes(self) -> bool:
        """Return whether the gateway adds system messages that change the tools."""
        return self.thinking is not None and self.thinking.adds_tool_changes


@dataclass(init=False)
class DispatchState:
    """The request to the provider that is tried now. Written by `pipeline.dispatch`.

    Attributes:
        observer: is notified each time `is_at_work` changes.
        is_at_work: the provider may be working on the call, so that leaving it costs something.
        is_too_long: the provider has refused the request for its length.
        output_rule: the field name and the maximum of the output limit, as the model accepts them.
        open_request: the open request to the provider, to be closed.
        sent_at: monotonic seconds when the call was first sent.
        head_at: monotonic seconds when the head of the response arrived.
    """

    observer: WorkObserver = ignore_work
    is_at_work: bool = False
    is_too_long: bool = False
    output_rule: OutputRule = NO_OUTPUT_RULE
    open_request: AbstractAsyncContextManager[UpstreamReply] | None = None
    sent_at: float | None = None
    head_at: float | None = None

    def work(self, *, is_so: bool) -> None:
        """Note whether the provider may be working on the call. See `WorkObserver`."""
        self.is_at_work = is_so
        self.observer(is_so=is_so)

    async def hang_up(self) -> None:
        """Close the request to the provider, if one is open."""
        opened, self.open_request = self.open_request, None
        if opened is not None:
            await opened.__aexit__(None, None, None)


@dataclass(init=False)
class ReceivedResponse:
    """What came back, and how the call ended. Written by `pipeline`.

    Attributes:
        status: the HTTP status, for the record.
        outcome: how the call ended, for the record.
        fault: why there is no response, or why it broke off.
        parsed: what was read of a complete response.
        reader: returns what was read so far of an incomplete response.
        is_billed: the provider charges for the call, because it has accepted it.
        is_event_stream: the response is a stream of events.
        bytes_sent: bytes of the response that were passed to the client.
        is_count_estimated: the response is a token count of the gateway, instead of one of the provider.
    """

    status: int = CLIENT_CLOSED
    outcome: Outcome = "client_left"
    fault: GatewayError | None = None
    parsed: ParsedResponse | None = None
    reader: Callable[[], ParsedResponse] | None = None
    is_billed: bool = False
    is_event_stream: bool = False
    bytes_sent: int = 0
    is_count_estimated: bool = False


@dataclass(init=False)
class SettlementState:
    """The record of the call, once it is settled. Written by `budget.accounts` and `background`.

    Attributes:
        record: the record that was written, or is about to be; None before.
        fetched: the record of the earlier call whose response this call fetched and settled.
        totals: the session's totals after the record was written.
        is_settled: the record is made, the hold is released and the observers are notified; nothing is done twice.
        is_findable: others find the call by the id of its response, which is made in the background.
        is_unheard: the client left before the response ended.
    """

    record: CallRecord | None = None
    fetched: CallRecord | None = None
    totals: Totals | None = None
    is_settled: bool = False
    is_findable: bool = False
    is_unheard: bool = False


@dataclass(slots=True)
class CallState:
    """One call: the request, and what is known of it so far.

    Attributes:
        incoming: the request as received.
        started_at: Unix time in seconds.
        call: the body as its dialect reads it; None until it is read.
        session: the session that is charged; None if there is none, or it is not known yet.
        is_session_derived: the id of the session was derived from the first messages of the conversation.
        agent: the agent of the session that makes the call; None if the client says nothing about agents.
        notes: remarks for the record, by name. They are for people: nothing is decided by them.
    """

    incoming: Incoming
    started_at: float
    call: Call | None = None
    session: SessionKey | None = None
    is_session_derived: bool = False
    agent: CallingAgent | None = None
    notes: dict[str, str] = field(default_factory=dict)
    routing: RoutingState = field(default_factory=RoutingState)
    budget: BudgetState = field(default_factory=BudgetState)
    steps: StepsState = field(default_factory=StepsState)
    context: ContextState = field(default_factory=ContextState)
    dispatch: DispatchState = field(default_factory=DispatchState)
    response: ReceivedResponse = field(default_factory=ReceivedResponse)
    settlement: SettlementState = field(default_factory=SettlementState)
    _output_asked: OutputAsked | None = None

    @classmethod
    def of(cls, incoming: Incoming, started_at: float) -> CallState:
        """Return the state of a call that has just come in."""
        purpose, parent = incoming.purpose, header(incoming.headers, b"traceparent")
        if purpose is None:
            return cls(
                incoming, started_at, notes={NOTE_TRACEPARENT: parent.decode()} if _TRACE.fullmatch(parent) else {}
            )
        return cls(incoming, started_at, is_session_derived=purpose.derived, notes=dict(purpose.notes))

    @property
    def dialect(self) -> Dialect:
        """Return the wire format that the client and the provider use."""
        return self.incoming.endpoint.dialect

    @property
    def stored_session(self) -> SessionKey | None:
        """Return the session whose state this call has read and may update.

        None without a session, or if the store was unavailable when the call began. Such a call does not know what
        earlier calls decided, and must not replace it.
        """
        return None if self.budget.accounts.is_stale else self.session

    @property
    def is_compaction(self) -> bool:
        """Return whether the client, or the provider for it, replaces the conversation by what this call returns."""
        return self.agent is not None and self.agent.request_class == "compaction"

    @property
    def is_client_compaction(self) -> bool:
        """Return whether the client replaces the conversation by the text of this call's response."""
        return self.is_compaction and self.context.compaction is None

    @property
    def is_billed_later(self) -> bool:
        """Return whether the provider bills this call only after its response, as for a batch.

        That usage is charged to a session only if the call `is_fetched_later`.
        """
        endpoint = self.incoming.endpoint
        return endpoint.deferred or (self.call is not None and is_in_background(self.call.fields, endpoint.wire))

    @property
    def is_fetched_later(self) -> bool:
        """Return whether usage that is billed later is reported when the response is fetched through the gateway."""
        return self.call is not None and is_fetched_later(self.call.fields, self.incoming.endpoint.wire)

    @property
    def closing_tokens(self) -> int:
        """Return the most input tokens that the instruction of a closing call adds; 0 for other calls."""
        closing = self.budget.closing
        return closing.policy.most_tokens if closing is not None else 0

    @property
    def at_provider(self) -> tuple[str, ...]:
        """Return the names of the request's parts that refer to content which only the provider has."""
        if self.call is None:
            return ()
        if self.context.found_at_provider is not None:
            return self.context.found_at_provider
        # If results are shown shorter, the contents are not all that was received.
        request = self.context.request if self.context.shown is None else None
        contents = request.contents if request is not None else None
        return references_to_stored(self.call.fields, self.incoming.endpoint.wire, contents)

    def kept_by(self, *routes: Route) -> int:
        """Return the tokens of the stored response that the call continues: the most known for these routes."""
        ids = continued_from(self.call.fields, self.incoming.endpoint.wire) if self.call is not None else ()
        return max(self.context.remembered.kept_tokens(route.provider, ids) for route in routes) if ids else 0

    @property
    def output_asked(self) -> OutputAsked:
        """Return what the request says about the length of its response. The body is read once."""
        if self._output_asked is None:
            fields = self.call.fields if self.call is not None else {}
            self._output_asked = output_asked(fields, self.incoming.endpoint.wire)
        return self._output_asked

    @property
    def step_output(self) -> int | None:
        """Return the output limit of the active step; None if it sets none, or the gateway cannot write the limit."""
        step = self.steps.step if self.incoming.endpoint.wire is not None else None
        return step.max_output_tokens if step is not None else None

    def note_failed_route(self, reason: str) -> None:
        """Note that the current route has failed, and that the next one is tried."""
        route, routing = self.routing.route, self.routing
        routing.failed = (*routing.failed, f"{route.provider}/{route.model}: {reason}")
        self.notes[NOTE_FALLBACK] = "; ".join(routing.failed)

    def client_left(self) -> None:
        """Note that the client left. A stream that has sent its finish reason counts as received."""
        response = self.response
        has_ended = (
            response.is_event_stream and response.reader is not None and response.reader().finish_reason is not None
        )
        self.settlement.is_unheard = self.settlement.record is None and not has_ended
