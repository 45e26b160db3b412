"""Authenticate callers: client keys, the admin key, and requests without either.

Presented keys are hashed and looked up by digest, so that how long the answer takes says nothing about how much of a
key was right.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from gateway.call.types import Caller
from gateway.core.errors import Forbidden, InvalidRequest, Unauthenticated
from gateway.core.http.headers import CREDENTIALS, Headers, credential, header
from gateway.core.ledger.arithmetic import NO_LIMITS, Limits
from gateway.core.ledger.charging import NO_KEY_BUDGET, KeyLimits
from gateway.core.ledger.session_key import ANONYMOUS, CREDENTIAL_PREFIX, OPEN_NAMESPACE
from gateway.core.stored import StoredKey
from gateway.core.values import dataclass

#: set by a reverse proxy: the peer is then not the caller
_FORWARDED: Final = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
#: headers that a request may have once (RFC 9110, section 11.6.2; RFC 9112, section 3.2)
_SINGLE: Final = (b"host", *sorted(CREDENTIALS))
#: hexadecimal digits that are shown of the hash of an unknown credential
_HASH_DIGITS: Final = 8
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True, slots=True)
class KeyRule:
    """One client key, by the digest of the key."""

    name: str
    digest: bytes
    models: tuple[str, ...] = ()
    budget: KeyLimits = NO_KEY_BUDGET


@dataclass(frozen=True, slots=True)
class Access:
    """What a caller of /api may do. `namespace` None: all sessions; `limits`: the budget of its client key."""

    namespace: str | None
    admin: bool
    limits: Limits = NO_LIMITS


def check_single(headers: Headers) -> None:
    """Refuse a request that has a credential or its host twice: another program on the way may read the other one.

    Raises:
        InvalidRequest: it has.
    """
    if len(dict(headers)) == len(headers):
        return
    names = [name for name, _ in headers]
    for name in _SINGLE:
        if (number := names.count(name)) > 1:
            shown = name.decode()
            raise InvalidRequest(f"The request has {number} headers named {shown}. Send one.", param=shown)


def require_admin(access: Access) -> None:
    """Refuse whoever may not see and change everything.

    Raises:
        Forbidden: they may not.
    """
    if not access.admin:
        raise Forbidden(
            "This needs the admin key (auth.admin_key) or, where none is set, a call from this machine without a "
            "client key."
        )


def digest(key: str) -> bytes:
    """How a key is kept and compared."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Authenticator:
    """Decides from the headers and the peer's address. What `Host` or `X-Forwarded-For` says only takes rights away.

    Args:
        keys: the configured client keys.
        admin_key: what writes under /api need; None: they are for this machine.
        origins: of web pages that may call although they are not ours.
        stored: further client keys, by digest, as they are now.
        is_required: nobody calls without a client key, even where there is none at all.
    """

    def __init__(
        self,
        keys: Sequence[KeyRule],
        admin_key: str | None,
        origins: Sequence[str] = (),
        stored: Callable[[], Mapping[bytes, StoredKey]] = dict,
        *,
        is_required: bool = False,
    ) -> None:
        self._origins = frozenset(origins)
        self._configured = {rule.digest: rule for rule in keys}
        self._stored = stored
        self._is_required = is_required
        self._admin = digest(admin_key) if admin_key is not None else None

    def caller(self, headers: Headers, peer: str | None, *, reads: bool = False) -> Caller:
        """Who sends a call to be forwarded. `reads`: it is one for which browsers need not say whose page asks.

        Raises:
            InvalidRequest: it has a credential or its host twice.
            Unauthenticated: client keys are configured and none was sent.
            Forbidden: a web page of another origin sends it, and nothing else would stop it.
        """
        check_single(headers)
        needs_key = self._needs_key
        # Where there is no key of ours, none can have been sent.
        presented = _credentials(headers) if needs_key or self._admin is not None else []
        own = frozenset([name for name, value in presented if self._rule(value) or value == self._admin])
        if needs_key:
            rule = next((rule for _, value in presented if (rule := self._rule(value))), None)
            if rule is None:
                raise Unauthenticated(
                    'A client key is needed and none that is known was sent. Send it as "Authorization: Bearer KEY" '
                    "or in x-api-key; keys are listed under auth.keys, or made by: gateway keys add NAME."
                )
            return Caller(rule.name, rule.models, own, rule.budget)
        origin = _origin(headers)
        if origin or reads:
            self._refuse_other_origins(origin, headers)
            self._refuse_pointed_names(origin, headers, peer)
        return Caller(OPEN_NAMESPACE if _is_loopback(peer) else _namespace_of(headers), (), own)

    def api(self, headers: Headers, peer: str | None) -> Access:
        """What the sender of an /api request may see and do.

        Raises:
            Unauthenticated: it may see nothing.
            Forbidden: a web page of another origin sends it.
        """
        self._refuse_other_origins(_origin(headers), headers)
        presented = [value for _, value in _credentials(headers)]
        if self._admin in presented:
            return Access(None, admin=True)
        for value in presented:
            rule = self._rule(value)
            if rule is not None:
                # Also from this machine: whoever shows a key means its sessions.
                return Access(rule.name, admin=False, limits=rule.budget.limits)
        if self._admin is None and _is_direct_loopback(headers, peer) and not _is_foreign_page(headers):
            return Access(None, admin=True)
        if not self._needs_key and presented and not _is_loopback(peer):
            return Access(_namespace_of(headers), admin=False)
        if not self._needs_key and _is_loopback(peer) and not _is_pointed_name(headers, peer):
            return Access(OPEN_NAMESPACE, admin=False)
        raise Unauthenticated('Send your client key, or the admin key, as "Authorization: Bearer KEY".')

    @property
    def _needs_key(self) -> bool:
        return self._is_required or bool(self._configured or self._stored())

    def _rule(self, value: bytes) -> KeyRule | None:
        """The client key of this digest. A configured one stands before a stored one of the same key."""
        configured = self._configured.get(value)
        if configured is not None:
            return configured
        stored = self._stored().get(value)
        if stored is None:
            return None
        return KeyRule(stored.name, stored.digest, stored.models, KeyLimits(stored.limits, stored.rpm))

    def _refuse_other_origins(self, origin: str, headers: Headers) -> None:
        if not origin or origin in self._origins:
            return
        host = header(headers, b"host").decode("latin-1").lower()
        if origin.partition("://")[2] != host:
            raise foreign_page(origin)

    def _refuse_pointed_names(self, origin: str, headers: Headers, peer: str | None) -> None:
        """Refuse a page whose own name was pointed at this machine: its origin would look like ours."""
        if origin in self._origins or not _is_pointed_name(headers, peer):
            return
        if origin:
            raise Forbidden(
                f"Web pages at {origin[:100]} may not call this machine without a client key; allow this origin under "
                "server.cors_origins, or open the page at localhost."
            )
        host = header(headers, b"host").decode("latin-1")[:100]
        raise Forbidden(
            f"Nobody may read from this machine by the name {host} without a client key, as a web page might: call it "
            "localhost or 127.0.0.1, or send a client key."
        )


