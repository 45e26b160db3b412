"""Test retries and circuit breakers."""

from __future__ import annotations

import pytest

from gateway.core.http.retry_policy import (
    CLOSED,
    RETRIED,
    BreakerPolicy,
    CircuitState,
    RetryPolicy,
    is_provider_failure,
    requested_wait,
)

#: Wed, 21 Oct 2026 07:28:00 GMT
THEN = 1_792_567_680.0


def test_waits_double_with_jitter_up_to_a_limit() -> None:
    policy = RetryPolicy(3)
    assert [policy.wait(tries, None, 1.0) for tries in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, None]
    assert policy.wait(1, None, 0.0) == 0.25
    assert RetryPolicy(20).wait(15, None, 1.0) == 8.0
    assert RetryPolicy(0).wait(1, None, 1.0) is None


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        *(("3", 3.0), ("0", 0.0), ("0.5", 0.5), ("30", 30.0), ("31", None), ("1e9", None), ("1e400", None)),
        *(("Wed, 21 Oct 2026 07:28:12 GMT", 12.0), ("Wed, 21 Oct 2026 09:28:12 +0200", 12.0)),
        *(("Wednesday, 21-Oct-26 07:28:12 GMT", 12.0), ("Wed, 21 Oct 2026 08:28:00 GMT", None)),
    ],
)
def test_retry_after_is_obeyed_up_to_a_limit(said: str, seconds: float | None) -> None:
    asked = requested_wait([(b"retry-after", said.encode())], THEN)
    assert asked is not None
    assert RetryPolicy(2).wait(1, asked, 0.5) == seconds


@pytest.mark.parametrize(("asked", "seconds"), [(0.0, 0.0), (2.0, 2.0), (2.1, None), (10.0, None), (None, 0.5)])
def test_long_retry_after_is_not_awaited_with_a_fallback(asked: float | None, seconds: float | None) -> None:
    assert RetryPolicy(2).wait(1, asked, 1.0, has_next=True) == seconds
    assert RetryPolicy(2, longest_s=1.0).wait(1, 1.5, 1.0, has_next=True) is None


def test_retry_after_ms_precedes_retry_after() -> None:
    headers = [(b"retry-after", b"2"), (b"retry-after-ms", b"1250")]
    assert requested_wait(headers, THEN) == 1.25
    assert requested_wait([(b"retry-after", b"2"), (b"retry-after-ms", b"soon")], THEN) == 2.0


@pytest.mark.parametrize(
    "said",
    ["Wed, 21 Oct 2026 07:27:59 GMT", "Wed, 99 Oct 2026 07:28:00 GMT", "soon", "", "-1", "nan", "\xb2", None],
)
def test_invalid_retry_after_is_ignored(said: str | None) -> None:
    headers = [(b"retry-after", said.encode("latin-1"))] if said is not None else []
    assert requested_wait(headers, THEN) is None
    assert RetryPolicy(2).wait(1, None, 1.0) == 0.5


def test_429_does_not_open_the_circuit() -> None:
    assert [is_provider_failure(status) for status in (200, 400, 413, 429, 500, 520)] == [False] * 6
    assert [is_provider_failure(status) for status in (502, 503, 504, 521, 522, 523, 524, 529)] == [True] * 8


def test_only_statuses_without_work_are_retried() -> None:
    assert [status in RETRIED for status in (429, 502, 503, 521, 523, 529)] == [True] * 6
    assert [status in RETRIED for status in (413, 500, 504, 520, 522, 524)] == [False] * 6


POLICY = BreakerPolicy(failures=3, open_s=10)


def failed(times: int, breaker: CircuitState = CLOSED, now: float = 100.0) -> CircuitState:
    for _ in range(times):
        breaker = breaker.after_start().after_call(POLICY, now, succeeded=False)
    return breaker


def test_circuit_opens_after_failures_in_a_row() -> None:
    assert failed(2).opens_in(POLICY, 100) is None
    assert failed(2).after_call(POLICY, 100, succeeded=True) == CLOSED
    opened = failed(3)
    assert opened.opens_in(POLICY, 100) == 10
    assert opened.opens_in(POLICY, 109) == 1


def test_one_call_probes_an_open_circuit() -> None:
    opened = failed(3)
    assert opened.opens_in(POLICY, 110) is None
    tried = opened.after_start()
    assert tried.opens_in(POLICY, 110) == 10
    assert tried.after_call(POLICY, 111, succeeded=True) == CLOSED
    again = tried.after_call(POLICY, 111, succeeded=False)
    assert again.opens_in(POLICY, 112) == 9
    assert tried.after_abandon().opens_in(POLICY, 112) is None


def test_late_failure_does_not_extend_an_open_circuit() -> None:
    opened = failed(3)
    late = opened.after_call(POLICY, 105, succeeded=False)
    assert late.opens_in(POLICY, 105) == 5
    assert late.after_call(POLICY, 106, succeeded=True) == CLOSED
