"""Compaction: requests for it are recognized, the gateway's own result is written, and its items are expanded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import CompactedResponse, Response

from gateway.core.errors import InvalidRequest
from gateway.core.http.sse import data_of_events
from gateway.dialects.base import Call
from gateway.dialects.compaction import (
    MadeCompaction,
    asks_for_compaction,
    compacted_response,
    compaction_in,
    expand,
    handle_of,
    handles_in,
    is_unsupported,
    items_to_compact,
    streamed_response,
    whole_response,
)
from gateway.dialects.openai_responses import OpenAIResponses

TRIGGER = {"type": "compaction_trigger"}
FOREIGN = {"id": "cmp_1", "type": "compaction", "encrypted_content": "gAAAAABn"}
USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 11,
}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def call(items: Any) -> Call:
    return OpenAIResponses().read(json.dumps({"model": "m", "input": items, "tools": []}).encode())


def item(handle: str) -> dict[str, Any]:
    return {"id": "cmp_2", "type": "compaction", "encrypted_content": handle}


def opened(items: list[Any], compacted: list[Any]) -> Any:
    handle = handle_of("", "x")
    result = expand(call([item(handle) if one is None else one for one in items]), {handle: json.dumps(compacted)})
    assert json.loads(result.body)["input"] == json.loads(bytes(result.fields["input"]))
    return json.loads(result.body)["input"]


@pytest.mark.parametrize(
    ("items", "asks"),
    [
        ([user("hi"), TRIGGER], True),
        ([user("hi"), {**TRIGGER, "metadata": {"a": 1}}], True),
        ([TRIGGER, user("hi")], False),
        ([user('{"type":"compaction_trigger"}')], False),
        ([user("hi"), {"type": "message", "role": "user", "content": "compaction_trigger"}], False),
        ("compaction_trigger", False),
        ([], False),
        (None, False),
    ],
)
def test_only_a_trigger_as_last_item_asks_for_compaction(items: Any, asks: bool) -> None:
    assert asks_for_compaction(call(items)) is asks


@pytest.mark.parametrize("body", [b'{"model": "m"}', b'{"input": 5}', b'{"input": []}', b'{"input": null}'])
def test_a_request_without_items_is_not_compacted(body: bytes) -> None:
    request = OpenAIResponses().read(body)
    assert not asks_for_compaction(request)
    with pytest.raises(InvalidRequest, match="no items to compact"):
        items_to_compact(request)


def test_input_that_is_too_large_is_not_compacted() -> None:
    with pytest.raises(InvalidRequest, match="cannot be compacted"):
        items_to_compact(call([{} for _ in range(200_001)]))


def test_all_items_except_the_trigger_are_compacted() -> None:
    original = [user("hi"), FOREIGN, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    assert [json.loads(one) for one in items_to_compact(call([*original, TRIGGER]))] == original


def test_text_is_compacted_as_a_user_message() -> None:
    assert [json.loads(one) for one in items_to_compact(call("hi"))] == [
        {"type": "message", "role": "user", "content": "hi"}
    ]


def test_a_handle_depends_on_the_items_and_on_the_client_key() -> None:
    assert handle_of("a", "text") == handle_of("a", "text")
    assert len({handle_of("a", "text"), handle_of("b", "text"), handle_of("a", "other")}) == 3


def test_compaction_items_of_providers_have_no_handle() -> None:
    mine = handle_of("", "x")
    assert handles_in(call([FOREIGN, user('"gwc1_0"'), {"type": "message", "encrypted_content": mine}])) == ()
    assert handles_in(call([FOREIGN, item(mine), item("gwc1_changed")])) == (mine, "gwc1_changed")


def test_too_large_input_with_a_compaction_item_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not expanded"):
        handles_in(call([item(handle_of("", "x")), *[{} for _ in range(200_001)]]))


def test_compaction_item_is_replaced_by_the_compacted_items() -> None:
    assert opened([FOREIGN, None, user("go on")], [user("a"), user("b")]) == [
        FOREIGN, user("a"), user("b"), user("go on")
    ]  # fmt: skip


def test_messages_kept_before_the_item_are_sent_once() -> None:
    kept = [user("task"), {"role": "user", "content": "a"}, {"role": "developer", "content": "new rules"}]
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    compacted = [user("task"), answer, user("a")]
    result = opened([*kept, None, user("a")], compacted)
    # A message after the compaction stays, even if its text is the same.
    assert result == [kept[2], *compacted, user("a")]


def made(usage: Any = None) -> MadeCompaction:
    return MadeCompaction(handle_of("", "x"), "resp_1", "m", 5, usage)


def test_a_stream_has_one_compaction_item_and_its_end() -> None:
    events = [json.loads(data) for data in data_of_events(streamed_response(made()))]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [one["encrypted_content"] for one in done] == [made().handle]
    assert events[-1]["type"] == "response.completed"
    last = Response.model_validate(events[-1]["response"])
    assert last.output[0].type == "compaction"
    assert last.usage is not None
    assert last.usage.total_tokens == 0
    assert compaction_in(streamed_response(made())).items == 1


def test_a_whole_response_has_one_compaction_item() -> None:
    read = Response.model_validate_json(whole_response(made(USAGE)))
    assert [one.type for one in read.output] == ["compaction"]
    assert read.usage is not None
    assert read.usage.total_tokens == 11
    result = compaction_in(whole_response(made(USAGE)))
    assert (result.items, result.is_error, result.usage) == (1, False, USAGE)


def test_version_1_returns_the_output_that_replaces_the_conversation() -> None:
    read = CompactedResponse.model_validate_json(compacted_response(made()))
    assert [one.type for one in read.output] == ["compaction"]
    assert read.usage.total_tokens == 0
    assert compaction_in(compacted_response(made())).items == 1


def test_message_is_not_a_compaction() -> None:
    events = [
        {"type": "response.output_item.done", "item": {"type": "message", "content": []}},
        {"type": "response.completed", "response": {"output": [], "usage": USAGE}},
    ]
    result = compaction_in(b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events))
    assert (result.items, result.is_error, result.usage) == (0, False, USAGE)


@pytest.mark.parametrize("kind", ["error", "response.failed"])
def test_error_in_a_stream_differs_from_a_message(kind: str) -> None:
    assert compaction_in(b"data: %b\n\n" % json.dumps({"type": kind}).encode()).is_error


def test_unreadable_response_has_no_compaction() -> None:
    assert compaction_in(b"data: {\n\n").items == 0
    assert compaction_in(b"{").items == 0


@pytest.mark.parametrize(
    ("status", "body", "is_path", "unsupported"),
    [
        (404, b"not found", True, True),
        (405, b"", True, True),
        (404, b'{"error": {"code": "model_not_found"}}', True, False),
        (400, b"unknown type compaction_trigger", False, True),
        (422, b"compaction is not supported", True, True),
        (400, b"temperature is not supported", False, False),
        (404, b"no such model", False, False),
        (429, b"compaction", False, False),
        (500, b"compaction", True, False),
    ],
)
def test_refusal_of_compaction_differs_from_other_refusals(
    status: int, body: bytes, is_path: bool, unsupported: bool
) -> None:
    assert is_unsupported(status, body, is_path=is_path) is unsupported
