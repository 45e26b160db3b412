from __future__ import annotations

import json

from gateway.dialects.error_text import messages_in, parse_json


def texts(body: object) -> list[str]:
    return [said.text for said in messages_in(json.dumps(body).encode()) if said.text]


def test_the_messages_of_an_error_are_read_wherever_hosts_put_them() -> None:
    assert texts({"error": {"message": "a", "code": 1}, "message": "b"}) == ["a", "b"]
    assert texts([{"Message": "a"}]) == ["a"]
    assert texts({"detail": "a"}) == ["a"]
    assert texts({"error": {"message": "p", "metadata": {"raw": json.dumps({"error": {"message": "a"}})}}}) == [
        "p",
        "a",
    ]
    assert [said.text for said in messages_in(b"\xef\xbb\xbf  plain words")] == ["plain words"]


def test_labels_are_separated_from_the_message() -> None:
    said = next(
        messages_in(b"litellm.BadRequestError: OpenAIException - Error code: 400 - {'error': {'message': 'too long'}}")
    )
    assert said.text.startswith("too long")
    assert "BadRequestError" in said.labels


def test_messages_have_their_fields_and_each_object_ends_with_an_empty_text() -> None:
    result = list(messages_in(json.dumps({"error": {"message": "a", "param": "p"}}).encode()))
    assert [(said.text, said.fields.get("param")) for said in result] == [("a", "p"), ("", "p"), ("", None)]


def test_only_whole_json_is_parsed() -> None:
    assert parse_json('{"a": 1}') == {"a": 1}
    assert parse_json('{"a": ') is None
    assert parse_json("1") is None
