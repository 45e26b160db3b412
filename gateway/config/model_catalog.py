"""Look up limits and prices of models in files on disk, never on the network.

Each fact comes from the first of these sources that has it: the route in gateway.yaml, config/models.yaml, the table
of `price_table`, and for the tokenizer config/families.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from gateway.config import Facts, PriceRow, RateRow
from gateway.core.pricing import Price, Rates, decimal, price_from_table, price_of_rates, price_per_million, times
from gateway.core.providers import PRICE_TABLE_ALIASES, PROVIDERS
from gateway.core.routing import ModelFacts, Route, is_pattern

_CACHE_SIZE: Final = 4096
#: prices are decimal fractions and must not be converted to floating point
_ENTRY_DECODER: Final = msgspec.json.Decoder(float_hook=Decimal)
#: our provider name -> the prefix in the table, if it differs
_TABLE_PREFIX: Final = {row.name: row.price_table for row in PROVIDERS if row.price_table}
#: prefix of fine-tuned models at OpenAI: `ft:gpt-4o-2024-08-06:org::id`; all of one base model have the same price
_TUNED: Final = "ft:"
#: the ending of model names at Bedrock
_VERSION: Final = re.compile(r"-v\d+$")
#: (`max_input_tokens`, `max_output_tokens`) of an entry -> the context window, if the first number is a limit of the
#: input alone. The two numbers add up to the window that OpenAI documents for these models (gpt-5 and later). In all
#: other entries the first number is treated as the window, which includes the output. That may be too strict for
#: Gemini, such as 1,048,576 and 65,536. But Google calls the first number both the input limit and the window
#: (https://ai.google.dev/gemini-api/docs/tokens), and documents no window with room for both.
_SEPARATE_LIMITS: Final[Mapping[tuple[int | None, int | None], int]] = {
    (272_000, 128_000): 400_000,
    (922_000, 128_000): 1_050_000,
    (111_616, 16_384): 128_000,
}


def is_wanted(name: str, wanted: str) -> bool:
    """Return whether a model name contains this text, or matches it if it is a shell pattern."""
    return fnmatchcase(name, wanted) if is_pattern(wanted) else wanted in name


class Catalog:
    """Look up models. An entry is decoded when it is first needed.

    Attributes:
        table_name: names the table in the sources of facts.
    """

    def __init__(
        self,
        own: Mapping[str, Facts],
        table: Mapping[str, msgspec.Raw],
        table_name: str = "litellm",
        tokenizers: Callable[[Route], str] | None = None,
    ) -> None:
        self._own = own
        self._prefixes: Mapping[str, str] = _TABLE_PREFIX
        self._uplifts: Mapping[str, str] = {}
        self._tokenizers = tokenizers
        self._table = table
        self.table_name = table_name
        self._known: dict[Route, ModelFacts] = {}

    def configure(self, names: Mapping[str, str], uplifts: Mapping[str, str]) -> None:
        """Set how configured providers are looked up.

        Args:
            names: our provider name -> the name in the table.
            uplifts: our provider name -> the field of an entry with the price factor of the provider's region.
        """
        self._prefixes, self._uplifts = {**_TABLE_PREFIX, **names}, uplifts
        self._known.clear()

    def facts(self, route: Route) -> ModelFacts:
        """Return all known facts of the model of a route; unknown ones are None."""
        facts = self._known.get(route)
        if facts is None:
            if len(self._known) >= _CACHE_SIZE:  # clients choose the model names
                self._known.clear()
            facts = self._known[route] = self._look_up(route)
        return facts

    def offered(self, providers: Container[str], wanted: str = "") -> Iterator[tuple[str, str]]:
        """Yield (provider, model) of every entry that one of these providers serves. `wanted`: see `is_wanted`."""
        seen: set[tuple[str, str]] = set()
        part = "" if is_pattern(wanted) else wanted.rpartition("/")[2]
        for provider, model in (*self._own_names(), *self._table_names(part)):
            names = (model, f"{provider}/{model}")
            if (
                provider in providers
                and (provider, model) not in seen
                and any(is_wanted(name, wanted) for name in names)
            ):
                seen.add((provider, model))
                yield provider, model

    def _own_names(self) -> Iterator[tuple[str, str]]:
        for name in self._own:
            provider, slash, model = name.partition("/")
            if slash:
                yield provider, model

    def _table_names(self, part: str) -> Iterator[tuple[str, str]]:
        by_family: dict[str, list[str]] = {}
        for own_name, prefix in self._prefixes.items():
            by_family.setdefault(_family(prefix), []).append(own_name)
        for name, raw in self._table.items():
            if part not in name:
                continue
            entry = _decode_entry(raw) or {}
            listed = entry.get("litellm_provider")
            if isinstance(listed, str):
                family = _family(listed)
                if family in _TABLE_PREFIX.values() and not name.startswith(f"{family}/"):
                    continue  # a price for all models of one size, not a model
                for provider in dict.fromkeys((*by_family.get(family, ()), family)):
                    yield provider, name.removeprefix(f"{family}/")

    def _look_up(self, route: Route) -> ModelFacts:
        layers: list[tuple[str, ModelFacts]] = []
        if route.rule is not None:
            layers.append((f"models: match {route.rule.match}", route.rule.facts))
        for name in (f"{route.provider}/{route.model}", route.model):
            own = self._own.get(name)
            layers += [("models.yaml", facts_of(own))] if own is not None else []
        own = self._own.get(_vendor_name(route.model))
        # Another host may not support the betas of the vendor.
        layers += [("models.yaml", replace(facts_of(own), betas=None))] if own is not None else []
        layers += [(self.table_name, facts) for facts in self._from_table(route)]
        if self._tokenizers is not None:
            layers.append(("families.yaml", ModelFacts(tokenizer=self._tokenizers(route))))
        return _merge(layers)

    def _from_table(self, route: Route) -> list[ModelFacts]:
        prefix, bare = self._prefixes.get(route.provider, route.provider), [route.model]
        if route.model.startswith(_TUNED):
            bare.append(":".join(route.model.split(":")[:2]))
        bare.append(_vendor_name(route.model))
        for name in (f"{prefix}/{route.model}", *bare):
            entry = self._entry(name)
            if entry is not None:
                # A bare name can be the same model at another provider: its limits apply, but not its price.
                owned = name not in bare or _family(str(entry.get("litellm_provider"))) == _family(prefix)
                uplift = decimal(entry.get(self._uplifts.get(route.provider, "")))
                return [_table_facts(entry, priced=owned, uplift=uplift)]
        return []

    def _entry(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a name, or of the model of which the name is an alias, as `claude-opus-latest`."""
        raw = self._table.get(name)
        entry = _decode_entry(raw) if raw is not None else None
        alias = entry.get("alias_of") if entry is not None else None
        target = self._table.get(alias) if isinstance(alias, str) else None
        return _decode_entry(target) if target is not None else entry


