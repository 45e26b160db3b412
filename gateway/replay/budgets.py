"""Apply the budgets of a configuration to recorded calls.

Each call is reserved and settled with the functions of the gateway: `gateway.core.ledger.charging` computes the hold,
`gateway.core.ledger.arithmetic` checks the budgets, and `gateway.core.modes` chooses how tool results are shown. Calls
run one after the other in their original order, with the recorded usage. A record has no text, so the savings by
trimming and by shorter tool results are unknown. The result is therefore the most that would have been spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from decimal import Decimal
from typing import Any, Final

from gateway.core.context_budget import ContextOptions, ContextPolicy, budget_of
from gateway.core.ledger.arithmetic import (
    EMPTY,
    NOTHING,
    Account,
    AccountKey,
    Amount,
    Balance,
    Moment,
    Refused,
    balance_of,
    reserve,
    settle,
)
from gateway.core.ledger.charging import (
    NO_KEY_BUDGET,
    BudgetPolicy,
    ChargedAccounts,
    KeyLimits,
    accounts_of,
    claims_of,
    rate_of,
    remaining_fraction,
    spent_by,
)
from gateway.core.ledger.closing import closing_claims
from gateway.core.ledger.output_limit import CallNeed, hold_for, limit_of_hold
from gateway.core.ledger.refusals import dimension_json, usd
from gateway.core.ledger.session_key import OPEN_NAMESPACE, SessionKey
from gateway.core.modes import MODES, ResponseMode, mode_for
from gateway.core.pricing import standard_cost
from gateway.core.routing import ModelFacts
from gateway.core.times import time_text
from gateway.core.usage import Charge
from gateway.core.values import dataclass
from gateway.replay.records import ReplayedCall

#: the name for calls without a session
NO_SESSION: Final = "(no session)"


@dataclass(frozen=True, slots=True)
class ReplayRules:
    """The settings to apply to recorded calls. `budget`: most input tokens of a call, if lower than configured."""

    context: ContextPolicy
    budgets: BudgetPolicy
    keys: Mapping[str, KeyLimits]
    facts: Callable[[ReplayedCall], ModelFacts]
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The result of a recorded call under the given budgets.

    Attributes:
        call: the recorded call.
        number: the number of the call in its session, from 1.
        original: input tokens of the request as received; None if unknown.
        budget: input tokens that the call would have been allowed; None: unlimited.
        mode: how tool results would have been shown.
        spent: the amount charged to its budgets.
        refused: why the call, unchanged, would have been refused; None if not.
        is_shorter: its output would have ended earlier.
    """

    call: ReplayedCall
    number: int
    original: int | None
    budget: int | None
    mode: ResponseMode = "raw"
    spent: Amount = NOTHING
    refused: Mapping[str, object] | None = None
    is_shorter: bool = False

    @property
    def over(self) -> int:
        """Return the input tokens beyond the context budget."""
        return max(0, self.original - self.budget) if self.original is not None and self.budget is not None else 0


def outcomes(calls: Iterable[ReplayedCall], rules: ReplayRules) -> Iterator[ReplayOutcome]:
    """Yield the outcome of each call in the original order. A call that is recorded twice counts once."""
    known = {call.call_id: call for call in calls}
    accounts: dict[AccountKey, Account] = {}
    numbers: dict[SessionKey | None, int] = {}
    for call in sorted(known.values(), key=lambda call: (call.at, call.call_id)):
        numbers[call.session] = number = numbers.get(call.session, 0) + 1
        yield _outcome(call, number, accounts, rules)


def _outcome(call: ReplayedCall, number: int, accounts: dict[AccountKey, Account], rules: ReplayRules) -> ReplayOutcome:
    facts, charge = rules.facts(call), call.charge
    original = call.original if call.original is not None or charge is None else charge.usage.input_tokens
    budget = budget_of(rules.context, facts, ContextOptions(budget=rules.budget))
    if charge is None:
        return ReplayOutcome(call, number, original, budget)
    claims, now = claims_of(rules.budgets, _charged(call, rules.keys)), Moment(call.at, call.at)
    balance = [balance_of(accounts.get(claim.key, EMPTY), claim, now) for claim in claims]
    mode = _mode(balance, rules.budgets)
    need = _need(call, facts)
    hold = hold_for(call.call_id, claims, balance, need, clamp=rules.budgets.clamp)
    reserved = reserve(accounts, hold, now)
    if isinstance(reserved, Refused) and rules.budgets.closing is not None and call.session is not None:
        hold = replace(hold, claims=closing_claims(claims, call.session.account))
        reserved = reserve(accounts, hold, now)
    if isinstance(reserved, Refused):
        needed = usd(reserved.needed) if reserved.dimension == "nano_usd" else reserved.needed
        why = {**dimension_json(reserved.balance, reserved.dimension, call.at), "needed": needed}
        return ReplayOutcome(call, number, original, budget, mode, refused=why)
    granted, changes = reserved
    accounts.update(changes)
    limit = limit_of_hold(hold, granted, need)
    beyond = max(0, charge.usage.output_tokens - limit) if limit is not None else 0
    spent = spent_by(_priced(charge, facts), rules.budgets.cached_weight).less(NOTHING.plus(hold.unit, beyond))
    accounts.update(settle(accounts, accounts_of(claims), hold.amount(granted.units), spent))
    return ReplayOutcome(call, number, original, budget, mode, spent, is_shorter=beyond > 0)


