"""Recognize requests that ask the provider to summarize the whole conversation.

Such a request must reach the provider with all its messages and with its own output limit. Trimmed messages would be
missing in the summary, and a summary that is cut short cannot replace the conversation.
"""

from __future__ import annotations

from typing import Final

from gateway.core.counting.measure import Wire
from gateway.dialects.fields import AnyFields

#: https://platform.claude.com/docs/en/build-with-claude/compaction-on-demand
_ON_DEMAND: Final = "compaction"


def asks_for_compaction(fields: AnyFields, wire: Wire | None) -> bool:
    """Return True if the response will be a summary that replaces the conversation."""
    return wire == "messages" and bytes(fields.get(_ON_DEMAND, b"null")) != b"null"
