"""The way to a cluster: which server has which keys, and what is sent to the wrong one is sent on."""

from __future__ import annotations

import asyncio
from binascii import crc_hqx
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from gateway.core.errors import StoreUnavailable
from gateway.core.redis_url import Address
from gateway.stores.redis.link import OpenNode, SingleLink, checked, unavailable
from gateway.stores.redis.scripts import Command
from gateway.stores.redis.wire import is_error

#: servers that one command is sent on to, while keys move
_HOPS: Final = 5
#: where the first key of a script stands
_FIRST_KEY: Final = 3
_SLOTS: Final = 16_384

Node = tuple[str, int]
#: first and last slot, and who has them
_Range = tuple[int, int, Node]


def slot_of(key: bytes) -> int:
    """The slot of a key: of what stands in its first braces, where something does."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start)
    tag = key[start:end] if start and end > start else key
    return crc_hqx(tag, 0) % _SLOTS


class ClusterLink:
    """See the module, and `Link`. `open_node` makes the way to one server."""

    def __init__(self, address: Address, open_node: OpenNode) -> None:
        self._address = address
        self._open_node = open_node
        self._links: dict[Node, SingleLink] = {}
        #: empty: to be asked for
        self._ranges: list[_Range] = []
        self._asked: set[asyncio.Task[list[_Range] | StoreUnavailable]] = set()
        self._asking: asyncio.Task[None] | None = None

    async def call(self, *commands: Command) -> list[Any]:
        """See `Link.call`. What goes to one server is sent together."""
        if not self._ranges:
            await self._learn()
        nodes = [self._node_of(command) for command in commands]
        replies: list[Any] = [None] * len(commands)
        await asyncio.gather(
            *(
                self._send(node, commands, [at for at, one in enumerate(nodes) if one == node], replies)
                for node in dict.fromkeys(nodes)
            )
        )
        return checked(self._address.shown, replies)

    async def _send(self, node: Node, commands: Sequence[Command], at: Sequence[int], replies: list[Any]) -> None:
        try:
            found = await self._link(node).ask(*(commands[one] for one in at))
        except StoreUnavailable:
            # Another server may have its keys by now.
            self._ranges = []
            raise
        for one, reply in zip(at, found, strict=True):
            replies[one] = await self._sent_on(node, commands[one], reply)

    async def _sent_on(self, node: Node, command: Command, reply: Any) -> Any:
        """What the right server says, where the first one named another: it has done nothing then."""
        for _ in range(_HOPS):
            if is_error(reply, "MOVED", "CLUSTERDOWN"):
                self._ranges = []
            if not is_error(reply, "MOVED", "ASK"):
                break
            code, _, place = str(reply).split(" ")
            host, _, port = place.rpartition(":")
            node = (host or node[0], int(port))
            asking: tuple[Command, ...] = (("ASKING",),) if code == "ASK" else ()
            *_, reply = await self._link(node).ask(*asking, command)
        return reply

    def _node_of(self, command: Command) -> Node:
        key = command[_FIRST_KEY if command[0] == "EVALSHA" else 1]
        slot = slot_of(key if isinstance(key, bytes) else str(key).encode())
        for first, last, node in self._ranges:
            if first <= slot <= last:
                return node
        self._ranges = []
        raise unavailable(self._address.shown, ConnectionError("no server has the keys"))

    def _link(self, node: Node) -> SingleLink:
        if node not in self._links:
            self._links[node] = self._open_node(replace(self._address, kind="single", hosts=(node,)))
        return self._links[node]

    async def _learn(self) -> None:
        """Ask who has which keys: all servers at once, and the first that knows is believed."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all())
        await asyncio.shield(self._asking)

    async def _ask_all(self) -> None:
        nodes = dict.fromkeys([*self._address.hosts, *self._links])
        asked = {asyncio.create_task(self._ask(node)) for node in nodes}
        self._asked |= asked
        fault = unavailable(self._address.shown, ConnectionError("no server has any keys"))
        while asked:
            done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            self._asked -= done
            for answer in (task.result() for task in done):
                if isinstance(answer, StoreUnavailable):
                    fault = answer
                elif answer:
                    self._ranges = answer
                    return
        raise fault

    async def _ask(self, node: Node) -> list[_Range] | StoreUnavailable:
        try:
            [ranges] = await self._link(node).call(("CLUSTER", "SLOTS"))
        except StoreUnavailable as error:
            return error
        return [(first, last, (host.decode() or node[0], port)) for first, last, (host, port, *_), *_ in ranges]

    async def aclose(self) -> None:
        """See `Link.aclose`."""
        await asyncio.gather(*self._asked)
        for link in self._links.values():
            await link.aclose()