def _charged(call: ReplayedCall, keys: Mapping[str, KeyLimits]) -> ChargedAccounts:
    namespace = call.session.namespace if call.session is not None else OPEN_NAMESPACE
    own = call.session.account if call.session is not None else None
    parents = [SessionKey(key.namespace, key.id) for key in call.accounts if key.kind == "session" and key != own]
    return ChargedAccounts(namespace, keys.get(namespace, NO_KEY_BUDGET), call.session, tuple(reversed(parents)))


def _priced(charge: Charge, facts: ModelFacts) -> Charge:
    """Return the charge with a cost, computed if the record has none and the price is known."""
    if charge.cost_usd is not None or facts.price is None:
        return charge
    return replace(charge, cost_usd=standard_cost(charge.usage, facts.price))


def _mode(balance: list[Balance], budgets: BudgetPolicy) -> ResponseMode:
    return mode_for(remaining_fraction(balance)) if budgets.modes else "raw"


def _need(call: ReplayedCall, facts: ModelFacts) -> CallNeed:
    """Return the need of the call: its reported input, and an output without limit."""
    usage = call.charge.usage if call.charge is not None else None
    tokens = usage.input_tokens if usage is not None else 0
    has_output = usage is not None and usage.output_tokens > 0
    rate = rate_of(facts.price, tokens, None)
    return CallNeed(
        tokens, model_output=facts.output, has_output=has_output, rate=rate, model=call.model, can_grow=call.stream
    )


@dataclass(slots=True)
class BudgetSums:
    """The sums of the calls of a session, or of all sessions.

    `cached` and `cost_usd` are None if a record lacks them. `modes`: the first call in each mode other than raw.
    """

    calls: int = 0
    uncharged: int = 0
    estimated: int = 0
    input: int = 0
    output: int = 0
    total: int = 0
    cached: int | None = 0
    cost_usd: Decimal | None = Decimal(0)
    over: list[ReplayOutcome] = field(default_factory=list)
    modes: dict[ResponseMode, ReplayOutcome] = field(default_factory=dict)
    refused: int = 0
    first_refused: ReplayOutcome | None = None
    shorter: int = 0
    spent: Amount = NOTHING

    def add(self, outcome: ReplayOutcome) -> None:
        """Add a call."""
        self.calls += 1
        if outcome.over:
            self.over.append(outcome)
        charge = outcome.call.charge
        if charge is None:
            self.uncharged += 1
            return
        self.estimated += charge.source != "provider"
        self.input += charge.usage.input_tokens
        self.output += charge.usage.output_tokens
        self.total += charge.usage.total_tokens
        cached = charge.usage.cache_read_tokens if outcome.call.has_details else None
        self.cached = self.cached + cached if self.cached is not None and cached is not None else None
        known = self.cost_usd is not None and charge.cost_usd is not None
        self.cost_usd = (self.cost_usd or 0) + (charge.cost_usd or Decimal(0)) if known else None
        self._add_budget_outcome(outcome)

    def _add_budget_outcome(self, outcome: ReplayOutcome) -> None:
        if outcome.mode != "raw":
            self.modes.setdefault(outcome.mode, outcome)
        if outcome.refused is not None:
            self.refused += 1
            self.first_refused = self.first_refused or outcome
        self.shorter += outcome.is_shorter
        self.spent = self.spent.plus(outcome.spent)

    @property
    def most_over(self) -> int:
        """Return the most tokens by which a call exceeded its context budget."""
        return max((outcome.over for outcome in self.over), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return the sums as JSON."""
        cached = self.cached / self.input if self.cached is not None and self.input else None
        return {
            "calls": self.calls,
            "uncharged_calls": self.uncharged,
            "estimated_calls": self.estimated,
            "usage": {
                "input_tokens": self.input,
                "output_tokens": self.output,
                "total_tokens": self.total,
                "cache_read_tokens": self.cached,
            },
            "cached_share": round(cached, 4) if cached is not None else None,
            "cost_usd": f"{self.cost_usd:.6f}" if self.cost_usd is not None else None,
            "over_context_budget": {
                "calls": len(self.over),
                "most": self.most_over,
                "tokens": sum(outcome.over for outcome in self.over),
            },
            "refused_calls": self.refused,
            "shorter_answers": self.shorter,
            "spent": {"tokens": self.spent.tokens, "usd": usd(self.spent.nano_usd), "calls": self.spent.calls},
        }

    def places_json(self) -> dict[str, Any]:
        """Return the first call in each mode, the first refused call, and calls over their context budget."""
        first = self.first_refused
        return {
            "modes": {mode: _place(self.modes[mode]) for mode in MODES if mode in self.modes},
            "first_refused": {**_place(first), **(first.refused or {})} if first is not None else None,
            "calls_over": [
                {**_place(call), "tokens": call.original, "budget": call.budget, "over": call.over}
                for call in self.over
            ],
        }


def _place(outcome: ReplayOutcome) -> dict[str, Any]:
    """Return the number, request id and time that identify a call."""
    return {"call": outcome.number, "request_id": outcome.call.request_id, "at": time_text(outcome.call.at)}
