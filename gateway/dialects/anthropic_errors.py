"""The error body of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.core.errors import GatewayError


def body(fault: GatewayError, request_id: str, details: Mapping[str, object] | None = None) -> bytes:
    """`{"type": "error", "error": {"type", "message", "code"}, "request_id"}`, as the official SDKs read it."""
    error: dict[str, object] = {"type": fault.anthropic_type, "message": fault.message, "code": fault.code}
    return msgspec.json.encode({"type": "error", "error": {**error, **(details or {})}, "request_id": request_id})


def event(fault: GatewayError, request_id: str) -> bytes:
    """The same as the last event of a stream."""
    return b"event: error\ndata: " + body(fault, request_id) + b"\n\n"
