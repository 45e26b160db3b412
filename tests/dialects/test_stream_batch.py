"""Events that are decoded together give the same result as single events, in the formats with named events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.anthropic_messages import MessagesReader
from gateway.dialects.base import EventReader, StreamMeter, named_event
from gateway.dialects.openai_responses import ResponsesReader

TEXTS = st.sampled_from(["", " word", "中 \U0001f600", '"', "x" * 40])
#: types that no part of a delta has, so a batch with one of them is read event by event
ODD = st.sampled_from([7, True, [" a", {"text": "b"}], {"text": "c"}, [], {}])
#: `0 == 0.0 == False` in Python, but only the first is accepted as a number
INDEX = st.sampled_from([0, 0, 0, 0, 1, None])
ODD_INDEX = st.sampled_from([0.0, False, "0", 2.5, [0]])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def event(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Generate events of a type with some of these fields."""
    return some(**fields).map(lambda said: {"type": kind, **said})


SAID = TEXTS | st.none()
THOUGHT = {"type": "content_block_delta", "index": 0, "delta": {"thinking": "so it is"}}
SIGNED = st.integers(0, 60).map(
    lambda size: {"type": "content_block_delta", "index": 0, "delta": {"signature": "s" * size}}
)
PARTS = some(text=SAID, partial_json=SAID, content=SAID, thinking=SAID, signature=SAID, type=TEXTS)
BLOCK = some(
    type=st.sampled_from(["text", "thinking", "tool_use"]), text=SAID, name=TEXTS, thinking=SAID, signature=TEXTS
)
USAGE = some(input_tokens=st.just(3), output_tokens=st.just(4), speed=st.just("fast"))
MESSAGES = st.one_of(
    st.just(THOUGHT),
    SIGNED,
    event("content_block_delta", index=INDEX, delta=PARTS),
    event("content_block_delta", index=INDEX, delta=PARTS),
    event("content_block_start", index=INDEX, content_block=BLOCK),
    event("content_block_stop", index=INDEX),
    event("message_start", message=some(model=TEXTS, usage=USAGE)),
    event("message_delta", usage=USAGE, delta=some(stop_reason=TEXTS)),
    event("ping", delta=PARTS),
)
ODD_MESSAGES = st.one_of(
    event("content_block_delta", index=INDEX, delta=ODD | TEXTS),
    event("content_block_delta", delta=some(text=ODD, thinking=ODD, signature=ODD, content=ODD, partial_json=ODD)),
    event("content_block_start", index=ODD_INDEX, content_block=ODD),
    event("message_start", message=ODD),
    event("message_delta", usage=ODD, delta=ODD),
    event("ping", error=ODD),
    st.just({"type": ["content_block_delta"], "delta": {"text": "of no type"}}),
)

DELTAS = st.sampled_from([
    "response.output_text.delta", "response.refusal.delta", "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta", "response.audio.delta", "response.new.delta",
])  # fmt: skip


