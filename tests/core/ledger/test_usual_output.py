"""Test what is learned of the lengths of responses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ledger.usual_output import MAX_LENGTHS, usual_output


@pytest.mark.parametrize(
    ("lengths", "least", "usual"),
    [
        ([], 0, None),
        ([9, 9, 9], 4, None),
        ([10, 20, 30, 40], 4, 40),
        ([50, 10, 20, 30, 40], 4, 50),
        (range(1, 11), 8, 9),
        ([5] * 15 + [900], 8, 5),
    ],
)
def test_most_responses_do_not_exceed_the_usual_output(lengths: Sequence[int], least: int, usual: int | None) -> None:
    assert usual_output(lengths, least) == usual


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=MAX_LENGTHS))
def test_law_usual_output_is_one_of_the_lengths_and_covers_nine_tenths(lengths: list[int]) -> None:
    usual = usual_output(lengths, 1)
    assert usual in lengths
    assert sum(length <= (usual or 0) for length in lengths) >= 0.9 * len(lengths)
