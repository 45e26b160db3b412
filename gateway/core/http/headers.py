"""Decide which headers are forwarded, and with which credential.

Names are lower-case bytes, as ASGI and HTTP/2 have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Final, Literal
from urllib.parse import unquote_plus

from gateway.core.errors import Unauthenticated
from gateway.core.http.gateway_headers import OURS
from gateway.core.values import dataclass

Headers = list[tuple[bytes, bytes]]
AuthStyle = Literal["bearer", "x-api-key", "api-key", "none"]

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
#: How the names of other headers end that hold a credential: of other providers, and of gateways that a client was set
#: up for.
_CREDENTIAL_ENDINGS: Final = (
    *(b"api-key", b"apikey", b"subscription-key", b"virtual-key", b"litellm-key", b"-vk", b"-auth", b"-authorization"),
    *(b"-secret", b"auth-token", b"access-token", b"security-token", b"authorization-token", b"private-token"),
)
#: Headers that say which of a key's accounts is billed. With another key they are refused, or name an account of
#: somebody else.
_ACCOUNTS: Final = frozenset({b"openai-organization", b"openai-project", b"x-goog-user-project"})
#: parameters in the query of a URL that hold a credential
_CREDENTIAL_PARAMETERS: Final = frozenset({"key", "api_key", "api-key", "apikey", "access_token"})
#: Characters of the shortest secret that is masked. Shorter ones stand in too many words, such as EMPTY, which servers
#: are given that want any key.
_SHORTEST_SECRET: Final = 8
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    }
)  # fmt: skip
#: headers of one connection, or written anew by the client that sends the request on
FRAMING: Final = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
#: headers that tell of the caller, and are not the provider's business
_PRIVATE: Final = frozenset(
    {
        b"cookie", b"origin", b"referer",
        b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip",
        b"x-forwarded-port", b"x-forwarded-prefix", b"x-forwarded-server", b"x-forwarded-ssl",
        b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip", b"cf-connecting-ip", b"cf-connecting-ipv6",
    }
)  # fmt: skip
#: Headers by which some servers are told another method or path than that of the request: it would be metered as one
#: thing and answered as another.
_OVERRIDES: Final = frozenset(
    {b"x-http-method", b"x-http-method-override", b"x-method-override", b"x-original-url", b"x-rewrite-url"}
)
_NOT_SENT: Final = FRAMING | _PRIVATE | _OVERRIDES | OURS
#: headers that tell a browser what to keep or do for a whole site, which here is the gateway with its dashboard
_OF_A_SITE: Final = frozenset(
    {
        b"set-cookie", b"set-cookie2", b"alt-svc", b"strict-transport-security", b"clear-site-data", b"refresh",
        b"service-worker-allowed", b"report-to", b"nel",
    }
)  # fmt: skip
_NOT_RETURNED: Final = _HOP_BY_HOP | _OF_A_SITE | {b"content-length"}
#: the content type of a stream of events
EVENTS: Final = b"text/event-stream"
#: the first digit of the statuses that say so
_SUCCESS: Final = 2
#: statuses whose answers have no body, whatever their heads announce
BODILESS: Final = frozenset({204, 304})
#: Content types that no browser shows as a page. Answers of all others are sandboxed: a script in one would run as if
#: it were the dashboard's.
_NO_PAGE: Final = (b"application/json", EVENTS)
_SANDBOX: Final = (b"content-security-policy", b"sandbox")
#: How the names of headers begin that only this gateway may send: a provider that is such a gateway, too, tells of its
#: own sessions.
OUR_NAMES: Final = (b"x-session-", b"x-context-", b"x-gateway-", b"x-token-usage", b"x-response-mode")
_OUR_PREFIXES: Final = (*OUR_NAMES, b"access-control-")
_UNSENDABLE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: the header that carries the credential
AUTH_HEADER: Final[Mapping[AuthStyle, bytes]] = {
    "bearer": b"authorization",
    "x-api-key": b"x-api-key",
    "api-key": b"api-key",
}


@dataclass(frozen=True)
class ProviderAddress:
    """What is needed to address one provider.

    `key` empty: the caller's own credential is forwarded.
    `key_prefixes`: how its keys begin; empty where that is not known.
    `dialects`: the formats that it takes; None: nobody says.
    `limit_field`: the field in which a chat call is given a limit of its answer, where it has no such field itself or
    one that may not be known there.
    `allowed_tools`: a request may name some of its tools as those that may be called.
    `reports_cost`: its usage says what a call costs in USD, which is charged in place of list prices.
    `compaction`: it compacts conversations (Responses API); None: not known, so that it is asked first.
    `strict_fields`: it refuses a request with a field that it does not know.
    `billed_refusals`: categories of a refusal before any output that it bills; None: it bills all.
    `is_translated`: its requests are translated into another format.
    `guarded`: no key that looks like another provider's is sent to it, even where `key_prefixes` is empty.
    """

    name: str
    base_url: str
    auth: AuthStyle = "bearer"
    key: str = field(default="", repr=False)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    key_prefixes: tuple[str, ...] = ()
    limit_field: str = "max_tokens"
    allowed_tools: bool = False
    reports_cost: bool = False
    compaction: bool | None = None
    guarded: bool = False
    dialects: tuple[str, ...] | None = None
    billed_refusals: tuple[str, ...] | None = None
    strict_fields: bool = False
    is_translated: bool = False

    def url(self, path: str, query: str) -> str:
        """The absolute address of a path relative to `/v1/`, both already encoded.

        As with headers, no credential of the caller's goes to a provider that needs none.
        """
        if query and self.holds_credential:
            query = "&".join([one for one in query.split("&") if not _is_credential_parameter(one)])
        return f"{self.base_url}/{path}?{query}" if query else f"{self.base_url}/{path}"

    @cached_property
    def has_key(self) -> bool:
        """Whether it is called with a credential of the gateway's: where that is refused, no caller can mend it."""
        return bool(self.key) or any(name in CREDENTIALS for name, _ in self.headers)

    @cached_property
    def holds_credential(self) -> bool:
        """Whether a call to it needs no credential of the caller's."""
        return self.auth == "none" or self.has_key