def spoken(index: st.SearchStrategy[Any], number: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return DELTAS.flatmap(
        lambda kind: event(
            kind,
            delta=TEXTS,
            output_index=index,
            content_index=index,
            summary_index=index,
            item_id=st.sampled_from(["i", "j", None]),
            sequence_number=number,
            obfuscation=TEXTS,
        )
    )


#: events mostly of one item, whose text is kept
SPOKEN = spoken(INDEX, st.sampled_from([0, 1, 5, 2**70, None]))
ITEM = some(id=st.just("i"), type=st.sampled_from(["message", "function_call", "reasoning"]), name=TEXTS)
RESPONSE = some(id=TEXTS, model=TEXTS, status=st.sampled_from(["in_progress", "queued"]), usage=USAGE)
RESPONSES = st.one_of(
    SPOKEN,
    SPOKEN,
    SPOKEN.map(lambda said: {**said, "delta": " word", "output_index": 0}),
    event("response.output_item.added", item=ITEM, output_index=INDEX),
    event("response.output_item.done", item=ITEM, output_index=INDEX),
    event("response.created", response=RESPONSE),
)
ODD_RESPONSES = st.one_of(
    spoken(ODD_INDEX, st.sampled_from([True, 1.0, "3"])),
    event("response.output_text.delta", delta=ODD, item_id=ODD),
    event("response.output_item.done", item=ODD, output_index=ODD_INDEX),
    event("response.created", response=ODD, error=ODD),
    st.just({"type": ["response.output_text.delta"], "delta": "of no type"}),
)
BEGUN = [
    json.dumps({"type": "response.output_item.added", "output_index": index, "item": item}).encode()
    for index, item in enumerate([{"type": "message", "id": "i"}, {"type": "function_call", "id": "j"}])
]
#: data that is not JSON, or not an event
BROKEN = st.sampled_from([
    b"{", b"7", b"[]", b'"type"', b"\xff", b'{"type":"\x00"}', b"{} {}", b"{},{}",
    b'{"type":"content_block_delta","delta":{"text":"\xff"}}', b'{"type":"response.output_text.delta","delta":"\xff"}',
])  # fmt: skip


def written(
    events: st.SearchStrategy[dict[str, Any]], odd: st.SearchStrategy[dict[str, Any]]
) -> st.SearchStrategy[list[bytes]]:
    """Generate data of events; half of the lists contain odd or broken events too."""
    data, others = (kind.map(lambda value: json.dumps(value, ensure_ascii=False).encode()) for kind in (events, odd))
    return st.lists(data, max_size=14) | st.lists(st.one_of(*[data] * 6, others, BROKEN), max_size=14)


def responses() -> EventReader:
    return ResponsesReader("m", lambda: 3)


def said(reader: EventReader) -> object:
    return reader.answer(), reader.next_number(), reader.cut_short()


def assert_the_same_at_once(make: Callable[[], EventReader], events: Sequence[bytes], cut: int) -> None:
    apart, together = make(), make()
    for data in events:
        apart.read(data)
    for part in (events[:cut], events[cut:]):
        together.read_all(part)
    assert said(together) == said(apart)


@given(written(MESSAGES, ODD_MESSAGES), st.integers(0, 14))
def test_batches_of_messages_events_equal_single_events(events: list[bytes], cut: int) -> None:
    assert_the_same_at_once(lambda: MessagesReader("m"), events, cut)


@given(written(RESPONSES, ODD_RESPONSES), st.integers(0, 16))
def test_batches_of_responses_events_equal_single_events(events: list[bytes], cut: int) -> None:
    assert_the_same_at_once(responses, [*BEGUN, *events], cut)


def spoken_at(text: str, **place: object) -> dict[str, object]:
    return {"type": "response.output_text.delta", "output_index": 0, "item_id": "i", "delta": text, **place}


@pytest.mark.parametrize(
    "second",
    [
        {"output_index": 0.0},
        {"output_index": False},
        {"output_index": 1},
        {"content_index": 0.0},
        {"content_index": 1},
        {"summary_index": 1},
        {"type": "response.refusal.delta"},
        {"type": "response.function_call_arguments.delta"},
        {"type": "response.audio.delta"},
        {"delta": b"\xff".decode("latin-1")},
    ],
    ids=str,
)
def test_delta_of_another_item_does_not_continue_the_previous_one(second: dict[str, object]) -> None:
    events = [spoken_at("one"), spoken_at("two", **second), spoken_at("three")]
    assert_the_same_at_once(responses, [*BEGUN, *(json.dumps(one).encode() for one in events)], 0)
    broken = [json.dumps(one, ensure_ascii=False).encode("latin-1") for one in events]
    assert_the_same_at_once(responses, [*BEGUN, *broken], 0)


@pytest.mark.parametrize("second", ["i", "j"])
def test_items_without_an_index_are_distinguished_by_id(second: str) -> None:
    events = [spoken_at("one", output_index=None), spoken_at("two", output_index=None, item_id=second)]
    done = {"type": "response.output_item.done", "item": {"type": "message", "id": "j", "arguments": "x" * 400}}
    assert_the_same_at_once(responses, [json.dumps(one).encode() for one in (*events, done)], 0)


@pytest.mark.parametrize("kept", [{"content_index": 0}, {"content_index": 70}, {"content_index": None}])
def test_texts_that_fit_are_kept_next_to_larger_ones(kept: dict[str, object]) -> None:
    said = {"type": "response.output_text.delta", "output_index": 0, "item_id": "i", "delta": "x" * 60_000}
    parts = [{**said, "content_index": number, "delta": "y"} for number in range(64)]
    more = [{**said, **kept, "delta": "z" * 30_000}] * 4
    events = [json.dumps(one).encode() for one in (*parts, *[{**said, "content_index": 1}] * 16, *more)]
    assert_the_same_at_once(responses, [*BEGUN, *events], 0)


def test_data_that_is_valid_json_only_when_joined_never_raises() -> None:
    made = b'{"type":"content_block_delta","delta":{"text":"a"}}'
    for reader in (MessagesReader("m"), responses()):
        reader.read_all([b"{},{}", b"{}"])
        reader.read_all([made + b"," + made, b'{"type":"x"', b'"y":1}'])
        reader.read_all([b'{"type":"x"', b'"y":1}'])
        assert reader.answer().output_estimate <= 1


class Counting(MessagesReader):
    """Counts the events that are read one by one."""

    alone = 0

    def read(self, data: bytes) -> Any:
        self.alone += 1
        return super().read(data)


class CountingResponses(ResponsesReader):
    """Counts the events that are read one by one."""

    alone = 0

    def read(self, data: bytes) -> Any:
        self.alone += 1
        return super().read(data)


THINKS: list[dict[str, object]] = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    *({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "so"}},) * 9,
    {"type": "content_block_stop", "index": 0},
    *({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "yes"}},) * 9,
    *({"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{"}},) * 9,
]
SAYS: list[dict[str, object]] = [
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": "i"}},
    *({"type": "response.output_text.delta", "output_index": 0, "item_id": "i", "delta": "yes"},) * 9,
    {"type": "response.output_item.added", "output_index": 1, "item": {"type": "function_call", "id": "j"}},
    *({"type": "response.function_call_arguments.delta", "output_index": 1, "item_id": "j", "delta": "{"},) * 9,
]


@pytest.mark.parametrize(
    ("reader", "events"),
    [(Counting("m"), THINKS), (CountingResponses("m", lambda: 3), SAYS)],
    ids=["messages", "responses"],
)
def test_few_events_of_a_stream_are_read_one_by_one(
    reader: Counting | CountingResponses, events: list[dict[str, object]]
) -> None:
    meter = StreamMeter(reader)
    for one in events:
        assert meter.feed(named_event(one))
    assert meter.response().output_estimate > 0
    assert reader.alone == 2
