from __future__ import annotations

import pytest

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import ANONYMOUS, CREDENTIAL_PREFIX, OPEN_NAMESPACE, SessionKey, is_reserved


@pytest.mark.parametrize("name", [OPEN_NAMESPACE, ANONYMOUS, f"{CREDENTIAL_PREFIX}0a1b"])
def test_reserved_namespaces_are_no_client_keys(name: str) -> None:
    assert is_reserved(name)
    assert not is_reserved(f"x{name}")


@pytest.mark.parametrize(
    ("text", "namespace", "key"),
    [
        ("s", None, SessionKey(OPEN_NAMESPACE, "s")),
        ("alice/s", None, SessionKey("alice", "s")),
        ("s", "alice", SessionKey("alice", "s")),
    ],
)
def test_a_session_is_found_by_the_name_it_is_shown_under(text: str, namespace: str | None, key: SessionKey) -> None:
    assert SessionKey.parse(text, namespace) == key
    assert key.shown(namespace) == text


def test_reader_of_one_namespace_cannot_name_another() -> None:
    assert SessionKey.parse("alice/s", "alice") is None
    assert SessionKey("bob", "s").shown("alice") == "s"


@pytest.mark.parametrize("text", ["", "/", "/s", "alice/", "a/b/c", "..", "alice/..", "../s", "a b", "s\n"])
def test_invalid_session_names_are_refused(text: str) -> None:
    assert SessionKey.parse(text) is None
    assert SessionKey.parse(text, "alice") is None


def test_a_session_has_its_budget_on_an_account_of_its_own() -> None:
    assert SessionKey("alice", "s").account == AccountKey("session", "alice", "s")
    assert SessionKey("alice", "s").account != SessionKey("bob", "s").account
