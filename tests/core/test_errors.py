"""Test the errors that clients see: status, code, types, and whether a retry helps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.core import errors
from gateway.core.errors import ConfigError, GatewayError

# class: status, code, OpenAI type, Anthropic type, retry helps, Retry-After
TABLE: dict[type[GatewayError], tuple[int, str, str, str, bool, int | None]] = {
    errors.InternalError: (500, "internal_error", "api_error", "api_error", False, None),
    errors.InvalidRequest: (400, "invalid_request", "invalid_request_error", "invalid_request_error", False, None),
    errors.SessionRequired: (400, "session_required", "invalid_request_error", "invalid_request_error", False, None),
    errors.Unauthenticated: (401, "invalid_api_key", "authentication_error", "authentication_error", False, None),
    errors.Forbidden: (403, "forbidden", "permission_error", "permission_error", False, None),
    errors.UnknownModel: (404, "model_not_found", "invalid_request_error", "not_found_error", False, None),
    errors.NotFound: (404, "not_found", "invalid_request_error", "not_found_error", False, None),
    errors.MethodNotAllowed: (
        405, "method_not_allowed", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.NoWebSocket: (
        426, "websocket_unsupported", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.SocketExpired: (
        400, "websocket_connection_limit_reached", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.SocketFull: (
        400, "websocket_stream_limit_reached", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.PreviousNotFound: (
        400, "previous_response_not_found", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.RequestTimeout: (400, "body_timeout", "invalid_request_error", "invalid_request_error", False, None),
    errors.ToolNotAllowed: (400, "tool_not_allowed", "invalid_request_error", "invalid_request_error", False, None),
    errors.SessionStopped: (400, "session_stopped", "invalid_request_error", "invalid_request_error", False, None),
    errors.PayloadTooLarge: (413, "request_too_large", "invalid_request_error", "request_too_large", False, None),
    errors.BudgetExhausted: (400, "budget_exhausted", "budget_exceeded", "billing_error", False, None),
    errors.BudgetBusy: (429, "budget_busy", "rate_limit_error", "rate_limit_error", True, 1),
    errors.RateLimited: (429, "rate_limit_exceeded", "rate_limit_error", "rate_limit_error", True, None),
    errors.NotMetered: (400, "not_metered", "invalid_request_error", "invalid_request_error", False, None),
    errors.PriceUnknown: (400, "price_unknown", "invalid_request_error", "invalid_request_error", False, None),
    errors.UpstreamRefused: (502, "upstream_unreachable", "api_error", "api_error", True, None),
    errors.UpstreamHungUp: (502, "upstream_unreachable", "api_error", "api_error", True, None),
    errors.UpstreamBusy: (503, "upstream_busy", "overloaded_error", "overloaded_error", True, 1),
    errors.UpstreamOpenCircuit: (503, "upstream_open_circuit", "overloaded_error", "overloaded_error", True, 1),
    errors.UpstreamUnreachable: (502, "upstream_unreachable", "api_error", "api_error", True, None),
    errors.UpstreamProtocolError: (502, "upstream_protocol_error", "api_error", "api_error", True, None),
    errors.UpstreamUnreadable: (502, "upstream_protocol_error", "api_error", "api_error", False, None),
    errors.UpstreamUntranslated: (502, "upstream_protocol_error", "api_error", "api_error", True, None),
    errors.CompactionUnknown: (
        400, "invalid_encrypted_content", "invalid_request_error", "invalid_request_error", False, None,
    ),
    errors.UpstreamRedirect: (502, "upstream_redirect", "api_error", "api_error", False, None),
    errors.UpstreamNotAccepted: (504, "upstream_timeout", "api_error", "timeout_error", True, None),
    errors.UpstreamNotTaken: (504, "upstream_timeout", "api_error", "timeout_error", True, None),
    errors.UpstreamTimeout: (504, "upstream_timeout", "api_error", "timeout_error", False, None),
    errors.StoreUnavailable: (503, "store_unavailable", "api_error", "api_error", True, 1),
    errors.StoreConflict: (503, "store_conflict", "api_error", "api_error", True, 1),
    errors.StoreDamaged: (503, "store_damaged", "api_error", "api_error", False, None),
    errors.SigningKeysUnavailable: (503, "signing_keys_unavailable", "api_error", "api_error", True, 10),
    errors.Overloaded: (503, "overloaded", "overloaded_error", "overloaded_error", True, 1),
    errors.ShuttingDown: (503, "shutting_down", "overloaded_error", "overloaded_error", True, 1),
}  # fmt: skip


def leaves(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    for child in kind.__subclasses__():
        yield from leaves(child)
        if not child.__subclasses__() and child.__module__ == errors.__name__:
            yield child


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_an_error_has_the_documented_status_code_types_and_retry(kind: type[GatewayError]) -> None:
    facts = (kind.status, kind.code, kind.openai_type, kind.anthropic_type, kind.retry, kind.retry_after)
    assert facts == TABLE[kind]


def test_every_error_a_caller_can_meet_is_in_the_table() -> None:
    assert set(leaves(GatewayError)) <= set(TABLE)


def test_no_two_errors_share_a_code() -> None:
    # Some classes are only distinguished inside the gateway and share a code.
    inner = {
        *(errors.UpstreamRefused, errors.UpstreamHungUp, errors.UpstreamUntranslated),
        *(errors.UpstreamNotAccepted, errors.UpstreamNotTaken, errors.UpstreamUnreadable),
    }
    codes = [kind.code for kind in TABLE if kind not in inner]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_error_that_needs_no_retry_has_a_status_sdks_do_not_retry(kind: type[GatewayError]) -> None:
    repeated_by_sdks = kind.status in (408, 409, 429) or kind.status >= 500
    # Errors that only an operator can correct have a status that alerts operators. A silent provider has its own status: a
    # retry may help, but it is billed twice.
    told = (
        errors.InternalError,
        errors.StoreDamaged,
        errors.UpstreamTimeout,
        errors.UpstreamRedirect,
        errors.UpstreamUnreadable,
    )
    assert kind.retry or not repeated_by_sdks or kind in told


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_request_faults_have_4xx_statuses(kind: type[GatewayError]) -> None:
    assert issubclass(kind, errors.RequestFault) == (400 <= kind.status < 500)


def test_an_error_carries_its_message_and_parameter() -> None:
    fault = errors.InvalidRequest("no such thing", param="model")
    assert (fault.message, fault.param, str(fault)) == ("no such thing", "model", "no such thing")
    assert errors.InvalidRequest("x").param is None


def test_config_error_lists_each_problem_on_its_own_line() -> None:
    error = ConfigError(["a.b: wrong", "c: missing"])
    assert str(error) == "a.b: wrong\nc: missing"
    assert error.problems == ["a.b: wrong", "c: missing"]
    assert not isinstance(error, GatewayError)
