"""Responses and Messages requests are trimmed, shortened by modes and limited by budgets exactly like chat requests."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import MockProvider, MockServer
from gateway.mock.strict import seal
from tests.conftest import StartGateway
from tests.support.conversations import TASK, agent
from tests.support.formats import Format
from tests.support.gateways import GatewayThread, until
from tests.support.web import Reply, Web, chat_bytes, connect

BUDGET = {"x-context-budget": "2500"}
formats = pytest.mark.parametrize("form", [Format("messages"), Format("responses")], ids=["messages", "responses"])


def holds(store: Path) -> int:
    """Return the number of open holds."""
    with closing(sqlite3.connect(store)) as db:
        (number,) = db.execute("SELECT count(*) FROM holds").fetchone()
    return int(number)


def ask(web: Web, form: Format, session: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
    return web.post(form.path, body, {"x-session-id": session, **(headers or {})})


def numbers(reply: Reply) -> tuple[int, int]:
    return int(reply.header("x-context-tokens") or -1), int(reply.header("x-context-tokens-original") or -1)


@formats
def test_a_request_within_its_budget_is_forwarded_byte_for_byte_in_each_format(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    body = json.dumps(form.agent(1), indent=1).encode()
    reply = web.post(form.path, body, {"x-session-id": session, **BUDGET})
    assert reply.status == 200
    assert mock.calls[-1].body == body
    assert reply.header("x-context-trimmed") == "none"


@formats
def test_a_request_over_its_budget_is_trimmed_and_keeps_calls_with_results_in_each_format(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    received = form.agent(12)
    reply = ask(web, form, session, received, BUDGET)
    assert reply.status == 200
    tokens, original = numbers(reply)
    assert tokens <= 2500 < original
    elements = form.sent(mock.calls[-1].body)
    assert elements[0]["content"].startswith(TASK["content"])
    assert elements[-1] == received[form.array][-1]
    calls, results = form.pairs(elements)
    assert calls == results != []
    overhead = {name: value for name, value in received.items() if name != form.array}
    assert overhead.items() <= json.loads(mock.calls[-1].body).items()


@formats
def test_the_next_turn_keeps_the_trimmed_prefix_in_each_format(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    ask(web, form, session, form.agent(12), BUDGET)
    first = form.sent(mock.calls[-1].body)
    ask(web, form, session, form.agent(13), BUDGET)
    second = form.sent(mock.calls[-1].body)
    assert second[: len(first)] == first
    assert second[len(first) :] == form.agent(13)[form.array][-2:]


@formats
def test_the_trim_report_lists_each_element(web: Web, session: str, form: Format) -> None:
    received = form.agent(12)
    reply = ask(web, form, session, received, BUDGET)
    items = web.get(f"/api/calls/{reply.header('x-gateway-request-id')}?explain=1").json["context"]["items"]
    assert len(items) == len(received[form.array])
    rules = Counter(item["rule"] for item in items)
    assert rules.keys() > {"pinned"}
    shown = [part.split("=") for part in (reply.header("x-context-trimmed") or "").split(",")]
    assert {rule: int(number) for rule, number in shown} == {
        rule: number for rule, number in rules.items() if rule not in ("kept", "pinned")
    }


@formats
def test_a_message_too_long_for_the_budget_is_refused_in_the_format_of_the_request(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    before = len(mock.calls)
    body = form.body([*agent(2), {"role": "user", "content": "word " * 4000}])
    reply = ask(web, form, session, body, BUDGET)
    place = len(body[form.array]) - 1
    assert reply.status == 400
    assert f"{form.array}[{place}] (user)" in reply.error["message"]
    assert reply.error["code"] == "context_length_exceeded"
    assert (reply.json.get("type") == "error") == (form.wire == "messages")
    assert len(mock.calls) == before


@pytest.mark.parametrize(("path", "field"), [("responses", "input"), ("completions", "prompt")])
def test_a_single_text_over_its_budget_is_refused_and_not_trimmed(
    web: Web, mock: MockProvider, session: str, path: str, field: str
) -> None:
    before = len(mock.calls)
    body = {"model": "gpt-4.1", field: "word " * 4000}
    reply = web.post(f"/v1/{path}", body, {"x-session-id": session, **BUDGET})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "context_length_exceeded", field)
    assert len(mock.calls) == before
    assert web.post(f"/v1/{path}", body, {"x-session-id": session, **BUDGET, "x-context-trim": "off"}).status == 200


@formats
def test_a_refusal_for_length_teaches_the_window(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, form: Format
) -> None:
    gateway = gateway_server(mock_server.url)
    reply = ask(gateway.web, form, "s", form.agent(30), {"x-mock": "window=4000"})
    assert reply.status == 200
    assert len(mock.calls) == 2
    calls, results = form.pairs(form.sent(mock.calls[-1].body))
    assert calls == results


@formats
def test_a_pinned_message_is_kept_and_its_mark_is_not_forwarded(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    marked = agent(12)
    marked[2] = {**marked[2], "x_gateway": {"priority": "pinned"}}
    body = form.body(marked)
    if form.wire == "messages":
        body["messages"][1]["x_gateway"] = {"priority": "pinned"}
    assert ask(web, form, session, body, BUDGET).status == 200
    assert form.sent(mock.calls[-1].body)[1:3] == form.agent(12)[form.array][1:3]
    assert b"x_gateway" not in mock.calls[-1].body


def test_the_thinking_at_the_start_of_the_last_turn_is_kept(web: Web, mock: MockProvider, session: str) -> None:
    form = Format("messages")
    for steps in range(10, 16):
        body = form.agent(steps, limit=2000, thinking={"type": "enabled", "budget_tokens": 1024})
        thought = {"type": "thinking", "thinking": "It is a long way.", "signature": "c2ln"}
        body["messages"][1]["content"].insert(0, thought)
        reply = ask(web, form, session, body, BUDGET)
        assert reply.status == 200
        tokens, original = numbers(reply)
        assert tokens <= 2500 < original
        assert form.sent(mock.calls[-1].body)[1] == body["messages"][1]


@formats
def test_messages_replaced_by_a_compaction_are_dropped_first_or_do_not_count(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    body = form.agent(12)
    elements = body[form.array]
    # Messages before a compaction in a Messages request do not count, so the rest must be too long by itself.
    least = 4 if form.wire == "messages" else 18
    place = next(place for place, one in enumerate(elements) if place > least and form.pairs([one])[0])
    compact = (
        {"role": "assistant", "content": [{"type": "compaction", "content": "All was well."}]}
        if form.wire == "messages"
        else {"type": "compaction", "id": "cmp_1", "encrypted_content": seal("compaction", "cmp_1")}
    )
    elements.insert(place, compact)
    behind, _ = form.pairs(elements[place:])
    assert ask(web, form, session, body, BUDGET).status == 200
    sent = form.sent(mock.calls[-1].body)
    if form.wire == "messages":
        assert sent[:place] == elements[:place], "the provider drops these messages itself"
        sent = [sent[0], *sent[place:]]
    calls, results = form.pairs(sent)
    assert sent[1] == compact
    assert calls == results != []
    assert set(calls) <= set(behind)
    assert sent[0]["content"].startswith(TASK["content"])


@formats
@pytest.mark.parametrize("mode", ["summary", "handle_only"])
def test_results_are_shown_in_the_requested_mode(
    web: Web, mock: MockProvider, session: str, form: Format, mode: str
) -> None:
    received = form.agent(3)
    reply = ask(web, form, session, received, {"x-response-mode": mode})
    assert reply.header("x-response-mode") == mode
    text = mock.calls[-1].body.decode()
    assert text.count("full text: GET /api/results/") == 3
    handle = text.partition("/api/results/")[2].partition("]")[0]
    assert b"Parcel 0-0 stands" in web.get(f"/api/results/{handle}").body
    assert form.pairs(form.sent(mock.calls[-1].body)) == form.pairs(received[form.array])
    again = ask(web, form, session, received, {"x-response-mode": mode})
    assert again.status == 200
    assert mock.calls[-1].body.decode() == text


every_format = pytest.mark.parametrize(
    "form", [*map(Format, ("chat", "messages", "responses"))], ids=lambda one: one.wire
)
#: an image and a text in the format of a tool result
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAyAAAAJYCAIAAAAVFBUn" + "A" * 4_000
PARTS: dict[str, Any] = {
    "chat": ("text", {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}),
    "messages": ("text", {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}),
    "responses": ("input_text", {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}),
}


def with_parts(form: Format, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a request of an agent after one step, with these parts in its last result."""
    body = form.agent(1)
    result_of(form, body[form.array], parts)
    return body


