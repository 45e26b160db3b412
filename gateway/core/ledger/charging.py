"""Decide which accounts a call is charged to, at which rate, and how much of a charge counts against a budget.

`gateway.core.ledger.output_limit` decides how much is reserved. `gateway.core.ledger.arithmetic` computes with the
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from decimal import Decimal
from math import ceil
from typing import Final, NamedTuple

from gateway.core.calling_agent import MAIN
from gateway.core.ledger.arithmetic import (
    MOST,
    NO_LIMITS,
    NOTHING,
    AccountKey,
    Amount,
    Balance,
    Claim,
    Limits,
    most_used_balance,
    nano,
)
from gateway.core.ledger.closing import ClosingPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ledger.windows import UTC_NAME
from gateway.core.pricing import Price
from gateway.core.usage import Charge, Usage
from gateway.core.values import dataclass

_MINUTE_S: Final = 60.0


#: the name of the limits of all subagents that have none of their own
ANY_AGENT: Final = "*"


class AgentName(NamedTuple):
    """A subagent of a session, by its id and its type. The type is None if no client named it."""

    id: str
    type: str | None = None


#: the subagent that a child session is as a whole
CHILD_SESSION: Final = AgentName(MAIN)


class DowngradePolicy(NamedTuple):
    """The model that serves calls when less than the share `below` of the most used budget is left."""

    below: float
    model: str


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The `budget:` settings.

    Attributes:
        session: limits of every session.
        cached_weight: how much a cached input token counts; an uncached one counts 1.
        warn_at: the used share of a budget, 0 to 1, at which responses begin to carry a warning.
        modes: shorten tool results as the budget runs low.
        clamp: lower the output limit of a call to what is left, instead of refusing the call.
        deferred: forward calls whose cost arises after their response, where the gateway cannot see it.
        exhausted_status: the HTTP status of a refusal because too little is left.
        downgrade: the cheaper model for calls when little is left; None for none.
        closing: what is kept for the last call of a session; None if it has no closing call.
        agents: limits of each subagent of a session, by its type or id; `ANY_AGENT` for all others.
    """

    session: Limits = NO_LIMITS
    cached_weight: float = 1.0
    warn_at: float = 0.8
    modes: bool = True
    clamp: bool = True
    deferred: bool = False
    exhausted_status: int = 400
    downgrade: DowngradePolicy | None = None
    closing: ClosingPolicy | None = None
    agents: Mapping[str, Limits] = field(default_factory=dict)

    def limits_of_agent(self, agent: AgentName) -> Limits:
        """Return the limits of a subagent: those of its type, else of its id, else of any agent."""
        found = self.agents.get(agent.type or agent.id) or self.agents.get(agent.id) or self.agents.get(ANY_AGENT)
        return found if found is not None else NO_LIMITS


class KeyLimits(NamedTuple):
    """Limits of a client key: for all its sessions together, and `rpm`, its requests per minute (None: any number).

    `shared`: the accounts with limits that it shares with other client keys, see `SharedBudgets`. `group`: its group.
    """

    limits: Limits = NO_LIMITS
    rpm: int | None = None
    shared: tuple[Claim, ...] = ()
    group: str | None = None


NO_KEY_BUDGET: Final = KeyLimits()


#: the account of all client keys together
ALL_KEYS: Final = AccountKey("all", "all")


class SharedBudgets(NamedTuple):
    """The limits that client keys share: `every_key` of all of them together, `groups` by the name of the group."""

    every_key: Limits = NO_LIMITS
    groups: Mapping[str, Limits] = {}

    def limits(self) -> dict[AccountKey, Limits]:
        """Return the limits of each shared account."""
        return {ALL_KEYS: self.every_key, **{AccountKey("group", name): one for name, one in self.groups.items()}}

    def claims(self, group: str | None) -> tuple[Claim, ...]:
        """Return the claims of a client key in this group (None: in none) on the limited accounts that it shares."""
        claims = [Claim(ALL_KEYS, self.every_key)]
        if group is not None and group in self.groups:
            claims.append(Claim(AccountKey("group", group), self.groups[group]))
        return tuple([claim for claim in claims if not claim.configured.is_none])


class KeyContext(NamedTuple):
    """What a configuration says about all client keys: the budgets that they share, and its time zone."""

    shared: SharedBudgets = SharedBudgets()
    zone: str = UTC_NAME


@dataclass(frozen=True, slots=True)
class ChargedAccounts:
    """The accounts that a call is charged to: client key, session, and its parents, nearest first.

    Attributes:
        declared: the budget that the call itself declares for its session.
        agents: the subagent of the session that makes the call, and the subagents above it, nearest first. Empty for a
            call of the main agent. A child session is added to them, see `CHILD_SESSION`.
        is_compaction: the client compacts the conversation of the main agent. The call may use what is kept of the
            session's budget for its closing call.
    """

    namespace: str
    key: KeyLimits = NO_KEY_BUDGET
    session: SessionKey | None = None
    parents: tuple[SessionKey, ...] = ()
    declared: Limits = NO_LIMITS
    agents: tuple[AgentName, ...] = ()
    is_compaction: bool = False


