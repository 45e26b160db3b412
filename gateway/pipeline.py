"""One call, top to bottom. This is the only place that knows the order.

Read the body -> name the session -> find the route -> plan what to send -> hold what it may cost -> send -> meter the
answer -> settle -> tell the observers. Where the plan needs a summary first, an exchange of our own goes the same way
before the call does.

An `Exchange` is entered for the way down and left after the answer was passed on. Whatever happens in between (the
client leaves, the provider breaks off, the process is told to stop), leaving it settles, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import partial
from math import ceil
from types import TracebackType
from typing import Final, Literal, cast

from gateway.budgeting import Book, Budgets, Taken
from gateway.core import identity
from gateway.core.counting.calibration import LastTurn
from gateway.core.counting.heuristic import estimate_tokens
from gateway.core.errors import (
    BudgetExhausted,
    GatewayError,
    GatewayFault,
    InvalidRequest,
    SessionRequired,
    StoreUnavailable,
    UnknownModel,
    UpstreamProtocolError,
    UpstreamTimeout,
)
from gateway.core.fitting.summary import NeedsSummary, Use
from gateway.core.forwarding import (
    CREDENTIALS,
    Provider,
    check_credential,
    header,
    holds_credential,
    request_headers,
    response_headers,
)
from gateway.core.ledger import NO_LIMITS, Limits
from gateway.core.modes import ResponseMode, mode_for, stricter
from gateway.core.plan import NO_WISHES, Plan, Wishes
from gateway.core.ports import (
    LOST,
    CallRecord,
    ContextRecord,
    Headers,
    Observer,
    Outgoing,
    SessionKey,
    Store,
    Upstream,
    UpstreamReply,
)
from gateway.core.pricing import cost
from gateway.core.routing import ModelFacts, Route, Routes
from gateway.core.session import Remembered
from gateway.core.spending import (
    NO_KEY_BUDGET,
    Allowance,
    Charged,
    KeyBudget,
    Need,
    accounts_of,
    affordable_input,
    allowance,
    is_limited,
    rate_of,
    remaining_fraction,
    spent_by,
)
from gateway.core.usage import Charge, Totals, Usage
from gateway.dialects import Endpoint, endpoint
from gateway.dialects.base import Answer, Call, StreamMeter
from gateway.dialects.contents import MOST_MESSAGES, Contents, contents_of, output_limit, with_messages
from gateway.dialects.fields import decode
from gateway.dialects.length_error import LengthError, length_error
from gateway.dialects.limits import answers_asked, service_tier, with_limit
from gateway.dialects.openai_chat import completion_request, completion_text
from gateway.dialects.texts import estimate
from gateway.planning import Asked, Planner
from gateway.results import Results
from gateway.stores.learner import Learner
from gateway.stores.settler import Settler
from gateway.upstream.pieces import AlreadyRead, chain, for_a_while, is_packed, unpacked, without_packing

logger = logging.getLogger("gateway")

#: an answer that is read whole before it is passed on; a larger one is passed on as it comes, and estimated
MAX_WHOLE_ANSWER: Final = 64 * 1024 * 1024
_MAX_ERROR_BODY: Final = 1024 * 1024
_REMEMBERED: Final = 1024
_REMEMBERED_S: Final = 3600.0
#: statuses under which a provider says that it does not take a request as it is; llama.cpp's server says so with 500
_TELLING: Final = frozenset({400, 413, 422, 500})
#: a smaller window is a provider's odd word for something else
_LEAST_WINDOW: Final = 256
#: what is asked for where a provider refused a request for its length and did not say how long it may be
_SHORTER: Final = 0.8
#: how long a provider may keep a stream open after its own end mark, until we stop reading for the connection's sake
_AFTER_END_S: Final = 2.0
#: a call waits so long for a summary
SUMMARY_S: Final = 60.0
#: how the length of an answer is bounded: as most know it, and as some insist on
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
#: a summary may be so many times longer than it was asked to be
_LONGEST_SUMMARY: Final = 2
_CLIENT_CLOSED: Final = 499
#: over an estimate that only knows texts, not what frames them
_UNWEIGHED_MARGIN: Final = 1.25
_BUDGET_END: Final = "budget_end"
_TOO_SLOW: Final = "too_slow"
#: outcomes of calls that nobody waited for to the end
_LEFT: Final = frozenset({"client_left", "cut_at_shutdown", _TOO_SLOW})
_LONGEST_MODEL_NAME: Final = 256
#: the head of the form part that names the model, up to where its value begins
_MODEL_PART: Final = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]{0,200};[ \t]*name="?model"?[ \t]*(?:;[^\r\n]*)?\r\n(?:[^\r\n]+\r\n){0,8}\r\n',
    re.IGNORECASE,
)

_NOTHING_REMEMBERED: Final = Remembered()


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """The `sessions:` settings that concern a call."""

    id_headers: tuple[str, ...] = ("x-session-id",)
    on_missing: Literal["derive", "require", "none"] = "derive"
    stream_totals: bool = True
    estimate_missing: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    `models`: shell patterns it may use, empty for all; `key_headers`: where its client key stood; `budget`: the key's.
    """

    namespace: str
    models: tuple[str, ...] = ()
    key_headers: frozenset[bytes] = frozenset()
    budget: KeyBudget = NO_KEY_BUDGET


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a call of the gateway's own is for. `derived`: as its session; `notes`: in its record."""

    operation: str
    derived: bool
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Directives:
    """What the headers of a call ask of the gateway.

    `context`: how it is made to fit; `budget`: declared for the session; `mode`: how tool results are shown at the
    least; `parent`: the session that this one works for.
    """

    context: Wishes = NO_WISHES
    budget: Limits = NO_LIMITS
    mode: ResponseMode = "raw"
    parent: str | None = None


