from __future__ import annotations

from decimal import Decimal

import pytest

from gateway.core.pricing import Price, Rates, cost, price_from_table, price_per_million, standard_cost, times
from gateway.core.usage import Usage

D = Decimal
PLAIN = price_per_million(input=D(1), output=D(10))
FULL = Price(Rates(D(1), D(10), D("0.1"), D("1.25"), D(40), D(80), D(5)), {})


def test_a_price_per_million_is_a_millionth_per_token() -> None:
    price = price_per_million(input=D("1.25"), output=D(10), cache_read=D("0.125"), cache_write_1h=D(2))
    assert price.rates == Rates(D("0.00000125"), D("0.00001"), D("0.000000125"), None, cache_write_1h=D("0.000002"))


def test_each_side_costs_its_own_rate() -> None:
    assert cost(Usage.of(1_000_000, 100_000), PLAIN) == D(2)


def test_no_usage_costs_nothing() -> None:
    assert cost(Usage(), FULL) == 0


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(100, 0, 100, cache_read_tokens=60), 40 + 6),
        (Usage(100, 0, 100, cache_write_tokens=40), 60 + 50),
        (Usage(100, 0, 100, audio_input_tokens=10), 90 + 400),
        (Usage(0, 100, 100, audio_output_tokens=10), 900 + 800),
        (Usage(0, 100, 100, reasoning_tokens=40), 600 + 200),
        (Usage(100, 100, 200, 20, 20, 20, 20, 20), 40 + 2 + 25 + 800 + 600 + 1600 + 100),
    ],
    ids=["cache read", "cache write", "audio in", "audio out", "reasoning", "all"],
)
def test_part_is_priced_separately_and_subtracted_from_its_side(usage: Usage, expected: int) -> None:
    assert cost(usage, FULL) == expected


HOURLY = Price(Rates(D(1), D(10), cache_write=D("1.25"), cache_write_1h=D(2)), {})


@pytest.mark.parametrize(
    ("usage", "price", "expected"),
    [
        (Usage(100, 0, 100, cache_write_tokens=40, cache_write_1h_tokens=20), HOURLY, 60 + 25 + 40),
        (Usage(100, 0, 100, cache_write_tokens=40, cache_write_1h_tokens=400), HOURLY, 60 + 80),
        (Usage(100, 0, 100, cache_write_tokens=0, cache_write_1h_tokens=40), HOURLY, 100),
        (Usage(100, 0, 100, cache_write_tokens=40, cache_write_1h_tokens=40), FULL, 60 + 50),
        (Usage(100, 0, 100, cache_write_tokens=40, cache_write_1h_tokens=40), PLAIN, D("0.0001")),
    ],
    ids=["some", "more than all", "none", "no rate of its own", "no rate at all"],
)
def test_one_hour_cache_has_its_own_price(usage: Usage, price: Price, expected: Decimal) -> None:
    assert cost(usage, price) == expected


def test_the_rates_of_an_hour_are_read_from_the_table() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 1,
            "output_cost_per_token": 10,
            "cache_creation_input_token_cost": 1.25,
            "cache_creation_input_token_cost_above_1hr": 2,
            "cache_creation_input_token_cost_above_200k_tokens": 2.5,
            "cache_creation_input_token_cost_above_1hr_above_200k_tokens": 4,
        }
    )
    assert price is not None
    [(threshold, long)] = price.above
    assert (price.rates.cache_write, price.rates.cache_write_1h) == (D("1.25"), D(2))
    assert (threshold, long.cache_write, long.cache_write_1h) == (200_000, D("2.5"), D(4))


def test_the_rates_of_twelve_hours_are_read_for_each_length_and_tier() -> None:
    key = "cache_creation_input_token_cost_above_12hr"
    price = price_from_table(
        {
            "input_cost_per_token": 2,
            "output_cost_per_token": 10,
            "input_cost_per_token_priority": 4,
            "output_cost_per_token_priority": 20,
            "input_cost_per_token_above_272k_tokens": 4,
            key: 5,
            f"{key}_priority": 9,
            f"{key}_above_272k_tokens": 11,
            f"{key}_above_272k_tokens_priority": 21,
        }
    )
    assert price is not None
    short = Usage(10, 0, 10, cache_write_tokens=10, cache_write_1h_tokens=10)
    long = Usage(300_000, 0, 300_000, cache_write_tokens=300_000, cache_write_1h_tokens=300_000)
    assert [cost(short, price, tier) for tier in (None, "priority")] == [50, 90]
    assert [cost(long, price, tier) for tier in (None, "priority")] == [300_000 * 11, 300_000 * 21]


