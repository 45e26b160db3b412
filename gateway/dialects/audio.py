"""Estimate the tokens of audio in a response."""

from __future__ import annotations

import re
from typing import Final

from gateway.dialects.fields import AnyFields, decode

#: Tokens of a second of sound that a model says, one for 50 ms:
#: https://developers.openai.com/api/docs/guides/realtime-costs
_TOKENS_A_SECOND: Final = 20
#: Bytes of a second: what streams hold is 24 kHz in 16 bits, without or with a WAV's head
#: (https://platform.openai.com/docs/api-reference/realtime). What is packed takes less; the least that good speech
#: takes is 16 kbit/s (https://www.rfc-editor.org/rfc/rfc6716#section-2.1.1), so that it weighs rather more than less.
_PLAIN_BYTES: Final = 24_000 * 2
_COMPRESSED_BYTES: Final = 16_000 // 8
_BASE64: Final = 4 / 3
#: How packed sound begins, in base64: ID3 and frames of MP3 and AAC, Ogg, FLAC, MP4, WebM. 0xff 0xff begins no frame
#: but is near silence.
_COMPRESSED: Final = re.compile(r"SUQz|//[A-Za-z0-7]|T2dnU|ZkxhQ|.{6}Z0eX|GkXfo")
#: fields that say what an answer is made of, and bytes that a list of such words may have
_MADE_OF: Final = ("modalities", "output_modalities")
_FEW_BYTES: Final = 1024


class AudioCounter:
    """Weighs the sound of one answer, which may come in pieces: how it is written the first of them tells."""

    __slots__ = ("_per_character",)

    def __init__(self) -> None:
        self._per_character = 0.0

    def tokens(self, data: str) -> float:
        """What this much base64 weighs."""
        if not self._per_character and data:
            second = _COMPRESSED_BYTES if _COMPRESSED.match(data) else _PLAIN_BYTES
            self._per_character = _TOKENS_A_SECOND / (second * _BASE64)
        return len(data) * self._per_character


def asks_for_more_than_text(fields: AnyFields) -> bool:
    """Whether an answer may hold what is billed beside its text, such as sound, and is weighed by a rule of thumb."""
    if "audio" in fields and bytes(fields["audio"]) != b"null":
        return True
    return any(_is_more(bytes(fields[name])) for name in _MADE_OF if name in fields)


def _is_more(raw: bytes) -> bool:
    return len(raw) > _FEW_BYTES or decode(raw) not in (None, ["text"])