def result_of(form: Format, elements: list[Any], parts: list[dict[str, Any]] | None = None) -> Any:
    """Return the parts of the last result; set them first if `parts` are given."""
    name = "output" if form.wire == "responses" else "content"
    holders = [one["content"][-1] if form.wire == "messages" else one for one in elements if form.pairs([one])[1]]
    if parts is not None:
        holders[-1][name] = parts
    return holders[-1][name]


@every_format
def test_the_text_of_a_result_is_shortened_and_its_image_is_replaced_only_by_a_handle(
    web: Web, mock: MockProvider, session: str, form: Format
) -> None:
    name, picture = PARTS[form.wire]
    rows = json.dumps([{"id": number, "name": f"parcel {number}", "state": "open"} for number in range(90)])
    body = with_parts(form, [{"type": name, "text": rows}, picture])
    for mode in ("table", "summary"):
        assert ask(web, form, session, body, {"x-response-mode": mode}).header("x-response-mode") == mode
        short, stays = result_of(form, form.sent(mock.calls[-1].body))
        assert stays == picture
        assert short["type"] == name
        assert "id|name|state" in short["text"]
        assert len(short["text"]) < len(rows) * 2 / 3
    assert web.get(f"/api/results/{handle_in(short['text'])}").body.decode() == rows
    ask(web, form, session, body, {"x-response-mode": "handle_only"})
    (line,) = result_of(form, form.sent(mock.calls[-1].body))
    assert (line["type"], ", 1 image; " in line["text"]) == (name, True)
    kept = web.get(f"/api/results/{handle_in(line['text'])}").json
    assert kept == [{"type": "text", "text": rows}, picture]


