"""Bodies of answers, in pieces."""

from __future__ import annotations

import asyncio
import gzip

from gateway.upstream.pieces import AlreadyRead, unpacked


async def test_others_have_their_turn_while_much_comes_of_a_small_piece() -> None:
    turns, size = 0, 64 * 2**20

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    answer = AlreadyRead(200, [(b"content-encoding", b"gzip")], gzip.compress(bytes(size)))
    parts = [len(part) async for part in unpacked(answer)]
    other.cancel()
    assert sum(parts) == size
    assert turns >= len(parts) > 100
