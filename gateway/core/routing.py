"""Model name -> provider, the name to send there, and what is known of the model.

Routes are tried in the order they are written, first match wins. `provider/model` always means that provider, so a
model can be reached without a route of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from gateway.core.errors import UnknownModel
from gateway.core.pricing import Price

_PATTERN: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model. Token limits; None where nobody says. `sources`: fact -> where it was read."""

    window: int | None = None
    output: int | None = None
    tokenizer: str | None = None
    price: Price | None = None
    sources: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelRule:
    """One entry of `models:`: a shell pattern, where its calls go, and facts that override the tables."""

    match: str
    provider: str
    name: str | None = None
    facts: ModelFacts = ModelFacts()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a call goes. `model` is the name the provider knows; `rule` the entry that decided, if one did."""

    provider: str
    model: str
    rule: ModelRule | None = None


class Routes:
    """The routing table: rules in order, provider names, and the provider for what no rule names."""

    def __init__(
        self, rules: Sequence[ModelRule], providers: Sequence[str], default: str | None, anthropic: str | None = None
    ) -> None:
        """Set up; `anthropic`: the provider for paths of Anthropic's API that name no model, if not the default."""
        self._rules = tuple(rules)
        self._providers = frozenset(providers)
        self._default = default
        self._anthropic = anthropic

    def resolve(self, model: str) -> Route:
        """The route of `model`.

        Raises:
            UnknownModel: no rule matches and there is no default provider.
        """
        prefix, slash, rest = model.partition("/")
        if slash and prefix in self._providers:
            return Route(prefix, rest)
        for rule in self._rules:
            if fnmatchcase(model, rule.match):
                return Route(rule.provider, rule.name or model, rule)
        if self._default is None:
            raise UnknownModel(
                f'No provider is configured for the model "{model}". Name one as "provider/{model}" '
                f"({', '.join(sorted(self._providers))}), or add a route under models:, or set default_provider.",
                param="model",
            )
        return Route(self._default, model)

    @property
    def providers(self) -> frozenset[str]:
        """The names of all providers."""
        return self._providers

    def names(self) -> list[str]:
        """The model names that routes spell out, aliases among them."""
        return [rule.match for rule in self._rules if not _PATTERN & set(rule.match)]

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
