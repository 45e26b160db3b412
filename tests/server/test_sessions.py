"""/api on a running gateway: reading, resetting and deleting sessions, call records, reload."""

from __future__ import annotations

import json
import threading

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import Connection, Held, completion
from tests.support.web import CHAT, HI, Reply, Web


@pytest.fixture
def own(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url)


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_list_is_newest_first_and_comes_in_pages(own: GatewayThread) -> None:
    for number in range(5):
        own.web.chat(f"s{number}", f"tokens={(number * 7) % 5 * 10}/0")
    own.web.chat("s1")
    seen: list[str] = []
    cursor = ""
    pages = 0
    while True:
        page = own.web.get(f"/api/sessions?limit=2{cursor}").json
        assert len(page["sessions"]) <= 2
        seen += [view["id"] for view in page["sessions"]]
        pages += 1
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor']}"
    assert seen == ["s1", "s4", "s3", "s2", "s0"]
    assert pages == 3
    by_tokens = own.web.get("/api/sessions?sort=tokens").json["sessions"]
    totals = [view["cumulative_token_usage"]["total_tokens"] for view in by_tokens]
    assert totals == sorted(totals, reverse=True)
    assert len(totals) == 5


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=1001",
        "limit=",
        "limit=%C2%B2",
        "limit=" + "9" * 5_000,
        "sort=name",
        "cursor=garbage",
        "cursor=%00",
        "cursor=WzE4NDQ2NzQ0MDczNzA5NTUxNjE1LCAiYSIsICJiIl0=",  # its number is 2**64 - 1
    ],
)
def test_a_bad_query_is_a_400(query: str, web: Web) -> None:
    answer = web.get(f"/api/sessions?{query}")
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")


def test_calls_are_listed_newest_first_and_found_by_their_request_id(web: Web, session: str) -> None:
    headers = {"x-session-id": session}
    ids = [f"{session}-call-{number}" for number in range(3)]
    for number, request_id in enumerate(ids):
        body = {"model": "mock-small", "messages": HI, "stream": number == 1}
        web.post(CHAT, body, {**headers, "x-request-id": request_id, "x-mock": f"tokens={number + 1}/1"})
    records = web.get(f"/api/sessions/{session}/calls").json["calls"]
    assert [record["request_id"] for record in records] == ids[::-1]
    assert len(web.get(f"/api/sessions/{session}/calls?limit=2").json["calls"]) == 2
    record = web.get(f"/api/calls/{ids[1]}").json
    assert record == records[1]
    assert web.get(f"/api/calls/{record['call_id']}").json == record
    assert record["stream"] is True
    assert (record["status"], record["outcome"], record["error_code"]) == (200, "ok", None)
    assert (record["usage"]["input_tokens"], record["usage_source"]) == (2, "provider")
    assert (record["provider"], record["model"], record["dialect"]) == ("upstream", "mock-small", "chat")
    assert record["first_byte_ms"] <= record["duration_ms"]
    assert record["request_bytes"] > 0
    assert record["response_bytes"] > 0
    assert record["finish_reason"] == "stop"
    assert "hi" not in json.dumps(record).split('"')


def test_a_call_is_found_by_a_request_id_with_slashes(web: Web, session: str) -> None:
    request_id = f"team/{session}/1"
    headers = {"x-session-id": session, "x-request-id": request_id}
    assert web.post(CHAT, {"model": "mock-small", "messages": HI}, headers).status == 200
    for path in (request_id, request_id.replace("/", "%2F")):
        assert web.get(f"/api/calls/{path}").json["request_id"] == request_id


def test_a_refused_call_has_a_record_too(web: Web, session: str) -> None:
    answer = web.post(CHAT, b"nonsense", {"x-session-id": session})
    record = web.get(f"/api/calls/{answer.header('x-gateway-request-id')}").json
    assert (record["status"], record["outcome"], record["error_code"]) == (400, "refused", "invalid_request")
    assert record["usage"] is None


def test_session_with_only_failed_calls_is_shown_without_usage(web: Web, session: str) -> None:
    headers = {"x-session-id": session}
    refused = web.post(CHAT, b"nonsense", headers)
    assert refused.totals == (0, 0, 0)
    failed = web.post(CHAT, {"model": "mock-small", "messages": HI}, {**headers, "x-mock": "status=400"})
    assert failed.status == 400
    last, first = web.get(f"/api/sessions/{session}/calls").json["calls"]
    shown = web.get(f"/api/sessions/{session}").json
    assert (shown["id"], shown["calls"], shown["cumulative_token_usage"]["total_tokens"]) == (session, 0, 0)
    assert (shown["created_at"], shown["last_call_at"] >= last["started_at"]) == (first["started_at"], True)
    assert session in [row["id"] for row in web.get("/api/sessions").json["sessions"]]
    listed = [call["call_id"] for call in web.get("/api/calls").json["calls"]]
    assert {last["call_id"], first["call_id"]} <= set(listed)
    assert web.send("DELETE", f"/api/sessions/{session}").status == 200
    assert web.get(f"/api/sessions/{session}").status == 404


