"""Test which headers are forwarded, and with which credential."""

from __future__ import annotations

import pytest

from gateway.core.errors import Unauthenticated
from gateway.core.http.headers import (
    CREDENTIALS,
    AuthStyle,
    Headers,
    ProviderAddress,
    by_name,
    check_credential,
    credential,
    header,
    is_success,
    mask,
    mask_values,
    request_headers,
    response_headers,
    secrets_of,
)

BASE = "https://api.example.com/v1"
IDENTITY = (b"accept-encoding", b"identity")
OPEN = ProviderAddress("example", BASE)
HELD = ProviderAddress("example", BASE, key="sk-held")
OPENAI = ProviderAddress("openai", BASE, key_prefixes=("sk-",))
ANTHROPIC = ProviderAddress("anthropic", BASE, "x-api-key", key_prefixes=("sk-ant-",))
MISTRAL = ProviderAddress("mistral", BASE)
ALL = (OPENAI, ANTHROPIC, MISTRAL)


def sent(
    headers: Headers, provider: ProviderAddress = OPEN, *, key: bytes | None = None, decompressed: bool = False
) -> dict[bytes, bytes]:
    keys = frozenset({key} if key else ())
    return dict(request_headers(headers, provider, client_key_headers=keys, decompressed=decompressed))


@pytest.mark.parametrize(("query", "url"), [("", f"{BASE}/models"), ("a=1&b=%20", f"{BASE}/models?a=1&b=%20")])
def test_an_address_is_the_base_the_path_and_the_query_as_they_came(query: str, url: str) -> None:
    assert OPEN.url("models", query) == url


@pytest.mark.parametrize(
    ("query", "sent"),
    [
        *(("key=own", ""), ("API_KEY=own&a=%20&a", "?a=%20&a"), ("a=1&api%2Dkey=own&&b", "?a=1&&b")),
        *(("access_token", ""), ("api-version=2026-01-01&monkey=1", "?api-version=2026-01-01&monkey=1")),
    ],
)
def test_a_credential_in_an_address_is_forwarded_only_where_none_is_held(query: str, sent: str) -> None:
    assert OPEN.url("models", query) == f"{BASE}/models?{query}"
    for provider in (HELD, ProviderAddress("p", BASE, "none")):
        assert provider.url("models", query) == f"{BASE}/models{sent}"


def test_a_providers_key_is_not_in_its_repr() -> None:
    assert "sk-held" not in repr(HELD)


@pytest.mark.parametrize(
    "name",
    [
        "connection", "keep-alive", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
        "host", "cookie", "origin", "referer", "content-length", "expect", "x-forwarded-for", "forwarded", "x-real-ip",
        "x-forwarded-prefix", "x-client-ip", "true-client-ip", "cf-connecting-ip",
        "x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url",
        "x-session-id", "x-parent-session-id", "x-session-budget-tokens", "x-session-budget-usd", "x-context-budget",
        "x-context-trim", "x-response-mode", "x-request-id",
    ],
)  # fmt: skip
def test_a_header_between_client_and_gateway_is_not_forwarded(name: str) -> None:
    assert name.encode() not in sent([(name.encode(), b"v")])


@pytest.mark.parametrize(
    "name", ["content-type", "anthropic-beta", "anthropic-version", "openai-organization", "user-agent", "x-anything"]
)
def test_any_other_header_passes_unchanged(name: str) -> None:
    assert sent([(name.encode(), b"v\xe9")])[name.encode()] == b"v\xe9"


def test_repeated_headers_keep_their_number_and_order() -> None:
    pairs = [(b"x-a", b"1"), (b"x-b", b"2"), (b"x-a", b"3")]
    assert request_headers(pairs, OPEN, client_key_headers=frozenset(), decompressed=False) == [*pairs, IDENTITY]


def test_response_is_requested_uncompressed() -> None:
    assert sent([(b"accept-encoding", b"gzip, br")])[b"accept-encoding"] == b"identity"


def test_content_encoding_is_dropped_only_after_decompression() -> None:
    pairs = [(b"content-encoding", b"gzip")]
    assert b"content-encoding" in sent(pairs)
    assert b"content-encoding" not in sent(pairs, decompressed=True)


def test_a_header_that_connection_names_is_not_forwarded() -> None:
    pairs = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"close", b"2")]
    found = sent(pairs)
    assert b"x-hop" not in found
    assert found[b"close"] == b"2"


def test_headers_that_a_second_connection_header_names_are_not_forwarded_either() -> None:
    pairs = [(b"connection", b"x-one"), (b"connection", b"x-two"), (b"x-one", b"1"), (b"x-two", b"2")]
    assert sent(pairs) == dict([IDENTITY])


