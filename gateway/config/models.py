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

    input: Rate = Field(description="Input tokens.")
    output: Rate = Field(description="Output tokens.")
    cache_read: Rate | None = Field(None, description="Input tokens read from a cache; null: like input.")
    cache_write: Rate | None = Field(None, description="Input tokens written to a cache; null: like input.")
    cache_write_1h: Rate | None = Field(
        None, description="Input tokens cached for one hour (Anthropic) or 12 hours (OpenAI); null: like cache_write."
    )


class PriceRow(RateRow):
    """USD per million tokens, and for each search."""

    above: dict[Annotated[int, Field(ge=1, le=MOST_TOKENS)], RateRow] = Field(
        {},
        max_length=8,
        description="Rates of a whole call with more input tokens than this, including cached ones: {272000: {input: "
        "4, output: 15}}.",
    )
    times: dict[str, Rate] = Field(
        {},
        max_length=16,
        description="Price factors of service tiers: {priority: 2, flex: 0.5, batches: 0.5}. `fast` and `us` are "
        "Anthropic's speed and inference_geo.",
    )
    search: Rate = Field(Decimal(0), description="USD for one web search by the provider.")


class Facts(Section):
    """Limits, prices and other facts of a model."""

    window: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Context window in tokens, for input and output together."
    )
    input: int | None = Field(
        None, ge=1, le=MOST_TOKENS, description="Most input tokens of a call, if this is less than the window."
    )
    output: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Most output tokens of a call.")
    tokenizer: str | None = Field(None, description="Name of its tokenizer.")
    price: PriceRow | None = Field(None, description="Prices in USD: per million tokens, and per web search.")
    reasoning: bool | None = Field(
        None,
        description="It can use hidden reasoning tokens, which are billed. false: the hold of a stream can grow with "
        "its output, see docs/concepts/budgets.md.",
    )
    betas: dict[str, Annotated[int, Field(ge=1, le=MOST_TOKENS)]] | None = Field(
        None,
        max_length=16,
        description="Larger windows by the value of the header anthropic-beta that enables them: "
        "{context-1m-2025-08-07: 1000000}.",
    )


class Model(Facts):
    """One route: a pattern of models, their provider and name there, and facts that override the tables."""

    match: str = Field(description="Shell pattern of model names.")
    provider: str | dict[str, Annotated[float, Field(gt=0, le=1000)]] = Field(
        description="Name of a provider, or several with their shares: {azure-east: 3, azure-west: 1}. A session "
        "stays with its provider while that one is available.",
    )
    name: str | None = Field(None, description="Name of the model at the provider, if it differs.")
    fallback: tuple[str, ...] = Field(
        (),
        max_length=7,
        description="Models to call instead, in this order, named as in calls. They are used if no provider of this "
        "model can be reached, if it is silent, responds 408, 429, 500, 502, 503, 504, 520 to 524 or 529, refuses the "
        "gateway's key (401, 402, 403), or refuses the request as too long or too large (413).",
    )

    agent: str | None = Field(
        None, description="Agent, from agents:, whose steps apply to its calls. It overrides x-session-agent."
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
        """Return the names of all providers that share its calls."""
        return (self.provider,) if isinstance(self.provider, str) else tuple(self.provider)
