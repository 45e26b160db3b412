"""`gateway models`."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest

from gateway.config.price_table import load_price_table
from tests.support.commands import Commands

MOCK = """
built_in_providers: false
default_provider: mock
providers: {mock: {base_url: "http://127.0.0.1:1", auth: none}}
"""


def test_a_known_model_comes_with_window_price_and_their_source(gateway_command: Commands) -> None:
    done = gateway_command("models", "gpt-4o-mini", "--json")
    assert done.code == 0
    row = next(row for row in json.loads(done.out) if row["model"] == "gpt-4o-mini")
    assert row["provider"] == "openai"
    assert row["window"] == 128_000
    assert row["output"] == 16_384
    assert Decimal(row["price"]["input"]) == Decimal("0.15")
    assert Decimal(row["price"]["output"]) == Decimal("0.6")
    assert re.fullmatch(r"litellm [\d.]+ \(\d{4}-\d\d-\d\d\)", row["sources"]["price"])


def test_the_table_shows_the_same(gateway_command: Commands) -> None:
    done = gateway_command("models", "gpt-4o-mini")
    row = next(line.split() for line in done.lines if line.startswith("gpt-4o-mini "))
    assert row == [
        "gpt-4o-mini",
        "openai",
        "128,000",
        "16,384",
        "$0.15",
        "$0.60",
        "$0.075",
        "o200k_base",
        *f"{load_price_table().name}, families.yaml".split(),
    ]


def test_model_of_the_built_in_table_names_its_source(gateway_command: Commands) -> None:
    done = gateway_command("models", "mock-small", "--json", "-c", gateway_command.file(MOCK))
    (row,) = json.loads(done.out)
    assert (row["model"], row["provider"], row["window"], row["tokenizer"]) == (
        "mock-small", "mock", 16_000, "o200k_base",
    )  # fmt: skip
    assert row["price"] == {
        "input": "0.15",
        "output": "0.6",
        "cache_read": "0.075",
        "cache_write": None,
        "cache_write_1h": None,
        "search": "0",
    }
    assert set(row["sources"].values()) == {"models.yaml"}


def test_a_route_of_the_configuration_goes_before_the_tables(gateway_command: Commands) -> None:
    route = "{match: mine, provider: openai, name: gpt-4o-mini, window: 5000, price: {input: 1, output: 2}}"
    done = gateway_command("models", "mine", "--json", "-c", gateway_command.file(f"models: [{route}]"))
    (row,) = json.loads(done.out)
    assert (row["name"], row["window"], row["output"]) == ("gpt-4o-mini", 5000, 16_384)
    assert row["price"]["input"] == "1"
    table = load_price_table().name
    assert row["sources"] == {
        "window": "models: match mine", "price": "models: match mine", "output": table, "tokenizer": "families.yaml",
        "reasoning": table,
    }  # fmt: skip


def test_model_of_a_route_comes_before_partial_matches(gateway_command: Commands) -> None:
    routes = "models: [{match: 'gpt-4*', provider: groq, window: 5000}]"
    first, second, *_ = json.loads(gateway_command("models", "gpt-4", "--json", "-c", gateway_command.file(routes)).out)
    assert (first["model"], first["provider"], first["window"]) == ("gpt-4", "groq", 5000)
    assert second["model"] != "gpt-4"
    (first, *_) = json.loads(gateway_command("models", "gpt-", "--json", "-c", gateway_command.file(routes)).out)
    assert first["model"] != "gpt-", "no route takes it"


def test_a_provider_that_is_called_where_it_costs_more_has_these_prices(gateway_command: Commands) -> None:
    regional = """
    providers:
      openai: {base_url: "https://eu.api.openai.com/v1", key: k}
      vertex: {adapter: litellm, litellm: vertex_ai, auth: none, options: {vertex_location: europe-west1}}
      world: {adapter: litellm, litellm: vertex_ai, auth: none, options: {vertex_location: global}}
    """
    file = gateway_command.file(regional)

    def inputs(wanted: str) -> dict[str, Decimal]:
        rows = json.loads(gateway_command("models", wanted, "--json", "-c", file).out)
        return {f"{row['provider']}/{row['name']}": Decimal(row["price"]["input"]) for row in rows}

    found = inputs("gpt-5.*") | inputs("world/claude-opus-4-6") | inputs("vertex/claude-opus-4-6")
    names = ("openai/gpt-5.1", "openai/gpt-5.4", "world/claude-opus-4-6", "vertex/claude-opus-4-6")
    assert [found[name] for name in names] == [Decimal("1.25"), Decimal("2.75"), Decimal(5), Decimal("5.5")]


def test_unused_tokenizer_is_not_shown(gateway_command: Commands) -> None:
    route = "{match: mine, provider: openai, tokenizer: o200k}"
    done = gateway_command("models", "mine", "-c", gateway_command.file(f"models: [{route}]"))
    assert (done.code, done.out) == (2, "")
    assert "models[0].tokenizer: there is no such tokenizer (did you mean o200k_base?)" in done.err


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_an_unknown_model_is_an_error_that_says_where_calls_for_it_go(
    more: tuple[str, ...], gateway_command: Commands
) -> None:
    done = gateway_command.process("models", "no-such-model-1", *more)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith('Unknown model "no-such-model-1"')
    assert done.err.endswith("Calls for it go to openai.\n")


def test_similar_model_is_suggested(gateway_command: Commands) -> None:
    done = gateway_command("models", "gpt-4o-mni")
    assert (done.code, done.out) == (1, "")
    assert "(did you mean gpt-4o-mini?)" in done.err


def test_model_without_a_provider_is_an_error(gateway_command: Commands) -> None:
    done = gateway_command.process("models", "no-such-model-1", "-c", gateway_command.file("default_provider: null"))
    assert (done.code, done.out) == (1, "")
    assert "default_provider" in done.err


def test_models_of_a_provider_that_no_call_reaches_are_not_shown(gateway_command: Commands) -> None:
    file = gateway_command.file("{default_provider: openrouter, providers: {openrouter: {key: k}}}")
    found = json.loads(gateway_command("models", "mistral-large", "--json", "--limit", "500", "-c", file).out)
    assert "mistral/mistral-large-latest" not in {row["model"] for row in found}, "that is no model of OpenRouter's"
    found = json.loads(gateway_command("models", "mistral-large", "--json", "--limit", "500").out)
    assert "mistral/mistral-large-latest" in {row["model"] for row in found}


def test_models_may_be_asked_for_by_a_pattern(gateway_command: Commands) -> None:
    found = {row["model"] for row in json.loads(gateway_command("models", "gpt-4o-*", "--json", "--limit", "500").out)}
    assert {"gpt-4o-mini", "gpt-4o-2024-08-06"} <= found
    assert not any("gpt-4o-" not in name for name in found)
    assert "gpt-4o" not in found
    one = gateway_command("models", "mock-smal?", "--json", "-c", gateway_command.file(MOCK))
    assert [row["model"] for row in json.loads(one.out)] == ["mock-small"]


def test_pattern_without_a_match_is_an_error(gateway_command: Commands) -> None:
    done = gateway_command.process("models", "no-such-*")
    assert (done.code, done.out) == (1, "")
    assert '"no-such-*"' in done.err


def test_more_rows_than_the_limit_are_announced(gateway_command: Commands) -> None:
    done = gateway_command("models", "gpt", "--limit", "2")
    assert len(done.lines) == 3
    assert "--limit" in done.err
    assert len(json.loads(gateway_command("models", "gpt", "--limit", "2", "--json").out)) == 2


def test_a_broken_configuration_ends_with_2(gateway_command: Commands) -> None:
    done = gateway_command("models", "-c", gateway_command.file("stroe: {}"))
    assert (done.code, done.out) == (2, "")
    assert "stroe: unknown key" in done.err
