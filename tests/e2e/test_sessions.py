"""Assign calls to sessions, and keep the sessions of each client key private."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Web, chat_bytes, talk

ALICE, BOB, ADMIN = "alice-key-0123456789", "bob-key-0123456789abc", "admin-key-0123456789"


@pytest.fixture(scope="module")
def keyed_server(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    keys = [{"name": "alice", "key": ALICE}, {"name": "bob", "key": BOB, "models": ["mock-*"]}]
    flags = {"auth.keys": keys, "auth.admin_key": ADMIN}
    gateway = GatewayThread(tmp_path_factory.mktemp("keyed"), mock_server.url, flags)
    yield gateway
    gateway.stop()


@pytest.fixture
def keyed(keyed_server: GatewayThread, mock: MockProvider) -> str:
    return keyed_server.url


def as_key(url: str, key: str) -> Web:
    return Web(url, {"authorization": f"Bearer {key}"})


def session_of(web: Web, body: dict[str, object] | None = None, headers: dict[str, str] | None = None) -> str:
    answer = web.post(CHAT, {"model": "mock-small", "messages": HI, **(body or {})}, headers)
    assert answer.status == 200
    return answer.header("x-session-id") or ""


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["x-session-id", "x-litellm-session-id", "helicone-session-id", "x-claude-code-session-id", "session-id",
     "session_id", "x-opencode-session", "x-session-affinity", "x-openwebui-chat-id", "x-anything-session-id",
     "x-amp-thread-id", "thread-id", "conversation_id",
     "X-Session-ID"],
)  # fmt: skip
def test_a_header_names_the_session(header: str, web: Web) -> None:
    assert session_of(web, None, {header: f"by-{header}"}) == f"by-{header}"


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"session_id": "body-1"}},
        {"session_id": "body-1"},
        {"conversation": "body-1"},
        {"conversation": {"id": "body-1"}},
        {"prompt_cache_key": "body-1"},
        {"metadata": {"user_id": "user_1_account_2_session_body-1"}},
        {"metadata": {"user_id": '{"session_id":"body-1"}'}},
    ],
)
def test_a_body_names_the_session(body: dict[str, object], web: Web) -> None:
    assert session_of(web, body) == "body-1"


@pytest.mark.parametrize(
    ("path", "strict", "left"),
    [
        ("/v1/chat/completions", False, {"session_id": "s", "metadata": {"session_id": "s"}}),
        ("/v1/chat/completions", True, {"metadata": {"session_id": "s"}}),
        ("/v1/messages", True, {}),
        ("/v1/embeddings", True, {"metadata": {"session_id": "s"}}),
        ("/v1/unheard/of", True, {"session_id": "s", "metadata": {"session_id": "s"}}),
    ],
)
def test_session_fields_are_not_sent_to_a_provider_that_would_refuse_them(
    byte_server: StartUpstream, gateway_server: StartGateway, path: str, left: dict[str, object], *, strict: bool
) -> None:
    upstream = byte_server(lambda connection: connection.whole(b"{}"))
    gateway = gateway_server(upstream.url, **{"providers.upstream.strict_fields": strict})
    body = {"model": "m", "max_tokens": 9, "messages": HI, "input": "x"}
    reply = gateway.web.post(path, {**body, "session_id": "s", "metadata": {"session_id": "s"}})
    assert reply.header("x-session-id") == "s"
    assert upstream.requests[0].json == {**body, **left}


def test_the_session_of_the_path_precedes_the_header_and_the_header_precedes_the_body(
    web: Web, mock: MockProvider
) -> None:
    body = {"model": "mock-small", "messages": HI, "session_id": "by-body"}
    answer = web.post("/s/by-path/v1/chat/completions", body, {"x-session-id": "by-header"})
    assert answer.header("x-session-id") == "by-path"
    assert mock.calls[0].path == CHAT
    assert session_of(web, {"session_id": "by-body"}, {"x-session-id": "by-header"}) == "by-header"


@pytest.mark.parametrize("path", ["/s/bare/chat/completions", "/s/bare/v1/v1/chat/completions"])
def test_a_base_url_with_or_without_the_version_works(path: str, web: Web, mock: MockProvider) -> None:
    answer = web.post(path, {"model": "mock-small", "messages": HI})
    assert answer.header("x-session-id") == "bare"
    assert mock.calls[0].path == CHAT


@pytest.mark.parametrize("name", ["a b", "a/b", "é", "x" * 256, "", "a;b", "<script>", "a\tb"])
def test_a_session_id_with_invalid_characters_is_ignored(name: str, web: Web) -> None:
    assert session_of(web, {"session_id": "good"}, {"x-session-id": name}) == "good"


@pytest.mark.parametrize("name", ["a", "x" * 255, "A.b_c:d-9", "calls", "0"])
def test_a_session_id_of_allowed_characters_works_in_headers_and_paths(name: str, web: Web) -> None:
    assert session_of(web, None, {"x-session-id": name}) == name
    raw = f"GET /api/sessions/{name} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    assert talk(web.url, raw.encode()).json["id"] == name


def test_the_first_of_two_session_headers_counts(web: Web) -> None:
    body = json.dumps({"model": "mock-small", "messages": HI}).encode()
    answer = talk(web.url, chat_bytes(body, b"x-session-id: first", b"x-session-id: second"))
    assert answer.header("x-session-id") == "first"


# --- derived names ------------------------------------------------------------------------------------------------


def test_a_derived_session_id_is_stable_within_a_conversation_and_unique_to_it(web: Web) -> None:
    def derived(*messages: dict[str, object], **body: object) -> str:
        found = session_of(web, {"messages": list(messages), **body})
        assert found.startswith("auto-")
        return found

    system: dict[str, object] = {"role": "system", "content": "You are an agent with long instructions. " * 100}
    first: dict[str, object] = {"role": "user", "content": "find the bug"}
    more: list[dict[str, object]] = [
        {"role": "assistant", "content": "where?"},
        {"role": "user", "content": "in the parser"},
    ]
    one = derived(system, first)
    assert derived(system, first, *more) == one
    assert derived(system, first, *more, *more, stream=True, temperature=1) == one
    assert derived(system, {"role": "user", "content": [{"type": "text", "text": "find the bug"}]}) == one
    assert derived(system, first, model="mock-small-2024-08-06") == one
    others = [
        derived(system, {"role": "user", "content": "find the bugs"}),
        derived({"role": "system", "content": "x"}, first),
        derived(first),
        derived(system, first, model="mock-large"),
    ]
    assert len({one, *others}) == 5
    view = web.get(f"/api/sessions/{one}").json
    assert view["derived_id"] is True
    assert view["calls"] == 5


def test_a_derived_session_id_differs_between_keys(keyed: str) -> None:
    assert session_of(as_key(keyed, ALICE)) != session_of(as_key(keyed, BOB))


def test_a_session_id_can_be_required(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.on_missing": "require"})
    for stream in (True, False):
        answer = gateway.web.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (400, "session_required")
        assert "x-session-id" in answer.error["message"]
        assert answer.header("x-should-retry") == "false"
    assert mock.calls == []
    assert gateway.web.chat("named").status == 200
    assert gateway.web.get("/v1/models").status == 200


def test_calls_without_a_session_can_be_left_uncounted(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.on_missing": "none"})
    for stream in (False, True):
        answer = gateway.web.chat(stream=stream)
        assert answer.status == 200
        assert answer.header("x-session-id") is None
        assert answer.header("x-session-cumulative-total-tokens") is None
        assert answer.comments == {}
        assert stream or json.loads(answer.header("x-token-usage") or "")["totalTokens"] == mock.billed().total_tokens
    assert gateway.web.get("/api/sessions").json["sessions"] == []
    assert gateway.web.chat("named").totals[2] > 0


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-parent-session-id", "p"), ("x-session-budget-tokens", "1"), ("x-session-budget-usd", "0.5")],
)
def test_a_call_without_a_session_cannot_declare_a_budget_or_a_parent(
    header: str, value: str, mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    web = gateway_server(mock_server.url, **{"sessions.on_missing": "none"}).web
    answer = web.post(CHAT, {"model": "mock-small", "messages": HI}, {header: value})
    assert (answer.status, answer.error["code"]) == (400, "session_required")
    assert header in answer.error["message"]
    assert "x-session-id" in answer.error["message"]
    assert mock.calls == []


def test_configured_session_headers_take_precedence(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"sessions.id_headers": ["X-Trace", "x-session-id"]})
    assert session_of(gateway.web, None, {"x-session-id": "b", "x-trace": "a"}) == "a"


# --- isolation ----------------------------------------------------------------------------------------------------


def test_the_same_session_id_under_two_keys_is_two_sessions(keyed: str, mock: MockProvider) -> None:
    alice, bob = as_key(keyed, ALICE), as_key(keyed, BOB)
    assert alice.chat("shared", "tokens=100/1").totals == (100, 1, 101)
    assert bob.chat("shared", "tokens=5/1").totals == (5, 1, 6)
    assert alice.chat("shared", "tokens=100/1").totals == (200, 2, 202)
    assert alice.get("/api/sessions/shared").json["cumulative_token_usage"]["total_tokens"] == 202
    assert bob.get("/api/sessions/shared").json["cumulative_token_usage"]["total_tokens"] == 6
    admin = as_key(keyed, ADMIN)
    assert admin.get("/api/sessions/alice/shared").json["cumulative_token_usage"]["total_tokens"] == 202
    assert admin.get("/api/sessions/bob%2Fshared").json["cumulative_token_usage"]["total_tokens"] == 6


SPELLINGS = [
    "secret", "alice/secret", "alice%2Fsecret", "alice%252Fsecret", "bob/../alice/secret", "../alice/secret",
    "..%2Falice%2Fsecret", "./secret", "//alice/secret", "alice//secret", "ALICE/secret", "alice/SECRET", "SECRET",
    "alice:secret", "alice.secret", "default/secret", "/secret", "secret/", "alice/secret/", "secret%00",
    "alice%00secret", "*", "%25", "alice/%", "s_cret", "secret' OR '1'='1", "x' UNION SELECT * FROM sessions --",
]  # fmt: skip


@pytest.mark.parametrize("tail", ["", "/calls"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_cannot_read_the_session_of_another_key_by_any_spelling(spelling: str, tail: str, keyed: str) -> None:
    alice = as_key(keyed, ALICE)
    assert alice.chat("secret", "tokens=4242/1").status == 200
    path = f"/api/sessions/{spelling.replace(' ', '%20')}{tail}"
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {BOB}\r\n\r\n"
    answer = talk(keyed, request.encode())
    assert answer.status in (400, 404)
    assert b"4242" not in answer.body
    assert answer.error["code"] in ("not_found", "invalid_request")


def test_a_key_cannot_read_calls_lists_or_totals_of_another_key(keyed: str) -> None:
    alice, bob = as_key(keyed, ALICE), as_key(keyed, BOB)
    answer = alice.chat("mine", "tokens=4242/1")
    request_id = answer.header("x-gateway-request-id") or ""
    record = alice.get(f"/api/calls/{request_id}").json
    assert record["session"] == "mine"
    for wanted in (
        request_id,
        record["call_id"],
        request_id.upper(),
        f"alice/{request_id}",
        f"alice%2F{request_id}",
        "%25",
    ):
        assert bob.get(f"/api/calls/{wanted}").status == 404
    ids = {view["id"] for view in bob.get("/api/sessions?limit=1000").json["sessions"]}
    assert "mine" not in ids
    assert not any("alice" in name for name in ids)
    # A cursor of another key's list shows nothing either.
    for sort in ("recent", "tokens"):
        page = alice.get(f"/api/sessions?limit=1&sort={sort}").json
        if page["cursor"]:
            listed = bob.get(f"/api/sessions?limit=1000&sort={sort}&cursor={page['cursor']}")
            assert b"4242" not in listed.body
    refused = bob.post("/s/mine/v1/chat/completions", b"nonsense")
    assert refused.header("x-session-cumulative-total-tokens") == "0"


def test_the_same_request_id_under_two_keys_is_two_records(keyed: str) -> None:
    alice, bob = as_key(keyed, ALICE), as_key(keyed, BOB)
    for web, tokens in ((alice, "100/1"), (bob, "5/1")):
        web.post(CHAT, {"model": "mock-small", "messages": HI}, {"x-request-id": "r-1", "x-mock": f"tokens={tokens}"})
    assert alice.get("/api/calls/r-1").json["usage"]["input_tokens"] == 100
    assert bob.get("/api/calls/r-1").json["usage"]["input_tokens"] == 5


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong-key-0123456789"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": f"Bearer {ALICE.upper()}"},
        {"authorization": "Bearer "},
        {"x-api-key": ALICE[:-1]},
        {"authorization": "Bearer \xe9"},
        {"authorization": f"Bearer {ADMIN}"},
    ],
)
def test_a_call_needs_a_known_key(headers: dict[str, str], keyed: str, mock: MockProvider) -> None:
    answer = Web(keyed, headers).chat("s")
    assert (answer.status, answer.error["code"], answer.error["type"]) == (
        401,
        "invalid_api_key",
        "authentication_error",
    )
    assert answer.header("x-should-retry") == "false"
    assert answer.header("x-gateway-request-id")
    assert answer.header("x-session-cumulative-total-tokens") is None
    assert mock.calls == []
    assert Web(keyed, {} if "admin" in str(headers) else headers).get("/api/sessions").status == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer  {ALICE}"},
        {"x-api-key": ALICE},
        {"api-key": ALICE},
    ],
)
def test_a_client_key_is_accepted_in_each_sdk_header_and_never_forwarded(
    headers: dict[str, str], keyed: str, mock: MockProvider
) -> None:
    assert Web(keyed, headers).chat("s").status == 200
    assert ALICE not in str(mock.calls[0].headers)


def test_a_client_key_sent_in_two_headers_is_never_forwarded(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    """The provider uses the caller's own credential here. The client key must stay within the gateway."""
    gateway = gateway_server(
        mock_server.url,
        **{"auth.keys": [{"name": "alice", "key": ALICE}], "providers.upstream.auth": "bearer"},
    )
    web = Web(gateway.url, {"x-api-key": ALICE, "authorization": "Bearer callers-own-credential"})
    assert web.chat("s").status == 200
    assert mock.calls[0].header("authorization") == "Bearer callers-own-credential"
    assert ALICE not in str(mock.calls[0].headers)
    both = Web(gateway.url, {"x-api-key": ALICE, "authorization": f"Bearer {ALICE}"})
    assert both.chat("s").status == 200
    assert ALICE not in str(mock.calls[1].headers)


