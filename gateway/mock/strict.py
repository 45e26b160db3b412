"""Request rules of models other than Claude, as data.

The rules are off by default. `MockProvider(strict=STRICT_MODELS)` refuses the same requests as the real API of a model,
with the same messages. It adds to its responses what the client must send back: reasoning, signatures, ciphertext.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

_MARK_BYTES: Final = 12
#: Roles that must not follow each other: in Mistral's own API, and in a chat template that requires user and assistant
#: messages to alternate.
_MISTRAL_ORDER: Final = frozenset({("tool", "user"), ("tool", "system"), ("user", "tool"), ("assistant", "system")})
_TEMPLATE_ORDER: Final = _MISTRAL_ORDER | {("user", "user"), ("assistant", "assistant")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictRules:
    """Rules of the models whose name matches one of `models` (shell patterns in lower case)."""

    models: tuple[str, ...] = ()
    errors: Literal["openai", "google", "mistral"] = "openai"
    """The format of error bodies."""
    refused_fields: tuple[str, ...] = ()
    """Refused fields, as dotted paths; `path=value` refuses only this value."""

    signatures: bool = False
    """Chat: the first tool call of each response has a thought signature. The client must send it back in its turn."""
    reasoning: bool = False
    """Chat: responses have `reasoning_content`, unless the request turns thinking off."""
    reasoning_back: Literal["none", "turn", "calls", "turns"] = "none"
    """Chat: the assistant messages that must contain `reasoning_content` while thinking is on.

    - `turn`: messages with tool calls since the last user message
    - `calls`: all messages with tool calls
    - `turns`: all messages of turns with tool calls
    """
    reasoning_missing: str = ""
    """Chat: the error message for missing reasoning; `{index}` is the number of the message."""
    forced_choice: str = ""
    """Chat: the error message for a forced tool choice while thinking is on. `{choice}`: `required` or `specified`."""
    refused_order: frozenset[tuple[str, str]] = frozenset()
    """Chat: roles that must not follow each other."""
    refused_last: frozenset[str] = frozenset()
    """Chat: roles that the last message must not have."""
    tool_id: str = ""
    """Chat: the regular expression that ids of tool calls must match."""

    reasoning_items: bool = False
    """Responses: a response starts with an encrypted reasoning item. Items must come back in order and unchanged."""
    phases: bool = False
    """Responses: assistant messages have a `phase`. Without it, the response is degraded, but the request is valid."""


NO_RULES: Final = StrictRules()

_MISTRAL: Final = StrictRules(
    models=("*stral*", "*xtral*"),
    errors="mistral",
    # mistral-common, protocol/instruct/validator.py
    refused_order=_MISTRAL_ORDER,
    refused_last=frozenset({"assistant", "system"}),
    tool_id=r"[a-zA-Z0-9]{9}",
)

#: The rules of current models; the first entry that matches applies.
STRICT_MODELS: Final = (
    StrictRules(  # developers.openai.com, models/gpt-6.2-sol
        models=("*gpt-6*sol*",),
        refused_fields=("temperature", "top_p", "logprobs", "top_logprobs", "reasoning.effort=none"),
        reasoning_items=True,
        phases=True,
    ),
    StrictRules(models=("*gpt-5.3-codex*", "*gpt-5.[4-9]*", "*gpt-6*"), reasoning_items=True, phases=True),
    StrictRules(models=("*gemini-3*",), errors="google", signatures=True),  # ai.google.dev, thought-signatures
    StrictRules(  # api-docs.deepseek.com, guides/thinking_mode
        models=("*deepseek-v4*",),
        reasoning=True,
        reasoning_back="turns",
        reasoning_missing="The `reasoning_content` in the thinking mode must be passed back to the API.",
        forced_choice="Thinking mode does not support this tool_choice",
    ),
    StrictRules(  # platform.moonshot.ai, use-kimi-k2-thinking-model
        models=("*kimi-k2.[5-9]*", "*kimi-k3*"),
        reasoning=True,
        reasoning_back="calls",
        reasoning_missing=(
            "thinking is enabled but reasoning_content is missing in assistant tool call message at index {index}"
        ),
        forced_choice="tool_choice '{choice}' is incompatible with thinking enabled",
    ),
    StrictRules(
        models=("*qwen3.[5-9]*", "*qwen*-plus*", "*qwen*-max*"),
        reasoning=True,
        forced_choice=(
            "<400> InternalError.Algo.InvalidParameter: The tool_choice parameter does not support being set to "
            "required or object in thinking mode"
        ),
    ),
    # This model is served with a chat template that refuses two consecutive messages of one role.
    replace(_MISTRAL, models=("*ministral*",), refused_order=_TEMPLATE_ORDER),
    _MISTRAL,
)


def rules_of(table: Sequence[StrictRules], model: str) -> StrictRules:
    """Return the first rules that match the model; `NO_RULES` if none do."""
    name = model.lower()
    return next((rules for rules in table if any(fnmatchcase(name, pattern) for pattern in rules.models)), NO_RULES)


def seal(*texts: str) -> str:
    """Return an opaque text that `unseal` decodes. It is used as a signature or ciphertext."""
    payload = "\n".join(texts).encode()
    return base64.b64encode(_mark(payload) + payload).decode()


def unseal(text: str) -> list[str] | None:
    """Return the sealed texts; None if the sealed text was changed or was not created by `seal`."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    mark, payload = data[:_MARK_BYTES], data[_MARK_BYTES:]
    return payload.decode().split("\n") if mark == _mark(payload) else None


def matches(expression: str, text: object) -> bool:
    """Return True if the whole text matches the regular expression."""
    return isinstance(text, str) and re.fullmatch(expression, text) is not None


def _mark(payload: bytes) -> bytes:
    return hashlib.sha256(b"sealed by the built-in provider" + payload).digest()[:_MARK_BYTES]