def test_a_tier_is_known_by_its_key() -> None:
    standard = {"input_cost_per_token": 2, "output_cost_per_token": 2, "input_cost_per_token_cache_hit": 1}
    price = price_from_table({**standard, "input_cost_per_token_balanced": 1, "output_cost_per_token_balanced": 1})
    assert price is not None
    assert set(price.tiers) == {"balanced"}
    assert cost(Usage.of(1, 1), price, "balanced") == 2


def test_unlisted_tier_rates_are_proportional() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 4,
            "output_cost_per_token": 10,
            "cache_creation_input_token_cost": 5,
            "cache_creation_input_token_cost_above_1hr": 8,
            "output_cost_per_reasoning_token": 20,
            "input_cost_per_token_batches": 2,
            "output_cost_per_token_batches": 5,
        }
    )
    assert price is not None
    usage = Usage(20, 2, 22, cache_write_tokens=20, cache_write_1h_tokens=10, reasoning_tokens=1)
    assert cost(usage, price, "batch") == D("25") + 40 + 5 + 10


def test_unlisted_long_context_cache_rates_rise_with_input() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 4,
            "output_cost_per_token": 10,
            "cache_read_input_token_cost": 1,
            "cache_creation_input_token_cost": 5,
            "input_cost_per_audio_token": 6,
            "input_cost_per_token_above_200k_tokens": 8,
            "cache_creation_input_token_cost_above_200k_tokens": 9,
            "input_cost_per_audio_token_above_200k_tokens": 7,
        }
    )
    assert price is not None
    [(size, long)] = price.above
    assert (size, long) == (200_000, Rates(D(8), D(10), D(2), D(9), D(7)))


BANDS = [
    {"range": [128_000.0, 1_000_000.0], "input_cost_per_token": 5, "output_cost_per_token": 20},
    {
        "range": [0, 128_000.0],
        "input_cost_per_token": 1,
        "output_cost_per_token": 2,
        "cache_read_input_token_cost": 0.5,
    },
]


@pytest.mark.parametrize(
    ("tokens", "usd"), [(128_000, 128_000 + 2), (128_001, 5 * 128_001 + 20), (2_000_000, 10_000_020)]
)
def test_the_number_of_input_tokens_chooses_the_band_of_tiered_pricing(tokens: int, usd: int) -> None:
    price = price_from_table({"tiered_pricing": BANDS, "mode": "chat"})
    assert price is not None
    assert cost(Usage.of(tokens, 1), price) == usd
    assert price.above[0][1].cache_read == D("2.5")


@pytest.mark.parametrize(
    "bands", [[{"input_cost_per_query": 5, "max_results_range": [0, 9]}], [3], "x", [{"range": []}]]
)
def test_tiered_pricing_of_other_units_is_no_price(bands: object) -> None:
    assert price_from_table({"tiered_pricing": bands}) is None


def test_part_without_rate_costs_the_rate_of_its_side() -> None:
    assert cost(Usage(100, 100, 200, 20, 20, 20, 20, 20), PLAIN) == cost(Usage.of(100, 100), PLAIN)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(10, 0, 10, cache_read_tokens=1000), "1"),
        (Usage(10, 0, 10, cache_write_tokens=1000), "12.5"),
        (Usage(10, 0, 10, audio_input_tokens=1000), "400"),
        (Usage(10, 0, 10, cache_read_tokens=4, cache_write_tokens=1000), "7.9"),
        (Usage(10, 0, 10, cache_read_tokens=4, cache_write_tokens=2, audio_input_tokens=1000), "162.9"),
        (Usage(0, 10, 10, reasoning_tokens=1000), "50"),
        (Usage(0, 10, 10, audio_output_tokens=1000), "800"),
        (Usage(0, 10, 10, audio_output_tokens=4, reasoning_tokens=1000), "350"),
    ],
)
def test_part_larger_than_its_side_is_reduced(usage: Usage, expected: str) -> None:
    assert cost(usage, FULL) == D(expected)


def test_tokens_that_only_the_total_names_are_billed_as_output() -> None:
    assert cost(Usage(291, 26, 513), PLAIN) == cost(Usage.of(291, 222), PLAIN)


