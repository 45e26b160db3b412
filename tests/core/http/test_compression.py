"""Test decompression in pieces and its size limit."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterable

import pytest

from gateway.core.http.compression import SUPPORTED, Corrupt, TooLarge, Unpacker, unpack
from tests.support.timing import in_time

TEXT = "".join(f"line {n}: häuser, 漢字, 🙂\n" for n in range(2_000)).encode()


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "raw deflate": raw_deflate,
}
packed_every_way = pytest.mark.parametrize("pack", PACKERS.values(), ids=PACKERS)


def unpack_pieces(pieces: Iterable[bytes], *, at_most: int = 1 << 20) -> tuple[bytes, bool]:
    unpacker = Unpacker(None)
    found = [part for piece in pieces for part in unpacker.feed(piece, at_most=at_most)]
    assert all(0 < len(part) <= at_most for part in found)
    return b"".join(found), unpacker.complete


def test_the_encodings_named_are_those_that_are_read() -> None:
    assert frozenset({"gzip", "x-gzip", "deflate"}) == SUPPORTED


@packed_every_way
@pytest.mark.parametrize("data", [b"", b"x", TEXT], ids=["empty", "one byte", "text"])
def test_compressed_body_is_decompressed(pack: Callable[[bytes], bytes], data: bytes) -> None:
    assert unpack(pack(data), 2**20) == data


@packed_every_way
def test_body_is_decompressed_byte_by_byte(pack: Callable[[bytes], bytes]) -> None:
    compressed = pack(TEXT)
    assert unpack_pieces(compressed[i : i + 1] for i in range(len(compressed))) == (TEXT, True)


@packed_every_way
def test_body_is_decompressed_in_any_pieces(pack: Callable[[bytes], bytes]) -> None:
    compressed, choose = pack(TEXT), random.Random(7)
    for _ in range(20):
        cut = choose.randrange(2, len(compressed))
        assert unpack_pieces([compressed[:cut], compressed[cut:]]) == (TEXT, True)


@packed_every_way
def test_output_pieces_respect_the_maximum_size(pack: Callable[[bytes], bytes]) -> None:
    for size in range(1, 600, 7):
        data = b"a" * size
        assert unpack_pieces([pack(data)], at_most=64) == (data, True)


@packed_every_way
def test_size_limit_is_inclusive(pack: Callable[[bytes], bytes]) -> None:
    assert unpack(pack(TEXT), len(TEXT)) == TEXT
    with pytest.raises(TooLarge):
        unpack(pack(TEXT), len(TEXT) - 1)


def test_decompression_bomb_stops_at_the_limit() -> None:
    compressed = gzip.compress(bytes(64 * 2**20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            unpack(compressed, 2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20


def test_stream_without_limit_is_decompressed() -> None:
    size = 3 * 2**20
    assert unpack_pieces([gzip.compress(bytes(size))])[0] == bytes(size)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no packed body at all",
        b"\xff" * 100,
        gzip.compress(TEXT)[:-1],
        gzip.compress(TEXT)[:100],
        gzip.compress(TEXT)[:100] + b"\x00\xff" * 100,
        gzip.compress(TEXT)[:-8] + b"\x00" * 8,
    ],
    ids=["empty", "text", "noise", "cut by one", "cut early", "broken inside", "wrong checksum"],
)
def test_mismatched_encoding_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack(body, 2**20)


def test_a_gzip_body_of_several_members_is_unpacked_whole() -> None:
    assert unpack(gzip.compress(b"first ") + gzip.compress(b"second"), 100) == b"first second"


def test_a_gzip_body_of_several_members_cut_anywhere_is_unpacked_whole() -> None:
    compressed = gzip.compress(b"first ") + gzip.compress(b"") + gzip.compress(b"second")
    for cut in range(len(compressed) + 1):
        assert unpack_pieces([compressed[:cut], compressed[cut:]]) == (b"first second", True), cut
    assert unpack_pieces(compressed[i : i + 1] for i in range(len(compressed))) == (b"first second", True)


def test_many_members_take_as_long_as_their_bytes() -> None:
    with in_time():
        assert unpack(gzip.compress(b"") * 400_000, 100) == b""


def test_the_limit_holds_for_all_members_together() -> None:
    compressed = gzip.compress(bytes(600)) * 2
    assert unpack(compressed, 1_200) == bytes(1_200)
    with pytest.raises(TooLarge):
        unpack(compressed, 1_199)


@pytest.mark.parametrize("padding", [b"\x00" * 10, b"trailing"])
def test_padding_after_the_end_is_ignored(padding: bytes) -> None:
    assert unpack(gzip.compress(b"x") + padding, 100) == b"x"


def test_a_second_member_that_is_cut_or_broken_is_corrupt() -> None:
    second = gzip.compress(TEXT)
    for broken in (second[:-1], second[:20], second[:50] + b"\xff" * 50):
        with pytest.raises(Corrupt):
            unpack(gzip.compress(b"first") + broken, 2**20)
