"""A block is cancelled after a number of seconds."""

from __future__ import annotations

import asyncio

import pytest

from gateway.call.timeout import max_wait
from gateway.core.errors import UpstreamTimeout
from gateway.core.record import TOO_SLOW
from tests.support.timing import LIMIT_S


async def test_a_slow_block_is_cancelled_and_raises_a_timeout() -> None:
    reasons: list[object] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            reasons.append(error.args)
            raise

    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(UpstreamTimeout):
            async with max_wait(0.01):
                await waits()
        await asyncio.sleep(0)
    assert reasons == [(TOO_SLOW,)]


async def test_a_block_that_ends_in_time_is_not_cancelled_later() -> None:
    async with asyncio.timeout(LIMIT_S):
        async with max_wait(0.01):
            pass
        await asyncio.sleep(0.03)


@pytest.mark.parametrize("message", [None, "cut_at_shutdown"])
async def test_a_cancel_from_outside_is_raised_unchanged(message: str | None) -> None:
    began = asyncio.Event()

    async def waits() -> None:
        async with max_wait(LIMIT_S):
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(waits())
    async with asyncio.timeout(LIMIT_S):
        await began.wait()
        task.cancel(message)
        with pytest.raises(asyncio.CancelledError) as raised:
            await task
    assert raised.value.args == ((message,) if message else ())