def foreign_page(origin: str) -> Forbidden:
    """Why a web page may not call that is neither ours nor of an origin that is let in."""
    return Forbidden(
        f"Web pages of other origins ({origin[:100]}) may not call; allow this one under server.cors_origins."
    )


def credential_hash(headers: Headers) -> str | None:
    """Return a short hash of the first credential in the headers; None where there is none.

    It is a prefix of the key's SHA-256. With the key, its refusals can be found; the key cannot be derived from it.
    """
    keys = (credential(value) for name, value in headers if name in CREDENTIALS)
    return next((digest(key).hex()[:_HASH_DIGITS] for key in keys if key), None)


def _credentials(headers: Headers) -> list[tuple[bytes, bytes]]:
    """(header, digest of what it holds) for each header that may hold a key."""
    return [(name, digest(credential(value))) for name, value in headers if name in CREDENTIALS]


def _origin(headers: Headers) -> str:
    """The origin of the web page that sends it; empty where none does, or none that says so."""
    return header(headers, b"origin").decode("latin-1").lower()


def _namespace_of(headers: Headers) -> str:
    """Without client keys, callers from the network are told apart by the provider credential they bring."""
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
    """From this machine, not through a proxy on it, and not from a page whose name was pointed at this machine."""
    if not _is_loopback(peer) or any(name in _FORWARDED for name, _ in headers):
        return False
    host = header(headers, b"host").decode("latin-1")
    return _without_port(host) in _LOCAL_NAMES


def _is_pointed_name(headers: Headers, peer: str | None) -> bool:
    """From this machine, through no proxy that says so, and by a name that is not this machine's (DNS rebinding)."""
    is_direct = _is_loopback(peer) and not any(name in _FORWARDED for name, _ in headers)
    return is_direct and not _is_direct_loopback(headers, peer)


def _is_foreign_page(headers: Headers) -> bool:
    """Whether a web page sends it that is not from this machine, also one that may call (server.cors_origins)."""
    origin = _origin(headers)
    return bool(origin) and _without_port(origin.partition("://")[2]) not in _LOCAL_NAMES


def _without_port(host: str) -> str:
    return host if host.endswith("]") else host.rpartition(":")[0] or host
