"""The error body of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.core.errors import GatewayError


def body(fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
    """`{"type": "error", "error": {"type", "message", "code"}, "request_id"}`, as the official SDKs read it."""
    error: dict[str, object] = {"type": fault.anthropic_type, "message": fault.message, "code": fault.code}
    return msgspec.json.encode({"type": "error", "error": {**error, **(details or {})}, "request_id": request_id})
