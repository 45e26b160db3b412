"""Decompress a provider's response body, and check its content and transfer codings."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Final

from gateway.core.errors import UpstreamProtocolError, UpstreamUnreadable
from gateway.core.http.compression import SUPPORTED, Corrupt, TooLarge, Unpacker
from gateway.core.http.headers import header
from gateway.core.ports import PassedPieces, TakePiece, UpstreamReply
from gateway.core.values import dataclass

#: compression codings; some servers put a charset or a language into this header and send plain text
_COMPRESSIONS: Final = re.compile(rb"\b(?:br|zstd|gzip|deflate|compress|dcb|dcz)\b", re.IGNORECASE)
_ENCODING: Final = b"content-encoding"
_TRANSFER: Final = b"transfer-encoding"
_CODING_HEADERS: Final = frozenset({_ENCODING, _TRANSFER})
#: of nearly all responses that are streamed
_ONLY_CHUNKED: Final = [(_TRANSFER, b"chunked")]
#: transfer codings that the HTTP client itself removes
_FRAMING: Final = frozenset({"chunked", "identity"})


@dataclass(frozen=True, slots=True)
class AlreadyRead:
    """A response whose body was read already."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self.body


def without_compression_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of a response whose body is now uncompressed."""
    return [(name, value) for name, value in headers if name not in (_ENCODING, _TRANSFER)]


def _codings(response: UpstreamReply) -> list[str]:
    """Return the codings of a body, innermost first; transfer codings were applied last (RFC 9112, section 6.1)."""
    named = [pair for pair in response.headers if pair[0] in _CODING_HEADERS]
    if not named or named == _ONLY_CHUNKED:
        return []
    compressed = header(response.headers, _ENCODING).decode("latin-1").strip().lower()
    return [coding for coding in (compressed, *_transfer_codings(response)) if coding]


def _transfer_codings(response: UpstreamReply) -> list[str]:
    """Return the transfer codings that must still be removed from a body."""
    values = [value.decode("latin-1") for name, value in response.headers if name == _TRANSFER]
    codings = [coding.strip().lower() for value in values for coding in value.split(",")]
    return [coding for coding in codings if coding and coding not in _FRAMING]


def is_compressed(response: UpstreamReply) -> bool:
    """Return True if a response has one supported compression, although it was requested uncompressed."""
    codings = _codings(response)
    return len(codings) == 1 and codings[0] in SUPPORTED


def check_compression(response: UpstreamReply) -> None:
    """Refuse a response that is compressed in an unsupported way, because its usage cannot be read.

    Raises:
        UpstreamUnreadable: its compression is not supported.
    """
    codings = ", ".join(_codings(response))
    if codings and not is_compressed(response) and _COMPRESSIONS.search(codings.encode()):
        raise UpstreamUnreadable(
            f"The provider's response is compressed ({codings[:40]}) although it was requested uncompressed, so it "
            "cannot be metered. Turn compression off at the provider, or have it use gzip or deflate."
        )


def check_transfer_coding(response: UpstreamReply) -> None:
    """Refuse a body whose transfer coding cannot be removed; the client would not see the header that names it.

    Raises:
        UpstreamUnreadable: it has such a coding.
    """
    if _TRANSFER not in dict(response.headers) or is_compressed(response):
        return
    if codings := _transfer_codings(response):
        raise UpstreamUnreadable(
            f"The provider's response has the transfer coding {codings[0][:40]}, which was not requested. Only gzip "
            "and deflate are decoded, and only one of them."
        )


async def decompress(response: UpstreamReply) -> AsyncIterator[bytes]:
    """Yield the decompressed body as it arrives.

    Raises:
        UpstreamUnreadable: it does not have the compression that it names.
        UpstreamProtocolError: it is incomplete.
    """
    unpacker, empty = Unpacker(None), True
    try:
        async for piece in response.chunks():
            empty = False
            for part in unpacker.feed(piece):
                yield part
                # One chunk may expand a thousand times, and the consumer may never wait: let other tasks run.
                await asyncio.sleep(0)
    except (Corrupt, TooLarge):
        raise UpstreamUnreadable("The provider's response is compressed and cannot be decompressed.") from None
    if not (empty or unpacker.complete):
        raise UpstreamProtocolError("The provider's response is compressed and is incomplete.")


class Chained(PassedPieces):
    """A body of which some pieces were read already: first these, then the rest."""

    def __init__(self, first: Sequence[bytes], rest: AsyncIterator[bytes]) -> None:
        self._first = deque(first)
        self._rest = rest

    async def __anext__(self) -> bytes:
        return self._first.popleft() if self._first else await anext(self._rest)

    async def pass_to(self, take: TakePiece) -> bool:
        """Call `take` with each piece as it arrives. See `PassedPieces`."""
        while self._first:
            if not take(self._first.popleft()):
                return True
        return await pass_pieces(self._rest, take)


async def pass_pieces(pieces: AsyncIterator[bytes], take: TakePiece) -> bool:
    """Call `take` with each piece, see `PassedPieces.pass_to`. Pieces of another kind are awaited one by one."""
    if isinstance(pieces, PassedPieces):
        return await pieces.pass_to(take)
    async for piece in pieces:
        if not take(piece):
            return True
    return False
