"""Response bodies, in chunks."""

from __future__ import annotations

import gzip

from gateway.upstream.body import AlreadyRead, decompress
from tests.support.timing import count_loop_turns


async def test_other_tasks_run_while_a_small_chunk_expands() -> None:
    size = 64 * 2**20
    answer = AlreadyRead(200, [(b"content-encoding", b"gzip")], gzip.compress(bytes(size)))
    async with count_loop_turns() as turns:
        parts = [len(part) async for part in decompress(answer)]
        made = turns()
    assert sum(parts) == size
    assert made >= len(parts) > 100
