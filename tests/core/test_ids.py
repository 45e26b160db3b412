from __future__ import annotations

from gateway.core.ids import call_id, first_id_at

NOISE = bytes(range(10))


def test_id_contains_time_and_noise() -> None:
    assert call_id(255, b"\x01\xff") == "0000000000ff01ff"


def test_ids_sort_by_time_whatever_their_noise() -> None:
    assert call_id(1_800_000_000_000, b"\xff" * 10) < call_id(1_800_000_000_001, b"\x00" * 10)


def test_first_id_of_a_time_separates_earlier_and_later_ids() -> None:
    border = first_id_at(1_800_000_000)
    assert call_id(1_799_999_999_999, b"\xff" * 10) < border <= call_id(1_800_000_000_000, b"\x00" * 10)


def test_a_time_before_the_epoch_sorts_before_every_id() -> None:
    assert first_id_at(-5.0) <= call_id(0, NOISE)