@every_format
def test_an_image_is_kept_if_there_is_no_space_to_store_it(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, form: Format
) -> None:
    name, picture = PARTS[form.wire]
    web = gateway_server(mock_server.url, **{"sessions.results_max_mb": 0}).web
    body = with_parts(form, [{"type": name, "text": "Taken."}, picture])
    reply = ask(web, form, "s", body, {"x-response-mode": "handle_only"})
    assert result_of(form, form.sent(mock.calls[-1].body)) == [{"type": name, "text": "Taken."}, picture]
    assert reply.header("x-response-mode") == "handle_only", "the mode in force"


def test_a_search_result_is_replaced_only_if_it_has_no_citations(web: Web, mock: MockProvider, session: str) -> None:
    form = Format("messages")
    text = "\n".join(f"line {number}: parcel {number} weighs {number * 37} g" for number in range(150))
    found = {"type": "search_result", "source": "https://a.example", "title": "Parcels"}
    found["content"] = [{"type": "text", "text": text}]  # type: ignore[assignment]
    ask(web, form, session, with_parts(form, [found, found]), {"x-response-mode": "handle_only"})
    (line,) = result_of(form, form.sent(mock.calls[-1].body))
    assert web.get(f"/api/results/{handle_in(line['text'])}").json == [found, found]
    cited = [{**found, "citations": {"enabled": True}}]
    ask(web, form, session, with_parts(form, cited), {"x-response-mode": "handle_only"})
    assert result_of(form, form.sent(mock.calls[-1].body)) == cited


def handle_in(text: str) -> str:
    return text.rpartition("GET /api/results/")[2].rstrip("]")


@formats
def test_a_session_shortens_its_results_before_it_is_refused(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, form: Format
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 12_000})
    modes: list[str] = []
    for steps in range(1, 30):
        reply = ask(gateway.web, form, "s", form.agent(steps, limit=100))
        if reply.status != 200:
            break
        modes.append(reply.header("x-response-mode") or "")
    assert reply.status == 400
    assert reply.error["code"] == "budget_exhausted"
    assert sorted(set(modes), key=["raw", "table", "summary", "handle_only"].index) == list(dict.fromkeys(modes))
    assert {"raw", "table", "summary"} <= set(modes)
    billed = mock.billed()
    assert (billed.input_tokens, billed.output_tokens) == reply.totals[:2]


@pytest.mark.parametrize(
    ("path", "field", "end"),
    [("responses", "input", "response.incomplete"), ("completions", "prompt", '"finish_reason":"length"')],
)
def test_a_stream_reserves_more_while_it_runs_and_ends_with_its_budget(
    mock_server: MockServer, gateway_server: StartGateway, path: str, field: str, end: str
) -> None:
    grows = [{"match": "*", "provider": "upstream", "reasoning": False}]
    flags: dict[str, object] = {"budget.tokens": 6_000, "sessions.on_disconnect": "cancel"}
    gateway = gateway_server(mock_server.url, models=grows, **flags)
    with ThreadPoolExecutor(1) as pool, connect(gateway.url) as other:
        slow = {"x-session-id": "s", "x-mock": "chunks=6000;interval=0.001"}
        # A completion has a default limit unless it asks for none.
        endless = {"n_predict": -1} if path == "completions" else {}
        fields = {"model": "mock-small", "stream": True, field: "Tell me all.", **endless}
        stream = pool.submit(gateway.web.post, f"/v1/{path}", fields, slow)
        until(lambda: holds(gateway.store))
        # Another call reserves the rest, so that the reservation of the stream cannot grow.
        chat = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3_800}
        other.sendall(chat_bytes(json.dumps(chat).encode(), b"x-session-id: s", b"x-mock: hang=1"))
        reply = stream.result()
    assert end in reply.body.decode()
    assert 1_000 < reply.totals[1] < 3_500
    if path == "responses":
        charged = gateway.web.get(f"/api/calls/{reply.header('x-gateway-request-id')}").json["usage"]
        reported = reply.events[-1]["response"]["usage"]
        assert reported["input_tokens"] == charged["input_tokens"], "the sent input is counted"


