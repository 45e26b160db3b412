"""Old messages that a model summarizes: requested once, charged to the session, and unchanged on all later turns."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest

from gateway.mock import Behaviour, MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway, StartUpstream
from tests.support import stopping
from tests.support.conversations import SYSTEM, TASK, TOOLS, agent, step
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import completion
from tests.support.web import CHAT, Reply, Web

BUDGET = {"x-context-budget": "2500"}
TEXT = "Depots 0 to 7 were listed; parcel 7-11 stands in row 33 of hall 7."
MODELS = [
    {"match": "short", "provider": "writer", "name": "short-1", "price": {"input": 2, "output": 20}},
    {"match": "gpt-4o", "provider": "upstream", "price": {"input": 1, "output": 10}},
]
ORDER = ["dedupe", "summarize", "condense", "drop"]

Start = Callable[..., GatewayThread]


@pytest.fixture
def writer_server() -> Iterator[MockServer]:
    server = MockServer().start()
    yield server
    stopping.soon(server.stop)


@pytest.fixture
def writer(writer_server: MockServer) -> MockProvider:
    """Return the provider of the summary model: each response is `TEXT` and costs 700 input and 30 output tokens."""
    writer_server.provider.behaviour = Behaviour(tokens=(700, 30))
    script(writer_server.provider, *[Turn(TEXT)] * 5)
    return writer_server.provider


def script(provider: MockProvider, *turns: Turn) -> None:
    provider.reset()
    provider.push(*turns)


@pytest.fixture
def start_with_summaries(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, writer_server: MockServer
) -> Start:
    """Return a function that starts gateways with summaries from a second provider."""
    del mock

    def start(writer_url: str = writer_server.url, **flags: Any) -> GatewayThread:
        auth = flags.pop("auth", {"auth": "none"})
        settings = {
            "providers.writer": {"base_url": writer_url, "retries": 0, **auth},
            "models": MODELS,
            "context.strategies": ORDER,
            "context.summary": {"model": "short", "max_tokens": 300},
            **flags,
        }
        return gateway_server(mock_server.url, **settings)

    return start


@pytest.fixture
def web(start_with_summaries: Start, writer: MockProvider) -> Web:
    del writer
    return start_with_summaries().web


def ask(web: Web, messages: list[dict[str, Any]], session: str = "s", **headers: str) -> Reply:
    body = {"model": "gpt-4o", "messages": messages, "tools": TOOLS}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.post(CHAT, body, {"x-session-id": session, **BUDGET, **named})


def sent(provider: MockProvider) -> list[dict[str, Any]]:
    """Return the messages of the last call that reached a provider."""
    found: list[dict[str, Any]] = json.loads(provider.calls[-1].body)["messages"]
    return found


def record_of(web: Web, reply: Reply) -> Any:
    return web.get(f"/api/calls/{reply.header('x-gateway-request-id')}?explain=1").json


def calls_of(web: Web) -> tuple[Any, Any]:
    """Return the records of a call and of its summary."""
    calls = {call["operation"]: call for call in web.get("/api/sessions/s/calls").json["calls"]}
    assert calls.keys() == {"chat", "summary"}
    return calls["chat"], calls["summary"]


def trimmed(reply: Reply) -> dict[str, int]:
    shown = reply.header("x-context-trimmed") or ""
    return {rule: int(count) for rule, count in (part.split("=") for part in shown.split(","))}


def test_old_messages_are_summarized_into_one_message_by_the_configured_model(
    web: Web, mock: MockProvider, writer: MockProvider
) -> None:
    original = agent(12)
    reply = ask(web, original)
    assert reply.status == 200
    messages = sent(mock)
    count = trimmed(reply)["summarize"]
    assert messages[:2] == [SYSTEM, TASK]
    assert messages[2] == {"role": "assistant", "content": f"[summary of {count} earlier messages]\n{TEXT}"}
    assert messages[3:] == original[2 + count :]
    rules = [item["rule"] for item in record_of(web, reply)["context"]["items"]]
    assert [index for index, rule in enumerate(rules) if rule == "summarize"] == list(range(2, 2 + count))
    [asked] = writer.calls
    body = json.loads(asked.body)
    assert (body["model"], body["max_tokens"]) == ("short-1", 300)
    instruction, shown = body["messages"]
    assert (instruction["role"], shown["role"]) == ("system", "user")
    lines = [json.loads(line) for line in shown["content"].split("\n")]
    assert [line["role"] for line in lines] == [message["role"] for message in original[2 : 2 + count]]
    assert lines[1]["text"] == original[3]["content"]
    assert lines[0]["calls"] == [{"name": "list_depot", "arguments": '{"depot": 0}'}]


def test_the_cost_of_a_summary_is_charged_to_the_session_as_its_own_call(
    web: Web, mock: MockProvider, writer: MockProvider
) -> None:
    reply = ask(web, agent(12))
    billed = [provider.billed() for provider in (mock, writer)]
    assert reply.totals == (
        sum(bill.input_tokens for bill in billed),
        sum(bill.output_tokens for bill in billed),
        sum(bill.total_tokens for bill in billed),
    )
    assert (writer.billed().input_tokens, writer.billed().output_tokens) == (700, 30)
    main, summary = calls_of(web)
    assert (summary["provider"], summary["model"], summary["outcome"]) == ("writer", "short-1", "ok")
    assert summary["notes"] == {"for": main["call_id"]}
    assert summary["request_id"] == summary["call_id"]
    assert summary["call_id"] in main["notes"]["summary"]
    assert web.get(f"/api/calls/{summary['call_id']}").json["operation"] == "summary"
    assert Decimal(summary["cost_usd"]) == Decimal("0.002000")
    shown = web.get("/api/sessions/s").json
    assert Decimal(shown["cost_usd"]) == Decimal(summary["cost_usd"]) + Decimal(main["cost_usd"])
    assert shown["calls"] == 2
    assert TEXT not in json.dumps([main, summary])


def test_the_summary_is_charged_even_if_the_call_fails(web: Web, mock: MockProvider, writer: MockProvider) -> None:
    ask(web, agent(12), x_mock="status=500")
    assert mock.calls[-1].status == 500
    assert web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == 730


def test_later_turns_keep_the_summary_without_another_request(
    web: Web, mock: MockProvider, writer: MockProvider
) -> None:
    ask(web, agent(12))
    first = sent(mock)
    ask(web, agent(13))
    assert sent(mock) == [*first, *step(12)]
    assert len(writer.calls) == 1


def test_the_next_trim_summarizes_the_last_summary_and_the_newer_messages(
    web: Web, mock: MockProvider, writer: MockProvider
) -> None:
    script(writer, Turn(TEXT), Turn("Everything up to depot 12."))
    counts = []
    for steps in range(10, 20):
        reply = ask(web, agent(steps))
        assert int(reply.header("x-context-tokens") or 0) <= 2500
        counts.append(trimmed(reply)["summarize"])
        if len(writer.calls) == 2:
            break
    again = [json.loads(line) for line in sent(writer)[1]["content"].split("\n")]
    assert again[0] == {"role": "summary", "text": TEXT}
    assert again[1:3] == [line for line in again[1:3] if line["role"] in ("assistant", "tool")]
    assert len(again) - 1 == counts[-1] - counts[0]
    assert sent(mock)[2]["content"] == f"[summary of {counts[-1]} earlier messages]\nEverything up to depot 12."
    assert sum("summary of" in str(message["content"]) for message in sent(mock)) == 1


def test_another_gateway_with_the_same_store_sends_the_same_summary(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    first = start_with_summaries()
    ask(first.web, agent(12))
    ask(first.web, agent(13))
    decided = mock.calls[-1].body
    first.stop()
    second = start_with_summaries(folder=first.folder)
    ask(second.web, agent(13))
    assert mock.calls[-1].body == decided
    assert len(writer.calls) == 1


def test_a_summary_with_a_deleted_text_is_requested_again(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    gateway = start_with_summaries(**{"store.url": "memory://"})
    script(writer, Turn(TEXT), Turn("Another text."))
    ask(gateway.web, agent(12))
    assert gateway.web.send("DELETE", "/api/sessions/s").status == 200
    ask(gateway.web, agent(12))
    assert sent(mock)[2]["content"].endswith("\nAnother text.")


def without(web: Web, mock: MockProvider, original: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ask(web, original)
    return sent(mock)


def written(text: str) -> bytes:
    """Return a whole response with this text."""
    message = {"role": "assistant", "content": text}
    return completion(choices=[{"index": 0, "message": message, "finish_reason": "stop"}])


FAILURES: dict[str, Turn | Behaviour] = {
    "an error": Behaviour(status=500),
    "a page instead of an answer": Behaviour(html=True),
    "half an answer": Behaviour(malformed=True),
    "nothing": Behaviour(die=0),
    "an empty text": Turn(""),
    "a call": Turn(tool_calls=(ToolCall("f", "{}"),)),
    "a refusal": Turn(TEXT, finish_reason="content_filter"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_if_a_summary_fails_the_next_strategies_are_used_and_noted(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider, failure: str
) -> None:
    plain = start_with_summaries(**{"context.strategies": [name for name in ORDER if name != "summarize"]})
    expected = without(plain.web, mock, agent(12))
    mock.reset()
    fault = FAILURES[failure]
    writer.behaviour = fault if isinstance(fault, Behaviour) else Behaviour()
    script(writer, *([fault] if isinstance(fault, Turn) else []))
    web = start_with_summaries().web
    reply = ask(web, agent(12))
    assert reply.status == 200
    assert sent(mock) == expected
    assert record_of(web, reply)["notes"]["summary"].startswith("none: ")
    assert len(writer.calls) == 1
    _, summary = calls_of(web)
    cost = summary["usage"]["total_tokens"] if summary["usage"] else 0
    assert reply.totals[2] == mock.billed().total_tokens + cost
    assert (cost > 0) == (writer.billed().calls > 0)


@pytest.mark.parametrize(
    "answer", [b"word " * 9, written("word " * 3000), completion(choices=[]), completion(choices=[{"message": None}]),
               completion(choices=[{"message": {"content": "no", "refusal": "I will not"}}])],
)  # fmt: skip
def test_an_unusable_summary_is_charged_but_not_used(
    start_with_summaries: Start, mock: MockProvider, byte_server: StartUpstream, answer: bytes
) -> None:
    web = start_with_summaries(byte_server(lambda connection: connection.whole(answer)).url).web
    reply = ask(web, agent(12))
    assert reply.status == 200
    assert "summarize" not in trimmed(reply)
    main, summary = calls_of(web)
    assert summary["call_id"] in main["notes"]["summary"]
    assert reply.totals[2] == mock.billed().total_tokens + summary["usage"]["total_tokens"]


def test_if_the_only_strategy_fails_messages_are_dropped_and_the_call_succeeds(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    writer.behaviour = Behaviour(status=503)
    web = start_with_summaries(**{"context.strategies": ["summarize"]}).web
    reply = ask(web, agent(12))
    assert reply.status == 200
    assert trimmed(reply).keys() == {"drop"}


def test_a_cancelled_summary_is_charged_once(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    writer.behaviour = Behaviour(hang=True)
    gateway = start_with_summaries(**{"sessions.on_disconnect": "cancel"})
    body = {"model": "gpt-4o", "messages": agent(12), "tools": TOOLS}
    connection = gateway.web.connect()
    connection.request("POST", CHAT, json.dumps(body), {"x-session-id": "s", **BUDGET})
    until(lambda: writer.calls, what="a summary is asked for")
    connection.close()
    until(lambda: len(gateway.web.get("/api/sessions/s/calls").json.get("calls", ())) == 2)
    main, summary = calls_of(gateway.web)
    assert (main["outcome"], summary["outcome"]) == ("client_left", "client_left")
    assert summary["usage_source"] == "estimated"
    assert main["usage"] is None
    assert mock.calls == []
    assert gateway.web.get("/api/sessions/s").json["calls"] == 1


def test_a_summary_for_a_disconnected_client_is_drained_and_the_call_not_sent(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    writer.behaviour = Behaviour(delay=1.5)
    script(writer, Turn(TEXT))
    gateway = start_with_summaries()
    body = {"model": "gpt-4o", "messages": agent(12), "tools": TOOLS}
    connection = gateway.web.connect()
    connection.request("POST", CHAT, json.dumps(body), {"x-session-id": "s", **BUDGET})
    until(lambda: writer.calls, what="a summary is asked for")
    connection.close()
    until(lambda: gateway.web.get("/api/sessions/s").json.get("calls"))
    time.sleep(0.3)
    assert mock.calls == []
    billed = writer.billed().total_tokens
    assert gateway.web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"] == billed


def test_without_a_gateway_key_the_summary_model_is_not_called(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries(auth={"auth": "bearer"}).web
    reply = ask(web, agent(12), authorization="Bearer of-the-caller")
    assert reply.status == 200
    assert writer.calls == []
    assert "summarize" not in trimmed(reply)
    assert record_of(web, reply)["notes"]["summary"] == "none: the gateway has no API key for writer"


def test_the_summary_model_gets_the_gateway_key_and_no_header_of_the_caller(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries(auth={"auth": "bearer", "key": "held-by-the-gateway"}).web
    assert "summarize" in trimmed(ask(web, agent(12), authorization="Bearer of-the-caller", x_secret="of-the-caller"))
    [asked] = writer.calls
    assert asked.header("authorization") == "Bearer held-by-the-gateway"
    assert "of-the-caller" not in str(asked.headers)


def test_the_credential_of_the_caller_is_used_for_a_summary_at_the_same_provider(
    start_with_summaries: Start, mock: MockProvider, mock_server: MockServer
) -> None:
    provider = {"base_url": mock_server.url, "auth": "bearer"}
    gateway = start_with_summaries(
        **{"providers.own": provider, "default_provider": "own", "models": [], "context.summary": {"model": "small"}}
    )
    reply = ask(gateway.web, agent(12), authorization="Bearer of-the-caller")
    assert "summarize" in trimmed(reply)
    summary, main = mock.calls
    assert summary.header("authorization") == main.header("authorization") == "Bearer of-the-caller"
    assert (summary.model, main.model) == ("small", "gpt-4o")
    assert reply.totals[2] == mock.billed().total_tokens


def test_a_summary_is_retried_with_the_limit_field_that_the_model_requires(
    start_with_summaries: Start, mock: MockProvider, byte_server: StartUpstream
) -> None:
    def play(connection: Any) -> None:
        if b'"max_tokens"' in upstream.requests[-1].body:
            refusal = b'{"error":{"message":"Use max_completion_tokens instead."}}'
            connection.whole(refusal, status=b"400 Bad Request")
        else:
            connection.whole(written(TEXT))

    upstream = byte_server(play)
    web = start_with_summaries(upstream.url).web
    assert "summarize" in trimmed(ask(web, agent(12)))
    assert len(upstream.requests) == 2
    records = web.get("/api/sessions/s/calls").json["calls"]
    assert sorted(call["operation"] for call in records) == ["chat", "summary", "summary"]
    assert sorted(call["status"] for call in records) == [200, 200, 400]


def test_without_a_session_there_is_no_summary(
    start_with_summaries: Start, mock: MockProvider, writer: MockProvider
) -> None:
    web = start_with_summaries(**{"sessions.on_missing": "none"}).web
    reply = web.post(CHAT, {"model": "gpt-4o", "messages": agent(12), "tools": TOOLS}, BUDGET)
    assert reply.status == 200
    assert "summarize" not in trimmed(reply)
    assert writer.calls == []


def test_shadow_mode_and_the_trim_endpoint_never_call_a_model(
    web: Web, mock: MockProvider, writer: MockProvider
) -> None:
    original = agent(12)
    reply = ask(web, original, x_context_trim="shadow")
    assert sent(mock) == original
    assert "summarize" not in (reply.header("x-context-shadow") or "none")
    body = {"model": "gpt-4o", "messages": original, "tools": TOOLS}
    looked = web.post("/api/trim", body, BUDGET).json
    assert "short would first be asked to summarize" in looked["context"]["note"]
    assert "summarize" not in looked["context"]["trimmed"]
    assert writer.calls == []
    ask(web, original)
    looked = web.post("/api/trim?session=s", body, BUDGET).json
    assert "note" not in looked["context"]
    assert looked["body"]["messages"] == sent(mock)
    assert len(writer.calls) == 1


def test_a_call_refused_for_its_length_is_summarized(web: Web, mock: MockProvider, writer: MockProvider) -> None:
    body = {"model": "gpt-4o-unheard-of", "messages": agent(30), "tools": TOOLS}
    reply = web.post(CHAT, body, {"x-session-id": "s", "x-mock": "window=4000"})
    assert reply.status == 200
    assert "summarize" in trimmed(reply)
    assert len(writer.calls) == 1
    assert reply.totals[2] == mock.billed().total_tokens + writer.billed().total_tokens


def test_parallel_calls_of_a_session_all_use_one_summary(web: Web, mock: MockProvider, writer: MockProvider) -> None:
    texts = [f"Text number {number}." for number in range(4)]
    writer.behaviour = Behaviour(delay=0.2)
    script(writer, *map(Turn, texts))
    threads = [threading.Thread(target=ask, args=(web, agent(12))) for _ in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    at_once = {json.loads(call.body)["messages"][2]["content"] for call in mock.calls}
    assert len(at_once) == 1
    ask(web, agent(13))
    assert sent(mock)[2]["content"] in at_once
    shown = web.get("/api/sessions/s").json["cumulative_token_usage"]["total_tokens"]
    assert shown == mock.billed().total_tokens + writer.billed().total_tokens
