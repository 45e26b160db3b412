from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from gateway.core.counting.binary import SEALED, binary_of, readable
from gateway.core.counting.definitions import count_tools
from gateway.core.counting.measure import Wire, measure
from gateway.core.counting.media import Media

HEADS = [
    ("image", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x04\0\0\0\x02\0"),
    ("image", b"GIF89a\x10\0\x10\0"),
    ("image", b"\xff\xd8\xff\xe0\0\x10JFIF\0"),
    ("image", b"RIFF\x10\0\0\0WEBPVP8 "),
    ("image", b"BM\x36\0\0\0\0\0\0\0"),
    ("image", b"II*\0"),
    ("image", b"\0\0\0\x20ftypavif"),
    ("image", b"\0\0\0\x18ftypheic"),
    ("image", b"\0\0\1\0\1\0"),
    ("pdf", b"%PDF-1.7\n"),
    ("audio", b"RIFF\x10\0\0\0WAVEfmt "),
    ("audio", b"ID3\x04\0\0"),
    ("audio", b"\xff\xfb\x90\x64"),
    ("audio", b"OggS\0\x02"),
    ("audio", b"fLaC\0\0\0\x22"),
    ("audio", b"\0\0\0\x20ftypM4A "),
    ("video", b"\0\0\0\x20ftypisom"),
    ("video", b"\x1aE\xdf\xa3"),
    ("file", b"PK\3\4\x14\0"),
    ("file", b"\x1f\x8b\x08\0"),
    ("file", b"7z\xbc\xaf\x27\x1c"),
    ("file", b"\x28\xb5\x2f\xfd"),
    ("file", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ("file", b"SQLite format 3\0"),
    ("file", bytes(257) + b"ustar"),
    (SEALED, b""),
]


class Characters:
    """Count one token per character, so that base64 does not count as one word."""

    name = "characters"

    def count(self, text: str) -> int:
        return len(text)


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


@pytest.mark.parametrize(("kind", "head"), HEADS)
@pytest.mark.parametrize("size", [600, 300_000])
def test_binary_data_is_recognized_by_its_first_bytes(kind: str, head: bytes, size: int) -> None:
    content = head + noise(size)
    for text in (
        base64.b64encode(content).decode(),
        base64.urlsafe_b64encode(content).decode().rstrip("="),
        base64.encodebytes(content).decode(),
    ):
        found = binary_of(text)
        assert found is not None
        assert (found.kind, abs(found.size - len(content)) < size // 25) == (kind, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "iVBORw0KGgo",
        "iVBORw0KGgoAAA is how base64 of a PNG begins. " * 40,
        "the quick brown fox jumps over the lazy dog " * 40,
        "thequickbrownfoxjumpsoverthelazydog" * 40,
        "TheQuickBrownFox/jumps/over_the-lazy-dog" * 40,
        "0123456789abcdef" * 200,
        "AAAA" * 500,
        "=" * 600,
        "\n".join(f"name_{number}" for number in range(200)),
        "Müller" * 200,
    ],
)
def test_texts_are_not_binary_data(text: str) -> None:
    assert binary_of(text) is None


def test_texts_next_to_binary_data_are_kept() -> None:
    picture = base64.b64encode(b"\x89PNG\r\n\x1a\n" + noise(900)).decode()
    text, found = readable(
        {"type": "x", "about": "a cat", "deep": [{"data": picture}], "url": "data:audio/mp3;base64,QUJD"}
    )
    assert picture not in text
    assert "a cat" in text
    assert [(item.kind, len(data)) for data, item in found] == [("audio", 26), ("image", len(picture))]
    assert readable({"a": "b"}) == ('{"a":"b"}', [])


def test_data_url_of_any_length_is_its_content() -> None:
    assert binary_of("data:image/png;base64,QUJD") == Media("image", size=3)


def items(blob: str) -> list[tuple[Wire, Any]]:
    """Return items of every API with a field for base64 outside of the usual content parts."""
    return [
        ("responses", {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": blob}),
        ("responses", {"type": "computer_call_output", "call_id": "c", "output": {"type": "screenshot", "image": blob}}),
        ("responses", {"type": "code_interpreter_call", "outputs": [{"type": "image", "url": f"data:image/png;base64,{blob}"}]}),
        ("responses", {"type": "mcp_call", "name": "draw", "arguments": "{}", "output": [{"type": "image", "data": blob}]}),
        ("responses", {"type": "function_call_output", "call_id": "c", "output": [{"type": "image", "data": blob}]}),
        ("responses", {"type": "an_item_of_next_year", "payload": {"blob": blob}}),
        ("chat", {"role": "user", "content": [{"type": "image", "image": blob}]}),
        ("chat", {"role": "user", "content": [{"inline_data": {"mime_type": "image/png", "data": blob}}]}),
        ("chat", {"role": "user", "content": [{"image": {"format": "png", "source": {"bytes": blob}}}]}),
        ("chat", {"role": "user", "content": "see", "images": [blob]}),
        ("chat", {"role": "assistant", "content": "", "images": [{"image_url": {"url": f"data:image/png;base64,{blob}"}}]}),
        ("chat", {"role": "tool", "tool_call_id": "c", "content": [{"type": "image", "data": blob, "mimeType": "image/png"}]}),
        ("chat", {"role": "tool", "tool_call_id": "c", "content": [{"type": "resource", "resource": {"blob": blob}}]}),
        ("messages", {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "data": blob}]}]}),
        ("messages", {"role": "assistant", "content": [{"type": "web_fetch_tool_result", "content": {"content": {"source": {"data": blob}}}}]}),
    ]  # fmt: skip


