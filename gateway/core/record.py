"""Define the record of a call: outcome, token counts, usage and cost.

The store keeps it and the observers get it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from hashlib import blake2b
from itertools import accumulate
from typing import Final, Literal, get_args

from gateway.core.counting.calibration import LastTurn, whole_report
from gateway.core.counting.context import ToolWeights
from gateway.core.counting.estimate import Source
from gateway.core.errors import BudgetFault, GatewayError
from gateway.core.fitting.report import Fates
from gateway.core.ledger.arithmetic import NOTHING, AccountKey, Amount, Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.thinking_origin import UnreadableThinking
from gateway.core.usage import Charge
from gateway.core.values import dataclass

#: Why the task of a call was cancelled, where it was not because its client left: the message of the cancel. The client
#: took nothing for too long; the gateway stops; nobody waits any longer for a call of the gateway's own.
Cut = Literal["client_stalled", "cut_at_shutdown", "too_slow"]
STALLED: Final[Cut] = "client_stalled"
SHUT_DOWN: Final[Cut] = "cut_at_shutdown"
TOO_SLOW: Final[Cut] = "too_slow"
CUTS: Final[tuple[Cut, ...]] = get_args(Cut)
#: How a call ended; docs/guides/monitoring.md tells what each means. A call that is cut or breaks off is charged for
#: what was delivered.
Outcome = Literal[
    Cut,
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
#: The outcomes of calls that failed: the same in the log, the dashboard and Grafana. A refused call did not fail, nor
#: did one whose client left or whose budget ended.
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
#: the outcome of a call whose worker was gone before it settled
ORPHANED: Final[Outcome] = "worker_lost"
#: that of a call whose answer is made in the background and was not fetched yet
PENDING: Final[Outcome] = "pending"
#: what such a call is charged for now, and by what it cost is replaced once that is known
_PROVISIONAL: Final = frozenset[Outcome]({ORPHANED, PENDING})
#: what left tokens out where no rule did, or an older record does not say
_UNKNOWN_RULE: Final = "other"
_NAME_BYTES: Final = 16


def answer_name(answer_id: str) -> str:
    """What the call is found by that had this answer: a digest, as an id may have any length and any characters."""
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
    """What one call weighed and what was left out of it: numbers and names of rules, no text.

    Attributes:
        tokens: input tokens that the provider was expected to report for what was sent.
        original_tokens: the same for what came.
        source: how good these numbers are.
        budget: input tokens the call was allowed, the smallest of all limits; None where nothing limits it.
        conversation_tokens: of what was sent, texts, calls and thinking; no tool results or definitions of tools.
        tool_tokens: tool results in what was sent, each counted once.
        trimmed: number of messages by the rule that changed them, as their fates tell it.
        saved: tokens that messages lost by such a rule, as chat messages; the estimate of a whole request is no sum.
        shadow: it was only decided; what was sent is what came.
        key: under which the difference to the reported usage is learned.
        estimate: `tokens` before anything learned was added.
        frames: of what was sent, see `Estimate`; None in records from before these were counted.
        before: this session's last turn, where `estimate` was corrected by what that taught; None else.
        message_fates: what became of each message that came, in order; empty where nothing was changed.
        tool_weights: how many results of each tool make `tool_tokens`, and their tokens.
        margin: tokens that are kept free beside `tokens`, as these are an estimate.
        kept: the part of `tokens` that the request only names: an earlier answer, which its provider keeps.
        beyond: reported input tokens that tell nothing of what was sent: those of further passes of the same call.
        thinking: what became of thinking blocks; None for models that do not bind them, and where there are none.
        newest: the part of `estimate` after the last message of an assistant.
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
    message_fates: Fates = Fates()  # of no message, and nobody changes it
    tool_weights: ToolWeights = field(default_factory=dict)
    margin: int = 0
    kept: int = 0
    beyond: int = 0
    thinking: ThinkingRecord | None = None
    newest: int = 0

    @property
    def remaining(self) -> int | None:
        """Input tokens that what was sent leaves of the budget; None where there is no budget."""
        return None if self.budget is None else max(0, self.budget - self.tokens - self.margin)

    def reported(self, tokens: int) -> LastTurn:
        """What the session remembers when the provider has reported so many input tokens."""
        residual = tokens - self.kept - self.estimate
        if self.kept:
            # The provider may have dropped some of what it keeps. What is sent is no lighter for that.
            residual = max(0, residual)
        if self.before is None:
            return LastTurn(self.key, residual, self.frames)
        return self.before.then(residual, self.frames)

    def surprise(self, tokens: int) -> int | None:
        """By how much so many reported tokens are more than were expected; None where no last turn taught that."""
        return tokens - self.tokens if self.before is not None else None

    @property
    def saved_tokens(self) -> int:
        """Tokens that were not sent."""
        return 0 if self.shadow else max(0, self.original_tokens - self.tokens)

    @property
    def saved_by_rule(self) -> Sequence[tuple[str, int]]:
        """The same by the rule that left them out, shared out by what the messages lost by it."""
        saved = self.saved_tokens
        if len(self.trimmed) == 1:
            return [(rule, saved) for rule in self.trimmed]
        total, given, found = sum(self.saved.values()), 0, list[tuple[str, int]]()
        for rule, upto in zip(self.saved, accumulate(self.saved.values()), strict=True):
            share = saved * upto // total
            found.append((rule, share - given))
            given = share
        return found or [(_UNKNOWN_RULE, saved)]


