"""Define the request headers that the gateway reads. They are not forwarded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SESSION: Final = b"x-session-id"
REQUEST_ID: Final = b"x-request-id"
PARENT: Final = b"x-parent-session-id"
AGENT: Final = b"x-session-agent"
AGENT_ID: Final = b"x-agent-id"
AGENT_TYPE: Final = b"x-agent-type"
CONTEXT_BUDGET: Final = b"x-context-budget"
CONTEXT_TRIM: Final = b"x-context-trim"
BUDGET_TOKENS: Final = b"x-session-budget-tokens"
BUDGET_USD: Final = b"x-session-budget-usd"
RESPONSE_MODE: Final = b"x-response-mode"
TAG: Final = b"x-session-tag"

#: headers that change how a call is handled
DIRECTIVES: Final[Mapping[bytes, str]] = {
    CONTEXT_BUDGET: (
        "most input tokens of this call, if that is less than its context budget; ignored while the client compacts "
        "its conversation"
    ),
    CONTEXT_TRIM: "`auto`, `off` (send it unchanged) or `shadow` (only report what would be done)",
    BUDGET_TOKENS: "lowers the session's token budget for this call; a higher number has no effect",
    BUDGET_USD: "the same in US dollars, such as `0.50`",
    RESPONSE_MODE: "show tool results as `raw`, `table`, `summary` or `handle_only`; a budget may shorten them further",
    PARENT: "the parent session; its budget is charged as well",
    AGENT: "the agent whose steps apply to the call",
    TAG: "a name by which usage is added up, 1 to 64 characters; the body can name it in `metadata.tag`",
}
#: other headers that are read, besides credentials
READ: Final[Mapping[bytes, str]] = {
    SESSION: "the session that the call belongs to (the header's name: `sessions.id_headers`)",
    REQUEST_ID: (
        "the call's id, kept with its record and returned as `x-gateway-request-id`: 1 to 128 visible ASCII "
        "characters; calls with the same id are all charged"
    ),
    AGENT_ID: (
        "the agent of the session that makes the call, such as one of several subagents; it is counted separately, and "
        "`budget.agents` can limit it"
    ),
    AGENT_TYPE: "the type of that agent, such as `Explore`; without an id, all agents of a type are counted as one",
}
GATEWAY_HEADERS: Final = frozenset({*DIRECTIVES, *READ})
