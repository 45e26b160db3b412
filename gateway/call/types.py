"""Define the values of a call: the request, the caller, what is planned and held for it, and the reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from gateway.core.context_budget import NO_OPTIONS, ContextOptions, beta_of
from gateway.core.counting.counted import CountedRequest, Learned, count_tokens
from gateway.core.counting.overhead import Overhead
from gateway.core.errors import GatewayError
from gateway.core.http.gateway_headers import SESSION
from gateway.core.http.headers import Headers
from gateway.core.ledger.arithmetic import NO_LIMITS, Balance, Claim, Hold, Limits
from gateway.core.ledger.charging import NO_KEY_BUDGET, KeyLimits, budgets_in
from gateway.core.ledger.refusals import Allowance
from gateway.core.ledger.session_key import SessionKey
from gateway.core.modes import ResponseMode, original
from gateway.core.modes.summary import MOST, SummaryLimits
from gateway.core.record import ContextRecord
from gateway.core.routing import ModelFacts, Route
from gateway.core.steps import Agent, ConditionFacts, Step, StepState
from gateway.core.usage import Charge, Totals
from gateway.core.values import dataclass
from gateway.dialects import Endpoint
from gateway.dialects.contents import Contents
from gateway.dialects.tools import ToolOffer
from gateway.stores.leases import Lease


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    """The `sessions:` settings that concern a call."""

    id_headers: tuple[bytes, ...] = (SESSION,)
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
    budget: KeyLimits = NO_KEY_BUDGET


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a call of the gateway's own is for.

    `operation`: how it is recorded; `derived`: whether its session's id was derived; `notes`: go into its record.
    """

    operation: str
    derived: bool
    notes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Directives:
    """What the headers of a call ask of the gateway.

    `context`: how it is made to fit; `budget`: declared for the session; `mode`: tool results are shown in this mode or
    a shorter one; `parent`: the session that this one works for; `agent`: whose steps it takes.
    """

    context: ContextOptions = NO_OPTIONS
    budget: Limits = NO_LIMITS
    mode: ResponseMode = "raw"
    parent: str | None = None
    agent: str | None = None


NO_DIRECTIVES: Final = Directives()


@dataclass(frozen=True, slots=True)
class Incoming:
    """One client request, its body read.

    `call_id` is ours and unique, `request_id` may be the client's; `path` is relative to `/v1/` and still encoded;
    `decompressed`: the body was sent compressed; `started`: monotonic seconds. `refused`: why its body was not read,
    which is the response. `purpose`: set if the gateway makes the call itself, for the caller. `provider`: set if the
    call names a provider and no model.
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
    """Where a call's agent is in its steps.

    Attributes:
        agent: its steps.
        facts: what its conditions look at.
        state: before the call; after it, once the tools are known that it used.
        offer: the tools that the call offers, where they are held to a step.
        keep: those that may be called.
        must: one of these has to be called.
        is_free: nothing is restricted, because the response calls no tools.
        refused: the model that refused a `tool_choice` with these tools.
        unforced: the model that refused a forced tool call.
        stray: tools that the answer calls though they were not due, or not allowed.
    """

    agent: Agent
    facts: ConditionFacts
    state: StepState
    offer: ToolOffer | None = None
    keep: tuple[str, ...] = ()
    must: bool = False
    is_free: bool = False
    refused: Route | None = None
    unforced: Route | None = None
    stray: tuple[str, ...] = ()

    @property
    def step(self) -> Step | None:
        """The active step."""
        return self.agent.step(self.state)


@dataclass(slots=True)
class ClientResponse:
    """What the client gets. `body` as bytes is whole; an iterator is passed on as it comes.

    `unseen`: what in the request stands for content that only the provider has; `is_unfitted`: it was sent unweighed;
    `is_unmetered`: it is billed after its answer. `totals` are the session's, after this call where `final`, else
    before it. `broken` turns true while a body is being passed on: it must not be ended as if it were complete.
    `is_events`: the body is a stream of events, which its headers may not say; `failure_events`: makes the
    events that end the stream with an error.
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
    stepped: ActiveStep | None = None
    unseen: tuple[str, ...] = ()
    is_unfitted: bool = False
    is_unmetered: bool = False
    overhead_s: float = 0.0
    broken: bool = False
    is_events: bool = False
    failure_events: Callable[[GatewayError], bytes] | None = None