def test_a_configured_provider_key_replaces_the_credential_of_the_caller(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(
        mock_server.url, **{"providers.upstream.auth": "bearer", "providers.upstream.key": "provider-secret-1"}
    )
    web = Web(gateway.url, {"authorization": "Bearer callers", "x-api-key": "callers"})
    answer = web.chat("s", "status=401")
    assert mock.calls[0].header("authorization") == "Bearer provider-secret-1"
    assert mock.calls[0].header("x-api-key") is None
    assert "provider-secret-1" not in str(answer)
    for path in ("/api/sessions/s", "/api/sessions/s/calls", "/api/models", "/healthz", "/readyz"):
        assert b"provider-secret-1" not in web.get(path).body


def test_a_client_key_can_be_limited_to_models(keyed: str, mock: MockProvider) -> None:
    bob = as_key(keyed, BOB)
    assert bob.chat("s", model="mock-large").status == 200
    for model in ("gpt-5", "upstream/gpt-5", "Mock-large"):
        answer = bob.chat("s", model=model)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert len(mock.calls) == 1
    assert bob.get("/v1/models").status == 200, "many clients ask for the list first"
    assert bob.get("/v1/files").status == 404


def test_the_log_has_no_keys_and_no_texts(mock_server: MockServer, gateway_process: Any) -> None:
    flags = {
        "auth.keys": [{"name": "alice", "key": ALICE}],
        "telemetry.log": {"level": "info", "format": "json"},
        "providers.upstream.auth": "bearer",
        "providers.upstream.key": "provider-secret-1",
    }
    gateway = gateway_process(mock_server.url, **flags)
    web = as_key(gateway.url, ALICE)
    messages = [{"role": "user", "content": "the prompt text nobody should log"}]
    assert web.chat("s", messages=messages).status == 200
    assert web.stream("s", "die=2", messages=messages).status == 200
    assert Web(gateway.url, {"authorization": "Bearer wrong-key-0123456789"}).chat("s").status == 401
    assert web.chat("s", "status=500", messages=messages).status == 500
    gateway.stop()
    log = gateway.errors.read_text()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    outcomes = [line["outcome"] for line in lines if line["event"] == "call"]
    assert outcomes == ["ok", "upstream_broken", "refused", "provider_error"]
    assert all(secret not in log for secret in (ALICE, "provider-secret-1", "wrong-key", "the prompt text", "You said"))
