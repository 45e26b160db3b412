"""Events that are read at once say what each of them says alone: of the formats that name their events."""

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
ODD = st.sampled_from([None, 7, True, [" a", {"text": "b"}], {"text": "c"}, [], {}])
SAID = TEXTS | TEXTS | TEXTS | ODD
INDEX = st.sampled_from([0, 0, 0, 1, None, "0", 2.5, [0]])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def event(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Events of a type, with some of these fields."""
    return some(**fields).map(lambda said: {"type": kind, **said})


PART = some(text=SAID, partial_json=SAID, content=SAID, thinking=SAID, signature=SAID, type=TEXTS)
#: those with one text alone, as nearly all are
PLAIN = st.sampled_from(["text", "thinking", "partial_json"]).flatmap(
    lambda name: some(index=INDEX).map(lambda said: {**said, "type": "content_block_delta", "delta": {name: " word"}})
)
BLOCK = some(type=st.sampled_from(["text", "thinking", "tool_use"]), text=SAID, name=TEXTS, thinking=SAID, input=SAID)
USAGE = some(input_tokens=st.just(3), output_tokens=st.just(4), speed=st.just("fast"))
MESSAGES = st.one_of(
    PLAIN,
    PLAIN,
    event("content_block_delta", index=INDEX, delta=PART | ODD | TEXTS),
    event("content_block_start", index=INDEX, content_block=BLOCK | ODD),
    event("content_block_stop", index=INDEX),
    event("message_start", message=some(model=TEXTS, usage=USAGE) | ODD),
    event("message_delta", usage=USAGE | ODD, delta=some(stop_reason=TEXTS) | ODD),
    event("ping", delta=PART | ODD, error=ODD),
    st.just({"type": ["content_block_delta"], "delta": {"text": "of no type"}}),
)

DELTA = st.sampled_from([
    "response.output_text.delta", "response.refusal.delta", "response.reasoning_summary_text.delta",
    "response.function_call_arguments.delta", "response.audio.delta", "response.output_item.added", "response.new",
])  # fmt: skip
ITEM = some(id=st.just("i"), type=st.sampled_from(["message", "function_call", "reasoning"]), name=TEXTS, content=ODD)
SPOKEN = DELTA.flatmap(
    lambda kind: event(
        kind,
        delta=SAID,
        output_index=INDEX,
        content_index=INDEX,
        summary_index=INDEX,
        item_id=st.sampled_from(["i", "j", 5, None]),
        sequence_number=st.sampled_from([0, 1, 5, 2**70, None, "3"]),
        item=ITEM | ODD,
        obfuscation=TEXTS,
    )
)
RESPONSE = some(id=TEXTS, model=TEXTS, status=st.sampled_from(["in_progress", "queued"]), usage=USAGE | ODD)
RESPONSES = st.one_of(
    SPOKEN,
    SPOKEN,
    st.integers(0, 9).map(lambda number: {
        "type": "response.output_text.delta", "item_id": "i", "output_index": 0, "content_index": 0,
        "delta": " word", "sequence_number": number,
    }),
    event("response.output_item.added", item=ITEM, output_index=INDEX),
    event("response.output_item.done", item=ITEM | ODD, output_index=INDEX),
    event("response.created", response=RESPONSE | ODD, error=ODD),
    st.just({"type": ["response.output_text.delta"], "delta": "of no type"}),
)  # fmt: skip
#: what is no JSON, or no event
BROKEN = st.sampled_from([b"{", b"7", b"[]", b'"type"', b"\xff", b'{"type":"\x00"}', b"{} {}"])


def written(events: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[list[bytes]]:
    """The data of some events, mostly of those."""
    data = events.map(lambda value: json.dumps(value, ensure_ascii=False).encode())
    return st.lists(st.one_of(*[data] * 9, BROKEN), max_size=14) | st.lists(data, max_size=14)


def said(reader: EventReader) -> object:
    return reader.answer(), reader.next_number(), reader.cut_short()


def assert_the_same_at_once(make: Callable[[], EventReader], events: Sequence[bytes], cut: int) -> None:
    apart, together = make(), make()
    for data in events:
        apart.read(data)
    for part in (events[:cut], events[cut:]):
        together.read_all(part)
    assert said(together) == said(apart)


@given(written(MESSAGES), st.integers(0, 14))
def test_events_of_messages(events: list[bytes], cut: int) -> None:
    assert_the_same_at_once(lambda: MessagesReader("m"), events, cut)


@given(written(RESPONSES), st.integers(0, 14))
def test_events_of_responses(events: list[bytes], cut: int) -> None:
    assert_the_same_at_once(lambda: ResponsesReader("m", lambda: 3), events, cut)


class Counting(MessagesReader):
    """Counts the events that are read alone."""

    alone = 0

    def read(self, data: bytes) -> Any:
        self.alone += 1
        return super().read(data)


class CountingResponses(ResponsesReader):
    """The same."""

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
def test_of_a_stream_as_it_comes_few_events_are_read_alone(
    reader: Counting | CountingResponses, events: list[dict[str, object]]
) -> None:
    meter = StreamMeter(reader)
    for one in events:
        assert meter.feed(named_event(one))
    assert meter.answer().output_estimate > 0
    assert reader.alone == 2
