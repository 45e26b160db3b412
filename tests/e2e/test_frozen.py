"""A gateway that was suspended longer than a timeout: bytes that arrived meanwhile are not treated as silence."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartProcess
from tests.support.gateways import until
from tests.support.web import HI

pytestmark = pytest.mark.long

#: Seconds: the read timeout of the provider, the duration of a response, and how long the gateway is stopped.
LIMIT_S = 2.5
TAKES_S = 1.0
FROZEN_S = 4.0
TIMES = 3


@pytest.fixture
def other() -> Iterator[MockServer]:
    with MockServer() as server:
        yield server


@pytest.mark.parametrize(
    ("stream", "answer"),
    [
        (False, f"delay={TAKES_S}"),
        (True, f"delay={TAKES_S}"),
        (True, f"delay=0,interval={TAKES_S / 4},chunks=5"),
    ],
    ids=["whole", "stream", "within a stream"],
)
def test_a_suspended_gateway_reads_waiting_responses_and_uses_no_fallback(
    gateway_process: StartProcess,
    mock_server: MockServer,
    mock: MockProvider,
    other: MockServer,
    answer: str,
    *,
    stream: bool,
) -> None:
    limits = {"timeout_s": {"first_byte": LIMIT_S, "between_bytes": LIMIT_S}}
    gateway = gateway_process(
        "",
        providers={
            "first": {"base_url": mock_server.url, "auth": "none", **limits},
            "other": {"base_url": other.url, "auth": "none"},
        },
        models=[{"match": "mock-small", "provider": "first", "fallback": ["other/mock-small"]}],
        default_provider="first",
    )
    body, headers = {"model": "mock-small", "messages": HI, "stream": stream}, {"x-mock": answer, "x-session-id": "s"}
    with ThreadPoolExecutor(TIMES) as pool:
        asked = [pool.submit(gateway.web.post, "/v1/chat/completions", body, headers) for _ in range(TIMES)]
        until(lambda: len(mock.calls) == TIMES, what="the provider is asked")
        gateway.signal(signal.SIGSTOP)
        # The timeout uses the system's clock, which continues.
        time.sleep(FROZEN_S)
        gateway.signal(signal.SIGCONT)
        replies = [one.result() for one in asked]
    assert {(reply.status, reply.clean) for reply in replies} == {(200, True)}
    assert other.provider.calls == []
    assert (
        gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == mock.billed().total_tokens
    )
    calls = gateway.web.get("/api/sessions/s/calls").json["calls"]
    assert [(call["outcome"], call["usage_source"]) for call in calls] == [("ok", "provider")] * TIMES