def _is_credential_parameter(parameter: str) -> bool:
    return unquote_plus(parameter.partition("=")[0]).lower() in _CREDENTIAL_PARAMETERS


def secrets_of(provider: ProviderAddress) -> tuple[bytes, ...]:
    """The secrets that nobody may read in its answers."""
    fixed = [credential(value) for name, value in provider.headers if is_credential(name)]
    return tuple([one.encode() for one in (provider.key, *fixed) if len(one) >= _SHORTEST_SECRET])


def masked(text: bytes, secrets: Iterable[bytes]) -> bytes:
    """A text without the secrets in it: some servers repeat the key that they refuse."""
    for secret in secrets:
        text = text.replace(secret, b"***")
    return text


def masked_values(headers: Headers, secrets: Sequence[bytes]) -> Headers:
    """The headers of an answer without the secrets in their values. Hardly any has one: all are looked at in one go."""
    values = b"\n".join([value for _, value in headers]) if secrets else b""
    for secret in secrets:
        if secret in values:
            return [(name, masked(value, secrets)) for name, value in headers]
    return headers


def is_credential(name: bytes) -> bool:
    """Whether a header of this name holds a credential, of whatever provider."""
    return bool(_credentials_among((name,)))


def _credentials_among(names: Iterable[bytes]) -> set[bytes]:
    return {name for name in names if name in CREDENTIALS or name.endswith(_CREDENTIAL_ENDINGS)}


def request_headers(
    headers: Sequence[tuple[bytes, bytes]],
    provider: ProviderAddress,
    *,
    client_key_headers: frozenset[bytes],
    decompressed: bool,
) -> Headers:
    """The headers to send to a provider.

    Args:
        headers: as the client sent them.
        provider: who gets them.
        client_key_headers: those that held one of the gateway's own keys; never forwarded.
        decompressed: the body was packed and is sent unpacked.
    """
    names = dict(headers)
    dropped = _NOT_SENT.intersection(names) | _named_by_connection(headers)
    if provider.has_key:
        dropped |= _ACCOUNTS
    if decompressed:
        dropped |= {b"content-encoding"}
    dropped |= _credentials_among(names if provider.holds_credential else client_key_headers)
    sent = [pair for pair in headers if pair[0] not in dropped]
    present = dict(sent) if provider.headers else {}
    if provider.key:
        sent.append(_own_credential(provider))
    sent += [pair for pair in provider.headers if pair[0] not in present]
    # What comes packed would have to be unpacked to be metered; bandwidth to a provider is cheaper than that.
    sent.append((b"accept-encoding", b"identity"))
    return sent


