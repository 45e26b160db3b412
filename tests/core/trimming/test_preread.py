from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.conversation.message import Hashed
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.dedupe import is_comparable
from gateway.core.trimming.overlap import parts_of
from gateway.core.trimming.policy import TrimPolicy
from gateway.core.trimming.preread import MOST_BYTES, MOST_MESSAGES, START, messages_to_read, read_ahead
from gateway.core.trimming.reader import Reader, RenderOrder, counter_of
from gateway.core.trimming.trim_conversation import trim_conversation


class Counting:
    """A token counter that records how often it was called."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, text: str) -> int:
        self.asked += 1
        return len(text) // 4


def messages(turns: int, size: int = 12) -> list[bytes]:
    found: list[dict[str, Any]] = [{"role": "user", "content": "Find the parcel of order 4711."}]
    for number in range(turns):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "find", "arguments": f'{{"n": {number}}}'}}
        found.append({"role": "assistant", "content": f"I look at depot {number * 31}.", "tool_calls": [call]})
        lines = "\n".join(f"Parcel {number}-{line} lies at depot {line * 7} in row {line}." for line in range(size))
        found.append({"role": "tool", "tool_call_id": f"c{number}", "content": lines})
    return [json.dumps(message).encode() for message in found]


def ahead(raws: Sequence[bytes], filled: float, reader: Reader) -> int:
    some = messages_to_read(len(raws), filled)
    return read_ahead(Hashed(raws[some.start : some.stop]), reader)


@pytest.mark.parametrize("filled", [0.0, 0.3, START])
def test_nothing_is_read_far_below_the_budget(filled: float) -> None:
    count = Counting()
    assert ahead(messages(20), filled, Reader(counter_of(count))) == 0
    assert count.asked == 0


@pytest.mark.parametrize("filled", [0.51, 0.6, 0.9, 1.0, 1.2])
def test_a_turn_reads_a_few_messages_at_most(filled: float) -> None:
    assert 0 < ahead(messages(20), filled, Reader(counter_of(len))) <= MOST_MESSAGES


def test_a_turn_reads_so_many_bytes_at_most() -> None:
    raws = messages(4, size=MOST_BYTES // 100)
    read = ahead(raws, 1.0, Reader(counter_of(len)))
    assert 0 < read < MOST_MESSAGES
    assert sum(map(len, raws[-read:])) <= MOST_BYTES


def test_shared_parts_of_results_are_read_too() -> None:
    raws, reader = messages(3, size=80), Reader(counter_of(len))
    ahead(raws, 1.0, reader)
    conversation = Conversation.of(raws, reader)
    for item, raw in zip(conversation.items, raws, strict=True):
        if is_comparable(item):
            assert parts_of(item, raw, reader, Deadline(_no_more)) == parts_of(
                item, raw, Reader(counter_of(len)), Deadline()
            )
    assert sum(map(is_comparable, conversation.items)) == 3


def _no_more() -> bool:
    raise AssertionError("it was not read")


def test_reading_stops_at_the_deadline() -> None:
    raws = messages(8, size=80)
    count, patient = Counting(), Counting()
    read_ahead(Hashed(raws), Reader(counter_of(count)), lambda: True)
    read_ahead(Hashed(raws), Reader(counter_of(patient)))
    assert count.asked < patient.asked


def test_a_trim_after_reading_ahead_reads_nothing_and_is_the_same() -> None:
    raws, policy = messages(40), TrimPolicy(recall="said")
    count, cold = Counting(), Counting()
    warm = Reader(counter_of(count))
    budget = sum(warm.token_counts(Conversation.of(raws, warm)))
    for turns in range(1, 40):
        original = Conversation.of(messages(turns), warm)
        ahead(original.messages, sum(warm.token_counts(original)) / budget, warm)
    before = count.asked
    fitted = trim_conversation(Conversation.of(raws, warm), budget - 1, warm, policy=policy)
    other = Reader(counter_of(cold))
    assert fitted.messages == trim_conversation(Conversation.of(raws, other), budget - 1, other, policy=policy).messages
    assert fitted.changed
    assert count.asked - before < cold.asked / 3


def test_everything_is_read_one_turn_before_the_budget_is_full() -> None:
    warm, original = Reader(counter_of(len)), messages(0)
    for turns in range(1, 40):
        original = messages(turns, size=80)
        ahead(original, turns / 40, warm)
    conversation = Conversation.of(original, warm)
    warm.read_blocks(conversation.keys, conversation.messages, Deadline(_no_more))


def test_messages_without_blocks_are_rendered_ahead() -> None:
    raws, reader = messages(2), Reader(counter_of(len))
    ahead(raws, 1.0, reader)
    conversation = Conversation.of(raws, reader)
    [result] = reader.render([RenderOrder(conversation.items[-1], raws[-1], ())], Deadline())
    assert reader.outlines([result.key], [b"never looked at"])[0].result_of == "c1"


def test_old_cache_marks_are_not_sent_later() -> None:
    raws = messages(12)
    marked = [json.dumps({**json.loads(raw), "cache_control": {"type": "ephemeral"}}).encode() for raw in raws]
    warm, cold = Reader(counter_of(len)), Reader(counter_of(len))
    for turns in range(1, 12):
        ahead(marked[: 2 * turns + 1], 1.0, warm)
    budget = sum(cold.token_counts(Conversation.of(raws, cold))) // 2
    fitted = trim_conversation(Conversation.of(raws, warm), budget, warm)
    assert fitted.messages == trim_conversation(Conversation.of(raws, cold), budget, cold).messages
    assert b"cache_control" not in b"".join(fitted.messages)
