from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.core.conversation.message import encode
from gateway.core.conversation.units import Conversation
from gateway.core.trimming.deadline import Deadline
from gateway.core.trimming.draft import Draft
from gateway.core.trimming.reader import (
    FRAME,
    GAP_MARK,
    Framing,
    KnownBlocks,
    Reader,
    RenderedMessage,
    RenderOrder,
    RenderTarget,
    counter_of,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def weight(message: Any) -> int:
    return counter_of(len)([encode(message)])[0]


def test_the_simple_counter_counts_all_fields() -> None:
    assert weight({"role": "user", "content": "hi"}) == len("user\nhi") + FRAME
    assert weight({"role": "tool", "tool_call_id": "c1", "content": "x"}) == len("tool\nx\nc1") + FRAME
    expected = len('assistant\n\nc1 look {"a": 1}') + FRAME
    assert weight({"role": "assistant", "content": None, "tool_calls": [CALL]}) == expected
    parts = [{"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {"url": "u" * 99}}]
    assert weight({"role": "user", "content": parts}) > 99
    assert weight({"role": "user", "content": "", "reasoning_content": "r" * 50}) > 50
    assert weight({"role": "user", "content": 12}) == len("user\n12") + FRAME
    assert weight({"role": "user", "content": "", "tool_calls": ["x" * 50, {"id": "y" * 50}]}) > 100
    assert weight({"role": "user", "content": "", "tool_calls": "x"}) == len("user\n") + FRAME
    assert counter_of(len)([b"\xff no JSON", b"[1]"]) == [9 + FRAME, 3 + FRAME]


class Counted:
    """Count tokens by length, and record the counted messages."""

    def __init__(self) -> None:
        self.counted_tokens: list[bytes] = []
        self.batches = 0

    def __call__(self, messages: Sequence[bytes]) -> list[int]:
        self.counted_tokens += messages
        self.batches += 1
        return [len(raw) for raw in messages]


def texts(*contents: str) -> list[bytes]:
    return [encode({"role": "user", "content": content}) for content in contents]


def known(reader: Reader, raw: bytes) -> KnownBlocks:
    return reader.read_blocks(Conversation.of([raw]).keys, [raw], Deadline())[0]


def rendered(reader: Reader, raw: bytes, what: RenderTarget) -> RenderedMessage:
    return reader.render([RenderOrder(Conversation.of([raw]).items[0], raw, what)], Deadline())[0]


LINES = "one line that is long enough to be a block\n" * 3


def test_a_message_is_counted_and_split_once_for_all_conversations() -> None:
    counted = Counted()
    reader = Reader(counted)
    [raw] = texts(LINES)
    for _ in range(3):
        assert reader.token_counts(Conversation.of([raw])) == [len(raw)]
        assert known(reader, raw) is known(reader, raw)
        assert rendered(reader, raw, (0,)) is rendered(reader, raw, (0,))
    assert len(counted.counted_tokens) == 2


def test_new_messages_are_counted_in_one_batch() -> None:
    counted = Counted()
    reader = Reader(counted)
    reader.token_counts(Conversation.of(texts("a", "b")))
    assert reader.token_counts(Conversation.of(texts("a", "b", "c", "dd"))) == [
        len(raw) for raw in texts("a", "b", "c", "dd")
    ]
    assert (counted.batches, counted.counted_tokens) == (2, texts("a", "b", "c", "dd"))


def test_a_longer_conversation_counts_only_its_new_messages() -> None:
    counted = Counted()
    reader = Reader(counted)
    other = reader.with_counter(lambda messages: [7] * len(messages), "other")
    raws = texts(*"abcdefgh")
    for end in (5, 6, 8, 7, 8):
        conversation = Conversation.of(raws[:end], reader)
        assert reader.token_counts(conversation) == [len(raw) for raw in raws[:end]]
        assert other.token_counts(conversation) == [7] * end
        assert conversation.outline == Conversation.of(raws[:end]).outline
    assert counted.counted_tokens == raws
    reader.token_counts(Conversation.of(raws))[0] = 99  # the caller owns the returned list
    assert reader.token_counts(Conversation.of(raws))[0] == len(raws[0])


def test_readers_with_a_shared_cache_count_separately_and_read_once() -> None:
    reader = Reader(Counted())
    other = reader.with_counter(lambda messages: [7] * len(messages), "other")
    [raw] = texts(LINES)
    conversation = Conversation.of([raw], reader)
    assert (reader.token_counts(conversation), other.token_counts(conversation)) == ([len(raw)], [7])
    assert known(reader, raw).sliced is known(other, raw).sliced
    assert rendered(other, raw, (0,)).tokens == 7
    assert reader.size_bytes == other.size_bytes > 0


def test_a_shortened_message_has_its_present_cache_mark() -> None:
    reader = Reader(counter_of(len))

    def cut(**mark: Any) -> bytes:
        raw = encode({"role": "user", "content": [{"type": "text", "text": "word " * 100, **mark}]})
        return rendered(reader, raw, (0,)).raw or b""

    assert b"cache_control" in cut(cache_control={"type": "ephemeral"})
    assert b"cache_control" not in cut()
    assert b"cache_control" in cut(cache_control={"type": "ephemeral"})


MARK = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("bare", "marked"),
    [
        (
            {"role": "user", "content": LINES},
            b'{"cache_control":{"a":1},"cache_control":{"a":2},"role":"user","content":%b}' % encode(LINES),
        ),
        (
            {"role": "assistant", "content": LINES, "tool_calls": [CALL]},
            encode({"role": "assistant", "content": LINES, "tool_calls": [CALL | MARK]}),
        ),
        (
            {"role": "assistant", "content": LINES, "thinking_blocks": {}},
            encode({"role": "assistant", "content": LINES, "thinking_blocks": MARK}),
        ),
        (
            {"role": "assistant", "content": LINES, "tool_calls": {}},
            encode({"role": "assistant", "content": LINES, "tool_calls": MARK}),
        ),
    ],
)
def test_known_blocks_do_not_depend_on_cache_marks(bare: dict[str, Any], marked: bytes) -> None:
    for first, second in ((marked, encode(bare)), (encode(bare), marked)):
        reader, stranger = Reader(counter_of(len)), Reader(counter_of(len))
        one, other = Conversation.of([first], reader), Conversation.of([second], stranger)
        assert one.keys == other.keys
        known(reader, first)
        assert Conversation.of([second], reader).outlines == other.outlines
        assert known(reader, second) == known(stranger, second)
        assert rendered(reader, second, (0,)) == rendered(Reader(counter_of(len)), second, (0,))


def test_a_message_is_emptied_without_being_split() -> None:
    reader = Reader(counter_of(len))
    [raw] = texts("word " * 100)
    assert rendered(reader, raw, ()).raw == encode({"role": "user", "content": "[...]"})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]
    raw = encode({"role": "user", "content": parts})
    assert rendered(reader, raw, ()).raw == encode(
        {"role": "user", "content": [{**parts[0], "text": "[...]"}, parts[1]]}
    )
    nothing = encode({"role": "assistant", "content": None})
    assert rendered(reader, nothing, ()).raw == nothing


def test_a_sealed_message_is_replaced_only_by_a_gap_mark() -> None:
    raw = encode({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}], "name": "a"})
    assert (
        rendered(Reader(counter_of(len)), raw, ()).raw == GAP_MARK == encode({"role": "assistant", "content": "[...]"})
    )


