"""Authenticate callers: client keys, bearer tokens, the admin key, and requests without any of them.

Keys are hashed and looked up by digest. So the response time does not reveal how much of a guessed key is correct.
"""

from __future__ import annotations

import hashlib
import ipaddress
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Final, Protocol

from gateway.call.types import Caller
from gateway.core.errors import Forbidden, InvalidRequest, Unauthenticated
from gateway.core.http.headers import CREDENTIALS, Headers, credential, header
from gateway.core.ledger.arithmetic import NO_LIMITS, Claim, Limits
from gateway.core.ledger.charging import NO_KEY_BUDGET, KeyLimits, SharedBudgets
from gateway.core.ledger.session_key import ANONYMOUS, CREDENTIAL_PREFIX, OPEN_NAMESPACE
from gateway.core.stored import StoredKey
from gateway.core.times import time_text
from gateway.core.values import dataclass

#: headers that a reverse proxy sets: the peer is then not the caller
_FORWARDED: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
#: headers that a request may have only once (RFC 9110, section 11.6.2; RFC 9112, section 3.2)
_UNIQUE_HEADERS: Final = (b"host", *sorted(CREDENTIALS))
#: number of hexadecimal digits of the hash of an unknown credential that are shown
_HASH_DIGITS: Final = 8
_NOTHING_SHARED: Final = SharedBudgets()
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
#: actors in the audit log
ADMIN_KEY: Final = "admin key"
THIS_MACHINE: Final = "this machine without a key"


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One client key, or one token: its name, digest, allowed models and budget.

    Attributes:
        expires_at: Unix time in seconds from which the key is refused; None: never.
        replaced_until: the same for this secret, if a rotation has replaced it.
        is_admin: it may use /api like the admin key.
    """

    name: str
    digest: bytes
    models: tuple[str, ...] = ()
    budget: KeyLimits = NO_KEY_BUDGET
    expires_at: float | None = None
    replaced_until: float | None = None
    is_admin: bool = False

    @classmethod
    def of(cls, key: StoredKey, secret: bytes, shared: SharedBudgets) -> KeyRule:
        """Return the rule of a client key for a caller that sends the secret with this digest."""
        limits = KeyLimits(key.limits, key.rpm, shared.claims(key.group), key.group)
        return cls(key.name, secret, key.models, limits, key.expires_at, key.accepts_until(secret))

    def end(self, now: float) -> str | None:
        """Return why this secret is no longer accepted, or None if it is."""
        if self.replaced_until is not None and now >= self.replaced_until:
            return (
                f'This secret of the client key "{self.name}" was replaced and ended at '
                f"{_shown(self.replaced_until)}. Use the new one."
            )
        if self.expires_at is not None and now >= self.expires_at:
            return (
                f'The client key "{self.name}" expired at {_shown(self.expires_at)}. Ask the operator to extend it: '
                f"gateway keys set {self.name} --expires DATE, or expires in auth.keys."
            )
        return None


def _shown(time: float) -> str:
    return time_text(time).replace(".000Z", "Z")


class TokenCallers(Protocol):
    """The callers of bearer tokens of the identity provider."""

    async def verify(self, headers: Headers) -> None:
        """Verify the tokens in the headers.

        Raises:
            GatewayError: the request is refused because of its tokens.
        """
        ...

    def rule(self, token_digest: bytes) -> KeyRule | None:
        """Return the rule of a verified token by its digest, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """What a caller of /api may see and change.

    Attributes:
        namespace: whose sessions it may see; None: all.
        limits: the budget of its client key.
        shared: the budgets that this key shares with others.
        actor: the credential of an administrator, for the audit log.
    """

    namespace: str | None
    admin: bool
    limits: Limits = NO_LIMITS
    shared: tuple[Claim, ...] = ()
    actor: str = field(default="an administrator", compare=False)


def check_single(headers: Headers) -> None:
    """Refuse a request with a repeated credential or host header, because a proxy may read the other one.

    Raises:
        InvalidRequest: such a header is repeated.
    """
    if len(dict(headers)) == len(headers):
        return
    names = [name for name, _ in headers]
    for name in _UNIQUE_HEADERS:
        if (number := names.count(name)) > 1:
            shown = name.decode()
            raise InvalidRequest(f"The request has {number} headers named {shown}. Send only one.", param=shown)


def require_admin(access: Access) -> None:
    """Refuse a caller without full access.

    Raises:
        Forbidden: the caller is not an administrator.
    """
    if not access.admin:
        raise Forbidden(
            "This needs the admin key (auth.admin_key). If none is set, call from the gateway's own machine without a "
            "client key."
        )


