from __future__ import annotations

import pytest

from gateway.call.types import Caller
from gateway.core.errors import Forbidden, Unauthenticated
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.charging import KeyLimits
from gateway.server.auth import Access, Authenticator, KeyRule, digest, require_admin

ALICE, BOB, ADMIN = "alice-key-0123456789", "bob-key-0123456789abc", "admin-key-0123456789"
KEYS = [KeyRule("alice", digest(ALICE)), KeyRule("bob", digest(BOB), ("gpt-*",))]
LOCAL, REMOTE = "127.0.0.1", "203.0.113.9"
HOST = (b"host", b"localhost:8484")
OWN_NAMES = (b"localhost", b"127.0.0.1", b"127.0.0.1:8484", b"[::1]", b"[::1]:8484")
LIMITED = KeyRule("alice", digest(ALICE), budget=KeyLimits(Limits(tokens=9)))


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", b"Bearer " + key.encode()


@pytest.mark.parametrize(
    "header",
    [
        bearer(ALICE),
        (b"authorization", b"bearer   " + ALICE.encode() + b"  "),
        (b"authorization", ALICE.encode()),
        (b"x-api-key", ALICE.encode()),
        (b"api-key", ALICE.encode()),
    ],
)
def test_a_client_key_is_found_in_each_header_sdks_use(header: tuple[bytes, bytes]) -> None:
    assert Authenticator(KEYS, None).caller([header], REMOTE) == Caller("alice", (), frozenset({header[0]}))


def test_the_first_known_key_counts() -> None:
    headers = [bearer("somebody-elses-credential"), (b"x-api-key", BOB.encode())]
    assert Authenticator(KEYS, None).caller(headers, REMOTE) == Caller("bob", ("gpt-*",), frozenset({b"x-api-key"}))


def test_every_header_with_a_gateway_key_is_listed() -> None:
    headers = [bearer(ALICE), (b"x-api-key", BOB.encode()), (b"api-key", ADMIN.encode())]
    caller = Authenticator(KEYS, ADMIN).caller(headers, REMOTE)
    assert caller.key_headers == {b"authorization", b"x-api-key", b"api-key"}


@pytest.mark.parametrize("headers", [[], [bearer("x")], [bearer("")], [(b"cookie", ALICE.encode())], [bearer(ADMIN)]])
@pytest.mark.parametrize("peer", [LOCAL, REMOTE, None])
def test_call_without_a_known_key_is_refused(headers: list[tuple[bytes, bytes]], peer: str | None) -> None:
    with pytest.raises(Unauthenticated) as error:
        Authenticator(KEYS, ADMIN).caller(headers, peer)
    assert ALICE not in error.value.message


def test_without_keys_callers_of_this_machine_share_a_namespace_and_others_do_not() -> None:
    auth = Authenticator([], None)
    for peer in (LOCAL, "::1", "127.3.2.1", "::ffff:127.0.0.1"):
        assert auth.caller([bearer("any")], peer).namespace == "default"
    one, two = (auth.caller([bearer(key)], REMOTE).namespace for key in ("one", "two"))
    assert one != two
    assert one == auth.caller([(b"x-api-key", b"one")], REMOTE).namespace
    assert "one" not in one
    assert {"default", one, two}.isdisjoint({auth.caller([], REMOTE).namespace})
    assert auth.caller([], None).namespace == auth.caller([], "no address").namespace == "anonymous"


def test_without_keys_the_admin_key_is_not_forwarded() -> None:
    auth = Authenticator([], ADMIN)
    assert auth.caller([bearer("callers")], LOCAL).key_headers == frozenset()
    assert auth.caller([bearer(ADMIN)], LOCAL).key_headers == {b"authorization"}


@pytest.mark.parametrize(
    ("keys", "admin", "headers", "peer", "access"),
    [
        ([], None, [HOST], LOCAL, Access(None, admin=True)),
        ([], None, [HOST], "::1", Access(None, admin=True)),
        ([], None, [HOST, (b"x-forwarded-for", b"127.0.0.1")], LOCAL, Access("default", admin=False)),
        ([], None, [HOST, (b"origin", b"https://app.example")], LOCAL, Access("default", admin=False)),
        ([], None, [HOST, (b"origin", b"http://localhost:8484")], LOCAL, Access(None, admin=True)),
        *(([], None, [(b"host", host)], LOCAL, Access(None, admin=True)) for host in OWN_NAMES),
        ([], ADMIN, [HOST], LOCAL, Access("default", admin=False)),
        ([], ADMIN, [HOST, bearer("a provider's")], LOCAL, Access("default", admin=False)),
        ([LIMITED], ADMIN, [HOST, bearer(ALICE)], REMOTE, Access("alice", admin=False, limits=Limits(tokens=9))),
        ([], ADMIN, [HOST, bearer(ADMIN)], REMOTE, Access(None, admin=True)),
        (KEYS, None, [HOST], LOCAL, Access(None, admin=True)),
        (KEYS, None, [HOST, bearer("an SDK's default")], LOCAL, Access(None, admin=True)),
        (KEYS, None, [HOST, bearer(ALICE)], LOCAL, Access("alice", admin=False)),
        (KEYS, None, [HOST, bearer(BOB)], REMOTE, Access("bob", admin=False)),
        (KEYS, ADMIN, [HOST, bearer(ALICE)], LOCAL, Access("alice", admin=False)),
        (KEYS, ADMIN, [HOST, bearer(ADMIN)], REMOTE, Access(None, admin=True)),
        (KEYS, ADMIN, [HOST, (b"x-api-key", ADMIN.encode())], REMOTE, Access(None, admin=True)),
    ],
)
def test_access_of_callers_of_the_api(
    keys: list[KeyRule], admin: str | None, headers: list[tuple[bytes, bytes]], peer: str, access: Access
) -> None:
    assert Authenticator(keys, admin, ["https://app.example"]).api(headers, peer) == access


