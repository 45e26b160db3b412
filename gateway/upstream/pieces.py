"""The body of a provider's answer, in the pieces it comes in: unpacked, or read already."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from gateway.core.encoding import SUPPORTED, Corrupt, TooLarge, Unpacker
from gateway.core.errors import UpstreamProtocolError
from gateway.core.forwarding import header
from gateway.core.ports import UpstreamReply
from gateway.core.values import dataclass

#: ways to pack a body; some servers name a charset or a language where these belong, and send plain text
_PACKINGS: Final = re.compile(rb"\b(?:br|zstd|gzip|deflate|compress|dcb|dcz)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AlreadyRead:
    """An answer whose body was read already."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `UpstreamReply.chunks`."""
        yield self.body


def without_packing(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer whose body is plain now."""
    return [(name, value) for name, value in headers if name != b"content-encoding"]


def is_packed(answer: UpstreamReply) -> bool:
    """Whether it came packed, although it was asked for plain."""
    said = header(answer.headers, b"content-encoding")
    return bool(said) and said.strip().lower().decode("latin-1") in SUPPORTED


def check_packing(answer: UpstreamReply) -> None:
    """Refuse what can be neither metered nor added to: nobody asked for it packed.

    Raises:
        UpstreamProtocolError: it is packed in another way than those that are unpacked here.
    """
    said = header(answer.headers, b"content-encoding")
    if said and not is_packed(answer) and _PACKINGS.search(said):
        raise UpstreamProtocolError(
            f"The provider's answer came packed ({said[:40].decode('latin-1')}) although it was asked for plain, and "
            "cannot be metered."
        )


async def unpacked(answer: UpstreamReply) -> AsyncIterator[bytes]:
    """The body, unpacked as it comes.

    Raises:
        UpstreamProtocolError: it is not what it says it is, or breaks off.
    """
    unpacker, empty = Unpacker(None), True
    try:
        async for piece in answer.chunks():
            empty = False
            for part in unpacker.feed(piece):
                yield part
                # One piece may hold a thousand times its size, and who takes it need not wait for anything.
                await asyncio.sleep(0)
    except (Corrupt, TooLarge):
        raise UpstreamProtocolError("The provider's answer is packed and cannot be unpacked.") from None
    if not (empty or unpacker.complete):
        raise UpstreamProtocolError("The provider's answer is packed and breaks off before its end.")


async def chain(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What was read already, then the rest."""
    for piece in first:
        yield piece
    async for piece in rest:
        yield piece
