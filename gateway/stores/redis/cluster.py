"""Send commands to the right server of a cluster.

redis-py finds the servers and knows who has which keys. Sending is ours: its `RedisCluster` takes a connection for each
command under way and raises `MaxConnectionsError` where there is none left, instead of waiting; it sleeps and asks
again where a server is down, beyond our deadline; and it puts no commands of different callers together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from redis.exceptions import AskError, ClusterDownError, MovedError, RedisClusterException, RedisError

from gateway.core.errors import StoreUnavailable
from gateway.core.redis_url import Address
from gateway.stores.redis.link import OpenNode, SingleLink, checked, unavailable
from gateway.stores.redis.scripts import Command
from gateway.stores.redis.servers import cluster_of

#: servers that one command is sent on to, while keys move
_HOPS: Final = 5
#: the place of the first key in the command that runs a script
_FIRST_KEY: Final = 3
#: what can go wrong while the servers are asked for each other
_FAULTS: Final = (RedisError, RedisClusterException, OSError)

Node = tuple[str, int]


class ClusterLink:
    """See the module, and `Link`. `open_node` makes the way to one server."""

    def __init__(self, address: Address, open_node: OpenNode, timeout_s: float) -> None:
        self._address = address
        self._open_node = open_node
        self._timeout_s = timeout_s
        self._cluster = cluster_of(address, timeout_s)
        self._links: dict[Node, SingleLink] = {}
        #: whether it is known which server has which keys
        self._is_known = False
        #: the server that did not answer since
        self._silent: Node | None = None
        self._asking: asyncio.Task[None] | None = None

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`. What goes to one server is sent together."""
        if not self._is_known:
            await self._learn()
        nodes = [self._node_of(command) for command in commands]
        replies: list[Any] = [None] * len(commands)
        sent = [
            self._send(node, commands, [at for at, one in enumerate(nodes) if one == node], replies)
            for node in dict.fromkeys(nodes)
        ]
        if len(sent) == 1:  # nearly always, and a task by itself takes its time
            await sent[0]
        else:
            await asyncio.gather(*sent)
        return checked(self._address.shown, replies)

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """See `Link.everywhere`."""
        if not self._is_known:
            await self._learn()
        nodes = [(node.host, int(node.port)) for node in self._cluster.get_primaries()]
        return await asyncio.gather(*(self._link(node).ask(*commands) for node in nodes))

    async def _send(self, node: Node, commands: Sequence[Command], at: Sequence[int], replies: list[Any]) -> None:
        try:
            found = await self._link(node).ask(*(commands[one] for one in at))
        except StoreUnavailable:
            # Another server may have its keys by now.
            self._is_known, self._silent = False, node
            raise
        for one, reply in zip(at, found, strict=True):
            replies[one] = await self._sent_on(node, commands[one], reply)

    async def _sent_on(self, node: Node, command: Command, reply: Any) -> Any:
        """The reply; where that does nothing but name another server, the reply of the other one."""
        for _ in range(_HOPS):
            if isinstance(reply, (MovedError, ClusterDownError)):
                self._is_known = False
            if not isinstance(reply, AskError):
                break
            node = (reply.host or node[0], int(reply.port))
            asking: tuple[Command, ...] = () if isinstance(reply, MovedError) else (("ASKING",),)
            *_, reply = await self._link(node).ask(*asking, command)
        return reply

    def _node_of(self, command: Command) -> Node:
        key = command[_FIRST_KEY if command[0] == "EVALSHA" else 1]
        try:
            node = self._cluster.get_node_from_key(str(key))
        except RedisClusterException as error:
            self._is_known = False
            raise unavailable(self._address.shown, error) from error
        if node is None:  # pragma: no cover  # only where a replica is asked for
            raise TypeError(key)
        return node.host, int(node.port)

    def _link(self, node: Node) -> SingleLink:
        if node not in self._links:
            self._links[node] = self._open_node(replace(self._address, kind="single", hosts=(node,)))
        return self._links[node]

    async def _learn(self) -> None:
        """Ask who has which keys, once for all who wait."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        # Not `RedisCluster.initialize`: that also reads the table of all commands, for routing that is ours.
        manager = self._cluster.nodes_manager
        silent = None if self._silent is None else f"{self._silent[0]}:{self._silent[1]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                await manager.initialize(last_failed_node_name=silent)
        except _FAULTS as error:
            raise unavailable(self._address.shown, error) from error
        finally:
            await self._hang_up()
        self._is_known, self._silent = True, None

    async def _hang_up(self) -> None:
        """Close the connections that this was asked over. One that fails to close in time is closed all the same."""
        manager = self._cluster.nodes_manager
        for nodes in ("nodes_cache", "startup_nodes"):
            with contextlib.suppress(*_FAULTS):
                await manager.aclose(nodes)

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        if self._asking is not None:
            await asyncio.wait({self._asking})
        for link in self._links.values():
            await link.aclose()
