"""Test the replacement of all providers by one, as in `gateway serve --mock` and `--upstream`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.config.only import with_only
from gateway.core.errors import ConfigError

BLOCK = {"base_url": "http://127.0.0.1:1/v1", "auth": "none"}
ONLY: dict[str, Any] = {"name": "mock", "block": BLOCK, "facts": {"price": {"input": 1, "output": 2}}}
FILE = """
providers:
  own: {base_url: "http://127.0.0.1:2", key: "${NOT_SET}"}
  mock: {retries: 7}
default_provider: own
context: {summary: {model: own/small}}
models:
  - {match: alias, provider: own, name: gpt-5.1, window: 600, output: 50, reasoning: false, tokenizer: o200k_base}
  - {match: shared-*, provider: {own: 3, groq: 1}, fallback: [alias], price: {input: 5, output: 6}}
"""


def load(folder: Path, text: str = FILE, only: Any = ONLY) -> config.Settings:
    file = folder / "gateway.yaml"
    file.write_text(text)
    return config.load(file, environment={"GATEWAY_PROVIDERS_OWN_RETRIES": "3"}, flags={"only_provider": only}).settings


def test_all_routes_use_the_only_provider_and_keep_facts(tmp_path: Path) -> None:
    alias, shared, every = load(tmp_path).models
    assert {alias.provider, shared.provider, every.provider} == {"mock"}
    assert (alias.name, alias.window, alias.output, alias.reasoning, alias.tokenizer) == (
        "gpt-5.1", 600, 50, False, "o200k_base",
    )  # fmt: skip
    assert shared.fallback == ("alias",)
    assert [row.price and int(row.price.input) for row in (alias, shared, every)] == [1, 5, 1]


def test_no_other_provider_is_left_and_its_own_block_is_kept_under_the_flags(tmp_path: Path) -> None:
    settings = load(tmp_path)
    (name,) = settings.providers
    mock = settings.providers[name]
    assert (name, mock.base_url, mock.auth, mock.retries) == ("mock", BLOCK["base_url"], "none", 7)
    assert (settings.default_provider, settings.built_in_providers) == ("mock", False)


def test_without_facts_nothing_is_added_to_what_the_file_says(tmp_path: Path) -> None:
    models = load(tmp_path, only={**ONLY, "facts": {}}).models
    assert [(row.match, row.price is None) for row in models] == [("alias", True), ("shared-*", False)]


def test_variables_set_keys_of_the_one_provider_though_no_file_names_it() -> None:
    flags = {"only_provider": {"name": "upstream", "block": {"base_url": "http://127.0.0.1:1/v1"}, "facts": {}}}
    environment = {"GATEWAY_PROVIDERS_UPSTREAM_KEY": "sk-1", "GATEWAY_PROVIDERS_UPSTREAM_BASE_URL": "http://other"}
    found = config.load(environment=environment, flags=flags, search=False)
    upstream = found.settings.providers["upstream"]
    assert (upstream.key.get_secret_value(), upstream.base_url) == ("sk-1", "http://127.0.0.1:1/v1")
    assert found.notes == ()
    (note,) = config.load(environment={"GATEWAY_PROVIDERS_UPSTREAM_KEY": "sk-1"}, search=False).notes
    assert "this provider is not configured" in note


@pytest.mark.parametrize(
    ("text", "problem"),
    [("models: {a: 1}", "models"), ("models: [alias]", "models[0]"), ("models: [{provider: x}]", "models[0].match")],
)
def test_what_is_no_route_is_still_a_problem(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert caught.value.problems[0].startswith(f"{problem}: ")


@pytest.mark.parametrize("raw", [{}, {"models": None, "providers": None}, {"models": [], "providers": {}}])
def test_an_empty_configuration_has_one_provider_and_one_route(raw: dict[str, Any]) -> None:
    found = with_only(raw, **ONLY)
    assert found["providers"] == {"mock": BLOCK}
    assert [row["match"] for row in found["models"]] == ["*"]
