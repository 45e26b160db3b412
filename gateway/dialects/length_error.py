"""Read the numbers of a provider's refusal of a request that is too long.

There is no common shape: some say it with a code, most with a sentence. A sentence is believed only where it begins
the provider's own message (after the labels that SDKs and proxies put before it). An error that quotes the request
says something of its own first, so that a user who writes "the prompt is too long: 9 tokens > 8 maximum" teaches nobody
a window of 8 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.core.http.retry_policy import TELLING
from gateway.core.values import dataclass
from gateway.dialects.error_text import ErrorText, said_in
from gateway.dialects.length_words import lengths_in
from gateway.dialects.reported import count


@dataclass(frozen=True, slots=True)
class LengthError:
    """What the provider said of the length it refuses, in tokens; None for what it did not say.

    `limit`: what the model takes, in all or of input (few providers say which; `of_input`: this one said so). `asked`:
    the input as the provider counted it. `output`: what was reserved for the answer.
    """

    limit: int | None = None
    asked: int | None = None
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
    """What matches `sentence`, where `{limit}` and its like stand for numbers, and `{n}` for one that says nothing.

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
#: What may follow. Numbers in a sentence that is not here are not guessed at: a total of input and output is neither,
#: and "at least" is where a server stopped counting.
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

#: Every other sentence that its words and numbers alone do not tell (see `length_words.py`), the longer of two before
#: the shorter. Where a number is an `{n}`, it is one of characters, a
#: bound, or a sum with an unknown part for the answer. `{input}` stands where the provider is known to have a limit of
#: the input beside the window; elsewhere, and in doubt, the answer is taken to need room in the limit too.
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
            # vLLM; it stops to count at one too many
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
            # LM Studio; what it keeps is the beginning
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
    """The refusal in `body`; None where it is none, or one for another reason than length."""
    if status not in TELLING:
        return None
    return next(filter(None, map(_read, said_in(body))), None)


def _read(said: ErrorText) -> LengthError | None:
    """Read one message: the numbers beside it, its words, its code."""
    fields = said.fields
    if fields.get("type") == "exceed_context_size_error":
        limit = count(fields.get("n_ctx"))
        if limit:
            return LengthError(limit, count(fields.get("n_prompt_tokens")))
    if not said.text:
        codes = (fields.get("code"), fields.get("type"))
        return LengthError() if any(isinstance(word, str) and word in _CODES for word in codes) else None
    text = said.text
    found = _model_maximum(text) or _sentence(text) or _in_other_words(text)
    return LengthError() if found is None and "ContextWindowExceededError" in said.labels else found


def _model_maximum(text: str) -> LengthError | None:
    """The most widespread sentence: a window, and what was asked for in one of many ways."""
    head = _first(_MODEL_MAXIMUM, text)
    if head is None:
        return None
    joint = _JOINT.match(text, head.end())
    following = _first(_FOLLOWING, text, joint.end()) if joint else None
    said = head.groupdict() | (following.groupdict() if following else {})
    parts = said.get("parts")
    if parts:
        asked, output = _parts(parts)
        return LengthError(_number(said["limit"]), asked, output)
    return _from_groups(said)


def _in_other_words(text: str) -> LengthError | None:
    """Read a sentence that is not known word by word."""
    found = lengths_in(text)
    return LengthError(found.limit, found.asked) if found is not None else None


def _parts(text: str) -> tuple[int | None, int | None]:
    """The input's and the output's sum of what stands in brackets after a total."""
    sums: dict[bool, int] = {}
    for number, name in _PART.findall(text):
        is_output = "completion" in name.lower() or "output" in name.lower()
        sums[is_output] = sums.get(is_output, 0) + (_number(number) or 0)
    return sums.get(False), sums.get(True)


def _sentence(text: str) -> LengthError | None:
    found = _first(_SENTENCES, text)
    return _from_groups(found.groupdict()) if found else None


def _first(patterns: Iterable[re.Pattern[str]], text: str, start: int = 0) -> re.Match[str] | None:
    return next(filter(None, (pattern.match(text, start) for pattern in patterns)), None)


def _from_groups(said: Mapping[str, str | None]) -> LengthError:
    most = _number(said.get("input"))
    limit, asked, over = most or _number(said.get("limit")), _number(said.get("asked")), _number(said.get("over"))
    if limit is not None and over is not None:
        asked = limit + over
    return LengthError(limit or None, asked, _number(said.get("output")), of_input=bool(most))


def _number(digits: str | None) -> int | None:
    return int(digits.replace(",", "")) if digits else None
