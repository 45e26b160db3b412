from __future__ import annotations

import base64
import struct
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.counting.measure import ContentTokens, MeasuredMessage, Wire, measure, text_measure
from gateway.core.counting.media import Media


def counts(measured: MeasuredMessage) -> dict[str, int]:
    return {name: value for name, value in measured.counts._asdict().items() if value}


CALL = {"id": "1", "type": "function", "function": {"name": "look up", "arguments": "a b c"}}


@pytest.mark.parametrize(
    ("wire", "message", "expected"),
    [
        ("chat", {"role": "user", "content": "one two"}, {"text": 2, "messages": 1}),
        ("chat", {"role": "user", "name": "ada", "content": "one two"}, {"text": 3, "messages": 1}),
        ("chat", {"role": "user", "content": [{"type": "text", "text": "a b"}, "c"]}, {"text": 3, "messages": 1}),
        (
            "chat",
            {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
            {"call": 10, "called": 4, "calls": 2, "parallel": 1, "messages": 1},
        ),
        (
            "chat",
            {"role": "assistant", "function_call": {"name": "look", "arguments": "a"}},
            {"call": 2, "called": 1, "calls": 1, "messages": 1},
        ),
        ("chat", {"role": "tool", "tool_call_id": "1", "content": "a b"}, {"result": 2, "results": 1, "messages": 1}),
        (
            "chat",
            {"role": "assistant", "content": "x", "reasoning_content": "a b", "reasoning": "a b"},
            {"text": 1, "thinking": 2, "messages": 1},
        ),
        (
            "chat",
            {"role": "assistant", "reasoning_details": [{"text": "a b", "data": "sealed"}]},
            {"thinking": 2, "sealed": 6, "seals": 1, "messages": 1},
        ),
        (
            "chat",
            {"role": "assistant", "content": "<think>let me see</think>it is so"},
            {"inline": 3, "text": 3, "messages": 1},
        ),
        ("chat", {"role": "user", "content": "what is </think>"}, {"text": 3, "messages": 1}),
        ("responses", {"role": "user", "content": "one two"}, {"text": 2, "messages": 1}),
        (
            "responses",
            {"type": "function_call", "name": "look", "arguments": "a b"},
            {"call": 3, "called": 1, "calls": 1, "messages": 1},
        ),
        (
            "responses",
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a b"}]},
            {"result": 2, "results": 1, "messages": 1},
        ),
        ("responses", {"type": "reasoning", "summary": [{"text": "a b"}]}, {"thinking": 2}),
        (
            "responses",
            {"type": "reasoning", "summary": [{"text": "a"}], "encrypted_content": "xyz"},
            {"sealed": 3, "seals": 1},
        ),
        ("responses", {"type": "item_reference", "id": "1"}, {}),
        ("responses", {"type": "reasoning", "summary": ["a", {"text": 3}]}, {}),
        ("chat", {"role": "assistant", "tool_calls": ["a b"]}, {"text": 2, "messages": 1}),
        ("chat", {"role": "assistant", "reasoning_details": ["a b"]}, {"messages": 1}),
        ("responses", {"type": "new_thing", "id": "1", "status": "done", "what": "a b"}, {"other": 2, "messages": 1}),
        (
            "messages",
            {"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {"a": "b"}}]},
            {"call": 2, "called": 1, "calls": 1, "messages": 1},
        ),
        (
            "messages",
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a b", "signature": "s" * 400}]},
            {"thinking": 2, "messages": 1},
        ),
        (
            "responses",
            {"type": "compaction", "id": "cmp_1", "encrypted_content": "Z2VoZWlt"},
            {"sealed": 8, "seals": 1, "messages": 1},
        ),
        ("completions", "one two", {"text": 2}),
        ("completions", ["one", "two three"], {"text": 3}),
        ("completions", [1, 2, 3], {"text": 3}),
        ("completions", [[1, 2], [3]], {"text": 3}),
    ],
)
def test_message_is_measured_by_kind_of_content(words: Any, wire: Wire, message: Any, expected: dict[str, int]) -> None:
    assert counts(measure(wire, message, words)) == expected


def test_images_outside_of_the_content_count_as_images(words: Any) -> None:
    gif = base64.b64encode(b"GIF89a" + struct.pack("<HH", 640, 480)).decode()
    known = Media("image", 640, 480, size=10)
    part = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{gif}", "detail": "low"}}
    for role, images, media in (
        ("assistant", [part], (replace(known, detail="low"),)),
        ("user", [gif, f"data:image/gif;base64,{gif}", "https://x/y"], (known, known, Media("image"))),
        ("user", ["no picture"], (Media("image", size=7),)),
    ):
        found = measure("chat", {"role": role, "content": "a b", "images": images}, words)
        assert (found.media, counts(found)) == (media, {"text": 2, "messages": 1})
    nothings: tuple[Any, ...] = (None, 7, {}, [])
    for nothing in nothings:
        assert measure("chat", {"role": "user", "content": "a b", "images": nothing}, words).media == ()


def test_images_in_a_result_are_media_and_its_text_is_result_tokens(words: Any) -> None:
    content = [{"type": "text", "text": "a b"}, {"type": "image", "source": {"type": "url", "url": "https://x/y"}}]
    found = measure("messages", {"role": "user", "content": [{"type": "tool_result", "content": content}]}, words)
    assert (found.counts.result, found.counts.text, found.media, found.is_by_user) == (2, 0, (Media("image"),), False)


@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a b"}]])
def test_separate_system_prompt_counts_as_a_message(words: Any, content: Any) -> None:
    found = text_measure(content, words)
    assert (found.role, found.counts) == ("system", ContentTokens(text=2, messages=1))
