from __future__ import annotations

import base64
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.media import Media, decode_text, from_base64, from_url, image_size, is_text_type, read_audio

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 640, 480, 8, 2, 0, 0, 0)
GIF = b"GIF89a" + struct.pack("<HH", 320, 200) + b"\x00\x00\x00"
JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    b"\xff\xff\xfe\x00\x04ab"
    b"\xff\xc2\x00\x11\x08" + struct.pack(">HH", 600, 800) + b"\x03\x01\x22\x00"
)
WEBP_LOSSY = b"RIFF\x00\x00\x00\x00WEBPVP8 \x00\x00\x00\x00\x30\x01\x00\x9d\x01\x2a" + struct.pack("<HH", 550, 368)
WEBP_LOSSLESS = b"RIFF\x00\x00\x00\x00WEBPVP8L\x00\x00\x00\x00\x2f" + struct.pack("<I", 385 | 394 << 14)
WEBP_EXTENDED = (
    b"RIFF\x00\x00\x00\x00WEBPVP8X\x0a\x00\x00\x00\x10\x00\x00\x00"
    + (399).to_bytes(3, "little")
    + (299).to_bytes(3, "little")
)


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (PNG, (640, 480)),
        (GIF, (320, 200)),
        (JPEG, (800, 600)),
        (WEBP_LOSSY, (550, 368)),
        (WEBP_LOSSLESS, (386, 395)),
        (WEBP_EXTENDED, (400, 300)),
    ],
    ids=["png", "gif", "jpeg", "webp lossy", "webp lossless", "webp extended"],
)
def test_image_size_is_read_from_its_first_bytes(content: bytes, size: tuple[int, int]) -> None:
    assert image_size(content) == size
    found = from_url(f"data:image/whatever;base64,{encoded(content + bytes(5000))}", detail="high")
    assert (found.kind, found.width, found.height, found.detail) == ("image", *size, "high")


@pytest.mark.parametrize("content", [PNG, GIF, JPEG, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_EXTENDED])
def test_truncated_first_bytes_raise_nothing(content: bytes) -> None:
    assert image_size(JPEG[:20] + b"no marker here at all") is None
    for end in range(len(content)):
        assert image_size(content[:end]) is None or end > 9


@given(st.binary(max_size=60), st.sampled_from([b"", PNG[:12], GIF[:6], JPEG[:3], WEBP_LOSSY[:16], WEBP_LOSSLESS[:16]]))
def test_any_bytes_give_a_size_or_none(noise: bytes, head: bytes) -> None:
    size = image_size(head + noise)
    assert size is None or (0 < size[0] <= 65_535 and 0 < size[1] <= 65_535)


@given(st.text(max_size=200), st.text(max_size=20))
def test_any_text_instead_of_base64_gives_a_part(data: str, media_type: str) -> None:
    assert from_base64(data, media_type).size >= 0
    assert from_url(f"data:{media_type};base64,{data}").kind
    assert isinstance(decode_text(data), str)


def test_base64_with_line_breaks_or_url_alphabet_is_read() -> None:
    text = encoded(PNG + b"\xfb\xff" * 20)
    broken = "\n".join(text[at : at + 20] for at in range(0, len(text), 20))
    assert from_base64(broken).width == 640
    assert from_base64(text.replace("+", "-").replace("/", "_")).width == 640


def test_image_by_address_has_no_size() -> None:
    assert from_url("https://example.com/a.png") == Media("image")


def test_pdf_pages_are_counted_if_not_compressed() -> None:
    plain = b"%PDF-1.4\n1 0 obj<</Type /Pages /Count 3 /Kids []>>\n" + b"<</Type /Page >>" * 3
    compressed = b"%PDF-1.5\n" + zlib.compress(b"<</Type /Page>>" * 9)
    linearized = b"%PDF-1.4\n<</Linearized 1 /L 9 /N 12>>"
    assert from_base64(encoded(plain), "application/pdf").pages == 3
    assert from_base64(encoded(compressed), "application/pdf") == Media("pdf", size=len(compressed))
    assert from_base64(encoded(linearized)).pages == 12


def test_length_of_a_wav_is_read() -> None:
    wav = b"RIFF\x00\x00\x00\x00WAVEfmt \x10\x00\x00\x00" + struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    found = read_audio({"data": encoded(wav + bytes(64_000 - len(wav))), "format": "wav"})
    assert (found.kind, round(found.seconds, 2)) == ("audio", 2.0)
    assert read_audio({"format": "mp3"}) == Media("audio")
    assert read_audio({"data": encoded(PNG)}).kind == "audio"


def test_text_media_types_are_recognized() -> None:
    assert is_text_type("text/csv")
    assert is_text_type("application/json")
    assert not is_text_type("application/pdf")
