"""Parameters of tools, read from their definitions in the form of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.trimming.parameters import NO_PARAMETERS, labelled, parameters_of, spelled
from tests.support.timing import in_time

SCHEMA = {
    "type": "object",
    "properties": {
        "payment_id": {"type": "string", "description": "As in the profile, such as 'gift_card_7815'."},
        "flights": {
            "type": "array",
            "items": {"type": "object", "properties": {"flightNumber": {"examples": ["HAT001"]}, "day": {}}},
        },
    },
}
CHAT = [{"type": "function", "function": {"name": "book_7", "description": "On 2024-05-01.", "parameters": SCHEMA}}]
MESSAGES = [{"name": "book_7", "description": "On 2024-05-01.", "input_schema": SCHEMA}]
RESPONSES = [{"type": "function", "name": "book_7", "description": "On 2024-05-01.", "parameters": SCHEMA}]


@pytest.mark.parametrize("tools", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_names_come_from_properties_and_shapes_from_examples(tools: Any) -> None:
    found = parameters_of([json.dumps(tools).encode()])
    assert found.names == {"paymentid", "flights", "flightnumber", "day"}
    assert {"gift_card_0", "hat0"} <= found.shapes


def test_numbers_dates_and_times_have_no_specific_shape() -> None:
    found = parameters_of(
        [json.dumps([{"description": "At most 100 or 2000, as p1, at 12:30 on 2024-05-01"}]).encode()]
    )
    assert found.shapes == set()


@pytest.mark.parametrize(
    "raw", [b"", b"nope", b'"gift_card_1"', b"[1, null]", b"[" * 5000, b"\xff", b'{"properties": 1}']
)
def test_fields_without_definitions_have_no_parameters(raw: bytes) -> None:
    assert parameters_of([raw]).names == set()


def test_too_large_definitions_are_not_read() -> None:
    long = [{"description": "x" * 2**20, "properties": {"order_id": {}}}]
    assert parameters_of([json.dumps(long).encode()]) == NO_PARAMETERS


def test_names_are_compared_without_case_and_separators() -> None:
    assert spelled("userId") == spelled("user_id") == spelled("User-ID")


def test_labels_list_the_texts_with_a_value_of_each_name() -> None:
    texts = ["dob: 1990-04-05\n", "paid: {amount: 3, user_id: u_1, userId: u_2}\n", "The flight HAT001 at 10:00\n"]
    assert labelled(texts) == {"dob": [0], "paid": [1], "amount": [1], "userid": [1]}


def test_a_long_word_is_searched_once() -> None:
    with in_time():
        assert labelled(["ab12ef_-" * 250_000 + " dob: 1990"]) == {"dob": [0]}


def test_size_grows_with_names_and_shapes() -> None:
    assert parameters_of([json.dumps(CHAT).encode()]).size_bytes > NO_PARAMETERS.size_bytes
