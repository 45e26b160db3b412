"""Decide whether a call that no longer fits its session's budget becomes the closing call of the session."""

from __future__ import annotations

from typing import Final

from gateway.call.state import CallState
from gateway.call.types import CallAccounts, ClosingCall
from gateway.core.calling_agent import MAIN, RequestClass
from gateway.core.errors import BudgetFault
from gateway.core.ledger.closing import ClosingPolicy, closing_balances, closing_claims
from gateway.core.views import VIEWED

#: purposes of calls whose response is not a result for the user
_NO_RESULT: Final = frozenset[RequestClass]({"auxiliary", "compaction"})


def may_close(state: CallState, refusal: BudgetFault) -> bool:
    """Return whether a refused call may become the closing call of its session.

    - The refusing budget must be the session's own: only of that one something is kept for this session.
    - The response must be a result for the client, now: no compaction, no call of the gateway itself, no batch.
    - Only the main agent has the result of the session. A subagent would take the one closing call from it.
    - While the store is unavailable, no worker knows whether another one makes the closing call.
    """
    session, wire, incoming = state.stored_session, state.incoming.endpoint.wire, state.incoming
    if session is None or wire not in VIEWED or incoming.purpose is not None:
        return False
    if (refusal.budget.get("account"), refusal.budget.get("id")) != ("session", session.id):
        return False
    own = [balance for balance in state.budget.accounts.balances if balance.key == session.account]
    was_made = any(balance.closing for balance in own)
    agent = state.agent
    is_side_call = agent is not None and (agent.id != MAIN or agent.request_class in _NO_RESULT)
    is_wanted = not state.is_billed_later and not state.output_asked.is_none
    return is_wanted and not (was_made or is_side_call)


def begin_closing(state: CallState, policy: ClosingPolicy) -> CallAccounts:
    """Let a call use what is kept for the closing call; return its accounts as they were before, for `undo_closing`."""
    before, session = state.budget.accounts, state.session
    if session is not None:
        claims = closing_claims(before.claims, session.account)
        state.budget.accounts = CallAccounts.of(claims, closing_balances(before.balances, session.account))
        state.budget.closing = ClosingCall(policy)
    return before


def undo_closing(state: CallState, before: CallAccounts) -> None:
    """Make a call a normal one again, because it did not fit as a closing call either."""
    state.budget.accounts, state.budget.closing = before, None
