"""Show the agents of a session in the API and the commands, and find their calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.agent_use import AgentUse, agents_of_session, subagent_of, totals_with_children
from gateway.core.calling_agent import MAIN
from gateway.core.ledger.arithmetic import AccountKey, Balance, Claim
from gateway.core.ledger.charging import AgentName, BudgetPolicy
from gateway.core.ledger.session_key import SessionKey
from gateway.core.ports import Calls, Store
from gateway.core.record import CallRecord
from gateway.core.stored import SessionView
from gateway.core.times import time_text
from gateway.core.tools import OTHERS
from gateway.core.usage import Totals
from gateway.server.shown import session_budget_json, totals_json

#: records that one request reads to find the calls of an agent
MOST_READ: Final = 5_000
_PAGE: Final = 500
_Balances = Mapping[AccountKey, Balance]


async def agents_json(
    store: Store, view: SessionView, records: Sequence[CallRecord], policy: BudgetPolicy, *, is_child: bool
) -> list[dict[str, Any]]:
    """Return the main agent and the subagents of a session; an empty list without subagents and their budgets.

    Args:
        store: the store of the session.
        view: the session.
        records: its newest calls, newest first.
        policy: the limits of its subagents.
        is_child: the session has a parent session, so that as a whole it is a subagent.
    """
    uses = await store.agents(view.key)
    agents = agents_of_session(view.totals, view.tools, uses, records)
    claims = _claims(view.key, agents if is_child else agents[1:], policy)
    if not uses and not claims:
        return []
    balances = {one.key: one for one in await store.balances(claims)} if claims else {}
    sums = totals_with_children(agents)
    return [_agent_json(view.key, one, sums.get(one.id), balances) for one in agents]


def _claims(session: SessionKey, subagents: Sequence[AgentUse], policy: BudgetPolicy) -> list[Claim]:
    """Return the accounts of the subagents that have a budget. Those that are counted together have no common one."""
    named = [one for one in subagents if policy.agents and one.id != OTHERS]
    limits = [(one, policy.limits_of_agent(AgentName(one.id, one.type))) for one in named]
    return [Claim(session.agent_account(one.id), found) for one, found in limits if not found.is_none]


def _agent_json(session: SessionKey, use: AgentUse, total: Totals | None, balances: _Balances) -> dict[str, Any]:
    balance = balances.get(session.agent_account(use.id))
    return {
        "id": use.id,
        "type": use.type,
        "parent": use.parent,
        "active_step": use.step,
        "created_at": time_text(use.created_at) if use.created_at else None,
        "last_call_at": time_text(use.last_call_at) if use.last_call_at else None,
        **_use_json(use.totals),
        "tools": dict(sorted(use.tools.items(), key=lambda item: (-item[1], item[0]))),
        "with_children": _use_json(total) if total is not None else None,
        "budget": session_budget_json(balance, has_modes=False)["budget"] if balance is not None else None,
    }


def _use_json(totals: Totals) -> dict[str, Any]:
    return {
        "calls": totals.calls,
        "cumulative_token_usage": totals_json(totals),
        "cost_usd": None if totals.unpriced_calls else f"{totals.cost_usd:.6f}",
    }


async def calls_of_agent(
    store: Calls, session: SessionKey, agent: str, limit: int, cursor: str | None
) -> tuple[list[CallRecord], str | None]:
    """Return the newest calls of one agent of a session, and the cursor of the next page, or None at the end.

    At most `MOST_READ` records are read. The cursor then continues the search, also if nothing was found yet.
    """
    found: list[CallRecord] = []
    for _ in range(0, MOST_READ, _PAGE):
        records = await store.calls(session, _PAGE, cursor)
        for record in records:
            cursor = record.call_id
            if (subagent_of(record) or MAIN) == agent:
                found.append(record)
                if len(found) == limit:
                    return found, cursor
        if len(records) < _PAGE:
            return found, None
    return found, cursor
