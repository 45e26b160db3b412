"""One timer a stream: it notices a wait that lasts too long, and only that."""

from __future__ import annotations

import asyncio

from gateway.upstream.silence import Silence
from tests.support.timing import eventually


async def test_a_wait_that_lasts_too_long_is_noticed_once() -> None:
    expired: list[int] = []
    silence = Silence(0.05, lambda: expired.append(1))
    silence.begin()
    await eventually(lambda: expired)
    await asyncio.sleep(0.1)
    silence.stop()
    assert expired == [1]


async def test_short_waits_and_the_time_between_them_do_not_count() -> None:
    expired: list[int] = []
    silence = Silence(0.8, lambda: expired.append(1))
    for _ in range(6):
        silence.begin()
        await asyncio.sleep(0.15)
        silence.end()
        await asyncio.sleep(0.05)
    silence.stop()
    assert expired == []


async def test_nothing_is_noticed_after_the_stop() -> None:
    expired: list[int] = []
    silence = Silence(0.02, lambda: expired.append(1))
    silence.begin()
    silence.stop()
    await asyncio.sleep(0.08)
    assert expired == []
