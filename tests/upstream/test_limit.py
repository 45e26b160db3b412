"""So many at once, in the order in which they came; none is lost, whoever gives up when."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream.limit import ConnectionLimit


async def waiting(slots: ConnectionLimit) -> asyncio.Task[None]:
    """One who waits for a turn by now."""
    task = asyncio.ensure_future(slots.turn())
    await asyncio.sleep(0)
    return task


async def test_no_more_are_taken_than_there_are() -> None:
    slots = ConnectionLimit(2)
    assert [slots.take() for _ in range(3)] == [True, True, False]
    slots.give()
    assert [slots.take(), slots.take()] == [True, False]


async def test_who_came_first_has_the_first_turn_and_nobody_goes_before_those_who_wait() -> None:
    slots = ConnectionLimit(1)
    assert slots.take()
    first, second = await waiting(slots), await waiting(slots)
    slots.give()
    assert not slots.take()
    await first
    assert not second.done()
    slots.give()
    await second
    slots.give()
    assert slots.take()


async def test_two_that_come_back_at_once_are_for_two_who_wait() -> None:
    slots = ConnectionLimit(2)
    assert slots.take()
    assert slots.take()
    first, second = await waiting(slots), await waiting(slots)
    slots.give()
    slots.give()
    assert not slots.take()
    await asyncio.gather(first, second)


async def test_who_gives_up_leaves_nothing_behind_and_keeps_nobody_waiting() -> None:
    slots = ConnectionLimit(1)
    assert slots.take()
    first, second = await waiting(slots), await waiting(slots)
    first.cancel()
    slots.give()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not slots._waiting
    slots.give()
    assert slots.take()


async def test_a_turn_that_comes_as_somebody_gives_up_is_the_next_ones() -> None:
    slots = ConnectionLimit(1)
    assert slots.take()
    first, second = await waiting(slots), await waiting(slots)
    slots.give()
    first.cancel()
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    slots.give()
    assert slots.take()