def test_the_cache_is_bounded_in_bytes() -> None:
    for limit in (0, 20_000, 200_000):
        reader = Reader(Counted(), limit_bytes=limit)
        for number in range(100):
            [raw] = texts(f"message number{number} of many\n" * 20)
            conversation = Conversation.of([raw], reader)
            assert (conversation.items[0].role, reader.token_counts(conversation)) == ("user", [len(raw)])
            assert known(reader, raw).terms
            assert rendered(reader, raw, (0,)).tokens < len(raw)
            assert reader.cached("numbers", number, lambda number=number: [number], lambda _: 1_500) == [number]  # type: ignore[misc]
            assert reader.size_bytes <= limit
        assert (reader.size_bytes > limit // 2) == (limit > 0)


def test_a_sealed_message_has_terms_but_no_blocks() -> None:
    parts = [{"type": "text", "text": "Boston"}, {"type": "image_url", "image_url": {}}]
    found = known(Reader(counter_of(len)), encode({"role": "user", "content": parts}))
    assert found.all_terms.keys() == {"boston"}
    assert found.terms == ()


def test_threads_may_share_a_reader_that_has_a_lock() -> None:
    reader = Reader(Counted(), limit_bytes=100_000, lock=threading.Lock())
    wrong: list[bytes] = []

    def work() -> None:
        for number in range(300):
            [raw] = texts(f"number {number % 37} of many\n" * 9)
            if reader.token_counts(Conversation.of([raw])) != [len(raw)] or not known(reader, raw).terms:
                wrong.append(raw)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.size_bytes <= 100_000


def test_the_size_of_an_outline_includes_its_calls() -> None:
    def outlined(calls: int) -> int:
        reader = Reader(counter_of(len), limit_bytes=10**9)
        asked = [
            {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(calls)
        ]
        raw = json.dumps({"role": "assistant", "content": None, "tool_calls": asked}).encode()
        conversation = Conversation.of([raw] * 4, reader)
        reader.outline(conversation.keys, conversation.messages)
        sketch_bytes = 400 * calls
        return reader.size_bytes - sketch_bytes

    # the outline of one message, and the four of the conversation
    assert outlined(1000) - outlined(1) >= 4 * 999 * 400


def test_a_growing_fact_is_extended_from_the_cached_one() -> None:
    reader, told = Reader(counter_of(len)), list[int | None]()

    def renew(known: int | None) -> int:
        told.append(known)
        return 1 if known is None else min(3, known + 1)

    assert [reader.extend_cached("count", "key", renew, lambda _: 8) for _ in range(4)] == [1, 2, 3, 3]
    assert told == [None, 1, 2, 3]
    assert reader.extend_cached("count", "other", renew, lambda _: 8) == 1


def test_framing_is_in_every_count_and_counts_nothing_again() -> None:
    count_tokens = Counted()
    plain = Reader(count_tokens)
    call = encode({"role": "assistant", "content": LINES, "tool_calls": [CALL, {**CALL, "id": "c2"}]})
    raws = [*texts(LINES), call, encode({"role": "tool", "tool_call_id": "c1", "content": "found"})]
    conversation = Conversation.of(raws, plain)
    bare, cut = plain.token_counts(conversation), rendered(plain, call, (0,))
    asked = len(count_tokens.counted_tokens)
    for framing, added in ((Framing(call=30), [0, 60, 0]), (Framing(message=5), [5, 5, 5])):
        framed = plain.with_counter(count_tokens, "", framing)
        assert framed.token_counts(conversation) == [sum(pair) for pair in zip(bare, added, strict=True)]
        cut_too = Draft.untouched(conversation, framed).with_decisions({1: (0,)})
        assert cut_too.rendered(1) == cut
        assert cut_too.tokens_of(1) == cut.tokens + added[1]
        assert cut_too.token_counts() == [bare[0] + added[0], cut.tokens + added[1], bare[2] + added[2]]
        assert Draft.untouched(conversation, framed).tokens_if(1, (0,)) == cut.tokens + added[1]
    assert len(count_tokens.counted_tokens) == asked


def test_negative_framing_leaves_at_least_one_token() -> None:
    raws = [*texts("x"), encode({"role": "assistant", "content": LINES, "tool_calls": [CALL]})]
    framed = Reader(Counted()).with_counter(Counted(), "", Framing(message=-10_000))
    assert framed.token_counts(Conversation.of(raws, framed)) == [1, 1]
    assert Draft.untouched(Conversation.of(raws, framed), framed).tokens_if(1, ()) == 1
