"""Prints what is known of each model, and the models that the tables do not name yet. Needs no network.

    python .ci/models.py            the models of vendors that have a family
    python .ci/models.py haiku gpt  only those whose names contain one of these

A family is chosen by the patterns in config/families.yaml. Limits and prices come from config/models.yaml and from the
table in config/prices.json.gz. docs/guides/models.md says what to check when a new model appears.
"""

# ruff: noqa: INP001, T201  # a script

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

import msgspec

from gateway.config import families, model_facts
from gateway.config.model_catalog import Catalog
from gateway.config.price_table import load_price_table
from gateway.core.counting.families import TokenizerFamilies, TokenizerFamily
from gateway.core.routing import ModelFacts, Route

#: providers of the table that serve the models of one vendor, or of few; hosts that serve the models of any vendor are
#: left out, since most of those have no family
VENDORS: Final = frozenset(
    {
        "anthropic", "azure", "cerebras", "codestral", "dashscope", "deepseek", "gemini", "groq", "meta", "meta_llama",
        "mistral", "moonshot", "openai", "perplexity", "vertex_ai-anthropic_models", "vertex_ai-deepseek_models",
        "vertex_ai-language-models", "vertex_ai-llama_models", "vertex_ai-mistral_models", "vertex_ai-moonshot_models",
        "vertex_ai-openai_models", "vertex_ai-qwen_models", "vertex_ai-zai_models", "xai", "zai",
    }
)  # fmt: skip
#: models of these vendors that need no family, and why
NO_FAMILY: Final[Mapping[str, str]] = {
    "container": "a sandbox",
    "model-router": "the router's choice decides",
    "deep-research-*": "an agent: it bills the tokens of many calls",
    "preset/*": "an agent that calls models of other vendors",
    "lyria-*": "makes music",
    "sam-*": "finds objects in images",
    "learnlm-*": "withdrawn",
    "medlm-*": "withdrawn",
    "pplx-*": "withdrawn",
    "muse-*": "nothing is measured",
    "*nemotron*": "nothing is measured",
}
#: ends the name of a family that takes the names no other family lists
NEXT: Final = "-next"
#: the family of everything else
OTHER: Final = "other"


class Known(NamedTuple):
    """A model, its family and the facts about it."""

    provider: str
    model: str
    family: TokenizerFamily
    facts: ModelFacts


def known_models(table: Mapping[str, msgspec.Raw], chosen: TokenizerFamilies) -> Iterator[Known]:
    """Return each chat model of the vendors in the table, and each of config/models.yaml."""
    own = model_facts()
    catalog = Catalog(own, table)
    names = [*_of_table(table), *_of_rows(own)]
    for provider, model, wire in dict.fromkeys(names):
        facts = catalog.facts(Route(provider, model))
        yield Known(provider, model, chosen.find(model, provider, wire), facts)


def _of_table(table: Mapping[str, msgspec.Raw]) -> Iterator[tuple[str, str, str]]:
    wires = {"chat": "chat", "responses": "responses"}
    for name, raw in table.items():
        entry = msgspec.json.decode(raw)
        theirs, wire = entry.get("litellm_provider"), wires.get(str(entry.get("mode")))
        if theirs in VENDORS and wire is not None:
            provider = str(theirs).partition("-")[0]
            yield provider, name.removeprefix(f"{provider}/"), wire


def _of_rows(rows: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for name in rows:
        provider, slash, model = name.partition("/")
        if provider != "mock":  # the built-in provider counts by a rule of its own
            yield (provider, model, "chat") if slash else ("", name, "chat")


def without_family(models: Iterable[Known]) -> list[str]:
    """Return the models that should have a family and have none."""
    return [
        f"{one.provider}/{one.model}"
        for one in models
        if one.family.name == OTHER and not any(fnmatchcase(one.model, pattern) for pattern in NO_FAMILY)
    ]


def unlisted(models: Iterable[Known]) -> list[Known]:
    """Return the models that are counted as the newest of their vendor because no pattern names them."""
    return [one for one in models if one.family.name.endswith(NEXT) and not one.model.endswith("latest")]


def main(wanted: Sequence[str]) -> None:
    """Print the tables."""
    chosen = families()
    models = list(known_models(load_price_table(), chosen))
    order = {family.name: place for place, family in enumerate(chosen)}
    head = ("family", "model", "window", "output", "$ in", "$ out", "binding", "forced_choice")
    shown = [one for one in models if not wanted or any(part in one.model for part in wanted)]
    shown.sort(key=lambda one: (order[one.family.name], one.model))
    _print([head, *(_cells(one) for one in shown)])
    for title, names in (
        ("No pattern names these; they are counted as the newest of their vendor:", map(_name, unlisted(models))),
        ("These have no family:", without_family(models)),
        ("These are newer than the price table and have rows in config/models.yaml:", _rows_of_new_models()),
    ):
        print(f"\n{title}", *sorted(names), sep="\n  ")


def _rows_of_new_models() -> list[str]:
    """Return the rows of config/models.yaml that say what the table does not; those with `betas` add to it."""
    return [name for name, row in model_facts().items() if row.betas is None and not name.startswith("mock/")]


def _name(one: Known) -> str:
    return f"{one.provider}/{one.model} ({one.family.name})"


def _cells(one: Known) -> tuple[str, ...]:
    price = one.facts.price
    rates = (price.rates.input, price.rates.output) if price is not None else (None, None)
    limits = (one.facts.window, one.facts.output)
    return (
        one.family.name,
        f"{one.provider}/{one.model}".lstrip("/"),
        *(f"{limit:,}" if limit else "?" for limit in limits),
        *(_usd(rate) for rate in rates),
        one.family.binding,
        one.family.forced_choice,
    )


def _usd(rate: Decimal | None) -> str:
    return f"{(rate * 1_000_000).normalize():f}" if rate is not None else "?"


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
