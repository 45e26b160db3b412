"""/api on a running gateway: reading, resetting and deleting sessions, call records, models, reload, and who may."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from gateway.mock import MockServer, Provider
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread, until
from tests.support.scripted import Connection, Held, completion
from tests.support.web import CHAT, HI, Reply, Web, talk

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"


@pytest.fixture
def own(mock_server: MockServer, mock: Provider, gateway_server: StartGateway) -> GatewayThread:
    return gateway_server(mock_server.url)


@pytest.fixture(scope="module")
def admin_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    flags = {"auth.admin_key": ADMIN, "auth.keys": [{"name": "alice", "key": ALICE}]}
    gateway = GatewayThread(tmp_path_factory.mktemp("admin"), mock_server.url, flags)
    yield gateway
    gateway.stop()


def with_key(gateway: GatewayThread, key: str) -> Web:
    return Web(gateway.url, {"authorization": f"Bearer {key}"})


def raw_get(web: Web, path: str, *headers: str, method: str = "GET", host: str = "localhost") -> Reply:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close", "content-length: 0", *headers]
    return talk(web.url, ("\r\n".join(lines) + "\r\n\r\n").encode())


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


def test_a_session_is_shown_with_all_it_holds(web: Web, session: str) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    web.chat(session, tools=[tool])
    web.chat(session)
    view = web.get(f"/api/sessions/{session}").json
    assert view["id"] == session
    assert view["calls"] == 2
    assert view["recent_tools"] == ["look"]
    assert view["derived_id"] is False
    assert view["usage_source"] == "provider"
    created, last = (datetime.fromisoformat(view[name]) for name in ("created_at", "last_call_at"))
    assert created <= last
    usage = view["cumulative_token_usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] > 0
    assert view["cost_usd"] is None


def test_a_session_shows_what_each_of_its_tools_has_in_the_context(web: Web, session: str) -> None:
    look, read = ({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "read"))
    headers = {"x-session-id": session}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for tool in (look, look, read):
        answer = web.post(CHAT, {"model": "gpt-4o", "messages": messages, "tools": [tool]}, headers).json
        called = answer["choices"][0]["message"]
        name = called["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": name, "content": f"{len(messages)} lines were found"}
        messages += [called, result, {"role": "user", "content": "go on"}]
    messages.append({"role": "tool", "tool_call_id": "nobody's", "content": "words that nobody asked for"})
    request_id = web.post(CHAT, {"model": "gpt-4o", "messages": messages}, headers).header("x-request-id")
    web.post("/v1/embeddings", {"model": "text-embedding-3-small", "input": "text"}, headers)
    view, context = web.get(f"/api/sessions/{session}").json, web.get(f"/api/calls/{request_id}").json["context"]
    assert view["recent_tools"] == ["look", "look", "read"]
    assert [(name, one["calls"], one["results"]) for name, one in view["tools"].items()] == [
        ("look", 2, 2),
        ("read", 1, 1),
        ("unknown", 0, 1),
    ]
    assert sum(one["result_tokens"] for one in view["tools"].values()) == context["tool_tokens"] > 4
    shown = {name: {part: one[part] for part in ("results", "result_tokens")} for name, one in view["tools"].items()}
    assert context["tools"] == shown


def test_a_reset_session_shows_the_tools_of_its_context_and_no_calls(own: GatewayThread) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    result = {"role": "tool", "tool_call_id": "1", "content": "three words more"}
    own.web.chat("s", tools=[tool], messages=[*HI, result])
    assert own.web.post("/api/sessions/s/reset").status == 200
    view = own.web.get("/api/sessions/s").json
    assert view["recent_tools"] == []
    assert {name: one["calls"] for name, one in view["tools"].items()} == {"unknown": 0}


def test_costs_are_shown_to_the_millionth(web: Web, session: str) -> None:
    first = web.chat(session, "tokens=1000/7", model="priced")
    assert first.header("x-session-cumulative-cost-usd") == "0.001070"
    assert web.chat(session, "tokens=1/0", model="priced").header("x-session-cumulative-cost-usd") == "0.001071"
    assert web.get(f"/api/sessions/{session}").json["cost_usd"] == "0.001071"
    assert web.get(f"/api/calls/{first.header('x-request-id')}").json["cost_usd"] == "0.001070"


def test_a_cost_of_which_a_part_is_unknown_is_not_shown(web: Web, session: str) -> None:
    assert web.chat(session, model="priced").header("x-session-cumulative-cost-usd")
    assert web.chat(session, model="nobody-knows-this").header("x-session-cumulative-cost-usd") is None
    assert web.get(f"/api/sessions/{session}").json["cost_usd"] is None


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
    record = web.get(f"/api/calls/{answer.header('x-request-id')}").json
    assert (record["status"], record["outcome"], record["error_code"]) == (400, "refused", "invalid_request")
    assert record["usage"] is None


@pytest.mark.parametrize(
    "path",
    ["/api/sessions/nobody", "/api/sessions/nobody/calls", "/api/calls/nothing", "/api/nope", "/api/", "/api/calls/"],
)
def test_what_is_not_there_is_a_404(path: str, web: Web) -> None:
    answer = web.get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.header("x-should-retry") == "false"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_method_a_path_does_not_take_is_a_405(method: str, web: Web) -> None:
    answer = web.send(method, "/api/sessions")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    "path", ["/api/sessions", "/api/sessions/{}", "/api/sessions/{}/calls", "/api/models", "/api/nope"]
)
def test_nothing_of_the_api_is_cached(path: str, web: Web, session: str) -> None:
    web.chat(session)
    assert web.get(path.format(session)).header("cache-control") == "no-store"


def test_models_are_looked_up_by_a_part_of_their_name(
    mock_server: MockServer, mock: Provider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"providers.openai": {"base_url": mock_server.url, "auth": "none"}})
    models = gateway.web.get("/api/models?q=gpt-4o-mini").json["models"]
    assert models
    assert all("gpt-4o-mini" in model["model"] for model in models)
    assert len(gateway.web.get("/api/models?q=gpt-4o-mini&limit=1").json["models"]) == 1
    named = next(model for model in models if model["name"] == "gpt-4o-mini")
    assert named["provider"] == "openai"
    assert named["window"] == 128_000
    assert float(named["price"]["input"]) > 0
    assert gateway.web.get("/api/models?q=no-such-model-anywhere").json["models"] == []


def test_a_model_that_a_route_names_and_a_table_knows_is_listed_once(
    gateway_server: StartGateway, mock_server: MockServer
) -> None:
    row = {"match": "gpt-4o-mini", "provider": "openai", "window": 5000}
    gateway = gateway_server(mock_server.url, models=[row], built_in_providers=True)
    found = [
        one for one in gateway.web.get("/api/models?q=gpt-4o-mini").json["models"] if one["model"] == "gpt-4o-mini"
    ]
    assert [one["window"] for one in found] == [5000]


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


def test_delete_forgets_the_session(web: Web, session: str) -> None:
    request_id = web.chat(session).header("x-request-id")
    assert web.send("DELETE", f"/api/sessions/{session}").json == {"id": session, "deleted": True}
    assert web.get(f"/api/sessions/{session}").status == 404
    assert web.get(f"/api/calls/{request_id}").status == 404
    assert web.send("DELETE", f"/api/sessions/{session}").status == 404
    assert web.post(f"/api/sessions/{session}/reset").status == 404
    assert web.chat(session, "tokens=3/4").totals == (3, 4, 7)


# --- reload -------------------------------------------------------------------------------------------------------


def edit(gateway: GatewayThread, **changes: object) -> None:
    settings = json.loads(gateway.file.read_text())
    gateway.file.write_text(json.dumps({**settings, **changes}))


def test_a_reload_takes_effect_and_drops_no_running_stream(
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
def test_a_broken_file_changes_nothing_and_says_so(text: str, named: str, own: GatewayThread, mock: Provider) -> None:
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


def test_a_file_that_is_gone_changes_nothing(own: GatewayThread) -> None:
    own.file.unlink()
    assert own.web.post("/api/reload").status == 400
    assert own.web.chat("s").status == 200


def test_many_reloads_keep_every_total(own: GatewayThread, mock: Provider) -> None:
    for _ in range(5):
        own.web.stream("s")
        assert own.web.post("/api/reload").status == 200
    view = own.web.get("/api/sessions/s").json["cumulative_token_usage"]
    assert view["total_tokens"] == mock.billed().total_tokens


# --- who may ------------------------------------------------------------------------------------------------------

WRITES = [("POST", "/api/sessions/s/reset"), ("DELETE", "/api/sessions/s"), ("POST", "/api/reload")]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_with_an_admin_key_only_it_may_write(
    method: str, path: str, admin_server: GatewayThread, mock: Provider
) -> None:
    alice, admin = with_key(admin_server, ALICE), with_key(admin_server, ADMIN)
    alice.chat("s")
    nobody = Web(admin_server.url).send(method, path)
    assert (nobody.status, nobody.error["code"]) == (401, "invalid_api_key")
    answer = alice.send(method, path)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert (
        admin.send(
            method,
            path.replace("/s", "/alice/s", 1)
            if "/sessions/s" not in path
            else path.replace("sessions/s", "sessions/alice/s"),
        ).status
        == 200
    )


def test_the_admin_key_shows_all_and_does_not_call(admin_server: GatewayThread, mock: Provider) -> None:
    alice, admin = with_key(admin_server, ALICE), with_key(admin_server, ADMIN)
    alice.chat("seen")
    ids = [view["id"] for view in admin.get("/api/sessions?limit=1000").json["sessions"]]
    assert "alice/seen" in ids
    assert all(view["id"] != "alice/seen" for view in alice.get("/api/sessions?limit=1000").json["sessions"])
    assert admin.chat("s").status == 401


@pytest.mark.parametrize(("method", "path"), WRITES)
@pytest.mark.parametrize(
    "header",
    [
        "x-forwarded-for: 127.0.0.1",
        "x-real-ip: 127.0.0.1",
        "forwarded: for=127.0.0.1",
        "via: 1.1 proxy",
        "x-forwarded-host: localhost",
    ],
)
def test_without_an_admin_key_a_proxy_on_this_machine_may_not_write(
    header: str, method: str, path: str, web: Web
) -> None:
    web.chat("s")
    answer = raw_get(web, path, header, method=method)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8484", "127.0.0.1.evil.example", "localhost.evil.example", "", "192.168.0.1"]
)
def test_without_an_admin_key_a_name_pointed_at_this_machine_may_not_write(host: str, web: Web) -> None:
    """DNS rebinding: the peer is this machine, but the page is somebody else's."""
    web.chat("s")
    for method, path in (("POST", "/api/sessions/s/reset"), ("GET", "/api/sessions/s"), ("GET", "/api/events")):
        assert raw_get(web, path, method=method, host=host).status == 401