NO_DIRECTIVES: Final = Directives()


@dataclass(frozen=True, slots=True)
class Incoming:
    """One client request, its body read.

    `call_id` is ours and unique, `request_id` may be the client's; `path` is relative to `/v1/` and still encoded;
    `started` is monotonic. `refused`: why its body was not read; it is answered with that. `directives`: what its
    headers ask of the gateway. `purpose`: it is the gateway's own, in the name of the caller.
    """

    call_id: str
    request_id: str
    method: str
    path: str
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    unpacked: bool
    endpoint: Endpoint
    caller: Caller
    path_session: str | None
    started: float
    refused: GatewayError | None = None
    directives: Directives = NO_DIRECTIVES
    purpose: Purpose | None = None


@dataclass(slots=True)
class Reply:
    """What the client gets. `body` as bytes is whole; an iterator is passed on as it comes.

    `totals` are the session's, after this call where `final`, else before it. `broken` turns true while a body is being
    passed on: it must not be ended as if it were complete.
    """

    status: int
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    session: SessionKey | None = None
    totals: Totals | None = None
    charge: Charge | None = None
    final: bool = False
    upstream_error: bool = False
    fault: GatewayError | None = None
    context: ContextRecord | None = None
    allowance: Allowance | None = None
    mode: ResponseMode | None = None
    overhead_s: float = 0.0
    broken: bool = False


class Gateway:
    """What every call shares. Everything is handed in; nothing here knows a class of an adapter."""

    def __init__(
        self,
        *,
        routes: Routes,
        providers: Mapping[str, Provider],
        upstreams: Mapping[str, Upstream],
        facts: Callable[[Route], ModelFacts],
        store: Store,
        settler: Settler,
        planner: Planner,
        budgets: Budgets,
        results: Results,
        learner: Learner,
        observers: Sequence[Observer],
        policy: SessionPolicy,
        totals_comment: Callable[[Totals, Charge | None, Allowance | None], bytes],
        new_id: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        summary_s: float = SUMMARY_S,
    ) -> None:
        self.routes = routes
        self.providers = providers
        self.upstreams = upstreams
        self.facts = facts
        self.store = store
        self.settler = settler
        self.planner = planner
        self.budgets = budgets
        self.results = results
        self.learner = learner
        self.observers = observers
        self.policy = policy
        self.totals_comment = totals_comment
        self.new_id = new_id
        self.clock = clock
        self.wall = wall
        self.summary_s = summary_s
        #: (provider, model) -> when it refused `stream_options.include_usage`
        self._no_stream_usage: dict[tuple[str, str], float] = {}

    def handle(self, incoming: Incoming) -> Exchange:
        """The exchange for one request: `async with gateway.handle(incoming) as reply`; raises no GatewayError.

        A task in it that is cancelled is charged for what was delivered; the cancel's message, where it has one, is the
        outcome in its record, else `client_left`.
        """
        return Exchange(self, incoming)

    def remember_refusal(self, route: Route) -> None:
        """This model's provider does not know `stream_options`."""
        if len(self._no_stream_usage) >= _REMEMBERED:
            del self._no_stream_usage[next(iter(self._no_stream_usage))]
        self._no_stream_usage[route.provider, route.model] = self.clock()

    def refuses_usage(self, route: Route) -> bool:
        """Whether it refused lately."""
        since = self._no_stream_usage.get((route.provider, route.model))
        return since is not None and self.clock() - since < _REMEMBERED_S


@dataclass(slots=True)
class _Progress:
    """What became of a call so far; the record is made of it."""

    call: Call | None = None
    session: SessionKey | None = None
    derived: bool = False
    route: Route = field(default_factory=lambda: Route("", ""))
    asked: Asked | None = None
    remembered: Remembered = _NOTHING_REMEMBERED
    plan: Plan | None = None
    charged: Charged = field(default_factory=lambda: Charged(""))
    book: Book = field(default_factory=Book)
    taken: Taken | None = None
    mode: ResponseMode | None = None
    is_shown: bool = False
    use: Use = "ask"
    sent_at: float | None = None
    head_at: float | None = None
    status: int = _CLIENT_CLOSED
    outcome: str = "client_left"
    fault: GatewayError | None = None
    answer: Answer | None = None
    reader: Callable[[], Answer] | None = None
    billed: bool = False
    is_event_stream: bool = False
    response_bytes: int = 0
    notes: dict[str, str] = field(default_factory=dict)


