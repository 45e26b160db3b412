"""What of a request is kept by its provider, or billed after its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.counting.measure import Wire
from gateway.dialects.elsewhere import is_in_background, kept_elsewhere
from gateway.dialects.fields import read_fields


def fields(**body: Any) -> Any:
    return read_fields(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"input": "hi"}, ()),
        ({"input": "hi", "previous_response_id": "resp_1"}, ("previous_response_id",)),
        ({"input": "hi", "previous_response_id": None, "conversation": None, "prompt": None}, ()),
        ({"conversation": {"id": "conv_1"}, "prompt": {"id": "p"}}, ("conversation", "prompt")),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, ("item_reference",)),
        ({"input": 'the type is "item_reference"'}, ()),
        ({"input": [{"role": "user", "content": 'say "item_reference"'}]}, ()),
    ],
)
def test_what_stands_for_content_that_a_provider_keeps_is_named(body: dict[str, Any], kept: tuple[str, ...]) -> None:
    assert kept_elsewhere(fields(**body), "responses") == kept


@pytest.mark.parametrize("wire", ["chat", "messages", "completions", None])
def test_other_formats_have_nothing_of_the_kind(wire: Wire | None) -> None:
    body = fields(prompt="a prompt", conversation="c", previous_response_id="r", background=True)
    assert kept_elsewhere(body, wire) == ()
    assert not is_in_background(body, wire)


@pytest.mark.parametrize(("value", "is_so"), [(True, True), (False, False), (None, False), ("yes", True), (1, True)])
def test_an_answer_is_made_in_the_background_where_a_server_may_take_it_so(value: object, is_so: bool) -> None:
    assert is_in_background(fields(input="hi", background=value), "responses") is is_so
    assert not is_in_background(fields(input="hi"), "responses")