#: characters that are kept of the message of an error
_MESSAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class CallError:
    """What the client received instead of an answer, where the error is the gateway's own.

    `budget`: of a refusal for a budget, the account with its limit, what is used of it and what the call needed, as in
    `BudgetFault.budget`; None for other errors.
    """

    message: str
    budget: Mapping[str, int | str | None] | None = None

    @classmethod
    def of(cls, fault: GatewayError) -> CallError:
        """Return the error as it is kept: a long message is cut."""
        return cls(fault.message[:_MESSAGE], fault.budget if isinstance(fault, BudgetFault) else None)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call, all an observer or a person may need; no prompt or answer text, no credential.

    Attributes:
        call_id: the gateway's own, unique.
        request_id: the client's, which may repeat, or the gateway's where it sent none.
        session: None for a call without one.
        derived_session: the session's id was made by the gateway, as the call named none.
        started_at: seconds since the epoch.
        dialect: the name of the client's format.
        operation: what kind of call it is, such as `chat`.
        provider: the last one it was sent to, or was to be sent to.
        model: the name it has at that provider.
        response_model: the name that the answer gives; None where it gives none.
        status: HTTP status of the answer, 499 where nobody waited for it.
        error_code: of the gateway's own error; None where it had none.
        error: what the client received of that error; None where it had none, and in records of older versions.
        declared: the budget that the call declares for its session; None if it declares none, or was refused before its
            accounts were read.
        finish_reason: as the answer says it; None where it says nothing.
        tools: names of the tools that the answer calls.
        charge: None where the provider bills nothing.
        overhead_s: seconds until it was first sent, or until its end where it was not.
        first_byte_s: seconds until the head of the answer came; None where none came.
        duration_s: seconds until its end.
        request_bytes: of the client's body.
        response_bytes: of the body that was passed on to the client.
        notes: remarks by name.
        context: None where the call was not weighed.
        accounts: those it is charged to.
        spent: what of it counts against their budgets.
        mode: how its tool results were shown; None where they were not looked at.
        step: the step that it was made in; None where its agent has none.
        kept: what its session remembers of what the provider keeps now, see `kept_as`.
        answer: what it is found by when a later call goes on from its answer, see `answer_name`; None where none can.
        unread_thinking: thinking blocks of the request that the model or the account which answered cannot read.
        lesson: what is to be learned (see `Store.learn`) before it is settled: a key, and what to keep under it unless
            that names this call already. Of a record on its way only; None in a store.
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

    @property
    def last_turn(self) -> LastTurn | None:
        """By how much the estimate of this call was off; None where the provider did not report its input.

        Nor is a report believed that cannot be of the whole request, such as 0: the estimate of the session's next
        request would be too low.
        """
        context, reported = self.context, self.request_tokens
        if context is None or not reported:
            return None
        whole = whole_report(reported, context.estimate, context.newest, context.before, context.key)
        return context.reported(whole) if whole is not None else None

    @property
    def request_tokens(self) -> int:
        """Input tokens of what was sent as the provider said; 0 where it did not say."""
        charge = self.charge
        if charge is None or charge.source != "provider":
            return 0
        return charge.usage.input_tokens - (self.context.beyond if self.context is not None else 0)

    @property
    def saved_tokens(self) -> int:
        """Tokens that were not sent."""
        return self.context.saved_tokens if self.context is not None else 0

    @property
    def is_provisional(self) -> bool:
        """Whether another record of the same call may yet take the place of this one, and its charge that of its."""
        return self.outcome in _PROVISIONAL

    def replaces(self, known: CallRecord) -> bool:
        """Whether it takes the place of a record of the same call that was settled before.

        Of two that were made for a worker that is gone, the one that knows of more: the store was told of an answer
        once a second, and the journal went on with that while the store was away.
        """
        if not self.is_provisional:
            return known.is_provisional
        return self.outcome == known.outcome == ORPHANED and self.spent.tokens > known.spent.tokens

    @property
    def was_fetched(self) -> bool:
        """Whether its answer was made in the background: it has lasted until somebody fetched that, however late."""
        return "answer" in self.notes and self.outcome != PENDING

    @property
    def counted_kept(self) -> str:
        """What its session remembers of what the provider keeps: nothing of a call that is not charged."""
        return self.kept if self.charge is not None else ""

    @property
    def counted_tools(self) -> tuple[str, ...]:
        """The tools its session counts: none of a call that is not charged, or whose own record may yet come."""
        return self.tools if self.charge is not None and not self.is_provisional else ()
