"""Test the numbers that agents read, and how their tools use them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import httpx
import pytest

from gateway.client import Counts, Handed, afetch_counts, configurable, estimate, fetch_counts
from gateway.counters.registry import Counters
from tests.conftest import StartUpstream
from tests.support.conversations import TOOLS, agent
from tests.support.gateways import ROOT, GatewayThread
from tests.support.scripted import Connection
from tests.support.web import Web

HEADERS = {
    "x-context-tokens": "1200",
    "x-context-conversation-tokens": "300",
    "x-context-tool-tokens": "800",
    "x-context-budget-tokens": "4000",
    "x-context-remaining-tokens": "2700",
    "x-context-trimmed": "none",
    "x-response-mode": "raw",
    "x-token-usage": '{"promptTokens":1190,"completionTokens":50,"totalTokens":1240}',
    "x-session-cumulative-total-tokens": "9000",
}
BODY = {"model": "gpt-4o", "messages": agent(4), "tools": TOOLS}


def documents(*names: str, words: int = 50) -> list[dict[str, Any]]:
    return [{"id": name, "text": f"{name} " * words} for name in names]


def ids(given: list[dict[str, Any]]) -> list[str]:
    return [item["id"] for item in given if "text" in item]


def count_tokens(text: str) -> int:
    return len(text)


@pytest.mark.parametrize(
    "kind", [dict, httpx.Headers, lambda found: {n.title(): v for n, v in found.items()}]
)  # fmt: skip
def test_counts_are_read_from_the_headers_of_any_client(kind: Callable[[dict[str, str]], Any]) -> None:
    found = Counts.of(kind(HEADERS))
    assert found == Counts(300, 800, budget=4000, remaining=2700, room=1987, session_tokens=9000)


def test_without_a_budget_tools_are_unlimited() -> None:
    found = Counts.of({name: value for name, value in HEADERS.items() if "budget" not in name and "remain" not in name})
    assert (found.budget, found.remaining, found.room, found.share(3)) == (None, None, None, None)
    assert Counts.of({}) == Counts(0, 0, None, None, None)


def test_after_a_stream_the_output_tokens_are_an_argument() -> None:
    streamed = {name: value for name, value in HEADERS.items() if name != "x-token-usage"}
    assert Counts.of(streamed).room == 2025
    assert Counts.of(streamed, 200).room == 1875


def test_a_session_budget_that_is_nearly_spent_leaves_less_room() -> None:
    # The next call sends the 1,200 tokens and the output again, and a quarter is kept for its own output.
    assert Counts.of({**HEADERS, "x-session-budget-remaining-tokens": "2400"}).room == (1800 - 1200 - 50) * 3 // 4
    assert Counts.of({**HEADERS, "x-session-budget-remaining-tokens": "1000"}).room == 0
    assert Counts.of({**HEADERS, "x-session-budget-remaining-tokens": "90000"}).room == 1987


def test_tools_called_by_one_response_share_the_room() -> None:
    counts = Counts.of(HEADERS)
    shares = [counts.share(calls) for calls in (1, 2, 1000)]
    assert shares == [1987 - 16, 993 - 16, 0]


def test_counts_include_trim_rules_and_mode() -> None:
    found = Counts.of({**HEADERS, "x-context-trimmed": "condense=3,drop=2,recall=1", "x-response-mode": "table"})
    assert (found.cut, found.mode) == ("condense=3,drop=2", "table")
    for uncut in ("none", "unsupported"):
        assert Counts.of({**HEADERS, "x-context-trimmed": uncut}).cut == ""


def test_documents_are_returned_in_order_until_the_tokens_are_used() -> None:
    found = documents("a", "b", "c")
    size = len(json.dumps(found[0])) + 1
    given = Handed().take(found, 2 * size + len('{"given_before": [], "left_out": 0}') + 1, count_tokens)
    assert given == [*found[:2], {"left_out": 1}]
    assert Handed().take(found, None) == found
    assert Handed().take(found, 0) == [{"left_out": 3}]


def test_too_long_document_does_not_block_later_ones() -> None:
    long, short = *documents("a", words=900), *documents("b", words=3)
    assert ids(Handed().take([long, short], 100)) == ["b"]


@pytest.mark.parametrize("tokens", [20, 150, 1000])
def test_returned_documents_never_exceed_the_tokens(tokens: int) -> None:
    handed = Handed()
    for _ in range(3):
        given = handed.take(documents(*"abcdefghij", words=15), tokens, count_tokens)
        assert count_tokens(json.dumps(given)) <= tokens + len("[]")


def test_a_document_is_returned_once_and_later_only_named() -> None:
    handed = Handed()
    assert ids(handed.take(documents("a", "b"), 1000)) == ["a", "b"]
    again = handed.take(documents("b", "c"), 1000)
    assert again == [*documents("c"), {"given_before": ["b"]}]


def test_a_document_that_did_not_fit_is_returned_later() -> None:
    handed = Handed()
    assert ids(handed.take(documents("a"), 10)) == []
    assert ids(handed.take(documents("a"), 1000)) == ["a"]


def test_concurrent_tools_return_a_document_once() -> None:
    handed = Handed()
    found = documents(*(str(number) for number in range(200)))
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda _: ids(handed.take(found, None)), range(8)))
    assert sorted(name for names in given for name in names) == sorted(document["id"] for document in found)


def test_handed_is_restored_from_its_state() -> None:
    handed = Handed().turn(Counts.of({**HEADERS, "x-context-trimmed": "drop=2"}))
    handed.take(documents("a", "b"), None)
    state = json.loads(json.dumps(handed.state()))
    assert Handed(**state).state() == state == {"ids": ["a", "b"], "cut": "drop=2"}


@pytest.mark.parametrize(
    ("first", "then", "is_known"),
    [
        ({}, {}, True),
        ({"x-context-trimmed": "drop=2"}, {"x-context-trimmed": "drop=2,recall=1"}, True),
        ({}, {"x-context-trimmed": "drop=2"}, False),
        ({"x-context-trimmed": "drop=2"}, {"x-context-trimmed": "condense=1,drop=4"}, False),
        ({}, {"x-response-mode": "summary"}, False),
        ({"x-response-mode": "summary"}, {"x-response-mode": "summary"}, False),
    ],
)
def test_after_a_trim_documents_can_be_returned_again(
    first: dict[str, str], then: dict[str, str], is_known: bool
) -> None:
    handed = Handed().turn(Counts.of({**HEADERS, **first}))
    handed.take(documents("a"), None)
    handed.turn(Counts.of({**HEADERS, **then}))
    assert (ids(handed.take(documents("a"), None)) == []) is is_known


def test_configurable_has_the_counts_for_a_langgraph_tool() -> None:
    handed = Handed()
    assert configurable(Counts.of(HEADERS), handed, 2) == {
        "conversation_tokens": 300,
        "tool_tokens": 800,
        "budget_tokens": 4000,
        "remaining_tokens": 993 - 16,
        "handed": handed,
    }


TEXTS = {
    "English": (ROOT / "docs/concepts/context.md").read_text("utf-8"),
    "code": (ROOT / "gateway/client.py").read_text("utf-8"),
    "JSON": (ROOT / "config/gateway.schema.json").read_text("utf-8"),
    "ids": " ".join(f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" for number in range(300)),
    "Russian": "Каждый результат инструмента считается только один раз, по идентификатору и по содержанию. " * 9,
    "Chinese": "语言模型的上下文窗口是有限的、因此检索工具必须知道还剩下多少空间。" * 9,
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_estimate_is_one_to_three_times_the_count_of_a_tokenizer(name: str) -> None:
    tokens = Counters().counter("o200k_base").count(TEXTS[name])
    assert tokens <= estimate(TEXTS[name]) <= 3 * tokens


def test_the_estimate_accepts_any_text() -> None:
    assert estimate("") == 0
    assert estimate("\ud800 \x00\U0010ffff") > 0


@pytest.mark.parametrize(
    "address", ["{}", "{}/", "{}/v1", "{}/v1/", "{}/s/one/v1", "{}/s/one"]
)  # fmt: skip
def test_counts_are_fetched_for_an_unsent_request(gateway: GatewayThread, web: Web, address: str) -> None:
    found = fetch_counts(address.format(gateway.url), BODY)
    shown = web.post("/api/context", BODY).json
    room = shown["remaining"] * 3 // 4
    expected = Counts(
        shown["conversation_tokens"], shown["accumulated_tool_tokens"], shown["budget"], shown["remaining"], room
    )
    assert found == expected


async def test_counts_are_fetched_in_a_thread(gateway: GatewayThread) -> None:
    assert await afetch_counts(gateway.base_url, BODY) == fetch_counts(gateway.base_url, BODY)


@pytest.mark.parametrize(
    ("address", "session", "query"),
    [("/v1", None, ""), ("/s/a/v1", None, "?session=a"), ("/s/a%3A1/v1", None, "?session=a%3A1"), ("/s/a/v1", "b:1", "?session=b%3A1"), ("/x/v1", "b", "?session=b")],
)  # fmt: skip
def test_session_and_key_are_sent(byte_server: StartUpstream, address: str, session: str | None, query: str) -> None:
    answer = {"conversation_tokens": 1, "accumulated_tool_tokens": 2, "budget": None, "remaining": None}

    def script(connection: Connection) -> None:
        connection.whole(json.dumps(answer).encode())

    server = byte_server(script)
    assert fetch_counts(server.url + address, BODY, session=session, api_key="k").room is None
    [received] = server.requests
    prefix = "/x" if address.startswith("/x") else ""
    assert received.path == f"{prefix}/api/context{query}"
    assert received.header("authorization") == "Bearer k"
    assert received.json == BODY


def test_a_refusal_raises_an_http_error(gateway: GatewayThread) -> None:
    with pytest.raises(HTTPError) as raised:
        fetch_counts(gateway.base_url, {"messages": []})
    with raised.value as refused:
        assert refused.code == 400
        assert json.load(refused)["error"]["param"] == "model"
        # It holds no open connection.
        assert isinstance(refused.fp, io.BytesIO)


def test_the_client_module_needs_only_the_standard_library(tmp_path: Path) -> None:
    copy = tmp_path / "counts_of_gateway.py"
    copy.write_bytes((ROOT / "gateway/client.py").read_bytes())
    code = "import sys; import counts_of_gateway as c; assert c.Counts.of({}); print(*{m.partition('.')[0] for m in sys.modules})"
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    foreign = {name for name in loaded if name not in sys.stdlib_module_names} - {"counts_of_gateway", "__main__"}
    assert foreign == set()
