"""Read and set Claude's fields and headers for refused thinking blocks.

(https://platform.claude.com/docs/en/build-with-claude/preserved-thinking)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.core.http.headers import header
from gateway.dialects.base import Call
from gateway.dialects.fields import decode

#: The header that carries betas, and the beta without which `block_binding` is refused.
BETA_HEADER: Final = b"anthropic-beta"
BINDING_BETA: Final = b"thinking-binding-controls-2026-08-01"
#: Types of thinking that accept `block_binding`.
DROPPING: Final = ("adaptive", "enabled")
_CLAUDE_CODE: Final = b"x-claude-code-session-id"


def manages_thinking(headers: Sequence[tuple[bytes, bytes]], call: Call) -> bool:
    """Return whether a client handles refused thinking blocks: it sets `block_binding`, or is Claude Code."""
    return bool(header(headers, _CLAUDE_CODE)) or "block_binding" in _thinking(call)


def with_drop_block(call: Call) -> Mapping[str, Any]:
    """Return the field `thinking` that makes the provider drop blocks instead of refusing them."""
    thinking = {"type": "adaptive", **_thinking(call)}
    return {**thinking, "block_binding": {"prefix_mismatch_behavior": "drop_block"}}


def thinking_type(call: Call) -> object:
    """Return the type of thinking that a request asks for; None if it names none."""
    return _thinking(call).get("type")


def with_beta(headers: list[tuple[bytes, bytes]], beta: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers with one more beta."""
    betas = [value for name, value in headers if name.lower() == BETA_HEADER]
    if any(beta in value for value in betas):
        return headers
    others = [(name, value) for name, value in headers if name.lower() != BETA_HEADER]
    return [*others, (BETA_HEADER, b",".join([*filter(None, betas), beta]))]


def _thinking(call: Call) -> Mapping[str, Any]:
    raw = call.fields.get("thinking")
    value = decode(raw) if raw is not None else None
    return value if isinstance(value, dict) else {}
