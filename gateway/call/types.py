"""Define the values of a call: the request, the caller, what is planned and held for it, and the reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from gateway.core.calling_agent import CallingAgent
from gateway.core.context_budget import NO_OPTIONS, ContextOptions, beta_of
from gateway.core.counting.counted import CountedRequest, LearnedCorrections, count_tokens
from gateway.core.counting.overhead import Overhead
from gateway.core.errors import GatewayError
from gateway.core.http.gateway_headers import SESSION
from gateway.core.http.headers import Headers
from gateway.core.ledger.arithmetic import NO_LIMITS, Balance, Claim, Hold, Limits
from gateway.core.ledger.charging import NO_KEY_BUDGET, KeyLimits, budgets_in
from gateway.core.ledger.closing import ClosingPolicy
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode, original_of
from gateway.core.modes.summary import MAX_SUMMARIES, SummaryLimits
from gateway.core.record import ContextRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.runaway import Finding
from gateway.core.steps import Agent, ConditionFacts, Step, StepState
from gateway.core.usage import Charge, Totals
from gateway.core.values import dataclass
from gateway.dialects import Endpoint
from gateway.dialects.contents import Contents
from gateway.dialects.tools import ToolOffer
from gateway.stores.leases import Lease


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """The settings under `sessions:` that a call needs.

    Attributes:
        id_headers: headers that may name the session, in order.
        on_missing: what to do if a call names no session.
        stream_totals: send the session's totals at the end of a stream.
        estimate_missing: estimate usage that the provider does not report.
    """

    id_headers: tuple[bytes, ...] = (SESSION,)
    on_missing: Literal["derive", "require", "none"] = "derive"
    stream_totals: bool = True
    estimate_missing: bool = True


@dataclass(frozen=True, slots=True)
class Caller:
    """The client that makes a call.

    Attributes:
        namespace: the namespace of its sessions.
        models: shell patterns of the models that it may use; empty for all.
        key_headers: the headers that contained its client key.
        budget: the budget of its client key.
    """

    namespace: str
    models: tuple[str, ...] = ()
    key_headers: frozenset[bytes] = frozenset()
    budget: KeyLimits = NO_KEY_BUDGET


@dataclass(frozen=True, slots=True)
class Purpose:
    """The purpose of a call that the gateway makes itself.

    Attributes:
        operation: the operation in its record.
        derived: the id of its session was derived.
        notes: notes for its record.
        agent: the agent of the session for which it is made.
    """

    operation: str
    derived: bool
    notes: Mapping[str, str]
    agent: CallingAgent | None = None


@dataclass(frozen=True, slots=True)
class Directives:
    """What the headers of a call ask of the gateway.

    Attributes:
        context: how the request is trimmed.
        budget: the budget that the call declares for its session.
        mode: the response mode of tool results; the budget may require a shorter one.
        parent: the session that this session works for.
        agent: the agent whose steps apply.
        tag: a name by which the usage of the call is added up.
    """

    context: ContextOptions = NO_OPTIONS
    budget: Limits = NO_LIMITS
    mode: ResponseMode = "raw"
    parent: str | None = None
    agent: str | None = None
    tag: str | None = None


NO_DIRECTIVES: Final = Directives()


@dataclass(frozen=True, slots=True)
class Incoming:
    """One client request after its body was read.

    Attributes:
        call_id: the gateway's id, unique.
        request_id: the client's id, or `call_id` if the client sent none.
        method: the HTTP method.
        path: relative to `/v1/`, still percent-encoded.
        query: the query string.
        headers: the headers as received.
        body: the body, decompressed.
        decompressed: the client sent the body compressed.
        endpoint: the endpoint and its wire format.
        caller: the client that makes the call.
        path_session: the session that the path names; None if it names none.
        started: monotonic seconds.
        refused: why the body was not read; the client receives this error.
        directives: what the headers ask of the gateway.
        purpose: set if the gateway makes the call itself, on behalf of the caller.
        provider: set if the call names a provider and no model.
    """

    call_id: str
    request_id: str
    method: str
    path: str
    query: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    decompressed: bool
    endpoint: Endpoint
    caller: Caller
    path_session: str | None
    started: float
    refused: GatewayError | None = None
    directives: Directives = NO_DIRECTIVES
    purpose: Purpose | None = None
    provider: str | None = None


@dataclass(slots=True)
class ActiveStep:
    """The position of a call's agent in its steps.

    Attributes:
        agent: the agent, with its steps.
        facts: the values that the conditions of its steps test.
        state: its position before the call; its position after the call once the used tools are known.
        offer: the tools that the call offers; None if the step does not restrict them.
        callable_tools: those that may be called.
        must_call: one of these must be called.
        is_free: nothing is restricted, because the response calls no tools.
        refused_choice: the model that refused a `tool_choice` with these tools.
        refused_force: the model that refused a forced tool call.
        stray: tools that the response calls although they were not due, or not allowed.
    """

    agent: Agent
    facts: ConditionFacts
    state: StepState
    offer: ToolOffer | None = None
    callable_tools: tuple[str, ...] = ()
    must_call: bool = False
    is_free: bool = False
    refused_choice: Route | None = None
    refused_force: Route | None = None
    stray: tuple[str, ...] = ()

    @property
    def step(self) -> Step | None:
        """Return the active step."""
        return self.agent.step(self.state)


@dataclass(slots=True)
class ClosingCall:
    """A call that is the last one of its session, because it no longer fits the budget.

    Attributes:
        policy: the settings of closing calls.
        refused: fields that the provider has refused, so that they are left out.
    """

    policy: ClosingPolicy
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RequestReport:
    """The values of the request that the headers of its response show.

    Attributes:
        session: the session of the call; None if it has none.
        context: the token counts, and what was trimmed; None if the tokens were not counted.
        mode: the response mode of tool results.
        at_provider: names of what in the request refers to content that only the provider has.
        is_uncounted: the request was sent without counting its tokens, so that it could not be trimmed.
        is_billed_later: the provider bills the call after this response, and no session sees that usage.
        overhead_s: seconds that the gateway needed before it sent the request.
        is_count_estimated: the response is a token count of the gateway itself.
        is_closing: it is the closing call of its session.
        cheaper_model: the model that serves it because little of a budget is left; None if it keeps its own.
        warnings: what runaway protection found.
    """

    session: SessionKey | None = None
    context: ContextRecord | None = None
    mode: ResponseMode | None = None
    at_provider: tuple[str, ...] = ()
    is_uncounted: bool = False
    is_billed_later: bool = False
    overhead_s: float = 0.0
    is_count_estimated: bool = False
    is_closing: bool = False
    cheaper_model: str | None = None
    warnings: tuple[Finding, ...] = ()


NOTHING_TO_REPORT: Final = RequestReport()


def _send_nothing(_: bytes) -> bool:
    return False


@dataclass(slots=True)
class DirectOutput:
    """The client's connection, to which a stream writes while its task sleeps.

    `write`: sends a piece at once, or returns False and sends nothing. The task then yields the piece to the reader of
    the body, which waits until the client can take it. Without such a connection, the task yields all pieces.
    """

    write: Callable[[bytes], bool] = _send_nothing


@dataclass(slots=True)
class ClientResponse:
    """The response that the client receives.

    Attributes:
        status: the HTTP status.
        headers: the headers of the provider or the gateway.
        body: the complete body, or an iterator of chunks that are passed on as they arrive.
        request: the values of the request that its headers show.
        totals: the session's totals: after this call if `is_final`, else before it.
        charge: what the call costs; None if this is not known yet, or nothing is billed.
        is_final: `totals` include this call.
        upstream_error: the provider responded with an error.
        fault: the error of the gateway; None if there is none.
        allowance: what the budgets leave.
        active_step: the position of the call's agent in its steps.
        is_incomplete: the body ended before it was complete. This may change while an iterator is passed on.
        is_event_stream: the body is a stream of events, even if its headers do not say so.
        failure_events: returns the events that end the stream with an error.
        direct: where the body may write its pieces instead of yielding them; None if it yields all.
    """

    status: int
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    request: RequestReport = NOTHING_TO_REPORT
    totals: Totals | None = None
    charge: Charge | None = None
    is_final: bool = False
    upstream_error: bool = False
    fault: GatewayError | None = None
    allowance: Allowance | None = None
    active_step: ActiveStep | None = None
    is_incomplete: bool = False
    is_event_stream: bool = False
    failure_events: Callable[[GatewayError], bytes] | None = None
    direct: DirectOutput | None = None


class RequestCounts(NamedTuple):
    """The token counts of a request before trimming.

    `learned`: what earlier calls taught; `keys`: the keys of its messages (`keys_of`); `overhead`: its tokens outside
    the messages. Both are None if the messages are not an array.
    """

    original: CountedRequest
    learned: LearnedCorrections
    keys: tuple[bytes, ...] | None
    overhead: Overhead | None

    @property
    def without_others(self) -> RequestCounts:
        """Return the counts without what other sessions taught."""
        learned = self.learned.of_session
        original = count_tokens(self.original.request, self.original.estimate, learned, self.original.key)
        return self._replace(original=original, learned=learned)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A request to the planner: what to trim, for which route and limits.

    Attributes:
        contents: the messages and fields to send.
        route: the route that they are sent to.
        facts: the limits and prices of its model.
        options: the limits that this call sets.
        size: bytes of the body.
        salt: the name of a fallback's route, which keeps its trim decisions separate; empty for the first route.
        counts: the token counts of these contents for this route, if they are known already.
        format_name: the name of the format, if it is read as another one (embeddings).
        received: what the client sent; None if `contents` are that.
        keeps_decisions: earlier trim decisions of the conversation stay in force, even if the request would fit now.
        is_compaction: the client compacts its conversation, so that only the window of the model limits the request.
    """

    contents: Contents
    route: Route
    facts: ModelFacts
    options: ContextOptions
    size: int
    salt: str = ""
    counts: RequestCounts | None = None
    format_name: str = ""
    received: Contents | None = None
    keeps_decisions: bool = False
    is_compaction: bool = False

    @property
    def is_changed(self) -> bool:
        """Return whether the contents differ from what the client sent, such as shortened results."""
        return self.received is not None

    @property
    def limit_model(self) -> str:
        """Return the name under which limits of the model are learned.

        It includes the larger window that the call asks for, as other limits apply then.
        """
        beta = beta_of(self.facts, self.options)
        return self.route.model if beta is None else f"{self.route.model}\n{beta}"


