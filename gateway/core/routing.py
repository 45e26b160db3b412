"""Map a model name to providers and to the model's name there.

- Routes are tried in the configured order; the first match wins.
- `provider/model` selects that provider, so a model needs no route of its own. Only a route whose pattern begins with
  the same `provider/` precedes this rule.
- Some hosts have model names that begin with another provider's name (`openai/gpt-oss-120b`) or with their own
  (`groq/compound`).
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

#: characters of shell patterns, which no name contains
_MARKS: Final = frozenset("*?[")
#: routes that one call tries at most, one after the other
MOST_ROUTES: Final = 8
#: models whose routes are kept, and the characters of the longest name of them
_MOST_CHAINS: Final = 1024
_LONGEST_KEPT: Final = 256


def is_pattern(text: str) -> bool:
    """Return whether the text is a shell pattern and not a name or a part of one."""
    return not _MARKS.isdisjoint(text)


def is_of_provider(match: str, providers: Collection[str]) -> bool:
    """Return whether a pattern only matches names that begin with a provider's. Its `*` then matches no slash."""
    prefix, slash, _ = match.partition("/")
    return bool(slash) and prefix in providers


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The known facts of a model; None for unknown ones.

    Attributes:
        window: context window in tokens, for input and output together.
        input: the most input tokens, if they have their own limit.
        output: the most output tokens.
        tokenizer: the name of its tokenizer.
        price: its prices.
        reasoning: it may use reasoning tokens, which are billed and may be hidden.
        betas: names in the header `anthropic-beta`, each with the larger context window that it enables.
        sources: the source of each fact, by name.
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
    """One entry of `models:`: a shell pattern, the providers of its calls, and facts that override the tables.

    Attributes:
        match: the pattern of model names.
        provider: the provider, or the first one in `shares`.
        name: the model's name at the provider; None: unchanged.
        facts: overriding facts.
        shares: providers that share the calls, each with its relative share; empty for a single one.
        fallback: names of models that are called if none of these providers succeeds.
        agent: the agent whose steps apply to its calls.
    """

    match: str
    provider: str
    name: str | None = None
    facts: ModelFacts = ModelFacts()
    shares: tuple[tuple[str, float], ...] = ()
    fallback: tuple[str, ...] = ()
    agent: str | None = None


class Route(NamedTuple):
    """The provider and model of a call. `model`: its name at the provider. `rule`: the matching entry, if any.

    It is a tuple because each call uses its route as a key several times, and tuples hash fast.
    """

    provider: str
    model: str
    rule: ModelRule | None = None

    @property
    def agent(self) -> str | None:
        """Return the agent that the rule sets, which overrides the one that a call names, or None."""
        return self.rule.agent if self.rule is not None else None


class Routes:
    """The routing table: rules in order, provider names, and the default provider."""

    def __init__(
        self,
        rules: Sequence[ModelRule],
        providers: Sequence[str],
        default: str | None,
        anthropic: str | None = None,
        unused: Collection[str] = (),
    ) -> None:
        """Build the table.

        Args:
            rules: in order.
            providers: the names of all providers.
            default: the provider of models that no rule matches.
            anthropic: the provider for paths of Anthropic's API that name no model, instead of the default.
            unused: providers that `provider/model` does not select.
        """
        self._rules = tuple(rules)
        self._providers = frozenset(providers)
        self._prefixes = self._providers.difference(unused)
        self._special = tuple([rule for rule in rules if is_of_provider(rule.match, self._providers)])
        self._general = tuple([rule for rule in rules if not is_of_provider(rule.match, self._providers)])
        self._default = default
        self._anthropic = anthropic
        #: the chains of models whose calls are not shared between providers, so that no seed matters
        self._chains: dict[str, tuple[Route, ...]] = {}

    def resolve(self, model: str) -> Route:
        """Return the first route of a model.

        Raises:
            UnknownModel: no rule matches and there is no default provider.
        """
        return self._routes(model, None)[0]

    def chain(self, model: str, seed: str) -> tuple[Route, ...]:
        """Return the route of a call and its fallbacks, in order.

        Args:
            model: as the call names it.
            seed: calls with the same seed take the same route, because each provider and key has its own prompt cache.

        Raises:
            UnknownModel: no rule matches and there is no default provider.
        """
        known = self._chains.get(model)
        if known is not None:
            return known
        routes = self._routes(model, seed)
        rule = routes[0].rule
        for name in rule.fallback if rule is not None else ():
            routes += self._routes(name, seed)
        unique: dict[tuple[str, str], Route] = {}
        for route in routes:
            unique.setdefault((route.provider, route.model), route)
        chain = tuple(unique.values())[:MOST_ROUTES]
        is_shared = any(route.rule is not None and route.rule.shares for route in routes)
        if not is_shared and len(model) <= _LONGEST_KEPT:
            if len(self._chains) >= _MOST_CHAINS:  # clients choose the model names, so there may be many
                self._chains.clear()
            self._chains[model] = chain
        return chain

    def _routes(self, model: str, seed: str | None) -> list[Route]:
        """Return the routes of one name, the preferred one first; without a seed, in the configured order."""
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

    def route_at(self, provider: str, model: str) -> Route:
        """Return the route to a model by its name at the provider, with the rule that gives its facts, if any."""
        for rule in self._rules:
            if provider in (rule.provider, *(name for name, _ in rule.shares)) and (
                rule.name == model if rule.name is not None else fnmatchcase(model, rule.match)
            ):
                return Route(provider, model, rule)
        return Route(provider, model)

    def route_of_call(self, provider: str, model: str, match: str | None) -> Route:
        """Return the route of an earlier call. `match`: the pattern of its rule, which may no longer be configured."""
        rule = next((rule for rule in self._rules if rule.match == match), None)
        return Route(provider, model, rule)

    @property
    def providers(self) -> frozenset[str]:
        """Return the names of all providers."""
        return self._providers

    def names(self) -> list[str]:
        """Return the model names of routes that are not patterns, including aliases."""
        return [rule.match for rule in self._rules if not is_pattern(rule.match)]

    def leads_to(self, model: str, provider: str) -> bool:
        """Return whether a call for this model name goes to this provider under the same name."""
        try:
            route = self.resolve(model)
        except UnknownModel:
            return False
        return route.provider == provider and route.model == model

    def provider_without_model(self, anthropic: bool) -> str:  # noqa: FBT001
        """Return the provider for a path that names no model. `anthropic`: it is a path of Anthropic's API.

        Raises:
            UnknownModel: there is no default provider.
        """
        name = self._anthropic if anthropic and self._anthropic is not None else self._default
        if name is None:
            raise UnknownModel("This path names no model, and no default_provider is set. Set default_provider.")
        return name


def _by_rule(rule: ModelRule, model: str, seed: str | None) -> list[Route]:
    """Return the routes of a rule: all that share its calls, the preferred one first. Without a seed only the first."""
    names = [rule.provider]
    if seed is not None and rule.shares:
        names = [name for name, _ in sorted(rule.shares, key=lambda share: _rank(seed, *share))]
    return [Route(name, rule.name or model, rule) for name in names]


def _rank(seed: str, provider: str, weight: float) -> float:
    """Return the rank of a provider for a seed; the lowest is first, for a share of seeds in proportion to `weight`.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): if a provider is added or removed, only its own
    sessions move.
    """
    drawn = int.from_bytes(blake2b(f"{seed}\0{provider}".encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return -math.log((drawn + 0.5) / 2**64) / weight
