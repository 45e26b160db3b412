"""Read a request body, bounded in size, memory and time."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from gateway.core.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from gateway.core.http.compression import SUPPORTED, Corrupt, TooLarge, unpack
from gateway.core.http.headers import Headers, header
from gateway.server.zstd import unpack_zstd

#: largest bodies that may be held at the same time; smaller ones are only bounded by max_concurrency
BODIES_AT_ONCE: Final = 16
#: seconds for which a body that is too large is read and thrown away
_DISCARD_S: Final = 10.0
#: How many of the longest silences a body may take, and a second for each so many bytes: one that comes in drops would
#: keep its place among the calls under way for days.
_SILENCES: Final = 4
_LEAST_RATE: Final = 512
#: how a body is packed that is not unpacked in `core`, which knows the standard library only
_ZSTD: Final = "zstd"
#: digits of a content length that are read: one with more is over every limit, and stays so
_MOST_DIGITS: Final = 18

Receive = Callable[[], Awaitable[Any]]


class Disconnected(Exception):
    """The client left before its request was complete."""


class BodyMemory:
    """The memory that one request's body takes of what all bodies together may take."""

    __slots__ = ("_pool", "_taken")

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._taken = 0

    def grow(self, size: int) -> None:
        """Take more.

        Raises:
            Overloaded: there is no more.
        """
        self.resize(self._taken + size)

    def resize(self, size: int) -> None:
        """Hold this many bytes, whatever was held before.

        Raises:
            Overloaded: there are not as many; what was held before is kept.
        """
        more = size - self._taken
        if more > 0 and self._pool.used + more > self._pool.limit:
            raise Overloaded(
                f"Requests under way hold {self._pool.used / 2**20:.0f} MiB of {self._pool.limit / 2**20:.0f} MiB. "
                "Try again shortly."
            )
        self._pool.used += more
        self._taken = size

    def release(self) -> None:
        """Give all of it back."""
        self.resize(0)


class MemoryPool:
    """What the bodies of all requests under way may take together, in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


async def read_body(
    receive: Receive, headers: Headers, limit: int, silence_s: float, memory: BodyMemory
) -> tuple[bytes, bool]:
    """Return the body, decompressed if the client compressed it, and whether it did.

    A body that announces its length takes its memory before it is read, so that what is read can also be kept. If the
    body is refused, its memory is released before the rest of it is discarded.

    Raises:
        Overloaded: all bodies together take too much.
        PayloadTooLarge: over `limit` bytes, as sent or unpacked.
        RequestTimeout: nothing came for `silence_s` seconds, or next to nothing for longer.
        InvalidRequest: packed in a way that cannot be read.
        Disconnected: the client left.
    """
    announced = _announced(headers)
    try:
        if announced > limit:
            raise _too_large(limit)
        memory.resize(announced)
    except (Overloaded, PayloadTooLarge):
        await discard(receive, headers)
        raise
    try:
        body = await _read(receive, limit, silence_s, memory, announced)
        packing = header(headers, b"content-encoding").strip().lower().decode("latin-1")
        if not packing or packing == "identity" or not body:
            return body, False
        decompressed = await _unpack(body, packing, limit)
        memory.resize(len(decompressed))
    except BaseException:
        memory.release()
        raise
    return decompressed, True


async def _read(receive: Receive, limit: int, silence_s: float, memory: BodyMemory, announced: int) -> bytes:
    loop = asyncio.get_running_loop()
    until = loop.time() + _SILENCES * silence_s
    # Zero pages cost nothing before they are written. The buffer becomes the body without being copied.
    buffer, size, more = io.BytesIO(bytes(announced)), 0, True
    while more:
        message = await _next(receive, silence_s, until + size / _LEAST_RATE - loop.time())
        piece: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        try:
            # A body that comes slowly keeps no room for what may never come.
            memory.resize(max(size, announced) if loop.time() < until else size)
            if size > limit:
                raise _too_large(limit)
        except (Overloaded, PayloadTooLarge):
            buffer.close()
            memory.release()
            if more:
                await discard(receive, ())
            raise
        if size == len(piece) and not more:
            return piece
        buffer.write(piece)
    buffer.truncate()
    memory.resize(size)
    return buffer.getvalue()


async def discard(receive: Receive, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Read on without keeping anything: most clients send their body to its end before they look at the answer.

    Cut off, they would report a broken connection and try again. One that waits for 100 Continue has not begun.
    """
    if header(headers, b"expect"):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            message = await receive()
            while message["type"] != "http.disconnect" and message.get("more_body"):
                message = await receive()


async def _next(receive: Receive, silence_s: float, left_s: float) -> Any:
    """The next piece. `left_s`: seconds until the body has come too slowly."""
    try:
        async with asyncio.timeout(min(silence_s, left_s)):
            message = await receive()
    except TimeoutError:
        what = f"stopped for {silence_s:g} s" if silence_s <= left_s else f"came at under {_LEAST_RATE} bytes a second"
        raise RequestTimeout(f"The request body {what} (server.body_timeout_s).") from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def _announced(headers: Headers) -> int:
    """Return the bytes that a body is said to have; 0 if that is not said."""
    # `int` refuses thousands of digits.
    announced = header(headers, b"content-length").lstrip(b"0")[: _MOST_DIGITS + 1]
    return int(announced) if announced.isdigit() else 0


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body is over {limit / 2**20:g} MiB (server.max_body_mb). Send less, or raise the limit."
    )


async def _unpack(body: bytes, packing: str, limit: int) -> bytes:
    if packing not in SUPPORTED and packing != _ZSTD:
        raise InvalidRequest(
            f'The content-encoding "{packing[:40]}" is not supported. Send the body plain, or as gzip or zstd.'
        )
    try:
        return await asyncio.to_thread(unpack_zstd if packing == _ZSTD else unpack, body, limit)
    except TooLarge:
        raise _too_large(limit) from None
    except Corrupt:
        raise InvalidRequest(f"The body is not valid {packing[:40]}, as its content-encoding says.") from None
