"""Requests that send thinking blocks back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: The beta that controls the check of thinking blocks and reports it.
BETA = "thinking-binding-controls-2026-08-01"


def without_thinking(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without any thinking block."""
    return [
        message
        if isinstance(message["content"], str)
        else {**message, "content": [block for block in message["content"] if block["type"] != "thinking"]}
        for message in messages
    ]
