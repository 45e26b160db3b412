"""Errors in the shape the official SDKs read."""

from __future__ import annotations

import json

import pytest

from gateway.core.errors import GatewayError, InvalidRequest, PayloadTooLarge, UpstreamTimeout
from gateway.dialects import CHAT, anthropic_errors, openai_errors
from gateway.dialects.passthrough import PassThrough

FAULTS = [InvalidRequest("wrong", param="model"), PayloadTooLarge("too large"), UpstreamTimeout("silent")]
NASTY = InvalidRequest('a "quoted" \\ line\nwith 漢 and \u2028 </script>')


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_an_openai_error_has_message_type_param_and_code(fault: GatewayError) -> None:
    assert json.loads(openai_errors.body(fault)) == {
        "error": {"message": fault.message, "type": fault.openai_type, "param": fault.param, "code": fault.code}
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_an_anthropic_error_has_type_message_code_and_request_id(fault: GatewayError) -> None:
    assert json.loads(anthropic_errors.body(fault, "req-1")) == {
        "type": "error",
        "error": {"type": fault.anthropic_type, "message": fault.message, "code": fault.code},
        "request_id": "req-1",
    }


def test_details_stand_beside_the_message() -> None:
    details = {"budget": {"limit": 5}}
    for body in (openai_errors.body(FAULTS[0], details), anthropic_errors.body(FAULTS[0], "r", details)):
        assert json.loads(body)["error"]["budget"] == {"limit": 5}
        assert json.loads(body)["error"]["message"] == "wrong"


def test_each_dialect_speaks_its_clients_language() -> None:
    openai = openai_errors.body(FAULTS[0], {"a": 1})
    assert CHAT.error(FAULTS[0], "r", {"a": 1}) == openai
    assert PassThrough("chat").error(FAULTS[0], "r", {"a": 1}) == openai
    anthropic = anthropic_errors.body(FAULTS[0], "r", {"a": 1})
    assert PassThrough("chat", anthropic=True).error(FAULTS[0], "r", {"a": 1}) == anthropic


@pytest.mark.parametrize("dialect", [CHAT, PassThrough("chat")])
def test_an_error_in_a_stream_is_one_whole_event_whatever_the_message(dialect: PassThrough) -> None:
    event = dialect.error_event(NASTY, "r")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["message"] == NASTY.message


def test_an_error_in_an_anthropic_stream_names_its_event() -> None:
    event = PassThrough("chat", anthropic=True).error_event(NASTY, "r")
    name, _, data = event.partition(b"\n")
    assert name == b"event: error"
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 3
    assert json.loads(data[6:])["error"]["message"] == NASTY.message
