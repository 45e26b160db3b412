"""Test facts of models and their sources: route, own table, installed table; without the network."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from gateway.config import Facts, PriceRow, model_facts
from gateway.config.model_catalog import Catalog, facts_of
from gateway.config.price_table import load_price_table
from gateway.core.pricing import cost, price_per_million
from gateway.core.routing import ModelFacts, ModelRule, Route
from gateway.core.usage import Usage

D = Decimal
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
def test_separate_input_limit_is_distinguished_from_window(
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
def test_invalid_table_entries_give_no_facts(model: str) -> None:
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
    known = Catalog({}, load_price_table())
    tuned = known.facts(Route("openai", "ft:gpt-4o-2024-08-06:org::id"))
    assert tuned == known.facts(Route("openai", "ft:gpt-4o-2024-08-06"))
    assert tuned.price is not None
    assert known.facts(Route("groq", "ft:gpt-4o-2024-08-06:org::id")).price is None
    assert known.facts(Route("openai", "ft:none:org::id")).price is None


def test_the_installed_table_says_what_a_cache_of_an_hour_costs() -> None:
    price = Catalog({}, load_price_table()).facts(Route("anthropic", "claude-sonnet-4-5-20250929")).price
    assert price is not None
    assert price.rates.cache_write is not None
    assert price.rates.cache_write_1h == 2 * price.rates.input > price.rates.cache_write


@pytest.mark.parametrize(
    ("route", "usage", "tier", "usd"),
    [
        # https://platform.claude.com/docs/en/about-claude/pricing: above 100,000 tokens the whole call, output included
        ("anthropic/claude-haiku-5-5", Usage(100_000, 1_000, 101_000, 10_000), None, "0.0096"),
        ("anthropic/claude-haiku-5-5", Usage(100_001, 1_000, 101_001, 20_001, 20_000), None, "0.04600005"),
        ("anthropic/claude-haiku-5-5", Usage(100_001, 0, 100_001, 0, 1, 0, 0, 0, 1), None, "0.050001"),
        ("anthropic/claude-haiku-5-5", Usage(200_000, 1_000, 201_000), "batch", "0.05125"),
        ("anthropic/claude-haiku-5-5", Usage(200_000, 1_000, 201_000), "us", "0.11275"),
        ("anthropic/claude-sonnet-5-5", Usage(200_000, 1_000, 201_000, 100_000), None, "0.22"),
        ("anthropic/claude-sonnet-5-5", Usage(200_000, 0, 200_000, 0, 200_000, 0, 0, 0, 200_000), "batch", "0.4"),
        ("anthropic/claude-opus-5-5", Usage(20_000, 1_000, 21_000, 0, 20_000, 0, 0, 0, 10_000), None, "0.15"),
        ("anthropic/claude-opus-5-5", Usage(10_000, 1_000, 11_000), "fast", "0.12"),
        ("anthropic/claude-opus-5", Usage(10_000, 1_000, 11_000), None, "0.075"),
        ("anthropic/claude-fable-5-1", Usage(10_000, 1_000, 11_000, 10_000), None, "0.0525"),
        ("anthropic/claude-fable-5-2", Usage(10_000, 1_000, 11_000, 10_000), None, "0.042"),
        ("anthropic/claude-fable-5-2", Usage(20_000, 0, 20_000, 0, 20_000, 0, 0, 0, 10_000), None, "0.26"),
        ("anthropic/claude-mythos-5-2", Usage(10_000, 1_000, 11_000), "us", "0.132"),
        ("anthropic/claude-opus-latest", Usage(10_000, 1_000, 11_000), None, "0.06"),
        # https://developers.openai.com/api/docs/pricing: above 272,000 tokens 2 times input and caches, 1.5 times output
        ("openai/gpt-6.1-sol", Usage(272_000, 1_000, 273_000, 72_000), None, "0.4172"),
        ("openai/gpt-6.1-sol", Usage(272_001, 1_000, 273_001, 72_001), None, "0.8294002"),
        ("openai/gpt-6.2-sol", Usage(272_000, 1_000, 273_000, 72_000), None, "0.4172"),
        ("openai/gpt-6.2-sol", Usage(272_001, 1_000, 273_001, 72_001), None, "0.8294002"),
        ("openai/gpt-6.2-sol", Usage(10_000, 0, 10_000, 0, 10_000, 0, 0, 0, 4_000), None, "0.035"),
        ("openai/gpt-6.2-sol", Usage(300_000, 0, 300_000, 0, 300_000, 0, 0, 0, 300_000), "fast", "6"),
        ("openai/gpt-6.2-sol", Usage(10_000, 1_000, 11_000), "ultrafast", "0.09"),
        ("openai/gpt-6.2-sol", Usage(10_000, 1_000, 11_000), "flex", "0.015"),
        ("openai/gpt-6.2-astra", Usage(10_000, 1_000, 11_000), "batch", "0.06"),
        ("openai/gpt-6-astra", Usage(10_000, 1_000, 11_000), "ultrafast", "0.9"),
        ("openai/gpt-6-astra", Usage(10_000, 0, 10_000, 0, 10_000, 0, 0, 0, 10_000), "priority", "0.5"),
        ("openai/gpt-6-luna", Usage(100_000, 10_000, 110_000), None, "0.015"),
        # https://docs.x.ai/docs/models: above 200,000 tokens twice as much
        ("xai/grok-4.5", Usage(200_001, 0, 200_001), None, "0.800004"),
        # https://www.alibabacloud.com/help/en/model-studio/models: a band of 256,000 tokens
        ("dashscope/qwen-flash", Usage(256_000, 1_000, 257_000), None, "0.0132"),
        ("dashscope/qwen-flash", Usage(256_001, 1_000, 257_001), None, "0.06600025"),
    ],
)
def test_a_call_costs_what_the_vendor_publishes(route: str, usage: Usage, tier: str | None, usd: str) -> None:
    provider, _, model = route.partition("/")
    price = Catalog(model_facts(), load_price_table()).facts(Route(provider, model)).price
    assert price is not None
    assert cost(usage, price, tier) == Decimal(usd)


def test_unpublished_tier_price_is_unknown() -> None:
    price = Catalog(model_facts(), {}).facts(Route("openai", "gpt-6.2-astra")).price
    assert price is not None
    assert cost(Usage.of(1, 1), price, "ultrafast") is None


@pytest.mark.parametrize(
    ("model", "window", "most_input", "output"),
    [
        ("claude-fable-5-2", 1_000_000, None, 128_000),
        ("claude-mythos-5-2", 1_000_000, None, 128_000),
        ("claude-fable-5-1", 1_000_000, None, 128_000),
        ("claude-opus-5-5", 1_000_000, None, 128_000),
        ("claude-sonnet-5-5", 1_000_000, None, 128_000),
        ("claude-haiku-5-5", 1_000_000, None, 128_000),
        ("claude-haiku-latest", 1_000_000, None, 128_000),
        ("claude-opus-5", 1_000_000, None, 128_000),
        ("gpt-6.1-sol", 1_050_000, 922_000, 128_000),
        ("gpt-6.2-sol", 1_050_000, 922_000, 128_000),
        ("gpt-6.2-astra", 1_050_000, 922_000, 128_000),
        ("gpt-6-astra", 1_050_000, 922_000, 128_000),
        ("gpt-6-luna", 1_050_000, 922_000, 128_000),
    ],
)
def test_the_limits_of_current_models_are_those_that_the_vendor_publishes(
    model: str, window: int, most_input: int | None, output: int
) -> None:
    found = Catalog(model_facts(), load_price_table()).facts(Route("elsewhere", model))
    assert (found.window, found.input, found.output, found.price) == (window, most_input, output, None)


@pytest.mark.parametrize(
    ("provider", "model", "window"),
    [
        ("openrouter", "anthropic/claude-haiku-5.5", 1_000_000),
        ("openrouter", "anthropic/claude-haiku-4.5:thinking", 200_000),
        ("openrouter", "~anthropic/claude-sonnet-latest", 1_000_000),
        ("openrouter", "openai/gpt-6.2-sol", 1_050_000),
        ("openrouter", "openai/gpt-6-astra", 1_050_000),
        ("bedrock", "us.anthropic.claude-fable-5-2-v1:0", 1_000_000),
        ("vertex", "claude-fable-5-2@default", 1_000_000),
        ("ollama", "gpt-6-sol:8b", None),
        ("openrouter", "someone/something", None),
    ],
)
def test_the_limits_of_a_model_are_known_under_the_names_of_hosts(
    provider: str, model: str, window: int | None
) -> None:
    found = Catalog(model_facts(), load_price_table()).facts(Route(provider, model))
    assert (found.window, found.betas) == (window, None)


def test_the_vendors_price_is_not_that_of_a_host() -> None:
    known = Catalog({}, load_price_table())
    for provider, model in (("openrouter", "anthropic/claude-haiku-5.5"), ("bedrock", "xx.anthropic.claude-opus-5-5")):
        assert known.facts(Route(provider, model)).price is None


def test_a_beta_of_the_vendor_is_not_assumed_at_a_host() -> None:
    found = Catalog(model_facts(), load_price_table()).facts(Route("openrouter", "anthropic/claude-sonnet-4.5"))
    assert (found.window, found.betas) == (200_000, None)


def test_a_row_for_a_model_that_the_table_lacks_is_removed_once_the_table_has_it() -> None:
    shipped = load_price_table()
    newer = [name for name, row in model_facts().items() if row.betas is None]
    assert [name for name in newer if name.rpartition("/")[2] in shipped] == []


def test_a_price_of_the_configuration_may_have_long_contexts_and_tiers() -> None:
    row = PriceRow.model_validate(
        {
            "input": 2, "output": 10, "above": {300_000: {"input": 5, "output": 20}, 200_000: {"input": 4, "output": 15}},
            "times": {"priority": 2, "fast": 3, "us": 1.5},
        }
    )  # fmt: skip
    price = facts_of(Facts(price=row)).price
    assert price is not None
    calls = [Usage.of(tokens, 1_000_000) for tokens in (200_000, 200_001, 300_001)]
    assert [cost(usage, price) for usage in calls] == [D("10.4"), D("15.800004"), D("21.500005")]
    usage = Usage.of(100_000, 0)
    tiers = ("priority", "fast", "us", "fast-us", "ultrafast")
    assert [cost(usage, price, tier) for tier in tiers] == [D("0.4"), D("0.6"), D("0.3"), D("0.9"), None]


def test_an_alias_of_the_table_has_the_facts_of_its_model() -> None:
    table = {
        "a-latest": raw('{"alias_of": "a-2"}'),
        "a-2": raw('{"litellm_provider": "openai", "max_input_tokens": 9, "input_cost_per_token": 1}'),
        "b-latest": raw('{"alias_of": "missing"}'),
    }
    known = Catalog({}, table)
    assert known.facts(Route("openai", "a-latest")) == known.facts(Route("openai", "a-2"))
    assert known.facts(Route("openai", "a-latest")).window == 9
    assert known.facts(Route("openai", "b-latest")).window is None


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
    shipped = Catalog(model_facts(), load_price_table())
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


def test_renamed_provider_does_not_hide_another() -> None:
    known = renamed()
    known.configure({"mine": "groq"}, {})
    assert sorted(known.offered({"mine", "groq"})) == [("groq", "llama"), ("mine", "llama")]


def test_configure_replaces_earlier_names() -> None:
    known = renamed()
    assert known.facts(Route("aws", "anthropic.claude-x")).price is not None
    known.configure({}, {})
    assert known.facts(Route("aws", "anthropic.claude-x")).price is None