@pytest.mark.parametrize(
    ("style", "name", "value"),
    [
        ("bearer", b"authorization", b"Bearer sk-held"),
        ("x-api-key", b"x-api-key", b"sk-held"),
        ("api-key", b"api-key", b"sk-held"),
    ],
)
def test_gateway_key_replaces_the_callers_credential(style: AuthStyle, name: bytes, value: bytes) -> None:
    caller: Headers = [(credential, b"callers-own") for credential in CREDENTIALS]
    found = sent(caller, ProviderAddress("p", BASE, style, "sk-held"))
    assert {key: found[key] for key in found.keys() & CREDENTIALS} == {name: value}


def test_the_callers_own_credential_is_forwarded_where_none_is_held() -> None:
    assert sent([(b"x-api-key", b"own")])[b"x-api-key"] == b"own"


@pytest.mark.parametrize(
    "name",
    [
        *(b"x-goog-api-key", b"x-portkey-api-key", b"x-litellm-api-key", b"helicone-auth", b"cf-aig-authorization"),
        *(
            b"ocp-apim-subscription-key",
            b"x-bf-vk",
            b"x-auth-token",
            b"x-amz-security-token",
            b"cf-access-client-secret",
        ),
    ],
)
def test_a_credential_under_any_other_name_is_forwarded_only_where_none_is_held(name: bytes) -> None:
    assert sent([(name, b"own")])[name] == b"own"
    assert name not in sent([(name, b"own")], HELD)
    assert name not in sent([(name, b"own")], ProviderAddress("p", BASE, "none"))
    with pytest.raises(Unauthenticated, match="openai"):
        check_credential([(name, b"sk-proj-secret")], "", ANTHROPIC, ALL)


@pytest.mark.parametrize("name", [b"openai-organization", b"openai-project", b"x-goog-user-project"])
def test_account_headers_are_dropped_with_a_gateway_key(name: bytes) -> None:
    assert sent([(name, b"own")])[name] == b"own"
    assert name not in sent([(name, b"own")], HELD)
    assert sent([(name, b"own")], ProviderAddress("p", BASE, "none"))[name] == b"own", "there it is no more than a name"
    fixed = ProviderAddress("p", BASE, key="sk-held", headers=((name, b"fixed"),))
    assert sent([(name, b"own")], fixed)[name] == b"fixed"


@pytest.mark.parametrize("name", [b"idempotency-key", b"anthropic-beta", b"x-author", b"x-a"])
def test_what_holds_no_credential_is_forwarded(name: bytes) -> None:
    assert sent([(name, b"own")], HELD)[name] == b"own"


def test_a_fixed_credential_under_any_other_name_is_not_the_callers_to_replace() -> None:
    provider = ProviderAddress("p", BASE, "none", headers=((b"x-goog-api-key", b"held"),))
    assert sent([(b"x-goog-api-key", b"own")], provider)[b"x-goog-api-key"] == b"held"


def test_secrets_in_text_are_masked() -> None:
    fixed = ((b"api-key", b"Bearer fixed-secret"), (b"x-team", b"not-a-secret"))
    secrets = secrets_of(ProviderAddress("p", BASE, key="sk-held-by-us", headers=fixed))
    assert mask(b"no: sk-held-by-us, fixed-secret, not-a-secret", secrets) == b"no: ***, ***, not-a-secret"
    assert secrets_of(ProviderAddress("p", BASE, key="EMPTY")) == ()


def test_secrets_in_header_values_are_masked() -> None:
    pairs, secrets = [(b"a", b"1 sk-held"), (b"b", b"2"), (b"c", b"sk-held")], [b"sk-other", b"sk-held"]
    assert mask_values(pairs, secrets) == [(b"a", b"1 ***"), (b"b", b"2"), (b"c", b"***")]
    for known in ([], [b"sk-other"], [b"2\nsk"]):
        assert mask_values(pairs, known) == pairs


def test_a_provider_without_credentials_gets_none() -> None:
    found = sent([(name, b"own") for name in CREDENTIALS], ProviderAddress("p", BASE, "none"))
    assert not found.keys() & CREDENTIALS


def test_the_gateways_client_key_is_never_forwarded() -> None:
    found = sent([(b"authorization", b"Bearer gateway-key"), (b"x-api-key", b"own")], key=b"authorization")
    assert b"authorization" not in found
    assert found[b"x-api-key"] == b"own"