@pytest.mark.parametrize("place", range(len(items(""))))
@pytest.mark.parametrize(("kind", "head"), [one for one in HEADS if one[0] in ("image", "pdf", "audio", "file")][::4])
def test_binary_data_in_any_item_is_not_counted_as_text(place: int, kind: str, head: bytes) -> None:
    wire, item = items(base64.b64encode(head + noise(30_000)).decode())[place]
    found = measure(wire, item, Characters())
    assert [one.kind for one in found.media] in ([kind], ["image"])
    assert sum(found.counts) < 200


def test_encrypted_data_in_an_unknown_item_is_sealed(words: Any) -> None:
    blob = base64.b64encode(noise(9_000)).decode()
    found = measure("responses", {"type": "an_item_of_next_year", "encrypted_content": blob}, words)
    assert (found.counts.sealed, found.counts.seals, found.media) == (12_000, 1, ())


def test_encrypted_code_output_counts_as_text(words: Any) -> None:
    content = {"type": "encrypted_code_execution_result", "encrypted_stdout": base64.b64encode(noise(9_000)).decode()}
    block = {"type": "code_execution_tool_result", "tool_use_id": "t", "content": {**content, "stderr": "a b"}}
    found = measure("messages", {"role": "assistant", "content": [block]}, words)
    assert (found.counts.text, found.counts.sealed) == (4_080, 0)
    plain = {"type": "code_execution_tool_result", "content": {"stdout": "a b"}}
    assert measure("messages", {"role": "assistant", "content": [plain]}, words).counts.other > 0


def test_base64_in_a_text_part_counts_as_text(words: Any) -> None:
    """Providers count a text part as text, whatever its content."""
    blob = base64.b64encode(b"\x89PNG\r\n\x1a\n" + noise(900)).decode()
    assert measure("chat", {"role": "user", "content": blob}, words).media == ()


def test_image_in_a_tool_definition_is_not_counted_as_text() -> None:
    mask = base64.b64encode(b"\x89PNG\r\n\x1a\n" + noise(30_000)).decode()
    tool = {"type": "image_generation", "input_image_mask": {"image_url": f"data:image/png;base64,{mask}"}}
    assert count_tools([tool], Characters()).server_json < 200
