"""Test that the largest overhead is found by the tokens that it adds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.core.counting.estimate import Estimator
from gateway.core.counting.largest_part import RequestPart, largest_overhead
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import read_request

LONG = "word " * 300
SMALL = {"type": "function", "function": {"name": "small", "parameters": {}}}
HUGE = {"type": "function", "function": {"name": "huge", "description": LONG, "parameters": {}}}


def heaviest(estimator: Estimator, wire: Wire, body: Mapping[str, Any]) -> RequestPart | None:
    def count_tokens(fields: Mapping[str, Any]) -> int:
        return estimator.estimate(read_request(wire, fields, messages=())).tokens

    return largest_overhead(wire, {name: json.dumps(value).encode() for name, value in body.items()}, count_tokens)


@pytest.mark.parametrize(
    ("wire", "body", "param"),
    [
        ("messages", {"system": LONG, "messages": [LONG], "tools": [SMALL]}, "system"),
        ("responses", {"instructions": LONG, "input": LONG * 2}, "instructions"),
        ("chat", {"messages": [], "tools": [SMALL, HUGE]}, "tools[1]"),
        ("chat", {"messages": [], "tools": [HUGE]}, "tools"),
        ("chat", {"messages": [], "tools": [HUGE, HUGE, HUGE]}, "tools"),
        ("chat", {"messages": [], "functions": [HUGE["function"], SMALL["function"]]}, "functions[0]"),
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", "schema": {"title": LONG}}}}, "text"),
        ("chat", {"messages": [], "documents": [LONG]}, "documents"),
    ],
)
def test_largest_part_is_named_by_its_path(estimator: Estimator, wire: Wire, body: dict[str, Any], param: str) -> None:
    found = heaviest(estimator, wire, {"model": "m", **body})
    assert found is not None
    assert found.param == param
    assert found.tokens >= 200


def test_no_part_is_named_without_overhead(estimator: Estimator) -> None:
    assert heaviest(estimator, "chat", {"model": "m", "messages": [LONG], "temperature": 1}) is None
    assert heaviest(estimator, "chat", {}) is None
