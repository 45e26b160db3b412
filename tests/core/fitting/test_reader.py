from __future__ import annotations

from typing import Any

from gateway.core.conversation import Conversation, Message
from gateway.core.fitting.reader import FRAME, Reader, weigher

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def test_the_simple_weigher_counts_all_that_is_written() -> None:
    weigh = weigher(len)
    assert weigh({"role": "user", "content": "hi"}) == len("user\nhi") + FRAME
    assert weigh({"role": "tool", "tool_call_id": "c1", "content": "x"}) == len("tool\nx\nc1") + FRAME
    assert (
        weigh({"role": "assistant", "content": None, "tool_calls": [CALL]})
        == len('assistant\n\nc1 look {"a": 1}') + FRAME
    )
    parts = [{"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {"url": "u" * 99}}]
    assert weigh({"role": "user", "content": parts}) > 99
    assert weigh({"role": "user", "content": "", "reasoning_content": "r" * 50}) > 50
    assert weigh({"role": "user", "content": 12}) == len("user\n12") + FRAME


class Counted:
    def __init__(self) -> None:
        self.weighed: list[str] = []

    def __call__(self, message: Message) -> int:
        self.weighed.append(str(message["content"]))
        return len(str(message["content"]))


def test_a_message_is_weighed_and_cut_once_whoever_sends_it() -> None:
    counted = Counted()
    reader = Reader(counted)
    for _ in range(3):
        message = {"role": "user", "content": "one line that is long enough to be a block\n" * 3}
        item = Conversation.of([message]).items[0]
        reader.weight(item, message)
        assert reader.know(item, message) is reader.know(item, message)
        assert reader.cut(item, message, (0,))[1] == reader.cut(item, message, (0,))[1]
        assert reader.weigh_new(message) == len(message["content"])
    assert len(counted.weighed) == 2


def test_a_message_with_a_cache_mark_is_cut_with_the_mark_it_has_now() -> None:
    reader = Reader(weigher(len))

    def cut(**mark: Any) -> Message:
        message = {"role": "user", "content": [{"type": "text", "text": "word " * 100, **mark}]}
        return reader.cut(Conversation.of([message]).items[0], message, ())[0]

    assert "cache_control" in str(cut(cache_control={"type": "ephemeral"}))
    assert "cache_control" not in str(cut())
    assert "cache_control" in str(cut(cache_control={"type": "ephemeral"}))


def test_a_full_reader_forgets_the_oldest() -> None:
    counted = Counted()
    reader = Reader(counted, limit=4)
    for text in ("a", "b", "c", "d", "e", "a", "e"):
        message = {"role": "user", "content": text}
        reader.weight(Conversation.of([message]).items[0], message)
    assert counted.weighed == ["a", "b", "c", "d", "e", "a"]


def test_a_sealed_message_has_terms_but_no_blocks() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Boston"}, {"type": "image_url", "image_url": {}}]}
    known = Reader(weigher(len)).know(Conversation.of([message]).items[0], message)
    assert known.all_terms.keys() == {"boston"}
    assert known.terms == ()
