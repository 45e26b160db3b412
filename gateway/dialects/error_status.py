"""Read the status of an error inside a stream that began with 200."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.conversation.message import encode
from gateway.core.errors import (
    ShuttingDown,
    StoreUnavailable,
    UpstreamProtocolError,
    UpstreamTimeout,
    UpstreamUnreachable,
)

#: by what providers call an error: the status that says the same. Anthropic:
#: https://docs.claude.com/en/api/errors; OpenAI: https://platform.openai.com/docs/guides/error-codes
_STATUSES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("invalid_request_error", "invalid_prompt", "context_length_exceeded", "billing_error"), 400),
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    **dict.fromkeys(("rate_limit_error", "rate_limit_exceeded", "insufficient_quota", "tokens", "requests"), 429),
    **dict.fromkeys(("api_error", "server_error"), 500),
    "timeout_error": 504,
    "overloaded_error": 529,
}
#: by the code that the gateway gives an error of its own, whose type says less
_OWN_STATUSES: Final[Mapping[str, int]] = {
    fault.code: fault.status
    for fault in (ShuttingDown, StoreUnavailable, UpstreamProtocolError, UpstreamTimeout, UpstreamUnreachable)
}
#: the status of an error that tells none
_UNKNOWN: Final = 502


def plain(said: bytes) -> bytes:
    """The body that the error would have as an answer of its own; `response.failed` has it inside its response."""
    try:
        value: Any = json.loads(said)
        error = value["response"]["error"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return said
    return encode({"error": error})


def status_of(said: bytes) -> int:
    """The status that an error would have had as an answer of its own."""
    try:
        value: Any = json.loads(plain(said))
    except (ValueError, RecursionError):
        return _UNKNOWN
    error = value.get("error") if isinstance(value, dict) else None
    for told in (error, value):
        if isinstance(told, dict):
            for name in ("status", "status_code", "code", "type"):
                status = _as_status(told.get(name))
                if status is not None:
                    return status
    return _UNKNOWN


def _as_status(said: object) -> int | None:
    if isinstance(said, str):
        said = int(said) if re.fullmatch(r"[45]\d\d", said) else _STATUSES.get(said) or _OWN_STATUSES.get(said)
    return said if type(said) is int and 400 <= said <= 599 else None  # noqa: PLR2004
