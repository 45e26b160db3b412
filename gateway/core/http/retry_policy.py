"""Decide whether a request is retried, and when a provider's circuit breaker opens.

Requests are retried only before the first byte of a response, and only if the provider did no work: it refused the
connection, or it reports that it is overloaded. The circuit of a provider that fails repeatedly opens for a while
(`CircuitState`): it is not called, and its callers get an error at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Final

from gateway.core.http.headers import header
from gateway.core.values import dataclass

#: Statuses for which the provider did no work and a retry may succeed. Cloudflare sends 521 if the server refused the
#: connection and 523 if the server is unreachable. 520 (unreadable response), 522 (no acknowledgement) and 524 (too
#: slow) are missing, because the server may have billed the request.
RETRIED: Final = frozenset({429, 502, 503, 521, 523, 529})
#: statuses for which a call falls back to the next provider or model, if there is one
FALLS_BACK: Final = frozenset({408, 429, 500, 502, 503, 504, *range(520, 525), 529})
#: Statuses for a key that is unknown, not allowed or not paid for. If it is the gateway's key, a route with another key
#: may succeed.
KEY_REFUSED: Final = frozenset({401, 402, 403})
#: the status for a request that is too large; another provider may accept it
TOO_LARGE: Final = 413
#: Statuses whose body explains what is wrong with a request, such as its length. llama.cpp and servers built on it use
#: 500. 429 is not among them: it always means a rate, quota or plan, whatever its text says.
EXPLAINED: Final = frozenset({400, TOO_LARGE, 422, 500})
#: Statuses that count as failures for the circuit breaker. 429 is missing because the provider is healthy but busy. 500
#: and 520 are missing because some servers send them for bad requests, and one client must not block all others.
_ILL: Final = frozenset({502, 503, 504, 521, 522, 523, 524, 529})
#: seconds before the first retry; each further wait is twice as long
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 8.0
#: longest `Retry-After` in seconds that is obeyed if another provider can be asked instead
_LONGEST_WITH_NEXT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request is retried, and the longest `Retry-After` that is obeyed, in seconds."""

    retries: int = 2
    longest_s: float = 30.0

    def wait(self, tries: int, asked: float | None, chance: float, *, has_next: bool = False) -> float | None:
        """Return the seconds until the next try, or None if there is none.

        Args:
            tries: tries so far, 1 or more.
            asked: seconds that the provider asked for, or None.
            chance: random number from 0 to 1, so that callers that failed together do not retry together.
            has_next: another provider can be asked, so a long wait is not worth it.
        """
        if tries > self.retries:
            return None
        if asked is not None:
            longest = min(self.longest_s, _LONGEST_WITH_NEXT_S) if has_next else self.longest_s
            return asked if asked <= longest else None
        return min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (tries - 1)) * (0.5 + chance / 2)

    def is_spent(self, tries: int) -> bool:
        """Return whether all retries were used; False if there are none."""
        return tries > self.retries > 0


def requested_wait(headers: Sequence[tuple[bytes, bytes]], now: float) -> float | None:
    """Return the seconds that a response asks the caller to wait, or None.

    `Retry-After` is a number of seconds or a date. `retry-after-ms` of OpenAI and Azure precedes it, as in their SDKs.
    A date in the past is ignored, because clocks differ and all callers would retry at once. `now`: Unix time in
    seconds.
    """
    milliseconds = _number(header(headers, b"retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = header(headers, b"retry-after")
    seconds = _number(value)
    return seconds if seconds is not None else _seconds_until(value, now)


def _number(text: bytes) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number >= 0 else None


def _seconds_until(date: bytes, now: float) -> float | None:
    try:
        then = parsedate_to_datetime(date.decode("latin-1")).timestamp()
    except (ValueError, OverflowError):
        return None
    return then - now if then > now else None


def is_provider_failure(status: int) -> bool:
    """Return whether a status counts as a failure of the provider."""
    return status in _ILL


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """Open the circuit after `failures` failures in a row, for `open_s` seconds; then one call probes it."""

    failures: int = 5
    open_s: float = 15.0


@dataclass(frozen=True, slots=True)
class CircuitState:
    """The circuit breaker of a provider.

    Attributes:
        failed: failures in a row.
        since: when the circuit opened, on a monotonic clock in seconds; None: it is closed.
        is_probed: one call is probing whether the provider is healthy again.
    """

    failed: int = 0
    since: float | None = None
    is_probed: bool = False

    def opens_in(self, policy: BreakerPolicy, now: float) -> float | None:
        """Return the seconds until the provider may be called again, or None if it may be called now."""
        if self.since is None:
            return None
        left = self.since + policy.open_s - now
        return left if left > 0 else (policy.open_s if self.is_probed else None)

    def after_start(self) -> CircuitState:
        """Return the state after a call was sent."""
        return replace(self, is_probed=True) if self.since is not None else self

    def after_call(self, policy: BreakerPolicy, now: float, *, succeeded: bool) -> CircuitState:
        """Return the state after a call ended.

        If the circuit is open, the failure of an earlier call changes nothing.
        """
        if succeeded:
            return CLOSED
        failed = self.failed + 1
        if self.is_probed or (self.since is None and failed >= policy.failures):
            return CircuitState(failed, now)
        return replace(self, failed=failed)

    def after_abandon(self) -> CircuitState:
        """Return the state after a call ended without showing whether the provider is healthy."""
        return replace(self, is_probed=False)


CLOSED: Final = CircuitState()
