"""Keep the state of one call while it passes through the pipeline."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Literal

from gateway.call.bound_thinking import BoundCall
from gateway.call.types import ActiveStep, CallAccounts, Incoming, PlanRequest, RequestCounts, ShownResults, TakenHold
from gateway.core.counting.measure import Wire
from gateway.core.errors import GatewayError
from gateway.core.fitting.summary import Use
from gateway.core.http.headers import header
from gateway.core.http.request import WorkObserver, notify_nobody
from gateway.core.ledger.charging import ChargedAccounts
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode
from gateway.core.modes.unread import ModeTry, ResponseModes, UnreadForm
from gateway.core.plan import Plan
from gateway.core.ports import UpstreamReply
from gateway.core.record import CallRecord, Outcome
from gateway.core.routing import Route
from gateway.core.session import Remembered
from gateway.core.steps import Step
from gateway.core.thinking_origin import UnreadableThinking
from gateway.core.usage import Totals
from gateway.dialects.base import Call, Dialect, ParsedResponse
from gateway.dialects.contents import Contents
from gateway.dialects.fields import AnyFields
from gateway.dialects.limit_error import AS_USUAL, OutputRule
from gateway.dialects.limits import least_output, output_limit
from gateway.dialects.server_state import continued_from, is_fetched_later, is_in_background, kept_by_provider
from gateway.dialects.tool_restriction import UNRESTRICTED, ToolRestriction

#: the status of a call whose client did not wait for an answer
CLIENT_CLOSED: Final = 499
#: https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_NOTHING_REMEMBERED: Final = Remembered()
_NO_ROUTE: Final = Route("", "")
_NOBODY: Final = ChargedAccounts("")
_NO_BOOK: Final = CallAccounts()
_AS_RECEIVED: Final = ModeTry(ResponseModes("raw", "raw"))


@dataclass(slots=True)
class CallState:
    """One call: what came in, and what became of it so far. Each part of the pipeline fills in what it finds.

    Attributes:
        incoming: the request as it came.
        started_at: seconds since the epoch.
        call: the body as its dialect reads it; None until it is read.
        session: the one it is charged to; None where there is none, or it is not known yet.
        derived: the session's id was made of how the conversation begins.
        routes: the models that may answer it, at their providers, in the order in which they are tried.
        route: the one of them that is being tried, or that has answered.
        home: the first of them where nothing is known of the conversation but its model and its session.
        compaction: how it asks that its conversation is compacted; None: it does not.
        kept_at: the provider that keeps the answer which the call goes on from; None where that is not known.
        others: models that the call tells its providers to call in the place of its own, at each of them.
        advisors: models that the call lets its own one ask, at each of its providers.
        is_too_long: the provider that is being tried has refused the request for its length.
        output_rule: how the model that is being tried takes an output limit.
        is_at_work: that provider may be working on it, so that leaving it costs something.
        at_work: is told each time `is_at_work` changes.
        charged: whose accounts the call is charged to.
        book: how these accounts stood when they were read.
        remembered: what the session keeps from earlier calls.
        stepped: where its agent is in its steps; None without steps.
        contents: its messages, where the steps had to look at them; else they are read when it is weighed.
        counts: what the contents weighed for the steps, to be used once instead of weighing them again.
        step: the step that was active when the call came; its record names it.
        restricted: how the provider is told which tools may be called.
        refused_changes: the model that refused a system message that withdraws tools.
        mode: the response mode of tool results that the model has read; None before the call is composed.
        tried: how its tool results are shown.
        extracts: blocks of tool results that do not fit, by the name of each (`ResultsIn.names`), see `chosen_blocks`.
        extracts_room: tokens that these were chosen for; None without any.
        unread: how tool results are shown that the session has to remember, by name.
        showing: its tool results as they are shown; None where all are as they came.
        thinking: of a call to a model that binds thinking to its prefix: what is sent of it; None for other models.
        asked: what was planned for: contents, route, limits.
        use: whether a summary of left-out messages may still be asked for; a call waits for one at most.
        plan: what of the messages is sent, and what that weighs.
        affordable: input tokens that its budgets allowed before anything was held; None where no budget says.
        before: the session's totals before it was sent: a stream's headers go out before its usage is known.
        is_holding: the store was asked to hold something; it may have done so even where no answer came.
        taken: the hold; None before it.
        found_at_provider: what in a large request stands for content that only the provider has; None: see `unseen`.
        texts: estimated tokens of its texts, where they were read for that.
        caches_long: it may ask for a cache of an hour or more, which costs more. Only looked for under a USD budget.
        sending: the open request to the provider, to be closed.
        sent_at: monotonic seconds, when it was first sent.
        head_at: the same, when the head of the answer came.
        status: of the answer, for the record.
        outcome: how it ended, for the record.
        fault: why there is no answer, or why it broke off.
        answer: what was read of an answer that came to its end.
        reader: gives what was read so far of one that has not.
        billed: the provider charges for it: it has accepted the call.
        is_unheard: its client had left before the answer ended.
        is_event_stream: the answer is a stream of events.
        is_findable: others find the call by the id of its answer, which is made in the background.
        response_bytes: bytes of the answer that were passed on.
        notes: remarks for its record, by name.
        record: as it was, or is about to be, written; None before.
        fetched: the record of the earlier call whose answer it fetched, as that was settled by it.
        unread_thinking: thinking blocks of the request that the current route cannot read.
        totals: the session's after it was written.
        is_settled: its record was made, its hold given up and the observers told; nothing is done a second time.
    """

    incoming: Incoming
    started_at: float
    call: Call | None = None
    session: SessionKey | None = None
    derived: bool = False
    routes: tuple[Route, ...] = (_NO_ROUTE,)
    route: Route = _NO_ROUTE
    home: Route = _NO_ROUTE
    compaction: Literal["path", "trigger"] | None = None
    kept_at: str | None = None
    others: tuple[Route, ...] = ()
    advisors: tuple[Route, ...] = ()
    is_too_long: bool = False
    output_rule: OutputRule = AS_USUAL
    is_at_work: bool = False
    at_work: WorkObserver = notify_nobody
    charged: ChargedAccounts = _NOBODY
    book: CallAccounts = _NO_BOOK
    remembered: Remembered = _NOTHING_REMEMBERED
    stepped: ActiveStep | None = None
    found_at_provider: tuple[str, ...] | None = None
    contents: Contents | None = None
    counts: RequestCounts | None = None
    step: Step | None = None
    restricted: ToolRestriction = UNRESTRICTED
    refused_changes: Route | None = None
    mode: ResponseMode | None = None
    tried: ModeTry = _AS_RECEIVED
    extracts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    extracts_room: int | None = None
    unread: Mapping[str, UnreadForm] = field(default_factory=dict)
    showing: ShownResults | None = None
    thinking: BoundCall | None = None
    asked: PlanRequest | None = None
    use: Use = "ask"
    plan: Plan | None = None
    affordable: int | None = None
    before: Totals | None = None
    is_holding: bool = False
    taken: TakenHold | None = None
    texts: int | None = None
    caches_long: bool = False
    sending: AbstractAsyncContextManager[UpstreamReply] | None = None
    sent_at: float | None = None
    head_at: float | None = None
    status: int = CLIENT_CLOSED
    outcome: Outcome = "client_left"
    fault: GatewayError | None = None
    answer: ParsedResponse | None = None
    reader: Callable[[], ParsedResponse] | None = None
    billed: bool = False
    is_unheard: bool = False
    is_event_stream: bool = False
    response_bytes: int = 0
    notes: dict[str, str] = field(default_factory=dict)
    is_findable: bool = False
    record: CallRecord | None = None
    fetched: CallRecord | None = None
    unread_thinking: tuple[UnreadableThinking, ...] = ()
    totals: Totals | None = None
    is_settled: bool = False

    @classmethod
    def of(cls, incoming: Incoming, started_at: float) -> CallState:
        """Of a call that has just come in."""
        purpose, parent = incoming.purpose, header(incoming.headers, b"traceparent")
        if purpose is None:
            return cls(incoming, started_at, notes={"traceparent": parent.decode()} if _TRACE.fullmatch(parent) else {})
        return cls(incoming, started_at, derived=purpose.derived, notes=dict(purpose.notes))

    @property
    def dialect(self) -> Dialect:
        """The format that the client speaks, and the provider too."""
        return self.incoming.endpoint.dialect

    @property
    def is_billed_later(self) -> bool:
        """Whether what it begins is billed after its answer; unless it `is_fetched_later`, no session sees that."""
        endpoint = self.incoming.endpoint
        return endpoint.deferred or (self.call is not None and is_in_background(self.call.fields, endpoint.wire))

    @property
    def is_fetched_later(self) -> bool:
        """Whether what is billed later is told when it is fetched, through the gateway."""
        return self.call is not None and is_fetched_later(self.call.fields, self.incoming.endpoint.wire)

    @property
    def unseen(self) -> tuple[str, ...]:
        """What in the request stands for content that only the provider has."""
        if self.call is None:
            return ()
        if self.found_at_provider is not None:
            return self.found_at_provider
        # Where results are shown shorter, the contents are not all that came.
        contents = self.asked.contents if self.asked is not None and self.showing is None else None
        return kept_by_provider(self.call.fields, self.incoming.endpoint.wire, contents)

    @property
    def sent_messages(self) -> tuple[bytes, ...]:
        """The messages to send, as planned."""
        if self.plan is not None and self.plan.messages is not None:
            return self.plan.messages
        return (self.asked.contents.messages if self.asked is not None else None) or ()

    @property
    def adds_tool_changes(self) -> bool:
        """Whether system messages of the gateway that change the tools are sent."""
        return self.thinking is not None and self.thinking.adds_tool_changes

    @property
    def has_next(self) -> bool:
        """Whether another route is left after the current one."""
        return self.route is not self.routes[-1]

    def work(self, *, is_so: bool) -> None:
        """Note whether the provider that is being tried may be at work on it. See `WorkObserver`."""
        self.is_at_work = is_so
        self.at_work(is_so=is_so)

    def kept_by(self, *routes: Route) -> int:
        """Tokens of the earlier answer that the call goes on from, at the one of these providers that keeps most."""
        ids = continued_from(self.call.fields, self.incoming.endpoint.wire) if self.call is not None else ()
        return max(self.remembered.kept_by(route.provider, ids) for route in routes) if ids else 0

    def output_limit(self, fields: AnyFields, wire: Wire) -> int | None:
        """The most tokens that an answer may have, as the call says or its step."""
        asked, step = output_limit(fields, wire), self.limit_to_set(fields, wire)
        return asked if step is None else step

    def limit_to_set(self, fields: AnyFields, wire: Wire) -> int | None:
        """The limit of an answer that the step sets; None: it sets none, or the call itself asks for no more."""
        most = self.step.max_output_tokens if self.step is not None else None
        if most is None:
            return None
        asked, most = output_limit(fields, wire), max(most, least_output(fields, wire))
        return most if asked is None or most < asked else None

    def instead(self, *routes: Route, besides: bool = True) -> list[Route]:
        """The models that providers of these routes may call in the place of the call's own, as it tells them.

        `besides`: and those that its own one may ask, which never answer the call.
        """
        named = (*self.others, *self.advisors) if besides else self.others
        if not named:
            return []
        providers = {route.provider for route in routes}
        return [route for route in named if route.provider in providers]

    @property
    def is_far_over(self) -> bool:
        """Return whether more tokens came beyond what is held than a stream brings between two looks."""
        lease = self.taken.lease if self.taken is not None else None
        return lease is not None and lease.delivered() > lease.end + lease.look_bytes

    def client_left(self) -> None:
        """Nobody waits for the answer. Where a stream has said why it ends, its client has heard all that matters."""
        has_ended = self.is_event_stream and self.reader is not None and self.reader().finish_reason is not None
        self.is_unheard = self.record is None and not has_ended

    async def hang_up(self) -> None:
        """Give the connection to the provider back, where one is in use."""
        sending, self.sending = self.sending, None
        if sending is not None:
            await sending.__aexit__(None, None, None)
