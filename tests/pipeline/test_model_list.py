"""GET /v1/models: the gateway's names first, then the provider's models unchanged; on real ports and with the SDKs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator

import anthropic
import openai
import pytest

from gateway.call.types import Caller, ClientResponse, Incoming
from gateway.core.routing import ModelRule, Routes
from gateway.dialects import endpoint
from gateway.mock import MockProvider, MockServer
from gateway.pipeline.model_list import ModelList
from tests.conftest import StartGateway, StartUpstream
from tests.support.gateways import GatewayThread
from tests.support.scripted import ByteServer, Connection
from tests.support.web import Web

#: an alias, a model under its own name, and a name that another provider uses, too
MODELS = [
    {"match": "fast", "provider": "upstream", "name": "mock-small"},
    {"match": "mock-large", "provider": "upstream"},
    {"match": "shared", "provider": "other", "name": "theirs"},
    {"match": "other-*", "provider": "other"},
]
ROWS = [
    {"id": "one", "object": "model", "created": 1.5, "owned_by": "them", "context_length": 8192, "x": [1, {"y": None}]},
    {"id": "shared", "object": "model", "created": 2, "owned_by": "them"},
    {"id": "other-two", "object": "model", "created": 3, "owned_by": "them"},
    {"id": "bare"},
    {"id": "one", "object": "again"},
]
LIST = json.dumps({"object": "list", "data": ROWS, "total": 5}).replace("1.5,", "1.50,").encode()
ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
KEYS = [{"name": "alice", "key": ALICE}, {"name": "bob", "key": BOB, "models": ["fast", "o*", "upstream/*"]}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def answering(body: bytes, *headers: bytes, status: bytes = b"200 OK") -> Callable[[Connection], None]:
    return lambda connection: connection.whole(body, *headers, status=status)


@pytest.fixture
def upstream(byte_server: StartUpstream) -> ByteServer:
    """Return a provider that responds to everything with LIST."""
    return byte_server(answering(LIST))


@pytest.fixture
def other(byte_server: StartUpstream) -> ByteServer:
    return byte_server(answering(b'{"id": "deep/model", "object": "model"}'))


@pytest.fixture
def start(upstream: ByteServer, other: ByteServer, gateway_server: StartGateway) -> Callable[..., GatewayThread]:
    """Return a function that starts a gateway with two providers, of which "upstream" is the default."""

    def run(**flags: object) -> GatewayThread:
        return gateway_server(upstream.url, **{"providers.other": {"base_url": other.url, "auth": "none"}, **flags})

    return run


@pytest.fixture
def named(start: Callable[..., GatewayThread]) -> GatewayThread:
    return start(models=MODELS)


def names(web: Web, path: str = "/v1/models", headers: dict[str, str] | None = None) -> list[str]:
    answer = web.send("GET", path, headers=headers)
    assert answer.status == 200, answer
    assert answer.header("content-type") == "application/json"
    return [row["id"] for row in answer.json["data"]]


# --- with the SDKs and the built-in provider -----------------------------------------------------------------------------------


@pytest.fixture
def served(gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider) -> GatewayThread:
    models = [{"match": "fast", "provider": "upstream", "name": "mock-small"}, *MODELS[1:2]]
    return gateway_server(mock_server.url, models=models)


@pytest.fixture
def gpt(served: GatewayThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/s/mine/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(served: GatewayThread) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as made:
        yield made


def test_the_openai_sdk_lists_and_retrieves_models_of_gateway_and_provider(
    gpt: openai.OpenAI, served: GatewayThread, mock: MockProvider
) -> None:
    assert [model.id for model in gpt.models.list()] == ["fast", "mock-large", "mock-small"]
    alias = gpt.models.retrieve("fast")
    assert (alias.id, alias.object, alias.created, alias.owned_by) == ("fast", "model", 0, "upstream")
    assert len(mock.calls) == 1, "an alias is described by the gateway"
    assert gpt.models.retrieve("mock-small").created > 0
    with pytest.raises(openai.NotFoundError):
        gpt.models.retrieve("missing")
    assert all(call.billed is None for call in mock.calls)
    assert served.web.get("/api/sessions/mine").status == 404, "a list is not metered"


def test_the_anthropic_sdk_lists_and_retrieves_models_of_gateway_and_provider(
    claude: anthropic.Anthropic, mock: MockProvider
) -> None:
    found = list(claude.models.list(limit=2))
    assert [(model.id, model.type) for model in found] == [
        (name, "model") for name in ("fast", "mock-large", "mock-small")
    ]
    assert found[0].display_name == "fast"
    assert found[0].created_at.year == 1970
    assert claude.models.retrieve("fast").lifecycle == "active"
    assert claude.models.retrieve("mock-small").type == "model"


# --- one list --------------------------------------------------------------------------------------------------------------------


def test_model_fields_of_the_provider_are_forwarded_unchanged(named: GatewayThread) -> None:
    answer = named.web.get("/v1/models")
    assert b"1.50," in answer.body
    listed = {row["id"]: row for row in answer.json["data"]}
    assert listed["one"] == ROWS[0]
    assert answer.json["total"] == 5


def test_each_name_is_listed_once_and_resolves_to_its_route(named: GatewayThread) -> None:
    ours = ["fast", "mock-large", "shared"]
    assert names(named.web) == [*ours, "one", "upstream/other-two", "bare"]
    shared = named.web.get("/v1/models").json["data"][2]
    assert shared == {"id": "shared", "object": "model", "created": 0, "owned_by": "other"}


def test_a_configured_model_that_the_provider_lists_has_the_provider_fields(
    start: Callable[..., GatewayThread],
) -> None:
    web = start(models=[{"match": "shared", "provider": "upstream", "price": {"input": 1, "output": 1}}]).web
    pricing = {"prompt": "0.000001", "completion": "0.000001"}
    row = web.get("/v1/models").json["data"][0]
    assert row.pop("pricing") == pricing
    assert row == ROWS[1]


def test_fields_required_by_the_format_are_added(named: GatewayThread) -> None:
    by_id = {row["id"]: row for row in named.web.get("/v1/models").json["data"]}
    assert by_id["bare"] == {"id": "bare", "object": "model", "created": 0, "owned_by": "upstream"}
    answer = named.web.send("GET", "/v1/models", headers=ANTHROPIC).json
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, "fast", "bare")
    assert {(row["type"], bool(row["display_name"])) for row in answer["data"]} == {("model", True)}


def test_a_bare_list_is_converted_to_the_format(upstream: ByteServer, start: Callable[..., GatewayThread]) -> None:
    upstream.script = answering(json.dumps(ROWS).encode())
    bare = {"id": "bare", "object": "model", "created": 0, "owned_by": "upstream"}
    assert start().web.get("/v1/models").json == {"object": "list", "data": [*ROWS[:3], bare]}


def test_configured_names_are_on_the_first_page_and_provider_cursors_are_kept(
    upstream: ByteServer, named: GatewayThread
) -> None:
    page = {"data": ROWS[:1], "has_more": True, "first_id": "one", "last_id": "one"}
    upstream.script = answering(json.dumps(page).encode())
    first = named.web.send("GET", "/v1/models?limit=1", headers=ANTHROPIC).json
    assert (first["has_more"], first["last_id"], len(first["data"])) == (True, "one", 4)
    assert names(named.web, "/v1/models?limit=1&after_id=one", ANTHROPIC) == ["one"]
    assert upstream.requests[-1].path == "/v1/models?limit=1&after_id=one"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/", "/s/mine/v1/models", "/v1/v1/models"])
def test_every_path_of_the_list_works(path: str, named: GatewayThread) -> None:
    assert names(named.web, path)[:3] == ["fast", "mock-large", "shared"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fast", "/v1/models/deep", "/v1/models/other/deep"])
def test_head_responds_like_get_without_the_body(path: str, named: GatewayThread) -> None:
    connection = named.web.connect()
    with contextlib.closing(connection):
        heads = []
        for method in ("GET", "HEAD", "GET"):
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read()
            assert bool(body) == (method == "GET")
            heads.append((answer.status, {n.lower() for n, _ in answer.getheaders()}, answer.headers["content-length"]))
    assert heads[0] == heads[1] == heads[2]
    assert heads[0][0] == 200


def test_provider_headers_are_kept_except_those_of_its_body(upstream: ByteServer, named: GatewayThread) -> None:
    upstream.script = answering(LIST, b'etag: "1"', b"openai-version: 2020", b"x-request-id: theirs")
    answer = named.web.get("/v1/models")
    assert (answer.header("etag"), answer.header("openai-version")) == (None, "2020")
    assert answer.header("x-request-id") == "theirs"
    framing = [name for name, _ in answer.headers if name in ("content-length", "content-type")]
    assert sorted(framing) == ["content-length", "content-type"]


# --- a provider that has no list to give ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        answering(b'{"error": {"message": "no key"}}', status=b"401 Unauthorized"),
        answering(b"oops", status=b"500 Internal Server Error"),
        answering(b"<html>", b"content-type: text/html"),
        answering(b'{"data": 1}'),
        answering(b'{"data": [1]}'),
        answering(b'{"data": [{"id": 1}]}'),
        answering(b'{"data": [{"name": "x"}]}'),
        answering(b"[" * 100_000),
        answering(b""),
        lambda connection: connection.reset(),
        lambda connection: connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + LIST[:20]),
    ],
)
def test_configured_models_are_listed_if_the_provider_has_no_list(
    script: Callable[[Connection], None], upstream: ByteServer, named: GatewayThread
) -> None:
    upstream.script = script
    answer = named.web.get("/v1/models")
    assert (answer.status, answer.clean) == (200, True)
    assert [row["id"] for row in answer.json["data"]] == ["fast", "mock-large", "shared"]
    assert answer.header("x-gateway-upstream-error") is None


def test_a_gateway_without_a_default_provider_lists_its_own(start: Callable[..., GatewayThread]) -> None:
    assert names(start(models=MODELS, default_provider=None).web) == ["fast", "mock-large", "shared"]


def test_without_configured_models_the_provider_response_is_forwarded(
    upstream: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    web = start().web
    assert web.get("/v1/models").json["total"] == 5
    for status, body in ((b"401 Unauthorized", b'{"error": 1}'), (b"200 OK", b"no list"), (b"200 OK", b"")):
        upstream.script = answering(body, status=status)
        answer = web.get("/v1/models")
        assert (answer.status, answer.body) == (int(status[:3]), body)
    upstream.script = lambda connection: connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + LIST[:20])
    assert not web.get("/v1/models").clean
    upstream.script = lambda connection: connection.reset()
    assert web.get("/v1/models").error["code"] == "upstream_unreachable"


def test_without_configured_models_a_list_of_any_length_is_forwarded(
    upstream: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    long = json.dumps({"data": [{"id": f"m{number}", "text": "x" * 1000} for number in range(5000)]}).encode()
    upstream.script = answering(long)
    answer = start().web.get("/v1/models")
    assert (answer.body == long, len(long) > 4 * 2**20) == (True, True)
    assert names(start(models=MODELS).web) == ["fast", "mock-large", "shared"]


# --- client keys ---------------------------------------------------------------------------------------------------------------


def test_a_client_key_sees_only_models_that_it_may_call(
    upstream: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    gateway = start(models=MODELS, **{"auth.keys": KEYS})
    alice, bob = (Web(gateway.url, {"authorization": f"Bearer {key}"}) for key in (ALICE, BOB))
    assert names(alice) == ["fast", "mock-large", "shared", "one", "upstream/other-two", "bare"]
    assert names(bob) == ["fast", "one", "upstream/other-two"]
    assert gateway.web.get("/v1/models").status == 401
    assert bob.get("/v1/models/one").status == 200
    asked = len(upstream.requests)
    for name in ("shared", "bare", "groq%2Fx", "%6fne"):
        answer = bob.get(f"/v1/models/{name}")
        assert answer.status in (400, 404), name
        assert answer.error["code"] in ("model_not_found", "invalid_request")
    assert len(upstream.requests) == asked


def test_an_unreadable_list_shows_nothing_to_a_limited_key(
    upstream: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    keys = [{"name": "bob", "key": BOB, "models": ["nothing"]}]
    bob = Web(start(**{"auth.keys": keys}).url, {"authorization": f"Bearer {BOB}"})
    assert names(bob) == []
    upstream.script = answering(b"no list")
    assert names(bob) == []
    upstream.script = answering(b"{}", status=b"403 Forbidden")
    assert bob.get("/v1/models").status == 403


# --- one model -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sent"),
    [("other/deep/model", "deep/model"), ("other%2Fdeep%2Fmodel", "deep%2Fmodel"), ("other%2fa:b?x=1", "a:b?x=1")],
)
def test_a_model_with_a_provider_prefix_is_requested_from_that_provider(
    asked: str, sent: str, other: ByteServer, named: GatewayThread
) -> None:
    assert named.web.get(f"/v1/models/{asked}").json["id"] == "deep/model"
    assert other.requests[0].path == f"/v1/models/{sent}"


@pytest.mark.parametrize(("name", "leads_to"), [("other/own-1", "other"), ("other%2Fhosted-1", "upstream")])
def test_a_model_matched_by_a_route_is_requested_from_the_provider_of_the_route(
    name: str, leads_to: str, upstream: ByteServer, other: ByteServer, start: Callable[..., GatewayThread]
) -> None:
    rows = [{"match": "other/own-*", "provider": "other"}, {"match": "other/hosted-*", "provider": "upstream"}]
    start(models=rows).web.get(f"/v1/models/{name}")
    assert [request.path for request in {"upstream": upstream, "other": other}[leads_to].requests] == [
        f"/v1/models/{name}"
    ]


@pytest.mark.parametrize("name", ["org%2Fmodel", "one", "nobody/one", "/other"])
def test_any_other_model_is_requested_from_the_default_provider(
    name: str, upstream: ByteServer, other: ByteServer, named: GatewayThread
) -> None:
    named.web.get(f"/v1/models/{name}")
    assert [request.path for request in upstream.requests] in ([f"/v1/models/{name}"], [])
    assert other.requests == []


def test_only_get_returns_the_combined_list(upstream: ByteServer, named: GatewayThread) -> None:
    upstream.script = answering(b"{}")
    assert named.web.send("DELETE", "/v1/models/fast").body == b"{}"
    assert named.web.get("/v1/modelsx").body == b"{}"


# --- time, with a call of our own ----------------------------------------------------------------------------------------------


def request(**changes: object) -> Incoming:
    target = endpoint("GET", "models")
    values: dict[str, object] = {
        "call_id": "c", "request_id": "c", "method": "GET", "path": "models", "query": "", "headers": [], "body": b"",
        "decompressed": False, "endpoint": target, "caller": Caller("local"), "path_session": None, "started": 0.0,
    }  # fmt: skip
    return Incoming(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("begins", [True, False])
async def test_a_slow_provider_is_not_waited_for(begins: bool) -> None:
    left = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield LIST[:20]
        await asyncio.sleep(60)

    @contextlib.asynccontextmanager
    async def call(incoming: Incoming) -> AsyncIterator[ClientResponse]:
        try:
            if not begins:
                await asyncio.sleep(60)
            yield ClientResponse(200, [], slow())
        finally:
            left.set()

    routes = Routes([ModelRule("fast", "p")], ["p"], "p")
    async with ModelList(routes, call, lambda _: {}, max_wait_s=0.05).handle(request()) as reply:
        assert left.is_set(), "the connection to the provider is closed"
        assert isinstance(reply.body, bytes)
        assert [row["id"] for row in json.loads(reply.body)["data"]] == ["fast"]
