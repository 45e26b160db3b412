"""What a caller is told where no provider has an answer, by what each of them said."""

from __future__ import annotations

import pytest

from gateway.core.errors import (
    GatewayError,
    UpstreamNotAccepted,
    UpstreamNotTaken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.fitting.overflow import BudgetTooSmall
from gateway.pipeline.fallback import EarlierFailures
from gateway.upstream.body import AlreadyRead

REFUSED = AlreadyRead(503, [], b"busy")
SILENT, DOWN, TOO_SMALL = UpstreamTimeout("silent"), UpstreamUnreachable("down"), BudgetTooSmall(needed=900, budget=500)


def told(*said: AlreadyRead | GatewayError) -> AlreadyRead | GatewayError:
    """What is told where providers said this one after the other, the last of them with a fault."""
    earlier = EarlierFailures()
    *before, last = said
    for one in before:
        earlier.add(one)
    assert isinstance(last, GatewayError)
    try:
        return earlier.instead_of(last)
    except GatewayError as fault:
        return fault


@pytest.mark.parametrize("before", [(), (REFUSED,), (SILENT,), (TOO_SMALL,)])
def test_a_last_provider_that_failed_is_what_is_told(before: tuple[AlreadyRead | GatewayError, ...]) -> None:
    assert told(*before, DOWN) is DOWN


@pytest.mark.parametrize("said", [REFUSED, SILENT])
def test_where_the_request_does_not_fit_the_last_model_what_was_said_before_is_told(
    said: AlreadyRead | GatewayError,
) -> None:
    assert told(said, TOO_SMALL) is said
    assert told(said, BudgetTooSmall(needed=900, budget=700), TOO_SMALL) is said


@pytest.mark.parametrize(
    ("before", "last", "is_enough"),
    [
        ((), SILENT, False),
        ((DOWN, REFUSED), SILENT, False),
        ((SILENT,), SILENT, True),
        ((SILENT, REFUSED, DOWN), SILENT, True),
        ((SILENT,), DOWN, False),
        ((SILENT,), TOO_SMALL, False),
        ((SILENT,), UpstreamNotAccepted("no connection"), False),
        ((UpstreamNotTaken("half of it"),), SILENT, False),
    ],
)
def test_after_two_that_may_be_at_work_nobody_else_is_asked(
    before: tuple[AlreadyRead | GatewayError, ...], last: GatewayError, is_enough: bool
) -> None:
    earlier = EarlierFailures()
    for one in before:
        earlier.add(one)
    assert earlier.is_enough(last) is is_enough


def test_of_what_was_said_before_the_last_is_told() -> None:
    assert told(SILENT, REFUSED, TOO_SMALL) is REFUSED
    assert told(REFUSED, SILENT, TOO_SMALL) is SILENT


def test_a_request_that_fits_no_model_is_told_so() -> None:
    assert told(BudgetTooSmall(needed=900, budget=700), TOO_SMALL) is TOO_SMALL
