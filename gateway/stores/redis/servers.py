"""Connect through redis-py: to one server, to the master of sentinels, or to a cluster.

redis-py does not retry here: only the caller knows which commands may run twice. `link.py` enforces the deadlines.
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

#: TCP keepalive: seconds of silence before the first probe, seconds between probes, and failed probes before the
#: connection is closed. Firewalls and NATs silently forget a connection that was idle for some minutes.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


def _options(address: Address, timeout_s: float, reply_s: float | None) -> dict[str, Any]:
    """Return the options of every connection. `reply_s`: longest wait for a reply; None if the caller limits it."""
    options: dict[str, Any] = {name: value for name, value in address.options if name.startswith("ssl_")}
    if "ssl_check_hostname" in options:
        options |= {"ssl_check_hostname": options["ssl_check_hostname"] == "true"}
    return options | {
        "socket_timeout": reply_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # A system without such an option uses its own value.
        "socket_keepalive_options": {
            getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)
        },
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        # Otherwise each new connection sends the library's name and version, which costs a round trip.
        "driver_info": None,
    }


def pool_of(address: Address, timeout_s: float, connections: int) -> ConnectionPool:
    """Return a pool of connections to one server, or to the master that the sentinels name."""
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
    """Return a client of the sentinels. Each has a share of the timeout: a silent one leaves time for others."""
    max_wait_s = timeout_s / len(address.hosts)
    given = dict(address.options)
    options = _options(address, max_wait_s, max_wait_s) | {
        "ssl": address.tls,
        "username": given.get("sentinel_username"),
        "password": given.get("sentinel_password"),
    }
    return Sentinel(address.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]


def cluster_of(address: Address, timeout_s: float) -> RedisCluster:
    """Return a client of a cluster, which is only used to find the servers of keys."""
    max_wait_s = timeout_s / 3  # after two silent servers there is time for a third
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        # If no server has a part of the keys, the others are served nevertheless.
        require_full_coverage=False,
        ssl=address.tls,
        username=address.username,
        password=address.password,
        **_options(address, max_wait_s, max_wait_s),
    )