def facts_of(row: Facts) -> ModelFacts:
    """Convert configured facts for core."""
    return ModelFacts(row.window, row.input, row.output, row.tokenizer, _price(row.price), row.reasoning, row.betas)


def _price(row: PriceRow | None) -> Price | None:
    if row is None:
        return None
    above = {size: _rates(long) for size, long in row.above.items()}
    return price_of_rates(_rates(row), above, row.times, row.search)


def _rates(row: RateRow) -> Rates:
    return price_per_million(
        input=row.input,
        output=row.output,
        cache_read=row.cache_read,
        cache_write=row.cache_write,
        cache_write_1h=row.cache_write_1h,
    ).rates


def _vendor_name(model: str) -> str:
    """Return the vendor's name of a model with another name at its host, or "" for other names.

    Examples: `claude-sonnet-5-5` for OpenRouter's `anthropic/claude-sonnet-5.5`, for Bedrock's
    `us.anthropic.claude-sonnet-5-5-v1:0` and for Vertex's `claude-sonnet-5-5@default`; `gpt-6-sol` for
    `openai/gpt-6-sol`.
    """
    name = model.rpartition("/")[2].partition("@")[0].partition(":")[0]
    claude = name.find("claude-")
    if claude >= 0:
        name = _VERSION.sub("", name[claude:]).replace(".", "-")
    return name if name != model and ("/" in model or claude >= 0) else ""


def _family(listed: str) -> str:
    """Return a provider of the table without its variant: `vertex_ai` for `vertex_ai-anthropic_models`."""
    if listed.startswith("vertex_ai-"):
        return "vertex_ai"
    return PRICE_TABLE_ALIASES.get(listed, listed)


def _decode_entry(raw: msgspec.Raw) -> dict[str, Any] | None:
    try:
        value = _ENTRY_DECODER.decode(raw)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def _table_facts(entry: Mapping[str, Any], *, priced: bool, uplift: Decimal | None) -> ModelFacts:
    price = price_from_table(entry) if priced else None
    most, output = _limit(entry.get("max_input_tokens")), _limit(entry.get("max_output_tokens"))
    window = most or _limit(entry.get("max_tokens"))
    is_separate = (most, output) in _SEPARATE_LIMITS
    return ModelFacts(
        window=_SEPARATE_LIMITS[most, output] if is_separate else window,
        input=most if is_separate else None,
        output=output,
        price=times(price, uplift) if price is not None and uplift is not None else price,
        reasoning=entry.get("supports_reasoning") is True,
    )


def _limit(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _merge(layers: list[tuple[str, ModelFacts]]) -> ModelFacts:
    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, facts in layers:
        for name in ("betas", "window", "input", "output", "tokenizer", "price", "reasoning"):
            value = getattr(facts, name)
            # Betas of a later source do not enlarge a configured window. An input limit of a later source does not
            # apply if the chosen window is larger than the window of that source.
            is_settled = name in chosen or (name == "betas" and "window" in chosen)
            is_settled |= name == "input" and facts.window is not None and chosen["window"] > facts.window
            if value is not None and not is_settled:
                chosen[name] = value
                sources[name] = source
    return ModelFacts(**chosen, sources=sources)
