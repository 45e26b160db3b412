"""Look up limits and prices of models in files on disk, never on the network.

The order, first that says something wins, fact by fact: the route in gateway.yaml, config/models.yaml, the table inside
litellm's wheel, and for the tokenizer config/families.yaml. The wheel is found without importing litellm, which would
cost seconds and ask the network.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.config import Facts, PriceRow, RateRow
from gateway.core.pricing import Price, Rates, decimal, price_from_table, price_of_rates, price_per_million, times
from gateway.core.routing import ModelFacts, Route, is_pattern

LITELLM_FILE: Final = "model_prices_and_context_window_backup.json"
_CACHE_SIZE: Final = 4096
#: prices are decimal fractions and must not pass through a double
_ENTRY_DECODER: Final = msgspec.json.Decoder(float_hook=Decimal)
#: our provider name -> the prefix the table uses, where it differs
_TABLE_PREFIX: Final = {"together": "together_ai", "fireworks": "fireworks_ai"}
#: how the names of models begin that were tuned at OpenAI: `ft:gpt-4o-2024-08-06:org::id`; all of a base have one price
_TUNED: Final = "ft:"
#: the end of Bedrock's names
_VERSION: Final = re.compile(r"-v\d+$")
#: (`max_input_tokens`, `max_output_tokens`) of an entry -> the window, where the first is a limit of the input alone:
#: with the second it makes up the window that OpenAI names for these models (gpt-5 and later ones). In all other
#: entries the first number is taken for the window, which the answer is part of. That may be too careful for Gemini's,
#: such as 1,048,576 and 65,536, but Google calls the first the limit of the input and the window alike
#: (https://ai.google.dev/gemini-api/docs/tokens), and names none that has room for both.
_APART: Final[Mapping[tuple[int | None, int | None], int]] = {
    (272_000, 128_000): 400_000,
    (922_000, 128_000): 1_050_000,
    (111_616, 16_384): 128_000,
}
#: entries of one provider stand under several names
_TABLE_FAMILY: Final = {
    "azure_text": "azure",
    "bedrock_converse": "bedrock",
    "cohere_chat": "cohere",
    "fireworks_ai-embedding-models": "fireworks_ai",
    "ollama_chat": "ollama",
}


def is_wanted(name: str, wanted: str) -> bool:
    """Whether a model's name has this part, or is like this shell pattern."""
    return fnmatchcase(name, wanted) if is_pattern(wanted) else wanted in name