def _own_credential(provider: ProviderAddress) -> tuple[bytes, bytes]:
    value = provider.key.encode("latin-1", "replace")
    return AUTH_HEADER[provider.auth], b"Bearer " + value if provider.auth == "bearer" else value


def check_credential(
    headers: Sequence[tuple[bytes, bytes]], query: str, provider: ProviderAddress, others: Iterable[ProviderAddress]
) -> None:
    """Refuse to hand a caller's credential, in a header or in the URL, to a provider that it plainly is not for.

    Providers mark their keys by how they begin; the longest known beginning decides. A credential that no provider
    claims is forwarded, and so is any to a provider of your own whose keys have no known beginning.

    Raises:
        Unauthenticated: it belongs to another provider.
    """
    if not (provider.guarded or provider.key_prefixes) or provider.holds_credential:
        return
    names = _credentials_among(dict(headers))
    sent = [credential(value) for name, value in headers if name in names]
    if query:
        sent += [unquote_plus(one.partition("=")[2]) for one in query.split("&") if _is_credential_parameter(one)]
    for found in sent:
        # Whatever the scheme before it is called.
        owners = _owners(found.rpartition(" ")[2], others)
        if owners and provider.name not in owners:
            raise Unauthenticated(
                f"The credential sent looks like one of {' or '.join(owners)}, but this model is served by "
                f'"{provider.name}". '
                f'Send a credential of "{provider.name}", or give the gateway one: providers.{provider.name}.key.'
            )


def credential(value: bytes) -> str:
    """The key in a header's value, without the scheme where it is `Bearer`."""
    try:
        text = value.decode().strip()
    except UnicodeDecodeError:
        text = value.decode("latin-1").strip()
    scheme, _, token = text.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else text


def _owners(key: str, providers: Iterable[ProviderAddress]) -> list[str]:
    claims = [
        (len(prefix), provider.name)
        for provider in providers
        for prefix in provider.key_prefixes
        if key.startswith(prefix)
    ]
    longest = max((length for length, _ in claims), default=0)
    return sorted({name for length, name in claims if length == longest})


def response_headers(headers: Sequence[tuple[bytes, bytes]], *, decompressed: bool) -> Headers:
    """The provider's headers that its client may see. `decompressed`: content-encoding no longer holds."""
    dropped = _NOT_RETURNED | _named_by_connection(headers)
    if decompressed:
        dropped |= {b"content-encoding"}
    returned: Headers = []
    is_page = True
    for name, value in headers:
        if name in dropped or name.startswith(_OUR_PREFIXES) or _UNSENDABLE.search(value):
            continue
        if name == b"content-type" and value.lower().startswith(_NO_PAGE):
            is_page = False
        returned.append((name, value))
    if is_page:
        returned.append(_SANDBOX)
    return returned


def is_success(status: int) -> bool:
    """Whether a call was done: 2xx."""
    return status // 100 == _SUCCESS


def content_type(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The media type, in lower case and without its parameters; empty where none is named."""
    return header(headers, b"content-type").partition(b";")[0].strip().lower()


def header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    """The first value of a header; empty where it is absent."""
    return dict(reversed(headers)).get(name, b"")


def by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The first value of each header, in the order in which their names came."""
    named = dict(headers)
    return named if len(named) == len(headers) else named | dict(reversed(headers))


def _named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """A header that `Connection` names is hop-by-hop too (RFC 9110, section 7.6.1)."""
    if b"connection" not in dict(headers):
        return frozenset()
    named = [value for name, value in headers if name == b"connection"]
    tokens = frozenset(token.strip().lower() for value in named for token in value.split(b","))
    return tokens - {b"keep-alive", b"close"}
