"""Test the ends of strings in JSON text against a plain scanner."""

from __future__ import annotations

import re
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core.conversation.json_text import run_end, string_end

PIECES = [b'"', b"\\", b"\\\\", b'\\"', b"\n", b"a", b"{", "é".encode()]
#: more escapes than one match of the pattern covers
MANY = 2500


def scanned_end(raw: bytes, at: int) -> int:
    while at < len(raw) and raw[at] != ord('"'):
        if raw[at] == ord("\\"):
            if at + 1 == len(raw):
                return at
            at += 1
        at += 1
    return at


@given(st.lists(st.sampled_from(PIECES), max_size=20), st.integers(0, 3))
@settings(max_examples=500, deadline=None)
@example([b"\\n"] * MANY + [b'"', b"a"], 0)
@example([b"\\n"] * MANY + [b"\\"], 1)
@example([b"\\\\"] * 1000 + [b"\\n", b'"'], 0)
def test_string_end_agrees_with_a_plain_scanner(pieces: list[bytes], at: int) -> None:
    raw = b"".join(pieces)
    at = min(at, len(raw))
    assert string_end(raw, at) == scanned_end(raw, at)


def test_run_ends_if_the_pattern_makes_no_progress() -> None:
    pattern = re.compile(r"(?:ab){0,2}")
    assert run_end(pattern, "ababababab!", 0) == 10
    assert run_end(pattern, "ababababab!", 1) == 1
    assert run_end(re.compile("a"), "b", 0) == 0
    assert run_end(pattern, "ab", 3) == 3


@pytest.mark.parametrize("unit", [b"\\n", b"\\\\", b"a"])
def test_a_long_string_takes_little_memory(unit: bytes) -> None:
    raw = unit * 200_000 + b'"'
    tracemalloc.start()
    try:
        assert string_end(raw, 0) == len(raw) - 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