def digest(key: str) -> bytes:
    """Return the SHA-256 of a key, by which it is stored and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Authenticator:
    """Authenticate callers by the headers and the peer's address.

    `Host` and `X-Forwarded-For` can only remove rights.

    Args:
        keys: the configured client keys.
        admin_key: key for changes under /api; None: only this machine may make changes.
        origins: origins of other web pages that may call.
        stored: returns the present client keys of the store, by digest.
        tokens: the callers of bearer tokens; None: no tokens are accepted.
        is_required: every call needs a client key, even if none exists.
        shared: the budgets that client keys of the store share.
        now: returns Unix time in seconds.
    """

    def __init__(
        self,
        keys: Sequence[KeyRule],
        admin_key: str | None,
        origins: Sequence[str] = (),
        stored: Callable[[], Mapping[bytes, StoredKey]] = dict,
        tokens: TokenCallers | None = None,
        *,
        is_required: bool = False,
        shared: SharedBudgets = _NOTHING_SHARED,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._origins = frozenset(origins)
        self._configured = {rule.digest: rule for rule in keys}
        self._stored = stored
        self._tokens = tokens
        #: rules made from the keys that were read last, because each call needs one
        self._stored_rules: dict[bytes, KeyRule] = {}
        self._keys_of_rules: Mapping[bytes, StoredKey] = {}
        self._is_required = is_required
        self._shared = shared
        self._now = now
        self._admin = digest(admin_key) if admin_key is not None else None

    async def verify_tokens(self, headers: Headers) -> None:
        """Verify bearer tokens, before `caller` or `api` looks for the caller.

        Raises:
            GatewayError: the request is refused because of its tokens.
        """
        if self._tokens is not None:
            await self._tokens.verify(headers)

    def caller(self, headers: Headers, peer: str | None, *, reads: bool = False) -> Caller:
        """Return the caller of a request that is to be forwarded.

        `reads`: the request is a GET or HEAD, with which browsers may send no `Origin`.

        Raises:
            InvalidRequest: a credential or the host header is repeated.
            Unauthenticated: client keys are configured, and the request has none that is known and in force.
            Forbidden: a web page of another origin sends the request without a client key.
        """
        check_single(headers)
        needs_key = self.needs_key
        # Without configured keys, no credential needs to be hashed.
        presented = _credentials(headers) if needs_key or self._admin is not None else []
        own = frozenset([name for name, value in presented if self._rule(value) or value == self._admin])
        if needs_key:
            rule = self._rule_in_force([value for _, value in presented])
            if rule is None:
                raise Unauthenticated(
                    'The request has no known client key. Send one as "Authorization: Bearer KEY" or in x-api-key. '
                    "Configure keys in auth.keys, or create one: gateway keys add NAME."
                    if self._tokens is None
                    else "The request has no known client key, and no token of the issuer in auth.jwt.issuer. Send one "
                    'of them as "Authorization: Bearer TOKEN" or in x-api-key.'
                )
            return Caller(rule.name, rule.models, own, rule.budget)
        origin = _origin(headers)
        if origin or reads:
            self._refuse_other_origins(origin, headers)
            self._refuse_rebound_names(origin, headers, peer)
        return Caller(OPEN_NAMESPACE if _is_loopback(peer) else _namespace_of(headers), (), own)

    def api(self, headers: Headers, peer: str | None) -> Access:
        """Return what the sender of an /api request may see and change.

        Raises:
            Unauthenticated: the sender has no access.
            Forbidden: a web page of another origin sends the request.
        """
        self._refuse_other_origins(_origin(headers), headers)
        presented = [value for _, value in _credentials(headers)]
        if self._admin in presented:
            return Access(None, admin=True, actor=ADMIN_KEY)
        rule = self._rule_in_force(presented)
        if rule is not None:
            # A client key selects its own sessions, also for requests from this machine.
            own = Access(rule.name, admin=False, limits=rule.budget.limits, shared=rule.budget.shared)
            return Access(None, admin=True, actor=f"token of {rule.name}") if rule.is_admin else own
        if self._admin is None and _is_direct_loopback(headers, peer) and not _is_foreign_page(headers):
            return Access(None, admin=True, actor=THIS_MACHINE)
        if not self.needs_key and presented and not _is_loopback(peer):
            return Access(_namespace_of(headers), admin=False)
        if not self.needs_key and _is_loopback(peer) and not _is_rebound_name(headers, peer):
            return Access(OPEN_NAMESPACE, admin=False)
        raise Unauthenticated('Send your client key, or the admin key, as "Authorization: Bearer KEY".')

    @property
    def needs_key(self) -> bool:
        """Return whether calls need a client key."""
        return self._is_required or self._tokens is not None or bool(self._configured or self._stored())

    def _rule(self, value: bytes) -> KeyRule | None:
        """Return the client key with this digest, or None. A configured key has priority over a stored one."""
        configured = self._configured.get(value)
        if configured is not None:
            return configured
        if self._tokens is not None and (verified := self._tokens.rule(value)) is not None:
            return verified
        keys = self._stored()
        if keys is not self._keys_of_rules:
            self._keys_of_rules, self._stored_rules = keys, {}
        rule = self._stored_rules.get(value)
        if rule is None and (key := keys.get(value)) is not None:
            rule = self._stored_rules[value] = KeyRule.of(key, value, self._shared)
        return rule

    def _rule_in_force(self, presented: Sequence[bytes]) -> KeyRule | None:
        """Return the first presented client key that is in force, or None if none is known.

        Raises:
            Unauthenticated: all known ones have ended.
        """
        ends = list[str]()
        for value in presented:
            rule = self._rule(value)
            if rule is not None:
                end = rule.end(self._now())
                if end is None:
                    return rule
                ends.append(end)
        if ends:
            raise Unauthenticated(ends[0])
        return None

    def _refuse_other_origins(self, origin: str, headers: Headers) -> None:
        if not origin or origin in self._origins:
            return
        host = header(headers, b"host").decode("latin-1").lower()
        if origin.partition("://")[2] != host:
            raise foreign_page(origin)

    def _refuse_rebound_names(self, origin: str, headers: Headers, peer: str | None) -> None:
        """Refuse a web page whose host name was pointed at this machine (DNS rebinding).

        Its origin would look like the gateway's own.
        """
        if origin in self._origins or not _is_rebound_name(headers, peer):
            return
        if origin:
            raise Forbidden(
                f"Web pages at {origin[:100]} need a client key to call this machine. Allow the origin in "
                "server.cors_origins, or open the page at localhost."
            )
        host = header(headers, b"host").decode("latin-1")[:100]
        raise Forbidden(
            f"Host {host} needs a client key (protection against DNS rebinding). Use localhost or 127.0.0.1, or send "
            "a client key."
        )


def foreign_page(origin: str) -> Forbidden:
    """Return the error for a web page of another origin that is not allowed."""
    return Forbidden(
        f"Web pages of another origin ({origin[:100]}) may not call. Allow this origin in server.cors_origins."
    )


def credential_hash(headers: Headers) -> str | None:
    """Return a short hash of the first credential in the headers, or None without a credential.

    It is a prefix of the key's SHA-256. It identifies the refusals of a known key, but does not reveal the key.
    """
    keys = (credential(value) for name, value in headers if name in CREDENTIALS)
    return next((digest(key).hex()[:_HASH_DIGITS] for key in keys if key), None)


def _credentials(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return (header, digest of its value) for each header that may contain a key."""
    return [(name, digest(credential(value))) for name, value in headers if name in CREDENTIALS]


