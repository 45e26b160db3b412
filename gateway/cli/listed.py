"""Read the sessions that `gateway sessions` and `gateway top` list, in the requested order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.common import Exit, quoted, stop

if TYPE_CHECKING:
    from gateway.core.ledger.charging import BudgetPolicy
    from gateway.core.ports import Store
    from gateway.core.stored import Sort
    from gateway.stores.damage import UnreadSessions

#: a session as JSON, like in the API
Row = dict[str, Any]


def _orders() -> list[str]:
    from gateway.core.stored import SORTS

    return list(SORTS)


SortName = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="recent|tokens|cost",
        help="Sort by last call, tokens or cost, in descending order.",
        autocompletion=_orders,
    ),
]


def order(name: str) -> Sort:
    """Return the order with this name, or end the command."""
    from gateway.core.errors import InvalidRequest
    from gateway.server.sessions import sort_of

    try:
        return sort_of(name)
    except InvalidRequest:
        stop(f"--sort must be one of {', '.join(_orders())}, not {quoted(name)}.", Exit.USAGE)


async def rows(
    store: Store, policy: BudgetPolicy, sort: Sort, limit: int, unread: UnreadSessions | None = None
) -> list[Row]:
    """Return the first `limit` sessions as JSON like in the API, with the budgets of the running gateway.

    `policy`: the configured budgets, used if no gateway has noted its own in the store. `unread`: damaged sessions that
    were reported before.
    """
    from gateway.server.auth import Access
    from gateway.server.sessions import rows_of
    from gateway.stores.damage import UnreadSessions
    from gateway.stores.running_budget import with_running_budget

    page = await store.sessions(None, limit, None, sort)
    in_force = await with_running_budget(store, policy)
    return await rows_of(store, page.sessions, in_force, Access(None, admin=True), unread or UnreadSessions())
