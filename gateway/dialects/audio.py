"""Estimate the tokens of audio in a response."""

from __future__ import annotations

import re
from typing import Final

from gateway.dialects.fields import AnyFields, decode

#: Tokens per second of speech that a model generates, one per 50 ms:
#: https://developers.openai.com/api/docs/guides/realtime-costs
_TOKENS_A_SECOND: Final = 20
#: Bytes per second. Streams have 24 kHz in 16 bits, with or without a WAV header
#: (https://platform.openai.com/docs/api-reference/realtime). Compressed audio is smaller. Good speech needs at least
#: 16 kbit/s (https://www.rfc-editor.org/rfc/rfc6716#section-2.1.1), so the estimate is rather too high than too low.
_PLAIN_BYTES: Final = 24_000 * 2
_COMPRESSED_BYTES: Final = 16_000 // 8
_BASE64: Final = 4 / 3
#: First characters of compressed audio in base64: ID3 and frames of MP3 and AAC, Ogg, FLAC, MP4, WebM. The bytes
#: 0xff 0xff begin no frame but occur near silence.
_COMPRESSED: Final = re.compile(r"SUQz|//[A-Za-z0-7]|T2dnU|ZkxhQ|.{6}Z0eX|GkXfo")
#: fields with the list of output modalities, and the size limit in bytes of such a list
_MODALITIES: Final = ("modalities", "output_modalities")
_MAX_LIST_BYTES: Final = 1024


class AudioCounter:
    """Estimate the tokens of the audio of one response. Its first piece shows whether the audio is compressed."""

    __slots__ = ("_per_character",)

    def __init__(self) -> None:
        self._per_character = 0.0

    def tokens(self, data: str) -> float:
        """Return the estimated tokens of a piece of base64."""
        if not self._per_character and data:
            second = _COMPRESSED_BYTES if _COMPRESSED.match(data) else _PLAIN_BYTES
            self._per_character = _TOKENS_A_SECOND / (second * _BASE64)
        return len(data) * self._per_character


def asks_for_more_than_text(fields: AnyFields) -> bool:
    """Return True if a response may have output that is billed in addition to its text, such as audio."""
    if "audio" in fields and bytes(fields["audio"]) != b"null":
        return True
    return any(_is_more(bytes(fields[name])) for name in _MODALITIES if name in fields)


def _is_more(raw: bytes) -> bool:
    return len(raw) > _MAX_LIST_BYTES or decode(raw) not in (None, ["text"])
