from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.counting.prefix_cache import CachedPrefix, PrefixCache
from gateway.core.counting.sums import MessageSums

PAD = "p" * 4200


def text_of(*values: Any, separators: tuple[str, str] = (",", ":")) -> bytes:
    """Return the text of an array up to the end of its last element."""
    return json.dumps([PAD, *values], separators=separators).encode()[:-1]


def beginning(*values: Any) -> CachedPrefix:
    return CachedPrefix(text_of(*values), (), (b"key",) * len(values), "kind", MessageSums())


def known(*beginnings: CachedPrefix, limit: int = 2**20) -> PrefixCache:
    found = PrefixCache(limit)
    for one in beginnings:
        found.keep("chat", one)
    return found


def test_array_continues_from_the_longest_prefix() -> None:
    short, long, other = beginning(1), beginning(1, 2), beginning(2, 2)
    beginnings = known(short, long, other)
    assert beginnings.find("chat", text_of(1, 2, 3) + b"]") is long
    assert beginnings.find("chat", text_of(1, 3) + b"]") is short
    assert beginnings.find("chat", text_of(3) + b"]") is None


def test_prefix_belongs_to_its_format() -> None:
    assert known(beginning(1)).find("messages", text_of(1, 2) + b"]") is None


@pytest.mark.parametrize("behind", [b"]", b" ]", b",2]", b" \n, 2]", b",[1]]"])
def test_prefix_may_be_followed_by_an_element_or_the_end(behind: bytes) -> None:
    assert known(beginning(1)).find("chat", text_of(1) + behind) is not None


@pytest.mark.parametrize("behind", [b"2]", b".5]", b"e3,4]"])
def test_half_a_number_is_not_a_prefix(behind: bytes) -> None:
    assert known(beginning(1)).find("chat", text_of(1) + behind) is None


def test_short_text_is_not_cached() -> None:
    beginnings = PrefixCache(2**20)
    beginnings.keep("chat", CachedPrefix(b'["a"', (), (b"key",), "kind", MessageSums()))
    assert (beginnings.find("chat", b'["a","b"]'), beginnings.size_bytes) == (None, 0)


def test_longer_prefix_replaces_the_one_it_continues() -> None:
    beginnings = known(short := beginning(1))
    beginnings.keep("chat", long := beginning(1, 2), instead_of=short)
    assert beginnings.find("chat", text_of(1, 2) + b"]") is long
    assert beginnings.find("chat", text_of(1, 3) + b"]") is None


def test_same_text_is_stored_once_with_its_last_value() -> None:
    beginnings = known(beginning(1))
    size = beginnings.size_bytes
    beginnings.keep("chat", again := beginning(1))
    assert beginnings.find("chat", text_of(1) + b"]") is again
    assert beginnings.size_bytes == size


def test_prefixes_are_limited_in_bytes_and_the_least_recently_used_is_dropped() -> None:
    limit = 5 * 6000
    beginnings = PrefixCache(limit)
    texts = [json.dumps([f"{number}" * 4200, 1]).encode() for number in range(10)]
    for text in texts:
        beginnings.keep("chat", CachedPrefix(text[:-1], (), (b"key",) * 2, "kind", MessageSums()))
        assert beginnings.find("chat", texts[0]) is not None
        assert beginnings.size_bytes <= limit
    assert [beginnings.find("chat", text) is not None for text in texts[-3:]] == [True] * 3
    assert beginnings.find("chat", texts[1]) is None


def test_last_prefixes_with_the_same_fingerprint_are_kept() -> None:
    beginnings = known(*[beginning(number) for number in range(10, 90)])
    assert beginnings.find("chat", text_of(89, 1) + b"]") is not None
    assert beginnings.find("chat", text_of(10, 1) + b"]") is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([1, 12, "a", "ab", [1], {"a": 1}]), max_size=4), max_size=6),
    st.lists(st.sampled_from([1, 12, "a", "ab", [1], {"a": 1}]), max_size=5),
)
def test_found_prefix_is_the_longest_stored_one_that_matches(kept: list[list[Any]], asked: list[Any]) -> None:
    found = known(*[beginning(*values) for values in kept]).find("chat", text_of(*asked) + b"]")
    expected = max((len(values) for values in kept if asked[: len(values)] == values), default=None)
    assert (len(found.keys) if found is not None else None) == expected
