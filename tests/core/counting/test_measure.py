from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.core.counting.measure import Counts, Measure, Wire, measure, text_measure
from gateway.core.counting.media import Media

TEXT_FILE = "data:text/plain;base64," + base64.b64encode(b"three little words").decode()


def counts(measured: Measure) -> dict[str, int]:
    return {name: value for name, value in measured.counts._asdict().items() if value}


PAGE = {"type": "web_search_result", "title": "a page", "url": "https://x.example", "encrypted_content": None}
FOUND = [PAGE, {**PAGE, "page_age": "3 days", "url": None, "encrypted_content": "x" * 1000}]
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
        ("messages", {"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}, {"messages": 1}),
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
            "messages",
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "abcd"}]},
            {"sealed": 4, "seals": 1, "messages": 1},
        ),
        (
            "responses",
            {"type": "compaction", "id": "cmp_1", "encrypted_content": "Z2VoZWlt"},
            {"sealed": 8, "seals": 1, "messages": 1},
        ),
        (  # as the rules for cuts read it
            "chat",
            {"role": "assistant", "content": [{"type": "compaction_summary", "encrypted_content": "Z2VoZWlt"}]},
            {"sealed": 8, "seals": 1, "messages": 1},
        ),
        (
            "messages",
            {"role": "assistant", "content": [{"type": "compaction", "content": "all was well"}]},
            {"other": 3, "messages": 1},
        ),
        (
            "messages",
            {
                "role": "assistant",
                "content": [{"type": "web_search_tool_result", "tool_use_id": "s", "content": FOUND}],
            },
            {"text": 7 + 340, "messages": 1},
        ),
        (
            "messages",
            {"role": "assistant", "content": [{"type": "web_search_tool_result", "content": ["a b", None, 7, PAGE]}]},
            {"text": 6, "messages": 1},
        ),
        (
            "messages",
            {"role": "user", "content": [{"type": "web_search_tool_result", "content": {"text": "a b", "type": "x"}}]},
            {"text": 2, "messages": 1},
        ),
        ("completions", "one two", {"text": 2}),
        ("completions", ["one", "two three"], {"text": 3}),
        ("completions", [1, 2, 3], {"text": 3}),
        ("completions", [[1, 2], [3]], {"text": 3}),
    ],
)
def test_a_message_is_weighed_by_what_it_is(words: Any, wire: Wire, message: Any, expected: dict[str, int]) -> None:
    assert counts(measure(wire, message, words)) == expected


@pytest.mark.parametrize(
    ("wire", "part", "kind"),
    [
        ("chat", {"type": "image_url", "image_url": {"url": "https://x/y", "detail": "low"}}, "image"),
        ("responses", {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}, "image"),
        ("messages", {"type": "image", "source": {"type": "url", "url": "https://x/y"}}, "image"),
        (
            "messages",
            {"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}},
            "image",
        ),
        ("messages", {"type": "image", "source": "what"}, "image"),
        ("messages", {"type": "document", "source": {"type": "url", "url": "https://x/y"}}, "pdf"),
        ("messages", {"type": "document", "source": {"type": "text", "data": "a b"}}, "text"),
        ("chat", {"type": "file", "file": {"file_id": "1"}}, "pdf"),
        ("chat", {"type": "file", "file": {"file_data": "JVBERi0xLjQ="}}, "pdf"),
        ("responses", {"type": "input_file", "file_url": "https://x/y"}, "pdf"),
        ("responses", {"type": "input_file", "file_data": "data:application/zip;base64,AAAA"}, "file"),
        ("chat", {"type": "document_url", "document_url": "https://x/y"}, "pdf"),
        ("chat", {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}, "audio"),
        ("chat", {"type": "unheard_of", "inside": ["data:image/png;base64,AAAA"]}, "image"),
    ],
)
def test_a_part_that_is_no_text_is_told_by_kind(words: Any, wire: Wire, part: Any, kind: str) -> None:
    found = measure(wire, {"role": "user", "content": [part]}, words)
    assert [item.kind for item in found.media] == [kind]


def test_text_in_a_file_is_counted_as_text(words: Any) -> None:
    part = {"type": "input_file", "filename": "notes", "file_data": TEXT_FILE}
    assert counts(measure("responses", {"role": "user", "content": [part]}, words)) == {"text": 4, "messages": 1}
    plain = {"type": "file", "file": {"file_data": "data:text/plain,two words"}}
    assert counts(measure("chat", {"role": "user", "content": [plain]}, words))["text"] == 2


def test_a_document_of_blocks_is_read(words: Any) -> None:
    blocks = [{"type": "text", "text": "a b c"}]
    part = {"type": "document", "title": "t", "source": {"type": "content", "content": blocks}}
    assert counts(measure("messages", {"role": "user", "content": [part]}, words))["text"] == 4


def test_images_in_a_result_are_images_and_its_text_is_the_results(words: Any) -> None:
    content = [{"type": "text", "text": "a b"}, {"type": "image", "source": {"type": "url", "url": "https://x/y"}}]
    found = measure("messages", {"role": "user", "content": [{"type": "tool_result", "content": content}]}, words)
    assert (found.counts.result, found.counts.text, found.media, found.asks) == (2, 0, (Media("image"),), False)


def test_all_that_stands_in_a_result_is_the_results(words: Any) -> None:
    inner = [
        {"type": "text", "text": "a b"},
        {"type": "tool_result", "content": "c d e"},
        {"type": "tool_use", "id": "1", "name": "look", "input": "f g"},
        {"type": "thinking", "thinking": "h"},
    ]
    found = measure("messages", {"role": "user", "content": [{"type": "tool_result", "content": inner}]}, words)
    assert counts(found) == {"result": 2 + 3 + 3 + 1, "results": 1, "messages": 1}


@pytest.mark.parametrize("content", ["a b", [{"type": "text", "text": "a b"}]])
def test_a_system_text_is_a_message_of_its_own(words: Any, content: Any) -> None:
    found = text_measure(content, words)
    assert (found.role, found.counts) == ("system", Counts(text=2, messages=1))


def test_numbers_in_place_of_texts_are_counted_as_their_json(words: Any) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": 12}, {"type": "text"}, 7, None]}
    assert measure("chat", message, words).counts.text == 1
