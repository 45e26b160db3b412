"""Define the settings of a model: its route, limits and price."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import Field, field_validator

from gateway.config.section import MOST_TOKENS, Section
from gateway.core.ledger.arithmetic import MOST_USD

Rate = Annotated[Decimal, Field(ge=0, le=MOST_USD)]


class RateRow(Section):
    """USD per million tokens."""

    input: Rate = Field(description="Of input tokens.")
    output: Rate = Field(description="Of output tokens.")
    cache_read: Rate | None = Field(None, description="Of input tokens read from a cache; null: as input.")
    cache_write: Rate | None = Field(None, description="Of input tokens put into a cache; null: as input.")
    cache_write_1h: Rate | None = Field(
        None, description="Of those kept for an hour (Anthropic) or 12 hours (OpenAI); null: as cache_write."
    )


class PriceRow(RateRow):
    """USD per million tokens, and for each search."""

    above: dict[Annotated[int, Field(ge=1, le=MOST_TOKENS)], RateRow] = Field(
        {},
        max_length=8,
        description="The rates of a whole call with more input tokens than this, cached ones included: "
        "{272000: {input: 4, output: 15}}.",
    )
    times: dict[str, Rate] = Field(
        {},
        max_length=16,
        description="How many times these prices a call costs in a service tier: {priority: 2, flex: 0.5, batches: "
        "0.5}; `fast` and `us` are Anthropic's speed and inference_geo.",
    )
    search: Rate = Field(Decimal(0), description="Of one web search that the provider makes for an answer, in USD.")


class Facts(Section):
    """What is known of a model."""

    window: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Context window in tokens, of input and answer together."
    )
    input: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Most input tokens of one call, where the window has room for more."
    )
    output: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Most output tokens of one call.")
    tokenizer: str | None = Field(None, description="Name of its tokenizer.")
    price: PriceRow | None = Field(None, description="USD per million tokens, and for each web search.")
    reasoning: bool | None = Field(
        None,
        description="Whether it may think before it answers, unseen and billed. A stream of a model that surely does "
        "not may grow under a budget, see docs/concepts/budgets.md.",
    )
    betas: dict[str, Annotated[int, Field(ge=1, le=MOST_TOKENS)]] | None = Field(
        None,
        max_length=16,
        description="Larger windows, by what a call names in its header anthropic-beta to have one: "
        "{context-1m-2025-08-07: 1000000}.",
    )


class Model(Facts):
    """One route: which models, where to, under which name, and facts that override the tables."""

    match: str = Field(description="Shell pattern of model names.")
    provider: str | dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        description="Name of a provider; or several, each with its share: {azure-east: 3, azure-west: 1}. A session "
        "stays with its own as long as that one answers.",
    )
    name: str | None = Field(None, description="The name to send instead, for an alias.")
    fallback: tuple[str, ...] = Field(
        (),
        max_length=7,
        description="Models, as calls name them, to be called in this order where no provider of this one answers: it "
        "is not reached, is silent, or says 408, 429, 500, 502, 503, 504, 520 to 524 or 529, refuses the gateway's own "
        "key (401, 402, 403), or says that the request is too long or too large (413).",
    )

    agent: str | None = Field(
        None, description="The agent, out of agents:, whose steps its calls take; whatever x-session-agent says."
    )

    @field_validator("match")
    @classmethod
    def _match(cls, value: str) -> str:
        if not value:
            raise ValueError("matches no model; * matches all")
        return value

    @field_validator("provider")
    @classmethod
    def _some_provider(cls, value: str | dict[str, float]) -> str | dict[str, float]:
        if not value:
            raise ValueError("must name a provider")
        return value

    @property
    def providers(self) -> tuple[str, ...]:
        """The names of all that share its calls."""
        return (self.provider,) if isinstance(self.provider, str) else tuple(self.provider)
