"""Define the entries of the audit log: who changed what, with which credential, and from where.

An entry never holds a secret: neither a client key, nor the admin key, nor a text of the configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

from gateway.core.values import dataclass

Action = Literal[
    "session.budget",
    "session.step",
    "session.reset",
    "session.resume",
    "session.delete",
    "key.add",
    "key.change",
    "key.rotate",
    "key.revoke",
    "config.reload",
]
ACTIONS: Final[Sequence[str]] = get_args(Action)

#: entries that a store keeps; the oldest are dropped first
MOST_CHANGES: Final = 10_000
#: the target of changes of the configuration
CONFIGURATION: Final = "configuration"


@dataclass(frozen=True, slots=True)
class Author:
    """Who makes a change.

    Attributes:
        actor: the credential, such as "admin key" or "token of NAME".
        origin: the address of the caller, or USER@HOST of a command.
    """

    actor: str
    origin: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A change that was made.

    Attributes:
        at: Unix time in seconds.
        action: one of `ACTIONS`. An entry of another version may have another one.
        target: the session as KEY/ID, the name of the client key, or `CONFIGURATION`.
        actor: see `Author`.
        origin: see `Author`.
        old: what was in force before, as JSON; None if there was nothing, or it is not known.
        new: what is in force now, as JSON; None if there is nothing any more.
    """

    at: float
    action: str
    target: str
    actor: str
    origin: str
    old: Any = None
    new: Any = None


@dataclass(frozen=True, slots=True)
class AuditPage:
    """A page of the audit log, newest entry first. `cursor` continues it; None at the end."""

    entries: Sequence[AuditEntry]
    cursor: str | None
