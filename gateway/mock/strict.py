"""Define the request rules of models other than Claude, as data.

Off by default. `Provider(strict=STRICT_MODELS)` refuses what the real API of a matching model refuses, with the same
text, and adds to its answers what the client has to send back: reasoning, signatures, ciphertext.
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
#: Roles that may not follow each other: Mistral's own API, and a chat template that wants user and assistant by turns.
_MISTRAL_ORDER: Final = frozenset({("tool", "user"), ("tool", "system"), ("user", "tool"), ("assistant", "system")})
_TEMPLATE_ORDER: Final = _MISTRAL_ORDER | {("user", "user"), ("assistant", "assistant")}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrictRules:
    """Rules of the models whose name matches one of `models` (shell patterns in lower case)."""

    models: tuple[str, ...] = ()
    errors: Literal["openai", "google", "mistral"] = "openai"
    """Shape of the body of a refusal."""
    refused_fields: tuple[str, ...] = ()
    """Fields that may not be given, as dotted paths; `path=value` refuses this value only."""

    signatures: bool = False
    """Chat: the first tool call of each answer carries a thought signature, which must come back in its turn."""
    reasoning: bool = False
    """Chat: answers carry `reasoning_content`, unless the request turns thinking off."""
    reasoning_back: Literal["none", "turn", "calls", "turns"] = "none"
    """Chat: the assistant messages that must bring `reasoning_content` back while thinking is on.

    `turn`: tool calls since the last user message. `calls`: all tool calls. `turns`: all messages of turns with a call.
    """
    reasoning_missing: str = ""
    """Text of that refusal; `{index}` is the number of the message."""
    forced_choice: str = ""
    """Chat: text that refuses a forced tool choice while thinking is on; `{choice}` is `required` or `specified`."""
    refused_order: frozenset[tuple[str, str]] = frozenset()
    """Chat: roles that may not follow each other."""
    refused_last: frozenset[str] = frozenset()
    """Chat: roles that the last message may not have."""
    tool_id: str = ""
    """Chat: expression that the ids of tool calls must match."""

    reasoning_items: bool = False
    """Responses: answers begin with an encrypted reasoning item, and items must come back in order and unchanged."""
    phases: bool = False
    """Responses: assistant messages carry `phase`; without it the answer is degraded, but not refused."""


NO_RULES: Final = StrictRules()

_MISTRAL: Final = StrictRules(
    models=("*stral*", "*xtral*"),
    errors="mistral",
    # mistral-common, protocol/instruct/validator.py
    refused_order=_MISTRAL_ORDER,
    refused_last=frozenset({"assistant", "system"}),
    tool_id=r"[a-zA-Z0-9]{9}",
)

#: Rules of today's models; the first row that matches holds.
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
    # Served with its own chat template, which refuses two messages of one role in a row.
    replace(_MISTRAL, models=("*ministral*",), refused_order=_TEMPLATE_ORDER),
    _MISTRAL,
)


def rules_of(table: Sequence[StrictRules], model: str) -> StrictRules:
    """Return the first rules that match the model; `NO_RULES` if none do."""
    name = model.lower()
    return next((rules for rules in table if any(fnmatchcase(name, one) for one in rules.models)), NO_RULES)


def seal(*said: str) -> str:
    """Return an opaque text from which only `unseal` gets these texts back. It stands for a signature or ciphertext."""
    payload = "\n".join(said).encode()
    return base64.b64encode(_mark(payload) + payload).decode()


def unseal(text: str) -> list[str] | None:
    """Return the texts that were sealed; None if the sealed text was changed or comes from somewhere else."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    mark, payload = data[:_MARK_BYTES], data[_MARK_BYTES:]
    return payload.decode().split("\n") if mark == _mark(payload) else None


def matches(expression: str, text: object) -> bool:
    """Return True if the whole text matches the expression."""
    return isinstance(text, str) and re.fullmatch(expression, text) is not None


def _mark(payload: bytes) -> bytes:
    return hashlib.sha256(b"sealed by the built-in provider" + payload).digest()[:_MARK_BYTES]
