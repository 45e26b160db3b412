from __future__ import annotations

import pytest

from gateway.core.trimming.deadline import Deadline, DeadlinePassed, never


def test_the_clock_is_read_only_now_and_then() -> None:
    asked: list[int] = []

    def expired() -> bool:
        asked.append(1)
        return False

    assert list(Deadline(expired).over(range(1000))) == list(range(1000))
    assert 10 <= len(asked) <= 100


def test_large_pieces_count_for_more() -> None:
    with pytest.raises(DeadlinePassed):
        Deadline(lambda: True).tick(1000)
    Deadline(lambda: True).tick()


def test_without_a_clock_nothing_is_interrupted() -> None:
    assert list(Deadline(never).over(range(10_000))) == list(range(10_000))
    assert list(Deadline().over(range(10_000))) == list(range(10_000))
