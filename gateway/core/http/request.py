"""Define a request to a provider, and the callback that says whether the provider is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.core.http.headers import Headers
from gateway.core.values import dataclass


class WorkObserver(Protocol):
    """Is told whether a provider may be at work on a call: then giving it up may cost something."""

    def __call__(self, *, is_so: bool) -> None:
        """`is_so`: whether one may be, from now on."""


def notify_nobody(*, is_so: bool) -> None:
    """The `WorkObserver` for those who need not be told."""
    del is_so


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to a provider. `url` is absolute and already encoded.

    `note` keeps a remark, by its name, in the call's record; `at_work`: see `WorkObserver`; `call_id`: the call it
    is for; `has_next`: another provider is asked if this one fails.
    """

    method: str
    url: str
    headers: Headers
    body: bytes
    note: Callable[[str, str], None] = lambda _name, _text: None
    at_work: WorkObserver = notify_nobody
    call_id: str = ""
    has_next: bool = False