def test_fixed_headers_are_sent_unless_the_caller_sends_them() -> None:
    provider = ProviderAddress("p", BASE, headers=((b"anthropic-version", b"2023-06-01"), (b"x-team", b"a")))
    found = sent([(b"anthropic-version", b"2024-01-01")], provider)
    assert found[b"anthropic-version"] == b"2024-01-01"
    assert found[b"x-team"] == b"a"


@pytest.mark.parametrize("name", sorted(CREDENTIALS))
def test_a_credential_of_another_provider_is_refused_by_name(name: bytes) -> None:
    with pytest.raises(Unauthenticated, match=r"openai.*anthropic.*providers\.anthropic\.key") as caught:
        check_credential([(b"x-a", b"1"), (name, b"Bearer sk-proj-secret")], "", ANTHROPIC, ALL)
    assert "secret" not in caught.value.message


def test_longest_key_prefix_identifies_the_provider() -> None:
    check_credential([(b"x-api-key", b"sk-ant-abc")], "", ANTHROPIC, ALL)
    with pytest.raises(Unauthenticated, match="like one of anthropic,"):
        check_credential([(b"authorization", b"Bearer sk-ant-abc")], "", OPENAI, ALL)


@pytest.mark.parametrize("scheme", [b"Bearer", b"bearer", b"BEARER", b"Token", b"Bearer Bearer"])
def test_a_credential_of_another_provider_is_refused_however_its_scheme_is_written(scheme: bytes) -> None:
    with pytest.raises(Unauthenticated):
        check_credential([(b"authorization", scheme + b" sk-proj-abc")], "", ANTHROPIC, ALL)


@pytest.mark.parametrize("query", ["key=sk-proj-abc", "alt=sse&API_KEY=sk-proj-abc", "%6bey=sk%2dproj-abc"])
def test_a_credential_of_another_provider_is_refused_in_the_query_as_well(query: str) -> None:
    with pytest.raises(Unauthenticated, match="openai") as caught:
        check_credential([], query, ANTHROPIC, ALL)
    assert "abc" not in caught.value.message
    check_credential([], query, OPENAI, ALL)


@pytest.mark.parametrize("query", ["", "key", "key=whatever", "page=sk-proj-abc"])
def test_unknown_credential_in_query_is_forwarded(query: str) -> None:
    check_credential([], query, ANTHROPIC, ALL)


def test_unknown_credential_is_forwarded() -> None:
    check_credential([(b"authorization", b"Bearer whatever"), (b"x-a", b"sk-1")], "", ANTHROPIC, ALL)


def test_shared_key_prefix_is_accepted_by_both_providers() -> None:
    proxy = ProviderAddress("proxy", BASE, key_prefixes=("sk-",))
    for provider in (OPENAI, proxy):
        check_credential([(b"authorization", b"Bearer sk-abc")], "", provider, (*ALL, proxy))


@pytest.mark.parametrize("provider", [HELD, ProviderAddress("p", BASE, "none")])
def test_a_credential_that_is_not_forwarded_needs_no_check(provider: ProviderAddress) -> None:
    check_credential([(b"authorization", b"Bearer sk-ant-abc")], "", provider, ALL)


JSON = (b"content-type", b"application/json")


