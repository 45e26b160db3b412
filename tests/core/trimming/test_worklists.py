from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.conversation.units import Conversation
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.reader import Reader, counter_of
from gateway.core.trimming.trim_conversation import trim_conversation
from gateway.core.trimming.worklists import find_open_values

LISTED = ["K7QXZ2", "VAAOXJ", "4WQ150", "M05KNL", "1N99U6"]


def call(number: int, name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"id": f"c{number}", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def session(listed: str, *visited: str) -> list[dict[str, Any]]:
    messages = [
        {"role": "user", "content": "Cancel my reservations, I am mia_li_3668."},
        call(0, "get_user", user_id="mia_li_3668"),
        result(0, listed),
    ]
    for number, one in enumerate(visited, 1):
        flights = [{"flight": f"HAT{number}{place:02}", "price": 100 + place} for place in range(40)]
        messages += [call(number, "get_reservation", reservation_id=one), result(number, json.dumps(flights))]
    return messages


def open_values(messages: list[dict[str, Any]]) -> set[str]:
    reader = Reader(counter_of(len))
    draft = Draft.untouched(Conversation.of_messages(messages, reader), reader)
    return set().union(*find_open_values(draft, len(messages)).values())


def test_the_rest_of_a_list_is_open_until_a_call_has_it() -> None:
    listed = f"reservations: {', '.join(LISTED)}"
    assert open_values(session(listed)) == set()
    assert open_values(session(listed, "K7QXZ2")) == {one.lower() for one in LISTED[1:]}
    assert open_values(session(listed, *LISTED)) == set()


def test_values_that_the_user_named_are_open_too() -> None:
    messages = session("", "K7QXZ2")
    messages[0]["content"] = f"Cancel {' and '.join(LISTED)}."
    assert open_values(messages) == {one.lower() for one in LISTED[1:]}


@pytest.mark.parametrize(
    ("listed", "visited"),
    [
        ("days: 2024-05-01, 2024-05-02, 2024-05-03", "2024-05-01"),
        ("prices: 120, 130, 140", "120"),
        ("reservations: K7QXZ2, city: New York, mail: mia@example.com", "K7QXZ2"),
        (f"all: {' '.join(f'AB{number}' for number in range(100, 140))}", "AB100"),
    ],
)
def test_dates_amounts_other_values_and_long_tables_are_not_open(listed: str, visited: str) -> None:
    assert open_values(session(listed, visited)) == set()


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_a_trim_keeps_the_list_that_the_agent_works_through(share: float) -> None:
    profile = {
        "address": {"street": "12 Elm", "zip": "10012"},
        "cards": {f"credit_card_{number}": {"brand": "visa", "last": str(number)} for number in range(4421, 4427)},
        "reservations": LISTED,
        "passengers": [{"first": name, "dob": "1990-04-05"} for name in ("Mia", "Noah", "Emma")],
    }
    messages = session(json.dumps(profile), *LISTED[:3])
    reader = Reader(counter_of(lambda text: len(text) // 4))
    conversation = Conversation.of_messages(messages, reader)
    limit = max(int(share * sum(reader.token_counts(conversation))), 700)
    sent = b" ".join(trim_conversation(conversation, limit, reader, policy=TrimPolicy(recall="said")).messages)
    assert all(one.encode() in sent for one in LISTED[3:])
