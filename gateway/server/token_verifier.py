"""Verify bearer tokens (JWT) with public keys, and read such keys (JWKS, PEM), through PyJWT.

Only this module uses PyJWT, and imports it when `auth.jwt` is configured.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from gateway.core.errors import ConfigError, Unauthenticated
from gateway.core.values import dataclass

_REQUIRED: Final = ("jwt", "cryptography")
#: public keys of one identity provider; the largest providers publish about ten
_MOST_KEYS: Final = 100
#: claims without which a token would be valid for ever, or for every service
_REQUIRED_CLAIMS: Final = ("exp", "iss", "aud")
#: members of private keys and of shared secrets
_SECRET_MEMBERS: Final = frozenset({"d", "k"})


def load_packages() -> None:
    """Import PyJWT and cryptography.

    Raises:
        ConfigError: a package is not installed.
    """
    try:
        for name in _REQUIRED:
            importlib.import_module(name)
    except ImportError:
        raise ConfigError(["auth.jwt: needs a package that is missing: pip install 'pyjwt[crypto]'"]) from None


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Public keys by their id and algorithm. The id is None for a key without one, which fits every token."""

    by_id: Mapping[tuple[str | None, str], Any]

    def find(self, key_id: str | None, algorithm: str) -> Any:
        """Return the key for a token, or None. A token without an id needs a single key for its algorithm."""
        found = self.by_id.get((key_id, algorithm)) or self.by_id.get((None, algorithm))
        if found is None and key_id is None:
            fitting = [key for (_, fits), key in self.by_id.items() if fits == algorithm]
            return fitting[0] if len(fitting) == 1 else None
        return found


NO_KEYS: Final = PublicKeys({})


def read_keys(document: bytes, algorithms: Sequence[str]) -> PublicKeys:
    """Read the public keys for these algorithms from a JWKS or a PEM text. Other keys are left out.

    Raises:
        ValueError: there is no such key, or the document is invalid.
    """
    read = _pem_keys if b"-----BEGIN" in document else _jwks_keys
    found: dict[tuple[str | None, str], Any] = {}
    for key_id, algorithm, key in read(document, algorithms):
        found.setdefault((key_id, algorithm), key)
    if not found:
        raise ValueError(f"contains no public key for {', '.join(algorithms)}")
    return PublicKeys(found)


def _pem_keys(document: bytes, algorithms: Sequence[str]) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (id, algorithm, key) for each algorithm that the key of a PEM text fits. It has no id."""
    import jwt  # noqa: PLC0415  # an extra
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    if b"PRIVATE KEY" in document:
        raise ValueError("contains a private key; the gateway needs only the public one")
    try:
        public = load_pem_public_key(document)
    except Exception as error:
        raise ValueError("is not a public key in PEM") from error
    for algorithm in algorithms:
        method = jwt.get_algorithm_by_name(algorithm)
        try:
            key = method.prepare_key(public)
        except (jwt.PyJWTError, TypeError):
            continue
        if not method.check_key_length(key):
            yield None, algorithm, key


def _jwks_keys(document: bytes, algorithms: Sequence[str]) -> Iterator[tuple[str | None, str, Any]]:
    """Yield (id, algorithm, key) for each key of a JWKS and each algorithm that it fits."""
    try:
        rows = json.loads(document)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError("is not a JWKS: a JSON object with the list keys") from None
    if not isinstance(rows, list) or len(rows) > _MOST_KEYS:
        raise ValueError(f"has no list keys with at most {_MOST_KEYS} keys")
    for row in rows:
        if not isinstance(row, dict) or row.get("use", "sig") != "sig" or _SECRET_MEMBERS & row.keys():
            continue
        key_id = row.get("kid")
        if key_id is None or isinstance(key_id, str):
            yield from ((key_id, name, key) for name in algorithms if (key := _jwk_key(row, name)) is not None)


def _jwk_key(row: dict[str, Any], algorithm: str) -> Any:
    """Return the key of a JWKS if it is one for this algorithm, or None."""
    import jwt  # noqa: PLC0415  # an extra

    if row.get("alg", algorithm) != algorithm:
        return None
    try:
        method = jwt.get_algorithm_by_name(algorithm)
        key = method.prepare_key(method.from_jwk(row))
    except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError):
        return None
    return key if not method.check_key_length(key) else None


@dataclass(frozen=True, slots=True)
class TokenHead:
    """The parts of a token that say how to verify it. They are not verified themselves."""

    issuer: object
    algorithm: object
    key_id: str | None


def read_head(token: str) -> TokenHead | None:
    """Read how to verify a token, or None if the text is not a token."""
    import jwt  # noqa: PLC0415  # an extra

    try:
        read = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, RecursionError):
        return None
    head = read["header"]
    return TokenHead(read["payload"].get("iss"), head.get("alg"), head.get("kid"))


class TokenVerifier:
    """Verify signature, times, issuer and audience of a token.

    Args:
        issuer: the only accepted issuer.
        audiences: one of them has to be in the token.
        algorithms: the accepted signature algorithms.
        leeway_s: accepted difference of the clocks.
    """

    def __init__(self, issuer: str, audiences: Sequence[str], algorithms: Sequence[str], leeway_s: float) -> None:
        self.issuer = issuer
        self.algorithms = tuple(algorithms)
        self.leeway_s = leeway_s
        self._audiences = tuple(audiences)

    def claims(self, token: str, key: Any, algorithm: str) -> dict[str, Any]:
        """Return the claims of a token.

        Args:
            token: the token as sent.
            key: the public key, which fits the algorithm.
            algorithm: the algorithm in the head of the token; only this one is accepted.

        Raises:
            Unauthenticated: the token is not valid.
        """
        import jwt  # noqa: PLC0415  # an extra

        try:
            return jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self._audiences,
                issuer=self.issuer,
                leeway=self.leeway_s,
                options={"require": list(_REQUIRED_CLAIMS), "enforce_minimum_key_length": True},
            )
        except jwt.ExpiredSignatureError:
            problem = "The token has expired. Get a new one from the identity provider."
        except jwt.ImmatureSignatureError:
            problem = (
                f"The token is not valid yet. The clocks may differ by {self.leeway_s:g} s (auth.jwt.leeway_s); set "
                "the clock of the gateway or of the identity provider."
            )
        except jwt.InvalidAudienceError:
            problem = (
                "The token is for another service. Request one for the audience of the gateway (auth.jwt.audience)."
            )
        except jwt.MissingRequiredClaimError as error:
            problem = f"The token has no claim {error.claim}. Request one with exp, iss and aud."
        except jwt.InvalidSignatureError:
            problem = "The signature of the token is wrong. Get a new one from the identity provider."
        except (jwt.PyJWTError, ValueError, TypeError, ArithmeticError, RecursionError):
            problem = "The token is not a valid JWT. Get a new one from the identity provider."
        raise Unauthenticated(problem)