def returned(headers: list[tuple[bytes, bytes]], *, decompressed: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers of a JSON response without its content type."""
    return [pair for pair in response_headers([*headers, JSON], decompressed=decompressed) if pair != JSON]


@pytest.mark.parametrize("content_type", [b"text/html", b"image/svg+xml", b"text/plain", b"", None])
def test_possible_pages_are_sandboxed(content_type: bytes | None) -> None:
    pairs = [] if content_type is None else [(b"content-type", content_type)]
    found = response_headers([*pairs, (b"content-security-policy", b"script-src *")], decompressed=False)
    assert (b"content-security-policy", b"sandbox") in found


@pytest.mark.parametrize(
    "content_type", [b"application/json", b"Application/JSON; charset=utf-8", b"text/event-stream"]
)
def test_json_and_events_are_not_sandboxed(content_type: bytes) -> None:
    pairs = [(b"content-type", content_type)]
    assert response_headers(pairs, decompressed=False) == pairs


@pytest.mark.parametrize("name", ["strict-transport-security", "clear-site-data", "refresh", "nel", "report-to"])
def test_site_wide_headers_of_provider_are_dropped(name: str) -> None:
    assert returned([(name.encode(), b"v")], decompressed=False) == []


def test_a_providers_other_headers_pass() -> None:
    pairs = [(b"x-ratelimit-remaining", b"9"), (b"retry-after", b"1"), (b"openai-version", b"A")]
    assert returned(pairs, decompressed=False) == pairs


@pytest.mark.parametrize(
    "name", ["connection", "transfer-encoding", "content-length", "set-cookie", "alt-svc", "keep-alive", "upgrade"]
)
def test_hop_by_hop_response_headers_are_dropped(name: str) -> None:
    assert returned([(name.encode(), b"v")], decompressed=False) == []


def test_a_header_that_the_providers_connection_names_is_not_returned() -> None:
    assert returned([(b"connection", b"X-Hop"), (b"x-hop", b"1")], decompressed=False) == []


def test_response_content_encoding_is_dropped_only_after_decompression() -> None:
    pairs = [(b"content-encoding", b"gzip")]
    assert returned(pairs, decompressed=False) == [(b"content-encoding", b"gzip")]
    assert returned(pairs, decompressed=True) == []


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\x00", b"\x1b[31m", b"\x7f"])
def test_a_value_that_could_break_out_of_its_header_is_not_returned(value: bytes) -> None:
    assert returned([(b"x-a", value), (b"x-b", b"tab\tis fine")], decompressed=False) == [(b"x-b", b"tab\tis fine")]


@pytest.mark.parametrize("name", [b"x-request-id", b"request-id"])
def test_request_id_of_provider_is_returned_unchanged(name: bytes) -> None:
    assert returned([(name, b"req_1")], decompressed=False) == [(name, b"req_1")]


def test_gateway_request_id_of_another_gateway_is_not_returned() -> None:
    assert returned([(b"x-gateway-request-id", b"theirs")], decompressed=False) == []


@pytest.mark.parametrize(
    "name",
    [
        "x-session-id",
        "x-session-cumulative-total-tokens",
        "x-context-tokens",
        "x-gateway-upstream-error",
        "x-token-usage",
    ],
)
def test_gateway_headers_of_provider_are_dropped(name: str) -> None:
    assert returned([(name.encode(), b"1")], decompressed=False) == []


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b"Bearer abc", "abc"),
        (b"bearer  abc ", "abc"),
        (b"abc", "abc"),
        (b" abc ", "abc"),
        (b"Basic abc", "Basic abc"),
        (b"Bearer", ""),
        (b"", ""),
        ("Bearer schlüssel".encode(), "schlüssel"),
        ("Bearer schlüssel".encode("latin-1"), "schlüssel"),
    ],
)
def test_the_key_in_a_header_is_what_follows_the_scheme(value: bytes, key: str) -> None:
    assert credential(value) == key


def test_the_first_value_of_a_header_is_found() -> None:
    pairs = [(b"x-a", b"1"), (b"x-a", b"2")]
    assert header(pairs, b"x-a") == b"1"
    assert header(pairs, b"x-b") == b""


def test_headers_by_name_keep_their_order_and_their_first_values() -> None:
    pairs = [(b"x-b", b"1"), (b"x-a", b"2"), (b"x-b", b"3"), (b"x-c", b"4"), (b"x-a", b"5")]
    assert [*by_name(pairs).items()] == [(b"x-b", b"1"), (b"x-a", b"2"), (b"x-c", b"4")]


def test_a_guarded_provider_gets_no_key_of_another_although_its_own_have_no_known_beginning() -> None:
    mistral = ProviderAddress("mistral", BASE, guarded=True)
    with pytest.raises(Unauthenticated, match="anthropic"):
        check_credential([(b"authorization", b"Bearer sk-ant-abc")], "", mistral, (*ALL, mistral))
    check_credential([(b"authorization", b"Bearer whatever")], "", mistral, (*ALL, mistral))
    own = ProviderAddress("own", BASE)
    check_credential([(b"authorization", b"Bearer sk-ant-abc")], "", own, (*ALL, own))


@pytest.mark.parametrize(("status", "is_one"), [(199, False), (200, True), (299, True), (300, False), (0, False)])
def test_2xx_statuses_are_success(status: int, is_one: bool) -> None:
    assert is_success(status) is is_one


@pytest.mark.parametrize(
    ("provider", "held"),
    [
        (ProviderAddress("p", "http://p/v1"), False),
        (ProviderAddress("p", "http://p/v1", key="k"), True),
        (ProviderAddress("p", "http://p/v1", "none"), True),
        (ProviderAddress("p", "http://p/v1", headers=((b"x-other", b"v"),)), False),
        (ProviderAddress("p", "http://p/v1", headers=((b"api-key", b"v"),)), True),
    ],
)
def test_a_provider_needs_a_credential_of_the_caller_only_where_none_is_held(
    provider: ProviderAddress, held: bool
) -> None:
    assert provider.holds_credential is held
