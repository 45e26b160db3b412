"""Find the caller of a bearer token (JWT) of the identity provider, and keep verified tokens until they expire."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

from gateway.core.bounded import BoundedDict
from gateway.core.claims import MOST_NAMED, claim_at, group_of, namespace_of
from gateway.core.errors import Forbidden, InvalidRequest, SigningKeysUnavailable, Unauthenticated
from gateway.core.http.headers import CREDENTIALS, Headers, credential
from gateway.core.ledger.arithmetic import AccountKey, Limits
from gateway.core.ledger.charging import NO_KEY_BUDGET, KeyLimits
from gateway.core.values import dataclass
from gateway.server.auth import KeyRule, TokenCallers, digest
from gateway.server.signing_keys import KeySource
from gateway.server.token_verifier import TokenHead, TokenVerifier, read_head

#: characters of a token; those of identity providers have less than 4,000, even with many groups
_MOST_CHARACTERS: Final = 16_384
#: how each token begins: `{"` in Base64
_BEGINNING: Final = "eyJ"
#: dots in a signed token
_DOTS: Final = 2
#: verified tokens that are kept
_MOST_KEPT: Final = 4096
#: seconds after which a kept token is verified again at the latest, whatever time it names
_KEPT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class TokenRights:
    """What a caller may do. `is_admin`: it may use /api like the admin key."""

    models: tuple[str, ...] = ()
    budget: KeyLimits = NO_KEY_BUDGET
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """How claims become a caller.

    Attributes:
        name: the path of the claim with its name.
        group: the path of the claim with its groups; None if there are no groups.
        groups: the rights of each group; the first one that the caller is in applies.
        ungrouped: the rights of all callers if there are no groups.
    """

    name: str = "sub"
    group: str | None = None
    groups: Mapping[str, TokenRights] = field(default_factory=dict)
    ungrouped: TokenRights = TokenRights()

    def rule(self, claims: Mapping[str, Any], token_digest: bytes) -> KeyRule:
        """Return the rule of the caller with these claims. `token_digest`: the digest of its token.

        Raises:
            Unauthenticated: the token does not name its caller.
            Forbidden: the caller is in no configured group.
        """
        namespace = namespace_of(claim_at(claims, self.name))
        if namespace is None:
            raise Unauthenticated(
                f"The claim {self.name} of the token is not a name of 1 to {MOST_NAMED} characters "
                "(auth.jwt.claims.name). Other characters than letters, digits, . _ and - count three times or more."
            )
        rights = self._rights(claims)
        return KeyRule(namespace, token_digest, rights.models, rights.budget, is_admin=rights.is_admin)

    def _rights(self, claims: Mapping[str, Any]) -> TokenRights:
        if self.group is None:
            return self.ungrouped
        group = group_of(claim_at(claims, self.group), self.groups)
        if group is None:
            raise Forbidden(
                f"The claim {self.group} of the token names no group of this gateway. Ask the operator to add one of "
                "your groups to auth.jwt.groups."
            )
        return self.groups[group]


@dataclass(frozen=True, slots=True)
class _Verified:
    """A verified token: its caller, the Unix time until which it is kept, and the key that verified it."""

    rule: KeyRule
    until: float
    key_id: str | None
    algorithm: str
    key: Any


class BearerTokens(TokenCallers):
    """Find the callers of tokens.

    Args:
        verifier: verifies tokens of the identity provider.
        keys: its public keys.
        rules: how claims become a caller.
        wall: Unix time in seconds.
    """

    def __init__(
        self, verifier: TokenVerifier, keys: KeySource, rules: ClaimRules, wall: Callable[[], float] = time.time
    ) -> None:
        self.issuer = verifier.issuer
        self.keys = keys
        self._verifier = verifier
        self._rules = rules
        self._wall = wall
        self._verified = BoundedDict[bytes, _Verified](_MOST_KEPT)

    def rule(self, token_digest: bytes) -> KeyRule | None:
        """Return the rule of a token that `verify` has verified and that is still valid, by its digest."""
        kept = self._verified.get(token_digest)
        if kept is None or self._wall() >= kept.until:
            return None
        # The identity provider may have withdrawn the key since.
        return kept.rule if self.keys.find(kept.key_id, kept.algorithm) is kept.key else None

    async def verify(self, headers: Headers) -> None:
        """Verify the tokens in the headers. Those of other issuers are ignored: they can be meant for a provider.

        Raises:
            Unauthenticated: a token of this issuer is not valid. It is refused even with a client key, so that it
                cannot reach a provider as an unknown credential.
            Forbidden: the caller is in no configured group.
            InvalidRequest: two tokens name different callers.
            SigningKeysUnavailable: the key of the token is unknown, and the keys cannot be read.
        """
        names = set()
        for name, value in headers:
            text = credential(value) if name in CREDENTIALS else ""
            token = text.rpartition(" ")[2]
            rule = await self._verify(token) if token.startswith(_BEGINNING) else None
            if rule is not None and token != text:
                raise Unauthenticated('The token follows another word than Bearer. Send it as "Bearer TOKEN".')
            if rule is not None:
                names.add(rule.name)
        if len(names) > 1:
            raise InvalidRequest(f"The request has tokens of {len(names)} callers. Send only one token.")

    async def _verify(self, token: str) -> KeyRule | None:
        token_digest = digest(token)
        rule = self.rule(token_digest)
        if rule is not None:
            return rule
        if len(token) > _MOST_CHARACTERS:
            raise Unauthenticated(
                f"The token has {len(token):,} characters; the limit is {_MOST_CHARACTERS:,}. Request one with fewer "
                "claims."
            )
        head = read_head(token)
        if head is None and token.count(".") == _DOTS:
            # It may be a token of this issuer with a typing error. Encrypted tokens, of other issuers, have more parts.
            raise Unauthenticated("The token is not a valid JWT. Copy it again.")
        if head is None or head.issuer != self.issuer:
            return None
        algorithm, key = await self._key(head)
        claims = self._verifier.claims(token, key, algorithm)
        rule = self._rules.rule(claims, token_digest)
        until = min(int(claims["exp"]), self._wall() + _KEPT_S) + self._verifier.leeway_s
        self._verified[token_digest] = _Verified(rule, until, head.key_id, algorithm, key)
        return rule

    async def _key(self, head: TokenHead) -> tuple[str, Any]:
        """Return the algorithm of a token and the key for it."""
        algorithm, accepted = head.algorithm, self._verifier.algorithms
        if not isinstance(algorithm, str) or algorithm not in accepted:
            raise Unauthenticated(
                f"The token is signed with an algorithm that is not accepted. Accepted: {', '.join(accepted)} "
                "(auth.jwt.algorithms)."
            )
        key = self.keys.find(head.key_id, algorithm)
        if key is None:
            await self.keys.read_again()
            key = self.keys.find(head.key_id, algorithm)
        if key is not None:
            return algorithm, key
        if self.keys.failure is not None:
            raise SigningKeysUnavailable(
                "The token cannot be checked, because the keys of the identity provider cannot be read. Try "
                "again later."
            )
        raise Unauthenticated("The token is signed with an unknown key. Get a new one from the identity provider.")

    def limits(self) -> dict[AccountKey, Limits]:
        """Return the budgets of the callers whose tokens this worker keeps."""
        return {AccountKey("key", kept.rule.name): kept.rule.budget.limits for kept in self._verified.values()}

    async def aclose(self) -> None:
        """Stop reading keys."""
        await self.keys.aclose()
