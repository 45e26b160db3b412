"""Convert a request into arguments of litellm's functions, and refuse what cannot be converted.

Only fields that an API documents do: these functions take credentials, addresses and switches under the same roof, and
none of these is a caller's to choose. What a provider does not take is refused, but for hints that change nothing in an
answer.
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
from gateway.dialects.limits import thinking_within
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
#: name sessions and caches, or ask for what only the client's own API keeps; an answer is the same without them
HINTS: Final = frozenset(
    {"metadata", "client_metadata", "session_id", "prompt_cache_retention", "prompt_cache_options"}
)
MESSAGES_HINTS: Final = HINTS | {"cache_control", "context_management", "service_tier", "betas", "diagnostics"}
RESPONSES_HINTS: Final = HINTS | {
    "store", "include", "truncation", "context_management", "prompt_cache_key", "stream_options",
}  # fmt: skip
#: passed on only where the provider knows them
_IF_KNOWN: Final = frozenset(
    {"user", "prompt_cache_key", "safety_identifier", "store", "service_tier", "encoding_format"}
)
#: what an API does without being told, and so need not be told to a provider that does not know the field
_DEFAULTS: Final[Mapping[str, Any]] = {
    "n": 1, "parallel_tool_calls": True, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0,
    "top_logprobs": 0, "echo": False, "best_of": 1, "logit_bias": {}, "verbosity": "medium", "tool_choice": "auto",
    "modalities": ["text"],
}  # fmt: skip
#: state that only the provider of the client's own API keeps
_KEPT_BY_PROVIDER: Final = ("previous_response_id", "conversation", "prompt", "background")
#: of Messages, what only Anthropic's own API does
_ONLY_ANTHROPIC: Final = (
    "mcp_servers", "container", "inference_geo", "speed", "thread", "compaction", "fallback_credit_token",
    "billing_policy",
)  # fmt: skip
#: fields that some API documents: where one is not translated, it is not passed on either
_ALL: Final = frozenset.union(CHAT, TEXT, EMBED, MESSAGES, RESPONSES, _KEPT_BY_PROVIDER, _ONLY_ANTHROPIC)
#: names of other fields that are refused: they would change the limit, the model or the credential
_NOT_EXTRA: Final = re.compile(
    r"(?i)\w*model\w*|fallbacks|(?:max|min|num|n)_?\w*(?:tokens|length|predict)\w*|generation_?config"
    r"|inference_?config|options|(?:api|aws|azure|custom|vertex|litellm|extra|mock)_.*|_.*|base_url|headers"
    r"|\w*(?:key|secret|token|credentials?)"
)
#: litellm hands these the field `extra_body` itself
_NO_EXTRA: Final = frozenset(
    {"anthropic", "anthropic_text", "bedrock", "bedrock_converse", "sagemaker", "sagemaker_chat"}
)
#: providers that serve models of Anthropic in its format
ANTHROPICS: Final = frozenset({"anthropic", "anthropic_text"})
#: those that serve models of Mistral alone, and what these are called elsewhere, where their templates are the same
_MISTRALS: Final = frozenset({"mistral", "codestral"})
_MISTRALS_MODEL: Final = re.compile(r"(?i)[sx]tral")
CACHE_KEY: Final = "prompt_cache_key"
_MODEL_NAME: Final = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9_.:@/+-]{0,511}\Z")
#: where a message has the text of what was thought, but for `reasoning_content`
_THOUGHTS: Final = {"cerebras": "reasoning"}
#: what asks a chat model to think
_THINKING: Final = ("reasoning_effort", "thinking")
#: what chooses among the next words
_SAMPLING: Final = ("temperature", "top_p", "top_k")
#: litellm's own mark of a call that asks for JSON, which no provider sees
_JSON_MODE: Final = "json_mode"
#: what bounds its answer
_LIMITS: Final = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True, slots=True)
class LitellmTarget:
    """Who is asked: litellm's name of the provider, the model's name there, the address; empty: the usual one.

    `family`: what the model refuses.
    """

    provider: str
    model: str
    base_url: str = ""
    family: TokenizerFamily = TokenizerFamily(name="unknown")


def target_of(provider: str, model: object, base_url: str, families: TokenizerFamilies) -> LitellmTarget:
    """Who is asked.

    Raises:
        InvalidRequest: the name could lead elsewhere than to a model.
    """
    if not isinstance(model, str) or not _MODEL_NAME.match(model):
        raise InvalidRequest("The model's name holds characters that no model's name holds.", param="model")
    return LitellmTarget(provider, model, base_url, families.of(model, provider, "chat"))


def sorted_out(
    body: Fields, known: frozenset[str], hints: frozenset[str], target: LitellmTarget
) -> tuple[Fields, list[str], Fields]:
    """What is translated, the names of what is left out, and what is passed on as it is.

    Raises:
        InvalidRequest: a field can be neither.
    """
    kept = {name: value for name, value in body.items() if name in known and value is not None}
    left_out = [name for name in body if name in hints and name not in known]
    extra: Fields = {}
    for name, value in body.items():
        if name == "model" or name in known or name in hints or value is None:
            continue
        if name in _ALL or target.provider in _NO_EXTRA or _NOT_EXTRA.fullmatch(name):
            raise InvalidRequest(
                f'The field "{name[:64]}" cannot be translated for "{target.provider}". Leave it out.', param=name[:64]
            )
        extra[name] = value
    return kept, left_out, {"extra_body": extra} if extra else {}


def known_fields(library: Library, target: LitellmTarget, kind: str, asked: Iterable[str]) -> frozenset[str]:
    """The fields that the provider takes; those that are asked for where litellm does not say. Takes up to 0.5 ms."""
    who = {"request_type": kind, "custom_llm_provider": target.provider}
    known = frozenset(library.supported(model=target.model, **who) or asked)
    return known - {CACHE_KEY} if is_mistral_elsewhere(target) else known


def is_mistral_elsewhere(target: LitellmTarget) -> bool:
    """Whether a provider of Mistral's format is not Mistral itself: litellm refuses `prompt_cache_key` for those."""
    host = urlsplit(target.base_url).hostname or ""
    return target.provider in _MISTRALS and bool(host) and not f".{host}".endswith(".mistral.ai")


