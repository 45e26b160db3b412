"""Bearer tokens of an identity provider on a real port: who gets in, and every way in that has to stay closed."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import anthropic
import jwt
import openai
import pytest
from playwright.sync_api import Browser, expect
from websockets.exceptions import InvalidStatus

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway, StartProcess
from tests.e2e.test_reload import edit, reload
from tests.server.test_sockets import answer, ask, opened
from tests.support import browsers
from tests.support import identity_provider as idp
from tests.support.gateways import GatewayProcess, GatewayThread, until
from tests.support.identity_provider import IdentityProvider, bearer, rsa_key, token
from tests.support.receiver import Receiver, serving
from tests.support.timing import LIMIT_S, in_time
from tests.support.web import CHAT, HI, Reply

pytestmark = pytest.mark.long

CLIENT_KEY, ADMIN = "ci-key-0123456789abc", "admin-key-0123456789"
AUDIENCE = idp.AUDIENCE
BODY = {"model": "mock-small", "messages": HI}
GROUPS = {
    "research": {"models": ["mock-small"], "budget": {"tokens": 100}},
    "ops": {"admin": True},
    "*": {"budget": {"calls": 1}},
}


@pytest.fixture(scope="module")
def shared_provider() -> Iterator[IdentityProvider]:
    with idp.serving_keys(IdentityProvider()) as made:
        yield made


@pytest.fixture(scope="module")
def shared(
    mock_server: MockServer, shared_provider: IdentityProvider, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayThread]:
    flags = {
        **shared_provider.settings(),
        "auth.keys": [{"name": "ci", "key": CLIENT_KEY}],
        "auth.admin_key": ADMIN,
        "server.max_header_kb": 256,
    }
    gateway = GatewayThread(tmp_path_factory.mktemp("tokens"), mock_server.url, flags)
    yield gateway
    gateway.stop()


@pytest.fixture
def gateway(shared: GatewayThread, mock: MockProvider) -> GatewayThread:
    """Return a gateway that accepts tokens, one client key and an admin key. Tests share it."""
    return shared


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    """Return an identity provider for one test."""
    with idp.serving_keys(IdentityProvider()) as made:
        yield made


def call(gateway: GatewayThread | GatewayProcess, headers: dict[str, str], **fields: object) -> Reply:
    return gateway.web.post(CHAT, {**BODY, **fields}, headers)


# --- accepted -----------------------------------------------------------------------------------------------------


def test_the_sdks_send_a_token_as_their_key(gateway: GatewayThread, mock: MockProvider, session: str) -> None:
    value = token("sdk")
    with openai.OpenAI(base_url=gateway.base_url, api_key=value, max_retries=0) as client:
        headers = {"x-session-id": session}
        client.chat.completions.create(
            model="mock-small", messages=[{"role": "user", "content": "hi"}], extra_headers=headers
        )
        streamed = client.chat.completions.create(
            model="mock-small", messages=[{"role": "user", "content": "hi"}], stream=True, extra_headers=headers
        )
        assert [*streamed]
        client.responses.create(model="mock-small", input="hi", extra_headers=headers)
    for way in ({"api_key": value}, {"auth_token": value}):  # x-api-key, authorization
        with anthropic.Anthropic(base_url=gateway.url, max_retries=0, **way) as claude:  # type: ignore[arg-type]
            claude.messages.create(
                model="mock-small", max_tokens=9, messages=[{"role": "user", "content": "hi"}], extra_headers=headers
            )
    found = gateway.web.get(f"/api/sessions/jwt:sdk%2F{session}", bearer(ADMIN)).json
    assert found["calls"] == 5
    assert not [pair for one in mock.calls for pair in one.headers if value in pair[1]]


def test_a_caller_sees_its_own_sessions_only(gateway: GatewayThread, session: str) -> None:
    alice, bob = bearer(token("own-alice")), bearer(token("own-bob"))
    assert call(gateway, {**alice, "x-session-id": session}).status == 200
    assert [one["id"] for one in gateway.web.get("/api/sessions", alice).json["sessions"]] == [session]
    assert gateway.web.get("/api/sessions", bob).json["sessions"] == []
    assert gateway.web.get(f"/api/sessions/{session}", bob).status == 404
    assert gateway.web.post("/api/reload", None, alice).status == 403


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
def test_a_token_is_not_forwarded_to_a_provider_without_a_key(
    header: str, mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    providers = {"upstream": {"base_url": mock_server.url, "auth": "bearer", "retries": 0}}
    gateway = gateway_server(mock_server.url, providers=providers, **provider.settings())
    value = token()
    other = "x-api-key" if header == "authorization" else "authorization"
    assert call(gateway, {header: value, other: "sk-of-the-provider"}).status == 200
    sent = dict(mock.calls[-1].headers)
    assert header not in sent
    assert sent[other] == "sk-of-the-provider"
    assert value not in str(sent)


def test_client_keys_still_work_and_foreign_tokens_next_to_them_reach_the_provider(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    # Codex sends a token of ChatGPT, which the provider has to get.
    providers = {"upstream": {"base_url": mock_server.url, "auth": "bearer", "retries": 0}}
    keys = [{"name": "ci", "key": CLIENT_KEY}]
    gateway = gateway_server(mock_server.url, providers=providers, **{**provider.settings(), "auth.keys": keys})
    foreign = token(iss="https://auth.openai.example")
    assert call(gateway, {"x-api-key": CLIENT_KEY, **bearer(foreign)}).status == 200
    assert dict(mock.calls[-1].headers)["authorization"] == f"Bearer {foreign}"
    assert call(gateway, bearer(foreign)).status == 401


def test_other_algorithms_and_keys_without_an_id_are_accepted(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    provider.keys = [idp.jwk(idp.ec_key("p256")), idp.jwk(idp.ec_key("p384"), kid="p384", use="sig")]
    gateway = gateway_server(mock_server.url, **provider.settings(algorithms=["ES256", "ES384"]))
    for kid, name, alg, status in [
        (None, "p256", "ES256", 200),
        (None, "p384", "ES384", 200),
        ("p384", "p384", "ES384", 200),
        ("p384", "p384", "ES256", 401),
        ("any", "p256", "ES256", 200),
        ("any", "p384", "ES384", 401),
    ]:
        parts = [
            idp.encoded({"alg": alg, **({"kid": kid} if kid else {})}),
            idp.encoded(idp.claims_of(f"{kid}{name}{alg}")),
        ]
        key = idp.ec_key(name)
        method = jwt.algorithms.ECAlgorithm(
            jwt.algorithms.ECAlgorithm.SHA256 if alg == "ES256" else jwt.algorithms.ECAlgorithm.SHA384
        )
        value = ".".join([*parts, idp.encoded(method.sign(".".join(parts).encode(), key))])
        assert call(gateway, bearer(value)).status == status, (kid, name, alg)


def test_each_call_over_a_websocket_needs_a_valid_token(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **provider.settings(leeway_s=0))
    with pytest.raises(InvalidStatus), opened(gateway, "s", **bearer(token(exp=NOW - 3600))):
        pass
    with opened(gateway, "s", **bearer(token(exp=int(time.time()) + 3))) as socket:
        ask(socket)
        assert answer(socket)[-1]["type"] == "response.completed"

        def is_refused() -> bool:
            ask(socket)
            last = answer(socket)[-1]
            return bool(last["type"] == "error" and last["error"]["code"] == "invalid_api_key")

        until(is_refused, what="the token has expired")


def test_the_dashboard_accepts_a_token(
    browser: Browser, mock_server: MockServer, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    settings = provider.settings(claims={"group": "groups"}, groups={"ops": {"admin": True}, "*": {}})
    gateway = gateway_server(mock_server.url, **{**settings, "auth.admin_key": ADMIN})
    assert call(gateway, {**bearer(token("ada@example.com")), "x-session-id": "mine"}).status == 200
    with browsers.opened(browser) as watched:
        watched.allowed = ("401", "403")
        page = watched.page
        page.goto(f"{gateway.url}/ui#/sessions")
        dialog = page.get_by_role("dialog", name="A key is needed")
        dialog.get_by_label("Key").fill(token(exp=NOW - 3600))
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("The token has expired")
        dialog.get_by_label("Key").fill(token("ada@example.com"))
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name="mine", exact=True)).to_be_visible()
        page.get_by_role("button", name="Forget key").click()
        dialog.get_by_label("Key").fill(token("olga", groups=["ops"]))
        page.keyboard.press("Enter")
        page.goto(f"{gateway.url}/ui#/sessions")
        expect(page.get_by_role("link", name="jwt:ada:40example.com/mine")).to_be_visible()
        page.get_by_role("link", name="Health").click()
        expect(page.get_by_role("heading", name="Identity provider")).to_be_visible()
        expect(page.get_by_text(idp.ISSUER)).to_be_visible()
        provider.respond = RESPONSES["an error"]
        until(lambda: call(gateway, bearer(token(kid="new"))).status == 503)
        expect(page.get_by_role("alert").filter(has_text="the response has status 500")).to_be_visible()


# --- groups -------------------------------------------------------------------------------------------------------


@pytest.fixture
def grouped(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> GatewayThread:
    settings = provider.settings(claims={"name": "email", "group": "realm.roles"}, groups=GROUPS)
    return gateway_server(mock_server.url, **settings)


def member(email: str, *groups: str) -> dict[str, str]:
    return bearer(token("id-1", email=email, realm={"roles": list(groups)}))


def test_a_group_gives_each_of_its_callers_models_and_a_budget(grouped: GatewayThread) -> None:
    alice, bob = member("alice@example.com", "staff", "research"), member("bob", "research")
    assert call(grouped, {**alice, "x-mock": "tokens=60/30", "x-session-id": "s"}, max_tokens=30).status == 200
    refused = call(grouped, {**alice, "x-mock": "tokens=60/30"}, max_tokens=30)
    assert refused.error["code"] == "budget_exhausted"
    assert "jwt:alice:40example.com" in refused.error["message"]
    assert call(grouped, {**bob, "x-mock": "tokens=60/30"}, max_tokens=30).status == 200
    assert call(grouped, bob, model="mock-large").status == 404
    other = member("carol", "staff")
    assert call(grouped, other).status == 200
    assert call(grouped, other).error["code"] == "budget_exhausted"


def test_callers_share_the_budget_of_the_group_of_keys_with_their_name_and_that_of_all_keys(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    settings = provider.settings(claims={"group": "groups"}, groups={"research": {}, "*": {}})
    shared = {
        "auth.groups": {"research": {"budget": {"calls": 2}}},
        "auth.budget": {"calls": 3},
        "auth.keys": [{"name": "ci", "key": CLIENT_KEY, "group": "research"}],
    }
    gateway = gateway_server(mock_server.url, **{**settings, **shared})
    assert call(gateway, {"x-api-key": CLIENT_KEY}).status == 200
    assert call(gateway, bearer(token("ann", groups=["research"]))).status == 200
    refused = call(gateway, bearer(token("ben", groups=["research"])))
    assert refused.error["code"] == "budget_exhausted"
    assert "research" in refused.error["message"]
    assert call(gateway, bearer(token("carol"))).status == 200
    assert call(gateway, bearer(token("dora"))).error["code"] == "budget_exhausted"
    used = gateway.web.get("/api/usage?group_by=group").json["usage"]
    assert {row["group"]: row["charged_calls"] for row in used}["research"] == 2


def test_the_budget_of_all_keys_holds_for_tokens_without_groups(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{**provider.settings(), "auth.budget": {"calls": 1}})
    assert call(gateway, bearer(token("ann"))).status == 200
    assert call(gateway, bearer(token("ben"))).error["code"] == "budget_exhausted"


def test_the_budget_of_a_caller_is_announced(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    settings = provider.settings(claims={"group": "groups"}, groups={"*": {"budget": {"calls": 2}}})
    with serving(Receiver()) as receiver:
        hooks = [{"url": receiver.url, "events": ["on_budget"]}]
        gateway = gateway_server(mock_server.url, **{**settings, "callbacks.webhooks": hooks})
        assert call(gateway, bearer(token())).status == 200
        until(lambda: receiver.requests)
    data = json.loads(receiver.requests[0].body)["data"]
    assert (data["name"], data["threshold"]) == ("jwt:alice", 50)


def test_a_group_can_have_the_rights_of_the_admin_key(grouped: GatewayThread) -> None:
    olga, carol = member("olga", "ops"), member("carol", "*")
    assert call(grouped, {**carol, "x-session-id": "s"}).status == 200
    assert [one["id"] for one in grouped.web.get("/api/sessions", olga).json["sessions"]] == ["jwt:carol/s"]
    assert grouped.web.send("PATCH", "/api/sessions/jwt:carol%2Fs", {"budget": {"tokens": 5}}, olga).status == 200
    assert grouped.web.post("/api/reload", None, olga).status == 200
    assert grouped.web.get("/metrics", olga).status == 200
    assert grouped.web.post("/api/reload", None, carol).status == 403
    assert grouped.web.get("/metrics", carol).status == 403


def test_the_audit_log_names_the_token_of_an_administrator(grouped: GatewayThread) -> None:
    olga, carol = member("olga", "ops"), member("carol", "*")
    body = {"budget": {"tokens": 5}}
    assert grouped.web.send("PATCH", "/api/sessions/jwt:carol%2Faudited", body, olga).status == 200
    reply = grouped.web.get("/api/audit?target=audited", olga)
    [entry] = reply.json["changes"]
    assert (entry["actor"], entry["target"]) == ("token of jwt:olga", "jwt:carol/audited")
    assert olga["authorization"].split()[1] not in reply.body.decode()
    assert grouped.web.get("/api/audit", carol).status == 403


def test_a_caller_of_no_group_is_refused(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    settings = provider.settings(claims={"group": "groups"}, groups={"research": {}})
    gateway = gateway_server(mock_server.url, **settings)
    assert call(gateway, bearer(token(groups="research"))).status == 200
    for groups in (None, "Research", ["other"], {"research": True}, "research other", [["research"]]):
        refused = call(gateway, bearer(token(groups=groups)))
        assert (refused.status, refused.error["code"]) == (403, "forbidden"), groups
        assert gateway.web.get("/api/sessions", bearer(token(groups=groups))).status == 403


# --- attacks ------------------------------------------------------------------------------------------------------


def signed_by_secret(secret: bytes, alg: str = "HS256", kid: str = "one") -> str:
    """Return a token whose signature uses the public key as a shared secret."""
    text = f"{idp.encoded({'alg': alg, 'kid': kid})}.{idp.encoded(idp.claims_of())}"
    return f"{text}.{idp.encoded(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def unsigned(alg: str, signature: str = "") -> str:
    return f"{idp.encoded({'alg': alg, 'kid': 'one'})}.{idp.encoded(idp.claims_of())}.{signature}"


def with_head(**head: object) -> str:
    return jwt.encode(idp.claims_of(), rsa_key("other"), "RS256", headers={"kid": "one", **head})


def changed_claims() -> str:
    head, _, signature = token().split(".")
    return f"{head}.{idp.encoded(idp.claims_of('admin'))}.{signature}"


def nested() -> str:
    head = b'{"a":' + b"[" * 10_000
    return f"{idp.encoded(head)}.{idp.encoded(idp.claims_of())}.AAAA"


NOW = int(time.time())
ATTACKS: dict[str, Callable[[], str]] = {
    "another audience": lambda: token(aud="another-service"),
    "several audiences, none ours": lambda: token(aud=["a", "b"]),
    "audience as an object": lambda: token(aud={AUDIENCE: True}),
    "no audience": lambda: token(aud=None),
    "another issuer": lambda: token(iss="https://login.example.evil/"),
    "issuer without the slash": lambda: token(iss=idp.ISSUER.rstrip("/")),
    "issuer as a list": lambda: raw_claims(iss=[idp.ISSUER]),
    "no issuer": lambda: token(iss=None),
    "alg none": lambda: unsigned("none"),
    "alg None": lambda: unsigned("None"),
    "alg nOnE with a signature": lambda: unsigned("nOnE", "AAAA"),
    "alg empty": lambda: unsigned(""),
    "public key as the HS256 secret, PEM": lambda: signed_by_secret(idp.pem(rsa_key("one"))),
    "public key as the HS256 secret, PEM without the last line break": lambda: signed_by_secret(
        idp.pem(rsa_key("one")).strip()
    ),
    "public key as the HS256 secret, modulus": lambda: signed_by_secret(idp.jwk(rsa_key("one"))["n"].encode()),
    "HS256 with an empty secret": lambda: signed_by_secret(b""),
    "HS256 signature under the head RS256": lambda: signed_by_secret(idp.pem(rsa_key("one")), "RS256"),
    "PS256, which is not listed": lambda: token(alg="PS256"),
    "RS512, which is not listed": lambda: token(alg="RS512"),
    "ES256 with the id of an RSA key": lambda: token(key=idp.ec_key("p256"), alg="ES256"),
    "expired": lambda: token(exp=NOW - 3600),
    "expired, with exp as a text": lambda: token(exp=str(NOW - 3600)),
    "no expiry": lambda: token(exp=None),
    "expiry as an object": lambda: raw_claims(exp={}),
    "expiry infinite": lambda: raw_text(b'{"iss":"%b","aud":"%b","sub":"a","exp":Infinity}'),
    "not yet valid": lambda: token(nbf=NOW + 3600),
    "issued in the future": lambda: token(iat=NOW + 3600),
    "unknown key id": lambda: token(kid="nobody"),
    "unknown key id that looks like a file": lambda: token(kid="../../../../dev/null"),
    "key id as a number": lambda: raw_head({"alg": "RS256", "kid": 1}),
    "another key with a known id": lambda: token(key=rsa_key("other")),
    "key in the head": lambda: with_head(jwk=idp.jwk(rsa_key("other"))),
    "address of keys in the head": lambda: with_head(jku="http://127.0.0.1:1/keys", x5u="http://127.0.0.1:1/keys"),
    "unknown critical extension": lambda: jwt.encode(
        idp.claims_of(), rsa_key("one"), "RS256", headers={"kid": "one", "crit": ["x"], "x": 1}
    ),
    "unencoded payload": lambda: jwt.encode(
        idp.claims_of(), rsa_key("one"), "RS256", headers={"kid": "one", "b64": False}
    ),
    "changed claims": changed_claims,
    "signature removed": lambda: token().rpartition(".")[0] + ".",
    "signature with another letter": lambda: token()[:-9] + ("A" if token()[-9] != "A" else "B") + token()[-8:],
    "encrypted (five parts)": lambda: ".".join(
        [idp.encoded({"alg": "RSA-OAEP", "enc": "A256GCM"}), "a", "b", "c", "d"]
    ),
    "claims that are no object": lambda: raw_text(b'["%b","%b"]'),
    "deeply nested head": nested,
    "only the beginning": lambda: "eyJ",
    "no name": lambda: token(sub=None),
    "empty name": lambda: token(""),
    "name that is too long": lambda: token("a" * 252),
    "100 KB": lambda: token(filler="x" * 75_000),
}


def raw_head(head: dict[str, Any]) -> str:
    text = f"{idp.encoded(head)}.{idp.encoded(idp.claims_of())}"
    return f"{text}.{idp.encoded(_signed(text))}"


def raw_claims(**changes: object) -> str:
    text = f"{idp.encoded({'alg': 'RS256', 'kid': 'one'})}.{idp.encoded({**idp.claims_of(), **changes})}"
    return f"{text}.{idp.encoded(_signed(text))}"


def raw_text(claims: bytes) -> str:
    names = (idp.ISSUER.encode(), AUDIENCE.encode())
    text = f"{idp.encoded({'alg': 'RS256', 'kid': 'one'})}.{idp.encoded(claims % names)}"
    return f"{text}.{idp.encoded(_signed(text))}"


def _signed(text: str) -> bytes:
    method = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256)
    return method.sign(text.encode(), rsa_key("one"))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda name: name.replace(" ", "-"))
def test_an_invalid_token_is_refused_in_each_header_and_never_forwarded(
    attack: str, gateway: GatewayThread, mock: MockProvider
) -> None:
    value = ATTACKS[attack]()
    for headers in (bearer(value), {"x-api-key": value}, {"api-key": value}, {"authorization": value}):
        refused = call(gateway, headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), refused.body
        assert value[:40] not in refused.body.decode() or attack == "only the beginning"
        assert gateway.web.get("/api/sessions", headers).status == 401
    assert mock.calls == []
    claude = gateway.web.post(
        "/v1/messages", {**BODY, "max_tokens": 5}, {"x-api-key": value, "anthropic-version": "2023-06-01"}
    )
    assert (claude.status, claude.error["type"]) == (401, "authentication_error")


def test_the_error_names_what_is_wrong(gateway: GatewayThread) -> None:
    for attack, words in {
        "expired": "has expired",
        "not yet valid": "auth.jwt.leeway_s",
        "another audience": "auth.jwt.audience",
        "another issuer": "auth.jwt.issuer",
        "no expiry": "no claim exp",
        "alg none": "Accepted: RS256, ES256 (auth.jwt.algorithms)",
        "unknown key id": "unknown key",
        "changed claims": "signature",
        "no name": "claim sub",
        "100 KB": "the limit is 16,384",
    }.items():
        assert words in call(gateway, bearer(ATTACKS[attack]())).error["message"], attack


def test_a_token_that_is_too_long_for_the_headers_is_refused_before_it_is_read(
    mock_server: MockServer, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **provider.settings())
    assert call(gateway, bearer(ATTACKS["100 KB"]())).status == 431


def test_an_invalid_token_is_refused_even_with_a_client_key(gateway: GatewayThread, mock: MockProvider) -> None:
    for value in (ATTACKS["expired"](), token() + '"', token() + "=", f"DPoP {token()}"):
        assert call(gateway, {"x-api-key": CLIENT_KEY, "authorization": value}).status == 401
        assert call(gateway, {"x-api-key": CLIENT_KEY, **bearer(value)}).status == 401
    assert call(gateway, {"authorization": f"DPoP {token()}"}).status == 401
    assert mock.calls == []


def test_two_tokens_of_one_caller_are_accepted_and_of_two_are_refused(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    one, again, other = token("two-a"), token("two-a", jti="2"), token("two-b")
    assert call(gateway, {"x-api-key": one, **bearer(again)}).status == 200
    refused = call(gateway, {"x-api-key": one, **bearer(other)})
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    assert gateway.web.get("/api/sessions", {"x-api-key": one, **bearer(other)}).status == 400
    assert len(mock.calls) == 1
    connection = gateway.web.connect()
    connection.putrequest("POST", CHAT)
    for value in (one, other):
        connection.putheader("authorization", f"Bearer {value}")
    connection.putheader("content-length", "0")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_a_client_key_cannot_have_the_name_of_a_caller_with_a_token(gateway: GatewayThread, session: str) -> None:
    # "ci" is also a client key, and "jwt:ci" cannot be one.
    assert call(gateway, {**bearer(CLIENT_KEY), "x-session-id": session}).status == 200
    mine = bearer(token("ci"))
    assert gateway.web.get(f"/api/sessions/{session}", mine).status == 404
    names = ["a@b", "a:40b", "a/b", "a b", "../x", "default", "anonymous", "cred-1", "é", "é", "a\0b", "a\nb"]
    for name in names:
        assert call(gateway, {**bearer(token(name)), "x-session-id": f"{session}-n"}).status == 200
        assert len(gateway.web.get("/api/sessions", bearer(token(name))).json["sessions"]) == 1


def test_no_token_is_logged_or_stored(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, provider: IdentityProvider
) -> None:
    log = {"telemetry.log": {"level": "debug", "bodies": True}}
    gateway = gateway_process(mock_server.url, **provider.settings(), **log)
    good, bad = token("logged"), token("logged", exp=NOW - 3600)
    assert call(gateway, {**bearer(good), "x-session-id": "s"}).status == 200
    assert call(gateway, bearer(bad)).status == 401
    refused = hashlib.sha256(bad.encode()).hexdigest()[:8]
    until(lambda: refused in gateway.errors.read_text(), what="the refusal is logged with the hash of the token")
    gateway.stop()
    written = gateway.errors.read_bytes() + b"".join(path.read_bytes() for path in gateway.folder.glob("gateway.db*"))
    assert b"jwt:logged" in written
    for value in (good, bad):
        assert not [part for part in value.split(".") if part.encode() in written]


# --- keys ---------------------------------------------------------------------------------------------------------


def test_a_new_key_is_found_at_once_and_a_withdrawn_one_is_refused(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, provider: IdentityProvider
) -> None:
    gateway = gateway_process(mock_server.url, **provider.settings())
    old = bearer(token("rotated"))
    assert call(gateway, old).status == 200
    provider.keys = [idp.jwk(rsa_key("two"), kid="two")]
    new = bearer(token("rotated", kid="two", key=rsa_key("two")))
    # Unknown key ids cause a read at most every ten seconds.
    until(lambda: call(gateway, new).status == 200, what="the new key is known")
    assert call(gateway, old).status == 401
    assert provider.requests == 2


def test_unknown_key_ids_do_not_flood_the_identity_provider(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **provider.settings())
    with in_time(), ThreadPoolExecutor(8) as pool:
        replies = [*pool.map(lambda number: call(gateway, bearer(token(kid=f"k{number}"))), range(60))]
    assert {one.status for one in replies} == {401}
    assert provider.requests <= 2


def huge(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(10_000):
        handler.wfile.write(b" " * 65_536)


def redirected(handler: BaseHTTPRequestHandler) -> None:
    idp.send_body(handler, b"", 302, location="http://127.0.0.1:1/keys")


RESPONSES: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "huge": huge,
    "garbage": lambda handler: idp.send_body(handler, bytes(range(256)) * 40),
    "a page": lambda handler: idp.send_body(handler, b"<html>sign in</html>"),
    "no keys": lambda handler: idp.send_body(handler, b'{"keys": []}'),
    "keys that are no list": lambda handler: idp.send_body(handler, b'{"keys": {"kid": 1}}'),
    "rows of other kinds": lambda handler: idp.send_body(handler, b'{"keys": [1, null, {}, {"kty": "RSA", "n": 5}]}'),
    "too many keys": lambda handler: idp.send_body(handler, json.dumps({"keys": [{}] * 101}).encode()),
    "a shared secret": lambda handler: idp.send_body(
        handler, json.dumps({"keys": [{"kty": "oct", "kid": "one", "k": idp.encoded(b"s" * 64)}]}).encode()
    ),
    "a private key": lambda handler: idp.send_body(
        handler,
        json.dumps(
            {"keys": [jwt.algorithms.RSAAlgorithm.to_jwk(rsa_key("one"), as_dict=True) | {"kid": "one"}]}
        ).encode(),
    ),
    "a key for encryption": lambda handler: idp.send_body(
        handler, json.dumps({"keys": [idp.jwk(rsa_key("one"), kid="one", use="enc")]}).encode()
    ),
    "a short key": lambda handler: idp.send_body(
        handler, json.dumps({"keys": [idp.jwk(rsa_key("small"), kid="one")]}).encode()
    ),
    "nested": lambda handler: idp.send_body(handler, b'{"keys": ' + b"[" * 100_000),
    "an error": lambda handler: idp.send_body(handler, b"no", 500),
    "a redirect": redirected,
}


@pytest.mark.parametrize("name", RESPONSES, ids=lambda name: name.replace(" ", "-"))
def test_a_wrong_response_of_the_identity_provider_gives_no_access(
    name: str, mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    provider.respond = RESPONSES[name]
    gateway = gateway_server(mock_server.url, **provider.settings(algorithms=["RS256"]))
    with in_time():
        refused = call(gateway, bearer(token()))
    assert (refused.status, refused.error["code"]) == (503, "signing_keys_unavailable")
    assert int(refused.header("retry-after") or 0) > 0
    assert call(gateway, {}).status == 401
    assert gateway.web.get("/healthz").status == 200
    assert gateway.web.get("/api/health").json["identity_provider"]["problem"]
    assert mock.calls == []


def test_while_the_identity_provider_hangs_known_keys_work_and_no_other_call_waits(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    keys = [{"name": "ci", "key": CLIENT_KEY}]
    gateway = gateway_server(mock_server.url, **{**provider.settings(), "auth.keys": keys})
    known = bearer(token("known"))
    assert call(gateway, known).status == 200
    provider.gate.clear()
    unknown = bearer(token("new", kid="two", key=rsa_key("two")))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: until(lambda: call(gateway, unknown).status == 503, 3 * LIMIT_S))
        until(lambda: provider.requests == 2, what="the keys are read again")
        with in_time(at_most=4.0):
            assert call(gateway, known).status == 200
            assert call(gateway, bearer(token("also-known"))).status == 200
            assert call(gateway, {"x-api-key": CLIENT_KEY}).status == 200
            assert gateway.web.get("/api/sessions", known).status == 200
        waiting.result()
    assert call(gateway, unknown).error["code"] == "signing_keys_unavailable"


def test_an_identity_provider_that_is_down_at_the_start_is_used_once_it_is_back(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, provider: IdentityProvider
) -> None:
    provider.respond = RESPONSES["an error"]
    gateway = gateway_process(mock_server.url, **provider.settings(), **{"telemetry.log.level": "warning"})
    until(lambda: "cannot be read: the response has status 500" in gateway.errors.read_text())
    assert call(gateway, bearer(token())).status == 503
    provider.respond = None
    until(lambda: call(gateway, bearer(token())).status == 200)
    assert "can be read again" in gateway.errors.read_text()
    assert gateway.web.get("/api/health").json["identity_provider"] == {"issuer": idp.ISSUER, "problem": None}


def test_a_reload_keeps_the_known_keys_and_applies_other_settings(
    mock_server: MockServer, mock: MockProvider, gateway_process: StartProcess, provider: IdentityProvider
) -> None:
    flags = provider.settings()
    gateway = gateway_process(mock_server.url, **flags, **{"telemetry.log.level": "info"})
    mine = bearer(token())
    assert call(gateway, mine).status == 200
    provider.gate.clear()  # from now on the keys cannot be read
    reload(gateway, "configuration reloaded")
    with in_time(at_most=4.0):
        assert call(gateway, mine).status == 200
    edit(gateway, auth={"jwt": {**flags["auth.jwt"], "audience": ["other", "third"]}})
    reload(gateway, "configuration reloaded")
    assert call(gateway, mine).status == 401
    assert call(gateway, bearer(token(aud="third"))).status == 200
    edit(gateway, auth={"jwt": {**flags["auth.jwt"], "key_file": "missing.pem", "jwks_url": None}})
    reload(gateway, "auth.jwt.key_file: ")
    assert call(gateway, bearer(token(aud="third"))).status == 200


def test_the_keys_can_be_in_a_file(
    mock_server: MockServer,
    mock: MockProvider,
    gateway_server: StartGateway,
    tmp_path: Path,
    provider: IdentityProvider,
) -> None:
    folder = tmp_path / "with-keys"
    folder.mkdir()
    (folder / "keys.pem").write_bytes(idp.pem(rsa_key("one")))
    (folder / "keys.json").write_text(json.dumps({"keys": [idp.jwk(rsa_key("one"), kid="one")]}))
    for file, kid, status in [
        ("keys.pem", "one", 200),
        ("keys.pem", "other", 200),
        ("keys.pem", None, 200),
        ("keys.json", "one", 200),
        ("keys.json", None, 200),
        ("keys.json", "other", 401),
    ]:
        gateway = gateway_server(mock_server.url, folder=folder, **provider.settings(jwks_url=None, key_file=file))
        assert call(gateway, bearer(token(kid=kid))).status == status, (file, kid)
        assert call(gateway, bearer(token(kid=kid, key=rsa_key("other")))).status == 401
        gateway.stop()
    assert provider.requests == 0


def test_a_token_ends_while_it_is_kept(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **provider.settings(leeway_s=0))
    mine = bearer(token(exp=int(time.time()) + 3))
    assert call(gateway, mine).status == 200
    until(lambda: call(gateway, mine).status == 401)
    assert "has expired" in call(gateway, mine).error["message"]


def test_calls_without_a_token_are_refused_even_from_this_machine(
    mock_server: MockServer, gateway_server: StartGateway, provider: IdentityProvider
) -> None:
    gateway = gateway_server(mock_server.url, **provider.settings())
    refused = call(gateway, {})
    assert refused.status == 401
    assert "auth.jwt.issuer" in refused.error["message"]
