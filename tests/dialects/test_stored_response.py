"""Requests about earlier responses: a response is read in the format of the request that created it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.dialects import endpoint
from gateway.dialects.base import ParsedResponse

RESPONSES, DEFERRED = "responses/resp_1", "chat/deferred-completion/f15c"


def streamed(path: str, *events: dict[str, Any]) -> ParsedResponse:
    dialect = endpoint("GET", path).dialect
    reader = dialect.reader(dialect.read(b""), drop_usage=True)
    for event in events:
        reader.read(json.dumps(event).encode())
    return reader.answer()


def delta(text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "output_index": 0, "delta": text}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"response.{kind}", "response": {"id": "resp_1", **fields}}


OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "on " * 300}]}]


@pytest.mark.parametrize(
    ("events", "least", "most"),
    [
        ([delta("on " * 300), event("completed", output=OUTPUT)], 200, 300),
        ([delta("on " * 30), event("completed", output=OUTPUT)], 200, 300),
        ([delta("on " * 300), event("completed", output=[])], 200, 300),
        ([delta("on " * 300), event("completed")], 200, 300),
        # A response that has not ended repeats its text in deltas too.
        ([event("in_progress", output=OUTPUT), delta("on " * 30)], 20, 30),
        ([delta("on " * 30), event("in_progress", output=OUTPUT)], 20, 30),
        ([delta("on " * 30), {"type": "response.completed", "response": None}], 20, 30),
    ],
)
def test_resumed_stream_is_counted_by_a_last_event_with_all_output(
    events: list[dict[str, Any]], least: int, most: int
) -> None:
    assert least < streamed(RESPONSES, *events).output_estimate < most


def test_stream_is_read_in_the_format_of_its_original_request() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    choice = {"index": 0, "delta": {"content": "three"}, "finish_reason": "stop"}
    chat = streamed(DEFERRED, {"id": "c1", "choices": [choice], "usage": usage})
    called = {"type": "function_call", "name": "look", "id": "f"}
    done = {"type": "response.output_item.done", "output_index": 0, "item": called}
    responses = streamed(RESPONSES, done, event("completed", output=[], usage={"input_tokens": 3, "output_tokens": 4}))
    assert (chat.finish_reason, chat.output_estimate > 0) == ("stop", True)
    assert (responses.finish_reason, responses.tools) == ("completed", ("look",))
    assert chat.usage is not None
    assert responses.usage is not None
    assert (chat.usage.input_tokens, responses.usage.output_tokens) == (3, 4)


def test_fetching_a_response_does_not_ask_for_a_new_one() -> None:
    with pytest.raises(InvalidRequest):
        endpoint("GET", RESPONSES).dialect.read(b'{"model":"m","input":"hi"}')
