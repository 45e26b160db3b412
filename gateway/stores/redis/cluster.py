"""Send commands to the right server of a cluster.

redis-py finds the servers and the slots of keys, but does not send the commands, for three reasons. Its `RedisCluster`

- takes a connection for each running command, and raises `MaxConnectionsError` instead of waiting for a free one,
- sleeps and retries beyond the deadline of this store when a server is down,
- does not combine commands of different callers.
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

#: redirections that one command follows while keys move between servers
_HOPS: Final = 5
#: position of the first key in a command that runs a script
_FIRST_KEY: Final = 3
#: errors while asking servers for the cluster's layout
_FAULTS: Final = (RedisError, RedisClusterException, OSError)

Node = tuple[str, int]


class ClusterLink:
    """A `Link` to a cluster, see the module. `open_node` opens the link to one server."""

    def __init__(self, address: Address, open_node: OpenNode, timeout_s: float) -> None:
        self._address = address
        self._open_node = open_node
        self._timeout_s = timeout_s
        self._cluster = cluster_of(address, timeout_s)
        self._links: dict[Node, SingleLink] = {}
        #: the servers of all slots are known
        self._is_known = False
        #: the last server that did not respond
        self._silent: Node | None = None
        self._discovery: asyncio.Task[None] | None = None

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`. Commands for the same server are sent together."""
        if not self._is_known:
            await self._discover()
        nodes = [self._node_of(command) for command in commands]
        replies: list[Any] = [None] * len(commands)
        sent = [
            self._send(node, commands, [at for at, one in enumerate(nodes) if one == node], replies)
            for node in dict.fromkeys(nodes)
        ]
        if len(sent) == 1:  # nearly always, and a task costs time
            await sent[0]
        else:
            await asyncio.gather(*sent)
        return checked(self._address.shown, replies)

    async def everywhere(self, *commands: Command) -> list[list[Any]]:
        """See `Link.everywhere`."""
        if not self._is_known:
            await self._discover()
        nodes = [(node.host, int(node.port)) for node in self._cluster.get_primaries()]
        return await asyncio.gather(*(self._link(node).ask(*commands) for node in nodes))

    async def _send(self, node: Node, commands: Sequence[Command], at: Sequence[int], replies: list[Any]) -> None:
        try:
            found = await self._link(node).ask(*(commands[index] for index in at))
        except StoreUnavailable:
            # Another server may have these keys by now.
            self._is_known, self._silent = False, node
            raise
        for index, reply in zip(at, found, strict=True):
            replies[index] = await self._redirected(node, commands[index], reply)

    async def _redirected(self, node: Node, command: Command, reply: Any) -> Any:
        """Follow redirections to other servers, and return the last reply."""
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
        if node is None:  # pragma: no cover  # only if a replica were asked for
            raise TypeError(key)
        return node.host, int(node.port)

    def _link(self, node: Node) -> SingleLink:
        if node not in self._links:
            self._links[node] = self._open_node(replace(self._address, kind="single", hosts=(node,)))
        return self._links[node]

    async def _discover(self) -> None:
        """Find the servers of all slots, once for all callers that wait."""
        if self._discovery is None or self._discovery.done():
            self._discovery = asyncio.create_task(self._find_servers())
        await asyncio.shield(self._discovery)

    async def _find_servers(self) -> None:
        # Not `RedisCluster.initialize`: it also reads the table of all commands, which is not needed here.
        manager = self._cluster.nodes_manager
        silent = None if self._silent is None else f"{self._silent[0]}:{self._silent[1]}"
        try:
            async with asyncio.timeout(self._timeout_s):
                await manager.initialize(last_failed_node_name=silent)
        except _FAULTS as error:
            raise unavailable(self._address.shown, error) from error
        finally:
            await self._close_discovery()
        self._is_known, self._silent = True, None

    async def _close_discovery(self) -> None:
        """Close the connections of the discovery. redis-py drops one that fails to close in time as well."""
        manager = self._cluster.nodes_manager
        for nodes in ("nodes_cache", "startup_nodes"):
            with contextlib.suppress(*_FAULTS):
                await manager.aclose(nodes)

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        if self._discovery is not None:
            await asyncio.wait({self._discovery})
        for link in self._links.values():
            await link.aclose()