@pytest.mark.parametrize("host", ["localhost", "localhost:8484", "127.0.0.1:1", "[::1]:8484", "127.0.0.1"])
def test_without_an_admin_key_this_machine_may_write(host: str, web: Web) -> None:
    web.chat("s")
    assert raw_get(web, "/api/sessions/s/reset", method="POST", host=host).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost.evil.example", "http://localhost:1", "x"]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/sessions"),
        ("POST", "/api/sessions/s/reset"),
        ("POST", "/api/reload"),
        ("POST", CHAT),
        ("GET", "/v1/models"),
    ],
)
def test_a_page_of_another_origin_is_refused(method: str, path: str, origin: str, web: Web, mock: Provider) -> None:
    answer = raw_get(web, path, f"origin: {origin}", method=method)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert answer.header("access-control-allow-origin") is None
    assert mock.calls == []


def test_a_page_of_our_own_origin_is_not_refused(web: Web) -> None:
    assert raw_get(web, "/api/sessions", "origin: http://localhost:8484", host="localhost:8484").status == 200


def test_with_client_keys_a_page_may_call_with_its_key(admin_server: GatewayThread, mock: Provider) -> None:
    web = with_key(admin_server, ALICE)
    assert web.post(CHAT, {"model": "mock-small", "messages": HI}, {"origin": "http://app.example"}).status == 200


def test_every_answer_of_the_api_names_its_request(web: Web) -> None:
    for path in ("/api/sessions/nobody", "/api/nope", "/api/sessions?limit=x"):
        answer: Any = web.get(path)
        assert answer.header("x-request-id"), path
