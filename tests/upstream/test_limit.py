"""A limit on concurrent calls: first come, first served, and no place is lost when a call gives up."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream.limit import ConnectionLimit


async def waiting(limit: ConnectionLimit) -> asyncio.Task[None]:
    """Start a task that waits for a place."""
    task = asyncio.ensure_future(limit.take())
    await asyncio.sleep(0)
    return task


async def test_no_more_places_are_taken_than_exist() -> None:
    limit = ConnectionLimit(2)
    assert [limit.try_take() for _ in range(3)] == [True, True, False]
    limit.give_back()
    assert [limit.try_take(), limit.try_take()] == [True, False]


async def test_first_waiting_call_is_first_and_no_new_call_overtakes() -> None:
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


async def test_two_returned_places_go_to_two_waiting_calls() -> None:
    limit = ConnectionLimit(2)
    assert limit.try_take()
    assert limit.try_take()
    first, second = await waiting(limit), await waiting(limit)
    limit.give_back()
    limit.give_back()
    assert not limit.try_take()
    await asyncio.gather(first, second)


async def test_cancelled_waiting_call_does_not_block_others() -> None:
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


async def test_place_given_during_cancellation_goes_to_the_next_call() -> None:
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
