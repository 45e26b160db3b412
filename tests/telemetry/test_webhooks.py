"""Test webhooks: with a real receiver over the gateway's own HTTP client, and with fake time."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate

import pytest

from gateway.core.http.signing import signing_key
from gateway.telemetry.webhooks import MAX_TRIES, MAX_WAITING, SENDERS, WebhookSender, WebhookTarget
from gateway.upstream import http
from tests.conftest import closed_port
from tests.support.receiver import Receiver, serving
from tests.support.timing import LIMIT_S, eventually

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with serving(Receiver()) as made:
        yield made


@dataclass
class Counted:
    results: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def webhook(
    url: str,
    counted: Counted,
    *,
    timeout_s: float = 10.0,
    key: bytes | None = signing_key(SECRET),
    max_wait_s: float = 5,
) -> AsyncIterator[WebhookSender]:
    target = WebhookTarget(
        url, "127.0.0.1", frozenset({"on_finish"}), key, [(b"authorization", b"Bearer hush")], timeout_s
    )
    upstream = http.HttpUpstream(
        "x", url, http.UpstreamTimeouts(timeout_s, timeout_s, timeout_s), max_connections=SENDERS
    )
    made = WebhookSender(target, upstream, counted=counted.results.append, sleep=counted.sleep, chance=lambda: 0.5)
    try:
        yield made
    finally:
        await made.aclose(max_wait_s)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "gateway"]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    log = logging.getLogger("gateway")
    # A gateway that other tests share may have changed its level.
    caplog.set_level(logging.DEBUG, logger="gateway")
    was, log.propagate = log.propagate, True
    yield
    log.propagate = was


async def test_event_is_signed_as_specified(receiver: Receiver) -> None:
    body = json.dumps({"type": "on_finish", "data": {"name": "ü"}}).encode()
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        made.put("finish_01", body)
        await eventually(lambda: counted.results)
    [got] = receiver.requests
    assert got.body == body
    assert got.path == "/hooks/very-secret-path?token=hidden"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["authorization"] == "Bearer hush"
    assert got.headers["webhook-id"] == "finish_01"
    assert abs(int(got.headers["webhook-timestamp"]) - time.time()) < LIMIT_S
    # Verify the signature without the gateway's code, as a receiver does.
    signed = f"finish_01.{got.headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert got.headers["webhook-signature"] == f"v1,{expected}"
    assert counted.results == ["sent"]


async def test_event_is_unsigned_without_a_secret(receiver: Receiver) -> None:
    async with webhook(receiver.url, Counted(), key=None) as made:
        made.put("a", b"{}")
        await eventually(lambda: receiver.requests)
    assert "webhook-signature" not in receiver.requests[0].headers


@pytest.mark.parametrize(
    ("status", "is_done", "counts"), [(204, True, ["sent"]), (404, True, ["failed"]), (503, False, [])]
)
async def test_offered_event_is_sent_once(status: int, is_done: bool, counts: list[str], receiver: Receiver) -> None:
    receiver.answers = [(status, {})]
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        assert await made.offer("budget_1", b"{}") is is_done
    assert (receiver.ids, counted.results, counted.waits) == (["budget_1"], counts, [])


@pytest.mark.parametrize("status", [500, 503, 429, 408])
async def test_failed_event_is_retried_with_growing_delays(status: int, receiver: Receiver) -> None:
    receiver.answers = [(status, {})] * 3
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        made.put("a", b"{}")
        await eventually(lambda: counted.results)
    assert receiver.ids == ["a"] * 4
    assert counted.waits == [0.75, 1.5, 3.0]
    assert counted.results == ["sent"]


async def test_event_fails_after_the_last_try(receiver: Receiver) -> None:
    receiver.answers = [(500, {})] * 100
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        made.put("a", b"{}")
        await eventually(lambda: counted.results)
    assert receiver.ids == ["a"] * MAX_TRIES
    assert counted.results == ["failed"]
    assert sum(counted.waits) < 60


async def test_retry_after_is_respected_up_to_a_limit(receiver: Receiver) -> None:
    receiver.answers = [
        (429, {"retry-after": "7"}),
        (503, {"retry-after": "999999999"}),
        (429, {"retry-after": "soon"}),
        (503, {"retry-after": formatdate(time.time() + 30, usegmt=True)}),
    ]
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        made.put("a", b"{}")
        await eventually(lambda: counted.results)
    assert counted.waits[:3] == [7.0, 60.0, 3.0]
    assert 6.0 < counted.waits[3] <= 30.0, "a date"


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 404, 410])
async def test_refused_event_is_not_retried_and_redirects_are_not_followed(status: int, receiver: Receiver) -> None:
    with serving(Receiver()) as elsewhere:
        receiver.answers = [(status, {"location": elsewhere.url})]
        counted = Counted()
        async with webhook(receiver.url, counted) as made:
            made.put("a", b"{}")
            await eventually(lambda: counted.results)
        assert (receiver.ids, counted.results, elsewhere.requests) == (["a"], ["failed"], [])


async def test_unreachable_receiver_is_retried() -> None:
    counted = Counted()
    async with webhook(f"http://127.0.0.1:{closed_port()}/", counted) as made:
        made.put("a", b"{}")
        await eventually(lambda: counted.results)
    assert (counted.results, len(counted.waits)) == (["failed"], MAX_TRIES - 1)


async def test_silent_receiver_is_given_up_after_the_timeout(receiver: Receiver) -> None:
    receiver.gate.clear()
    counted = Counted()
    async with webhook(receiver.url, counted, timeout_s=0.1) as made:
        made.put("a", b"{}")
        await eventually(lambda: len(receiver.requests) >= 2)
        receiver.gate.set()
        await eventually(lambda: counted.results)
    assert counted.results == ["sent"]


async def test_status_counts_even_if_the_body_never_ends() -> None:
    asked = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await reader.read()
        writer.close()

    counted = Counted()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with webhook(url, counted, timeout_s=0.2) as made:
            made.put("id", b"{}")
            await eventually(lambda: counted.results == ["sent"])
    assert asked == 1


async def test_events_beyond_the_queue_are_dropped_and_logged_once(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.gate.clear()
    counted = Counted()
    async with webhook(receiver.url, counted, timeout_s=60) as made:
        made.put("first", b"{}")
        await eventually(lambda: receiver.requests)
        began = time.perf_counter()
        for number in range(MAX_WAITING * 2):
            made.put(f"m{number}", b"{}")
        assert time.perf_counter() - began < 1.0  # putting an event does not wait
        dropped = counted.results.count("dropped")
        assert dropped == MAX_WAITING
        assert [line for line in lines(caplog) if "further events are dropped" in line] == [
            f"webhook 127.0.0.1: {MAX_WAITING} events are waiting; further events are dropped"
        ]
        receiver.gate.set()
        for number in range(1, MAX_WAITING + 2, 50):
            await eventually(lambda number=number: counted.results.count("sent") >= number)  # type: ignore[misc]
        assert counted.results.count("sent") == MAX_WAITING + 1
        # The newest events were dropped; the queued events are sent.
        assert set(receiver.ids) == {"first", *(f"m{number}" for number in range(MAX_WAITING))}
        assert [line for line in lines(caplog) if "were dropped" in line] == [
            f"webhook 127.0.0.1: {MAX_WAITING} events were dropped"
        ]


async def test_number_of_concurrent_requests_is_limited(receiver: Receiver) -> None:
    receiver.gate.clear()
    counted = Counted()
    async with webhook(receiver.url, counted, timeout_s=60) as made:
        for number in range(40):
            made.put(f"m{number}", b"{}")
        await eventually(lambda: receiver.at_once == SENDERS)
        receiver.gate.set()
        await eventually(lambda: len(counted.results) == 40)
    assert receiver.most_at_once == SENDERS


async def test_failure_and_recovery_are_each_logged_once(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [(404, {})] * 5
    counted = Counted()
    async with webhook(receiver.url, counted) as made:
        for number in range(8):
            made.put(f"m{number}", b"{}")
            await eventually(lambda number=number: len(counted.results) == number + 1)  # type: ignore[misc]
    assert lines(caplog) == [
        "webhook 127.0.0.1 does not accept events: status 404",
        "webhook 127.0.0.1 accepts events again",
    ]


async def test_secrets_and_paths_are_never_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    receiver.answers = [(500, {})] * 100
    for url in (receiver.url, f"http://127.0.0.1:{closed_port()}/very-secret-path?token=hidden"):
        counted = Counted()
        async with webhook(url, counted) as made:
            for number in range(MAX_WAITING + 10):
                made.put(f"m{number}", b"{}")
            await eventually(lambda counted=counted: "failed" in counted.results)  # type: ignore[misc]
    assert lines(caplog)
    for text in ("very-secret-path", "hidden", "hush", SECRET.removeprefix("whsec_"), "whsec_"):
        assert text not in caplog.text


async def test_queued_events_are_sent_before_closing(receiver: Receiver) -> None:
    counted = Counted()
    async with asyncio.timeout(LIMIT_S), webhook(receiver.url, counted, max_wait_s=10 * LIMIT_S) as made:
        for number in range(30):
            made.put(f"m{number}", b"{}")
    assert counted.results == ["sent"] * 30


async def test_closing_waits_only_for_a_limited_time(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    receiver.gate.clear()
    began = time.monotonic()
    async with webhook(receiver.url, Counted(), timeout_s=60, max_wait_s=0.2) as made:
        for number in range(30):
            made.put(f"m{number}", b"{}")
        await eventually(lambda: receiver.at_once == SENDERS)
    assert time.monotonic() - began < LIMIT_S
    assert lines(caplog) == ["webhook 127.0.0.1: 30 events were not sent before the gateway stopped"]


async def test_unused_webhook_closes_immediately() -> None:
    async with asyncio.timeout(LIMIT_S), webhook("http://127.0.0.1:1/", Counted(), max_wait_s=10 * LIMIT_S):
        pass
