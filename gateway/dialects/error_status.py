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

#: The status for each error type or code of the providers. Anthropic:
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
#: the status for the gateway's own error codes, which are more specific than their types
_OWN_STATUSES: Final[Mapping[str, int]] = {
    fault.code: fault.status
    for fault in (ShuttingDown, StoreUnavailable, UpstreamProtocolError, UpstreamTimeout, UpstreamUnreachable)
}
#: the status of an error that names none
_UNKNOWN: Final = 502


def unwrapped(data: bytes) -> bytes:
    """Return the body that the error would have as a separate response; unwraps it from `response.failed`."""
    try:
        value: Any = json.loads(data)
        error = value["response"]["error"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return data
    return encode({"error": error})


def status_of(data: bytes) -> int:
    """Return the status that the error would have as a separate response."""
    try:
        value: Any = json.loads(unwrapped(data))
    except (ValueError, RecursionError):
        return _UNKNOWN
    error = value.get("error") if isinstance(value, dict) else None
    for holder in (error, value):
        if isinstance(holder, dict):
            for name in ("status", "status_code", "code", "type"):
                status = _as_status(holder.get(name))
                if status is not None:
                    return status
    return _UNKNOWN


def _as_status(value: object) -> int | None:
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[45]\d\d", value) else _STATUSES.get(value) or _OWN_STATUSES.get(value)
    return value if type(value) is int and 400 <= value <= 599 else None  # noqa: PLR2004