def test_a_total_below_its_parts_is_no_discount() -> None:
    assert cost(Usage(100, 100, 5), PLAIN) == cost(Usage.of(100, 100), PLAIN)


def test_a_service_tier_has_its_own_rates_and_an_unknown_one_the_standard() -> None:
    price = Price(Rates(D(2), D(2)), {"flex": Price(Rates(D(1), D(1)), {})})
    usage = Usage.of(1, 1)
    assert [cost(usage, price, tier) for tier in ("flex", "default", "on_demand", "", None)] == [2, 4, 4, 4, 4]


def test_a_cheaper_tier_without_known_rates_has_the_standard_ones_and_a_dearer_one_none() -> None:
    price = Price(Rates(D(2), D(2)), {})
    usage = Usage.of(1, 1)
    assert cost(usage, price, "flex") == 4
    assert [cost(usage, price, tier) for tier in ("fast", "priority", "ultrafast")] == [None] * 3
    assert standard_cost(usage, price) == 4


def test_a_call_kept_in_the_us_has_the_price_of_the_configuration() -> None:
    price = price_per_million(input=D(1_000_000), output=D(0))
    assert cost(Usage.of(3, 0), price, "us") == 3
    assert cost(Usage.of(3, 0), price, "fast-us") is None


def test_openais_fast_is_what_it_called_priority_before() -> None:
    price = Price(Rates(D(2), D(2)), {"priority": Price(Rates(D(4), D(4)), {})})
    assert [cost(Usage.of(1, 1), price, tier) for tier in ("fast", "priority", "ultrafast")] == [8, 8, None]


@pytest.mark.parametrize(("tokens", "rate"), [(200_000, 1), (200_001, 2), (300_001, 3)])
def test_a_long_context_costs_the_rates_of_the_highest_threshold_it_passes(tokens: int, rate: int) -> None:
    price = Price(Rates(D(1), D(0)), {}, ((200_000, Rates(D(2), D(0))), (300_000, Rates(D(3), D(0)))))
    assert cost(Usage.of(tokens, 0), price) == tokens * rate


def test_a_long_context_has_rates_of_its_own_in_each_tier() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 1,
            "output_cost_per_token": 10,
            "input_cost_per_token_above_272k_tokens": 2,
            "output_cost_per_token_above_272k_tokens": 15,
            "input_cost_per_token_priority": 3,
            "output_cost_per_token_priority": 30,
            "input_cost_per_token_above_272k_tokens_priority": 6,
            "input_cost_per_token_flex": D("0.5"),
            "output_cost_per_token_flex": 5,
        }
    )
    assert price is not None
    short, long = Usage.of(100, 1), Usage.of(300_000, 1)
    assert [cost(short, price, tier) for tier in (None, "priority", "flex")] == [110, 330, 55]
    # Unlisted rates of a tier are raised as much as the standard ones.
    assert [cost(long, price, tier) for tier in (None, "priority", "flex")] == [600_015, 1_800_045, D("300007.5")]


@pytest.mark.parametrize(
    ("rate", "own", "cached"),
    [("0.5", None, "0.1"), ("0.05", None, "0.05"), ("1", None, "0.1"), ("2", None, "2"), ("0.5", "0.3", "0.3")],
)
def test_unlisted_cache_rate_of_cheaper_tier_is_not_dearer(rate: str, own: str | None, cached: str) -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 1,
            "output_cost_per_token": 10,
            "cache_read_input_token_cost": "0.1",
            "input_cost_per_token_flex": rate,
            "output_cost_per_token_flex": rate,
            "cache_read_input_token_cost_flex": own,
        }
    )
    assert price is not None
    assert cost(Usage(1, 0, 1, cache_read_tokens=1), price, "flex") == D(cached)


def test_unlisted_audio_rate_of_tier_is_proportional() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 3,
            "output_cost_per_token": 10,
            "input_cost_per_audio_token": 12,
            "output_cost_per_audio_token": 20,
            "input_cost_per_token_flex": D("1.5"),
            "output_cost_per_token_flex": 5,
            "input_cost_per_token_priority": 6,
            "output_cost_per_token_priority": 20,
            "input_cost_per_audio_token_priority": 25,
            "input_cost_per_token_batches": 1,
            "output_cost_per_token_batches": 5,
            "output_cost_per_audio_token_batches": 19,
        }
    )
    assert price is not None
    sound = Usage(1, 1, 2, audio_input_tokens=1, audio_output_tokens=1)
    assert [cost(sound, price, tier) for tier in (None, "flex", "priority", "batches")] == [32, 16, 65, 23]


