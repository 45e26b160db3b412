from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal

import pytest

from gateway.call.types import ClientResponse, RequestReport
from gateway.core.errors import InvalidRequest, StoreUnavailable
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import ContextRecord
from gateway.core.usage import Charge, Totals, Usage
from gateway.server import headers

USAGE = Usage(7951, 212, 8163, 100)
CHARGE = Charge(USAGE, "provider", Decimal("0.0012345678"))
TOTALS = Totals().add(CHARGE).add(CHARGE)


def shown(reply: ClientResponse) -> dict[str, str]:
    found = headers.response_headers(reply, "request-1")
    assert len({name for name, _ in found}) == len(found), "a header stands twice"
    return {name.decode(): value.decode() for name, value in found}


@pytest.mark.parametrize("value", [b"a", b"x" * 128, b"!~", b"01abc:/?"])
def test_a_request_id_that_can_be_echoed(value: bytes) -> None:
    assert headers.request_id([(b"x-other", b"1"), (b"x-request-id", value)]) == value.decode()


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a b", b"a\t", b"\xe9", b"a\x00", b"a\n"])
def test_request_id_that_cannot_be_echoed(value: bytes) -> None:
    assert headers.request_id([(b"x-request-id", value)]) is None
    assert headers.request_id([]) is None


def test_complete_response_has_all_headers() -> None:
    reply = ClientResponse(
        200,
        [],
        b"",
        RequestReport(session=SessionKey("alice", "s"), overhead_s=0.00123),
        totals=TOTALS,
        charge=CHARGE,
        is_final=True,
    )
    assert shown(reply) == {
        "x-gateway-request-id": "request-1",
        "x-gateway-overhead-ms": "1.23",
        "x-session-id": "s",
        "x-session-cumulative-token-usage": '{"promptTokens":15902,"completionTokens":424,"totalTokens":16326}',
        "x-session-cumulative-total-tokens": "16326",
        "x-session-cumulative-input-tokens": "15902",
        "x-session-cumulative-output-tokens": "424",
        "x-session-cumulative-cached-tokens": "200",
        "x-session-cumulative-calls": "2",
        "x-session-cumulative-cost-usd": "0.002469",
        "x-session-usage-source": "provider",
        "x-session-usage-final": "true",
        "x-token-usage": '{"promptTokens":7951,"completionTokens":212,"totalTokens":8163}',
    }


def test_totals_of_a_stream_are_not_final() -> None:
    found = shown(ClientResponse(200, [], b"", RequestReport(session=SessionKey("a", "s")), totals=TOTALS))
    assert found["x-session-usage-final"] == "false"
    assert "x-token-usage" not in found


def test_call_without_a_session_reports_its_usage() -> None:
    assert shown(ClientResponse(200, [], b"", charge=CHARGE))["x-token-usage"].startswith('{"promptTokens":7951,')


def test_call_without_a_session_has_no_session_headers() -> None:
    assert set(shown(ClientResponse(200, [], b"", is_final=True))) == {"x-gateway-request-id", "x-gateway-overhead-ms"}


def test_while_the_store_is_unavailable_no_totals_are_sent() -> None:
    for is_final in (True, False):
        found = shown(ClientResponse(503, [], b"", RequestReport(session=SessionKey("a", "s")), is_final=is_final))
        assert [name for name in found if name.startswith("x-session-")] == ["x-session-id"]


def test_cost_with_an_unknown_part_is_left_out() -> None:
    totals = TOTALS.add(Charge(USAGE, "estimated", None))
    found = shown(ClientResponse(200, [], b"", RequestReport(session=SessionKey("a", "s")), totals=totals))
    assert "x-session-cumulative-cost-usd" not in found
    assert found["x-session-usage-source"] == "mixed"


def test_errors_say_whether_to_retry() -> None:
    assert shown(ClientResponse(400, [], b"", fault=InvalidRequest("no")))["x-should-retry"] == "false"
    away = shown(ClientResponse(503, [], b"", fault=StoreUnavailable("away")))
    assert (away["x-should-retry"], away["retry-after"]) == ("true", "1")


def test_budget_and_remaining_budget_are_sent() -> None:
    context = ContextRecord(1_000, 1_500, "learned", 4_000, 300, 700, "k", 990, margin=50)
    found = shown(ClientResponse(200, [], b"", RequestReport(context=context)))
    assert (found["x-context-budget-tokens"], found["x-context-remaining-tokens"]) == ("4000", "2950")
    over = shown(ClientResponse(400, [], b"", RequestReport(context=replace(context, budget=1_020))))
    assert (over["x-context-budget-tokens"], over["x-context-remaining-tokens"]) == ("1020", "0")


def test_without_a_budget_no_budget_headers_are_sent() -> None:
    found = shown(
        ClientResponse(
            200, [], b"", RequestReport(context=ContextRecord(1_000, 1_000, "learned", None, 300, 700, "k", 990))
        )
    )
    assert found["x-context-tokens"] == "1000"
    assert not any("budget" in name or "remaining" in name for name in found)


def test_the_providers_errors_are_marked() -> None:
    assert shown(ClientResponse(500, [], b"", upstream_error=True))["x-gateway-upstream-error"] == "true"
    assert "x-gateway-upstream-error" not in shown(ClientResponse(500, [], b""))


def test_the_last_comment_of_a_stream_holds_comment_lines_only() -> None:
    comment = headers.totals_comment(TOTALS, CHARGE, None)
    assert comment.endswith(b"\n\n")
    lines = comment.decode().removesuffix("\n\n").split("\n")
    assert all(line.startswith(": x-") for line in lines)
    values = dict(line.removeprefix(": ").split(": ", 1) for line in lines)
    assert json.loads(values["x-session-cumulative-token-usage"])["totalTokens"] == 16326
    assert json.loads(values["x-token-usage"])["totalTokens"] == 8163
    assert lines[-1].startswith(": x-session-cumulative-token-usage: ")
    assert b"x-token-usage" not in headers.totals_comment(TOTALS, None, None)


def test_last_comment_of_a_stream_has_all_session_headers() -> None:
    lines = headers.totals_comment(TOTALS, CHARGE, None).decode().split("\n")
    values = dict(line.removeprefix(": ").split(": ", 1) for line in lines if line)
    whole = shown(
        ClientResponse(200, [], b"", RequestReport(session=SessionKey("", "s")), totals=TOTALS, charge=CHARGE)
    )
    about = {name: value for name, value in whole.items() if "cumulative" in name or "usage" in name}
    assert values == {name: value for name, value in about.items() if name != "x-session-usage-final"}
    assert values["x-session-cumulative-total-tokens"] == "16326"


def test_last_comment_of_a_stream_has_no_cost_if_a_price_is_unknown() -> None:
    assert b"cost-usd" not in headers.totals_comment(replace(TOTALS, unpriced_calls=1), CHARGE, None)
