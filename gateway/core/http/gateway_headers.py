"""Define the request headers that the gateway itself reads.

They are forwarded to nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SESSION: Final = b"x-session-id"
REQUEST_ID: Final = b"x-request-id"
PARENT: Final = b"x-parent-session-id"
AGENT: Final = b"x-session-agent"
CONTEXT_BUDGET: Final = b"x-context-budget"
CONTEXT_TRIM: Final = b"x-context-trim"
BUDGET_TOKENS: Final = b"x-session-budget-tokens"
BUDGET_USD: Final = b"x-session-budget-usd"
RESPONSE_MODE: Final = b"x-response-mode"

#: what a request may ask with
DIRECTIVES: Final[Mapping[bytes, str]] = {
    CONTEXT_BUDGET: "input tokens for this call, where that is less than what it is allowed anyway",
    CONTEXT_TRIM: "`auto`, `off` (send it as it is) or `shadow` (only report what would be done)",
    BUDGET_TOKENS: "a budget of the session in tokens, where it is lower than the configured one",
    BUDGET_USD: "the same in US dollars, such as `0.50`",
    RESPONSE_MODE: "show tool results as `raw`, `table`, `summary` or `handle_only`; a budget may ask for less",
    PARENT: "the session that this one works for, whose budget it spends too",
    AGENT: "the agent whose steps the call takes",
}
#: what else is read of a request, beside its credential
READ: Final[Mapping[bytes, str]] = {
    SESSION: "the session that the call belongs to (the header's name: `sessions.id_headers`)",
    REQUEST_ID: (
        "the call's id, kept with its record and returned as `x-gateway-request-id`: 1 to 128 visible ASCII "
        "characters; it never suppresses a charge"
    ),
}
OURS: Final = frozenset({*DIRECTIVES, *READ})
