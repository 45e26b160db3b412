"""Test which provider gets a model whose name begins with a provider's name."""

from __future__ import annotations

import pytest

from gateway.config import unused_providers
from gateway.config.policies import routes_of
from gateway.core.routing import Route
from tests.config.conftest import Load

NAMING = """
default_provider: groq
providers: {groq: {key: k}}
budget: {summary_model: mistral/small}
models: [{match: x, provider: {xai: 1, together: 2}, fallback: [anthropic/claude-haiku-4-5]}]
"""


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("{}", None),
        ("default_provider: null", None),
        (
            "{default_provider: openrouter, providers: {openrouter: {key: k}}}",
            "openrouter",
        ),
        (
            "{default_provider: groq, providers: {groq: {key: k}, openai: {key: k}, xai: {retries: 1}, gemini: {base_url: http://x/v1}}}",
            "groq openai xai gemini",
        ),
        (
            NAMING,
            "groq mistral xai together anthropic",
        ),
        # Callers send their own keys, and the prefix says for which provider.
        ("default_provider: openrouter", None),
        ("{default_provider: mine, providers: {mine: {base_url: http://x/v1}}}", None),
        ("{default_provider: m, built_in_providers: false, providers: {m: {base_url: http://x/v1}}}", None),
    ],
)
def test_unconfigured_built_in_provider_is_unused(loaded: Load, text: str, used: str | None) -> None:
    """`used`: the hosted providers in use; None for all."""
    hosted = {name for name, row in loaded().settings.providers.items() if row.auth != "none"}
    assert unused_providers(loaded(text).settings) == (hosted - {*used.split()} if used is not None else set())


def test_a_built_in_provider_whose_address_a_variable_gives_is_used(loaded: Load) -> None:
    settings = loaded("default_provider: ollama", {"AZURE_OPENAI_ENDPOINT": "https://mine.openai.azure.com"}).settings
    assert not unused_providers(settings) & {"azure", "ollama"}
    assert "groq" in unused_providers(settings)
    assert routes_of(settings).resolve("azure/gpt-5").provider == "azure"


@pytest.mark.parametrize("name", ["openai/gpt-5", "anthropic/claude-opus-5", "openrouter/auto", "qwen/qwen3"])
def test_a_host_that_is_the_default_is_called_by_its_own_names(loaded: Load, name: str) -> None:
    text = "{default_provider: openrouter, providers: {openrouter: {key: k}}}"
    route = routes_of(loaded(text).settings).resolve(name)
    assert (route.provider, route.model) == ("openrouter", name)


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("openrouter/auto", "openrouter", "openrouter/auto"),
        ("openrouter/openai/gpt-5", "openrouter", "openai/gpt-5"),
        ("openrouter/openrouter/auto", "openrouter", "openrouter/auto"),
        ("groq/compound-mini", "groq", "groq/compound-mini"),
        ("groq/groq/compound", "groq", "groq/compound"),
        ("groq/compound-beta", "groq", "compound-beta"),
        ("groq/llama-3.1-8b-instant", "groq", "llama-3.1-8b-instant"),
        ("anthropic/claude-opus-5", "anthropic", "claude-opus-5"),
    ],
)
def test_models_that_a_host_names_after_itself_are_sent_whole(
    loaded: Load, name: str, provider: str, model: str
) -> None:
    found = routes_of(loaded().settings).resolve(name)
    assert (found.provider, found.model) == (provider, model)


@pytest.mark.parametrize(("name", "provider"), [("gpt-4o", "openai"), ("gpt-oss:20b", "ollama"), ("o3", "openai")])
def test_bare_name_goes_to_its_provider(loaded: Load, name: str, provider: str) -> None:
    assert routes_of(loaded("default_provider: ollama").settings).resolve(name).provider == provider


def test_a_route_may_take_names_that_begin_with_a_provider(loaded: Load) -> None:
    text = "{models: [{match: openai/gpt-oss-*, provider: groq}], providers: {openai: {key: k}}}"
    routes = routes_of(loaded(text).settings)
    assert routes.resolve("openai/gpt-oss-20b").provider == "groq"
    assert routes.resolve("openai/gpt-5") == Route("openai", "gpt-5")


def test_route_for_unused_provider_prefix_precedes_catch_all(loaded: Load) -> None:
    models = "[{match: '*', provider: xai}, {match: openai/gpt-oss-*, provider: groq}]"
    routes = routes_of(
        loaded(f"{{default_provider: groq, providers: {{groq: {{key: k}}}}, models: {models}}}").settings
    )
    assert [routes.resolve(name).provider for name in ("openai/gpt-oss-20b", "openai/gpt-5")] == ["groq", "xai"]


def test_an_unused_host_has_no_routes_for_its_own_names(loaded: Load) -> None:
    found = routes_of(loaded("{default_provider: groq, providers: {groq: {key: k}}}").settings).resolve(
        "openrouter/auto"
    )
    assert (found.provider, found.model) == ("groq", "openrouter/auto")
