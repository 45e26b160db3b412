"""So many at once, in the order in which they came; none is lost, whoever gives up when."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream.limit import ConnectionLimit


async def waiting(limit: ConnectionLimit) -> asyncio.Task[None]:
    """One who waits for a turn by now."""
    task = asyncio.ensure_future(limit.take())
    await asyncio.sleep(0)
    return task


async def test_no_more_are_taken_than_there_are() -> None:
    limit = ConnectionLimit(2)
    assert [limit.try_take() for _ in range(3)] == [True, True, False]
    limit.give_back()
    assert [limit.try_take(), limit.try_take()] == [True, False]


async def test_who_came_first_has_the_first_turn_and_nobody_goes_before_those_who_wait() -> None:
    limit = ConnectionLimit(1)
    assert limit.try_take()
    first, second = await waiting(limit), await waiting(limit)
    limit.give_back()
    assert not limit.try_take()
    await first
    assert not second.done()
    limit.give_back()
    await second
    limit.give_back()
    assert limit.try_take()


async def test_two_that_come_back_at_once_are_for_two_who_wait() -> None:
    limit = ConnectionLimit(2)
    assert limit.try_take()
    assert limit.try_take()
    first, second = await waiting(limit), await waiting(limit)
    limit.give_back()
    limit.give_back()
    assert not limit.try_take()
    await asyncio.gather(first, second)


async def test_who_gives_up_leaves_nothing_behind_and_keeps_nobody_waiting() -> None:
    limit = ConnectionLimit(1)
    assert limit.try_take()
    first, second = await waiting(limit), await waiting(limit)
    first.cancel()
    limit.give_back()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not limit._waiting
    limit.give_back()
    assert limit.try_take()


async def test_a_turn_that_comes_as_somebody_gives_up_is_the_next_ones() -> None:
    limit = ConnectionLimit(1)
    assert limit.try_take()
    first, second = await waiting(limit), await waiting(limit)
    limit.give_back()
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    limit.give_back()
    assert limit.try_take()
