"""Select the headers to forward and the credential to send.

Header names are lower-case bytes, as in ASGI and HTTP/2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from typing import Final, Literal
from urllib.parse import unquote_plus

from gateway.core.errors import Unauthenticated
from gateway.core.http.gateway_headers import GATEWAY_HEADERS
from gateway.core.values import dataclass

Headers = list[tuple[bytes, bytes]]
AuthStyle = Literal["bearer", "x-api-key", "api-key", "none"]

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
#: endings of other header names that hold a credential, of other providers or of other gateways
_CREDENTIAL_ENDINGS: Final = (
    *(b"api-key", b"apikey", b"subscription-key", b"virtual-key", b"litellm-key", b"-vk", b"-auth", b"-authorization"),
    *(b"-secret", b"auth-token", b"access-token", b"security-token", b"authorization-token", b"private-token"),
)
#: Headers that select the account to bill. With another key the provider refuses them, or they name an account of
#: another customer.
_ACCOUNTS: Final = frozenset({b"openai-organization", b"openai-project", b"x-goog-user-project"})
#: query parameters that hold a credential
_CREDENTIAL_PARAMETERS: Final = frozenset({"key", "api_key", "api-key", "apikey", "access_token"})
#: Characters of the shortest secret that is masked. Shorter ones, such as EMPTY for a server that accepts any key, are
#: part of ordinary words.
_SHORTEST_SECRET: Final = 8
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings",
    }
)  # fmt: skip
#: headers of one connection, and headers that the HTTP client writes itself
FRAMING: Final = _HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect"}
#: headers that identify the caller and do not concern the provider
_PRIVATE: Final = frozenset(
    {
        b"cookie", b"origin", b"referer",
        b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip",
        b"x-forwarded-port", b"x-forwarded-prefix", b"x-forwarded-server", b"x-forwarded-ssl",
        b"x-client-ip", b"x-cluster-client-ip", b"true-client-ip", b"cf-connecting-ip", b"cf-connecting-ipv6",
    }
)  # fmt: skip
#: Headers that make some servers use another method or path than the request has. The gateway would meter one request
#: and the provider execute another.
_OVERRIDES: Final = frozenset(
    {b"x-http-method", b"x-http-method-override", b"x-method-override", b"x-original-url", b"x-rewrite-url"}
)
_NOT_SENT: Final = FRAMING | _PRIVATE | _OVERRIDES | GATEWAY_HEADERS
#: headers that affect a whole site in a browser; here that is the gateway with its dashboard
_OF_A_SITE: Final = frozenset(
    {
        b"set-cookie", b"set-cookie2", b"alt-svc", b"strict-transport-security", b"clear-site-data", b"refresh",
        b"service-worker-allowed", b"report-to", b"nel",
    }
)  # fmt: skip
_NOT_RETURNED: Final = _HOP_BY_HOP | _OF_A_SITE | {b"content-length"}
#: the content type of server-sent events
EVENTS: Final = b"text/event-stream"
#: the first digit of 2xx
_SUCCESS: Final = 2
#: statuses whose responses have no body, whatever their headers announce
BODILESS: Final = frozenset({204, 304})
#: Content types that no browser shows as a page. All other responses are sandboxed, because a script in them would run
#: with the rights of the dashboard.
_NO_PAGE: Final = (b"application/json", EVENTS)
_SANDBOX: Final = (b"content-security-policy", b"sandbox")
#: Prefixes of headers that only this gateway may send. A provider can itself be such a gateway and report its own
#: sessions.
GATEWAY_PREFIXES: Final = (b"x-session-", b"x-context-", b"x-gateway-", b"x-token-usage", b"x-response-mode")
_OUR_PREFIXES: Final = (*GATEWAY_PREFIXES, b"access-control-")
#: Sets of header names for which the headers to drop are cached. A client or a provider sends few different ones, and
#: the server limits the bytes of each.
_KNOWN_NAMES: Final = 128
_UNSENDABLE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: the header that carries the credential
AUTH_HEADER: Final[Mapping[AuthStyle, bytes]] = {
    "bearer": b"authorization",
    "x-api-key": b"x-api-key",
    "api-key": b"api-key",
}


@dataclass(frozen=True)
class ProviderAddress:
    """The address of a provider, its credential, and what its API supports.

    Attributes:
        name: as configured.
        base_url: without a slash at the end.
        auth: how the credential is sent.
        key: the gateway's own key; empty: the caller's credential is forwarded.
        headers: configured headers to add, if the client did not send them.
        key_prefixes: how keys of this provider begin; empty if unknown.
        limit_field: the field for the output limit of a chat call, if the call has none or one that may be unknown.
        allowed_tools: a request can restrict its tools with `allowed_tools`.
        reports_cost: its usage contains the cost in USD, which is charged instead of list prices.
        compaction: it compacts conversations (Responses API); None: unknown, so it is asked first.
        guarded: never send it a key that looks like another provider's, even if `key_prefixes` is empty.
        dialects: the formats that it accepts; None: unknown.
        billed_refusals: the categories of refusals before any output that it bills; None: it bills all.
        strict_fields: it refuses requests with unknown fields.
        is_translated: its requests are translated into another format.
        chat_cache_marks: it accepts cache marks (`cache_control`) in chat calls to Claude models.
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
    chat_cache_marks: bool = False

    def url(self, path: str, query: str) -> str:
        """Return the absolute URL of a path relative to `/v1/`. Path and query are already encoded.

        If the provider does not need the caller's credential, it is removed from the query, as it is from headers.
        """
        if query and self.holds_credential:
            query = "&".join([part for part in query.split("&") if not _is_credential_parameter(part)])
        return f"{self.base_url}/{path}?{query}" if query else f"{self.base_url}/{path}"

    @cached_property
    def has_key(self) -> bool:
        """Return whether the gateway has its own credential. If it is refused, the caller cannot correct it."""
        return bool(self.key) or any(name in CREDENTIALS for name, _ in self.headers)

    @cached_property
    def holds_credential(self) -> bool:
        """Return whether calls need no credential of the caller."""
        return self.auth == "none" or self.has_key


