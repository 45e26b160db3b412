from __future__ import annotations

import pytest

from gateway.stores.compressed import Compressed, decompressed


@pytest.mark.parametrize(("text", "size"), [("", 0), ("a parcel", 8), ("größer", 8), ("half a pair: \ud83d", 16)])
def test_a_text_comes_back_as_it_was_and_counts_with_the_bytes_it_has_unpacked(text: str, size: int) -> None:
    compressed = Compressed.of(text)
    assert (decompressed(compressed.text), compressed.size) == (text, size)


def test_what_repeats_itself_takes_less_than_a_third() -> None:
    compressed = Compressed.of("\n".join(f"Parcel {number} lies at the depot." for number in range(200)))
    assert 3 * len(compressed.text) < compressed.size
