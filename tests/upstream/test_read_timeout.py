"""One timer a stream: it notices a wait that lasts too long, and only that."""

from __future__ import annotations

import asyncio
import socket
import time

from gateway.upstream.read_timeout import ReadTimeout
from tests.support.timing import run_without_waiting


def test_a_wait_that_lasts_too_long_is_noticed_once() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        silence.begin()
        await asyncio.sleep(49)
        assert expired == []
        await asyncio.sleep(2)
        assert expired == [1]
        await asyncio.sleep(1_000)
        silence.stop()
        assert expired == [1]

    run_without_waiting(wait())


def test_short_waits_and_the_time_between_them_do_not_count() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        for _ in range(6):
            silence.begin()
            await asyncio.sleep(40)
            silence.end()
            await asyncio.sleep(70)
        silence.stop()
        assert expired == []

    run_without_waiting(wait())


def test_what_came_while_the_process_stood_still_ends_the_wait() -> None:
    async def wait() -> None:
        expired: list[int] = []
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop.add_reader(ours, heard.set)
            silence = ReadTimeout(0.01, lambda: expired.append(1))
            silence.begin()
            theirs.send(b"an answer")
            time.sleep(0.3)  # nothing runs meanwhile
            await heard.wait()
            silence.end()
            loop.remove_reader(ours)
            await asyncio.sleep(0.3)
            silence.stop()
        assert expired == []

    asyncio.run(wait())


def test_nothing_is_noticed_after_the_stop() -> None:
    async def wait() -> None:
        expired: list[int] = []
        silence = ReadTimeout(50, lambda: expired.append(1))
        silence.begin()
        silence.stop()
        await asyncio.sleep(1_000)
        assert expired == []

    run_without_waiting(wait())
