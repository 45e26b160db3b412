from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.counting.cache import CountCache


def test_content_is_computed_once() -> None:
    cache, asked = CountCache(), []

    def compute() -> int:
        asked.append(1)
        return 7

    assert [cache.get("kind", b"content", compute) for _ in range(3)] == [7, 7, 7]
    assert len(asked) == 1


def test_same_content_of_another_kind_is_computed_separately() -> None:
    cache = CountCache()
    assert cache.get("a", b"content", lambda: 1) == 1
    assert cache.get("b", b"content", lambda: 2) == 2


def test_unknown_keys_are_computed_in_one_call() -> None:
    cache, asked = CountCache(), list[list[int]]()

    def compute(missing: Sequence[int]) -> list[str]:
        asked.append(list(missing))
        return [f"new {index}" for index in missing]

    assert cache.get_many("kind", ["a", ("b", 1)], compute) == ["new 0", "new 1"]
    assert cache.get_many("kind", ["c", "a", b"d"], compute) == ["new 0", "new 0", "new 2"]
    assert cache.get_many("kind", ["a", "c"], compute) == ["new 0", "new 0"]
    assert asked == [[0, 1], [0, 2]]
    assert cache.get("kind", b"a", lambda: "another content") == "another content"


def test_put_replaces_the_value_and_peek_returns_it() -> None:
    cache = CountCache(limit_bytes=2 * 356)
    assert cache.peek("kind", "key") is None
    for value in (1, 2):
        cache.put("kind", "key", value, 100)
    assert (cache.peek("kind", "key"), len(cache), cache.size_bytes) == (2, 1, 356)
    cache.put("kind", "other", 3, 100)
    assert cache.peek("kind", "key") == 2
    cache.put("kind", "third", 4, 100)
    assert (cache.peek("kind", "other"), cache.peek("kind", "key")) == (None, 2)


def test_least_recently_used_entry_is_dropped_first() -> None:
    cache = CountCache(limit_bytes=3 * 356)
    for name in (b"a", b"b", b"c"):
        cache.get("kind", name, lambda: 1, lambda _: 100)
    cache.get("kind", b"a", lambda: 2, lambda _: 100)
    cache.get("kind", b"d", lambda: 1, lambda _: 100)
    assert cache.get("kind", b"a", lambda: 2, lambda _: 100) == 1
    assert cache.get("kind", b"b", lambda: 2, lambda _: 100) == 2


@given(st.lists(st.tuples(st.binary(max_size=2), st.integers(0, 5000)), max_size=60), st.integers(0, 20_000))
def test_limit_holds_for_any_sequence_of_entries(entries: list[tuple[bytes, int]], limit: int) -> None:
    cache = CountCache(limit_bytes=limit)
    for content, size in entries:
        cache.get("kind", content, lambda: 1, partial(lambda size, _: size, size))
        assert 0 <= cache.size_bytes <= limit
    assert (cache.size_bytes == 0) == (len(cache) == 0)


def test_entry_larger_than_the_cache_is_returned_but_not_stored() -> None:
    cache = CountCache(limit_bytes=1000)
    assert cache.get("kind", b"x", lambda: 5, lambda _: 10_000) == 5
    assert (len(cache), cache.size_bytes) == (0, 0)


def test_tokens_of_a_text_are_counted_once_per_counter(words: Any) -> None:
    cache = CountCache()
    assert [cache.tokens(words, "one two \ud800"), cache.tokens(words, "one two \ud800")] == [3, 3]
    assert words.texts == ["one two \ud800"]
    words.name = "other"
    cache.tokens(words, "one two \ud800")
    assert len(words.texts) == 2


def test_threads_can_share_a_cache_with_a_lock() -> None:
    cache = CountCache(limit_bytes=20 * 256, lock=threading.Lock())
    wrong: list[object] = []

    def work() -> None:
        for number in range(2000):
            name = str(number % 37).encode()
            if cache.get("kind", name, lambda name=name: name) != name:  # type: ignore[misc]  # a default binds it
                wrong.append(name)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.size_bytes == 256 * len(cache) <= 20 * 256