@pytest.mark.parametrize(("free", "paid"), [("input", "output"), ("output", "input")])
def test_audio_rate_is_not_derived_from_free_text(free: str, paid: str) -> None:
    sides = {f"{free}_cost_per_token": 0, f"{paid}_cost_per_token": 5, f"{free}_cost_per_audio_token": 12}
    price = price_from_table({**sides, f"{free}_cost_per_token_flex": 0, f"{paid}_cost_per_token_flex": 3})
    assert price is not None
    assert cost(Usage.of(1, 1), price, "flex") == 3


def test_long_context_and_tier_can_add_rates() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 4,
            "output_cost_per_token": 20,
            "input_cost_per_token_above_200k_tokens": 8,
            "cache_creation_input_token_cost_above_200k_tokens": 9,
            "input_cost_per_token_flex": 2,
            "output_cost_per_token_flex": 10,
            "cache_read_input_token_cost_flex": 1,
        }
    )
    assert price is not None
    long = Usage(300_000, 0, 300_000, cache_read_tokens=200_000, cache_write_tokens=100_000)
    assert [cost(long, price, tier) for tier in (None, "flex")] == [200_000 * 8 + 100_000 * 9, 200_000 + 100_000 * 4]


@pytest.mark.parametrize(("own", "known"), [({"us": 1.1}, {"us"}), ({"fast": 2}, {"fast"}), ({}, set()), ("x", set())])
def test_only_listed_factors_are_known(own: object, known: set[str]) -> None:
    price = price_from_table({"input_cost_per_token": 4, "output_cost_per_token": 20, "provider_specific_entry": own})
    assert price is not None
    assert set(price.tiers) == known


def test_fast_mode_multiplies_all_rates() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": 4,
            "output_cost_per_token": 20,
            "cache_read_input_token_cost": D("0.4"),
            "cache_creation_input_token_cost": 5,
            "cache_creation_input_token_cost_above_1hr": 8,
            "input_cost_per_token_above_200k_tokens": 6,
            "provider_specific_entry": {"us": 1.1, "fast": 2.5},
        }
    )
    assert price is not None
    usage = Usage(100, 10, 110, cache_read_tokens=20, cache_write_tokens=30, cache_write_1h_tokens=10)
    standard = cost(usage, price)
    assert standard is not None
    assert cost(usage, price, "fast") == standard * D("2.5")
    assert cost(Usage.of(300_000, 0), price, "fast") == 300_000 * 15
    assert cost(usage, price, "us") == standard * D("1.1")
    assert cost(usage, price, "fast-us") == standard * D("2.75")


def test_a_table_entry_is_read_with_tiers_and_thresholds() -> None:
    price = price_from_table(
        {
            "input_cost_per_token": D("1e-6"),
            "output_cost_per_token": 1e-5,
            "cache_read_input_token_cost": "0.0000001",
            "cache_creation_input_token_cost": 1.25e-6,
            "input_cost_per_audio_token": 4e-5,
            "output_cost_per_audio_token": 8e-5,
            "output_cost_per_reasoning_token": 5e-6,
            "input_cost_per_token_flex": 5e-7,
            "output_cost_per_token_flex": 5e-6,
            "input_cost_per_token_priority": 2e-6,  # without the other side it is no tier
            "input_cost_per_token_above_200k_tokens": 2e-6,
            "cache_read_input_token_cost_above_200k_tokens": 2e-7,
            "output_cost_per_token_above_128k_tokens": 2e-5,
            "output_cost_per_token_above_300k_tokens": "soon",
            "litellm_provider": "openai",
        }
    )
    assert price is not None
    base = Rates(D("1e-6"), D("1e-5"), D("1e-7"), D("1.25e-6"), D("4e-5"), D("8e-5"), D("5e-6"))
    assert price.rates == base
    flex = Rates(D("5e-7"), D("5e-6"), D("1e-7"), D("6.25e-7"), D("2e-5"), D("4e-5"), D("2.5e-6"))
    assert {tier: one.rates for tier, one in price.tiers.items()} == {"flex": flex}
    assert [threshold for threshold, _ in price.above] == [128_000, 200_000]
    long_rates = price.above[1][1]
    assert (long_rates.input, long_rates.cache_read, long_rates.output) == (D("2e-6"), D("2e-7"), D("1e-5"))


