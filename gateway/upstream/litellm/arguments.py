"""Convert a request to arguments of litellm's functions, and refuse what cannot be converted.

Only documented fields of an API are converted. litellm's functions take credentials, addresses and switches as
arguments too, and a caller must not set these. A field that a provider does not accept is refused, except hints that do
not change the response.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.core.counting.families import TokenizerFamilies, TokenizerFamily
from gateway.core.counting.parts import COMPACTIONS
from gateway.core.errors import CompactionUnknown, InvalidRequest
from gateway.core.values import dataclass
from gateway.dialects.limits import thinking_budget
from gateway.upstream.litellm import blocks
from gateway.upstream.litellm.library import Library

Fields = dict[str, Any]

CHAT: Final = frozenset(
    {
        "messages", "stream", "stream_options", "temperature", "top_p", "n", "stop", "max_tokens",
        "max_completion_tokens", "modalities", "prediction", "audio", "presence_penalty", "frequency_penalty",
        "logit_bias", "user", "response_format", "seed", "tools", "tool_choice", "parallel_tool_calls", "logprobs",
        "top_logprobs", "reasoning_effort", "verbosity", "safety_identifier", "service_tier", "store",
        "prompt_cache_key", "functions", "function_call", "web_search_options", "thinking", "top_k",
    }
)  # fmt: skip
TEXT: Final = frozenset(
    {
        "prompt", "stream", "stream_options", "temperature", "top_p", "n", "stop", "max_tokens", "presence_penalty",
        "frequency_penalty", "logit_bias", "user", "seed", "suffix", "echo", "logprobs", "best_of",
    }
)  # fmt: skip
EMBED: Final = frozenset({"input", "dimensions", "encoding_format", "user", "input_type"})
MESSAGES: Final = frozenset(
    {
        "messages", "stream", "max_tokens", "metadata", "stop_sequences", "system", "temperature", "thinking",
        "tool_choice", "tools", "top_k", "top_p", "output_config", "output_format",
    }
)  # fmt: skip
RESPONSES: Final = frozenset(
    {
        "input", "instructions", "stream", "tools", "tool_choice", "temperature", "top_p", "max_output_tokens",
        "parallel_tool_calls", "user", "text", "reasoning", "safety_identifier", "service_tier",
    }
)  # fmt: skip
#: Fields that name sessions and caches, or use stored state of the client's own API. They do not change the response.
HINTS: Final = frozenset(
    {"metadata", "client_metadata", "session_id", "prompt_cache_retention", "prompt_cache_options"}
)
MESSAGES_HINTS: Final = HINTS | {"cache_control", "context_management", "service_tier", "betas", "diagnostics"}
RESPONSES_HINTS: Final = HINTS | {
    "store", "include", "truncation", "context_management", "prompt_cache_key", "stream_options",
}  # fmt: skip
#: passed on only if the provider knows them
_IF_KNOWN: Final = frozenset(
    {"user", "prompt_cache_key", "safety_identifier", "store", "service_tier", "encoding_format"}
)
#: The defaults of an API. A field with its default is not sent to a provider that does not know the field.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "n": 1, "parallel_tool_calls": True, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0,
    "top_logprobs": 0, "echo": False, "best_of": 1, "logit_bias": {}, "verbosity": "medium", "tool_choice": "auto",
    "modalities": ["text"],
}  # fmt: skip
#: fields that refer to state at the provider of the client's own API
_KEPT_BY_PROVIDER: Final = ("previous_response_id", "conversation", "prompt", "background")
#: fields of Messages that only Anthropic's API supports
_ONLY_ANTHROPIC: Final = (
    "mcp_servers", "container", "inference_geo", "speed", "thread", "compaction", "fallback_credit_token",
    "billing_policy",
)  # fmt: skip
#: All documented fields. If one of them is not translated, it is not passed on either.
_ALL: Final = frozenset.union(CHAT, TEXT, EMBED, MESSAGES, RESPONSES, _KEPT_BY_PROVIDER, _ONLY_ANTHROPIC)
#: names of other fields that are refused because they would change the limit, the model or the credential
_NOT_EXTRA: Final = re.compile(
    r"(?i)\w*model\w*|fallbacks|(?:max|min|num|n)_?\w*(?:tokens|length|predict)\w*|generation_?config"
    r"|inference_?config|options|(?:api|aws|azure|custom|vertex|litellm|extra|mock)_.*|_.*|base_url|headers"
    r"|\w*(?:key|secret|token|credentials?)"
)
#: litellm passes the field `extra_body` itself to these providers
_NO_EXTRA: Final = frozenset(
    {"anthropic", "anthropic_text", "bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat"}
)
#: providers with Anthropic's models and format
ANTHROPICS: Final = frozenset({"anthropic", "anthropic_text"})
#: providers with Mistral's models only, and names of these models at other hosts, whose templates are the same
_MISTRAL_PROVIDERS: Final = frozenset({"mistral", "codestral"})
_MISTRAL_MODEL: Final = re.compile(r"(?i)[sx]tral")
CACHE_KEY: Final = "prompt_cache_key"
_MODEL_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:@/+-]{0,511}\Z")
#: the field of a message with the thinking text, if it is not `reasoning_content`
_THINKING_TEXT: Final = {"cerebras": "reasoning"}
#: the fields that make a chat model think
_THINKING: Final = ("reasoning_effort", "thinking")
#: sampling parameters
_SAMPLING: Final = ("temperature", "top_p", "top_k")
#: litellm's internal field for a call that asks for JSON; no provider receives it
_JSON_MODE: Final = "json_mode"
#: the output limits
_OUTPUT_LIMITS: Final = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class LitellmTarget:
    """A model to call.

    Attributes:
        provider: litellm's name of the provider.
        model: the provider's name of the model.
        base_url: the address; empty for the default.
        family: what the model accepts and refuses.
    """

    provider: str
    model: str
    base_url: str = ""
    family: TokenizerFamily = TokenizerFamily(name="unknown")


def target_of(provider: str, model: object, base_url: str, families: TokenizerFamilies) -> LitellmTarget:
    """Return the model to call.

    Raises:
        InvalidRequest: the name may refer to something other than a model.
    """
    if not isinstance(model, str) or not _MODEL_NAME.match(model):
        raise InvalidRequest("The name of the model has invalid characters.", param="model")
    return LitellmTarget(provider, model, base_url, families.find(model, provider, "chat"))


def split_fields(
    body: Fields, known: frozenset[str], hints: frozenset[str], target: LitellmTarget
) -> tuple[Fields, list[str], Fields]:
    """Split a request into the translated fields, the names of ignored fields, and fields passed on unchanged.

    Raises:
        InvalidRequest: a field can be neither translated nor passed on.
    """
    translated = {name: value for name, value in body.items() if name in known and value is not None}
    left_out = [name for name in body if name in hints and name not in known]
    extra: Fields = {}
    for name, value in body.items():
        if name == "model" or name in known or name in hints or value is None:
            continue
        if name in _ALL or target.provider in _NO_EXTRA or _NOT_EXTRA.fullmatch(name):
            raise InvalidRequest(
                f'The field "{name[:64]}" cannot be translated for "{target.provider}". Remove it.', param=name[:64]
            )
        extra[name] = value
    return translated, left_out, {"extra_body": extra} if extra else {}


def known_fields(library: Library, target: LitellmTarget, kind: str, asked: Iterable[str]) -> frozenset[str]:
    """Return the fields that the provider accepts; the given ones if litellm does not know. Takes up to 0.5 ms."""
    who = {"request_type": kind, "custom_llm_provider": target.provider}
    known = frozenset(library.supported(model=target.model, **who) or asked)
    return known - {CACHE_KEY} if is_mistral_elsewhere(target) else known


def is_mistral_elsewhere(target: LitellmTarget) -> bool:
    """Return True for a host of Mistral's models that is not Mistral: litellm refuses `prompt_cache_key` for it."""
    host = urlsplit(target.base_url).hostname or ""
    return target.provider in _MISTRAL_PROVIDERS and bool(host) and not f".{host}".endswith(".mistral.ai")


