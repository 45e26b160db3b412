"""/api/usage on a running gateway: who sees what, in which form, and that it equals the totals of sessions."""

from __future__ import annotations

import csv
import io
import json
import time
from typing import Any
from urllib.parse import quote

import openai
import pytest

from gateway.core.rollup import COUNTS, UsageGroup, UsageQuery
from gateway.mock import MockProvider, MockServer
from gateway.server.usage import UsageReport, csv_text, report_of
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Web

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
AUTH = {
    "auth.admin_key": ADMIN,
    "auth.keys": [{"name": "alice", "key": ALICE}, {"name": "bob", "key": "bob-key-0123456789ab"}],
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def filled(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """A gateway with two calls of alice, one with a tag, and a refused one; and one call of bob."""
    gateway = gateway_server(mock_server.url, **AUTH)
    for key, tokens, headers in (
        (ALICE, "10/5", {"x-session-tag": "nightly"}),
        (ALICE, "20/7", {}),
        (ALICE, "1/1", {"x-session-budget-tokens": "2"}),
        ("bob-key-0123456789ab", "300/70", {}),
    ):
        body = {"model": "mock-small", "messages": HI, "user": tokens}
        mock_headers = {"x-mock": f"tokens={tokens}", "x-session-id": "s", **bearer(key), **headers}
        gateway.web.post(CHAT, body, mock_headers)
    return gateway


def usage(gateway: GatewayThread, query: str = "", key: str = ADMIN) -> dict[str, object]:
    reply = gateway.web.get(f"/api/usage?{query}", bearer(key))
    assert reply.status == 200, reply.body
    found: dict[str, object] = reply.json
    return found


def lines(gateway: GatewayThread, query: str, key: str = ADMIN) -> list[dict[str, object]]:
    found = usage(gateway, query, key)["usage"]
    assert isinstance(found, list)
    return found


def test_an_administrator_sees_all_keys_and_a_key_its_own(filled: GatewayThread) -> None:
    by_key = {line["key"]: line for line in lines(filled, "group_by=key&bucket=total")}
    assert {name: line["calls"] for name, line in by_key.items()} == {"alice": 3, "bob": 1}
    assert by_key["alice"]["refused_calls"] == 1
    assert by_key["alice"]["charged_calls"] == 2
    own = lines(filled, "group_by=key&bucket=total", ALICE)
    assert own == [by_key["alice"]]
    assert lines(filled, "group_by=key&bucket=total&key=bob", ALICE) == []


def test_the_sums_are_the_totals_of_sessions(filled: GatewayThread) -> None:
    sessions = filled.web.get("/api/sessions", bearer(ADMIN)).json["sessions"]
    total = usage(filled, "bucket=hour")["total"]
    assert isinstance(total, dict)
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total[name] == sum(view["cumulative_token_usage"][name] for view in sessions) > 0


def test_usage_is_grouped_by_tag_and_filtered(filled: GatewayThread) -> None:
    tags = {line["tag"]: line["calls"] for line in lines(filled, "group_by=tag,model&bucket=total")}
    assert tags == {"nightly": 1, "": 3}
    [line] = lines(filled, "tag=nightly&bucket=day")
    assert str(line["start"])[10:] == "T00:00:00.000Z"
    assert line["calls"] == 1


def test_a_tag_comes_from_a_header_or_from_metadata_in_every_format(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
    say: Any = {"model": "mock-small", "messages": HI}
    client.chat.completions.create(**say, metadata={"tag": "from-chat"})
    client.responses.create(model="mock-small", input="hi", metadata={"tag": "from-responses"})
    [*client.chat.completions.create(**say, stream=True, extra_headers={"x-session-tag": "from-stream"})]
    body = {"model": "mock-claude", "max_tokens": 9, "messages": HI}
    assert gateway.web.post("/v1/messages", body, {"x-session-tag": "from-messages"}).status == 200
    tags = {line["tag"]: line["charged_calls"] for line in gateway.web.get("/api/usage?group_by=tag").json["usage"]}
    assert tags == dict.fromkeys(("from-chat", "from-responses", "from-stream", "from-messages"), 1)
    assert all("x-session-tag" not in dict(call.headers) for call in mock.calls)


@pytest.mark.parametrize("tag", ["a" * 65, "a b", "ä"])
def test_a_wrong_tag_is_refused(own: GatewayThread, tag: str) -> None:
    reply = own.web.post(CHAT, {"model": "mock-small", "messages": HI}, {"x-session-tag": tag})
    assert reply.status == 400
    assert "x-session-tag" in reply.json["error"]["message"]


def test_json_lines_and_csv_have_the_same_lines(filled: GatewayThread) -> None:
    expected = lines(filled, "group_by=key,model")
    text = filled.web.get("/api/usage?group_by=key,model&format=jsonl", bearer(ADMIN)).body.decode()
    assert [json.loads(line) for line in text.splitlines()] == expected
    reply = filled.web.get("/api/usage?group_by=key,model&format=csv", bearer(ADMIN))
    rows = [*csv.DictReader(io.StringIO(reply.body.decode()))]
    assert rows == [{name: str(value) for name, value in line.items()} for line in expected]


def test_a_spreadsheet_runs_no_name_as_a_formula() -> None:
    report = UsageReport(UsageQuery("day", 1, 1), ("model",), "day", {})
    text = "".join(csv_text(report, [UsageGroup(86_400, ('=cmd|"x"',), [0] * len(COUNTS))]))
    assert next(csv.DictReader(io.StringIO(text)))["model"] == '\'=cmd|"x"'


@pytest.fixture
def own(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("group_by=color", "key, group, agent, provider, model, tag"),
        ("bucket=week", "hour, day, total"),
        ("format=xml", "json, jsonl, csv"),
        ("from=yesterday", "2026-11-28T13:00:00Z"),
        ("to=99999999999999", "2026-11-28"),
        ("from=0001-01-01", "2026-11-28"),
        ("from=2026-02-01&to=2026-01-01", "later"),
        ("from=1999-01-01&bucket=hour", "1,000"),
    ],
)
def test_a_wrong_parameter_is_refused(own: GatewayThread, query: str, names: str) -> None:
    reply = own.web.get(f"/api/usage?{query}")
    assert reply.status == 400
    assert names in reply.json["error"]["message"]


def test_times_are_dates_or_times_of_any_offset() -> None:
    day = 86_400
    for start, end, first, last in (
        ("1970-01-02", "1970-01-05", 1, 4),
        ("1970-01-02T23:59:59Z", "1970-01-06T01:00:00+02:00", 1, 4),
        ("1970-01-02", "1970-01-06T01:00:00 02:00", 1, 4),
    ):
        query = report_of({"from": start, "to": end}, None, 9 * day).query
        assert (query.first, query.last) == (first, last)
    assert report_of({}, None, 100.5 * day).query == UsageQuery("day", 71, 100, None)
    assert report_of({"bucket": "hour", "from": quote("1970-01-02T05:00")[:10]}, "a", 2 * day).query.first == 24


def test_nothing_was_used_yet(own: GatewayThread) -> None:
    found = own.web.get("/api/usage?from=2020-01-01&to=2020-01-03").json
    assert found["usage"] == []
    assert found["total"]["calls"] == 0
    assert (found["from"], found["to"]) == ("2020-01-01T00:00:00.000Z", "2020-01-04T00:00:00.000Z")
    assert time.time() > 0
    assert isinstance(own.web, Web)
