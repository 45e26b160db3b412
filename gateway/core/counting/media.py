"""Detect images, audio and files from their first bytes, and read their size.

Only header bytes are decoded. What such a part costs depends on the model family (`images.py`).
"""

from __future__ import annotations

import binascii
import re
import struct
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.values import dataclass

#: base64 characters that are searched for the size of an image: a JPEG may have a thumbnail and a colour profile before
#: it
_HEAD: Final = 256 * 1024
#: base64 characters of a PDF that are searched for pages
_PDF_HEAD: Final = 8 * 1024 * 1024
_PDF_PAGE: Final = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
_LINEARIZED: Final = re.compile(rb"/Linearized\b[^>]{0,200}?/N\s+(\d{1,6})")
_NOT_BASE64: Final = re.compile(r"[^A-Za-z0-9+/]")
#: First bytes of formats, by kind of media. The first entry that matches is used.
_HEADS: Final = tuple(
    (kind, re.compile(head, re.DOTALL))
    for kind, head in (
        ("image", rb"\x89PNG\r\n\x1a\n|GIF8[79]a|\xff\xd8\xff|RIFF.{4}WEBP|BM.{4}\x00{4}|II\*\x00|MM\x00\*"),
        ("image", rb".{4}ftyp(?:avi[fs]|hei[cfsx]|mif1|msf1)|\x00\x00\x01\x00[\x01-\x20]\x00|8BPS"),
        ("audio", rb"RIFF.{4}WAVE|ID3[\x02-\x04]|OggS|fLaC|#!AMR|FORM.{4}AIF[FC]|.{4}ftyp(?:M4[AB]|F4A)"),
        ("audio", rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb\xf1\xf9][\x10-\xef]"),
        ("video", rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI |FLV\x01|\x00\x00\x01[\xb3\xba]"),
        ("file", rb"PK\x03\x04|PK\x05\x06|\x1f\x8b\x08|BZh[1-9]1AY|\xfd7zXZ\x00|\x28\xb5\x2f\xfd|7z\xbc\xaf"),
        ("file", rb"Rar!\x1a\x07|\xd0\xcf\x11\xe0|SQLite format 3\x00|PAR1|\x7fELF|\x00asm|.{257}ustar"),
    )
)
#: JPEG markers of frames, which contain the image size
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
#: maximum pixels along one edge; a header that claims more is ignored
_MAX_EDGE: Final = 65_535


@dataclass(frozen=True, slots=True)
class Media:
    """One part that is not text. Sizes are 0 if unknown.

    Attributes:
        kind: image, audio, pdf, video, file, or text for a document whose text is counted separately.
        width: width of an image in pixels.
        height: height of an image in pixels.
        detail: the image detail that the request asks for; empty if it does not.
        size: bytes of the data.
        seconds: length of a WAV.
        pages: pages of a PDF.
    """

    kind: str
    width: int = 0
    height: int = 0
    detail: str = ""
    size: int = 0
    seconds: float = 0.0
    pages: int = 0


def from_url(url: str, kind: str = "", detail: str = "") -> Media:
    """Return what a `data:` URL contains, or `kind` for an address that the provider will fetch.

    `kind` is the kind that the type of the part implies.
    """
    if not url.startswith("data:"):
        return Media(kind or "image", detail=detail)
    head, _, data = url.partition(",")
    return from_base64(data, head[5:].partition(";")[0], kind, detail)


def from_base64(data: str, media_type: str = "", kind: str = "", detail: str = "") -> Media:
    """Return what a base64 string contains, by its first bytes, its media type, or the `kind` that its part implies."""
    size = len(data.rstrip("=")) * 3 // 4
    head = _decode(data[:_HEAD])
    edges = image_size(head)
    if edges is not None:
        return Media("image", edges[0], edges[1], detail, size)
    if head.startswith(b"%PDF") or media_type == "application/pdf":
        return Media("pdf", size=size, pages=_pages(_decode(data[:_PDF_HEAD])))
    main_type = media_type.partition("/")[0]
    detected = _kind_of_head(head)
    # WebM and Ogg may contain only audio, and only the media type shows it.
    use_main_type = main_type in ("image", "audio", "video") and detected in ("", "video")
    actual = main_type if use_main_type else detected or kind or "file"
    return Media(actual, detail=detail, size=size, seconds=_wav_seconds(head, size) if actual == "audio" else 0.0)


def _kind_of_head(head: bytes) -> str:
    """Return the kind of media that begins with these bytes: image, audio, video, file for an archive, or ""."""
    return next((kind for kind, pattern in _HEADS if pattern.match(head)), "")


def image_size(head: bytes) -> tuple[int, int] | None:
    """Return (width, height) in pixels of a PNG, JPEG, GIF or WebP from its first bytes, or None."""
    try:
        size = _png(head) or _gif(head) or _webp(head) or _jpeg(head)
    except (struct.error, IndexError):
        return None
    return size if size is not None and 0 < size[0] <= _MAX_EDGE and 0 < size[1] <= _MAX_EDGE else None


def is_text_type(media_type: str) -> bool:
    """Return True if data of this media type is text."""
    return media_type.startswith("text/") or media_type in ("application/json", "application/xml", "application/yaml")


def decode_text(data: str) -> str:
    """Return the text in a base64 string; invalid UTF-8 becomes replacement characters."""
    return _decode(data).decode("utf-8", "replace")


def read_audio(part: Mapping[str, Any]) -> Media:
    """Read the audio of an `input_audio` object: {"data": base64, "format": "wav"}."""
    data = part.get("data")
    if isinstance(data, str):
        # Qwen accepts a data URL in this field.
        data = data.partition(",")[2] if data.startswith("data:") else data
        audio = from_base64(data, "audio/" + str(part.get("format", "")))
    else:
        audio = Media("audio")
    return audio if audio.kind == "audio" else Media("audio", size=audio.size)


def _decode(data: str) -> bytes:
    """Decode as much base64 as possible, with or without line breaks, in either alphabet; never raises."""
    data = data.rstrip("=")
    if _NOT_BASE64.search(data) is not None:
        data = data.replace("-", "+").replace("_", "/").translate({9: None, 10: None, 13: None, 32: None})
        invalid = _NOT_BASE64.search(data)
        data = data[: invalid.start()] if invalid else data
    rest = len(data) % 4
    # A single left-over character does not make a whole byte.
    return binascii.a2b_base64(data + "=" * (4 - rest) if rest > 1 else data[: len(data) - rest])


def _png(head: bytes) -> tuple[int, int] | None:
    if not head.startswith(b"\x89PNG\r\n\x1a\n"):
        return None
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def _gif(head: bytes) -> tuple[int, int] | None:
    if head[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    width, height = struct.unpack("<HH", head[6:10])
    return width, height


def _webp(head: bytes) -> tuple[int, int] | None:
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP":
        return None
    form = head[12:16]
    if form == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if form == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(head: bytes) -> tuple[int, int] | None:
    if head[:3] != b"\xff\xd8\xff":
        return None
    at = 2
    while at + 9 <= len(head):
        if head[at] != 0xFF:  # noqa: PLR2004  # every marker starts with this byte
            return None
        marker = head[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack(">HH", head[at + 5 : at + 9])
            return width, height
        if marker in (0xFF, 0x01) or 0xD0 <= marker <= 0xD8:  # noqa: PLR2004  # fill bytes and markers without a length
            at += 1 if marker == 0xFF else 2  # noqa: PLR2004
            continue
        at += 2 + max(2, struct.unpack(">H", head[at + 2 : at + 4])[0])
    return None


def _wav_seconds(head: bytes, size: int) -> float:
    """Return the length of a WAV, from the byte rate in its header; 0 for other formats."""
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE" or len(head) < 32:  # noqa: PLR2004  # the header's length
        return 0.0
    rate = int.from_bytes(head[28:32], "little")
    return size / rate if rate else 0.0


def _pages(content: bytes) -> int:
    """Return the number of pages of a PDF, from its uncompressed part; 0 if they are compressed."""
    linearized = _LINEARIZED.search(content[:2048])
    if linearized:
        return int(linearized[1])
    return len(_PDF_PAGE.findall(content))
