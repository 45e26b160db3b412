"""Read a request body with limits on its size, memory and time."""

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

#: number of bodies of the largest size that fit into memory at the same time; max_concurrency limits smaller ones
BODIES_AT_ONCE: Final = 16
#: seconds for which the rest of a refused body is read and discarded
_DISCARD_S: Final = 10.0
#: A body may take this many times `body_timeout_s`, and one more second for each `_LEAST_RATE` bytes. Otherwise a very
#: slow body would keep its place among the running calls for days.
_SILENCE_FACTOR: Final = 4
_LEAST_RATE: Final = 512
#: encoding that `core` does not support, because `core` uses only the standard library
_ZSTD: Final = "zstd"
#: digits of a content length that are read; a longer number is over every limit anyway
_LENGTH_DIGITS: Final = 18

Receive = Callable[[], Awaitable[Any]]


class Disconnected(Exception):
    """The client left before its request was complete."""


class BodyMemory:
    """The memory of one request's body, taken from a shared pool."""

    __slots__ = ("_pool", "_taken")

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._taken = 0

    def grow(self, size: int) -> None:
        """Take more memory from the pool.

        Raises:
            Overloaded: the pool is exhausted.
        """
        self.resize(self._taken + size)

    def resize(self, size: int) -> None:
        """Hold exactly this many bytes.

        Raises:
            Overloaded: the pool has too few bytes; what was held before is kept.
        """
        more = size - self._taken
        if more > 0 and self._pool.used + more > self._pool.limit:
            raise Overloaded(
                f"Running requests use {self._pool.used / 2**20:.0f} MiB of {self._pool.limit / 2**20:.0f} MiB for "
                "request bodies. Try again shortly."
            )
        self._pool.used += more
        self._taken = size

    def release(self) -> None:
        """Return all bytes to the pool."""
        self.resize(0)


class MemoryPool:
    """The memory for the bodies of all running requests together, in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


async def read_body(
    receive: Receive, headers: Headers, limit: int, silence_s: float, memory: BodyMemory
) -> tuple[bytes, bool]:
    """Return the body, decompressed if needed, and True if it was compressed.

    The memory for an announced length is taken before the body is read. If the body is refused, its memory is released
    before the rest of the body is discarded.

    Raises:
        Overloaded: the pool has too little memory.
        PayloadTooLarge: the body has more than `limit` bytes, as sent or decompressed.
        RequestTimeout: nothing arrived for `silence_s` seconds, or the body arrived too slowly.
        InvalidRequest: the body cannot be decompressed.
        Disconnected: the client left.
    """
    announced = _announced_length(headers)
    try:
        if announced > limit:
            raise _too_large(limit)
        memory.resize(announced)
    except (Overloaded, PayloadTooLarge):
        await discard(receive, headers)
        raise
    try:
        body = await _read(receive, limit, silence_s, memory, announced)
        encoding = header(headers, b"content-encoding").strip().lower().decode("latin-1")
        if not encoding or encoding == "identity" or not body:
            return body, False
        decompressed = await _decompress(body, encoding, limit)
        memory.resize(len(decompressed))
    except BaseException:
        memory.release()
        raise
    return decompressed, True


async def _read(receive: Receive, limit: int, silence_s: float, memory: BodyMemory, announced: int) -> bytes:
    loop = asyncio.get_running_loop()
    until = loop.time() + _SILENCE_FACTOR * silence_s
    # The system allocates zero pages only when they are written. The buffer becomes the body without a copy.
    buffer, size, more = io.BytesIO(bytes(announced)), 0, True
    while more:
        message = await _next(receive, silence_s, until + size / _LEAST_RATE - loop.time())
        piece: bytes = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(piece)
        try:
            # A slow body holds no memory for bytes that may never arrive.
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
    """Read and discard the rest of a body. Most clients send the whole body before they read the response.

    If the connection were closed earlier, they would report a broken connection and retry. A client that waits for 100
    Continue has not started to send the body.
    """
    if header(headers, b"expect"):
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            message = await receive()
            while message["type"] != "http.disconnect" and message.get("more_body"):
                message = await receive()


async def _next(receive: Receive, silence_s: float, left_s: float) -> Any:
    """Return the next part of the body. `left_s`: seconds until the whole body is too slow."""
    try:
        async with asyncio.timeout(min(silence_s, left_s)):
            message = await receive()
    except TimeoutError:
        what = (
            f"stopped for {silence_s:g} s"
            if silence_s <= left_s
            else f"arrived at under {_LEAST_RATE} bytes per second"
        )
        raise RequestTimeout(f"The request body {what} (server.body_timeout_s).") from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def _announced_length(headers: Headers) -> int:
    """Return the announced length of the body in bytes, or 0 if none is announced."""
    # `int` raises an error for thousands of digits.
    announced = header(headers, b"content-length").lstrip(b"0")[: _LENGTH_DIGITS + 1]
    return int(announced) if announced.isdigit() else 0


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body is over the limit of {limit / 2**20:g} MiB (server.max_body_mb). Send less, or raise it."
    )


async def _decompress(body: bytes, encoding: str, limit: int) -> bytes:
    if encoding not in SUPPORTED and encoding != _ZSTD:
        raise InvalidRequest(
            f'The content-encoding "{encoding[:40]}" is not supported. Send the body uncompressed, or as gzip or zstd.'
        )
    try:
        return await asyncio.to_thread(unpack_zstd if encoding == _ZSTD else unpack, body, limit)
    except TooLarge:
        raise _too_large(limit) from None
    except ModuleNotFoundError:
        raise InvalidRequest(
            "This gateway cannot read zstd, because the package zstandard is not installed. Install it there, or send "
            "the body uncompressed or as gzip."
        ) from None
    except Corrupt:
        raise InvalidRequest(f"The body is not valid {encoding[:40]}, which its content-encoding names.") from None
