from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.bounded import BoundedDict


def filled(limit: int, *keys: str) -> BoundedDict[str, int]:
    entries = BoundedDict[str, int](limit)
    for number, key in enumerate(keys):
        entries[key] = number
    return entries


def test_the_oldest_entry_is_dropped_when_there_are_too_many() -> None:
    assert [*filled(2, "a", "b", "c").items()] == [("b", 1), ("c", 2)]


def test_writing_a_key_again_makes_it_the_newest() -> None:
    assert [*filled(2, "a", "b", "a", "c").items()] == [("a", 2), ("c", 3)]


def test_reading_a_key_does_not_keep_it() -> None:
    entries = filled(2, "a", "b")
    assert (entries["a"], entries.get("a"), "a" in entries) == (0, 0, True)
    entries["c"] = 2
    assert [*entries] == ["b", "c"]


def test_a_removed_entry_makes_room() -> None:
    entries = filled(2, "a", "b")
    del entries["b"]
    entries["c"] = 2
    assert [*entries] == ["a", "c"]


def test_every_way_of_writing_is_bounded() -> None:
    entries = filled(2)
    entries.update(a=1, b=2, c=3)
    entries |= {"d": 4}
    assert entries.setdefault("e", 5) == entries.setdefault("e", 6) == 5
    assert [*entries] == ["d", "e"]


@given(st.integers(0, 5), st.lists(st.integers(0, 9)))
def test_the_newest_distinct_keys_are_kept(limit: int, keys: list[int]) -> None:
    entries = BoundedDict[int, int](limit)
    for key in keys:
        entries[key] = -key
    newest = [*dict.fromkeys(reversed(keys))][:limit]
    assert [*entries.items()] == [(key, -key) for key in reversed(newest)]
