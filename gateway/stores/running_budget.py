"""Save the session budget of the running gateway in its store, for commands that read the store.

A command in another terminal cannot see `gateway serve --budget` or another configuration file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ports import Lessons

#: key of the budget among the learned values
_KEY: Final = "served/session-budget"


async def save_running_budget(store: Lessons, policy: BudgetPolicy) -> None:
    """Save the budget of sessions. Learned values expire, so this is repeated.

    Raises:
        StoreUnavailable: the budget may not have been stored.
    """
    noted = msgspec.json.encode(policy.session)
    await store.learn({_KEY: lambda _: noted})


async def with_running_budget(store: Lessons, policy: BudgetPolicy) -> BudgetPolicy:
    """Return the policy with the budget that was saved last, or unchanged if none was.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    noted = await store.learned(_KEY)
    if noted is None:
        return policy
    try:
        return replace(policy, session=msgspec.json.decode(noted, type=Limits))
    except msgspec.MsgspecError:
        # A later version may save more.
        return policy
