"""Decompress zstd with a limit."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard

from gateway.core.http.compression import Corrupt, TooLarge
from gateway.server.zstd import unpack_zstd
from tests.support.timing import in_time

TEXT = "".join(f"line {n}: häuser, 漢字, 🙂\n" for n in range(2_000)).encode()


def compressed(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def packed_in_pieces(data: bytes) -> bytes:
    """Compress as a stream: the frame does not contain its size."""
    packer = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    return packer.compress(data[:100]) + packer.compress(data[100:]) + packer.flush()


@pytest.mark.parametrize("data", [b"", b"x", TEXT], ids=["empty", "one byte", "text"])
def test_compressed_body_is_decompressed(data: bytes) -> None:
    assert unpack_zstd(compressed(data), 2**20) == data
    assert unpack_zstd(packed_in_pieces(data), 2**20) == data


def test_body_of_several_frames_is_decompressed() -> None:
    frames = compressed(b"first ") + compressed(b"") + packed_in_pieces(b"second")
    assert unpack_zstd(frames, 100) == b"first second"
    with in_time():
        assert unpack_zstd(compressed(b"") * 100_000, 100) == b""


def test_body_over_the_limit_is_refused_but_not_at_the_limit() -> None:
    assert unpack_zstd(compressed(TEXT), len(TEXT)) == TEXT
    with pytest.raises(TooLarge):
        unpack_zstd(compressed(TEXT), len(TEXT) - 1)
    with pytest.raises(TooLarge):
        unpack_zstd(compressed(TEXT[:-1]) + compressed(b"ab"), len(TEXT))


def test_compression_bomb_is_stopped_at_the_limit() -> None:
    bomb = compressed(bytes(256 * 2**20), 19)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            unpack_zstd(bomb, 2**20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20


def test_frame_with_a_too_large_window_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    with pytest.raises(Corrupt):
        unpack_zstd(packer.compress(TEXT) + packer.flush(), 2**20)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no packed body at all",
        b"\xff" * 100,
        compressed(TEXT)[:-1],
        compressed(TEXT)[:100],
        compressed(TEXT)[:100] + b"\x00\xff" * 100,
        packed_in_pieces(TEXT)[:-4] + b"\x00" * 4,
        compressed(b"first") + compressed(TEXT)[:-1],
        compressed(b"first") + b"trailing",
    ],
    ids=["empty", "text", "noise", "cut by one", "cut early", "broken inside", "checksum", "second cut", "trailing"],
)
def test_invalid_zstd_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_zstd(body, 2**20)
