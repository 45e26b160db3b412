"""List what differs between providers, as data. No other module names a provider's host, path or field.

| table | a row is | needed if |
|---|---|---|
| `PROVIDERS` | a provider name | models belong to it in every installation, or other programs name it differently |
| `HOSTS` | the end of host names | its API differs from the plain OpenAI format, or some regions are more expensive |
| `MODEL_FIELDS` | a field of requests | it names models other than the call's own |
| `ADVISOR_TYPES`, `CHOOSING_TOOLS` | a type of tool | the tool calls a model |
| `DEFAULT_FALLBACKS` | a pattern of model names | the provider chooses another model after a refusal |
| `MODEL_PATH`, `OBJECT_PATHS` | paths | the model is not in the field `model` of the body |
| `CONFIRMING_EVENTS` | a type of event | a provider sends it before it decides whether to refuse |

Addresses, credentials and limits of providers are in `config/providers.yaml`, those of models in `config/models.yaml`
and `config/families.yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class ProviderRow(NamedTuple):
    """A provider by its name in `config/providers.yaml` or in the user's settings.

    Attributes:
        name: the name.
        models: shell patterns of models that are called there in every installation, after the configured routes.
        price_table: its name in litellm's table of prices, if that differs.
        telemetry: its name in the conventions of OpenTelemetry, if that differs.
    """

    name: str
    models: tuple[str, ...] = ()
    price_table: str = ""
    telemetry: str = ""


PROVIDERS: Final = (
    # Not gpt-oss, which other hosts serve under this name and OpenAI does not.
    ProviderRow("openai", ("gpt-[!o]*", "chatgpt-*", "o[0-9]*", "text-embedding-*")),
    ProviderRow("anthropic", ("claude-*",)),
    ProviderRow("gemini", ("gemini-*",), telemetry="gcp.gemini"),
    # The own models of these providers. Models that they host for others have other names, or one more slash.
    ProviderRow("openrouter", ("openrouter/*",)),
    ProviderRow("groq", ("groq/compound", "groq/compound-mini")),
    ProviderRow("azure", telemetry="azure.ai.openai"),
    ProviderRow("mistral", telemetry="mistral_ai"),
    ProviderRow("xai", telemetry="x_ai"),
    ProviderRow("together", price_table="together_ai"),
    ProviderRow("fireworks", price_table="fireworks_ai"),
)
#: other names that litellm's table of prices has for the same provider: listed name -> usual name
PRICE_TABLE_ALIASES: Final[Mapping[str, str]] = {
    "azure_text": "azure",
    "bedrock_converse": "bedrock",
    "cohere_chat": "cohere",
    "fireworks_ai-embedding-models": "fireworks_ai",
    "ollama_chat": "ollama",
}


class HostRow(NamedTuple):
    """The hosts of one provider.

    Attributes:
        ending: the end of the host names, beginning with a dot; or one whole host name.
        limit_field: the field for the output limit of chat calls. Every provider knows `max_tokens`, except reasoning
            models of OpenAI, which accept only the newer name.
        compacts: it compacts conversations (`/v1/responses/compact`); None: unknown, so it is asked.
        chat_cache_marks: chat calls to Claude models may have cache marks (`cache_control`).
        price_factors: for more expensive regions: the beginning of the host name, and the key of the price factor in
            litellm's table. The first match counts.
    """

    ending: str
    limit_field: str = "max_tokens"
    compacts: bool | None = None
    chat_cache_marks: bool = False
    price_factors: tuple[tuple[str, str], ...] = ()

    def is_of(self, host: str) -> bool:
        """Return whether the row applies to a host name."""
        return host.endswith(self.ending) if self.ending.startswith(".") else host == self.ending


_REGIONAL: Final = "regional_processing_uplift_multiplier_"
HOSTS: Final = (
    # Regional hosts, such as `eu.api.openai.com`. OpenAI has one factor for all regions, but the table lists only those
    # of the US and the EU. Every other region uses that of the EU:
    # https://developers.openai.com/api/docs/guides/data-residency
    HostRow(
        ".api.openai.com",
        "max_completion_tokens",
        compacts=True,
        price_factors=(("us.", f"{_REGIONAL}us"), ("", f"{_REGIONAL}eu")),
    ),
    HostRow(".openai.com", "max_completion_tokens", compacts=True),
    HostRow(".openai.azure.com", "max_completion_tokens", compacts=True),
    HostRow(".cognitiveservices.azure.com", "max_completion_tokens", compacts=True),
    HostRow(".services.ai.azure.com", "max_completion_tokens", compacts=True),
    # https://openrouter.ai/docs/features/prompt-caching
    HostRow("openrouter.ai", chat_cache_marks=True),
)
_ANY_HOST: Final = HostRow("")


def host_row(host: str) -> HostRow:
    """Return the first row of `HOSTS` for a host name; a row with the defaults if there is none."""
    return next((row for row in HOSTS if row.is_of(host)), _ANY_HOST)


def price_factor(host: str) -> str | None:
    """Return the key of the price factor of a host in litellm's table; None if it has none."""
    return next((factor for beginning, factor in host_row(host).price_factors if host.startswith(beginning)), None)