class Catalog:
    """Looks up models; one entry is decoded when it is first asked for."""

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
        self._table_name = table_name
        self._known: dict[Route, ModelFacts] = {}

    def configure(self, names: Mapping[str, str], uplifts: Mapping[str, str]) -> None:
        """Look providers up as they are configured.

        `names`: ours -> the table's; `uplifts`: ours -> the field of an entry that says how many times its prices are
        those of where the provider is called.
        """
        self._prefixes, self._uplifts = {**_TABLE_PREFIX, **names}, uplifts
        self._known.clear()

    def facts(self, route: Route) -> ModelFacts:
        """Everything known of the model behind a route; fields stay None where nothing is."""
        found = self._known.get(route)
        if found is None:
            if len(self._known) >= _CACHE_SIZE:  # model names are the clients' to choose
                self._known.clear()
            found = self._known[route] = self._look_up(route)
        return found

    def offered(self, providers: Container[str], wanted: str = "") -> Iterator[tuple[str, str]]:
        """(provider, model) of every entry that one of these providers serves; `wanted`: see `is_wanted`."""
        seen: set[tuple[str, str]] = set()
        part = "" if is_pattern(wanted) else wanted.rpartition("/")[2]
        for provider, model in (*self._own_names(), *self._table_names(part)):
            names = (model, f"{provider}/{model}")
            if provider in providers and (provider, model) not in seen and any(is_wanted(one, wanted) for one in names):
                seen.add((provider, model))
                yield provider, model

    def _own_names(self) -> Iterator[tuple[str, str]]:
        for name in self._own:
            provider, slash, model = name.partition("/")
            if slash:
                yield provider, model

    def _table_names(self, part: str) -> Iterator[tuple[str, str]]:
        ours: dict[str, list[str]] = {}
        for mine, prefix in self._prefixes.items():
            ours.setdefault(_family(prefix), []).append(mine)
        for name, raw in self._table.items():
            if part not in name:
                continue
            entry = _decode_entry(raw) or {}
            theirs = entry.get("litellm_provider")
            if isinstance(theirs, str):
                family = _family(theirs)
                if family in _TABLE_PREFIX.values() and not name.startswith(f"{family}/"):
                    continue  # a price for all models of one size, which is no model
                for provider in dict.fromkeys((*ours.get(family, ()), family)):
                    yield provider, name.removeprefix(f"{family}/")

    def _look_up(self, route: Route) -> ModelFacts:
        layers: list[tuple[str, ModelFacts]] = []
        if route.rule is not None:
            layers.append((f"models: match {route.rule.match}", route.rule.facts))
        for name in (f"{route.provider}/{route.model}", route.model):
            own = self._own.get(name)
            layers += [("models.yaml", facts_of(own))] if own is not None else []
        own = self._own.get(_vendor_name(route.model))
        # A host may not know the vendor's betas.
        layers += [("models.yaml", replace(facts_of(own), betas=None))] if own is not None else []
        layers += [(self._table_name, facts) for facts in self._from_table(route)]
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
                # A bare name may stand for the same model at another provider: its limits hold, its price does not.
                owned = name not in bare or _family(str(entry.get("litellm_provider"))) == _family(prefix)
                uplift = decimal(entry.get(self._uplifts.get(route.provider, "")))
                return [_table_facts(entry, priced=owned, uplift=uplift)]
        return []

    def _entry(self, name: str) -> dict[str, Any] | None:
        """Return the entry of a name, or of the model that the name is an alias of: `claude-opus-latest`."""
        raw = self._table.get(name)
        entry = _decode_entry(raw) if raw is not None else None
        alias = entry.get("alias_of") if entry is not None else None
        target = self._table.get(alias) if isinstance(alias, str) else None
        return _decode_entry(target) if target is not None else entry


def load_litellm_table() -> dict[str, msgspec.Raw]:
    """The table of litellm as raw entries; empty where litellm is not installed."""
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return {}
    try:
        content = (Path(spec.origin).parent / LITELLM_FILE).read_bytes()
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError):
        return {}


def facts_of(row: Facts) -> ModelFacts:
    """A configured row as core reads it."""
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
    """Return the vendor's name of a model that a host calls otherwise, and "" where the name is not of that kind.

    `claude-sonnet-5-5` of OpenRouter's `anthropic/claude-sonnet-5.5`, Bedrock's `us.anthropic.claude-sonnet-5-5-v1:0`
    and Vertex's `claude-sonnet-5-5@default`; `gpt-6-sol` of `openai/gpt-6-sol`.
    """
    name = model.rpartition("/")[2].partition("@")[0].partition(":")[0]
    claude = name.find("claude-")
    if claude >= 0:
        name = _VERSION.sub("", name[claude:]).replace(".", "-")
    return name if name != model and ("/" in model or claude >= 0) else ""


def _family(theirs: str) -> str:
    """The provider without its variant: `vertex_ai` of `vertex_ai-anthropic_models`; most have no variants."""
    if theirs.startswith("vertex_ai-"):
        return "vertex_ai"
    return _TABLE_FAMILY.get(theirs, theirs)


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
    is_apart = (most, output) in _APART
    return ModelFacts(
        window=_APART[most, output] if is_apart else window,
        input=most if is_apart else None,
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
            # A window that was configured is not made larger by what a table has, nor is a larger one than the table's
            # limited by the input that fits that.
            is_said = name in chosen or (name == "betas" and "window" in chosen)
            is_said |= name == "input" and facts.window is not None and chosen["window"] > facts.window
            if value is not None and not is_said:
                chosen[name] = value
                sources[name] = source
    return ModelFacts(**chosen, sources=sources)
