"""Decompress a provider's response body, and check its encodings."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from typing import Final

from gateway.core.errors import UpstreamProtocolError, UpstreamUnreadable
from gateway.core.http.compression import SUPPORTED, Corrupt, TooLarge, Unpacker
from gateway.core.http.headers import header
from gateway.core.ports import UpstreamReply
from gateway.core.values import dataclass

#: ways to pack a body; some servers name a charset or a language where these belong, and send plain text
_PACKINGS: Final = re.compile(rb"\b(?:br|zstd|gzip|deflate|compress|dcb|dcz)\b", re.IGNORECASE)
_ENCODING: Final = b"content-encoding"
_TRANSFER: Final = b"transfer-encoding"
#: transfer codings that the HTTP client itself removes
_FRAMING: Final = frozenset({"chunked", "identity"})


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
    return [(name, value) for name, value in headers if name not in (_ENCODING, _TRANSFER)]


def _codings(answer: UpstreamReply) -> list[str]:
    """Return the codings of a body, innermost first; transfer codings were applied last (RFC 9112, section 6.1)."""
    said = dict(answer.headers)
    if _ENCODING not in said and _TRANSFER not in said:
        return []
    compressed = header(answer.headers, _ENCODING).decode("latin-1").strip().lower()
    return [one for one in (compressed, *_transfer_codings(answer)) if one]


def _transfer_codings(answer: UpstreamReply) -> list[str]:
    """Return the transfer codings that are still to be removed from a body."""
    values = [value.decode("latin-1") for name, value in answer.headers if name == _TRANSFER]
    codings = [one.strip().lower() for value in values for one in value.split(",")]
    return [one for one in codings if one and one not in _FRAMING]


def is_compressed(answer: UpstreamReply) -> bool:
    """Whether it came packed, although it was asked for plain."""
    codings = _codings(answer)
    return len(codings) == 1 and codings[0] in SUPPORTED


def check_packing(answer: UpstreamReply) -> None:
    """Refuse a response that can be neither metered nor added to: the request asked for it uncompressed.

    Raises:
        UpstreamUnreadable: it is packed in another way than those that are unpacked here.
    """
    said = ", ".join(_codings(answer))
    if said and not is_compressed(answer) and _PACKINGS.search(said.encode()):
        raise UpstreamUnreadable(
            f"The provider's response is compressed ({said[:40]}) although it was asked for uncompressed, and cannot "
            "be metered. Turn compression off at the provider, or have it use gzip or deflate."
        )


def check_transfer_coding(answer: UpstreamReply) -> None:
    """Refuse a body whose transfer coding cannot be removed: a client would get it without the header that names it.

    Raises:
        UpstreamUnreadable: it has such a coding.
    """
    if _TRANSFER not in dict(answer.headers) or is_compressed(answer):
        return
    if codings := _transfer_codings(answer):
        raise UpstreamUnreadable(
            f"The provider's response has the transfer coding {codings[0][:40]}, for which it was not asked. Only gzip "
            "and deflate are decoded, and only one of them."
        )


async def decompressed(answer: UpstreamReply) -> AsyncIterator[bytes]:
    """The body, unpacked as it comes.

    Raises:
        UpstreamUnreadable: it is not what it says it is.
        UpstreamProtocolError: it breaks off.
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
        raise UpstreamUnreadable("The provider's answer is packed and cannot be unpacked.") from None
    if not (empty or unpacker.complete):
        raise UpstreamProtocolError("The provider's answer is packed and breaks off before its end.")


async def chain(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What was read already, then the rest."""
    for piece in first:
        yield piece
    async for piece in rest:
        yield piece
