"""Bodies of answers, in pieces."""

from __future__ import annotations

import gzip

from gateway.upstream.body import AlreadyRead, decompressed
from tests.support.timing import count_loop_turns


async def test_others_have_their_turn_while_much_comes_of_a_small_piece() -> None:
    size = 64 * 2**20
    answer = AlreadyRead(200, [(b"content-encoding", b"gzip")], gzip.compress(bytes(size)))
    async with count_loop_turns() as turns:
        parts = [len(part) async for part in decompressed(answer)]
        made = turns()
    assert sum(parts) == size
    assert made >= len(parts) > 100
