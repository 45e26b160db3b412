"""Requests that ask the provider to summarize the conversation."""

from __future__ import annotations

import pytest

from gateway.core.counting.measure import Wire
from gateway.dialects.anthropic_compaction import asks_for_compaction
from gateway.dialects.fields import read_fields


@pytest.mark.parametrize(
    ("body", "wire", "is_asked"),
    [
        (b'{"compaction":{"type":"summarize"}}', "messages", True),
        (b'{"compaction":{"type":"something_newer"}}', "messages", True),
        (b'{"compaction":null}', "messages", False),
        (b"{}", "messages", False),
        (b'{"context_management":{"edits":[{"type":"compact_20260112"}]}}', "messages", False),
        (b'{"compaction":{"type":"summarize"}}', "chat", False),
        (b'{"compaction":{"type":"summarize"}}', None, False),
    ],
)
def test_only_the_field_of_the_messages_api_asks_for_a_compaction(
    body: bytes, wire: Wire | None, *, is_asked: bool
) -> None:
    assert asks_for_compaction(read_fields(body), wire) is is_asked
