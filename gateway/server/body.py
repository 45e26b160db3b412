"""Reading a request body: bounded in size as sent and once unpacked, bounded in silence, noticed when given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.core.encoding import SUPPORTED, Corrupt, TooLarge, unpack
from gateway.core.errors import InvalidRequest, PayloadTooLarge, RequestTimeout
from gateway.core.forwarding import header
from gateway.core.ports import Headers

Receive = Callable[[], Awaitable[Any]]


class Disconnected(Exception):
    """The client left before its request was complete."""


async def read_body(receive: Receive, headers: Headers, limit: int, silence_s: float) -> tuple[bytes, bool]:
    """The body, unpacked where it was sent packed, and whether it was.

    Raises:
        PayloadTooLarge: over `limit` bytes, as sent or unpacked.
        RequestTimeout: nothing came for `silence_s` seconds.
        InvalidRequest: packed in a way that cannot be read.
        Disconnected: the client left.
    """
    _refuse_announced(headers, limit)
    message = await _next(receive, silence_s)
    body = message.get("body", b"")
    if message.get("more_body"):
        body = await _rest(receive, body, limit, silence_s)
    elif len(body) > limit:
        raise _too_large(limit)
    packing = header(headers, b"content-encoding").strip().lower().decode("latin-1")
    if not packing or packing == "identity" or not body:
        return body, False
    return await _unpack(body, packing, limit), True


async def _rest(receive: Receive, first: bytes, limit: int, silence_s: float) -> bytes:
    pieces, size = [first], len(first)
    while True:
        message = await _next(receive, silence_s)
        piece = message.get("body", b"")
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return b"".join(pieces)


async def _next(receive: Receive, silence_s: float) -> Any:
    try:
        async with asyncio.timeout(silence_s):
            message = await receive()
    except TimeoutError:
        raise RequestTimeout(f"The request body stopped for {silence_s:g} s (server.body_timeout_s).") from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def _refuse_announced(headers: Headers, limit: int) -> None:
    announced = header(headers, b"content-length")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request body is over {limit / 2**20:g} MiB (server.max_body_mb). Send less, or raise the limit."
    )


async def _unpack(body: bytes, packing: str, limit: int) -> bytes:
    if packing not in SUPPORTED:
        raise InvalidRequest(
            f'The content-encoding "{packing[:40]}" is not supported. Send the body plain, or as gzip.'
        )
    try:
        return await asyncio.to_thread(unpack, body, limit)
    except TooLarge:
        raise _too_large(limit) from None
    except Corrupt:
        raise InvalidRequest(f"The body is not valid {packing[:40]}, as its content-encoding says.") from None
