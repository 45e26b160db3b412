"""Name the keys in Redis.

All keys of one session have the same hash tag, so that they are on one server of a cluster. The same holds for the
keys of one client key. Lists of several sessions have keys of their own.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import SessionKey
from gateway.core.rollup import Period
from gateway.core.stored import Sort

#: parts of the list of open holds in a cluster, so that not all are on one server
SHARDS: Final = 16
#: parts of the usage by hour and day in a cluster; one server has only the first
USAGE_SHARDS: Final = 4
#: calls or sessions listed under one request id, response id or handle
NAMESAKES: Final = 32
#: key names to cache
_NAMES: Final = 16_384


@lru_cache(_NAMES)
def tag_of(namespace: str, session_id: str) -> str:
    """Return the hash tag of a session. Quoting removes slashes and braces, so the slash between both is unique."""
    return f"{quote(namespace, safe='')}/{quote(session_id, safe='')}"


def tag_of_account(key: AccountKey) -> str:
    """Return the hash tag of an account: of its session, or of its client key, which has no slash."""
    if key.kind in ("session", "agent"):
        return tag_of(key.namespace, key.session_id)
    return quote(key.namespace, safe="")


def usage_tag(call_id: str | None = None) -> str:
    """Return the hash tag of the part of the usage to which a call is added; None: of the only part of one server."""
    return f"usage{zlib.crc32(call_id.encode()) % USAGE_SHARDS if call_id is not None else 0}"


def tag_of_call(call_id: str) -> str:
    """Return the hash tag of a call without a session. No tag of a session begins with two slashes."""
    return f"//{quote(call_id, safe='')}"


def session_of(tag: str) -> SessionKey | None:
    """Return the session of a tag; None for the tag of a call without a session."""
    if tag.startswith("//"):
        return None
    namespace, _, session_id = tag.partition("/")
    return SessionKey(unquote(namespace), unquote(session_id))


def member_of(key: SessionKey) -> str:
    """Return a session's member in sorted lists, which sorts by namespace and id."""
    return f"{key.namespace}\0{key.id}"


def session_of_member(member: bytes) -> SessionKey:
    """Return the session of a member of sorted lists."""
    namespace, _, session_id = member.decode().partition("\0")
    return SessionKey(namespace, session_id)


@lru_cache(_NAMES)
def _account(key: AccountKey) -> str:
    """Return the name of an account, without the prefix."""
    if key.kind == "session":
        name = "a"
    elif key.kind == "agent":
        name = f"b:{quote(key.agent_id, safe='')}"  # prelude.lua finds the session's other keys by this name
    else:
        name = f"{key.kind}:{quote(key.id, safe='')}"
    return f"{{{tag_of_account(key)}}}:{name}"


@lru_cache(_NAMES)
def _list(namespace: str | None, name: str) -> str:
    """Return the name of a list of one namespace (None: of all), without the prefix."""
    return name if namespace is None else f"{name}:{quote(namespace, safe='')}"


