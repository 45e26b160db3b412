"""Retries where nothing was done, and the circuit breaker, with a scripted upstream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from types import TracebackType

import pytest

from gateway.core.errors import (
    UpstreamNotAccepted,
    UpstreamOpenCircuit,
    UpstreamRefused,
    UpstreamTimeout,
    UpstreamUnreachable,
    UpstreamUntranslated,
)
from gateway.core.http.request import Outgoing
from gateway.core.http.retry_policy import BreakerPolicy, RetryPolicy
from gateway.upstream.retrying import RetryingUpstream


@dataclass
class Reply:
    status: int
    headers: Sequence[tuple[bytes, bytes]] = ()

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"body"


@dataclass
class Sending:
    outcome: Reply | BaseException | asyncio.Event
    left: int = 0

    async def __aenter__(self) -> Reply:
        if isinstance(self.outcome, asyncio.Event):
            await self.outcome.wait()
            return Reply(200)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.left += 1


@dataclass
class Provider:
    """Returns scripted results, one per call; an event is a result that waits until it is set."""

    outcomes: Iterable[int | Reply | BaseException | asyncio.Event]
    sent: list[Sending] = field(default_factory=list)
    closed: bool = False

    def send(self, request: Outgoing) -> Sending:
        assert request.body == b"{}"
        outcome = list(self.outcomes)[len(self.sent)]
        self.sent.append(Sending(Reply(outcome) if isinstance(outcome, int) else outcome))
        return self.sent[-1]

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Clock:
    now: float = 1000.0
    waits: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def patient(provider: Provider, clock: Clock, *, retries: int = 2, failures: int = 3) -> RetryingUpstream:
    return RetryingUpstream(
        "p",
        provider,
        RetryPolicy(retries),
        BreakerPolicy(failures, 10),
        clock=clock,
        wall=lambda: 1_792_567_680.0,
        sleep=clock.sleep,
        chance=lambda: 1,
    )


async def ask(upstream: RetryingUpstream, notes: dict[str, str] | None = None) -> int:
    notes = {} if notes is None else notes
    async with upstream.send(Outgoing("POST", "http://p/v1/x", [], b"{}", notes.__setitem__)) as reply:
        return reply.status


@pytest.mark.parametrize("first", [429, 502, 503, 521, 523, 529, UpstreamRefused("no"), UpstreamNotAccepted("full")])
async def test_refused_request_is_retried(first: int | BaseException) -> None:
    provider, clock, notes = Provider([first, 200]), Clock(), {}  # type: ignore[var-annotated]
    assert await ask(patient(provider, clock), notes) == 200
    assert clock.waits == [0.5]
    assert notes["retries"].startswith("1, the last after ")
    assert [one.left for one in provider.sent] == [int(isinstance(first, int)), 1], "every answer is left once"


@pytest.mark.parametrize(
    "first", [200, 400, 401, 404, 413, 500, 504, 520, 522, 524, UpstreamUnreachable("reset"), UpstreamTimeout("silent")]
)
async def test_request_that_may_have_been_executed_is_not_retried(first: int | BaseException) -> None:
    provider, clock = Provider([first, 200]), Clock()
    if isinstance(first, int):
        assert await ask(patient(provider, clock)) == first
    else:
        with pytest.raises(type(first)):
            await ask(patient(provider, clock))
    assert len(provider.sent) == 1
    assert clock.waits == []


async def test_connect_timeout_is_not_retried_if_a_fallback_exists() -> None:
    slow, quick = UpstreamNotAccepted("full"), UpstreamRefused("no")
    provider = Provider([slow, 200])
    with pytest.raises(UpstreamNotAccepted):
        async with patient(provider, Clock()).send(Outgoing("POST", "http://p/v1/x", [], b"{}", has_next=True)):
            pass
    assert len(provider.sent) == 1
    provider = Provider([quick, 200])
    async with patient(provider, Clock()).send(Outgoing("POST", "http://p/v1/x", [], b"{}", has_next=True)) as reply:
        assert reply.status == 200


async def test_response_after_the_last_try_is_passed_on() -> None:
    provider, clock = Provider([503, 503, 503, 200]), Clock()
    assert await ask(patient(provider, clock, failures=9)) == 503
    assert clock.waits == [0.5, 1.0]
    refused, later = Provider([UpstreamRefused("no")] * 3), Clock()
    with pytest.raises(UpstreamRefused):
        await ask(patient(refused, later, failures=9))
    assert len(refused.sent) == 3


async def marks(outcomes: list[int | Reply | BaseException | asyncio.Event], retries: int = 2) -> list[bytes]:
    """Return the values of `x-should-retry` on the final response of a call."""
    async with patient(Provider(outcomes), Clock(), retries=retries).send(Outgoing("POST", "u", [], b"{}")) as reply:
        assert [piece async for piece in reply.chunks()] == [b"body"]
        return [value for name, value in reply.headers if name == b"x-should-retry"]


@pytest.mark.parametrize("status", [429, 502, 503, 521, 523, 529])
async def test_refusal_after_the_last_retry_is_marked_as_not_to_be_repeated(status: int) -> None:
    assert await marks([status] * 3) == [b"false"]
    assert await marks([Reply(status, [(b"x-should-retry", b"true")])] * 3) == [b"false"]
    assert await marks([Reply(status, [(b"retry-after", b"0")])] * 3) == [b"false"]


async def test_refusal_that_asks_for_a_wait_or_was_not_retried_is_not_marked() -> None:
    assert await marks([Reply(429, [(b"retry-after", b"7")])] * 3) == []
    assert await marks([Reply(503, [(b"retry-after-ms", b"900")])] * 3) == []
    assert await marks([Reply(429, [(b"retry-after", b"3600")])]) == []
    assert await marks([503], retries=0) == []
    assert await marks([429, 503, 500]) == []
    assert await marks([429, 503, 200]) == []


async def test_fault_after_the_last_retry_is_not_to_be_repeated() -> None:
    for retries, may_repeat in ((2, False), (0, True)):
        with pytest.raises(UpstreamRefused) as raised:
            await ask(patient(Provider([UpstreamRefused("no") for _ in range(3)]), Clock(), retries=retries))
        assert raised.value.retry is may_repeat


@pytest.mark.parametrize("outcome", [503, UpstreamRefused("no")])
async def test_breaker_counts_calls_and_not_their_tries(outcome: int | BaseException) -> None:
    provider, clock = Provider([outcome] * 20), Clock()
    upstream = patient(provider, clock, retries=2, failures=3)
    for number in range(1, 4):
        with contextlib.suppress(UpstreamRefused):
            await ask(upstream)
        assert (upstream.failures, len(provider.sent)) == (number, 3 * number)
    with pytest.raises(UpstreamOpenCircuit):
        await ask(upstream)


async def test_retry_that_succeeds_is_no_failure() -> None:
    upstream = patient(Provider([503, 200] * 5), Clock(), failures=2)
    for _ in range(5):
        assert await ask(upstream) == 200
    assert upstream.failures == 0


async def test_failed_test_of_an_open_circuit_counts_at_once() -> None:
    provider, clock = Provider([503] * 5), Clock()
    upstream = patient(provider, clock, retries=1, failures=2)
    assert [await ask(upstream) for _ in range(2)] == [503, 503]
    clock.now += 10
    with pytest.raises(UpstreamOpenCircuit):
        await ask(upstream)
    assert len(provider.sent) == 5


async def test_requested_wait_is_respected() -> None:
    provider, clock = Provider([Reply(429, [(b"retry-after", b"7")]), 200]), Clock()
    assert await ask(patient(provider, clock)) == 200
    assert clock.waits == [7.0]
    long = Provider([Reply(429, [(b"retry-after", b"3600")]), 200])
    assert await ask(patient(long, clock)) == 429


async def test_long_wait_is_skipped_if_a_fallback_exists() -> None:
    provider, clock = Provider([Reply(429, [(b"retry-after", b"7")]), 200]), Clock()
    async with patient(provider, clock).send(Outgoing("POST", "http://p/v1/x", [], b"{}", has_next=True)) as reply:
        assert (reply.status, len(provider.sent), clock.waits) == (429, 1, [])


async def test_provider_that_forbids_retries_is_not_retried() -> None:
    provider, clock = Provider([Reply(429, [(b"x-should-retry", b"false"), (b"retry-after", b"1")]), 200]), Clock()
    assert await ask(patient(provider, clock)) == 429
    assert (len(provider.sent), clock.waits) == (1, [])


async def test_requested_date_is_respected() -> None:
    def at(seconds: int) -> Reply:
        return Reply(503, [(b"retry-after", formatdate(1_792_567_680 + seconds, usegmt=True).encode())])

    provider, clock = Provider([at(9), 200]), Clock()
    assert await ask(patient(provider, clock)) == 200
    assert clock.waits == [9.0]
    assert await ask(patient(Provider([at(3600), 200]), clock)) == 503


async def test_circuit_opens_after_failures_and_one_call_tests_it(caplog: pytest.LogCaptureFixture) -> None:
    provider, clock = Provider([502, 502, 502, 200, 200]), Clock()
    upstream = patient(provider, clock, retries=0)
    with caplog.at_level(logging.WARNING, "gateway"):
        assert [await ask(upstream) for _ in range(3)] == [502, 502, 502]
        with pytest.raises(UpstreamOpenCircuit) as refused:
            await ask(upstream)
        assert (refused.value.status, refused.value.retry_after) == (503, 10)
        assert "3 times" in refused.value.message
        assert len(provider.sent) == 3
        clock.now += 10
        assert await ask(upstream) == 200
        assert await ask(upstream) == 200
    assert [record.message for record in caplog.records] == [
        "provider p: circuit open for 10 s",
        "provider p: circuit closed",
    ]


async def test_open_circuit_message_has_the_retry_after_value() -> None:
    clock = Clock()
    upstream = patient(Provider([502] * 3), clock, retries=0)
    assert [await ask(upstream) for _ in range(3)] == [502] * 3
    clock.now += 9.7
    with pytest.raises(UpstreamOpenCircuit, match=r"called again in 1 s\.") as refused:
        await ask(upstream)
    assert refused.value.retry_after == 1


async def test_untranslatable_requests_do_not_open_the_circuit() -> None:
    provider = Provider([*[UpstreamUntranslated("odd")] * 5, 200])
    upstream = patient(provider, Clock(), failures=3)
    for _ in range(5):
        with pytest.raises(UpstreamUntranslated):
            await ask(upstream)
    assert await ask(upstream) == 200


async def test_unreachable_provider_opens_the_circuit_with_its_counts() -> None:
    provider, clock = Provider([UpstreamUnreachable("no")] * 3), Clock()
    upstream = patient(provider, clock, retries=0)
    assert (upstream.failures, upstream.opens_in_s) == (0, None)
    for _ in range(3):
        with pytest.raises(UpstreamUnreachable):
            await ask(upstream)
    clock.now += 4
    assert (upstream.failures, upstream.opens_in_s) == (3, 6)


async def test_only_one_call_tests_an_open_circuit() -> None:
    is_well = asyncio.Event()
    provider, clock = Provider([502, 502, 502, is_well]), Clock()
    upstream = patient(provider, clock, retries=0)
    for _ in range(3):
        await ask(upstream)
    clock.now += 10
    trying = asyncio.create_task(ask(upstream))
    await asyncio.sleep(0)
    with pytest.raises(UpstreamOpenCircuit):
        await ask(upstream)
    is_well.set()
    assert await trying == 200


async def test_untranslatable_test_call_lets_another_call_test() -> None:
    provider, clock = Provider([502, 502, 502, UpstreamUntranslated("odd"), 200]), Clock()
    upstream = patient(provider, clock, retries=0)
    for _ in range(3):
        await ask(upstream)
    clock.now += 10
    with pytest.raises(UpstreamUntranslated):
        await ask(upstream)
    assert await ask(upstream) == 200


async def test_waiting_call_is_not_at_work() -> None:
    reported: list[bool] = []
    request = Outgoing("POST", "http://p/v1/x", [], b"{}", on_work=lambda *, is_so: reported.append(is_so))
    async with patient(Provider([503, 200]), Clock()).send(request):
        assert reported == [False]


async def test_busy_provider_does_not_open_the_circuit() -> None:
    provider, clock = Provider([429] * 9), Clock()
    assert [await ask(patient(provider, clock, retries=0)) for _ in range(9)] == [429] * 9


async def test_cancelled_test_call_lets_another_call_test() -> None:
    provider, clock = Provider([502, 502, 502, asyncio.CancelledError(), 200]), Clock()
    upstream = patient(provider, clock, retries=0)
    for _ in range(3):
        await ask(upstream)
    clock.now += 10
    with pytest.raises(asyncio.CancelledError):
        await ask(upstream)
    assert await ask(upstream) == 200


async def test_closing_closes_the_wrapped_upstream() -> None:
    provider = Provider([])
    await patient(provider, Clock()).aclose()
    assert provider.closed
