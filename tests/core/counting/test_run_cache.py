from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.counting.cache import CountCache
from gateway.core.counting.run_cache import RunCache


class Asked:
    """Compute joined keys through a run cache, and record how many messages were known each time."""

    def __init__(self, limit: int = 2**20) -> None:
        self.cache = CountCache(limit)
        self.runs = RunCache(self.cache)
        self.known: list[int] = []

    def joined(self, text: str, kind: str = "joined") -> bytes:
        """Return the joined keys; each letter is one message."""
        keys = tuple(letter.encode() for letter in text)

        def extend(start: int, known: bytes | None) -> bytes:
            assert (known or b"") == b"".join(keys[:start])
            self.known.append(start)
            return (known or b"") + b"".join(keys[start:])

        return self.runs.get_extended(kind, keys, extend, len)


def test_longer_conversation_extends_the_longest_cached_run() -> None:
    asked = Asked()
    assert [asked.joined(text) for text in ("abcde", "abcdeX", "abcdeXYZ")] == [b"abcde", b"abcdeX", b"abcdeXYZ"]
    assert asked.known == [0, 5, 6]


def test_same_run_is_not_computed_again() -> None:
    asked = Asked()
    assert asked.joined("abcde") is asked.joined("abcde")
    assert asked.known == [0]


def test_runs_with_the_same_first_messages_are_cached_together() -> None:
    asked = Asked()
    for text in ("abcd1", "abcd2", "abcd1x", "abcd2x", "abcd3x"):
        asked.joined(text)
    assert asked.known == [0, 0, 5, 5, 0]


def test_each_kind_has_separate_values() -> None:
    asked = Asked()
    asked.joined("abcde")
    asked.joined("abcdef", "other")
    assert asked.known == [0, 0]


def test_short_run_is_not_cached() -> None:
    asked = Asked()
    asked.joined("abc")
    assert (asked.joined("abc"), asked.known, asked.cache.size_bytes) == (b"abc", [0, 0], 0)


def test_longer_run_replaces_the_shorter_one_and_the_number_is_limited() -> None:
    asked = Asked(20_000)
    for end in range(4, 60):
        asked.joined("a" * end)
    one = asked.cache.size_bytes
    assert len(asked.cache) == 1
    for number in range(200):
        asked.joined(f"{number:05}".ljust(50, "x"))
    assert one < asked.cache.size_bytes <= 20_000
    alike = Asked()
    for number in range(100, 130):
        alike.joined(f"same{number}")
    size = alike.cache.size_bytes
    alike.joined("same999")
    assert alike.cache.size_bytes == size


def test_failed_computation_is_not_cached() -> None:
    runs = RunCache(CountCache())

    def extend(start: int, known: int | None) -> int:
        raise ValueError((start, known))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"\(0, None\)"):
            runs.get_extended("kind", (b"a", b"b", b"c", b"d"), extend, lambda _: 0)


@settings(max_examples=200)
@given(st.lists(st.text("ab", max_size=12), max_size=30), st.sampled_from([0, 1_500, 2**20]))
def test_value_does_not_depend_on_earlier_lookups(texts: list[str], limit: int) -> None:
    asked = Asked(limit)
    for text in texts:
        assert asked.joined(text) == text.encode()
