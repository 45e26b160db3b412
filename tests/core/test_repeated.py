from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.conversation.message import digest
from gateway.core.repeated import Repeated, cached_digest

LONG = b"a" * 4_000


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_equal_bytes_are_the_same_key(one: bytes, other: bytes) -> None:
    assert ({Repeated(one): 1}.get(Repeated(bytes(bytearray(other)))) == 1) is (one == other)
    assert (Repeated(one) == Repeated(other)) is (one == other)


def test_bytes_that_differ_outside_samples_are_different_keys() -> None:
    other = LONG[:500] + b"b" + LONG[501:]
    assert hash(Repeated(LONG)) == hash(Repeated(other)), "else this says nothing"
    assert Repeated(LONG) != Repeated(other)
    assert {Repeated(LONG): 1, Repeated(other): 2} == {Repeated(bytes(bytearray(LONG))): 1, Repeated(other): 2}
    assert cached_digest(LONG) != cached_digest(other)


def test_key_differs_from_other_types() -> None:
    assert Repeated(b"x") != b"x"


@given(st.sampled_from([0, 1, 511, 512, 4_000, 64 * 1024 - 1, 64 * 1024, 70_000]))
def test_the_digest_is_that_of_the_bytes_however_many(size: int) -> None:
    raw = bytes(index % 251 for index in range(size))
    assert cached_digest(raw) == cached_digest(bytes(bytearray(raw))) == digest(raw)