def test_only_an_administrator_may_see_and_change_everything() -> None:
    require_admin(Access(None, admin=True))
    for namespace in (None, "alice"):
        with pytest.raises(Forbidden, match="needs the admin key"):
            require_admin(Access(namespace, admin=False))


@pytest.mark.parametrize(
    ("keys", "admin", "headers", "peer"),
    [
        ([], None, [HOST], REMOTE),
        ([], None, [HOST], None),
        ([], None, [(b"host", b"evil.example")], LOCAL),
        ([], ADMIN, [HOST], REMOTE),
        (KEYS, None, [HOST], REMOTE),
        (KEYS, None, [HOST, bearer("a provider's")], REMOTE),
        (KEYS, ADMIN, [HOST], LOCAL),
        (KEYS, ADMIN, [HOST, bearer(ADMIN + "x")], LOCAL),
        (KEYS, None, [HOST, (b"via", b"1.1 proxy")], LOCAL),
    ],
)
def test_callers_without_access_to_the_api(
    keys: list[KeyRule], admin: str | None, headers: list[tuple[bytes, bytes]], peer: str | None
) -> None:
    with pytest.raises(Unauthenticated):
        Authenticator(keys, admin).api(headers, peer)


def test_caller_from_the_network_sees_the_sessions_of_its_credential() -> None:
    auth = Authenticator([], None)
    headers = [HOST, bearer("mine")]
    assert auth.api(headers, REMOTE) == Access(auth.caller(headers, REMOTE).namespace, admin=False)


@pytest.mark.parametrize(
    "origin", [b"http://evil.example", b"null", b"http://localhost:1", b"localhost:8484", b"file://"]
)
def test_a_page_of_another_origin_is_refused(origin: bytes) -> None:
    auth = Authenticator([], None)
    for ask in (auth.caller, auth.api):
        with pytest.raises(Forbidden):
            ask([HOST, (b"origin", origin)], LOCAL)


def test_page_of_the_gateways_own_origin_may_call() -> None:
    auth = Authenticator([], None)
    assert auth.api([HOST, (b"origin", b"http://LOCALHOST:8484")], LOCAL).admin
    assert auth.caller([HOST, (b"origin", b"http://localhost:8484")], LOCAL).namespace == "default"


def test_page_with_a_rebound_host_name_may_not_call() -> None:
    evil = [(b"host", b"evil.example:8484"), (b"origin", b"http://evil.example:8484")]
    with pytest.raises(Forbidden, match="cors_origins"):
        Authenticator([], None).caller(evil, LOCAL)
    # Allowed: forwarded requests, pages on other machines, allowed origins, and requests with a key.
    assert Authenticator([], None).caller([*evil, (b"x-forwarded-for", b"192.0.2.1")], LOCAL)
    assert Authenticator([], None).caller(evil, REMOTE)
    assert Authenticator([], None, ["http://evil.example:8484"]).caller(evil, LOCAL)
    assert Authenticator(KEYS, None).caller([*evil, bearer(ALICE)], LOCAL).namespace == "alice"
    assert Authenticator([], None).caller(evil[:1], LOCAL), "a program sends no origin"


def test_page_with_a_rebound_host_name_may_not_read_without_origin() -> None:
    evil = [(b"host", b"evil.example:8484")]
    auth = Authenticator([], None)
    with pytest.raises(Forbidden, match="localhost"):
        auth.caller(evil, LOCAL, reads=True)
    assert auth.caller([HOST], LOCAL, reads=True)
    assert auth.caller([*evil, (b"x-forwarded-for", b"192.0.2.1")], LOCAL, reads=True)
    assert auth.caller(evil, REMOTE, reads=True)
    assert Authenticator(KEYS, None).caller([*evil, bearer(ALICE)], LOCAL, reads=True).namespace == "alice"


def test_keys_of_any_bytes_have_a_digest() -> None:
    assert digest("schlüssel") != digest("schlussel")
    assert len(digest("\udcff")) == 32


def test_a_key_outside_ascii_is_found() -> None:
    auth = Authenticator([KeyRule("alice", digest("schlüssel-0123456789"))], None)
    assert auth.caller([(b"x-api-key", "schlüssel-0123456789".encode())], REMOTE).namespace == "alice"