def test_parent_without_calls_is_shown_with_its_used_budget(web: Web, session: str) -> None:
    headers = {"x-session-id": f"{session}-child", "x-parent-session-id": session, "x-mock": "tokens=2/3"}
    assert web.post(CHAT, {"model": "mock-small", "messages": HI}, headers).status == 200
    shown = web.get(f"/api/sessions/{session}").json
    assert (shown["calls"], shown["used_with_children"]) == (0, {"tokens": 5, "calls": 1})
    assert (shown["created_at"], shown["last_call_at"]) == (None, None)
    calls = web.get(f"/api/sessions/{session}/calls")
    assert (calls.status, calls.json["calls"]) == (200, [])


def test_child_of_an_exhausted_parent_is_shown_with_parent_and_error(web: Web, session: str) -> None:
    child = {"x-session-id": f"{session}-child", "x-parent-session-id": session}
    web.send("PATCH", f"/api/sessions/{session}", {"budget": {"tokens": 60}})
    web.send("PATCH", f"/api/sessions/{session}-child", {"budget": {"tokens": 1000}})
    hi = {"model": "mock-small", "messages": HI}
    assert web.post(CHAT, hi, {**child, "x-mock": "tokens=30/25"}).status == 200
    refused = web.post(CHAT, hi, child)
    shown = web.get(f"/api/sessions/{session}-child").json
    assert (shown["parent"], shown["budget"]["used_fraction"]) == (session, 0.055)
    [parent] = shown["parents"]
    assert (parent["id"], parent["budget"]["used"]["tokens"], parent["budget"]["tokens"]) == (session, 55, 60)
    record = web.get(f"/api/calls/{refused.header('x-gateway-request-id')}").json
    error = refused.json["error"]
    assert record["error"] == {"message": error["message"], "budget": error["budget"]}
    budget = record["error"]["budget"]
    assert (budget["account"], budget["id"], budget["limit"], budget["used"]) == ("session", session, 60, 55)
    assert budget["needed"] > 5
    assert web.get(f"/api/sessions/{session}").json["parent"] is None


def test_declared_budget_is_shown_until_a_call_declares_none(web: Web, session: str) -> None:
    hi, name = {"model": "mock-small", "messages": HI}, {"x-session-id": session}
    refused = web.post(CHAT, hi, {**name, "x-session-budget-tokens": "3"})
    shown = web.get(f"/api/sessions/{session}").json
    assert (shown["budget"]["tokens"], shown["budget"]["remaining"]) == (3, 3)
    assert shown["declared_budget"] == {"tokens": 3, "usd": None, "calls": None}
    record = web.get(f"/api/calls/{refused.header('x-gateway-request-id')}").json
    assert record["declared_budget"] == shown["declared_budget"]
    assert web.post(CHAT, hi, name).status == 200
    shown = web.get(f"/api/sessions/{session}").json
    assert (shown["budget"], shown["declared_budget"]) == (None, None)


def test_session_with_only_a_budget_is_shown(web: Web, session: str) -> None:
    assert web.get(f"/api/sessions/{session}").status == 404
    web.send("PATCH", f"/api/sessions/{session}", {"budget": {"tokens": 9}})
    assert web.get(f"/api/sessions/{session}").json["budget"]["tokens"] == 9


def test_health(web: Web) -> None:
    assert web.get("/healthz").json == {"status": "alive"}
    assert web.get("/readyz").json == {"status": "ready"}


# --- writing ------------------------------------------------------------------------------------------------------


def test_reset_sets_the_totals_to_zero_and_keeps_the_calls(web: Web, session: str) -> None:
    web.chat(session)
    answer = web.post(f"/api/sessions/{session}/reset")
    assert answer.status == 200
    assert answer.json["cumulative_token_usage"]["total_tokens"] == 0
    assert answer.json["calls"] == 0
    assert len(web.get(f"/api/sessions/{session}/calls").json["calls"]) == 1
    assert web.chat(session, "tokens=3/4").totals == (3, 4, 7)


def test_delete_removes_the_session(web: Web, session: str) -> None:
    request_id = web.chat(session).header("x-gateway-request-id")
    assert web.send("DELETE", f"/api/sessions/{session}").json == {"id": session, "deleted": True}
    assert web.get(f"/api/sessions/{session}").status == 404
    gone = web.get(f"/api/calls/{request_id}")
    assert (gone.status, gone.error["message"].partition(". ")[2][:28]) == (404, "The call may still be runnin")
    assert web.send("DELETE", f"/api/sessions/{session}").status == 404
    assert web.post(f"/api/sessions/{session}/reset").status == 404
    assert web.chat(session, "tokens=3/4").totals == (3, 4, 7)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_parent_without_calls_is_reset_and_deleted(web: Web, session: str, method: str) -> None:
    path = f"/api/sessions/{session}" + ("/reset" if method == "POST" else "")
    call = {"model": "mock-small", "messages": HI}
    headers = {"x-session-id": f"{session}-child", "x-parent-session-id": session}
    assert web.post(CHAT, call, headers).status == 200
    answer = web.send(method, path)
    assert (answer.status, answer.json["id"]) == (200, session)
    set_anew = web.send("PATCH", f"/api/sessions/{session}", {"budget": {"tokens": 9}}).json
    assert set_anew["budget"]["used"]["tokens"] == 0


