"""Write errors in the format of the OpenAI APIs."""

from __future__ import annotations

import msgspec

from gateway.core.errors import GatewayError


def body(fault: GatewayError) -> bytes:
    """Return the error body `{"error": {"message", "type", "param", "code"}}`, as the official SDKs read it.

    The details of the error are added next to the message.
    """
    error: dict[str, object] = {
        "message": fault.message,
        "type": fault.openai_type,
        "param": fault.param,
        "code": fault.code,
    }
    return msgspec.json.encode({"error": {**error, **fault.details}})


def event(fault: GatewayError) -> bytes:
    """Return the error as the last event of a stream."""
    return b"data: " + body(fault) + b"\n\n"
