"""What is known of a model, and from where: route, own table, the table on disk; fact by fact, without the network."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

import gateway
from gateway.catalog import Catalog, facts_of, load_litellm_table
from gateway.config import Facts, PriceRow, model_facts
from gateway.core.pricing import cost, price_per_million
from gateway.core.routing import ModelFacts, ModelRule, Route
from gateway.core.usage import Usage

PRICE = PriceRow(input=Decimal(1), output=Decimal(2))


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


TABLE = {
    "sample_spec": raw('{"max_tokens": 1}'),
    "gpt-5": raw(
        '{"litellm_provider": "openai", "max_input_tokens": 272000, "max_output_tokens": 128000, "max_tokens": 9,'
        ' "input_cost_per_token": 1.25e-06, "output_cost_per_token": 1e-05}'
    ),
    "groq/llama": raw('{"litellm_provider": "groq", "max_tokens": 8192, "input_cost_per_token": 1e-07}'),
    "ollama/qwen": raw('{"litellm_provider": "ollama", "max_tokens": 4096}'),
    "together-ai-4.1b-8b": raw('{"litellm_provider": "together_ai", "input_cost_per_token": 2e-07}'),
    "together_ai/org/qwen": raw(
        '{"litellm_provider": "together_ai", "max_tokens": 8192, "input_cost_per_token": 3e-07,'
        ' "output_cost_per_token": 3e-07}'
    ),
    "fireworks_ai/org/embed": raw(
        '{"litellm_provider": "fireworks_ai-embedding-models", "max_tokens": 512, "input_cost_per_token": 8e-09}'
    ),
    "odd": raw(
        '{"max_input_tokens": "many", "max_tokens": -1, "max_output_tokens": 1.5, "litellm_provider": "openai"}'
    ),
    "broken": raw("{"),
    "list": raw("[1]"),
}


def catalog(**own: Facts) -> Catalog:
    return Catalog({name.replace("__", "/"): facts for name, facts in own.items()}, TABLE)


def test_the_table_gives_limits_and_the_price_and_is_named_as_their_source() -> None:
    found = catalog().facts(Route("openai", "gpt-5"))
    assert (found.window, found.input, found.output, found.tokenizer) == (400_000, 272_000, 128_000, None)
    assert found.price is not None
    assert cost(Usage.of(1_000_000, 0), found.price) == Decimal("1.25")
    assert found.sources == dict.fromkeys(("window", "input", "output", "price", "reasoning"), "litellm")


@pytest.mark.parametrize(
    ("most", "output", "window", "limit"),
    [
        (272_000, 128_000, 400_000, 272_000),
        (922_000, 128_000, 1_050_000, 922_000),
        (111_616, 16_384, 128_000, 111_616),
        (1_050_000, 128_000, 1_050_000, None),
        (1_048_576, 65_536, 1_048_576, None),
        (200_000, 64_000, 200_000, None),
    ],
)
def test_an_input_that_is_limited_for_itself_is_told_from_a_window(
    most: int, output: int, window: int, limit: int | None
) -> None:
    entry = raw(f'{{"litellm_provider": "openai", "max_input_tokens": {most}, "max_output_tokens": {output}}}')
    found = Catalog({}, {"m": entry}).facts(Route("openai", "m"))
    assert (found.window, found.input, found.output) == (window, limit, output)


def test_a_price_does_not_pass_through_binary_fractions() -> None:
    price = catalog().facts(Route("openai", "gpt-5")).price
    assert price is not None
    assert price.rates.input == Decimal("0.00000125")


def test_a_model_of_the_same_name_at_another_provider_has_its_limits_but_not_its_price() -> None:
    found = catalog().facts(Route("elsewhere", "gpt-5"))
    assert (found.window, found.input, found.price) == (400_000, 272_000, None)


def test_an_entry_under_the_providers_name_is_preferred() -> None:
    found = catalog().facts(Route("groq", "llama"))
    assert found.window == 8192
    assert found.price is not None


def test_a_provider_that_the_table_calls_otherwise_is_found() -> None:
    found = catalog().facts(Route("together", "org/qwen"))
    assert found.window == 8192
    assert found.price is not None
    assert cost(Usage.of(1_000_000, 0), found.price) == Decimal("0.3")
    assert catalog().facts(Route("fireworks", "org/embed")).window == 512


@pytest.mark.parametrize("model", ["unknown", "odd", "broken", "list", "", "x" * 10_000])
def test_where_nobody_says_anything_sane_nothing_is_known(model: str) -> None:
    found = catalog().facts(Route("openai", model))
    assert (found.window, found.output, found.tokenizer, found.price) == (None, None, None, None)


def test_facts_come_one_by_one_from_the_first_that_names_them() -> None:
    rule = ModelRule("gpt-*", "openai", facts=ModelFacts(window=10))
    known = catalog(gpt_5=Facts(), openai__x=Facts())
    assert known.facts(Route("openai", "gpt-5", rule)).window == 10
    layered = Catalog(
        {"openai/gpt-5": Facts(window=20, output=20), "gpt-5": Facts(window=30, output=30, tokenizer="o200k")}, TABLE
    )
    found = layered.facts(Route("openai", "gpt-5", rule))
    assert (found.window, found.output, found.tokenizer) == (10, 20, "o200k")
    assert found.sources == {
        "window": "models: match gpt-*",
        "input": "litellm",
        "output": "models.yaml",
        "tokenizer": "models.yaml",
        "price": "litellm",
        "reasoning": "litellm",
    }


def test_a_window_that_is_configured_is_not_made_larger_by_a_table() -> None:
    table = {"m": raw('{"litellm_provider": "anthropic", "max_input_tokens": 200000}')}
    known = Catalog({"m": Facts(betas={"wide": 1_000_000})}, table)
    assert known.facts(Route("anthropic", "m")).betas == {"wide": 1_000_000}
    limited = ModelRule("m", "anthropic", facts=ModelFacts(window=100_000))
    assert known.facts(Route("anthropic", "m", limited)).betas is None
    both = ModelRule("m", "anthropic", facts=ModelFacts(window=100_000, betas={"wide": 300_000}))
    assert known.facts(Route("anthropic", "m", both)).betas == {"wide": 300_000}


@pytest.mark.parametrize(("window", "limit"), [(300_000, 272_000), (400_000, 272_000), (1_050_000, None)])
def test_a_window_configured_beyond_that_of_a_table_is_not_limited_by_its_input(window: int, limit: int | None) -> None:
    table = {"m": raw('{"litellm_provider": "openai", "max_input_tokens": 272000, "max_output_tokens": 128000}')}
    found = Catalog({"m": Facts(window=window)}, table).facts(Route("openai", "m"))
    assert (found.window, found.input, found.output) == (window, limit, 128_000)
    own = Catalog({"m": Facts(window=window, input=9_000)}, table).facts(Route("openai", "m"))
    assert own.input == 9_000


def test_the_models_that_have_a_larger_window_for_a_beta_are_data() -> None:
    known = Catalog(model_facts(), {})
    assert known.facts(Route("anthropic", "claude-sonnet-4-5-20250929")).betas == {"context-1m-2025-08-07": 1_000_000}


def test_a_configured_row_is_read_with_its_price() -> None:
    assert facts_of(Facts(window=5, price=PRICE)) == ModelFacts(
        window=5, price=price_per_million(input=Decimal(1), output=Decimal(2))
    )
    hourly = PriceRow(input=Decimal(1), output=Decimal(2), cache_write=Decimal("1.25"), cache_write_1h=Decimal(2))
    price = facts_of(Facts(price=hourly)).price
    assert price is not None
    assert (price.rates.cache_write, price.rates.cache_write_1h) == (Decimal("0.00000125"), Decimal("0.000002"))
    assert price.search == 0
    searching = facts_of(Facts(price=PriceRow(input=Decimal(1), output=Decimal(2), search=Decimal("0.01")))).price
    assert searching is not None
    assert searching.search == Decimal("0.01")
    assert facts_of(Facts(window=9, input=5, output=4)) == ModelFacts(window=9, input=5, output=4)
    assert facts_of(Facts()) == ModelFacts()


def test_a_tuned_model_has_the_price_of_those_that_are_tuned_from_its_base() -> None:
    known = Catalog({}, load_litellm_table())
    tuned = known.facts(Route("openai", "ft:gpt-4o-2024-08-06:org::id"))
    assert tuned == known.facts(Route("openai", "ft:gpt-4o-2024-08-06"))
    assert tuned.price is not None
    assert known.facts(Route("groq", "ft:gpt-4o-2024-08-06:org::id")).price is None
    assert known.facts(Route("openai", "ft:none:org::id")).price is None


def test_the_installed_table_says_what_a_cache_of_an_hour_costs() -> None:
    price = Catalog({}, load_litellm_table()).facts(Route("anthropic", "claude-sonnet-4-5-20250929")).price
    assert price is not None
    assert price.rates.cache_write is not None
    assert price.rates.cache_write_1h == 2 * price.rates.input > price.rates.cache_write


def test_what_the_providers_offer_is_listed_once_under_our_names() -> None:
    own = {"openai/gpt-5": Facts(), "mock/small": Facts(), "bare": Facts()}
    known = Catalog(own, TABLE)
    assert list(known.offered(["openai", "groq", "ollama", "mock", "together", "fireworks"])) == [
        ("openai", "gpt-5"),
        ("mock", "small"),
        ("groq", "llama"),
        ("ollama", "qwen"),
        ("together", "org/qwen"),
        ("fireworks", "org/embed"),
        ("openai", "odd"),
    ]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("gpt", [("openai", "gpt-5")]),
        ("openai/gpt", [("openai", "gpt-5")]),
        ("groq/", [("groq", "llama")]),
        ("ollama/qwen", [("ollama", "qwen")]),
        ("mistral/", []),
        ("nothing", []),
    ],
)
def test_the_list_can_be_narrowed_by_a_part_of_the_name(wanted: str, found: list[tuple[str, str]]) -> None:
    assert list(catalog().offered(["openai", "groq", "ollama"], wanted)) == found


def test_models_of_a_provider_that_is_not_configured_are_not_offered() -> None:
    assert list(catalog().offered([])) == []


def test_names_that_clients_make_up_do_not_fill_the_memory_and_known_ones_stay_known() -> None:
    known = catalog()
    first = known.facts(Route("openai", "gpt-5"))
    for number in range(10_000):
        known.facts(Route("openai", f"made-up-{number}"))
    assert len(known._known) <= 4096
    assert known.facts(Route("openai", "gpt-5")) == first


def test_the_shipped_tables_know_common_models_and_the_built_in_provider() -> None:
    shipped = Catalog(model_facts(), load_litellm_table())
    for provider, model in [
        ("openai", "gpt-4o"),
        ("anthropic", "claude-sonnet-4-5"),
        ("mock", "mock-small"),
        ("azure", "gpt-4o"),
        ("cerebras", "llama3.1-8b"),
        ("together", "deepseek-ai/DeepSeek-V3"),
        ("fireworks", "accounts/fireworks/models/deepseek-r1"),
        ("ollama", "llama3"),
    ]:
        found = shipped.facts(Route(provider, model))
        assert found.window, model
        assert found.price is not None, model


def test_reading_the_table_does_not_import_its_package() -> None:
    script = "import sys; from gateway.catalog import load_litellm_table as load; assert load(); print('litellm' in sys.modules)"
    root = Path(gateway.__file__).parent.parent
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, timeout=120, check=True
    )
    assert ran.stdout.strip() == "False"


def test_a_tokenizer_that_no_table_names_is_that_of_the_models_family() -> None:
    own = {"p/m": Facts(tokenizer="cl100k_base")}
    known = Catalog(own, {}, tokenizers=lambda route: f"of {route.model}")
    assert known.facts(Route("p", "m")).tokenizer == "cl100k_base"
    found = known.facts(Route("p", "n"))
    assert (found.tokenizer, found.sources) == ("of n", {"tokenizer": "families.yaml"})


def renamed() -> Catalog:
    table = {
        "anthropic.claude-x": raw('{"litellm_provider": "bedrock_converse", "input_cost_per_token": 1e-06}'),
        "vertex_ai/claude-x": raw('{"litellm_provider": "vertex_ai-anthropic_models", "input_cost_per_token": 2e-06}'),
        "command-x": raw('{"litellm_provider": "cohere_chat", "input_cost_per_token": 3e-06}'),
        "groq/llama": raw('{"litellm_provider": "groq", "input_cost_per_token": 4e-06}'),
    }
    known = Catalog({}, table)
    known.configure({"aws": "bedrock", "aws-2": "bedrock", "v": "vertex_ai"}, {})
    return known


@pytest.mark.parametrize(
    ("provider", "model"),
    [("aws", "anthropic.claude-x"), ("aws-2", "anthropic.claude-x"), ("v", "claude-x"), ("cohere", "command-x")],
)
def test_the_price_of_a_provider_with_a_name_of_its_own_is_found(provider: str, model: str) -> None:
    assert renamed().facts(Route(provider, model)).price is not None
    assert renamed().facts(Route("other", model)).price is None


def test_the_models_of_a_provider_with_a_name_of_its_own_are_offered_under_it() -> None:
    offered = list(renamed().offered({"aws", "aws-2", "v", "cohere", "groq"}))
    assert sorted(offered) == [
        ("aws", "anthropic.claude-x"), ("aws-2", "anthropic.claude-x"), ("cohere", "command-x"), ("groq", "llama"),
        ("v", "claude-x"),
    ]  # fmt: skip


def test_a_name_of_its_own_hides_no_provider_of_the_tables_name() -> None:
    known = renamed()
    known.configure({"mine": "groq"}, {})
    assert sorted(known.offered({"mine", "groq"})) == [("groq", "llama"), ("mine", "llama")]


def test_another_name_holds_from_then_on() -> None:
    known = renamed()
    assert known.facts(Route("aws", "anthropic.claude-x")).price is not None
    known.configure({}, {})
    assert known.facts(Route("aws", "anthropic.claude-x")).price is None