def test_a_budget_that_was_set_before_the_first_call_is_deleted(web: Web, session: str) -> None:
    assert web.send("PATCH", f"/api/sessions/{session}", {"budget": {"tokens": 9}}).status == 200
    for stray in ({"agent": "writer"}, {"sequence_index": 1}):
        refused = web.send("PATCH", f"/api/sessions/{session}", {"budget": {"tokens": 8}, **stray})
        assert (refused.status, "active_step" in refused.error["message"]) == (400, True)
    assert web.send("DELETE", f"/api/sessions/{session}").status == 200
    assert web.send("DELETE", f"/api/sessions/{session}").status == 404
    assert web.chat(session).status == 200


# --- reload -------------------------------------------------------------------------------------------------------


def edit(gateway: GatewayThread, **changes: object) -> None:
    settings = json.loads(gateway.file.read_text())
    gateway.file.write_text(json.dumps({**settings, **changes}))


def test_reload_takes_effect_and_keeps_running_streams(
    gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    stream = Held()

    def script(connection: Connection) -> None:
        asked = connection.request.json
        if asked.get("stream"):
            stream(connection)
        else:
            connection.whole(completion(model=asked["model"]))

    upstream = byte_server(script)
    own = gateway_server(upstream.url)
    answers: list[Reply] = []
    thread = threading.Thread(target=lambda: answers.append(own.web.stream("long")))
    thread.start()
    until(lambda: upstream.requests)
    assert own.web.chat(model="fast").json["model"] == "fast"
    edit(own, models=[{"match": "fast", "provider": "upstream", "name": "mock-small"}])
    assert own.web.post("/api/reload").json == {"reloaded": True}
    assert own.web.chat(model="fast").json["model"] == "mock-small"
    assert not answers
    stream.release()
    thread.join()
    assert answers[0].data_lines[-1] == "[DONE]"
    assert answers[0].clean
    assert answers[0].totals == (10, 5, 15)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"sessions": {"on_mising": "derive"}}', "sessions.on_mising"),
        ('{"server": {"port": "x"}}', "server.port"),
        ("{", "gateway.yaml"),
        ("[]", "gateway.yaml"),
        ('{"default_provider": "nobody"}', "default_provider"),
        ('{"server": {"host": "0.0.0.0"}, "providers": {"openai": {"key": "held-provider-key"}}}', "auth.keys"),
        (
            '{"providers": {"upstream": {"base_url": "http://127.0.0.1:1", "tls": {"ca_file": "/nowhere.pem"}}}}',
            "ca_file",
        ),
    ],
)
def test_reload_of_a_broken_file_changes_nothing_and_reports_it(
    text: str, named: str, own: GatewayThread, mock: MockProvider
) -> None:
    good = own.file.read_text()
    own.file.write_text(text)
    answer = own.web.post("/api/reload")
    assert (answer.status, answer.error["code"]) == (400, "invalid_request")
    assert "Nothing was changed" in answer.error["message"]
    assert named in answer.error["message"]
    assert "held-provider-key" not in answer.error["message"]
    assert own.web.chat("s").status == 200
    own.file.write_text(good)
    assert own.web.post("/api/reload").status == 200
    assert own.web.chat("s").status == 200
    assert mock.billed().calls == 2


def test_reload_of_a_missing_file_changes_nothing(own: GatewayThread) -> None:
    own.file.unlink()
    assert own.web.post("/api/reload").status == 400
    assert own.web.chat("s").status == 200


def test_a_reload_names_what_needs_a_restart(own: GatewayThread) -> None:
    store = json.loads(own.file.read_text())["store"]
    edit(own, store={**store, "timeout_ms": 999}, sessions={"on_missing": "require"})
    assert own.web.post("/api/reload").json == {"reloaded": True, "needs_restart": ["store.timeout_ms"]}
    assert own.web.chat().status == 400, "what needs none is in force"


def test_many_reloads_keep_every_total(own: GatewayThread, mock: MockProvider) -> None:
    for _ in range(5):
        own.web.stream("s")
        assert own.web.post("/api/reload").status == 200
    view = own.web.get("/api/sessions/s").json["cumulative_token_usage"]
    assert view["total_tokens"] == mock.billed().total_tokens