def without_unknown_fields(
    arguments: Fields, left_out: list[str], target: LitellmTarget, known: frozenset[str]
) -> Fields:
    """Return the arguments without hints and defaults that this provider does not know."""
    fitting: Fields = {"model": target.model}
    for name, value in arguments.items():
        if name in known or not (name in _IF_KNOWN or (name in _DEFAULTS and value == _DEFAULTS[name])):
            fitting[name] = value
        else:
            left_out.append(name)
    return fitting


def _unread_images(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """Return the name of what litellm silently removes from messages to DeepSeek: images that the model cannot read.

    No model of DeepSeek reads images in a tool result.
    """
    if target.provider != "deepseek":
        return []
    sees = library.sees(model=target.model, custom_llm_provider=target.provider)
    has_images = blocks.has_pictures(arguments.get("messages"), ("tool",) if sees else ("tool", "user"))
    return ["image_url"] if has_images else []


def _with_json_in_words(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """Ask for a JSON object in a message if litellm would not ask at all; return the name of the replaced field.

    Claude has no JSON mode. It accepts a schema, but for an empty schema it returns an empty object.
    """
    asked = arguments.get("response_format")
    if not isinstance(asked, dict) or asked.get("type") != "json_object":
        return []
    who = {"model": target.model, "custom_llm_provider": target.provider}
    # If litellm fails here, the call itself fails with the same error.
    with contextlib.suppress(Exception):
        sent = {**library.options(**who, response_format=asked), _JSON_MODE: None}
        if sent == {**library.options(**who), _JSON_MODE: None}:
            del arguments["response_format"]
            arguments["messages"] = blocks.asking_for_json(arguments.get("messages"))
            return ["response_format"]
    return []


def _with_fitting_thinking(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """Set a thinking budget that Anthropic accepts, or remove thinking; return the names of removed fields.

    - With a budget, a turn must begin with thinking signed by Anthropic. Clients of OpenAI's formats rarely send it
      back.
    - The budget must be below the output limit. litellm does not check that when it converts an effort to a budget.
    - Models that decide themselves how long to think need neither.
    """
    asked = {name: arguments[name] for name in _THINKING if name in arguments}
    if not asked:
        return []
    sent: Fields = {}
    # If litellm fails here, the call itself fails with the same error.
    with contextlib.suppress(Exception):
        sent = library.options(model=target.model, custom_llm_provider=target.provider, **asked)
    match sent.get("thinking"):
        case {"budget_tokens": int(budget)} if (fitting := _fitting_budget(arguments, budget)) != budget:
            for name in asked:
                del arguments[name]
            if fitting is None:
                return list(asked)
            arguments["thinking"] = {**sent["thinking"], "budget_tokens": fitting}
    return []


def _fitting_budget(arguments: Fields, budget: int) -> int | None:
    """Return a thinking budget that fits; None if the call cannot have thinking."""
    if blocks.begins_without_thinking(arguments.get("messages")):
        return None
    limits = [limit for name in _OUTPUT_LIMITS if isinstance(limit := arguments.get(name), int)]
    # The caller chose this budget, and the gateway has already reduced it together with the output limit.
    return thinking_budget(budget, min(limits)) if limits and "thinking" not in arguments else budget


#: Prevents litellm's chat function from using its proxy for tools, and its Responses API for some models.
_ONLY_CHAT: Final[Fields] = {"_skip_mcp_handler": True, "_skip_responses_api_bridge": True}


def chat_arguments(library: Library, arguments: Fields, left_out: list[str], target: LitellmTarget) -> Fields:
    """Return the arguments of litellm's chat function, for a request of any format.

    Raises:
        InvalidRequest: the last message begins the response, and the model refuses that.
    """
    _refuse_prefill(arguments.get("messages"), target)
    left_out += _without_sampling(arguments, target)
    known = known_fields(library, target, "chat_completion", arguments)
    name = _THINKING_TEXT.get(target.provider, "reasoning_content")
    blocks.with_thoughts(arguments.get("messages"), name, takes_signed="thinking" in known)
    if target.provider in _MISTRAL_PROVIDERS or _MISTRAL_MODEL.search(target.model):
        arguments["messages"] = blocks.with_answers(arguments.get("messages"))
    left_out += _unread_images(library, arguments, target)
    fitting = without_unknown_fields(arguments, left_out, target, known)
    left_out += _with_fitting_thinking(library, fitting, target)
    left_out += _with_json_in_words(library, fitting, target)
    return fitting | _ONLY_CHAT


def _without_sampling(arguments: Fields, target: LitellmTarget) -> list[str]:
    """Remove sampling parameters for a model that refuses all but its defaults; return their names.

    A client of another API sets them without knowing the model, and the response is as good without them.
    """
    if target.family.sampling == "free":
        return []
    return [name for name in _SAMPLING if arguments.pop(name, None) is not None]


def _refuse_prefill(messages: object, target: LitellmTarget) -> None:
    """Refuse a request whose last message begins the response, if the model refuses that.

    Raises:
        InvalidRequest: the model refuses it.
    """
    last = messages[-1] if isinstance(messages, list) and messages else None
    if target.family.prefill == "accepted" or not isinstance(last, dict) or last.get("role") != "assistant":
        return
    raise InvalidRequest(
        f"The last message is the assistant's, and {target.model} cannot continue a started response. End with a user "
        "message. To ask for a format, use response_format or words.",
        param="messages",
    )


def refuse_sound(messages: object, target: LitellmTarget) -> None:
    """Refuse audio if the provider does not accept it, because litellm would silently remove it.

    Raises:
        InvalidRequest: there is audio.
    """
    if target.provider not in ANTHROPICS:
        return
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "input_audio":
                raise InvalidRequest(f'"{target.provider}" accepts no input_audio. Remove it.', param="messages")


def refuse_kept_by_provider(body: Fields) -> None:
    """Refuse references to content stored at a provider of the Responses API.

    Raises:
        InvalidRequest: there is such a reference.
        CompactionUnknown: there is a compaction item, which the translation would silently remove.
    """
    for name in _KEPT_BY_PROVIDER:
        if body.get(name):
            raise InvalidRequest(
                f'"{name}" needs stored state of the Responses API. This model is used through a translation, which '
                "stores nothing. Send the items themselves.",
                param=name,
            )
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") in COMPACTIONS:
            raise CompactionUnknown(
                "The input has a compaction item of another provider, which only that provider can read. Start a new "
                "conversation, or send the messages instead of the item.",
                param="input",
            )
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise InvalidRequest(
                "An item_reference needs stored state of the Responses API. Send the item itself.",
                param="input",
            )
