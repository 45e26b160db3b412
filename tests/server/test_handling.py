"""Errors and access of all handlers of /api, in a running gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.mock import MockProvider, MockServer
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, HI, Reply, Web, talk

ALICE, ADMIN = "alice-key-0123456789", "admin-key-0123456789"


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


@pytest.mark.parametrize(
    "path",
    ["/api/sessions/nobody", "/api/sessions/nobody/calls", "/api/calls/nothing", "/api/nope", "/api/", "/api/calls/"],
)
def test_unknown_path_is_a_404(path: str, web: Web) -> None:
    answer = web.get(path)
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.header("x-should-retry") == "false"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_unsupported_method_is_a_405(method: str, web: Web) -> None:
    answer = web.send(method, "/api/sessions")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert set((answer.header("allow") or "").split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize(
    "path", ["/api/sessions", "/api/sessions/{}", "/api/sessions/{}/calls", "/api/models", "/api/nope"]
)
def test_nothing_of_the_api_is_cached(path: str, web: Web, session: str) -> None:
    web.chat(session)
    assert web.get(path.format(session)).header("cache-control") == "no-store"


def test_every_response_of_the_api_has_a_request_id(web: Web) -> None:
    for path in ("/api/sessions/nobody", "/api/nope", "/api/sessions?limit=x"):
        answer: Any = web.get(path)
        assert answer.header("x-gateway-request-id"), path


WRITES = [("POST", "/api/sessions/s/reset"), ("DELETE", "/api/sessions/s"), ("POST", "/api/reload")]


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_with_an_admin_key_only_that_key_may_write(
    method: str, path: str, admin_server: GatewayThread, mock: MockProvider
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


def test_admin_key_reads_everything_but_makes_no_calls(admin_server: GatewayThread, mock: MockProvider) -> None:
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
def test_without_an_admin_key_a_rebound_host_name_may_not_write(host: str, web: Web) -> None:
    """DNS rebinding: the peer is this machine, but the page is from another site."""
    web.chat("s")
    for method, path in (("POST", "/api/sessions/s/reset"), ("GET", "/api/sessions/s"), ("GET", "/api/events")):
        assert raw_get(web, path, method=method, host=host).status == 401


def test_rebound_host_name_may_not_read_from_the_provider(web: Web) -> None:
    """Browsers send no Origin with a GET to the page's own origin."""
    for method in ("GET", "HEAD"):
        assert raw_get(web, "/v1/models", method=method, host="evil.example").status == 403
        assert raw_get(web, "/v1/models", method=method, host="localhost").status == 200


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
def test_a_page_of_another_origin_is_refused(method: str, path: str, origin: str, web: Web, mock: MockProvider) -> None:
    answer = raw_get(web, path, f"origin: {origin}", method=method)
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert answer.header("access-control-allow-origin") is None
    assert mock.calls == []


def test_a_page_of_our_own_origin_is_not_refused(web: Web) -> None:
    assert raw_get(web, "/api/sessions", "origin: http://localhost:8484", host="localhost:8484").status == 200


def test_with_client_keys_a_page_may_call_with_its_key(admin_server: GatewayThread, mock: MockProvider) -> None:
    web = with_key(admin_server, ALICE)
    assert web.post(CHAT, {"model": "mock-small", "messages": HI}, {"origin": "http://app.example"}).status == 200
