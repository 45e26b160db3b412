"""Betas of Anthropic's API that the mock provider supports, and the betas that a request names."""

from __future__ import annotations

from typing import Final

from gateway.mock.wire import ReceivedCall

BINDING: Final = "thinking-binding-controls-2026-08-01"
ON_DEMAND_COMPACTION: Final = "compact-2026-09-04"
THRESHOLD_COMPACTION: Final = "compact-2026-01-12"
CONTEXT_EDITING: Final = "context-management-2025-06-27"
TOOL_CHANGES: Final = "mid-conversation-tool-changes-2026-07-01"
#: The later version, which also accepts definitions of tools.
INLINE_TOOLS: Final = "inline-tools-2026-09-15"
TASK_BUDGETS: Final = "task-budgets-2026-03-13"
FALLBACK: Final = "server-side-fallback-2026-06-01"
#: The later version, which also accepts "default" and more settings of a fallback model.
DEFAULT_FALLBACK: Final = "server-side-fallback-2026-07-01"

#: The end of the error message for a field whose beta the request does not name.
EXTRA_INPUTS: Final = "Extra inputs are not permitted"


def betas_of(request: ReceivedCall) -> frozenset[str]:
    """Return the betas that `request` names."""
    values = [value for name, value in request.headers if name == "anthropic-beta"]
    return frozenset(part.strip() for value in values for part in value.split(","))
