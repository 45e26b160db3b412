"""The status of an error inside a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import (
    GatewayError,
    ShuttingDown,
    StoreUnavailable,
    UpstreamProtocolError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.dialects import openai_errors
from gateway.dialects.error_status import status_of, unwrapped


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"error": {"type": "tokens", "code": "rate_limit_exceeded"}}, 429),
        ({"type": "error", "code": "server_error"}, 500),
        ({"type": "error", "error": {"type": "overloaded_error"}}, 529),
        ({"error": {"code": "503"}}, 503),
        ({"error": {"status": 404, "type": "server_error"}}, 404),
        ({"response": {"error": {"code": "invalid_prompt"}}}, 400),
        ({"error": {"code": 200}}, 502),
        ({"error": "plain"}, 502),
        ([], 502),
    ],
)
def test_stream_error_has_the_status_of_a_separate_response(said: Any, status: int) -> None:
    assert status_of(json.dumps(said).encode()) == status


@pytest.mark.parametrize(
    "kind", [ShuttingDown, StoreUnavailable, UpstreamProtocolError, UpstreamTimeout, UpstreamUnreachable]
)
def test_an_error_of_the_gateway_has_its_own_status(kind: type[GatewayError]) -> None:
    fault = kind("It ended.")
    assert status_of(openai_errors.body(fault)) == kind.status


def test_unreadable_error_has_a_status() -> None:
    assert status_of(b"<html>") == 502


def test_error_is_unwrapped_from_its_response() -> None:
    said = json.dumps({"type": "response.failed", "response": {"error": {"code": "c"}}}).encode()
    assert json.loads(unwrapped(said)) == {"error": {"code": "c"}}
    assert unwrapped(b"{}") == b"{}"
