from __future__ import annotations

import json

import msgspec
import pytest

from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.dialects.portable import bound_to_model, has_model_reasoning

HI = {"role": "user", "content": 'Hi, look at {"type":"image_url"} and "reasoning_content".'}
FUNCTION = {"type": "function", "function": {"name": "look"}}


def fields(wire: Wire, **values: object) -> dict[str, msgspec.Raw]:
    body = {ITEMS[wire]: [HI], **values}
    return {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}


@pytest.mark.parametrize(
    ("wire", "values"),
    [
        ("chat", {}),
        ("chat", {"tools": [FUNCTION], "temperature": 0, "response_format": {"type": "json_object"}}),
        ("chat", {"tools": [], "prediction": None}),
        ("responses", {"tools": [{"type": "function", "name": "look"}], "previous_response_id": None}),
        ("messages", {"tools": [{"name": "look", "input_schema": {}}, {"type": "custom", "name": "find"}]}),
    ],
)
def test_a_request_of_texts_and_the_clients_own_tools_fits_any_model(wire: Wire, values: dict[str, object]) -> None:
    assert bound_to_model(fields(wire, **values), wire) is None
    assert not has_model_reasoning(fields(wire, **values), wire)


@pytest.mark.parametrize(
    ("wire", "values", "why"),
    [
        ("chat", {"tools": [FUNCTION, {"type": "web_search"}]}, "tool"),
        ("chat", {"tools": "odd"}, "tool"),
        ("responses", {"tools": [{"type": "local_shell"}]}, "tool"),
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tool"),
        ("messages", {"mcp_servers": [{"name": "s"}]}, "mcp_servers"),
        ("messages", {"fallbacks": "default"}, "fallbacks"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("chat", {"modalities": ["text", "audio"]}, "output other than text"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "images"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "images"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "images"),
    ],
)
def test_what_binds_a_request_to_its_model_is_named(wire: Wire, values: dict[str, object], why: str) -> None:
    assert why in (bound_to_model(fields(wire, **values), wire) or "")


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ("chat", {"role": "assistant", "reasoning_content": "Think.", "content": "Hi."}),
        ("messages", {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "x"}]}),
        ("responses", {"type": "reasoning", "encrypted_content": "x", "summary": []}),
        ("chat", {"role": "assistant", "tool_calls": [{"extra_content": {"google": {"thought_signature": "x"}}}]}),
    ],
)
def test_reasoning_is_found_in_each_format(wire: Wire, message: object) -> None:
    assert has_model_reasoning(fields(wire, **{ITEMS[wire]: [message]}), wire)