@lru_cache(_NAMES)
def _under(prefix: str, tag: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of several keys with the same tag."""
    return tuple([f"{prefix}{{{tag}}}:{name}" for name in names])


class Keys:
    """Builds the names of keys with one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.lessons = f"{prefix}{{lessons}}"
        self.lesson_times = f"{prefix}{{lessons}}:t"
        self.holds = f"{prefix}{{holds}}"
        self.places = f"{prefix}{{holds}}:p"
        self.client_keys = f"{prefix}{{keys}}"
        #: a stream
        self.audit = f"{prefix}{{audit}}"
        #: the calls that were settled last, and the number of all settled calls
        self.latest = f"{prefix}{{latest}}", f"{prefix}{{latest}}:n"
        #: Tags of sessions with an account or a state, by the time of their last change. It leads to those that never
        #: made a call.
        self.alone = f"{prefix}alone"
        #: tags, by the start of the oldest call that is kept under them (ms)
        self.oldest = f"{prefix}oldest"
        self.ping = f"{prefix}ping"

    def under(self, tag: str, name: str) -> str:
        """Return the key of a value that belongs to a session, a client key or a call."""
        return f"{self._prefix}{{{tag}}}:{name}"

    def session(self, tag: str) -> str:
        """Return the key of a session's totals and times."""
        return self.under(tag, "s")

    def state(self, tag: str) -> str:
        """Return the key of a session's state."""
        return self.under(tag, "t")

    def results(self, tag: str) -> str:
        """Return the key of a session's tool results by handle."""
        return self.under(tag, "x")

    def tools(self, tag: str) -> tuple[str, str]:
        """Return the keys of a session's tool calls: their counts by tool, and the names of the last ones."""
        return self.under(tag, "u"), self.under(tag, "w")

    def agents(self, tag: str) -> str:
        """Return the key of what the subagents of a session used."""
        return self.under(tag, "g")

    def all_of(self, tag: str) -> tuple[str, ...]:
        """Return all keys of a session in the order of KEYS of forget.lua, and of settle.lua after the hold.

        The accounts of its agents have keys of their own. `y` lists them, see `remember_agent` in prelude.lua.
        """
        return _under(self._prefix, tag, ("i", "c", "l", "s", "t", "x", "a", "u", "w", "g"))

    def calls(self, tag: str) -> tuple[str, str, str]:
        """Return the keys of calls: their ids, their records, and the charges of orphaned calls."""
        return self.under(tag, "i"), self.under(tag, "c"), self.under(tag, "l")

    def account(self, key: AccountKey) -> str:
        """Return the key of an account."""
        return self._prefix + _account(key)

    def hold(self, hold_id: str, tag: str | None = None) -> str:
        """Return the key of a hold; with `tag`, of its part in the slot of that tag."""
        return f"{self._prefix}h:{hold_id}" if tag is None else self.under(tag, f"h:{hold_id}")

    def settled(self, tag: str, call_id: str) -> str:
        """Return the key that marks a call as charged to the accounts under this tag."""
        return self.under(tag, f"z:{call_id}")

    def shard(self, number: int) -> tuple[str, str]:
        """Return the keys of one part of the list of open holds: their deadlines, and their tags."""
        return f"{self._prefix}{{holds{number}}}", f"{self._prefix}{{holds{number}}}:p"

    def shard_of(self, hold_id: str) -> tuple[str, str]:
        """Return the keys of the part of the list that a hold is in."""
        return self.shard(zlib.crc32(hold_id.encode()) % SHARDS)

    def usage(self, tag: str, period: Period, number: int) -> str:
        """Return the key of a part of the usage of an hour or day, see `count_usage` in prelude.lua."""
        return self.under(tag, f"{period}:{number}")

    def place(self, call_id: str) -> str:
        """Return the key that leads from a call id to the tag of its record."""
        return f"{self._prefix}p:{call_id}"

    def handled(self, namespace: str | None, handle: str) -> str:
        """Return the key that leads from a handle to the sessions with a text under it, in a namespace (None: all)."""
        scope = "" if namespace is None else f"{quote(namespace, safe='')}/"
        return f"{self._prefix}x:{scope}{quote(handle, safe='')}"

    def named(self, namespace: str | None, request_id: str) -> str:
        """Return the key that leads from a request id to the records of its calls, in a namespace (None: in all)."""
        scope = "" if namespace is None else f"{quote(namespace, safe='')}/"
        return f"{self._prefix}r:{scope}{quote(request_id, safe='')}"

    def answered(self, namespace: str, answer: str) -> str:
        """Return the key that leads from a response id to the records of its calls."""
        return f"{self._prefix}n:{quote(namespace, safe='')}/{answer}"

    def sorted_list(self, namespace: str | None, sort: Sort) -> str:
        """Return the key of the sorted list of a namespace's sessions (None: of all)."""
        return self._prefix + _list(namespace, sort)

    def newest(self, namespace: str | None) -> str:
        """Return the key of the list of the newest calls of a namespace (None: of all)."""
        return self._prefix + _list(namespace, "calls")
