"""Define a request to a provider, and the callback that reports whether the provider may be working on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.core.http.headers import Headers
from gateway.core.values import dataclass


class WorkObserver(Protocol):
    """Receive whether a provider may be working on a call. From then on, a cancelled call may be billed."""

    def __call__(self, *, is_so: bool) -> None:
        """Receive the state. `is_so`: a provider may be working on the call from now on."""


def ignore_work(*, is_so: bool) -> None:
    """Do nothing: the `WorkObserver` of requests for which billing does not matter."""
    del is_so


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request to a provider.

    Attributes:
        url: absolute and already encoded.
        note: adds a remark, by name, to the record of the call.
        on_work: see `WorkObserver`.
        call_id: the call that the request belongs to.
        has_next: another provider will be asked if this one fails.
    """

    method: str
    url: str
    headers: Headers
    body: bytes
    note: Callable[[str, str], None] = lambda _name, _text: None
    on_work: WorkObserver = ignore_work
    call_id: str = ""
    has_next: bool = False
