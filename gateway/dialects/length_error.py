"""Read the numbers in a provider's error about a request that is too long.

There is no common form: some providers send a code, most a sentence. A sentence is accepted only at the start of the
provider's own message, after the labels that SDKs and proxies put before it. An error that quotes the request begins
with other words. A user who writes "the prompt is too long: 9 tokens > 8 maximum" therefore cannot set a window of 8
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.core.http.retry_policy import EXPLAINED
from gateway.core.values import dataclass
from gateway.dialects.error_text import ErrorText, messages_in
from gateway.dialects.length_words import lengths_in
from gateway.dialects.reported import count


@dataclass(frozen=True, slots=True)
class LengthError:
    """Lengths in an error about a request that is too long, in tokens; None for what it does not say.

    Attributes:
        limit: the limit of the model, for input and output together or for the input alone.
        input_tokens: the input as counted by the provider.
        output: the tokens reserved for the output.
        of_input: True if the error says that `limit` is for the input alone; few providers do.
    """

    limit: int | None = None
    input_tokens: int | None = None
    output: int | None = None
    of_input: bool = False


_CODES: Final = frozenset(
    {
        "context_length_exceeded",
        "context_window_exceeded",
        "model_context_window_exceeded",
        "model_max_prompt_tokens_exceeded",
        "exceed_context_size_error",
    }
)

_FLAGS: Final = re.IGNORECASE | re.ASCII
_NUMBER: Final = r"\d[\d,]{0,14}"


def _pattern(sentence: str) -> re.Pattern[str]:
    """Return a pattern for a sentence with placeholders such as `{limit}` for numbers; `{n}` is an ignored number.

    `{input}` is a limit of the input alone.
    """
    literals = re.split(r"\{(\w+)\}", sentence)
    for index in range(1, len(literals), 2):
        name = literals[index]
        literals[index] = _NUMBER if name == "n" else f"(?P<{name}>{_NUMBER})"
    literals[::2] = map(re.escape, literals[::2])
    return re.compile("".join(literals), _FLAGS)


_MODEL_MAXIMUM: Final = tuple(
    _pattern(f"{start}'s maximum {kind} length is {{limit}}")
    for start in (
        "'max_tokens' or 'max_completion_tokens' is too large: {output}. This model",
        "This model",
        "This endpoint",
    )
    for kind in ("context", "prompt")
)
_JOINT: Final = re.compile(r"(?: tokens)?[,.]? (?:however,? |and |but )?", _FLAGS)
#: Texts that may follow. Numbers in other sentences are not interpreted: a total of input and output is neither of
#: them, and "at least" is where a server stopped counting.
_FOLLOWING: Final = (
    *map(
        _pattern,
        (
            "you requested {output} output tokens",
            "you requested {asked} tokens in the messages",
            "your messages resulted in {asked} tokens",
            "your request has {asked} input tokens",
            "the request contains {asked} tokens",
            "the prompt contains {asked} input tokens",
        ),
    ),
    re.compile(rf"you requested (?:about )?{_NUMBER} tokens \((?P<parts>[^()]{{1,200}})\)", _FLAGS),
)
#: "7000 in the messages", "155 of tool input", "0 for the completion"
_PART: Final = re.compile(rf"({_NUMBER}) (?:in|of|for) ([a-z ]{{1,40}})", _FLAGS)

#: Sentences that `length_words.py` cannot read from words and numbers alone. The longer of two similar ones is first.
#: `{n}` is a number of characters, a bound, or a sum with an unknown part for the output. `{input}` is used only if the
#: provider is known to limit the input separately. Otherwise the limit is assumed to include the output.
_SENTENCES: Final = tuple(
    map(
        _pattern,
        (
            # OpenAI, Azure
            "Input tokens exceed the configured limit of {input} tokens. Your messages resulted in {asked} tokens",
            "Input tokens exceed the configured limit of {input} tokens",
            "This model's maximum context length has been exceeded",
            # Anthropic, also at Bedrock and Vertex
            "prompt is too long: {asked} tokens > {limit} maximum",
            "input length and `max_tokens` exceed context limit: {asked} + {output} > {limit}",
            "input length and max_tokens exceed context limit: {asked} + {output} > {limit}",
            # Gemini, Vertex
            "The input token count ({asked}) exceeds the maximum number of tokens allowed ({input})",
            "The input token count exceeds the maximum number of tokens allowed ({input})",
            "Unable to submit request because the input token count is {asked} but model only supports up to {input}",
            # Bedrock
            "Input is too long for requested model",
            "Too many input tokens. Max input tokens: {limit}, request input token count: {asked}",
            # Groq, Cerebras
            "Please reduce the length of the messages or completion. Current length is {n} while limit is {limit}",
            # Mistral
            "Prompt contains {asked} tokens and {n} draft tokens, too large for model with {limit} maximum context",
            # Cohere
            "too many tokens: total number of tokens in the prompt cannot exceed {limit} - received {asked}",
            (
                "too many tokens: size limit exceeded by {over} tokens. Try using shorter or fewer inputs. "
                "The limit for this model is {limit} tokens"
            ),
            "too many tokens: size limit exceeded by {n} tokens",
            # Fireworks
            "The prompt is too long: {asked}, model maximum context length: {limit}",
            # SGLang, Together, Poolside, Volcengine, LM Studio
            "The input ({asked} tokens) is longer than the model's context length ({limit} tokens)",
            (
                "Requested token count exceeds the model's maximum context length of {limit} tokens. You requested "
                "a total of {n} tokens: {asked} tokens from the input messages and {output} tokens for the completion"
            ),
            "Input length ({asked}) exceeds model's maximum context length ({limit})",
            "Input token count + max_tokens parameter must be less than the context length of the model",
            # TGI, Hugging Face
            (
                "`inputs` tokens + `max_new_tokens` must be <= {limit}. "
                "Given: {asked} `inputs` tokens and {output} `max_new_tokens`"
            ),
            "`inputs` must have less than {input} tokens. Given: {asked}",
            # vLLM; it stops counting at one token too many
            (
                "You passed {n} input tokens and requested {output} output tokens. "
                "However, the model's context length is only {limit} tokens"
            ),
            (
                "You passed {n} input characters and requested {output} output tokens. "
                "However, the model's context length is only {limit} tokens"
            ),
            "The decoder prompt (length {asked}) is longer than the maximum model length of {limit}",
            # llama.cpp, its Python server, Ollama
            "the request exceeds the available context size",
            # LM Studio; it keeps the first tokens of the prompt
            (
                "Trying to keep the first {n} tokens when context the overflows. "
                "However, the model is loaded with context length of only {limit} tokens"
            ),
            (
                "The number of tokens to keep from the initial prompt is greater than the context length "
                "(n_keep: {n}>= n_ctx: {limit})"
            ),
            # GitHub Copilot, Moonshot, Z.ai, Qwen at DashScope, MiniMax, Doubao, AI21
            "prompt token count of {asked} exceeds the limit of {input}",
            "Your request exceeded model token limit: {limit} (requested: {n})",
            "Range of input length should be [1, {input}]",
            "context window exceeds limit",
            "Total tokens of image and text exceed max message tokens",
        ),
    )
)


def length_error(status: int, body: bytes) -> LengthError | None:
    """Return the lengths in an error body; None if the error has another reason than length."""
    if status not in EXPLAINED:
        return None
    return next(filter(None, map(_read, messages_in(body))), None)


def _read(message: ErrorText) -> LengthError | None:
    """Read one message: the numbers in its fields, its text, its code."""
    fields = message.fields
    if fields.get("type") == "exceed_context_size_error":
        limit = count(fields.get("n_ctx"))
        if limit:
            return LengthError(limit, count(fields.get("n_prompt_tokens")))
    if not message.text:
        codes = (fields.get("code"), fields.get("type"))
        return LengthError() if any(isinstance(word, str) and word in _CODES for word in codes) else None
    text = message.text
    lengths = _model_maximum(text) or _sentence(text) or _in_other_words(text)
    return LengthError() if lengths is None and "ContextWindowExceededError" in message.labels else lengths


def _model_maximum(text: str) -> LengthError | None:
    """Read the most common sentence: a window, and the requested tokens in one of many wordings."""
    head = _first(_MODEL_MAXIMUM, text)
    if head is None:
        return None
    joint = _JOINT.match(text, head.end())
    following = _first(_FOLLOWING, text, joint.end()) if joint else None
    groups = head.groupdict() | (following.groupdict() if following else {})
    parts = groups.get("parts")
    if parts:
        asked, output = _parts(parts)
        return LengthError(_number(groups["limit"]), asked, output)
    return _from_groups(groups)


def _in_other_words(text: str) -> LengthError | None:
    """Read a sentence with unknown wording, by its key terms."""
    lengths = lengths_in(text)
    return LengthError(lengths.limit, lengths.asked) if lengths is not None else None


def _parts(text: str) -> tuple[int | None, int | None]:
    """Return the sums of the input and of the output in the parentheses after a total."""
    sums: dict[bool, int] = {}
    for number, name in _PART.findall(text):
        is_output = "completion" in name.lower() or "output" in name.lower()
        sums[is_output] = sums.get(is_output, 0) + (_number(number) or 0)
    return sums.get(False), sums.get(True)


def _sentence(text: str) -> LengthError | None:
    match = _first(_SENTENCES, text)
    return _from_groups(match.groupdict()) if match else None


def _first(patterns: Iterable[re.Pattern[str]], text: str, start: int = 0) -> re.Match[str] | None:
    return next(filter(None, (pattern.match(text, start) for pattern in patterns)), None)


def _from_groups(groups: Mapping[str, str | None]) -> LengthError:
    most = _number(groups.get("input"))
    limit, asked, over = most or _number(groups.get("limit")), _number(groups.get("asked")), _number(groups.get("over"))
    if limit is not None and over is not None:
        asked = limit + over
    return LengthError(limit or None, asked, _number(groups.get("output")), of_input=bool(most))


def _number(digits: str | None) -> int | None:
    return int(digits.replace(",", "")) if digits else None
