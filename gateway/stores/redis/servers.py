"""Connect through redis-py: to one server, to the master of sentinels, or to a cluster.

It retries nothing by itself: only whoever asked knows what may be done twice. Deadlines are those of `link`.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from gateway.core.redis_url import Address

#: Seconds of quiet until the other side is asked for a sign of life, between two asks, and asks in vain until the end:
#: firewalls and NATs forget a connection that was quiet for some minutes, and say nothing.
_ASKING: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def _options(address: Address, timeout_s: float, silence_s: float | None) -> dict[str, Any]:
    """What every connection is told; `silence_s`: the longest wait for one answer, None where others look after it."""
    asked: dict[str, Any] = {name: value for name, value in address.options if name.startswith("ssl_")}
    if "ssl_check_hostname" in asked:
        asked |= {"ssl_check_hostname": asked["ssl_check_hostname"] == "true"}
    return asked | {
        "socket_timeout": silence_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # Where a system has no such option, its own value holds.
        "socket_keepalive_options": {
            getattr(socket, name): value for name, value in _ASKING.items() if hasattr(socket, name)
        },
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        # Else each new connection tells the server name and version of the library, at the price of a round trip.
        "driver_info": None,
    }


def pool_of(address: Address, timeout_s: float, connections: int) -> ConnectionPool:
    """Connections to one server, or to the one that the sentinels name."""
    options = _options(address, timeout_s, None)
    options |= {"username": address.username, "password": address.password, "db": address.db}
    options["max_connections"] = connections
    if address.kind == "sentinel":
        return SentinelConnectionPool(  # type: ignore[no-untyped-call]
            address.service, _sentinel(address, timeout_s), ssl=address.tls, **options
        )
    [(host, port)] = address.hosts
    if address.tls:
        options["connection_class"] = SSLConnection
    return ConnectionPool(host=host, port=port, **options)


def _sentinel(address: Address, timeout_s: float) -> Sentinel:
    """The sentinels. One that is silent leaves time to ask the others."""
    max_wait_s = timeout_s / len(address.hosts)
    told = dict(address.options)
    asked = _options(address, max_wait_s, max_wait_s) | {
        "ssl": address.tls,
        "username": told.get("sentinel_username"),
        "password": told.get("sentinel_password"),
    }
    return Sentinel(address.hosts, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]


def cluster_of(address: Address, timeout_s: float) -> RedisCluster:
    """A client of a cluster, which is asked where keys are, and for nothing else."""
    max_wait_s = timeout_s / 3  # behind two servers that are silent there is time for a third
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        # A part of the keys without a server is no reason not to serve the others.
        require_full_coverage=False,
        ssl=address.tls,
        username=address.username,
        password=address.password,
        **_options(address, max_wait_s, max_wait_s),
    )
