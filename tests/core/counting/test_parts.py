from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway.core.counting.parts import Tally

TEXT_FILE = "data:text/plain;base64," + base64.b64encode(b"three little words").decode()
PAGE = {"type": "web_search_result", "title": "a page", "url": "https://x.example", "encrypted_content": None}
FOUND = [PAGE, {**PAGE, "page_age": "3 days", "url": None, "encrypted_content": "x" * 1000}]


def counted(words: Any, *parts: Any) -> Tally:
    tally = Tally(words.count)
    tally.parts(list(parts))
    return tally


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "container_upload", "file_id": "f"}, {}),
        ({"type": "redacted_thinking", "data": "abcd"}, {"sealed": 4, "seals": 1}),
        # as the trim rules read it
        ({"type": "compaction_summary", "encrypted_content": "Z2VoZWlt"}, {"sealed": 8, "seals": 1}),
        ({"type": "compaction", "content": "all was well"}, {"other": 3}),
        ({"type": "web_search_tool_result", "tool_use_id": "s", "content": FOUND}, {"text": 7 + 340}),
        ({"type": "web_search_tool_result", "content": ["a b", None, 7, PAGE]}, {"text": 6}),
        ({"type": "web_search_tool_result", "content": {"text": "a b", "type": "x"}}, {"text": 2}),
        ({"type": "input_file", "filename": "notes", "file_data": TEXT_FILE}, {"text": 4}),
        ({"type": "file", "file": {"file_data": "data:text/plain,two words"}}, {"text": 2}),
    ],
)
def test_part_is_counted_by_its_type(words: Any, part: Any, expected: dict[str, int]) -> None:
    assert counted(words, part).sums == expected


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "https://x/y", "detail": "low"}}, "image"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}, "image"),
        ({"type": "image", "source": {"type": "url", "url": "https://x/y"}}, "image"),
        ({"type": "image", "source": {"type": "base64", "data": "AAAA", "media_type": "image/png"}}, "image"),
        ({"type": "image", "source": "what"}, "image"),
        ({"type": "document", "source": {"type": "url", "url": "https://x/y"}}, "pdf"),
        ({"type": "document", "source": {"type": "text", "data": "a b"}}, "text"),
        ({"type": "file", "file": {"file_id": "1"}}, "pdf"),
        ({"type": "file", "file": {"file_data": "JVBERi0xLjQ="}}, "pdf"),
        ({"type": "input_file", "file_url": "https://x/y"}, "pdf"),
        ({"type": "input_file", "file_data": "data:application/zip;base64,AAAA"}, "file"),
        ({"type": "document_url", "document_url": "https://x/y"}, "pdf"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}}, "audio"),
        ({"type": "unheard_of", "inside": ["data:image/png;base64,AAAA"]}, "image"),
    ],
)
def test_media_part_has_a_kind(words: Any, part: Any, kind: str) -> None:
    assert [item.kind for item in counted(words, part).media] == [kind]


def test_document_of_blocks_is_counted(words: Any) -> None:
    blocks = [{"type": "text", "text": "a b c"}]
    part = {"type": "document", "title": "t", "source": {"type": "content", "content": blocks}}
    assert counted(words, part).sums == {"text": 4}


def test_everything_inside_a_result_is_result_tokens(words: Any) -> None:
    inner = [
        {"type": "text", "text": "a b"},
        {"type": "tool_result", "content": "c d e"},
        {"type": "tool_use", "id": "1", "name": "look", "input": "f g"},
        {"type": "thinking", "thinking": "h"},
    ]
    found = counted(words, {"type": "tool_result", "content": inner})
    assert found.sums == {"result": 2 + 3 + 3 + 1, "results": 1}


def test_numbers_instead_of_texts_are_counted_as_json(words: Any) -> None:
    found = counted(words, {"type": "text", "text": 12}, {"type": "text"}, 7, None)
    assert found.sums["text"] == 1
