from __future__ import annotations

import pytest

from gateway.core.ledger import AccountKey
from gateway.core.namespaces import ANONYMOUS, CREDENTIAL_PREFIX, OPEN_NAMESPACE, SessionKey, is_reserved


@pytest.mark.parametrize("name", [OPEN_NAMESPACE, ANONYMOUS, f"{CREDENTIAL_PREFIX}0a1b"])
def test_no_client_key_has_the_name_of_callers_without_one(name: str) -> None:
    assert is_reserved(name)
    assert not is_reserved(f"x{name}")


def test_a_session_has_its_budget_on_an_account_of_its_own() -> None:
    assert SessionKey("alice", "s").account == AccountKey("session", "alice", "s")
    assert SessionKey("alice", "s").account != SessionKey("bob", "s").account
