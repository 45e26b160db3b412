"""Decide whether a provider is asked again, and when its circuit opens.

Only before the first byte of an answer.

A retry is safe if nothing was done: the connection was refused, or the provider says that it is overloaded. A provider
that fails repeatedly is not called at all for a while (`CircuitState`), so that its callers get an error at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Final

from gateway.core.http.headers import header
from gateway.core.values import dataclass

#: Statuses under which a provider says that it did nothing, and might next time. Of those that Cloudflare says for a
#: server behind it, 521 is a connection refused and 523 no way to it; 522 may come of a request that was never
#: acknowledged, 520 of an answer that it could not read, 524 of one that took too long: those may have been billed.
REPEATED: Final = frozenset({429, 502, 503, 521, 523, 529})
#: statuses at which a call goes to the next provider or model, where there is one
FAILED: Final = frozenset({408, 429, 500, 502, 503, 504, *range(520, 525), 529})
#: Statuses that say of a key that it is unknown, not allowed or not paid for. Where it is the gateway's own, a route
#: with another key may answer.
KEY_REFUSED: Final = frozenset({401, 402, 403})
#: the status that says of a request that it is too large, whatever its body says: another provider may take it
TOO_LARGE: Final = 413
#: Statuses under which a provider says what is wrong with a request, such as its length; llama.cpp and what is built on
#: it says so with 500. 429 is none of them: a rate, a quota or a tariff, however it is worded.
TELLING: Final = frozenset({400, TOO_LARGE, 422, 500})
#: Statuses that say that a provider is not well. 429 says that it is well and busy; 500 and 520 some servers say of a
#: request that they do not like, and one client's requests must not close the way of all others.
_ILL: Final = frozenset({502, 503, 504, 521, 522, 523, 524, 529})
#: seconds before the second try; each further wait is twice as long
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 8.0
#: seconds that a provider may ask for where another one can be asked instead
_LONGEST_WITH_NEXT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a provider is asked again, and the longest wait that it may ask for (`Retry-After`), in seconds."""

    retries: int = 2
    longest_s: float = 30.0

    def wait(self, tries: int, asked: float | None, chance: float, *, has_next: bool = False) -> float | None:
        """Seconds until the next try after so many; None: there is none.

        Args:
            tries: that were made, 1 or more.
            asked: seconds that the provider asked for, if it did.
            chance: 0 to 1; callers that failed together do not come back together.
            has_next: another provider can be asked, so that nobody sits out a long wait.
        """
        if tries > self.retries:
            return None
        if asked is not None:
            longest = min(self.longest_s, _LONGEST_WITH_NEXT_S) if has_next else self.longest_s
            return asked if asked <= longest else None
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (tries - 1)) * (0.5 + chance / 2)

    def is_spent(self, tries: int) -> bool:
        """Return whether the provider was asked again as often as it may be; False where it is never asked again."""
        return tries > self.retries > 0


def asked_wait(headers: Sequence[tuple[bytes, bytes]], now: float) -> float | None:
    """The seconds that an answer asks its caller to wait; None where it says nothing of it.

    `Retry-After` is a number of seconds or a date; `retry-after-ms`, of OpenAI and Azure, goes before it, as in their
    SDKs. A date that is over says nothing: the clocks differ, and all would come back at once. `now`: of the epoch.
    """
    milliseconds = _number(header(headers, b"retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    said = header(headers, b"retry-after")
    seconds = _number(said)
    return seconds if seconds is not None else _seconds_until(said, now)


def _number(said: bytes) -> float | None:
    try:
        number = float(said)
    except ValueError:
        return None
    return number if number >= 0 else None


def _seconds_until(date: bytes, now: float) -> float | None:
    try:
        then = parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except (ValueError, OverflowError):
        return None
    return then - now if then > now else None


def is_ill(status: int) -> bool:
    """Whether an answer says that the provider is not well."""
    return status in _ILL


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """After so many failures in a row a provider is left alone for `open_s` seconds, then asked by one call."""

    failures: int = 5
    open_s: float = 15.0


@dataclass(frozen=True, slots=True)
class CircuitState:
    """How a provider has done of late. `since`: when it was left alone, on a monotonic clock; None: it is asked.

    `is_tried`: one call is asking whether it is well again.
    """

    failed: int = 0
    since: float | None = None
    is_tried: bool = False

    def opens_in(self, policy: BreakerPolicy, now: float) -> float | None:
        """Seconds until it may be asked again; None: now."""
        if self.since is None:
            return None
        left = self.since + policy.open_s - now
        return left if left > 0 else (policy.open_s if self.is_tried else None)

    def asked(self) -> CircuitState:
        """A call goes out."""
        return replace(self, is_tried=True) if self.since is not None else self

    def did(self, policy: BreakerPolicy, now: float, *, well: bool) -> CircuitState:
        """A call came back. Where the provider is left alone already, a failure of an earlier call changes nothing."""
        if well:
            return WELL
        failed = self.failed + 1
        if self.is_tried or (self.since is None and failed >= policy.failures):
            return CircuitState(failed, now)
        return replace(self, failed=failed)

    def left(self) -> CircuitState:
        """A call ended before it could tell how the provider does."""
        return replace(self, is_tried=False)


WELL: Final = CircuitState()
