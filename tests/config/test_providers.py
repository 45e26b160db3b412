"""Test provider settings that would break requests or send a credential twice."""

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
        *("content-length", "Accept-Encoding", "expect"),
    ],
)
def test_a_header_that_frames_requests_is_refused(name: str, problems: Problems) -> None:
    [problem] = problems(provider(headers={"x-a": "1", name: SECRET}))
    assert problem == f"providers.x.headers: {name!r} is set by the gateway for each request; leave it out"


def test_a_provider_that_is_called_by_its_address_may_be_named_in_a_header(loaded: Load) -> None:
    assert loaded(provider(headers={"Host": "inner.example"})).settings.providers["x"].headers == {
        "host": "inner.example"
    }


@pytest.mark.parametrize(
    ("auth", "name"), [("bearer", "Authorization"), ("x-api-key", "X-Api-Key"), ("api-key", "API-Key")]
)
def test_credential_header_with_key_is_refused(auth: str, name: str, problems: Problems) -> None:
    [problem] = problems(provider(auth=auth, key=f"key-{SECRET}", headers={name: SECRET}))
    assert problem == (
        f"providers.x: auth: {auth} sends the key as {name.lower()}, which headers also has; "
        'remove it from headers, or set key: ""'
    )


def test_credential_header_replaces_the_key(loaded: Load) -> None:
    alone = loaded(provider(headers={"Authorization": "Bearer a"})).settings.providers["x"]
    assert alone.headers == {"authorization": "Bearer a"}
    both = loaded(provider(key=SECRET, headers={"x-api-key": "a", "cf-access-client-secret": "b"}))
    assert set(both.settings.providers["x"].headers) == {"x-api-key", "cf-access-client-secret"}


def test_key_from_environment_conflicts_with_credential_header(problems: Problems) -> None:
    text = "providers: {openai: {headers: {authorization: Bearer own}}}"
    assert problems(text) == []
    [problem] = problems(text, {"OPENAI_API_KEY": SECRET})
    assert problem.startswith("providers.openai: auth: bearer sends the key as authorization")
    assert problems(text.replace("{headers", "{key: '', headers"), {"OPENAI_API_KEY": SECRET}) == []


# --- key ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("middle", ["\n", "\r", "\0", "\x7f", "é", "“", "\u2028"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(middle: str, problems: Problems) -> None:
    key = f"hunter2{middle}{SECRET}"
    for text, environment in ((provider(key=key), {}), (provider(key="${KEY}"), {"KEY": key})):
        [problem] = problems(text, environment)
        assert problem.startswith(
            "providers.x.key: contains a line break or another character that is not allowed in headers"
        )
        assert "hunter2" not in problem


@pytest.mark.parametrize("text", ["", "providers: {openai: {retries: 1}, x: {base_url: 'http://h'}}"])
def test_unsendable_key_of_built_in_provider_is_ignored_with_note(loaded: Load, text: str) -> None:
    held = {"OPENAI_API_KEY": f"hunter2\n{SECRET}", "GROQ_API_KEY": SECRET}
    found = loaded(text, held)
    assert [found.settings.providers[name].key.get_secret_value() for name in ("openai", "groq")] == ["", SECRET]
    [note] = found.notes
    assert note.startswith("OPENAI_API_KEY: contains a line break or another character that is not allowed in headers")
    assert "hunter2" not in note


@pytest.mark.parametrize(
    "text",
    ["providers: {openai: {base_url: 'http://h'}}", "providers: {openai: {key: ''}}", "built_in_providers: false"],
)
def test_unused_unsendable_key_is_not_reported(loaded: Load, text: str) -> None:
    own = "providers: {own: {base_url: 'http://h'}}\ndefault_provider: own\n" if "built_in" in text else ""
    assert loaded(own + text, {"OPENAI_API_KEY": "a\nb"}).notes == ()


def test_configured_unsendable_key_is_refused(problems: Problems) -> None:
    held = {"OPENAI_API_KEY": "hunter2\nb"}
    [problem] = problems("providers: {openai: {key: '${OPENAI_API_KEY}'}}", held)
    assert problem.startswith("providers.openai.key: contains a line break")
    [problem] = problems("", {"GATEWAY_PROVIDERS_OPENAI_KEY": "hunter2\nb"})
    assert problem.startswith("providers.openai.key: contains a line break")


def test_blanks_around_a_key_are_removed(loaded: Load) -> None:
    found = loaded(provider(key="${KEY}"), {"KEY": f" {SECRET}\r\n"}).settings.providers["x"]
    assert found.key.get_secret_value() == SECRET


# --- base_url -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/messages", "/completions", "/embeddings"])
def test_url_of_a_call_is_not_a_base_url(path: str, problems: Problems) -> None:
    for url in (f"http://h/v1{path}", f"http://h{path}/"):
        [problem] = problems(provider(base_url=url))
        assert problem == f"providers.x.base_url: ends with the path of a call; remove {path}"
    assert problems(provider(base_url=f"http://h{path}/v1")) == []
    assert problems(provider(base_url=f"http://h/v1{path}", adapter="litellm", litellm="cohere")) == [], "litellm's own"