def _is_credential_parameter(parameter: str) -> bool:
    return unquote_plus(parameter.partition("=")[0]).lower() in _CREDENTIAL_PARAMETERS


def secrets_of(provider: ProviderAddress) -> tuple[bytes, ...]:
    """Return the secrets to mask in the responses of a provider."""
    fixed = [credential(value) for name, value in provider.headers if is_credential(name)]
    return tuple([secret.encode() for secret in (provider.key, *fixed) if len(secret) >= _SHORTEST_SECRET])


def mask(text: bytes, secrets: Iterable[bytes]) -> bytes:
    """Replace each secret in a text by ***, because some servers repeat the key that they refuse."""
    for secret in secrets:
        text = text.replace(secret, b"***")
    return text


def mask_values(headers: Headers, secrets: Sequence[bytes]) -> Headers:
    """Mask the secrets in header values. Few responses have one, so all values are searched at once."""
    values = b"\n".join([value for _, value in headers]) if secrets else b""
    for secret in secrets:
        if secret in values:
            return [(name, mask(value, secrets)) for name, value in headers]
    return headers


def is_credential(name: bytes) -> bool:
    """Return whether a header of this name holds a credential of any provider."""
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
    """Return the headers to send to a provider.

    Args:
        headers: the client's headers.
        provider: the provider that receives them.
        client_key_headers: headers that held a client key of the gateway; never forwarded.
        decompressed: the body was compressed and is sent decompressed.
    """
    names = dict(headers)
    # Without a key of the gateway, only client keys are credentials for the gateway itself.
    own = None if provider.holds_credential else client_key_headers
    dropped = _not_sent(frozenset(names), own, has_key=provider.has_key, decompressed=decompressed)
    if b"connection" in names:
        dropped |= _named_by_connection(headers)
    sent = [pair for pair in headers if pair[0] not in dropped]
    present = dict(sent) if provider.headers else {}
    if provider.key:
        sent.append(_own_credential(provider))
    sent += [pair for pair in provider.headers if pair[0] not in present]
    # A compressed response would have to be decompressed for metering, which costs more than the bandwidth.
    sent.append((b"accept-encoding", b"identity"))
    return sent


