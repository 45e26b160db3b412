"""Write errors in the format of Anthropic's API."""

from __future__ import annotations

import msgspec

from gateway.core.errors import GatewayError


def body(fault: GatewayError, request_id: str) -> bytes:
    """Return the body `{"type": "error", "error": {"type", "message", "code"}, "request_id"}`, as SDKs read it.

    The details of the error are added next to the message.
    """
    error: dict[str, object] = {"type": fault.anthropic_type, "message": fault.message, "code": fault.code}
    return msgspec.json.encode({"type": "error", "error": {**error, **fault.details}, "request_id": request_id})


def event(fault: GatewayError, request_id: str) -> bytes:
    """Return the error as the last event of a stream."""
    return b"event: error\ndata: " + body(fault, request_id) + b"\n\n"