def _origin(headers: Headers) -> str:
    """Return the origin of the web page that sends the request, or an empty text."""
    return header(headers, b"origin").decode("latin-1").lower()


def _namespace_of(headers: Headers) -> str:
    """Return the namespace of a caller without a client key: derived from the provider credential that it sends."""
    presented = _credentials(headers)
    return f"{CREDENTIAL_PREFIX}{presented[0][1].hex()[:16]}" if presented else ANONYMOUS


@lru_cache(maxsize=1024)
def _is_loopback(peer: str | None) -> bool:
    if peer is None:
        return False
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_direct_loopback(headers: Headers, peer: str | None) -> bool:
    """Return True for a request from this machine that names it as localhost and passed through no proxy."""
    if not _is_loopback(peer) or any(name in _FORWARDED for name, _ in headers):
        return False
    host = header(headers, b"host").decode("latin-1")
    return _without_port(host) in _LOCAL_NAMES


def _is_rebound_name(headers: Headers, peer: str | None) -> bool:
    """Return True for a request from this machine, through no known proxy, with another host name (DNS rebinding)."""
    is_direct = _is_loopback(peer) and not any(name in _FORWARDED for name, _ in headers)
    return is_direct and not _is_direct_loopback(headers, peer)


def _is_foreign_page(headers: Headers) -> bool:
    """Return True if a web page of another machine sends the request, even one in server.cors_origins."""
    origin = _origin(headers)
    return bool(origin) and _without_port(origin.partition("://")[2]) not in _LOCAL_NAMES


def _without_port(host: str) -> str:
    return host if host.endswith("]") else host.rpartition(":")[0] or host
