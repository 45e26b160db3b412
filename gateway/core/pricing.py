"""Compute the cost of a call in USD from its usage and the model's prices.

Prices depend on the model, the context length, the service tier, and on cached, audio and reasoning tokens. A `Price`
holds all prices of a model, and `cost` selects among them. Table keys are those of litellm's file
`model_prices_and_context_window`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields, replace
from decimal import Decimal, InvalidOperation
from typing import Final

from gateway.core.usage import Usage
from gateway.core.values import dataclass

#: Keys of the table and their field in `Rates`. No model has two long cache times: Anthropic and Moonshot cache for one
#: hour and OpenAI for twelve, so both share a field.
_FIELDS: Final = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h",
    "cache_creation_input_token_cost_above_12hr": "cache_write_1h",
    "input_cost_per_audio_token": "audio_input",
    "output_cost_per_audio_token": "audio_output",
    "output_cost_per_reasoning_token": "reasoning",
}
#: a key of `_FIELDS` for long prompts, such as `input_cost_per_token_above_272k_tokens_priority`
_ABOVE: Final = re.compile(r"^(.+)_above_(\d+)k_tokens(_[a-z]+)?$")
#: a key with the rate of a service tier: `input_cost_per_token_flex`
_TIER: Final = re.compile(r"^input_cost_per_token_([a-z]+)$")
#: rates that rise in proportion to another rate if the table does not list them
_FOLLOWS: Final = {
    "cache_read": "input",
    "cache_write": "input",
    "cache_write_1h": "input",
    "audio_input": "input",
    "audio_output": "output",
    "reasoning": "output",
}
#: tiers whose name in APIs differs from the one in the table; OpenAI renamed its priority processing
_ALSO: Final = {"fast": "priority", "batch": "batches"}
#: Tiers that cost more than the standard tier. If their rates are unknown, the standard rates would be too low.
_DEARER: Final = frozenset({"fast", "fast-us", "priority", "ultrafast"})
_MILLION: Final = Decimal(1_000_000)
#: The mode of image models. Their usage does not always separate image tokens from text tokens.
_PICTURES: Final = "image_generation"
#: fees besides those for tokens
_FEES: Final = ("input_cost_per_query", "input_cost_per_request")


@dataclass(frozen=True, slots=True)
class Rates:
    """USD per token. None: not listed; then the rate named in the comment applies."""

    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None  # else input
    cache_write: Decimal | None = None  # else input
    audio_input: Decimal | None = None  # else input
    audio_output: Decimal | None = None  # else output
    reasoning: Decimal | None = None  # else output
    cache_write_1h: Decimal | None = None  # kept for an hour (Anthropic) or 12 hours (OpenAI); else cache_write


@dataclass(frozen=True, slots=True)
class Price:
    """The prices of one model: standard rates, rates for long contexts, and both for other service tiers."""

    rates: Rates
    tiers: Mapping[str, Price]
    #: (input tokens above which the rates apply, rates), ascending
    above: tuple[tuple[int, Rates], ...] = ()
    #: USD for each web search by the provider, in any tier; None: unknown
    search: Decimal | None = Decimal(0)

    def rates_for(self, usage: Usage, tier: str | None) -> Rates | None:
        """Return the rates for a call in a service tier, or None if the tier is dearer by an unknown amount.

        Any other unknown tier (`flex`, `default`, a provider's own) has the standard rates.
        """
        own = self.tiers.get(tier or "") or self.tiers.get(_ALSO.get(tier or "", ""))
        if own is not None:
            return own.of_size(usage)
        return None if tier in _DEARER else self.of_size(usage)

    @property
    def is_free(self) -> bool:
        """Return whether nothing is charged: all rates of all tiers are known and zero."""
        all_rates = (self.rates, *(rates for _, rates in self.above))
        listed = (getattr(rates, item.name) for rates in all_rates for item in fields(Rates))
        return not any(listed) and self.search == 0 and all(tier.is_free for tier in self.tiers.values())

    def of_size(self, usage: Usage) -> Rates:
        """Return the standard rates for the input size of a call."""
        rates = self.rates
        for threshold, long_rates in self.above:
            if usage.input_tokens > threshold:
                rates = long_rates
        return rates


def cost(usage: Usage, price: Price, tier: str | None = None) -> Decimal | None:
    """Return the cost of a call in USD, or None if the rates of its tier are unknown, see `Price.rates_for`."""
    rates = price.rates_for(usage, tier)
    return _cost(usage, rates) if rates is not None else None


def cache_savings(usage: Usage, price: Price, tier: str | None = None) -> Decimal | None:
    """Return what a call would have cost more without the cache, in USD; negative if writing to it cost more.

    None if the rates of the service tier are unknown.
    """
    uncached = replace(usage, cache_read_tokens=0, cache_write_tokens=0, cache_write_1h_tokens=0)
    without, actual = cost(uncached, price, tier), cost(usage, price, tier)
    return without - actual if without is not None and actual is not None else None


def standard_cost(usage: Usage, price: Price) -> Decimal:
    """Return the cost of a call in USD in the standard service tier."""
    return _cost(usage, price.of_size(usage))


def _cost(usage: Usage, rates: Rates) -> Decimal:
    """Return the cost of a call in USD.

    - Cached, audio and reasoning tokens are part of input or output. Each is subtracted and priced separately.
    - A part that exceeds its side is reduced to it. Azure reports more cached tokens than prompt tokens.
    - Tokens in `total_tokens` that are neither input nor output are reasoning tokens, billed as output (xAI).
    """
    read = min(usage.cache_read_tokens, usage.input_tokens)
    write = min(usage.cache_write_tokens, usage.input_tokens - read)
    write_1h = min(usage.cache_write_1h_tokens, write)
    write_rate = _or(rates.cache_write, rates.input)
    audio_in = min(usage.audio_input_tokens, usage.input_tokens - read - write)
    plain_in = usage.input_tokens - read - write - audio_in
    unlisted = max(0, usage.total_tokens - usage.input_tokens - usage.output_tokens)
    out = usage.output_tokens + unlisted
    audio_out = min(usage.audio_output_tokens, out)
    reasoning = min(usage.reasoning_tokens, out - audio_out)
    return (
        plain_in * rates.input
        + read * _or(rates.cache_read, rates.input)
        + (write - write_1h) * write_rate
        + write_1h * _or(rates.cache_write_1h, write_rate)
        + audio_in * _or(rates.audio_input, rates.input)
        + (out - audio_out - reasoning) * rates.output
        + audio_out * _or(rates.audio_output, rates.output)
        + reasoning * _or(rates.reasoning, rates.output)
    )


def price_per_million(
    *,
    input: Decimal,  # noqa: A002
    output: Decimal,
    cache_read: Decimal | None = None,
    cache_write: Decimal | None = None,
    cache_write_1h: Decimal | None = None,
) -> Price:
    """Return a price from USD per million tokens."""

    def scaled(value: Decimal | None) -> Decimal | None:
        return None if value is None else value / _MILLION

    rates = Rates(
        input / _MILLION,
        output / _MILLION,
        scaled(cache_read),
        scaled(cache_write),
        cache_write_1h=scaled(cache_write_1h),
    )
    return Price(rates, tiers={})


def price_of_rates(
    rates: Rates, above: Mapping[int, Rates], factors: Mapping[str, Decimal], search: Decimal | None
) -> Price:
    """Return a price from standard rates, rates for long prompts, and a factor for each service tier.

    Anthropic's `fast` and `us` are multiplied if a call has both. `search`: USD for each web search.
    """
    long = tuple(sorted(above.items(), key=lambda item: item[0]))
    known = dict(factors)
    if "fast" in known and "us" in known:
        known["fast-us"] = known["fast"] * known["us"]
    tiers = {tier: times(Price(rates, {}, long), factor) for tier, factor in known.items()}
    return Price(rates, tiers, long, search)


def times(price: Price, factor: Decimal) -> Price:
    """Return a price with all rates multiplied by a factor."""
    tiers = {tier: times(own, factor) for tier, own in price.tiers.items()}
    above = tuple((size, _scaled(long, factor)) for size, long in price.above)
    return Price(_scaled(price.rates, factor), tiers, above, price.search)


def price_from_table(entry: Mapping[str, object]) -> Price | None:
    """Return the price in an entry of litellm's table, or None if it has no token prices or has other fees."""
    entry = _flattened(entry)
    rates = _rates(entry, "")
    if rates is None or _has_fees(entry, rates):
        return None
    above = _above(entry, rates, None)
    searches = entry.get("search_context_cost_per_query")
    fees = [decimal(fee) or Decimal(0) for fee in searches.values()] if isinstance(searches, Mapping) else []
    price = price_of_rates(rates, above, dict(_times(entry)), max(fees, default=None))
    return replace(price, tiers={**_tiers(entry, rates, above), **price.tiers})


def _tiers(entry: Mapping[str, object], rates: Rates, above: Mapping[int, Rates]) -> dict[str, Price]:
    """Return the prices of the service tiers that have their own rates in the entry."""
    tiers: dict[str, Price] = {}
    for name in entry:
        match = _TIER.match(name)
        own = _rates(entry, f"_{match[1]}") if match else None
        if match and own is not None:
            own = _with_unlisted(own, rates)
            usual = {size: _in_proportion(own, rates, long) for size, long in above.items()}
            tiers[match[1]] = price_of_rates(own, _above(entry, own, f"_{match[1]}", usual), {}, Decimal(0))
    return tiers


def _flattened(entry: Mapping[str, object]) -> Mapping[str, object]:
    """Return the entry with the bands of `tiered_pricing` written like the keys of other entries.

    Alibaba's models have such bands. The number of input tokens selects one, and its rates apply to the whole call.
    """
    bands = entry.get("tiered_pricing")
    flat = dict(entry)
    for band in bands if isinstance(bands, list) else ():
        size = band.get("range") if isinstance(band, Mapping) else None
        start = decimal(size[0]) if isinstance(size, list) and size else None
        if start is not None:
            suffix = f"_above_{int(start) // 1000}k_tokens" if start else ""
            flat.update({key + suffix: rate for key, rate in band.items() if key in _FIELDS})
    return flat


def _has_fees(entry: Mapping[str, object], rates: Rates) -> bool:
    """Return whether something besides these tokens is billed.

    Examples are the queries of a reranker, whose tokens are listed with a price of 0, and a router, which lists a price
    for its input only.
    """
    if entry.get("mode") == "chat" and rates.input and not rates.output:
        return True
    is_free = not (rates.input or rates.output)
    return any(decimal(entry[name]) for name in entry if name in _FEES or (is_free and "_cost_per_" in name))


def _times(entry: Mapping[str, object]) -> Iterator[tuple[str, Decimal]]:
    """Yield the factors of Anthropic's `speed: fast` and `inference_geo: us`."""
    own = entry.get("provider_specific_entry")
    if not isinstance(own, Mapping):
        return
    for tier in ("fast", "us"):
        factor = decimal(own.get(tier))
        if factor is not None:
            yield tier, factor


def _scaled(rates: Rates, factor: Decimal) -> Rates:
    known = ((field.name, getattr(rates, field.name)) for field in fields(rates))
    return replace(rates, **{name: rate * factor for name, rate in known if rate is not None})


def _rates(entry: Mapping[str, object], suffix: str) -> Rates | None:
    def get(name: str) -> Decimal | None:
        return decimal(entry.get(name + suffix))

    listed = {field: rate for key, field in _FIELDS.items() if (rate := get(key)) is not None}
    plain_in, plain_out = listed.pop("input", None), listed.pop("output", None)
    if entry.get("mode") == _PICTURES:
        if suffix and "output_cost_per_image_token" in entry and get("output_cost_per_image_token") is None:
            return None
        plain_in = _dearer(plain_in, get("input_cost_per_image_token"))
        plain_out = _dearer(plain_out, get("output_cost_per_image_token"))
    if plain_in is None or (plain_out is None and suffix):
        return None
    return Rates(plain_in, plain_out or Decimal(0), **listed)


def _dearer(one: Decimal | None, other: Decimal | None) -> Decimal | None:
    return max((rate for rate in (one, other) if rate is not None), default=None)


def _with_unlisted(own: Rates, rates: Rates) -> Rates:
    """Return a tier's rates with the unlisted ones in proportion to input or output, as in the standard tier.

    Reading the cache costs no more in a cheaper tier than in the standard tier.
    """
    read = own.cache_read
    if read is None and rates.cache_read is not None and own.input <= rates.input:
        read = min(own.input, rates.cache_read)
    named = {"cache_read", *(field for field in _FOLLOWS if getattr(own, field) is not None)}
    return replace(own, cache_read=read, **_raised(rates, own, named))


def _raised(standard: Rates, risen: Rates, named: Container[str]) -> dict[str, Decimal]:
    """Return the rates that are not in `named`: the standard ones, raised as much as input or output in `risen`."""
    changes: dict[str, Decimal] = {}
    for field, side in _FOLLOWS.items():
        rate, before = getattr(standard, field), getattr(standard, side)
        if field not in named and rate is not None and before:
            changes[field] = rate * getattr(risen, side) / before
    return changes


def _in_proportion(own: Rates, rates: Rates, long: Rates) -> Rates:
    """Return the long-context rates of a tier that lists none: raised as much as the standard rates are."""
    changes = {}
    for field in fields(own):
        own_rate, usual, longer = (getattr(row, field.name) for row in (own, rates, long))
        if own_rate is not None and usual and longer is not None:
            changes[field.name] = own_rate * longer / usual
    return replace(own, **changes)


def _above(
    entry: Mapping[str, object], base: Rates, suffix: str | None, usual: Mapping[int, Rates] | None = None
) -> dict[int, Rates]:
    """Return the rates for long contexts by their least size in input tokens.

    `usual`: rates for sizes or fields that the entry does not list. Without it, cache rates rise in proportion to
    input.
    """
    listed: dict[int, dict[str, Decimal]] = {}
    for name, raw in entry.items():
        match = _ABOVE.match(name)
        field = _FIELDS.get(match[1]) if match and match[3] == suffix else None
        value = decimal(raw) if field else None
        if match and field and value is not None:
            # For an image model the base rate can be that of image tokens, which is higher than that of text.
            rate = max(value, getattr(base, field) or value)
            listed.setdefault(int(match[2]) * 1000, {})[field] = rate
    by_size = dict(usual or {})
    for size, rates in listed.items():
        long = replace(by_size.get(size, base), **rates)
        by_size[size] = long if size in by_size else replace(long, **_raised(base, long, rates))
    return by_size


def decimal(value: object) -> Decimal | None:
    """Return a number of the table or of a provider's response, or None if it is not a number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() and number >= 0 else None


def _or(value: Decimal | None, fallback: Decimal) -> Decimal:
    return fallback if value is None else value
