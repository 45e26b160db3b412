"""Messages of the Responses API over a WebSocket: reading and writing."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest, PreviousNotFound, SocketExpired
from gateway.dialects.responses_frames import (
    CreateFrame,
    EarlierTurn,
    ResponseFrames,
    error_message,
    fault_message,
    read_create,
    request_of,
    warm_up_messages,
)


def create(**fields: Any) -> CreateFrame:
    result = read_create(json.dumps({"type": "response.create", "model": "m", **fields}))
    assert result is not None
    return result


def body(made: CreateFrame, turn: EarlierTurn | None = None) -> Any:
    return json.loads(request_of(made, turn))


def data(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, **fields}).encode()


def turn_after(made: CreateFrame, *events: bytes, before: EarlierTurn | None = None) -> EarlierTurn | None:
    frames = ResponseFrames(made, before)
    for event in events:
        frames.message(event, {})
    return frames.continuable_turn


def items(turn: EarlierTurn) -> Any:
    return json.loads(b"[%b]" % turn.items)


MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "ls", "arguments": "{}"}
ASKED = {"type": "message", "role": "user", "content": "Hello"}


def ended(response_id: str = "resp_1", **fields: Any) -> bytes:
    return data("response.completed", response={"id": response_id, "output": [MESSAGE], **fields})


def test_envelope_is_removed_and_all_other_bytes_kept() -> None:
    message = (
        '{"type":"response.create","stream_id":"a.b","background":false,"generate":true,"stream":false,'
        '"model":"m","temperature":1.10,"seed":12345678901234567890123,"input":"caf\\u00e9","new_field":{"b":1,"a":2}}'
    )
    made = read_create(message)
    assert made is not None
    assert (made.lane, made.generates) == ("a.b", True)
    assert request_of(made, None) == (
        b'{"model":"m","temperature":1.10,"seed":12345678901234567890123,"input":"caf\\u00e9",'
        b'"new_field":{"b":1,"a":2},"stream":true}'
    )


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("", "one JSON object"),
        ("hello", "one JSON object"),
        ("[]", "one JSON object"),
        (b"\xff", "one JSON object"),
        ('{"a":' * 5_000, "one JSON object"),
        ("{}", "has no type"),
        ('{"type":7}', "has no type"),
        ('{"type":"response.steer"}', '"response.steer"'),
        ('{"type":"response.create","stream_id":""}', "stream_id"),
        ('{"type":"response.create","stream_id":"a b"}', "stream_id"),
        ('{"type":"response.create","stream_id":7}', "stream_id"),
        ('{"type":"response.create","stream_id":"\\""}', "stream_id"),
        ('{"type":"response.create","background":true}', "background"),
    ],
)
def test_unsupported_message_is_refused_by_name(message: str | bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        read_create(message)


def test_notice_needs_no_response() -> None:
    assert read_create('{"type":"response.processed","response_id":"resp_1"}') is None


def test_null_is_not_a_lane_or_an_id() -> None:
    made = create(stream_id=None, previous_response_id=None, input=None)
    assert (made.lane, made.previous_response_id) == (None, None)


def test_remembered_items_replace_the_id() -> None:
    turn = turn_after(create(store=False, input="Hello"), ended())
    assert turn is not None
    assert turn.response_id == "resp_1"
    assert items(turn) == [ASKED, MESSAGE]
    again = create(store=False, previous_response_id="resp_1", input=[{"role": "user", "content": "And?"}])
    assert body(again, turn) == {
        "model": "m",
        "store": False,
        "input": [ASKED, MESSAGE, {"role": "user", "content": "And?"}],
        "stream": True,
    }
    further = turn_after(again, ended("resp_2"), before=turn)
    assert further is not None
    assert items(further) == [ASKED, MESSAGE, {"role": "user", "content": "And?"}, MESSAGE]


def test_empty_conversation_leaves_no_comma() -> None:
    empty = warm_up_messages(create(generate=False, input=[]), None, "resp_w", 0)[1]
    assert items(empty) == []
    again = create(previous_response_id="resp_w", input=[ASKED])
    assert body(again, empty)["input"] == [ASKED]
    for nothing in ({}, {"input": None}):
        again = create(previous_response_id="resp_w", **nothing)
        assert body(again, EarlierTurn("resp_w", b'{"a":1} , 2'))["input"] == [{"a": 1}, 2]


def test_remembered_items_take_their_sent_size() -> None:
    spelled = b"[" + b",".join([b"0"] * 200_000) + b"]"
    made = read_create(b'{"type":"response.create","generate":false,"input":' + spelled + b"}")
    assert made is not None
    tracemalloc.start()
    turn = warm_up_messages(made, None, "resp_w", 0)[1]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert turn.items == spelled[1:-1]
    assert most < 4 * len(spelled)


def test_stored_response_is_not_remembered() -> None:
    assert turn_after(create(input="Hello"), ended()) is None
    assert turn_after(create(store=True, input="Hello"), ended(store=True)) is None
    assert body(create(previous_response_id="resp_1", input="And?"))["previous_response_id"] == "resp_1"


def test_response_with_store_false_is_remembered() -> None:
    assert turn_after(create(input="Hello"), ended(store=False)) is not None


@pytest.mark.parametrize("response", [None, 7, {"id": None}, {"id": 7, "output": {}}])
def test_last_event_of_another_form_ends_the_response(response: object) -> None:
    frames = ResponseFrames(create(store=False, input="Hello"), None)
    assert frames.message(data("response.completed", response=response), {}) is not None
    assert (frames.has_ended, frames.continuable_turn) == (True, None)


def test_conversation_started_at_the_provider_is_not_remembered() -> None:
    assert turn_after(create(store=False, previous_response_id="elsewhere", input="And?"), ended()) is None
    assert turn_after(create(store=False, conversation="conv_1", input="And?"), ended()) is None
    assert turn_after(create(store=False, conversation=None, input="And?"), ended()) is not None


@pytest.mark.parametrize("kind", ["response.failed", "error"])
def test_failed_response_cannot_be_continued(kind: str) -> None:
    last = data(kind, response={"id": "resp_1", "output": [MESSAGE]}, error={"message": "no"})
    assert turn_after(create(store=False, input="Hello"), last) is None


def test_items_missing_in_the_last_event_are_collected() -> None:
    done = data("response.output_item.done", output_index=0, item=CALL)
    last = data("response.completed", response={"id": "resp_1", "output": []})
    turn = turn_after(create(store=False, input="Hello"), done, last)
    assert turn is not None
    assert items(turn) == [ASKED, CALL]


def test_reasoning_is_sent_back_only_with_encrypted_content() -> None:
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"}
    orphaned = {"type": "reasoning", "id": "rs_2", "summary": []}
    turn = turn_after(create(store=False, input="Hello"), ended(output=[sealed, CALL]))
    assert turn is not None
    assert items(turn) == [ASKED, sealed, CALL]
    turn = turn_after(create(store=False, input="Hello"), ended(output=[orphaned, CALL]))
    assert turn is not None
    assert items(turn) == [ASKED, {name: value for name, value in CALL.items() if name != "id"}]


def test_events_pass_unchanged_with_their_lane() -> None:
    event = b'{"type": "response.output_text.delta", "delta":"caf\\u00e9 1.10", "x": 1}'
    assert ResponseFrames(create(), None).message(event, {}) == event.decode()
    laned = ResponseFrames(create(stream_id="a"), None).message(event, {})
    assert laned == '{"stream_id":"a",' + event.decode()[1:]


def test_end_mark_is_not_a_message() -> None:
    assert ResponseFrames(create(), None).message(b"[DONE]", {}) is None


def test_text_that_mentions_the_end_is_not_the_end() -> None:
    frames = ResponseFrames(create(), None)
    event = data("response.output_text.delta", delta="response.completed")
    assert frames.message(event, {"x-a": "1"}) == event.decode()
    assert not frames.has_ended


def test_last_event_has_the_response_headers() -> None:
    frames = ResponseFrames(create(stream_id="a"), None)
    message = frames.message(ended(headers_of="x"), {"x-session-id": "s"})
    assert message is not None
    assert json.loads(message)["headers"] == {"x-session-id": "s"}
    assert json.loads(message)["stream_id"] == "a"
    assert frames.has_ended


def test_provider_headers_in_an_event_are_kept() -> None:
    last = data("response.completed", response={"id": "r"}, headers={"openai-model": "m"})
    message = ResponseFrames(create(), None).message(last, {"x-session-id": "s"})
    assert message is not None
    assert json.loads(message)["headers"] == {"x-session-id": "s", "openai-model": "m"}


def test_error_in_a_stream_has_the_websocket_form() -> None:
    flat = data("error", code="server_error", message="broke", param=None, sequence_number=3)
    message = ResponseFrames(create(), None).message(flat, {})
    assert message is not None
    assert json.loads(message)["error"] == {"code": "server_error", "message": "broke", "param": None}
    assert json.loads(message)["status"] == 500


def test_an_error_that_has_a_status_keeps_it() -> None:
    message = ResponseFrames(create(), None).message(data("error", status=429, error={"code": "server_error"}), {})
    assert message is not None
    assert json.loads(message)["status"] == 429


def test_nothing_follows_the_last_event() -> None:
    frames = ResponseFrames(create(), None)
    assert frames.message(data("error", error={"code": "insufficient_quota"}), {}) is not None
    assert frames.message(data("response.failed", response={"id": "resp_1"}), {}) is None


def test_whole_response_is_one_last_event() -> None:
    frames = ResponseFrames(create(store=False, input="Hello", stream_id="a"), None)
    response = {"id": "resp_1", "output": [MESSAGE], "temperature": 1.1}
    event = json.loads(frames.complete_message(json.dumps(response).encode(), {"x-a": "1"}))
    assert (event["type"], event["response"], event["stream_id"]) == ("response.completed", response, "a")
    assert frames.continuable_turn is not None


@pytest.mark.parametrize(
    ("status", "kind", "goes_on"),
    [
        ("completed", "response.completed", True),
        ("incomplete", "response.incomplete", True),
        ("failed", "response.failed", False),
        ("odd", "response.completed", True),
    ],
)
def test_whole_response_ends_with_its_status(status: str, kind: str, goes_on: bool) -> None:
    frames = ResponseFrames(create(store=False, input="Hello"), None)
    event = json.loads(
        frames.complete_message(json.dumps({"id": "resp_1", "status": status, "output": []}).encode(), {})
    )
    assert event["type"] == kind
    assert (frames.continuable_turn is not None) is goes_on


def test_invalid_response_is_an_error() -> None:
    event = json.loads(ResponseFrames(create(), None).complete_message(b"<html>", {}))
    assert (event["type"], event["status"], event["error"]["message"]) == ("error", 502, "<html>")


def test_warm_up_needs_no_model_and_can_be_continued() -> None:
    made = create(generate=False, input="Hello", instructions="Be brief.", stream_id="a", store=True)
    messages, turn = warm_up_messages(made, None, "resp_w", 7.9)
    events = [json.loads(message) for message in messages]
    assert [event["type"] for event in events] == ["response.created", "response.completed"]
    assert {event["stream_id"] for event in events} == {"a"}
    assert [event["sequence_number"] for event in events] == [0, 1]
    assert [event["response"]["status"] for event in events] == ["in_progress", "completed"]
    for event in events:
        assert (event["response"]["output"], event["response"]["store"]) == ([], False)
    last = events[1]["response"]
    assert (last["id"], last["model"], last["instructions"], last["created_at"]) == ("resp_w", "m", "Be brief.", 7)
    assert last["usage"]["total_tokens"] == 0
    again = create(previous_response_id="resp_w", input="And?")
    assert body(again, turn)["input"] == [ASKED, {"type": "message", "role": "user", "content": "And?"}]


def test_warm_up_after_an_unknown_response_is_refused() -> None:
    with pytest.raises(PreviousNotFound, match="does not remember the response"):
        warm_up_messages(create(generate=False, previous_response_id="resp_x"), None, "resp_w", 0)


def test_invalid_input_is_refused_when_it_must_be_joined() -> None:
    with pytest.raises(InvalidRequest, match="input is"):
        body(create(previous_response_id="resp_1", input=7), EarlierTurn("resp_1", b""))
    assert body(create(input=7))["input"] == 7


@pytest.mark.parametrize(
    ("status", "answer", "kind", "said"),
    [
        (404, b'{"error":{"type":"t","message":"no such model","code":"c"}}', "t", "no such model"),
        (400, b'{"error":"plain"}', "invalid_request_error", '{"error":"plain"}'),
        (502, b"", "api_error", "status 502"),
        (502, b" \n", "api_error", "status 502"),
        (500, b"\xff<html>", "api_error", "\ufffd<html>"),
    ],
)
def test_a_refusal_is_an_error_event(status: int, answer: bytes, kind: str, said: str) -> None:
    event = json.loads(error_message(status, answer, {"retry-after": "3"}, "a"))
    assert (event["type"], event["status"], event["stream_id"]) == ("error", status, "a")
    assert event["headers"] == {"retry-after": "3"}
    assert event["error"]["type"] == kind
    assert said in event["error"]["message"]


def test_gateway_refusal_has_the_openai_code() -> None:
    event = json.loads(fault_message(SocketExpired("too long"), {}, None))
    assert event["error"]["code"] == "websocket_connection_limit_reached"
    assert (event["status"], "stream_id" in event) == (400, False)
