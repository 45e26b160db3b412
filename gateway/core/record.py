"""Define the record of a call: outcome, token counts, usage and cost.

The store keeps it, and observers receive it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Literal, get_args

from gateway.core.calling_agent import CallingAgent
from gateway.core.counting.calibration import LastTurn, whole_request_tokens
from gateway.core.counting.context import TokensByTool
from gateway.core.counting.estimate import Source
from gateway.core.errors import BudgetFault, GatewayError
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Amount, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.thinking_origin import UnreadableThinking
from gateway.core.trimming.report import MessageOutcomes
from gateway.core.usage import Charge
from gateway.core.values import dataclass

#: Why the task of a call was cancelled, other than by a client that disconnected: the client read nothing for too long,
#: the gateway stops, or a call that the gateway itself made took too long. It is the message of the cancellation.
CancelReason = Literal["client_stalled", "cut_at_shutdown", "too_slow"]
STALLED: Final[CancelReason] = "client_stalled"
SHUT_DOWN: Final[CancelReason] = "cut_at_shutdown"
TOO_SLOW: Final[CancelReason] = "too_slow"
CANCEL_REASONS: Final[tuple[CancelReason, ...]] = get_args(CancelReason)
#: How a call ended; docs/guides/monitoring.md explains each. A call that was cut off is charged for what was delivered.
Outcome = Literal[
    CancelReason,
    "ok",
    "provider_error",
    "refused",
    "upstream_failed",
    "upstream_broken",
    "budget_end",
    "client_left",
    "internal_error",
    "worker_lost",
    "pending",
]
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
#: The outcomes that count as failures in the log, the dashboard and Grafana. Refused calls, calls whose client
#: disconnected, and calls that reached the end of the budget are no failures.
FAILED: Final = frozenset[Outcome](
    {
        "provider_error",
        "upstream_failed",
        "upstream_broken",
        "client_stalled",
        "cut_at_shutdown",
        "too_slow",
        "worker_lost",
        "internal_error",
    }
)
#: the outcome of a call that the gateway refused
REFUSED: Final[Outcome] = "refused"
#: the outcome of a call whose worker died before settling it
ORPHANED: Final[Outcome] = "worker_lost"
#: the outcome of a call whose response is made in the background and was not fetched yet
PENDING: Final[Outcome] = "pending"
#: outcomes with a provisional charge, which is replaced once the real cost is known
_PROVISIONAL: Final = frozenset[Outcome]({ORPHANED, PENDING})
#: the rule for tokens that no rule left out, and for older records without rules
_UNKNOWN_RULE: Final = "other"
_NAME_BYTES: Final = 16


def response_digest(answer_id: str) -> str:
    """Return the digest by which a call is found from its response id, which can have any length and characters."""
    return blake2b(answer_id.encode("utf-8", "surrogatepass"), digest_size=_NAME_BYTES).hexdigest()


ThinkingReason = Literal["trim", "mode", "tools", "refused", "earlier", ""]
THINKING_REASONS: Final = tuple(reason for reason in get_args(ThinkingReason) if reason)


@dataclass(frozen=True, slots=True)
class ThinkingRecord:
    """Thinking blocks of a request to a model that binds them to their prefix.

    Attributes:
        received: how many the client sent.
        sent: how many were sent to the provider.
        reason: why others were removed now: `trim`, `mode`, `tools`, or `refused` by the provider; `earlier` if all of
            them were removed on earlier calls; empty if none was removed.
    """

    received: int
    sent: int
    reason: ThinkingReason = ""


@dataclass(frozen=True, slots=True)
class ContextRecord:
    """Token counts of one request, and what was trimmed: numbers and names of rules, no text.

    Attributes:
        tokens: input tokens that the provider was expected to report for what was sent.
        original_tokens: the same for what was received.
        source: how reliable these numbers are.
        budget: the input tokens that the call was allowed, the smallest of all limits; None if nothing limits it.
        conversation_tokens: texts, tool calls and thinking in what was sent; no tool results or tool definitions.
        tool_tokens: tool results in what was sent, each counted once.
        trimmed: number of messages by the rule that changed them.
        saved: tokens saved by each rule, counted as chat messages. They need not add up to the saving of the request.
        shadow: trimming was only decided and reported; the request was sent unchanged.
        key: the key under which the difference to the reported usage is learned.
        estimate: `tokens` before corrections that were learned.
        frames: of what was sent, see `Estimate`; None in records of older versions.
        before: the session's last turn, if `estimate` was corrected by it; None otherwise.
        message_fates: what happened to each received message, in order; empty if nothing was changed.
        tool_weights: number and tokens of the results of each tool; together they are `tool_tokens`.
        margin: tokens kept free after `tokens`, because these are an estimate.
        kept: the part of `tokens` that the request only refers to: an earlier response that the provider keeps.
        beyond: reported input tokens of further passes of the same call, which say nothing about what was sent.
        thinking: what happened to thinking blocks; None if there are none, or the model does not bind them.
        newest: the part of `estimate` after the last assistant message.
    """

    tokens: int
    original_tokens: int
    source: Source
    budget: int | None
    conversation_tokens: int
    tool_tokens: int
    key: str
    estimate: int
    frames: int | None = None
    before: LastTurn | None = None
    trimmed: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, int] = field(default_factory=dict)
    shadow: bool = False
    message_fates: MessageOutcomes = MessageOutcomes()  # a shared empty value is safe: it is never changed
    tool_weights: TokensByTool = field(default_factory=dict)
    margin: int = 0
    kept: int = 0
    beyond: int = 0
    thinking: ThinkingRecord | None = None
    newest: int = 0

    @property
    def remaining(self) -> int | None:
        """Return the input tokens that the sent request leaves of the budget, or None without a budget."""
        return None if self.budget is None else max(0, self.budget - self.tokens - self.margin)

    def reported(self, tokens: int) -> LastTurn:
        """Return what the session remembers after the provider reported this many input tokens."""
        residual = tokens - self.kept - self.estimate
        if self.kept:
            # The provider may have dropped part of what it keeps. That does not make the sent part smaller.
            residual = max(0, residual)
        if self.before is None:
            return LastTurn(self.key, residual, self.frames)
        return self.before.followed_by(residual, self.frames)

    def surprise(self, tokens: int) -> int | None:
        """Return how many more tokens were reported than expected, or None without a last turn to expect from."""
        return tokens - self.tokens if self.before is not None else None

    @property
    def saved_tokens(self) -> int:
        """Return the input tokens that trimming saved."""
        return 0 if self.shadow else max(0, self.original_tokens - self.tokens)

    @property
    def saved_by_rule(self) -> Sequence[tuple[str, int]]:
        """Return the saved tokens by rule, in proportion to the tokens that messages lost by each rule."""
        saved = self.saved_tokens
        if len(self.trimmed) == 1:
            return [(rule, saved) for rule in self.trimmed]
        total, distributed, by_rule = sum(self.saved.values()), 0, list[tuple[str, int]]()
        for rule, cumulated in zip(self.saved, accumulate(self.saved.values()), strict=True):
            share = saved * cumulated // total
            by_rule.append((rule, share - distributed))
            distributed = share
        return by_rule or [(_UNKNOWN_RULE, saved)]


#: characters of an error message that are kept
_MESSAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class CallError:
    """An error of the gateway that the client received instead of a response.

    `budget`: for a budget refusal, the account with its limit, its use and what the call needed, as in
    `BudgetFault.budget`. None for other errors.
    """

    message: str
    budget: Mapping[str, int | str | None] | None = None

    @classmethod
    def of(cls, fault: GatewayError) -> CallError:
        """Return the error as it is kept, with a message of at most 1,000 characters."""
        return cls(fault.message[:_MESSAGE], fault.budget if isinstance(fault, BudgetFault) else None)


#: the routes that failed before the current one
NOTE_FALLBACK: Final = "fallback"
#: how often the call was sent again, and why
NOTE_RETRIES: Final = "retries"
NOTE_TRACEPARENT: Final = "traceparent"
#: the hash of an unknown credential
NOTE_CREDENTIAL: Final = "credential"
#: the id of a response that is made in the background
NOTE_RESPONSE: Final = "answer"
#: what the cache marks saved that the gateway set
NOTE_CACHE_MARKS: Final = "cache_marks"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call with all that observers and people need. No prompt or output text, no credential.

    Attributes:
        call_id: the gateway's own id, unique.
        request_id: the client's id, which may repeat; the gateway's if the client sent none.
        session: None for a call without a session.
        derived_session: the gateway made the session id, because the call named none.
        started_at: Unix time in seconds.
        dialect: the name of the client's format.
        operation: the kind of call, such as `chat`.
        provider: the last provider that it was sent to, or was to be sent to.
        model: the model's name at that provider.
        response_model: the model named in the response; None if it names none.
        stream: the client asked for a stream.
        status: the HTTP status of the response; 499 if the client disconnected first.
        outcome: how the call ended.
        error_code: the code of the gateway's own error; None without one.
        error: that error as the client received it; None without one, and in records of older versions.
        declared: the budget that the call declares for its session; None if it declares none, or was refused before its
            accounts were read.
        finish_reason: as in the response; None if it has none.
        tools: names of the tools that the response calls.
        charge: None if the provider bills nothing.
        overhead_s: seconds until it was first sent, or until its end if it was never sent.
        first_byte_s: seconds until the response headers arrived; None if none did.
        duration_s: seconds until its end.
        request_bytes: bytes of the client's body.
        response_bytes: bytes of the body that the client got.
        notes: remarks by name, for people. Code reads only those named `NOTE_*`, through properties.
        context: None if the tokens of the request were not counted.
        accounts: the accounts that it is charged to.
        spent: the amount that counts against their budgets.
        mode: how tool results were shown; None if they were not examined.
        step: the step in which it was made; None if its agent has no steps.
        kept: what its session remembers of responses that the provider keeps, see `kept_text`.
        answer: the name by which a later call that continues this response finds it, see `response_digest`; None if
            none can.
        unread_thinking: thinking blocks of the request that the called model or account cannot read.
        labels: further names by which usage is added up, see `gateway.core.rollup.LABELS`; `key` for a call without a
            session.
        lesson: what to learn (see `Lessons.learn`) before the call is settled: a key, and the value to keep under it
            unless the kept value already names this call. None in a store.
        agent: the agent of the session that made it; None if the client says nothing about agents, and in records of
            older versions.
    """

    call_id: str
    request_id: str
    session: SessionKey | None
    derived_session: bool
    started_at: float
    dialect: str
    operation: str
    provider: str
    model: str
    response_model: str | None
    stream: bool
    status: int
    outcome: Outcome
    error_code: str | None
    finish_reason: str | None
    tools: tuple[str, ...]
    charge: Charge | None
    overhead_s: float
    first_byte_s: float | None
    duration_s: float
    request_bytes: int
    response_bytes: int
    notes: Mapping[str, str] = field(default_factory=dict)
    context: ContextRecord | None = None
    accounts: tuple[AccountKey, ...] = ()
    spent: Amount = NOTHING
    mode: str | None = None
    step: str | None = None
    kept: str = ""
    answer: str | None = None
    unread_thinking: tuple[UnreadableThinking, ...] = ()
    lesson: tuple[str, str] | None = None
    error: CallError | None = None
    declared: Limits | None = None
    agent: CallingAgent | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def last_turn(self) -> LastTurn | None:
        """Return the difference of the estimate to the reported input, or None if the provider did not report it.

        A report that cannot be of the whole request, such as 0, is ignored. It would make the estimate of the session's
        next request too low. So would that of a compaction: the next request has another, far shorter conversation.
        """
        context, reported = self.context, self.request_tokens
        if context is None or not reported or self.is_compaction:
            return None
        whole = whole_request_tokens(reported, context.estimate, context.newest, context.before, context.key)
        return context.reported(whole) if whole is not None else None

    @property
    def is_compaction(self) -> bool:
        """Return whether the call replaced the conversation of its client by a summary."""
        return self.agent is not None and self.agent.request_class == "compaction"

    @property
    def request_tokens(self) -> int:
        """Return the input tokens of what was sent, as the provider reported them; 0 if it did not."""
        charge = self.charge
        if charge is None or charge.source != "provider":
            return 0
        return charge.usage.input_tokens - (self.context.beyond if self.context is not None else 0)

    @property
    def saved_tokens(self) -> int:
        """Return the input tokens that trimming saved."""
        return self.context.saved_tokens if self.context is not None else 0

    @property
    def is_provisional(self) -> bool:
        """Return whether a later record of the same call can replace this one and its charge."""
        return self.outcome in _PROVISIONAL

    @property
    def is_pending(self) -> bool:
        """Return whether the response is made in the background and was not fetched yet."""
        return self.outcome == PENDING

    def as_pending(self, response_id: str) -> CallRecord:
        """Return the record while the response with this id is made in the background."""
        return replace(self, outcome=PENDING, notes={**self.notes, NOTE_RESPONSE: response_id})

    def replaces(self, known: CallRecord) -> bool:
        """Return whether this record replaces `known`, a settled record of the same call.

        Of two records for a worker that died, the one with more tokens is better. The store got the delivered tokens
        once a second, and the journal continued while the store was unavailable.
        """
        if not self.is_provisional:
            return known.is_provisional
        return self.outcome == known.outcome == ORPHANED and self.spent.tokens > known.spent.tokens

    @property
    def was_fetched(self) -> bool:
        """Return whether the response was made in the background. Its duration then lasts until it was fetched."""
        return NOTE_RESPONSE in self.notes and not self.is_pending

    @property
    def has_fallen_back(self) -> bool:
        """Return whether another route was tried after a provider had failed."""
        return NOTE_FALLBACK in self.notes

    @property
    def retries(self) -> int:
        """Return how often the call was sent again to the same provider."""
        note = self.notes.get(NOTE_RETRIES)
        number = note.partition(",")[0] if note is not None else "0"
        return int(number) if number.isdecimal() else 1

    @property
    def traceparent(self) -> str | None:
        """Return the span that the call belongs to, as its client named it."""
        return self.notes.get(NOTE_TRACEPARENT)

    @property
    def credential_hash(self) -> str | None:
        """Return the hash of the unknown credential for which the call was refused."""
        return self.notes.get(NOTE_CREDENTIAL)

    @property
    def counted_kept(self) -> str:
        """Return `kept`, or nothing for a call without a charge."""
        return self.kept if self.charge is not None else ""

    @property
    def counted_tools(self) -> tuple[str, ...]:
        """Return the tools that its session counts: none without a charge, or while the record is provisional."""
        return self.tools if self.charge is not None and not self.is_provisional else ()