class RequestCounts(NamedTuple):
    """The token counts of the unchanged request, what earlier calls taught, and the keys of its messages (`keys_of`).

    `keys` and `overhead`, what stands beside the messages: None where these are no array.
    """

    original: CountedRequest
    learned: Learned
    keys: tuple[bytes, ...] | None
    overhead: Overhead | None

    @property
    def alone(self) -> RequestCounts:
        """The same without what other sessions taught."""
        learned = self.learned.alone
        original = count_tokens(self.original.request, self.original.estimate, learned, self.original.key)
        return self._replace(original=original, learned=learned)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One call to be planned.

    `size`: bytes of its body; `salt`: names the model of a fallback, so that decisions for it are kept apart, else
    empty; `counts`: what these contents weighed for this route, where that was found just now; `form`: what the
    format is called, where it may be read as another. `received`: what the client sent, None where that is the same;
    `keeps_decisions`: what was decided for the conversation stays in force, also where it would fit without.
    """

    contents: Contents
    route: Route
    facts: ModelFacts
    options: ContextOptions
    size: int
    salt: str = ""
    counts: RequestCounts | None = None
    form: str = ""
    received: Contents | None = None
    keeps_decisions: bool = False

    @property
    def is_changed(self) -> bool:
        """Whether the contents are not what the client sent: results in a response mode, or thinking removed."""
        return self.received is not None

    @property
    def limited(self) -> str:
        """The model as its limits are learned: with a larger window, for which a call asks, they are other ones."""
        beta = beta_of(self.facts, self.options)
        return self.route.model if beta is None else f"{self.route.model}\n{beta}"


class PendingExtract(NamedTuple):
    """A result that is shown as an extract until it is decided what its summary is.

    `place`: the index of its message; `raw`: the unchanged message.
    """

    place: int
    raw: bytes
    handle: str
    summing: SummaryLimits


class KeptContent(NamedTuple):
    """The content of a handle: what this form leaves out of a message; `raw`: the unchanged message."""

    raw: bytes
    form: ResponseMode

    @property
    def text(self) -> str:
        """As it is stored."""
        return original(self.raw, self.form)


class ShownResults(NamedTuple):
    """What is sent, as many messages as came; and the texts to keep before it is, under their handles.

    `forms`: of each message, `raw` for one that is sent unchanged; `texts`: see `KeptContent`; `open`: results that may
    be summarized first, in order.
    """

    messages: tuple[bytes, ...]
    forms: tuple[ResponseMode, ...]
    texts: Mapping[str, KeptContent]
    open: tuple[PendingExtract, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Return how many messages are shown in each form but `raw`."""
        return {form: number for form, number in Counter(self.forms).items() if form != "raw"}

    @property
    def more(self) -> int:
        """Tokens by which summaries may be longer than the extracts that are shown so far."""
        return sum(sorted(one.summing.more for one in self.open)[-MOST:])


@dataclass(frozen=True, slots=True)
class CallAccounts:
    """The accounts of a call, and how they stood when they were read: see `of`.

    Attributes:
        claims: the accounts.
        balances: how each of them stands.
        budgets: those of them in which a budget is in force, see `budgets_in`.
        is_blind: the store is away, and they stand as this worker last saw them.
    """

    claims: tuple[Claim, ...] = ()
    balances: tuple[Balance, ...] = ()
    budgets: tuple[Balance, ...] = ()
    is_blind: bool = False

    @classmethod
    def of(cls, claims: tuple[Claim, ...], balances: tuple[Balance, ...], *, is_blind: bool = False) -> CallAccounts:
        """Accounts that stand so."""
        return cls(claims, balances, budgets_in(balances), is_blind)


@dataclass(frozen=True, slots=True)
class TakenHold:
    """What was held for a call.

    Attributes:
        hold: None where nothing is limited.
        units: tokens held for each answer, see `Hold`.
        lease: keeps the hold alive.
        limit: the output limit to send with the call; None where it needs none.
        book: the accounts after the hold.
    """

    hold: Hold | None
    units: int
    lease: Lease
    limit: int | None
    book: CallAccounts

    @property
    def whole(self) -> int | None:
        """Tokens held for each answer, where that is final; None where nothing is held, or the hold still grows."""
        return self.units if self.hold is not None and not self.lease.step else None
