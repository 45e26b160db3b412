"""Test the problems that the bench reports. tests/cli/test_bench.py tests its results."""

from __future__ import annotations

from gateway.bench.load import Workload
from gateway.bench.measure import WORKLOADS, Bench, Times, fewer
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.web import Web

SMALL = Workload("small", 2, 3, warm_up=1)


def nobody(step: str) -> None:
    del step


def test_what_was_counted_is_what_was_billed(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    steps: list[str] = []
    bench = Bench(mock_server.url, gateway_server(mock_server.url).url)
    row = bench.measured(0, SMALL, steps.append)
    counted = bench.counted()
    assert bench.problems == []
    assert steps == ["small"]
    assert (row.calls, row.wrong) == (6, 0)
    assert row.cpu_us > 0
    assert row.through.p50_ms <= row.through.p99_ms
    assert (counted.sessions, counted.calls) == (2, 8)
    assert counted.tokens == counted.billed_tokens > 0


def test_a_provider_that_billed_something_else_is_seen(gateway_server: StartGateway, mock_server: MockServer) -> None:
    with MockServer() as other:
        bench = Bench(other.url, gateway_server(mock_server.url).url)
        bench.measured(0, SMALL, nobody)
        bench.counted()
    [problem] = bench.problems
    assert problem.startswith("in all: counted ")


def test_a_session_whose_total_is_not_what_its_answers_said_is_seen(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    bench = Bench(mock_server.url, gateway.url)
    bench.measured(0, SMALL, nobody)
    assert Web(gateway.url).chat(session="gateway-0-1").status == 200
    bench.counted()
    [problem] = bench.problems
    assert problem.startswith("session gateway-0-1: counted ")


def test_answers_that_differ_and_calls_that_were_not_made_are_wrong(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    cut = Workload("cut", 1, 2, warm_up=0, is_trimmed=True)
    bench = Bench(mock_server.url, gateway_server(mock_server.url).url)
    assert bench.measured(0, cut, nobody).wrong == 2
    assert bench.problems == ["cut: the request was not trimmed"] * 2


def test_a_quick_run_has_all_workloads_with_fewer_calls() -> None:
    quick = fewer(WORKLOADS)
    assert [one.name for one in quick] == [one.name for one in WORKLOADS]
    assert all(few.calls < many.calls for few, many in zip(quick, WORKLOADS, strict=True))
    assert all(one.calls for one in quick)


def test_no_times_of_no_calls() -> None:
    assert Times.of([]) == Times(0.0, 0.0)
