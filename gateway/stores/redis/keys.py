"""Name the keys in Redis.

What belongs to one session carries one hash tag and so lies on one server of a cluster; so does what belongs to one
client key. Lists that go over sessions have keys of their own.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import SessionKey
from gateway.core.stored import Sort

#: parts of the list of open holds in a cluster, so that no one server keeps them all
SHARDS: Final = 16
#: places that are kept under a request id, an answer or a handle
NAMESAKES: Final = 32
#: names that are remembered
_NAMES: Final = 16_384


@lru_cache(_NAMES)
def tag_of(namespace: str, session_id: str) -> str:
    """The hash tag of a session. Quoted, neither of the two has the slash that stands between them, nor a brace."""
    return f"{quote(namespace, safe='')}/{quote(session_id, safe='')}"


def tag_of_account(key: AccountKey) -> str:
    """The hash tag of an account: its session's, or its client key's, which has no slash."""
    return tag_of(key.namespace, key.id) if key.kind == "session" else quote(key.namespace, safe="")


def tag_of_call(call_id: str) -> str:
    """The hash tag of a call without a session; no session's begins with two slashes."""
    return f"//{quote(call_id, safe='')}"


def session_of(tag: str) -> SessionKey | None:
    """Whose tag it is; None for that of a call without a session."""
    if tag.startswith("//"):
        return None
    namespace, _, session_id = tag.partition("/")
    return SessionKey(unquote(namespace), unquote(session_id))


def member_of(key: SessionKey) -> str:
    """A session in a sorted list: compares as namespace and id do."""
    return f"{key.namespace}\0{key.id}"


def session_of_member(member: bytes) -> SessionKey:
    """What `member_of` was made of."""
    namespace, _, session_id = member.decode().partition("\0")
    return SessionKey(namespace, session_id)


@lru_cache(_NAMES)
def _account(key: AccountKey) -> str:
    """The name of an account, behind any prefix."""
    name = "a" if key.kind == "session" else f"{key.kind}:{quote(key.id, safe='')}"
    return f"{{{tag_of_account(key)}}}:{name}"


@lru_cache(_NAMES)
def _list(namespace: str | None, name: str) -> str:
    """The name of a list of one namespace, or of all, behind any prefix."""
    return name if namespace is None else f"{name}:{quote(namespace, safe='')}"


@lru_cache(_NAMES)
def _under(prefix: str, tag: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of things that belong to one session, client key or call."""
    return tuple([f"{prefix}{{{tag}}}:{name}" for name in names])


class Keys:
    """The names under one prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.lessons = f"{prefix}{{lessons}}"
        self.lesson_times = f"{prefix}{{lessons}}:t"
        self.holds = f"{prefix}{{holds}}"
        self.places = f"{prefix}{{holds}}:p"
        self.client_keys = f"{prefix}{{keys}}"
        #: the calls that were settled last, and how many there were in all
        self.latest = f"{prefix}{{latest}}", f"{prefix}{{latest}}:n"
        #: tags of sessions with an account or a state, by when that was noted last: finds those that never called
        self.alone = f"{prefix}alone"
        #: tags, by when the oldest call that is kept under them began (ms)
        self.oldest = f"{prefix}oldest"
        self.ping = f"{prefix}ping"

    def under(self, tag: str, name: str) -> str:
        """Something that belongs to a session, a client key or a call."""
        return f"{self._prefix}{{{tag}}}:{name}"

    def session(self, tag: str) -> str:
        """Totals and times."""
        return self.under(tag, "s")

    def state(self, tag: str) -> str:
        """What the session remembers of its conversations."""
        return self.under(tag, "t")

    def results(self, tag: str) -> str:
        """Tool results by handle."""
        return self.under(tag, "x")

    def tools(self, tag: str) -> tuple[str, str]:
        """How often the session's calls asked for each tool, and for which ones they did last."""
        return self.under(tag, "u"), self.under(tag, "w")

    def all_of(self, tag: str) -> tuple[str, ...]:
        """All keys of a session, in the order in which settle.lua (behind the hold) and forget.lua name them."""
        return _under(self._prefix, tag, ("i", "c", "l", "s", "t", "x", "a", "u", "w"))

    def calls(self, tag: str) -> tuple[str, str, str]:
        """Ids of the calls, their records, and what is known of those taken for lost."""
        return self.under(tag, "i"), self.under(tag, "c"), self.under(tag, "l")

    def account(self, key: AccountKey) -> str:
        """An account."""
        return self._prefix + _account(key)

    def hold(self, hold_id: str, tag: str | None = None) -> str:
        """A hold; with `tag`, the part of it that lies in the slot of that tag."""
        return f"{self._prefix}h:{hold_id}" if tag is None else self.under(tag, f"h:{hold_id}")

    def settled(self, tag: str, call_id: str) -> str:
        """What says that a call was charged to accounts that lie under this tag."""
        return self.under(tag, f"z:{call_id}")

    def shard(self, number: int) -> tuple[str, str]:
        """Deadlines and places of some open holds."""
        return f"{self._prefix}{{holds{number}}}", f"{self._prefix}{{holds{number}}}:p"

    def shard_of(self, hold_id: str) -> tuple[str, str]:
        """The deadlines and places that a hold is among."""
        return self.shard(zlib.crc32(hold_id.encode()) % SHARDS)

    def place(self, call_id: str) -> str:
        """What says under which tag a call's record is."""
        return f"{self._prefix}p:{call_id}"

    def handled(self, namespace: str | None, handle: str) -> str:
        """What says which sessions have a text under a handle: of one namespace, or of all."""
        scope = "" if namespace is None else f"{quote(namespace, safe='')}/"
        return f"{self._prefix}x:{scope}{quote(handle, safe='')}"

    def named(self, namespace: str | None, request_id: str) -> str:
        """What says where the records of calls with a request id are: of one namespace, or of all."""
        scope = "" if namespace is None else f"{quote(namespace, safe='')}/"
        return f"{self._prefix}r:{scope}{quote(request_id, safe='')}"

    def answered(self, namespace: str, answer: str) -> str:
        """What says where the records of calls with an answer are."""
        return f"{self._prefix}n:{quote(namespace, safe='')}/{answer}"

    def sorted_list(self, namespace: str | None, sort: Sort) -> str:
        """Return the name of the sorted list of a namespace's sessions (None: of all)."""
        return self._prefix + _list(namespace, sort)

    def newest(self, namespace: str | None) -> str:
        """Return the name of the list of places of the newest calls of a namespace (None: of all)."""
        return self._prefix + _list(namespace, "calls")