@lru_cache(_KNOWN_NAMES)
def _not_sent(
    names: frozenset[bytes], own: frozenset[bytes] | None, *, has_key: bool, decompressed: bool
) -> frozenset[bytes]:
    """Return which of these headers of a client are not sent to a provider; computed once for the same names.

    `own`: the headers with a client key, if other credentials are sent; None if none is.
    """
    dropped = (_NOT_SENT & names) | _credentials_among(names if own is None else own)
    if has_key:
        dropped |= _ACCOUNTS
    return dropped | {b"content-encoding"} if decompressed else dropped


def _own_credential(provider: ProviderAddress) -> tuple[bytes, bytes]:
    value = provider.key.encode("latin-1", "replace")
    return AUTH_HEADER[provider.auth], b"Bearer " + value if provider.auth == "bearer" else value


def check_credential(
    headers: Sequence[tuple[bytes, bytes]], query: str, provider: ProviderAddress, others: Iterable[ProviderAddress]
) -> None:
    """Refuse to send a caller's credential, from a header or the URL, to a provider that it clearly is not for.

    The prefix of a key identifies its provider; the longest known prefix decides. A credential without a known prefix
    is forwarded. A provider without known prefixes gets any credential, unless it is `guarded`.

    Raises:
        Unauthenticated: the credential belongs to another provider.
    """
    if not (provider.guarded or provider.key_prefixes) or provider.holds_credential:
        return
    names = _credentials_among(dict(headers))
    sent = [credential(value) for name, value in headers if name in names]
    if query:
        sent += [unquote_plus(part.partition("=")[2]) for part in query.split("&") if _is_credential_parameter(part)]
    for key in sent:
        # The key follows the last space, whatever scheme precedes it.
        owners = _owners(key.rpartition(" ")[2], others)
        if owners and provider.name not in owners:
            raise Unauthenticated(
                f"The credential sent looks like one of {' or '.join(owners)}, but this model is served by "
                f'"{provider.name}". '
                f'Send a credential of "{provider.name}", or give the gateway one: providers.{provider.name}.key.'
            )


def credential(value: bytes) -> str:
    """Return the key in a header value, without the scheme `Bearer`."""
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
    """Return the provider's headers to pass to the client. `decompressed`: content-encoding no longer applies."""
    names = dict(headers)
    dropped = _not_returned(frozenset(names), decompressed=decompressed)
    if b"connection" in names:
        dropped |= _named_by_connection(headers)
    returned = [pair for pair in headers if pair[0] not in dropped]
    if _UNSENDABLE.search(b"".join([value for _, value in returned])):
        returned = [pair for pair in returned if not _UNSENDABLE.search(pair[1])]
    types = [value for name, value in returned if name == b"content-type"]
    if not any(value.lower().startswith(_NO_PAGE) for value in types):
        returned.append(_SANDBOX)
    return returned


@lru_cache(_KNOWN_NAMES)
def _not_returned(names: frozenset[bytes], *, decompressed: bool) -> frozenset[bytes]:
    """Return which of these headers of a provider are not passed to the client; computed once for the same names."""
    dropped = frozenset([name for name in names if name in _NOT_RETURNED or name.startswith(_OUR_PREFIXES)])
    return dropped | {b"content-encoding"} if decompressed else dropped


def is_success(status: int) -> bool:
    """Return whether a status is 2xx."""
    return status // 100 == _SUCCESS


def content_type(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the media type in lower case without parameters; empty if there is none."""
    return header(headers, b"content-type").partition(b";")[0].strip().lower()


def header(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Return the first value of a header; empty if it is absent."""
    return dict(reversed(headers)).get(name, b"")


def by_name(headers: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the first value of each header, in the order of the names."""
    named = dict(headers)
    return named if len(named) == len(headers) else named | dict(reversed(headers))


def _named_by_connection(headers: Sequence[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the headers that `Connection` names: they are hop-by-hop (RFC 9110, section 7.6.1)."""
    named = [value for name, value in headers if name == b"connection"]
    tokens = frozenset(token.strip().lower() for value in named for token in value.split(b","))
    return tokens - {b"keep-alive", b"close"}
