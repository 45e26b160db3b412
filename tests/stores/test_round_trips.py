"""How often a call has to wait for a Redis, which may be some milliseconds away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from gateway.core.ledger import Limits
from gateway.core.spending import BudgetPolicy
from gateway.stores.redis import RedisStore
from gateway.stores.redis.scripts import Command
from tests.stores.files import PATIENT_S
from tests.stores.redis_servers import RedisCluster, RedisServer
from tests.support.fakes import AwayStore, World


class Counted:
    """A way to the servers that counts how often it is gone; what is under way at the same time goes together."""

    def __init__(self, link: Any) -> None:
        self.link = link
        self.rounds = 0
        self._under_way = 0

    async def call(self, *commands: Command) -> list[Any]:
        self.rounds += not self._under_way
        self._under_way += 1
        try:
            return list(await self.link.call(*commands))
        finally:
            self._under_way -= 1

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        return list(await self.link.everywhere(*commands))

    async def aclose(self) -> None:
        await self.link.aclose()


@pytest.fixture(params=["one server", "cluster"])
def servers(request: pytest.FixtureRequest) -> RedisServer | RedisCluster:
    name = "redis_cluster" if request.param == "cluster" else "redis_server"
    found: RedisServer | RedisCluster = request.getfixturevalue(name)
    found.flush()
    return found


@pytest.fixture
async def store(servers: RedisServer | RedisCluster) -> AsyncIterator[RedisStore]:
    made = RedisStore(servers.url, timeout_s=PATIENT_S)
    yield made
    await made.aclose()


def counted(store: RedisStore) -> Counted:
    made: Any = store
    made._link = made._books._link = made._moves._link = link = Counted(made._link)
    return link


BUDGET = BudgetPolicy(session=Limits(tokens=1_000_000))
#: round trips of a call to one server, and to a cluster
CALLS: dict[str, tuple[BudgetPolicy, int, int]] = {
    "with a budget": (BUDGET, 3, 9),
}


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_waits_for_so_many_round_trips(
    store: RedisStore, servers: RedisServer | RedisCluster, kind: str
) -> None:
    budget, together, apart = CALLS[kind]
    world = World(store=cast("AwayStore", store), budget=budget)
    await world.call()
    link = counted(store)
    await world.call()
    assert link.rounds == (apart if isinstance(servers, RedisCluster) else together)