class PendingExtract(NamedTuple):
    """A tool result that is shown as an extract until its summary is decided.

    `position`: the index of its message; `raw`: the unchanged message; `limits`: how long its summary may be.
    """

    position: int
    raw: bytes
    handle: str
    limits: SummaryLimits


class KeptContent(NamedTuple):
    """The content that a handle refers to: what `form` leaves out of a message. `raw`: the unchanged message."""

    raw: bytes
    form: ResponseMode

    @property
    def text(self) -> str:
        """Return the text to store."""
        return original_of(self.raw, self.form)


class ShownResults(NamedTuple):
    """The messages of a request after its tool results were shown in response modes.

    Attributes:
        messages: the messages to send, one for each that was received.
        forms: the form of each message; `raw` if it is unchanged.
        texts: the texts to store before the request is sent, by handle.
        pending: results that may be summarized first, in order.
    """

    messages: tuple[bytes, ...]
    forms: tuple[ResponseMode, ...]
    texts: Mapping[str, KeptContent]
    pending: tuple[PendingExtract, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many messages are shown in each form except `raw`."""
        return {form: number for form, number in Counter(self.forms).items() if form != "raw"}

    @property
    def extra_tokens(self) -> int:
        """Return the tokens by which summaries may be longer than the extracts that are shown so far."""
        return sum(sorted(result.limits.extra_tokens for result in self.pending)[-MAX_SUMMARIES:])


@dataclass(frozen=True, slots=True)
class CallAccounts:
    """The accounts of a call and their balances when they were read. Created with `of`.

    Attributes:
        claims: the accounts.
        balances: the balance of each account.
        budgets: the balances of accounts with a budget in force (`budgets_in`).
        is_stale: the store is unavailable, and the balances are those that this worker saw last.
    """

    claims: tuple[Claim, ...] = ()
    balances: tuple[Balance, ...] = ()
    budgets: tuple[Balance, ...] = ()
    is_stale: bool = False

    @classmethod
    def of(cls, claims: tuple[Claim, ...], balances: tuple[Balance, ...], *, is_stale: bool = False) -> CallAccounts:
        """Return the accounts with these balances."""
        return cls(claims, balances, budgets_in(balances), is_stale)


@dataclass(frozen=True, slots=True)
class TakenHold:
    """The reservation of a call.

    Attributes:
        hold: what is reserved; None if no budget limits the call.
        response_tokens: tokens reserved for each response (`Hold`).
        lease: keeps the hold alive.
        limit: the output limit to send with the call; None if it needs none.
        accounts: the accounts after the hold was taken.
    """

    hold: Hold | None
    response_tokens: int
    lease: Lease
    limit: int | None
    accounts: CallAccounts

    @property
    def final_response_tokens(self) -> int | None:
        """Return the tokens reserved for each response; None if nothing is reserved, or the hold can still grow."""
        return self.response_tokens if self.hold is not None and not self.lease.step else None
