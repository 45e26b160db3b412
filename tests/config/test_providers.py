"""What a provider's block must not say: what would break its requests, or send a credential twice."""

from __future__ import annotations

import json

import pytest

from tests.config.conftest import Load, Problems

SECRET = "hunter2-hunter2-hunter2"


def provider(**block: object) -> str:
    return json.dumps({"providers": {"x": {"base_url": "http://h", **block}}})


# --- headers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "keep-alive", "Proxy-Authorization", "te", "trailer", "Transfer-Encoding", "upgrade"),
        *("Host", "content-length", "Accept-Encoding", "expect"),
    ],
)
def test_a_header_that_frames_requests_is_refused(name: str, problems: Problems) -> None:
    [problem] = problems(provider(headers={"x-a": "1", name: SECRET}))
    assert problem == f"providers.x.headers: {name!r} is written by the gateway for each request; leave it out"


@pytest.mark.parametrize(
    ("auth", "name"), [("bearer", "Authorization"), ("x-api-key", "X-Api-Key"), ("api-key", "API-Key")]
)
def test_a_credential_among_the_headers_beside_a_key_is_refused(auth: str, name: str, problems: Problems) -> None:
    [problem] = problems(provider(auth=auth, key=f"key-{SECRET}", headers={name: SECRET}))
    assert problem == (
        f"providers.x: auth: {auth} sends the key as {name.lower()}, and headers has another; "
        'take it out of headers, or set key: ""'
    )


def test_a_credential_among_the_headers_is_taken_in_the_place_of_a_key_or_for_somebody_in_front(loaded: Load) -> None:
    alone = loaded(provider(headers={"Authorization": "Bearer a"})).settings.providers["x"]
    assert alone.headers == {"authorization": "Bearer a"}
    both = loaded(provider(key=SECRET, headers={"x-api-key": "a", "cf-access-client-secret": "b"}))
    assert set(both.settings.providers["x"].headers) == {"x-api-key", "cf-access-client-secret"}


def test_a_built_in_providers_key_out_of_the_environment_counts_too(problems: Problems) -> None:
    text = "providers: {openai: {headers: {authorization: Bearer own}}}"
    assert problems(text) == []
    [problem] = problems(text, {"OPENAI_API_KEY": SECRET})
    assert problem.startswith("providers.openai: auth: bearer sends the key as authorization")
    assert problems(text.replace("{headers", "{key: '', headers"), {"OPENAI_API_KEY": SECRET}) == []
