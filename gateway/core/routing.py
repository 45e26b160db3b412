"""Map a model name to providers and to the model's name there.

Routes are tried in the order they are written, first match wins. `provider/model` means that provider, so a model can
be reached without a route of its own; only a route whose pattern begins so itself comes before that. Hosts have models
whose names begin with a provider's, other ones' (`openai/gpt-oss-120b`) and their own (`groq/compound`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Final, NamedTuple

from gateway.core.errors import UnknownModel
from gateway.core.pricing import Price
from gateway.core.values import dataclass

#: characters of a shell pattern, which stand in no name
_MARKS: Final = frozenset("*?[")
#: providers and models that one call may be sent to, one after the other
MOST_ROUTES: Final = 8


def is_pattern(text: str) -> bool:
    """Whether it is a shell pattern and no name, nor part of one."""
    return not _MARKS.isdisjoint(text)


def is_of_provider(match: str, providers: Collection[str]) -> bool:
    """Whether a pattern takes names that begin with a provider's, and no others. Its `*` takes no slash."""
    prefix, slash, _ = match.partition("/")
    return bool(slash) and prefix in providers


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model; None where nobody says.

    `window`: tokens of input and answer together; `input`: of input alone, where that is limited for itself; `output`:
    of an answer. `reasoning`: it may think before it answers, which is billed and may not be shown. `betas`: what a
    call may name in its header `anthropic-beta` -> the larger window that it then has. `sources`: fact -> where it was
    read.
    """

    window: int | None = None
    input: int | None = None
    output: int | None = None
    tokenizer: str | None = None
    price: Price | None = None
    reasoning: bool | None = None
    betas: Mapping[str, int] | None = None
    sources: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelRule:
    """One entry of `models:`: a shell pattern, where its calls go, and facts that override the tables.

    `shares`: where several providers share its calls, each with its weight, `provider` the first of them; `fallback`:
    models, as calls name them, that are called where none of these can answer; `agent`: whose steps its calls take.
    """

    match: str
    provider: str
    name: str | None = None
    facts: ModelFacts = ModelFacts()
    shares: tuple[tuple[str, float], ...] = ()
    fallback: tuple[str, ...] = ()
    agent: str | None = None


class Route(NamedTuple):
    """Where a call goes. `model` is the name the provider knows; `rule` the entry that decided, if one did.

    A tuple, since each call looks up what is known of its own several times, and those hash in no time.
    """

    provider: str
    model: str
    rule: ModelRule | None = None

    @property
    def agent(self) -> str | None:
        """Whose steps its calls take, where its rule says so, whatever they ask for."""
        return self.rule.agent if self.rule is not None else None


class Routes:
    """The routing table: rules in order, provider names, and the provider for what no rule names."""

    def __init__(
        self,
        rules: Sequence[ModelRule],
        providers: Sequence[str],
        default: str | None,
        anthropic: str | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """Set up.

        Args:
            rules: in order.
            providers: the names of all.
            default: the provider of models that no rule names.
            anthropic: the provider for paths of Anthropic's API that name no model, if not the default.
            unused: providers that are not meant where a model's name begins with theirs.
        """
        self._rules = tuple(rules)
        self._providers = frozenset(providers)
        self._prefixes = self._providers.difference(unused)
        self._special = tuple([rule for rule in rules if is_of_provider(rule.match, self._providers)])
        self._general = tuple([rule for rule in rules if not is_of_provider(rule.match, self._providers)])
        self._default = default
        self._anthropic = anthropic

    def resolve(self, model: str) -> Route:
        """The first route of `model`.

        Raises:
            UnknownModel: no rule matches and there is no default provider.
        """
        return self._routes(model, None)[0]

    def chain(self, model: str, seed: str) -> tuple[Route, ...]:
        """Where a call for `model` goes, and in what order it goes elsewhere where it cannot be answered.

        Args:
            model: as the call names it.
            seed: calls with the same seed go the same way, as each provider and each key has a prompt cache of its own.

        Raises:
            UnknownModel: no rule matches and there is no default provider.
        """
        found = self._routes(model, seed)
        rule = found[0].rule
        for name in rule.fallback if rule is not None else ():
            found += self._routes(name, seed)
        if len(found) == 1:
            return (found[0],)
        unique: dict[tuple[str, str], Route] = {}
        for route in found:
            unique.setdefault((route.provider, route.model), route)
        return tuple(unique.values())[:MOST_ROUTES]

    def _routes(self, model: str, seed: str | None) -> list[Route]:
        """Those of one name, the preferred first; as configured where there is no seed."""
        prefix, slash, rest = model.partition("/")
        if slash and prefix in self._providers:
            for rule in self._special:
                if fnmatchcase(model, rule.match) and model.count("/") == rule.match.count("/"):
                    return _by_rule(rule, model, seed)
            if prefix in self._prefixes:
                return [Route(prefix, rest)]
        for rule in self._general:
            if fnmatchcase(model, rule.match):
                return _by_rule(rule, model, seed)
        if self._default is None:
            raise UnknownModel(
                f'No provider is configured for the model "{model}". Name one as "provider/model" '
                f"({', '.join(sorted(self._providers))}), or add a route under models:, or set default_provider.",
                param="model",
            )
        return [Route(self._default, model)]

    def named_at(self, provider: str, model: str) -> Route:
        """A model that a provider is told to call, by the provider's own name of it, with what is known of it there."""
        for rule in self._rules:
            if provider in (rule.provider, *(name for name, _ in rule.shares)) and (
                rule.name == model if rule.name is not None else fnmatchcase(model, rule.match)
            ):
                return Route(provider, model, rule)
        return Route(provider, model)

    def taken(self, provider: str, model: str, match: str | None) -> Route:
        """The way that an earlier call took, by the entry that decided, if one did and is still there."""
        rule = next((one for one in self._rules if one.match == match), None)
        return Route(provider, model, rule)

    @property
    def providers(self) -> frozenset[str]:
        """The names of all providers."""
        return self._providers

    def names(self) -> list[str]:
        """The model names that routes spell out, aliases among them."""
        return [rule.match for rule in self._rules if not is_pattern(rule.match)]

    def leads_to(self, model: str, provider: str) -> bool:
        """Whether a call for this very name goes to this provider, under this name."""
        try:
            route = self.resolve(model)
        except UnknownModel:
            return False
        return route.provider == provider and route.model == model

    def without_model(self, anthropic: bool) -> str:  # noqa: FBT001
        """The provider for a path that names no model; `anthropic`: the client speaks Anthropic's API.

        Raises:
            UnknownModel: there is no default provider.
        """
        name = self._anthropic if anthropic and self._anthropic is not None else self._default
        if name is None:
            raise UnknownModel(
                "This path names no model and no default_provider is set, so there is nowhere to send it."
            )
        return name


def _by_rule(rule: ModelRule, model: str, seed: str | None) -> list[Route]:
    """Where a rule sends a model: to all that share its calls, the preferred first; to the first without a seed."""
    names = [rule.provider]
    if seed is not None and rule.shares:
        names = [name for name, _ in sorted(rule.shares, key=lambda share: _late(seed, *share))]
    return [Route(name, rule.name or model, rule) for name in names]


def _late(seed: str, provider: str, weight: float) -> float:
    """Where a provider stands in the order for a seed; it stands first for a share of the seeds as its weight says.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): when a provider is added or taken away, only the
    sessions move that come to it or were with it.
    """
    drawn = int.from_bytes(blake2b(f"{seed}\0{provider}".encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return -math.log((drawn + 0.5) / 2**64) / weight
