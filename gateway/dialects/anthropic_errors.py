"""Write errors in the format of Anthropic's API."""

from __future__ import annotations

import msgspec

from gateway.core.errors import GatewayError


def body(fault: GatewayError, request_id: str) -> bytes:
    """`{"type": "error", "error": {"type", "message", "code"}, "request_id"}`, as the official SDKs read it.

    Details of the fault stand beside the message.
    """
    error: dict[str, object] = {"type": fault.anthropic_type, "message": fault.message, "code": fault.code}
    return msgspec.json.encode({"type": "error", "error": {**error, **fault.details}, "request_id": request_id})


def event(fault: GatewayError, request_id: str) -> bytes:
    """The same as the last event of a stream."""
    return b"event: error\ndata: " + body(fault, request_id) + b"\n\n"
