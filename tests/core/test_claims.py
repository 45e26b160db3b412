"""Test the namespace and the group of a caller with a token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.claims import MOST_NAMED, claim_at, group_of, namespace_of
from gateway.core.identity import is_valid
from gateway.core.ledger.session_key import SessionKey, is_reserved


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sub", "a"),
        ("realm.roles", ["x"]),
        ("https://example.com/roles", "y"),
        ("https://example.com/roles.more", None),
        ("realm", {"roles": ["x"]}),
        ("realm.other", None),
        ("sub.x", None),
        ("missing", None),
        ("realm.", None),
        (".", None),
        ("", None),
    ],
)
def test_a_claim_is_found_by_its_name_or_its_path(path: str, value: object) -> None:
    claims = {"sub": "a", "realm": {"roles": ["x"]}, "https://example.com/roles": "y"}
    assert claim_at(claims, path) == value


@pytest.mark.parametrize(
    ("name", "namespace"),
    [
        ("alice", "jwt:alice"),
        ("alice@example.com", "jwt:alice:40example.com"),
        ("a:40b", "jwt:a:3A40b"),
        ("auth0|5f7c", "jwt:auth0:7C5f7c"),
        ("é", "jwt::C3:A9"),
        ("\ud800", "jwt::ED:A0:80"),
        ("..", "jwt:.."),
        ("a" * MOST_NAMED, "jwt:" + "a" * MOST_NAMED),
        ("a" * (MOST_NAMED + 1), None),
        ("@" * MOST_NAMED, None),
        ("", None),
        (None, None),
        (7, None),
        (["alice"], None),
    ],
)
def test_the_namespace_shows_the_name(name: object, namespace: str | None) -> None:
    assert namespace_of(name) == namespace


@given(st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=60))
def test_different_names_have_different_valid_namespaces_that_no_client_key_can_have(one: str, other: str) -> None:
    found = namespace_of(one)
    assert (found == namespace_of(other)) == (one == other) or found is None
    if found is not None:
        assert is_valid(found)
        assert is_reserved(found)
        key = SessionKey(found, "s")
        assert SessionKey.parse(key.shown()) == key


@pytest.mark.parametrize(
    ("value", "known", "group"),
    [
        ("a", ["a", "b"], "a"),
        (["b", "a"], ["a", "b"], "a"),
        (["a", "b"], ["b", "a"], "b"),
        ("a b", ["a", "b"], None),
        (["x", 1, None, ["a"], {"a": 1}], ["a"], None),
        ({"a": True}, ["a"], None),
        (None, ["a"], None),
        (None, ["a", "*"], "*"),
        ("x", ["*", "a"], "*"),
        ("a", ["*", "a"], "a"),
        ("*", ["a"], None),
        (["*", "a"], ["*", "a"], "a"),
    ],
)
def test_the_first_configured_group_of_the_caller_counts(value: object, known: list[str], group: str | None) -> None:
    assert group_of(value, known) == group
