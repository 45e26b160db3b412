"""Errors in the form that the official SDKs read."""

from __future__ import annotations

import json

import pytest

from gateway.core.errors import BudgetBusy, GatewayError, InvalidRequest, PayloadTooLarge, UpstreamTimeout
from gateway.dialects import CHAT, anthropic_errors, openai_errors
from gateway.dialects.anthropic_messages import AnthropicMessages
from gateway.dialects.base import Dialect
from gateway.dialects.completions import Completions
from gateway.dialects.openai_responses import OpenAIResponses
from gateway.dialects.passthrough import PassThrough

FAULTS = [InvalidRequest("wrong", param="model"), PayloadTooLarge("too large"), UpstreamTimeout("silent")]


def name_of(dialect: Dialect) -> str:
    return dialect.name


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


def test_details_are_next_to_the_message() -> None:
    fault = BudgetBusy("wrong", {"limit": 5})
    for body in (openai_errors.body(fault), anthropic_errors.body(fault, "r")):
        assert json.loads(body)["error"]["budget"] == {"limit": 5}
        assert json.loads(body)["error"]["message"] == "wrong"


@pytest.mark.parametrize("dialect", [CHAT, Completions(), OpenAIResponses(), PassThrough("x")], ids=name_of)
def test_openai_dialects_use_the_openai_error_form(dialect: Dialect) -> None:
    assert dialect.error(FAULTS[0], "r") == openai_errors.body(FAULTS[0])


ANTHROPIC = [AnthropicMessages(), PassThrough("x", anthropic=True)]


@pytest.mark.parametrize("dialect", ANTHROPIC, ids=name_of)
def test_anthropic_dialects_use_the_anthropic_error_form(dialect: Dialect) -> None:
    assert dialect.error(FAULTS[0], "r") == anthropic_errors.body(FAULTS[0], "r")


@pytest.mark.parametrize("dialect", [CHAT, Completions(), PassThrough("x")], ids=name_of)
def test_an_error_in_a_stream_is_one_whole_event_whatever_the_message(dialect: Dialect) -> None:
    event = dialect.error_event(NASTY, "r")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert json.loads(event[6:])["error"]["message"] == NASTY.message


@pytest.mark.parametrize("dialect", [*ANTHROPIC, OpenAIResponses()], ids=name_of)
def test_an_error_in_a_stream_of_named_events_names_its_event(dialect: Dialect) -> None:
    event = dialect.error_event(NASTY, "r")
    name, _, data = event.partition(b"\n")
    assert name == b"event: error"
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 3
    event = json.loads(data[6:])
    assert (event["type"], event["error"]["message"]) == ("error", NASTY.message)


def test_responses_error_event_has_the_documented_and_the_sdk_fields() -> None:
    fault = FAULTS[0]
    event = json.loads(OpenAIResponses().error_event(fault, "r", 7).partition(b"data: ")[2])
    assert event == {
        "type": "error", "code": fault.code, "message": fault.message, "param": fault.param, "sequence_number": 7,
        "error": {"type": fault.openai_type, "code": fault.code, "message": fault.message, "param": fault.param},
    }  # fmt: skip