def fitted(arguments: Fields, left_out: list[str], target: LitellmTarget, known: frozenset[str]) -> Fields:
    """Without the hints and plain defaults that this provider does not know."""
    fitting: Fields = {"model": target.model}
    for name, value in arguments.items():
        if name in known or not (name in _IF_KNOWN or (name in _DEFAULTS and value == _DEFAULTS[name])):
            fitting[name] = value
        else:
            left_out.append(name)
    return fitting


def _unseen(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """The name of what litellm leaves out of messages to DeepSeek without a word: pictures that its models do not see.

    They see none in the result of a tool.
    """
    if target.provider != "deepseek":
        return []
    sees = library.sees(model=target.model, custom_llm_provider=target.provider)
    is_there = blocks.has_pictures(arguments.get("messages"), ("tool",) if sees else ("tool", "user"))
    return ["image_url"] if is_there else []


def _with_json_in_words(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """Ask in words for an object of JSON where litellm would not ask at all; the name of what these stand for.

    Claude has no mode for it, and takes a schema only where that is given: of an empty one it makes an empty object.
    """
    asked = arguments.get("response_format")
    if not isinstance(asked, dict) or asked.get("type") != "json_object":
        return []
    who = {"model": target.model, "custom_llm_provider": target.provider}
    # What litellm cannot say is refused by the call itself.
    with contextlib.suppress(Exception):
        sent = {**library.options(**who, response_format=asked), _JSON_MODE: None}
        if sent == {**library.options(**who), _JSON_MODE: None}:
            del arguments["response_format"]
            arguments["messages"] = blocks.asking_for_json(arguments.get("messages"))
            return ["response_format"]
    return []


def _with_fitting_thinking(library: Library, arguments: Fields, target: LitellmTarget) -> list[str]:
    """Have a budget of thinking be one that Anthropic takes; the names of what was left out where it takes none.

    With one a turn has to begin with a thought that Anthropic signed, and clients of OpenAI's formats seldom send these
    back. It must be below the limit of the answer as well, which litellm does not look at where it makes one of an
    effort. Models that choose by themselves how long to think ask for neither.
    """
    asked = {name: arguments[name] for name in _THINKING if name in arguments}
    if not asked:
        return []
    sent: Fields = {}
    # What litellm cannot say is refused by the call itself.
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
    """The budget of thinking in place of one that may not fit; None: there can be no thinking."""
    if blocks.begins_without_thinking(arguments.get("messages")):
        return None
    limits = [limit for name in _LIMITS if isinstance(limit := arguments.get(name), int)]
    # A caller's own budget is its own to choose, and keeps its share of a lowered limit already.
    return thinking_within(budget, min(limits)) if limits and "thinking" not in arguments else budget


#: litellm's chat function would hand tools to a part of its proxy, and some models to its Responses API
_ONLY_CHAT: Final[Fields] = {"_skip_mcp_handler": True, "_skip_responses_api_bridge": True}


def chat_arguments(library: Library, arguments: Fields, left_out: list[str], target: LitellmTarget) -> Fields:
    """What litellm's chat function is given, whichever format it came from.

    Raises:
        InvalidRequest: it begins an answer for a model that does not go on with one.
    """
    _refuse_prefill(arguments.get("messages"), target)
    left_out += _without_sampling(arguments, target)
    known = known_fields(library, target, "chat_completion", arguments)
    name = _THOUGHTS.get(target.provider, "reasoning_content")
    blocks.with_thoughts(arguments.get("messages"), name, takes_signed="thinking" in known)
    if target.provider in _MISTRALS or _MISTRALS_MODEL.search(target.model):
        arguments["messages"] = blocks.with_answers(arguments.get("messages"))
    left_out += _unseen(library, arguments, target)
    fitting = fitted(arguments, left_out, target, known)
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
        InvalidRequest: it does.
    """
    last = messages[-1] if isinstance(messages, list) and messages else None
    if target.family.prefill == "accepted" or not isinstance(last, dict) or last.get("role") != "assistant":
        return
    raise InvalidRequest(
        f"The last message is the assistant's, and {target.model} does not go on with a response that has begun. End "
        "with a user message; ask for a form with response_format, or in words.",
        param="messages",
    )


def refuse_sound(messages: object, target: LitellmTarget) -> None:
    """Refuse what litellm would leave out without a word.

    Raises:
        InvalidRequest: there is sound for a provider that takes none.
    """
    if target.provider not in ANTHROPICS:
        return
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "input_audio":
                raise InvalidRequest(f'"{target.provider}" takes no input_audio. Leave it out.', param="messages")


def refuse_kept_by_provider(body: Fields) -> None:
    """Refuse what refers to what a provider of the Responses API keeps.

    Raises:
        InvalidRequest: there is such a reference.
        CompactionUnknown: there is a compaction item, which the translation would leave out.
    """
    for name in _KEPT_BY_PROVIDER:
        if body.get(name):
            raise InvalidRequest(
                f'"{name}" refers to what the provider of the Responses API keeps. This model is served through a '
                "translation, where nothing is kept: send the items themselves.",
                param=name,
            )
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") in COMPACTIONS:
            raise CompactionUnknown(
                "The input has a compaction item of another provider, which only that one can open. Start a new "
                "conversation, or send the messages instead of the item.",
                param="input",
            )
        if isinstance(item, dict) and item.get("type") == "item_reference":
            raise InvalidRequest(
                "An item_reference refers to what the provider of the Responses API keeps. Send the item itself.",
                param="input",
            )