class Exchange:
    """One call on its way. An async context manager: entering goes down to the provider, leaving settles."""

    def __init__(self, gateway: Gateway, incoming: Incoming) -> None:
        self._gateway = gateway
        self._in = incoming
        self._dialect = incoming.endpoint.dialect
        self._started_at = gateway.wall()
        self._sending: AbstractAsyncContextManager[UpstreamReply] | None = None
        self._p = _Progress()
        if incoming.purpose is not None:
            self._p.derived = incoming.purpose.derived
            self._p.notes.update(incoming.purpose.notes)
        self._record: CallRecord | None = None
        self._totals: Totals | None = None
        self._settled = False

    async def __aenter__(self) -> Reply:
        try:
            try:
                return await self._down()
            except GatewayError as fault:
                await self._hang_up()
                return await self._refuse(fault)
        except BaseException as error:
            await self._leave(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and not self._settled:
            self._p.outcome, self._p.status = "internal_error", 500
        elif isinstance(error, asyncio.CancelledError) and error.args:
            self._p.outcome = str(error.args[0])
        try:
            await self._settle()
        finally:
            await self._hang_up()

    async def _hang_up(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            await sending.__aexit__(None, None, None)

    # --- the way down -----------------------------------------------------------------------------------------

    async def _down(self) -> Reply:
        progress, gateway = self._p, self._gateway
        metered = self._in.endpoint.metered
        if metered:
            # First what needs no body, so that even a refused one is answered with its session's totals.
            progress.session = self._named_session()
        if self._in.refused is not None:
            raise self._in.refused
        call = progress.call = self._dialect.read(self._in.body)
        if metered:
            self._identify(call)
            gateway.settler.check()
        route = progress.route = self._route(call)
        provider = gateway.providers[route.provider]
        check_credential(self._in.headers, provider, gateway.providers.values())
        if metered:
            await self._open_book()
        await self._make_ready(call, route)
        before = await self._totals_now() if call.stream else None
        answer = await self._send(call, route, provider)
        if not 200 <= answer.status < 300:  # noqa: PLR2004
            return await self._error_answer(answer)
        progress.billed = metered
        content_type = header(answer.headers, b"content-type").partition(b";")[0].strip().lower()
        if metered and content_type == b"text/event-stream":
            return await self._event_stream(answer, call, before)
        if metered and (content_type.endswith((b"/json", b"+json")) or not content_type):
            return await self._whole_answer(answer)
        return await self._plain_stream(answer, before)

    def _named_session(self) -> SessionKey | None:
        incoming = self._in
        name = incoming.path_session
        if name is None:
            headers: dict[str, str] = {}
            for key, value in incoming.headers:
                headers.setdefault(key.decode("latin-1"), value.decode("latin-1"))
            name = identity.from_headers(headers, self._gateway.policy.id_headers)
        return SessionKey(incoming.caller.namespace, name) if name is not None else None

    def _identify(self, call: Call) -> None:
        progress, policy, namespace = self._p, self._gateway.policy, self._in.caller.namespace
        if progress.session is not None:
            return
        hints = {name: decode(call.fields[name]) for name in identity.BODY_FIELDS if name in call.fields}
        named = identity.from_body(hints) if hints else None
        if named is not None:
            progress.session = SessionKey(namespace, named)
        elif policy.on_missing == "require":
            raise SessionRequired(
                "This gateway keeps a budget per session and the call names none. Send the header "
                f"{policy.id_headers[0] if policy.id_headers else 'x-session-id'}, or use the base URL /s/SESSION/v1."
            )
        elif policy.on_missing == "derive":
            opening = self._dialect.opening(call)
            # A call with nothing that tells conversations apart (embeddings, images) is kept per key and endpoint.
            parts = opening if opening is not None else [self._in.path]
            model = call.model if opening is not None else None
            progress.session = SessionKey(namespace, identity.derive(namespace, model, parts))
            progress.derived = True

    def _route(self, call: Call) -> Route:
        incoming, routes = self._in, self._gateway.routes
        model = call.model or _multipart_model(incoming)
        allowed = incoming.caller.models
        if allowed and not _only_lists(incoming) and not _is_allowed(model, allowed):
            raise UnknownModel(
                f'The client key "{incoming.caller.namespace}" may not use '
                f"{f'the model {model!r}' if model else 'a path that names no model'}; "
                f"it may use {', '.join(allowed)}.",
                param="model",
            )
        if model is not None:
            return routes.resolve(model)
        return Route(routes.without_model(incoming.endpoint.anthropic), "")

    async def _open_book(self) -> None:
        """Read what the session remembers, and how the accounts stand that the call is charged to."""
        progress, gateway, caller = self._p, self._gateway, self._in.caller
        progress.charged = Charged(
            caller.namespace, caller.budget, progress.session, declared=self._in.directives.budget
        )
        if not gateway.settler.is_away:
            try:
                await self._read_book()
            except StoreUnavailable as error:
                gateway.settler.away(error)
            else:
                return
        self._open_blind_book()

    async def _read_book(self) -> None:
        progress, gateway, named = self._p, self._gateway, self._in.directives.parent
        session = progress.session
        if session is not None:
            progress.remembered = await gateway.store.remembered(session)
            known = progress.remembered.state.parent
            if known is not None or named is not None:
                parents = await gateway.budgets.parents(session, known, named)
                progress.charged = replace(progress.charged, parents=parents)
        progress.book = await gateway.budgets.book(progress.charged)

    def _open_blind_book(self) -> None:
        """As the accounts stood when they were last seen.

        Raises:
            StoreUnavailable: no calls are taken while the store is away.
        """
        self._gateway.settler.check()
        charged, named = self._p.charged, self._in.directives.parent
        if named is not None and not charged.parents:
            charged = replace(charged, parents=(SessionKey(charged.namespace, named),))
        self._p.book = self._gateway.budgets.blind_book(charged)
        self._p.notes["store"] = "away: its budget is as it was last seen"

    async def _make_ready(self, call: Call, route: Route) -> None:
        """Decide what is sent, and hold what it may cost. Tool results shrink before a call is refused.

        Raises:
            BudgetFault: even then too little is left.
        """
        modes = self._modes()
        for mode in modes:
            await self._prepare(call, route, mode)
            try:
                await self._reserve(call, route)
            except BudgetExhausted:
                if mode == modes[-1]:
                    raise
            else:
                return

    def _modes(self) -> tuple[ResponseMode, ...]:
        """How tool results are shown: as the budget and the call ask for, and should that be too much."""
        asked, standings = self._in.directives.mode, self._p.book.standings
        if self._in.endpoint.wire != "chat" or self._in.purpose is not None:
            return ("raw",)
        if not self._gateway.budgets.policy.modes or not is_limited(standings):
            return (asked,)
        mode = stricter(asked, mode_for(remaining_fraction(standings)))
        return (mode,) if mode == "handle_only" else (mode, "handle_only")

    async def _prepare(self, call: Call, route: Route, mode: ResponseMode) -> None:
        """Weigh the request and decide what of it is sent."""
        wire, progress, gateway = self._in.endpoint.wire, self._p, self._gateway
        contents = (
            contents_of(call, wire, gateway.planner.known) if wire is not None and self._in.purpose is None else None
        )
        if contents is None:
            if self._in.directives.context.budget is not None and wire == "chat" and self._in.purpose is None:
                raise InvalidRequest(
                    f"A request of more than {MOST_MESSAGES:,} messages is not weighed, so that x-context-budget "
                    "cannot be kept. Send fewer messages, or no budget.",
                    param="messages",
                )
            return
        progress.mode = mode
        contents = await self._shown(contents, mode)
        asked = self._in.directives.context
        facts, output = gateway.facts(route), output_limit(contents.fields)
        affordable = affordable_input(progress.book.standings, output, rate_of(facts.price, 0, None))
        budget = min((one for one in (asked.budget, affordable) if one is not None), default=None)
        progress.asked = Asked(contents, route, facts, Wishes(asked.trim, budget, output), len(call.body))
        progress.plan = await self._plan(progress.asked)
        # Where it is the session's budget that is too small, the ledger says so, with its arithmetic.
        if progress.plan.overflow is not None and budget != affordable:
            raise progress.plan.overflow
        await self._remember(progress.plan)

    async def _shown(self, contents: Contents, mode: ResponseMode) -> Contents:
        """The contents with tool results in this mode."""
        progress, gateway = self._p, self._gateway
        progress.is_shown = False
        if mode == "raw" or contents.messages is None:
            return contents
        shown = await gateway.results.show(contents.messages, mode, progress.session)
        if shown is None:
            return contents
        progress.is_shown = True
        return with_messages(contents, shown, gateway.planner.known)

    async def _reserve(self, call: Call, route: Route) -> None:
        """Hold what the call may cost, before it is sent."""
        progress, gateway = self._p, self._gateway
        if not progress.book.claims:
            return
        need, call_id = partial(self._need, call, route), self._in.call_id
        try:
            progress.taken = await gateway.budgets.reserve(progress.book, call_id, need, self._lost_record)
        except StoreUnavailable as error:
            gateway.settler.away(error)
            self._open_blind_book()
            progress.taken = await gateway.budgets.reserve(progress.book, call_id, need, self._lost_record)
        progress.book = progress.taken.book

    def _need(self, call: Call, route: Route) -> Need:
        """What the call may take at the most."""
        facts, plan, wire = self._gateway.facts(route), self._p.plan, self._in.endpoint.wire
        fields = {name: bytes(raw) for name, raw in call.fields.items()}
        tokens = plan.safe_tokens if plan is not None else self._unweighed()
        return Need(
            tokens,
            output=output_limit(fields),
            model_output=facts.output,
            answers=answers_asked(fields),
            has_output=wire is not None,
            rate=rate_of(facts.price, tokens, service_tier(fields)),
            is_priced=facts.price is not None or not route.model,
            model=route.model,
            can_grow=call.stream and wire == "chat",
        )

    def _unweighed(self) -> int:
        """Input tokens to hold for a call that is not weighed; reading megabytes is worth it where a budget is kept."""
        if not is_limited(self._p.book.standings):
            return 0
        return ceil(self._input_estimate() * _UNWEIGHED_MARGIN)

    def _lost_record(self, need: Need) -> CallRecord:
        """The record of the call should its worker be gone before it is settled: it was sent, and is paid for."""
        record = self._make_record()
        usage = Usage.of(need.input_tokens, 0)
        charge = Charge(usage, "estimated", need.rate.input * need.input_tokens if need.rate is not None else None)
        context = replace(record.context, fates=()) if record.context is not None else None
        spent = spent_by(charge, self._gateway.budgets.policy.cached_weight)
        return replace(record, outcome=LOST, charge=charge, spent=spent, context=context)

    async def _plan(self, asked: Asked, window: int | None = None) -> Plan:
        """What to send, after a summary was made where one is needed; a call waits for one summary at most."""
        progress, planner = self._p, self._gateway.planner
        plan = await planner.plan(asked, progress.remembered, window, use=progress.use)
        if plan.needs is None:
            return plan
        progress.use = "off"
        try:
            await self._summarize(plan.needs)
        except (GatewayError, _NoSummaryError) as error:
            progress.notes["summary"] = f"none: {error}"
        return await planner.plan(asked, progress.remembered, window, use=progress.use)

    async def _summarize(self, needs: NeedsSummary) -> None:
        """Have a summary made, and kept before it is used.

        Raises:
            GatewayError, _NoSummaryError: there is none, and why.
        """
        progress, gateway = self._p, self._gateway
        if progress.session is None:
            raise _NoSummaryError("there is no session to keep it in")
        call_id, text = await self._summary_of(needs, progress.session)
        state = await gateway.store.update(progress.session, lambda state: state.with_summary(needs.id, text))
        progress.remembered = replace(progress.remembered, state=state)
        progress.use = "known"
        progress.notes["summary"] = f"of {needs.count} messages, made by call {call_id}"

    async def _summary_of(self, needs: NeedsSummary, session: SessionKey) -> tuple[str, str]:
        """The id of the call that made it, and its text."""
        headers = self._summary_headers(self._gateway.routes.resolve(needs.model))
        async with _patience(self._gateway.summary_s):
            for field_name in _LIMITS:
                body = completion_request(needs.model, needs.messages, (field_name, needs.max_tokens))
                call_id = self._gateway.new_id()
                async with self._gateway.handle(self._of_our_own(call_id, session, headers, body)) as reply:
                    answer = reply.body if isinstance(reply.body, bytes) else b""
                if reply.status not in _TELLING or _LIMITS[-1].encode() not in answer:
                    break
        if reply.status != 200:  # noqa: PLR2004
            raise _NoSummaryError(f"call {call_id} was answered with the status {reply.status}")
        text = completion_text(answer)
        if text is None:
            raise _NoSummaryError(f"call {call_id} was answered without a text")
        if estimate_tokens(text) > _LONGEST_SUMMARY * needs.max_tokens:
            raise _NoSummaryError(f"call {call_id} was answered with far more than was asked for")
        return call_id, text

    def _summary_headers(self, route: Route) -> Headers:
        """The headers of a call for a summary: with the gateway's own credential, or the caller's where it belongs."""
        provider, caller = self._gateway.providers[route.provider], self._in.caller
        headers: Headers = [(b"content-type", b"application/json")]
        if holds_credential(provider):
            return headers
        own = [pair for pair in self._in.headers if pair[0] in CREDENTIALS and pair[0] not in caller.key_headers]
        # Where the call itself goes, a call without a credential goes too: many local servers ask for none.
        if route.provider != self._p.route.provider:
            raise _NoSummaryError(f"the gateway holds no key of {route.provider}")
        return headers + own

    def _of_our_own(self, call_id: str, session: SessionKey, headers: Headers, body: bytes) -> Incoming:
        return Incoming(
            call_id=call_id,
            request_id=call_id,
            method="POST",
            path="chat/completions",
            query="",
            headers=headers,
            body=body,
            unpacked=False,
            endpoint=endpoint("POST", "chat/completions"),
            # What a client key may call says nothing of what the gateway may.
            caller=Caller(session.namespace, budget=KeyBudget(self._in.caller.budget.limits)),
            path_session=session.id,
            started=self._gateway.clock(),
            directives=Directives(budget=self._in.directives.budget),
            purpose=Purpose("summary", self._p.derived, {"for": self._in.call_id}),
        )

    async def _remember(self, plan: Plan) -> None:
        """Keep a new decision before it is sent: another worker, or this one after a restart, must send the same."""
        epoch, session = plan.epoch, self._p.session
        if epoch is None or session is None:
            return
        texts = self._p.remembered.state.summaries
        try:
            await self._gateway.store.update(
                session, lambda state: state.with_epoch(epoch, instead_of=plan.resumed, summaries=texts)
            )
        except StoreUnavailable:
            # The next turn decides anew: it costs the provider's cache, and is no reason to refuse this one.
            self._p.notes["context"] = "decision not kept: the store is away"

    async def _send(self, call: Call, route: Route, provider: Provider) -> UpstreamReply:
        gateway = self._gateway
        ask = call.stream and not call.usage_asked and not gateway.refuses_usage(route)
        answer = await self._attempt(call, route, provider, ask_usage=ask)
        if answer.status not in _TELLING:
            return answer
        body = await self._read_error(answer)
        if ask and (b"stream_options" in body or b"include_usage" in body):
            await self._hang_up()
            answer = await self._attempt(call, route, provider, ask_usage=False)
            # Only now is it sure that our field was the reason, and not a client's words that the error repeats.
            if 200 <= answer.status < 300:  # noqa: PLR2004
                gateway.remember_refusal(route)
                self._p.notes["stream_usage"] = "refused by the provider"
            return answer
        found = length_error(answer.status, body)
        if found is not None and await self._fit_again(found):
            await self._hang_up()
            return await self._attempt(call, route, provider, ask_usage=ask)
        return AlreadyRead(answer.status, without_packing(answer.headers), body)

    async def _fit_again(self, found: LengthError) -> bool:
        """Learn from a provider's refusal for length; whether there is now something shorter to send."""
        progress, gateway = self._p, self._gateway
        asked, plan = progress.asked, progress.plan
        if asked is None or plan is None:
            return False
        context = plan.context
        if found.asked is not None:
            residual = found.asked - context.estimate
            gateway.learner.report(context.key, residual)
            progress.remembered = replace(progress.remembered, last_turn=LastTurn(context.key, residual))
        most = max(found.asked or 0, context.tokens) + (found.output or asked.wishes.output or 0)
        if found.limit is not None and _LEAST_WINDOW <= found.limit < most:
            gateway.learner.report_window(asked.route.provider, asked.route.model, found.limit)
            window = found.limit
        else:
            window = int(context.tokens * _SHORTER)
        again = await self._plan(asked, window)
        progress.notes["context"] = "the provider refused it for its length"
        if again.overflow is not None or again.messages in (None, plan.messages):
            return False
        progress.plan = again
        progress.notes["context"] += ", and it was fitted again"
        await self._remember(again)
        return True

    def _body(self, call: Call, model: str, *, ask_usage: bool) -> bytes:
        """What is sent: the client's own bytes where nothing has to change."""
        progress = self._p
        messages = progress.plan.messages if progress.plan is not None else None
        if messages is None and progress.asked is not None and (progress.is_shown or progress.asked.contents.marked):
            messages = progress.asked.contents.messages
        taken, wire = progress.taken, self._in.endpoint.wire
        changes = None
        if taken is not None and taken.limit is not None and wire is not None:
            usual = self._gateway.providers[progress.route.provider].limit_field
            changes = with_limit(call.fields, wire, taken.limit, usual)
            progress.notes["output_limit"] = f"{taken.limit}, as the budget allows"
        return self._dialect.write(call, model, ask_usage=ask_usage, messages=messages, changes=changes)

    async def _attempt(self, call: Call, route: Route, provider: Provider, *, ask_usage: bool) -> UpstreamReply:
        incoming, progress, gateway = self._in, self._p, self._gateway
        outgoing = Outgoing(
            incoming.method,
            provider.url(incoming.path, incoming.query),
            request_headers(
                incoming.headers, provider, client_key_headers=incoming.caller.key_headers, unpacked=incoming.unpacked
            ),
            self._body(call, route.model, ask_usage=ask_usage) if route.model else call.body,
        )
        if progress.sent_at is None:
            progress.sent_at = gateway.clock()
        progress.head_at, progress.status = None, _CLIENT_CLOSED
        sending = gateway.upstreams[route.provider].send(outgoing)
        answer = await sending.__aenter__()
        self._sending = sending
        progress.head_at = gateway.clock()
        if not 200 <= answer.status <= 599:  # noqa: PLR2004  # 1xx are no answers, and what is above no status
            raise UpstreamProtocolError(f"The provider answered with the status {answer.status}, which is none.")
        progress.status = answer.status
        return answer

    # --- the answer ---------------------------------------------------------------------------------------------

    async def _error_answer(self, answer: UpstreamReply) -> Reply:
        """A provider's refusal or redirect: passed on as it is, never followed; it costs nothing."""
        body = await self._read_error(answer)
        self._p.outcome = "provider_error"
        self._p.response_bytes = len(body)
        headers = response_headers(answer.headers, unpacked=is_packed(answer))
        reply = self._reply(answer.status, headers, body)
        reply.upstream_error = answer.status >= 400  # noqa: PLR2004
        reply.totals = await self._settle()
        reply.allowance = self._allowance()
        reply.final = True
        return reply

    async def _read_error(self, answer: UpstreamReply) -> bytes:
        body = bytearray()
        async for piece in self._pieces(answer):
            body += piece
            if len(body) > _MAX_ERROR_BODY:
                raise UpstreamProtocolError(
                    f"The provider answered {answer.status} with a body over {_MAX_ERROR_BODY} bytes."
                )
        return bytes(body)

    async def _whole_answer(self, answer: UpstreamReply) -> Reply:
        progress = self._p
        pieces, was_packed, size = self._pieces(answer), is_packed(answer), 0
        read: list[bytes] = []
        # Should it not come to its end: what had arrived by then.
        progress.reader = lambda: _estimated_from(read)
        try:
            async for piece in pieces:
                read.append(piece)
                size += len(piece)
                if size > MAX_WHOLE_ANSWER:
                    return await self._streamed(answer, chain(read, pieces), None)
        except GatewayError:
            progress.outcome = "upstream_broken"
            raise
        body = b"".join(read)
        progress.answer = self._dialect.answer(body)
        progress.outcome = "ok"
        progress.response_bytes = len(body)
        reply = self._reply(answer.status, response_headers(answer.headers, unpacked=was_packed), body)
        reply.totals = await self._settle()
        reply.allowance = self._allowance()
        reply.charge = self._record.charge if self._record else None
        reply.final = reply.totals is not None
        return reply

    async def _event_stream(self, answer: UpstreamReply, call: Call, before: Totals | None) -> Reply:
        # A client that did not ask for usage must not see the chunk that carries it, whoever asked for it.
        meter = StreamMeter(self._dialect.reader(call, drop_usage=not call.usage_asked))
        self._p.reader, self._p.is_event_stream = meter.answer, True
        if self._p.taken is not None:
            self._p.taken.lease.delivered = lambda: meter.answer().output_estimate
        reply = self._reply(answer.status, response_headers(answer.headers, unpacked=is_packed(answer)), b"")
        reply.totals = before if before is not None else await self._totals_now()
        reply.body = self._metered(answer, meter, reply)
        return reply

    async def _metered(self, answer: UpstreamReply, meter: StreamMeter, reply: Reply) -> AsyncIterator[bytes]:
        progress = self._p
        pieces = self._pieces(answer)
        try:
            async for piece in pieces:
                passed = meter.feed(piece)
                if passed:
                    progress.response_bytes += len(passed)
                    yield passed
                if meter.ended:
                    break
                if progress.taken is not None and progress.taken.lease.is_over:
                    yield await self._end_of_budget(meter)
                    return
        except GatewayError as fault:
            progress.outcome, progress.fault = "upstream_broken", fault
            reply.broken = True
            await self._settle()
            yield meter.close() + self._dialect.error_event(fault, self._in.request_id)
            return
        tail = meter.close()
        progress.outcome = "ok" if not meter.answer().error else "provider_error"
        yield await self._closing(tail)
        # The end mark is out; whatever follows changes nothing, and reading it frees the connection for another call.
        async for piece in for_a_while(pieces, _AFTER_END_S):
            yield piece

    async def _end_of_budget(self, meter: StreamMeter) -> bytes:
        """End a stream for which no more could be held, as if the length the client asked for had been reached."""
        self._p.outcome = _BUDGET_END
        tail = meter.cut_short()
        # The provider stops when it is hung up on; what it had made until then it bills, and so do we.
        await self._hang_up()
        return await self._closing(tail)

    async def _closing(self, tail: bytes) -> bytes:
        """Settle before the client can take the stream for ended, then the last bytes, totals in a comment first."""
        totals = await self._settle()
        if totals is None or not self._gateway.policy.stream_totals:
            return tail
        charge = self._record.charge if self._record else None
        return self._gateway.totals_comment(totals, charge, self._allowance()) + tail

    async def _plain_stream(self, answer: UpstreamReply, before: Totals | None) -> Reply:
        """An answer that is not read: files, audio, images."""
        reply = await self._streamed(answer, self._pieces(answer), before)
        length = header(answer.headers, b"content-length")
        if length and not is_packed(answer):
            reply.headers.append((b"content-length", length))
        return reply

    async def _streamed(self, answer: UpstreamReply, pieces: AsyncIterator[bytes], before: Totals | None) -> Reply:
        reply = self._reply(answer.status, response_headers(answer.headers, unpacked=is_packed(answer)), b"")
        reply.totals = before if before is not None else await self._totals_now()
        reply.body = self._pass_on(pieces, reply)
        return reply

    async def _pass_on(self, pieces: AsyncIterator[bytes], reply: Reply) -> AsyncIterator[bytes]:
        progress = self._p
        try:
            async for piece in pieces:
                progress.response_bytes += len(piece)
                yield piece
        except GatewayError as fault:
            progress.outcome, progress.fault = "upstream_broken", fault
            reply.broken = True
            return
        progress.outcome = "ok"
        await self._settle()

    def _pieces(self, answer: UpstreamReply) -> AsyncIterator[bytes]:
        """The body, unpacked where it came packed although we asked for it plain."""
        return unpacked(answer) if is_packed(answer) else answer.chunks()

    # --- refusals and the end --------------------------------------------------------------------------------------

    async def _refuse(self, fault: GatewayError) -> Reply:
        progress = self._p
        progress.fault, progress.status = fault, fault.status
        if progress.outcome != "upstream_broken":
            progress.outcome = "refused" if progress.sent_at is None else "upstream_failed"
        totals = await self._settle()
        headers: Headers = [(b"content-type", b"application/json")]
        reply = self._reply(
            fault.status, headers, self._dialect.error(fault, self._in.request_id, fault.details or None)
        )
        reply.fault = fault
        reply.allowance = self._allowance()
        reply.totals = totals if totals is not None else await self._totals_now()
        reply.final = True
        return reply

    def _reply(self, status: int, headers: Headers, body: bytes | AsyncIterator[bytes]) -> Reply:
        sent_at = self._p.sent_at
        return Reply(
            status,
            headers,
            body,
            session=self._p.session,
            context=self._p.plan.context if self._p.plan is not None else None,
            allowance=self._allowance(),
            mode=self._p.mode,
            overhead_s=(sent_at if sent_at is not None else self._gateway.clock()) - self._in.started,
        )

    def _allowance(self) -> Allowance | None:
        return allowance(self._p.book.standings, self._gateway.budgets.policy.warn_at)

    async def _totals_now(self) -> Totals | None:
        if self._p.session is None or self._gateway.settler.is_away:
            return None
        with contextlib.suppress(StoreUnavailable):
            return await self._gateway.store.totals(self._p.session)
        return None

    async def _settle(self) -> Totals | None:
        """Write the record and its charge. Safe to call again: an interrupted settlement is repeated as it was."""
        if self._settled:
            return self._totals
        if self._record is None:
            self._record = self._make_record()
        taken = self._p.taken
        # A gateway that cannot serve has no time to write that down, but what was held must be given back.
        if taken is not None or (self._record.session is not None and not isinstance(self._p.fault, GatewayFault)):
            self._totals = await self._gateway.settler.settle(self._record)
            if taken is not None:
                self._gateway.budgets.close(taken, self._record.spent)
            await self._read_book_again()
        self._settled = True
        for observer in self._gateway.observers:
            try:
                observer.record(self._record, self._totals)
            except Exception:
                logger.exception("an observer failed")
        return self._totals

    async def _read_book_again(self) -> None:
        """For what the client is told of its budget."""
        book = self._p.book
        if is_limited(book.standings):
            with contextlib.suppress(StoreUnavailable):
                self._p.book = await self._gateway.budgets.again(book)

    def _make_record(self) -> CallRecord:
        progress, incoming, clock = self._p, self._in, self._gateway.clock
        now = clock()
        answer = progress.answer or (progress.reader() if progress.reader else Answer())
        call, charge = progress.call, self._charge(answer)
        return CallRecord(
            call_id=incoming.call_id,
            request_id=incoming.request_id,
            session=progress.session,
            derived_session=progress.derived,
            started_at=self._started_at,
            dialect=self._dialect.name,
            operation=self._operation(call),
            provider=progress.route.provider,
            model=_clean(progress.route.model or (call.model if call else None) or ""),
            response_model=_clean(answer.model) if answer.model else None,
            stream=call.stream if call else False,
            status=progress.status if progress.outcome not in _LEFT else _CLIENT_CLOSED,
            outcome=progress.outcome,
            error_code=progress.fault.code if progress.fault else None,
            finish_reason=_clean(answer.finish_reason) if answer.finish_reason else None,
            tools=tuple(map(_clean, answer.tools)),
            charge=charge,
            overhead_s=(progress.sent_at or now) - incoming.started,
            first_byte_s=progress.head_at - incoming.started if progress.head_at is not None else None,
            duration_s=now - incoming.started,
            request_bytes=len(incoming.body),
            response_bytes=progress.response_bytes,
            notes=progress.notes,
            context=progress.plan.context if progress.plan is not None else None,
            accounts=accounts_of(progress.book.claims),
            spent=spent_by(charge, self._gateway.budgets.policy.cached_weight),
        )

    def _operation(self, call: Call | None) -> str:
        purpose = self._in.purpose
        if purpose is not None:
            return purpose.operation
        return call.operation if call else self._in.endpoint.operation

    def _charge(self, answer: Answer) -> Charge | None:
        """What the provider bills for this call, as far as anyone can know it; None where it bills nothing."""
        progress = self._p
        left_waiting = progress.outcome in _LEFT and progress.sent_at is not None and progress.head_at is None
        if progress.call is None or not (progress.billed or (left_waiting and self._in.endpoint.metered)):
            return None
        reported = answer.usage
        if reported is not None:
            input_missing = reported.input_tokens is None
            usage, source = reported.complete(self._input_estimate() if input_missing else 0, answer.output_estimate)
            return Charge(usage, source, self._cost(usage, answer.service_tier))
        failed_empty = answer.error and not answer.output_estimate
        # A stream of events on a path nobody knows is a model's answer all the same.
        unknown_stream = progress.is_event_stream and answer.output_estimate > 0
        if failed_empty or not (self._in.endpoint.estimated or unknown_stream):
            return None
        if not self._gateway.policy.estimate_missing:
            return Charge(Usage(), "estimated", Decimal(0))
        usage = Usage.of(self._input_estimate(), answer.output_estimate)
        return Charge(usage, "estimated", self._cost(usage, answer.service_tier))

    def _input_estimate(self) -> int:
        call, plan = self._p.call, self._p.plan
        if plan is not None:
            return plan.context.tokens
        return estimate(self._dialect.input_text(call)) if call else 0

    def _cost(self, usage: Usage, tier: str | None) -> Decimal | None:
        price = self._gateway.facts(self._p.route).price
        return cost(usage, price, tier) if price is not None else None


class _NoSummaryError(Exception):
    """There is no summary, and why: for the record of the call that would have been sent with it."""


@asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[None]:
    """So long and no longer. What is cut says so in its record, and is told from what is cut because nobody waits.

    Raises:
        UpstreamTimeout: it took longer.
    """
    task = cast("asyncio.Task[object]", asyncio.current_task())
    timer = asyncio.get_running_loop().call_later(seconds, task.cancel, _TOO_SLOW)
    try:
        yield
    except asyncio.CancelledError as error:
        if error.args != (_TOO_SLOW,) or task.uncancel() > 0:
            raise
        raise UpstreamTimeout(f"it took longer than {seconds:g} s") from None
    finally:
        timer.cancel()


def _estimated_from(pieces: list[bytes]) -> Answer:
    return Answer(output_estimate=int(estimate_tokens(b"".join(pieces).decode("utf-8", "replace"))))


def _only_lists(incoming: Incoming) -> bool:
    """Many clients ask for the list of models before anything else; it costs nothing."""
    return incoming.method in ("GET", "HEAD") and incoming.path.partition("/")[0] == "models"


def _is_allowed(model: str | None, patterns: Sequence[str]) -> bool:
    return model is not None and any(fnmatchcase(model, pattern) for pattern in patterns)


def _multipart_model(incoming: Incoming) -> str | None:
    """The `model` field of a form, where one of the first parts holds it (audio, images)."""
    if not header(incoming.headers, b"content-type").startswith(b"multipart/form-data"):
        return None
    found = list(_MODEL_PART.finditer(incoming.body))
    if len(found) > 1:
        raise InvalidRequest('The form holds more than one part named "model". Send it once.', param="model")
    if not found:
        return None
    start = found[0].end()
    end = incoming.body.find(b"\r\n", start, start + _LONGEST_MODEL_NAME)
    return incoming.body[start:end].decode("utf-8", "replace").strip() or None if end > 0 else None


def _clean(text: str) -> str:
    """A foreign name as it may stand in a record: no lone surrogates, no control characters, bounded."""
    return "".join(char if char.isprintable() else "?" for char in text[:256].encode("utf-8", "replace").decode())