#: Models that Anthropic may call after a refusal if a request sets `fallbacks: "default"`, by the model that refused.
#: The first pattern that matches counts. The category of the refusal decides which model is called.
#: https://platform.claude.com/docs/en/build-with-claude/refusals-and-fallback and the pages on each model
DEFAULT_FALLBACKS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("*haiku*", ()),
    ("*sonnet*", ("claude-sonnet-5",)),
    ("*", ("claude-opus-4-8", "claude-opus-5")),
)


class ModelField(NamedTuple):
    """A field of requests that names models other than the call's own.

    Attributes:
        name: the field.
        is_instead: True if its models may respond instead of the call's own; False if they are called in addition.
        default: the models that the value "default" means, by patterns of the call's own model.
    """

    name: str
    is_instead: bool = False
    default: tuple[tuple[str, tuple[str, ...]], ...] = ()


MODEL_FIELDS: Final = (
    # OpenRouter: models to try in order
    ModelField("models", is_instead=True),
    # Anthropic: models that respond after the first one has refused
    ModelField("fallbacks", is_instead=True, default=DEFAULT_FALLBACKS),
    # tools that the provider runs, such as an advisor, image generation or a panel of models
    ModelField("tools"),
    # OpenRouter: extensions of a request
    ModelField("plugins"),
    # Groq: the models that a compound model uses
    ModelField("compound_custom"),
)
#: Beginnings of the types of tools that let a model ask another one: Anthropic.
ADVISOR_TYPES: Final = ("advisor_",)
#: types of tools whose provider chooses a model later if they name none
CHOOSING_TOOLS: Final = ("openrouter:advisor", "openrouter:fusion")
#: A path that may name a model itself, which the gateway does not read. Providers such as Azure ignore case in paths.
MODEL_PATH: Final = r"(?:^|/)(?:deployments?|engines?|models?)/."
#: Paths of stored objects, and of jobs whose models are named in a file or deeper in the body. A model at the top of
#: such a request does not limit what is read, changed or called.
OBJECT_PATHS: Final = (
    r"(?:messages/)?batches(?:/|$)",
    r"containers(?:/|$)",
    r"evals(?:/|$)",
    r"files(?:/|$)",
    r"fine_tuning/alpha/graders(?:/|$)",
    r"skills(?:/|$)",
    r"uploads(?:/|$)",
    r"vector_stores(?:/|$)",
    r"conversations/.",
    r"threads(?!(?:/[^/]+)?/runs(?:/|$))(?:/|$)",
)
#: Types of events that only confirm a request: a refusal can still follow. OpenAI sends those of Responses in every
#: stream, even in one that it refuses.
CONFIRMING_EVENTS: Final = ("response.created", "response.queued", "response.in_progress", "ping")
