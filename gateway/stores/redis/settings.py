"""Warn about server settings that can lose data."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.stores.redis.link import Link

logger = logging.getLogger("gateway")

#: INFO and not CONFIG GET, which more of the managed servers forbid.
_ASKED: Final = (("INFO", "memory"), ("INFO", "persistence"))


async def warn_of_loss(link: Link, shown: str) -> None:
    """Log settings of the servers that can lose data. A server that hides its settings is not asked again.

    Raises:
        StoreUnavailable: one of them did not respond in time.
    """
    problems: dict[str, None] = {}
    for replies in await link.everywhere(*_ASKED):
        problems |= dict.fromkeys(_problems(_fields(replies)))
    for problem in problems:
        logger.warning("the store %s: %s", shown, problem)


def _fields(replies: list[Any]) -> Mapping[str, str]:
    texts = [reply.decode() for reply in replies if isinstance(reply, bytes)]
    lines = [line for text in texts for line in text.splitlines() if ":" in line]
    return dict(line.split(":", 1) for line in lines)


def _problems(fields: Mapping[str, str]) -> Iterator[str]:
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"maxmemory-policy is {policy}: when memory is short it deletes budgets and holds. Set it to noeviction"
    if fields.get("aof_enabled", "1") == "0":
        yield "appendonly is off: a restart of the server loses the usage since its last snapshot. Set it to yes"
