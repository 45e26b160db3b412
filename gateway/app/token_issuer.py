"""Build what accepts the bearer tokens of the identity provider, from the settings under `auth.jwt`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gateway.config import Settings
from gateway.config.access import TokenGroup, TokenIssuer
from gateway.config.policies import limits_of, shared_budgets
from gateway.core.claims import OTHERS
from gateway.core.errors import ConfigError
from gateway.core.ledger.charging import KeyLimits, SharedBudgets
from gateway.server.bearer_tokens import BearerTokens, ClaimRules, TokenRights
from gateway.server.signing_keys import TIMEOUT_S, FetchedKeys, FixedKeys, KeyDocument, KeySource, KnownKeys
from gateway.server.token_verifier import PublicKeys, TokenVerifier, load_packages, read_keys
from gateway.upstream import http


def bearer_tokens_of(settings: Settings, earlier: BearerTokens | None = None) -> BearerTokens | None:
    """Return what accepts tokens, or None if `auth.jwt` is not set. Needs a running event loop.

    `earlier`: the one before a reload. Its keys are known from the start if they have the same address.

    Raises:
        ConfigError: a package is missing, or the file with the keys cannot be used.
    """
    row = settings.auth.jwt
    if row is None:
        return None
    load_packages()
    verifier = TokenVerifier(row.issuer, row.audiences, row.algorithms, row.leeway_s)
    shared, zone = shared_budgets(settings), settings.timezone
    groups = {name: _rights_of(name, group, shared, zone) for name, group in row.groups.items()}
    ungrouped = TokenRights(budget=KeyLimits(shared=shared.claims(None)))
    rules = ClaimRules(row.claims.name, row.claims.group, groups, ungrouped)
    return BearerTokens(verifier, _keys_of(row, earlier), rules)


def _rights_of(name: str, row: TokenGroup, shared: SharedBudgets, zone: str) -> TokenRights:
    """Return the rights of a group. It shares the budget of the group of client keys with the same name."""
    group = name if name != OTHERS else None
    limits = KeyLimits(limits_of(row.budget, zone), row.rpm, shared.claims(group), group)
    return TokenRights(row.models, limits, row.admin)


def check_token_issuer(row: TokenIssuer) -> None:
    """Check that tokens can be accepted, without asking the identity provider.

    Raises:
        ConfigError: a package is missing, or the file with the keys cannot be used.
    """
    load_packages()
    if row.key_file is not None:
        _keys_in_file(row.key_file, row)


def _keys_of(row: TokenIssuer, earlier: BearerTokens | None) -> KeySource:
    if row.jwks_url is None:
        return FixedKeys(_keys_in_file(row.key_file or "", row))
    timeouts = http.UpstreamTimeouts(TIMEOUT_S, TIMEOUT_S, TIMEOUT_S)
    upstream = http.HttpUpstream(
        "auth.jwt", row.jwks_url, timeouts, max_connections=1, proxy=http.proxy_for(row.jwks_url)
    )
    document = KeyDocument(upstream, row.jwks_url)
    return FetchedKeys(document, partial(read_keys, algorithms=row.algorithms), _known_keys(row, earlier))


def _known_keys(row: TokenIssuer, earlier: BearerTokens | None) -> KnownKeys | None:
    source = earlier.keys if earlier is not None else None
    if not isinstance(source, FetchedKeys) or source.document.url != row.jwks_url or not source.known.document:
        return None
    known = source.known
    try:
        # Other algorithms may be accepted now.
        return KnownKeys(read_keys(known.document, row.algorithms), known.document, known.read_at)
    except ValueError:
        return None


def _keys_in_file(path: str, row: TokenIssuer) -> PublicKeys:
    try:
        return read_keys(Path(path).read_bytes(), row.algorithms)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:
        problem = str(error)
    raise ConfigError([f"auth.jwt.key_file: {path} {problem}"])
