"""Note the session budget of the running gateway in its store, for commands that read the store.

`gateway serve --budget`, or a configuration file of another name, is not known to a command in another terminal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import BudgetPolicy
from gateway.core.ports import Store

#: under which the budget is kept, among what is learned
_KEY: Final = "served/session-budget"


async def note_served(store: Store, policy: BudgetPolicy) -> None:
    """Note the budget of sessions. What is learned is forgotten after a while, so this is repeated.

    Raises:
        StoreUnavailable: it was not noted, or it is not known whether.
    """
    noted = msgspec.json.encode(policy.session)
    await store.learn({_KEY: lambda _: noted})


async def served(store: Store, policy: BudgetPolicy) -> BudgetPolicy:
    """Return the policy with the budget that was noted last, or unchanged if none was.

    Raises:
        StoreUnavailable: the store cannot be read.
    """
    noted = await store.learned(_KEY)
    if noted is None:
        return policy
    try:
        return replace(policy, session=msgspec.json.decode(noted, type=Limits))
    except msgspec.MsgspecError:
        # A later version may note more.
        return policy
