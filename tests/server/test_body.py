from __future__ import annotations

import asyncio
import gzip
import sys
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zstandard

from gateway.core.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from gateway.server.body import BodyMemory, Disconnected, MemoryPool, read_body
from tests.support.timing import in_time

LIMIT = 1000


def receiving(*pieces: bytes, then: str | None = None) -> Callable[[], Awaitable[Any]]:
    """Return a `receive` that returns these parts, and then ends the body, disconnects or waits for ever."""
    messages: list[dict[str, object]] = [
        {"type": "http.request", "body": piece, "more_body": then is not None or index < len(pieces) - 1}
        for index, piece in enumerate(pieces)
    ]
    if then == "disconnect":
        messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(60)
        return None

    return receive


async def read(
    *pieces: bytes, headers: tuple[tuple[bytes, bytes], ...] = (), then: str | None = None, silence: float = 30
) -> tuple[bytes, bool]:
    return await read_body(
        receiving(*pieces, then=then), list(headers), LIMIT, silence, BodyMemory(MemoryPool(1 << 30))
    )


async def test_body_in_parts_is_joined() -> None:
    assert await read(b"a", b"", b"bc") == (b"abc", False)
    assert await read(b"") == (b"", False)


@pytest.mark.parametrize("pieces", [(b"x" * 1001,), (b"x" * 600, b"x" * 401), (b"x" * 600, b"x" * 600, b"x")])
async def test_a_body_over_the_limit_is_refused(pieces: tuple[bytes, ...]) -> None:
    with pytest.raises(PayloadTooLarge) as error:
        await read(*pieces)
    assert "max_body_mb" in error.value.message


async def test_body_of_exactly_the_limit_is_accepted() -> None:
    assert (await read(b"x" * 600, b"x" * 400))[0] == b"x" * 1000


async def test_announced_size_over_the_limit_is_refused_even_if_less_arrives() -> None:
    with pytest.raises(PayloadTooLarge):
        await read(b"x", headers=((b"content-length", b"1001"),))


async def test_timeout_applies_to_silence_and_not_to_the_whole_body() -> None:
    with in_time(at_least=0.05), pytest.raises(RequestTimeout) as error:
        await read(b"x", then="silence", silence=0.05)
    assert error.value.status == 400


@pytest.mark.parametrize(("drop", "is_taken"), [(b"x", False), (b"x" * 512, True)])
async def test_very_slow_body_is_refused(drop: bytes, is_taken: bool) -> None:
    original = 0

    async def receive() -> dict[str, object]:
        nonlocal original
        await asyncio.sleep(0.02)
        original += 1
        return {"type": "http.request", "body": drop, "more_body": original < 70}

    reading = read_body(receive, [], 1 << 20, 0.25, BodyMemory(MemoryPool(1 << 30)))
    if is_taken:
        assert len((await reading)[0]) == 70 * len(drop)
    else:
        with pytest.raises(RequestTimeout, match="under 512 bytes per second"):
            await reading


async def test_a_client_that_leaves_is_noticed() -> None:
    with pytest.raises(Disconnected):
        await read(b"x", then="disconnect")


@pytest.mark.parametrize("encoding", [b"gzip", b"x-gzip", b" GZIP "])
async def test_gzip_is_decompressed(encoding: bytes) -> None:
    compressed = gzip.compress(b"hello")
    assert await read(compressed[:5], compressed[5:], headers=((b"content-encoding", encoding),)) == (b"hello", True)


async def test_both_kinds_of_deflate_are_decompressed() -> None:
    raw = zlib.compressobj(wbits=-15)
    for compressed in (zlib.compress(b"hello"), raw.compress(b"hello") + raw.flush()):
        assert await read(compressed, headers=((b"content-encoding", b"deflate"),)) == (b"hello", True)


async def test_zstd_is_decompressed_with_the_same_limit() -> None:
    headers = ((b"content-encoding", b"zstd"),)
    compressed = zstandard.compress(b"x" * LIMIT)
    assert await read(compressed[:5], compressed[5:], headers=headers) == (b"x" * LIMIT, True)
    with pytest.raises(PayloadTooLarge):
        await read(zstandard.compress(b"x" * (LIMIT + 1)), headers=headers)
    with pytest.raises(InvalidRequest, match="not valid zstd"):
        await read(b"hello", headers=headers)


async def test_zstd_without_its_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(InvalidRequest, match="the package zstandard is not installed"):
        await read(zstandard.compress(b"hello"), headers=((b"content-encoding", b"zstd"),))