def claims_of(policy: BudgetPolicy, charged: ChargedAccounts) -> tuple[Claim, ...]:
    """Return the claims of a call: client keys, parents from the topmost down, session, and limited subagents."""
    claims, key = [], charged.key
    if key.rpm is not None:
        claims.append(Claim(AccountKey("rate", charged.namespace), Limits(calls=key.rpm, window=_MINUTE_S)))
    claims += key.shared
    if not key.limits.is_none:
        claims.append(Claim(AccountKey("key", charged.namespace), key.limits))
    claims += [claim_of_session(policy, parent) for parent in reversed(charged.parents)]
    if charged.session is not None:
        claim = claim_of_session(policy, charged.session, charged.declared)
        claims.append(replace(claim, closing_share=0.0) if charged.is_compaction else claim)
        for agent in reversed(_limited_agents(policy, charged)):
            limits = policy.limits_of_agent(agent)
            if not limits.is_none:
                claims.append(Claim(charged.session.agent_account(agent.id), limits))
    return tuple(claims)


def claims_on(
    accounts: Iterable[AccountKey],
    policy: BudgetPolicy,
    keys: Mapping[AccountKey, Limits],
    agent_types: Mapping[AccountKey, str | None],
) -> list[Claim]:
    """Return accounts with their configured limits, without a call.

    Args:
        accounts: the accounts, without those of rate limits.
        policy: limits of sessions and subagents.
        keys: limits of client keys, of their groups and of all together.
        agent_types: the types of subagents, by their accounts.
    """
    claims = []
    for account in accounts:
        if account.kind == "session":
            claims.append(Claim(account, policy.session))
        elif account.kind in ("key", "group", "all"):
            claims.append(Claim(account, keys.get(account, NO_LIMITS)))
        elif account.kind == "agent":
            agent = AgentName(account.agent_id, agent_types.get(account))
            claims.append(Claim(account, policy.limits_of_agent(agent)))
    return claims


def _limited_agents(policy: BudgetPolicy, charged: ChargedAccounts) -> tuple[AgentName, ...]:
    """Return the subagents that a call is charged to, nearest first. All of a child session works for its parent."""
    if not policy.agents or not charged.parents or CHILD_SESSION in charged.agents:
        return charged.agents
    return (*charged.agents, CHILD_SESSION)


def claim_of_session(policy: BudgetPolicy, session: SessionKey, declared: Limits = NO_LIMITS) -> Claim:
    """Return the claim of a call on the account of a session. `declared`: the budget that the call declares for it."""
    kept = policy.closing.reserve if policy.closing is not None else 0.0
    return Claim(session.account, policy.session, declared, closing_share=kept)


def accounts_of(claims: Sequence[Claim]) -> tuple[AccountKey, ...]:
    """Return the accounts to which the cost of a call is added."""
    return tuple(claim.key for claim in claims if claim.key.kind != "rate")


def spent_by(charge: Charge | None, cached_weight: float) -> Amount:
    """Return how much of a charge counts against a budget."""
    if charge is None:
        return NOTHING
    usage = charge.usage
    # Some providers report more cached tokens than input tokens. Output tokens are never cached.
    cached = min(usage.cache_read_tokens, usage.input_tokens)
    tokens = usage.total_tokens - cached + ceil(cached * cached_weight)
    return Amount(min(MOST, tokens), nano(charge.cost_usd or 0), 1)


class TokenRate(NamedTuple):
    """The highest price in USD of one input and one output token. The kind of token is not known before the call."""

    input: Decimal
    output: Decimal


def rate_of(price: Price | None, input_tokens: int, tier: str | None, *, caches_1h: bool = False) -> TokenRate | None:
    """Return the highest price of a token of a call, or None if it is unknown.

    `caches_1h`: the call can ask the provider to cache a prefix for an hour, which costs more.
    """
    if price is None:
        return None
    rates = price.rates_for(Usage.of(input_tokens, 0), tier)
    if rates is None:
        return None
    return TokenRate(
        _dearest(rates.input, rates.cache_write, rates.cache_write_1h if caches_1h else None, rates.audio_input),
        _dearest(rates.output, rates.audio_output, rates.reasoning),
    )


def dearest(rates: Iterable[TokenRate | None]) -> TokenRate | None:
    """Return the highest of these rates, for input and output separately, or None if none is known."""
    known = [rate for rate in rates if rate is not None]
    return TokenRate(max(rate.input for rate in known), max(rate.output for rate in known)) if known else None


def _dearest(*rates: Decimal | None) -> Decimal:
    return max(rate for rate in rates if rate is not None)


def limits_output(balances: Sequence[Balance]) -> bool:
    """Return whether a budget in tokens or USD is in force, so that a longer output costs more of it."""
    for balance in balances:
        limits = balance.limits
        if balance.key.kind != "rate" and (limits.tokens is not None or limits.nano_usd is not None):
            return True
    return False


def budgets_in(balances: Sequence[Balance]) -> tuple[Balance, ...]:
    """Return the balances with a budget in force, without rate limits of client keys."""
    return tuple([balance for balance in balances if balance.key.kind != "rate" and not balance.limits.is_none])


def budgets_used_by(balances: Sequence[Balance], price: Price | None) -> tuple[Balance, ...]:
    """Return the balances of the budgets that a call can use up: a model that costs nothing uses no US dollars."""
    if price is None or all(balance.limits.nano_usd is None for balance in balances) or not price.is_free:
        return tuple(balances)
    return budgets_in([replace(balance, limits=balance.limits._replace(nano_usd=None)) for balance in balances])


def remaining_fraction(balances: Sequence[Balance]) -> float:
    """Return the share, 0 to 1, that is left of the most used budget, ignoring holds. 1 without a budget."""
    balance = most_used_balance(balances)
    return 1.0 if balance is None else max(0.0, 1.0 - (balance.used_fraction or 0.0))