@pytest.mark.parametrize(
    "fees",
    [
        {"input_cost_per_token": 0, "output_cost_per_token": 0, "input_cost_per_query": 0.002},
        {"input_cost_per_token": 0, "output_cost_per_token": 0, "output_cost_per_image": 0.04},
        {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-6, "input_cost_per_request": 0.005},
        {"input_cost_per_token": 1e-7, "output_cost_per_token": 0, "mode": "chat"},
    ],
)
def test_other_fees_make_the_price_unknown(fees: dict[str, object]) -> None:
    assert price_from_table(fees) is None


@pytest.mark.parametrize(
    ("fees", "usd"), [({"low": 0.005, "high": "0.012", "odd": None}, "0.012"), ({}, None), (None, None), (3, None)]
)
def test_web_search_costs_the_highest_listed_price(fees: object, usd: str | None) -> None:
    tokens = {"input_cost_per_token": 1, "output_cost_per_token": 1, "provider_specific_entry": {"us": 1.1}}
    price = price_from_table({**tokens, "search_context_cost_per_query": fees})
    assert price is not None
    assert times(price, D(2)).search == price.search == (D(usd) if usd is not None else None)


def test_what_is_free_has_a_price_of_zero() -> None:
    free = {"input_cost_per_token": 0, "output_cost_per_token": 0, "input_cost_per_query": 0, "input_cost_per_image": 0}
    price = price_from_table({**free, "cache_read_input_token_cost": 0})
    assert price is not None
    assert cost(Usage.of(10, 10), price) == 0


def test_price_of_only_one_side_is_accepted() -> None:
    price = price_from_table({"input_cost_per_token": 0, "output_cost_per_token": 2, "output_cost_per_image": 0.04})
    assert price is not None
    assert cost(Usage.of(10, 10), price) == 20


PICTURES = {"mode": "image_generation", "input_cost_per_token": 5, "output_cost_per_image_token": 40}


def test_output_of_image_model_costs_the_image_rate() -> None:
    price = price_from_table({**PICTURES, "input_cost_per_image_token": 10})
    assert price is not None
    assert price.rates == Rates(D(10), D(40))


def test_image_rate_applies_in_long_contexts() -> None:
    texts = {"output_cost_per_token": 12, "output_cost_per_token_above_200k_tokens": 18}
    price = price_from_table({**PICTURES, **texts, "input_cost_per_token_above_200k_tokens": 8})
    assert price is not None
    assert (price.rates, price.above) == (Rates(D(5), D(40)), ((200_000, Rates(D(8), D(40))),))


def test_tier_without_image_rate_is_unknown() -> None:
    tiers = {f"{side}_cost_per_token_{tier}": 1 for side in ("input", "output") for tier in ("flex", "priority")}
    price = price_from_table({**PICTURES, **tiers, "output_cost_per_image_token_flex": 20})
    assert price is not None
    assert [cost(Usage.of(0, 1), price, tier) for tier in (None, "flex", "priority")] == [40, 20, None]


def test_image_model_is_priced_by_text_or_by_image() -> None:
    texts = {f"{side}_cost_per_token{tier}": 3 for side in ("input", "output") for tier in ("", "_flex")}
    price = price_from_table({"mode": "image_generation", **texts})
    assert price is not None
    assert [cost(Usage.of(0, 1), price, tier) for tier in (None, "flex")] == [3, 3]
    assert price_from_table({"mode": "image_generation", "output_cost_per_image": 0.04}) is None


def test_image_rate_of_text_model_is_not_its_text_rate() -> None:
    price = price_from_table({**PICTURES, "mode": "chat", "output_cost_per_token": 12})
    assert price is not None
    assert price.rates == Rates(D(5), D(12))


def test_an_embedding_has_an_input_price_only() -> None:
    price = price_from_table({"input_cost_per_token": 1e-7})
    assert price is not None
    assert cost(Usage.of(10, 0), price) == D("1e-6")


@pytest.mark.parametrize("value", [None, True, [], "n/a", "NaN", "-1", -1, float("inf"), float("nan")])
def test_entry_without_valid_token_price_has_none(value: object) -> None:
    assert price_from_table({"input_cost_per_token": value, "output_cost_per_token": 1}) is None