async def test_identity_encoding_is_unchanged() -> None:
    assert await read(b"hello", headers=((b"content-encoding", b"identity"),)) == (b"hello", False)


async def test_body_that_decompresses_to_more_than_the_limit_is_refused() -> None:
    with pytest.raises(PayloadTooLarge):
        await read(gzip.compress(b"x" * 1001), headers=((b"content-encoding", b"gzip"),))
    assert await read(gzip.compress(b"x" * 1000), headers=((b"content-encoding", b"gzip"),)) == (b"x" * 1000, True)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [(b"br", b"x"), (b"gzip", b"x"), (b"gzip", gzip.compress(b"hello", mtime=0)[:-1]), (b"\xff", b"x")],
)
async def test_body_that_cannot_be_decompressed_is_refused(encoding: bytes, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        await read(body, headers=((b"content-encoding", encoding),))


async def test_all_bodies_share_a_memory_limit_and_release_their_memory() -> None:
    pool = MemoryPool(100)
    first, second = BodyMemory(pool), BodyMemory(pool)
    await read_body(receiving(b"x" * 60), [], LIMIT, 1, first)
    with pytest.raises(Overloaded, match="Try again"):
        await read_body(receiving(b"x" * 30, b"x" * 30), [], LIMIT, 1, second)
    second.release()
    first.release()
    assert pool.used == 0
    await read_body(receiving(b"x" * 60), [], LIMIT, 1, second)
    assert pool.used == 60


async def test_cancelled_request_is_not_treated_as_a_timeout() -> None:
    reading = asyncio.ensure_future(read(b"x", then="silence", silence=0.05))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_cancel_at_the_moment_of_the_timeout_is_a_cancel() -> None:
    entered = asyncio.Event()

    async def receive() -> None:
        entered.set()
        await asyncio.sleep(60)

    reading = asyncio.ensure_future(read_body(receive, [], LIMIT, 0.01, BodyMemory(MemoryPool(1 << 30))))
    await entered.wait()
    asyncio.get_running_loop().call_later(0, time.sleep, 0.05)  # the timeout expires before any task runs
    asyncio.get_running_loop().call_later(0.01, reading.cancel)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_after_a_timeout_the_task_can_still_wait() -> None:
    with pytest.raises(RequestTimeout):
        await read(b"x", then="silence", silence=0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0.001)


async def test_announced_body_takes_its_memory_early_but_not_for_ever() -> None:
    pool, seen = MemoryPool(60_000), list[int]()

    async def receive() -> dict[str, object]:
        seen.append(pool.used)
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x" * 1000, "more_body": len(seen) < 30}

    memory = BodyMemory(pool)
    body, _ = await read_body(receive, [(b"content-length", b"30000")], 1 << 20, 0.1, memory)
    assert len(body) == 30_000
    # After four times the timeout, it holds only the memory of the received bytes.
    assert (seen[0], seen[-1]) == (30_000, 29_000)
    assert pool.used == 30_000


async def test_body_without_memory_is_refused_early_and_takes_none() -> None:
    pool = MemoryPool(100)
    first = BodyMemory(pool)
    first.grow(60)
    left = receiving(b"x" * 50)
    with pytest.raises(Overloaded):
        await read_body(left, [(b"content-length", b"50")], LIMIT, 1, BodyMemory(pool))
    assert pool.used == 60


@pytest.mark.parametrize(
    ("pieces", "headers", "then"),
    [
        ((b"x" * 10,), (), "disconnect"),
        ((b"x" * 10,), ((b"content-length", b"50"),), "disconnect"),
        ((b"x" * 10,), ((b"content-length", b"50"),), "silence"),
        ((b"x" * 10,), ((b"content-encoding", b"gzip"),), None),
        ((b"x" * 90, b"x" * 20), (), None),
    ],
)
async def test_body_that_is_not_read_releases_its_memory(
    pieces: tuple[bytes, ...], headers: tuple[tuple[bytes, bytes], ...], then: str | None
) -> None:
    pool = MemoryPool(100)
    with pytest.raises((Disconnected, RequestTimeout, InvalidRequest, Overloaded)):
        await read_body(receiving(*pieces, then=then), list(headers), LIMIT, 0.05, BodyMemory(pool))
    assert pool.used == 0


async def test_compressed_body_takes_the_memory_of_its_decompressed_size() -> None:
    pool, compressed = MemoryPool(1000), gzip.compress(b"hello")
    await read_body(receiving(compressed), [(b"content-encoding", b"gzip")], LIMIT, 1, BodyMemory(pool))
    assert pool.used == 5
