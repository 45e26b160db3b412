"""/openapi.json is valid and complete, and describes the responses of a running gateway correctly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker
from openapi_spec_validator import validate
from starlette.routing import Route

from gateway import config
from gateway.app.worker import build_app
from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.modes import MODES
from gateway.mock import Behaviour, MockProvider, MockServer, ToolCall, Turn
from gateway.server.app import GatewayApp
from gateway.server.headers import directives
from gateway.server.openapi import document, error_classes
from tests.conftest import StartGateway
from tests.server.test_app import Lifespan
from tests.support.conversations import TOOLS, agent
from tests.support.gateways import GatewayThread, until, write_config
from tests.support.web import CHAT, HI, Reply, Web

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"
DOCUMENT = document()
METHODS = {"get", "post", "patch", "delete", "put"}
STEPS = [
    {"name": "work", "is_default": True, "available_tools": {"denied": ["publish"]}},
    {
        "name": "review",
        "conditions": [{"message_matches": "(?i)please review"}],
        "sequence": [["read_a", "read_b"], "comment"],
    },
]
BODY = {"model": "mock-small", "messages": agent(8), "tools": TOOLS}


def closed(node: Any) -> Any:
    """Return the schema without additional properties, so that fields missing in the document are found."""
    if isinstance(node, list):
        return [closed(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    inner = {name: closed(value) for name, value in node.items()}
    return {"additionalProperties": False, **inner} if isinstance(node.get("properties"), dict) else inner


CLOSED = closed(DOCUMENT)


def problems(schema: Mapping[str, Any], value: object, *, within: Mapping[str, Any] = CLOSED) -> list[str]:
    whole = {"components": within["components"], **closed(schema)}
    found = Draft202012Validator(whole, format_checker=FormatChecker()).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


def resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in node:
        *_, group, name = node["$ref"].split("/")
        node = DOCUMENT["components"][group][name]
    return node


def answer_of(method: str, template: str, status: int) -> Mapping[str, Any]:
    answers = DOCUMENT["paths"][template][method.lower()]["responses"]
    return resolved(answers.get(str(status)) or answers["default"])


def check(reply: Reply, method: str, template: str, status: int = 200) -> Any:
    """Check a response against the document and return its body."""
    assert reply.status == status, reply.body
    kind = (reply.header("content-type") or "").partition(";")[0]
    schema = answer_of(method, template, status)["content"][kind]["schema"]
    value = reply.json if kind == "application/json" else reply.body.decode()
    assert problems(schema, value) == []
    return value


# --- the document itself ------------------------------------------------------------------------------------------


def test_it_is_valid_openapi() -> None:
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1")


def test_every_reference_exists_and_every_component_is_used() -> None:
    text = json.dumps(DOCUMENT)
    named = set(re.findall(r'"#/components/(\w+/[\w-]+)"', text))
    known = {f"{group}/{name}" for group, inner in DOCUMENT["components"].items() for name in inner}
    assert named <= known
    assert {one for one in known - named if not one.startswith("securitySchemes/")} == set()


def test_operations_have_unique_names_and_summaries() -> None:
    operations = [one for path in DOCUMENT["paths"].values() for name, one in path.items() if name in METHODS]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names) > 20
    assert [one["operationId"] for one in operations if not one["summary"].endswith(".")] == []


def routes(app: GatewayApp) -> set[tuple[str, str]]:
    router = app._router
    assert router is not None
    return {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in router.routes
        if isinstance(route, Route)
        for method in (route.methods or ())
        if method != "HEAD"
    }


async def test_it_has_every_route_of_the_application_and_no_other(tmp_path: Path) -> None:
    file = write_config(tmp_path, "http://127.0.0.1:1", {})
    app = build_app(lambda: config.load(file, environment={}))
    lifespan = Lifespan(app)
    await lifespan.say("startup")
    served = routes(app)
    await lifespan.say("shutdown")
    described = {
        (path, method)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method in METHODS and not path.startswith("/v1/")
    }
    assert described == served


def test_it_lists_the_code_of_every_error() -> None:
    codes = DOCUMENT["components"]["schemas"]["Error"]["properties"]["error"]["properties"]["code"]["enum"]
    assert {kind.code for kind in error_classes()} == set(codes)
    assert {"budget_exhausted", "context_length_exceeded", "store_conflict", "internal_error"} <= set(codes)
    assert all(issubclass(kind, GatewayError) for kind in error_classes())


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/components/schemas/Usage"}, {"input_tokens": 1}),
        ({"$ref": "#/components/schemas/Deleted"}, {"id": "a", "deleted": True, "else": 1}),
        ({"$ref": "#/components/schemas/Reloaded"}, {"reloaded": False}),
        ({"$ref": "#/components/schemas/Change"}, {"colour": "red"}),
        ({"type": "string", "format": "date-time"}, "yesterday"),
    ],
)
def test_check_of_this_file_finds_errors(schema: Mapping[str, Any], value: object) -> None:
    assert len(problems(schema, value)) >= 1


# --- how it is served ---------------------------------------------------------------------------------------------


def test_document_needs_no_key_and_is_cached(guarded: GatewayThread) -> None:
    reply = Web(guarded.url).get("/openapi.json")
    assert check(reply, "get", "/openapi.json") == json.loads(json.dumps(DOCUMENT))
    assert len(reply.body) < 100_000
    again = Web(guarded.url).get("/openapi.json", {"if-none-match": reply.header("etag") or ""})
    assert (again.status, again.body) == (304, b"")


# --- whether it is true -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(mock_server: MockServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayThread]:
    """A gateway with keys, steps, a budget and prices, after some calls of two sessions."""
    mock_server.provider.reset()
    mock_server.provider.behaviour = Behaviour()
    flags = {
        "auth.admin_key": ADMIN,
        "auth.keys": [{"name": "alice", "key": ALICE}],
        "models": [
            {"match": match, "provider": "upstream", "price": {"input": 1, "output": 10}, "window": 8000}
            for match in ("mock-*", "gpt-4o")
        ],
        "budget": {"tokens": 1_000_000, "window": "1d"},
        "steps": STEPS,
    }
    gateway = GatewayThread(tmp_path_factory.mktemp("openapi"), mock_server.url, flags)
    alice = client(gateway, ALICE)
    mock_server.provider.push(Turn(tool_calls=(ToolCall("search_orders", "{}"),)))
    assert alice.post(CHAT, BODY, {"x-session-id": "one", "x-context-budget": "700"}).status == 200
    assert alice.chat("two").status == 200
    assert alice.chat("two", "status=500").status == 500
    yield gateway
    gateway.stop()


def client(gateway: GatewayThread, key: str) -> Web:
    return Web(gateway.url, {"authorization": f"Bearer {key}"})


@pytest.fixture
def alice(guarded: GatewayThread) -> Web:
    return client(guarded, ALICE)


@pytest.fixture
def admin(guarded: GatewayThread) -> Web:
    return client(guarded, ADMIN)


def test_sessions_are_as_described(alice: Web, admin: Web) -> None:
    page = check(alice.get("/api/sessions?limit=1"), "get", "/api/sessions")
    assert len(page["sessions"]) == 1
    assert page["cursor"]
    one = check(alice.get("/api/sessions/one"), "get", "/api/sessions/{id}")
    assert one["tools"]
    assert one["steps"]
    assert one["budget"]["resets_in_s"]
    everything = check(admin.get("/api/sessions?sort=cost&q=o"), "get", "/api/sessions")
    assert {row["id"] for row in everything["sessions"]} >= {"alice/one", "alice/two"}


def test_calls_are_as_described(alice: Web) -> None:
    newest = check(alice.get("/api/calls"), "get", "/api/calls")["calls"]
    assert {call["outcome"] for call in newest} >= {"ok", "provider_error"}
    calls = check(alice.get("/api/sessions/one/calls"), "get", "/api/sessions/{id}/calls")["calls"]
    explained = alice.get(f"/api/calls/{calls[0]['call_id']}?explain=1")
    assert check(explained, "get", "/api/calls/{request_id}")["context"]["items"]


def test_changes_are_as_described(admin: Web) -> None:
    def change(session: str, asked: dict[str, Any]) -> Any:
        schema = DOCUMENT["paths"]["/api/sessions/{id}"]["patch"]["requestBody"]["content"]["application/json"]
        assert problems(schema["schema"], asked) == []
        return check(admin.send("PATCH", f"/api/sessions/{session}", asked), "patch", "/api/sessions/{id}")

    assert change("alice/one", {"budget": {"tokens": 5_000, "usd": "1.5", "calls": None}})["budget"]["usd"]
    assert change("alice/one", {"active_step": "review"})["steps"]["default"]["due"] == ["read_a", "read_b"]
    assert "calls" not in change("alice/nobody", {"budget": {"tokens": 5_000}})
    change("alice/one", {"budget": "default"})
    assert "steps" in check(admin.post("/api/sessions/alice/two/reset"), "post", "/api/sessions/{id}/reset")
    check(admin.send("DELETE", "/api/sessions/alice/two"), "delete", "/api/sessions/{id}")
    check(admin.post("/api/reload"), "post", "/api/reload")


def test_client_keys_are_as_described(admin: Web, alice: Web) -> None:
    asked = {"name": "bob", "models": ["mock-*"], "budget": {"usd": "1.5", "window": "1d"}, "expires": "30d"}
    made = check(admin.post("/api/keys", asked), "post", "/api/keys", 201)
    assert made["key"].startswith("gw-")
    changed = admin.send("PATCH", "/api/keys/bob", {"budget": {"tokens": 9}, "rpm": None})
    assert check(changed, "patch", "/api/keys/{name}")["budget"]["usd"] == "1.500000"
    rotated = check(admin.post("/api/keys/bob/rotate", {"overlap": "1h"}), "post", "/api/keys/{name}/rotate")
    assert len(rotated["replaced_until"]) == 1
    assert len(check(admin.get("/api/keys"), "get", "/api/keys")["keys"]) == 2
    assert check(alice.get("/api/keys"), "get", "/api/keys")["keys"][0]["in_configuration"]
    check(admin.send("DELETE", "/api/keys/bob"), "delete", "/api/keys/{name}")
    check(admin.send("DELETE", "/api/keys/bob"), "delete", "/api/keys/{name}", 404)
    check(alice.post("/api/keys", asked), "post", "/api/keys", 403)


def test_counts_are_as_described(alice: Web) -> None:
    assert check(alice.post("/api/count?items=1&tools=1", BODY), "post", "/api/count")["items"]
    assert check(alice.post("/api/context?items=1&tools=1", BODY), "post", "/api/context")["tools"]
    check(alice.post("/api/count", BODY), "post", "/api/count")
    check(alice.post("/api/context", BODY), "post", "/api/context")
    trimmed = alice.post("/api/trim?explain=1", BODY, {"x-context-budget": "700"})
    # The document does not describe the body, which has the format of a provider.
    assert problems({"type": "object"}, trimmed.json["body"]) == []
    assert check(trimmed, "post", "/api/trim")["context"]["items"]


def test_models_health_and_metrics_are_as_described(alice: Web, admin: Web) -> None:
    assert check(admin.get("/api/models?limit=3"), "get", "/api/models")["models"]
    assert check(admin.get("/api/health"), "get", "/api/health")["providers"]
    check(admin.get("/metrics"), "get", "/metrics")
    check(admin.get("/healthz"), "get", "/healthz")
    check(admin.get("/readyz"), "get", "/readyz")
    check(admin.get("/ui"), "get", "/ui")
    check(alice.get("/v1/models"), "get", "/v1/models")
    check(alice.get("/v1/models/gpt-4o"), "get", "/v1/models/{model}")


def test_stored_result_is_text(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> None:
    web = gateway_server(mock_server.url).web
    body = {"model": "mock-small", "messages": agent(2), "tools": TOOLS}
    shown = web.post(CHAT, body, {"x-session-id": "kept", "x-response-mode": "handle_only"})
    assert shown.status == 200
    handle = re.search(r"/api/results/([\w-]+)", str(mock.calls[-1].body))
    assert handle is not None
    check(web.get(f"/api/results/{handle[1]}"), "get", "/api/results/{handle}")


def test_events_are_as_described(guarded: GatewayThread, alice: Web, admin: Web) -> None:
    events = DOCUMENT["paths"]["/api/events"]["get"]["x-event-data"]
    assert set(events) == {"call", "missed"}
    with admin.open("GET", "/api/events") as stream:
        stream.readline()
        alice.chat("heard")
        line = until(lambda: next((one for one in iter(stream.readline, b"") if one.startswith(b"data: ")), None))
    assert problems(events["call"], json.loads(line.removeprefix(b"data: "))) == []


@pytest.mark.parametrize(
    ("ask", "method", "template", "status"),
    [
        (lambda web: web.get("/api/sessions/never"), "get", "/api/sessions/{id}", 404),
        (lambda web: web.get("/api/sessions?limit=0"), "get", "/api/sessions", 400),
        (lambda web: web.post("/api/reload"), "post", "/api/reload", 403),
        (lambda web: web.post("/api/count", {"model": "mock-small"}), "post", "/api/count", 400),
        (lambda web: web.send("PUT", "/api/sessions"), "get", "/api/sessions", 405),
        (lambda web: Web(web.url).get("/api/sessions"), "get", "/api/sessions", 401),
    ],
)
def test_errors_are_as_described(
    ask: Callable[[Web], Reply], method: str, template: str, status: int, alice: Web
) -> None:
    assert check(ask(alice), method, template, status)["error"]["code"]


PROXIED = [
    ("/v1/chat/completions", {"model": "mock-small", "messages": HI}),
    ("/v1/responses", {"model": "mock-small", "input": "hi"}),
    ("/v1/messages", {"model": "mock-small", "max_tokens": 9, "messages": HI}),
    ("/v1/completions", {"model": "mock-small", "prompt": "hi"}),
    ("/v1/embeddings", {"model": "mock-small", "input": "hi"}),
]


def test_every_supported_format_has_a_path() -> None:
    described = {path for path, item in DOCUMENT["paths"].items() if path.startswith("/v1/") and "post" in item}
    assert {path for path, _ in PROXIED} == described


@pytest.mark.parametrize(("path", "body"), PROXIED)
def test_headers_of_a_metered_response_are_as_described(path: str, body: dict[str, Any], alice: Web) -> None:
    known = answer_of("post", path, 200)["headers"]
    for prefix in ("", "/s/by-path"):
        reply = alice.post(f"{prefix}{path}", body)
        assert reply.status == 200
        ours = {name: value for name, value in reply.headers if name.startswith(("x-session", "x-context", "x-token"))}
        assert set(ours) <= set(known)
        assert "x-session-cumulative-token-usage" in ours
        for name, value in ours.items():
            described = resolved(known[name])
            if "content" in described:
                assert problems(described["content"]["application/json"]["schema"], json.loads(value)) == []
            else:
                shown = int(value) if described["schema"]["type"] == "integer" else value
                assert problems(described["schema"], shown) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("x-context-budget", value) for value in ("1", "999999999999999", "0", "-1", "1.5", "1e3", "", "9" * 16)),
        *(("x-session-budget-tokens", value) for value in ("0", "5", "-1", "0.5", "", "all", "9" * 16)),
        *(("x-session-budget-usd", value) for value in ("0", "0.50", "1234567.0", "12345678", ".5", "1.", "-1", "1e1")),
        *(("x-context-trim", value) for value in ("off", "auto", "shadow", "", "on")),
        *(("x-response-mode", value) for value in (*MODES, "", "short")),
        *((name, value) for name in ("x-parent-session-id", "x-session-agent") for value in ("a", "..", "a b", "")),
    ],
)
def test_allowed_values_of_headers_are_described(name: str, value: str) -> None:
    schema = DOCUMENT["components"]["parameters"][name]["schema"]
    is_number = schema["type"] == "integer" and re.fullmatch(r"-?\d+", value)
    is_described = problems(schema, int(value) if is_number else value) == []
    try:
        directives([(name.encode(), value.encode())])
    except InvalidRequest:
        assert not is_described
    else:
        assert is_described


@pytest.mark.parametrize(("path", "body"), PROXIED)
def test_schema_of_a_body_without_a_model_matches_the_response(path: str, body: dict[str, Any], alice: Web) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert Draft202012Validator(schema).is_valid(body)
    nameless = {**body, "model": ""}
    assert Draft202012Validator(schema).is_valid(nameless) == (alice.post(path, nameless).status == 200)


def test_error_of_a_refused_call_is_as_described(alice: Web) -> None:
    reply = alice.post(CHAT, {"model": "mock-small", "messages": HI}, {"x-context-budget": "none"})
    assert reply.status == 400
    assert problems({"$ref": "#/components/schemas/Error"}, reply.json) == []
    assert set(DOCUMENT["components"]["responses"]["Error"]["headers"]) <= {name for name, _ in reply.headers}