def test_the_anthropic_sdk_runs_a_long_agent_within_its_budget(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    with anthropic.Anthropic(
        base_url=gateway.url, api_key="k", max_retries=0,
        default_headers={"x-session-id": session, "x-context-budget": "2500"},
    ) as client:  # fmt: skip
        create: Any = client.messages.with_raw_response.create
        for steps in range(1, 25, 3):
            raw = create(**Format("messages").agent(steps), stream=steps % 2 == 0)
            assert int(raw.headers["x-context-tokens"]) <= 2500
            if steps % 2 == 0:
                assert [event.type for event in raw.parse()][-1] == "message_stop"
            else:
                assert raw.parse().usage.input_tokens > 0
    assert len(mock.calls) == 8


def test_the_openai_sdk_runs_a_long_agent_over_responses_within_its_budget(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    with openai.OpenAI(
        base_url=f"{gateway.url}/v1", api_key="k", max_retries=0,
        default_headers={"x-session-id": session, "x-context-budget": "2500"},
    ) as client:  # fmt: skip
        create: Any = client.responses.with_raw_response.create
        for steps in range(1, 25, 3):
            raw = create(**Format("responses").agent(steps), stream=steps % 2 == 0)
            assert int(raw.headers["x-context-tokens"]) <= 2500
            if steps % 2 == 0:
                assert [event.type for event in raw.parse()][-1] == "response.completed"
            else:
                assert raw.parse().usage.input_tokens > 0
    assert len(mock.calls) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_server_side_state_is_named_in_a_header_because_it_is_not_counted(
    gateway: GatewayThread, session: str, stream: bool
) -> None:
    def unseen_header(**body: Any) -> str | None:
        asked = {"model": "mock-small", "input": "hi", "stream": stream, **body}
        reply = gateway.web.post("/v1/responses", asked, {"x-session-id": session})
        assert reply.status == 200
        return reply.header("x-context-unseen")

    assert unseen_header() is None
    assert unseen_header(previous_response_id="resp_1") == "previous_response_id"
    assert unseen_header(conversation="conv_1", prompt={"id": "pmpt_1"}) == "conversation,prompt"


#: by path: a part that refers to a file instead of containing it, and the field that refers to it
FILES = [
    ("chat/completions", {"type": "file", "file": {"file_id": "file-1"}}, "file_id"),
    ("responses", {"type": "input_file", "file_url": "https://example.org/a.pdf"}, "file_url"),
    ("messages", {"type": "document", "source": {"type": "file", "file_id": "file_1"}}, "file_id"),
]


def unseen(web: Web, session: str, path: str, items: list[dict[str, Any]]) -> str | None:
    body = {"model": "mock-small", "input" if path == "responses" else "messages": items, "max_tokens": 10}
    reply = web.post(f"/v1/{path}", body, {"x-session-id": session})
    assert reply.status == 200
    return reply.header("x-context-unseen")


@pytest.mark.parametrize(("path", "part", "named"), FILES)
def test_a_file_referenced_by_id_or_url_is_reported(
    web: Web, session: str, path: str, part: dict[str, Any], named: str
) -> None:
    assert unseen(web, session, path, [{"role": "user", "content": [part]}]) == named


@pytest.mark.parametrize(("path", "part", "named"), FILES)
def test_a_referenced_file_is_reported_on_all_later_turns_until_it_is_removed(
    web: Web, session: str, path: str, part: dict[str, Any], named: str
) -> None:
    """The prefix of a long conversation is cached and not scanned again."""

    def asks(content: object) -> dict[str, Any]:
        return {"role": "user", "content": content}

    begun = [asks("word " * 2_000), {"role": "assistant", "content": "yes"}]
    assert unseen(web, session, path, [*begun, asks([part])]) == named
    assert unseen(web, session, path, [*begun, asks("not that one")]) is None
    for _ in range(3):
        begun += [asks([part]) if len(begun) == 2 else asks("go on"), {"role": "assistant", "content": "done"}]
        assert unseen(web, session, path, [*begun, asks("more")]) == named


def test_the_next_turn_counts_the_tokens_that_the_provider_stores(web: Web, session: str) -> None:
    counts = []
    for number in range(2):
        asked = {"model": "mock-small", "input": f"and number {number}?", "previous_response_id": f"resp_{number}"}
        reply = web.post("/v1/responses", asked, {"x-session-id": session, "x-mock": "tokens=5000/5"})
        counts.append(int(reply.header("x-context-tokens") or 0))
    first, second = counts
    assert first < 100
    assert 4_900 <= second <= 5_100
