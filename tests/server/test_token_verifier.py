"""Test which public keys are read, and which package is missing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gateway.core.errors import ConfigError
from gateway.server import token_verifier
from gateway.server.token_verifier import TokenHead, load_packages, read_head, read_keys
from tests.support import identity_provider as idp
from tests.support.identity_provider import ec_key, jwk, pem, rsa_key

ALL = ("RS256", "PS256", "ES256", "ES384")


def ids(*rows: object, algorithms: tuple[str, ...] = ALL) -> set[tuple[str | None, str]]:
    return set(read_keys(json.dumps({"keys": rows}).encode(), algorithms).by_id)


def test_a_key_is_used_for_the_algorithms_that_it_fits() -> None:
    assert ids(jwk(rsa_key("one"), kid="a")) == {("a", "RS256"), ("a", "PS256")}
    assert ids(jwk(rsa_key("one"), kid="a", alg="PS256")) == {("a", "PS256")}
    assert ids(jwk(ec_key("p256"), kid="a")) == {("a", "ES256")}
    assert ids(jwk(ec_key("p384"))) == {(None, "ES384")}


def test_keys_of_other_kinds_are_left_out() -> None:
    good = jwk(rsa_key("one"), kid="a", alg="RS256")
    private = {**good, "kid": "b", "d": "AQAB"}
    others: list[object] = [
        None,
        3,
        "x",
        [],
        {},
        {"kty": "oct", "kid": "c", "k": "c2VjcmV0"},
        {**good, "kid": 5},
        private,
    ]
    others += [
        {**good, "kid": "d", "use": "enc"},
        {**good, "kid": "e", "n": "!"},
        {"kty": "RSA", "kid": "f", "n": "AQAB"},
    ]
    others += [
        {**good, "kid": "g", "n": "", "e": ""},
        {**good, "kid": "h", "alg": "HS256"},
        {**good, "kid": "i", "e": 3},
    ]
    assert ids(*others, good) == {("a", "RS256")}


def test_the_first_of_two_keys_with_an_id_counts() -> None:
    keys = read_keys(json.dumps({"keys": [jwk(rsa_key("one"), kid="a"), jwk(rsa_key("two"), kid="a")]}).encode(), ALL)
    assert keys.find("a", "RS256").public_numbers() == rsa_key("one").public_key().public_numbers()


def test_a_token_without_an_id_needs_a_single_key() -> None:
    one, two = jwk(rsa_key("one"), kid="a"), jwk(rsa_key("two"), kid="b")
    assert read_keys(json.dumps({"keys": [one]}).encode(), ALL).find(None, "RS256") is not None
    assert read_keys(json.dumps({"keys": [one, two]}).encode(), ALL).find(None, "RS256") is None


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        (b"", "is not a JWKS"),
        (b"\xff", "is not a JWKS"),
        (b"[]", "is not a JWKS"),
        (b"5", "is not a JWKS"),
        (b'{"keys": 5}', "no list keys"),
        (b'{"keys": []}', "no public key for RS256, PS256, ES256, ES384"),
        (json.dumps({"keys": [{}] * 101}).encode(), "at most 100"),
        (b"-----BEGIN PUBLIC KEY-----\n!\n-----END PUBLIC KEY-----", "not a public key in PEM"),
        (b"-----BEGIN PRIVATE KEY-----\n!\n-----END PRIVATE KEY-----", "only the public one"),
        (pem(rsa_key("small")), "no public key for"),
        (pem(ec_key("p256")).replace(b"BEGIN", b"BEGIN "), "not a public key in PEM"),
    ],
)
def test_a_document_without_usable_keys_is_refused(document: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_keys(document, ALL)


def test_a_key_in_pem_fits_every_id() -> None:
    keys = read_keys(pem(rsa_key("one")), ALL)
    assert keys.find("any", "RS256") is keys.find(None, "RS256") is not None
    assert keys.find(None, "ES256") is None


def test_the_head_is_read_without_trust() -> None:
    assert read_head(idp.token()) == TokenHead(idp.ISSUER, "RS256", "one")
    assert read_head("eyJ") is None
    assert read_head("a.b.c") is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_verifier, "_REQUIRED", ("jwt", "no_such_package"))
    with pytest.raises(ConfigError, match=r"auth\.jwt: .*pip install 'pyjwt\[crypto\]'"):
        load_packages()


def test_pyjwt_is_not_imported_by_a_gateway_without_tokens() -> None:
    code = "import sys, gateway.app.worker; print({'jwt', 'cryptography'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"set()\n"
