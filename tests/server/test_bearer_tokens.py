"""Verified tokens are kept until they expire or their key is withdrawn."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from gateway.config.access import SignatureAlgorithm
from gateway.core.errors import Unauthenticated
from gateway.server.auth import digest
from gateway.server.bearer_tokens import BearerTokens, ClaimRules
from gateway.server.signing_keys import FixedKeys
from gateway.server.token_verifier import TokenVerifier, read_keys
from tests.support import identity_provider as idp
from tests.support.identity_provider import jwk, rsa_key, token
from tests.support.timing import count_calls

ALGORITHMS = ("RS256",)
VERIFIER = TokenVerifier(idp.ISSUER, (idp.AUDIENCE,), ALGORITHMS, 60)


class Clock:
    def __init__(self) -> None:
        self.seconds = time.time()

    def __call__(self) -> float:
        return self.seconds


class CountedVerifier(TokenVerifier):
    verified = 0

    def claims(self, token: str, key: object, algorithm: str) -> dict[str, object]:
        self.verified += 1
        return super().claims(token, key, algorithm)


class Keys(FixedKeys):
    """Keys of which the test withdraws some."""

    def __init__(self, *names: str) -> None:
        self.publish(*names)

    def publish(self, *names: str) -> None:
        rows = [jwk(rsa_key(name), kid=name) for name in names]
        super().__init__(read_keys(json.dumps({"keys": rows}).encode(), ALGORITHMS))


def sent(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + value.encode())]


async def test_a_token_is_verified_once_until_it_expires() -> None:
    verifier, clock = CountedVerifier(idp.ISSUER, (idp.AUDIENCE,), ALGORITHMS, 60), Clock()
    tokens, value = BearerTokens(verifier, Keys("one"), ClaimRules(), clock), token()
    for _ in range(10):
        await tokens.verify(sent(value))
    assert verifier.verified == 1
    rule = tokens.rule(digest(value))
    assert rule is not None
    assert (rule.name, rule.digest, rule.is_admin) == ("jwt:alice", digest(value), False)
    clock.seconds += 600 + 59
    assert tokens.rule(digest(value)) is rule
    clock.seconds += 2
    assert tokens.rule(digest(value)) is None


async def test_a_token_that_is_valid_for_ever_is_verified_every_hour() -> None:
    clock = Clock()
    tokens, value = BearerTokens(VERIFIER, Keys("one"), ClaimRules(), clock), token(exp=10**30)
    await tokens.verify(sent(value))
    clock.seconds += 3600 + 61
    assert tokens.rule(digest(value)) is None


async def test_a_verified_token_ends_with_its_key() -> None:
    keys = Keys("one", "two")
    tokens, value = BearerTokens(VERIFIER, keys, ClaimRules()), token()
    await tokens.verify(sent(value))
    keys.publish("two")
    assert tokens.rule(digest(value)) is None
    with pytest.raises(Unauthenticated):
        await tokens.verify(sent(value))


async def test_the_number_of_kept_tokens_is_limited() -> None:
    tokens = BearerTokens(VERIFIER, Keys("one"), ClaimRules())
    first, *others = [token(jti=str(number)) for number in range(4097)]
    for value in (first, *others):
        await tokens.verify(sent(value))
    assert tokens.rule(digest(first)) is None
    assert tokens.rule(digest(others[-1])) is not None


async def test_a_verified_token_costs_few_calls() -> None:
    tokens, headers = BearerTokens(VERIFIER, Keys("one"), ClaimRules()), sent(token())
    await tokens.verify(headers)

    def again() -> None:
        with pytest.raises(StopIteration):
            tokens.verify(headers).send(None)  # it never waits

    assert count_calls(again) < 60


@pytest.mark.parametrize("algorithm", get_args(SignatureAlgorithm))
async def test_every_algorithm_of_the_configuration_works(algorithm: str) -> None:
    key: Any = rsa_key("one")
    if algorithm.startswith("E"):
        curves = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
        key = ec.generate_private_key(curves[algorithm]) if algorithm in curves else Ed25519PrivateKey.generate()
    keys = FixedKeys(read_keys(idp.pem(key), get_args(SignatureAlgorithm)))
    verifier = TokenVerifier(idp.ISSUER, (idp.AUDIENCE,), get_args(SignatureAlgorithm), 60)
    tokens, value = BearerTokens(verifier, keys, ClaimRules()), token(key=key, alg=algorithm)
    await tokens.verify(sent(value))
    assert tokens.rule(digest(value)) is not None
    tokens = BearerTokens(VERIFIER, keys, ClaimRules())
    if algorithm != "RS256":
        with pytest.raises(Unauthenticated, match="Accepted: RS256"):
            await tokens.verify(sent(value))
