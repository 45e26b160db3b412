"""The error that a caller gets if no provider responds, depending on the failure of each provider."""

from __future__ import annotations

import pytest

from gateway.core.errors import (
    GatewayError,
    UpstreamNotAccepted,
    UpstreamNotTaken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.trimming.overflow import BudgetTooSmall
from gateway.pipeline.fallback import EarlierFailures
from gateway.upstream.body import AlreadyRead

REFUSED = AlreadyRead(503, [], b"busy")
SILENT, DOWN, TOO_SMALL = UpstreamTimeout("silent"), UpstreamUnreachable("down"), BudgetTooSmall(needed=900, budget=500)


def final_error(*said: AlreadyRead | GatewayError) -> AlreadyRead | GatewayError:
    """Return the final error if providers failed like this in order, the last with an exception."""
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
def test_the_failure_of_the_last_provider_is_returned(before: tuple[AlreadyRead | GatewayError, ...]) -> None:
    assert final_error(*before, DOWN) is DOWN


@pytest.mark.parametrize("said", [REFUSED, SILENT])
def test_if_the_request_is_too_long_for_the_last_model_the_earlier_error_is_returned(
    said: AlreadyRead | GatewayError,
) -> None:
    assert final_error(said, TOO_SMALL) is said
    assert final_error(said, BudgetTooSmall(needed=900, budget=700), TOO_SMALL) is said


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
def test_after_two_providers_that_may_be_working_no_other_is_tried(
    before: tuple[AlreadyRead | GatewayError, ...], last: GatewayError, is_enough: bool
) -> None:
    earlier = EarlierFailures()
    for one in before:
        earlier.add(one)
    assert earlier.is_enough(last) is is_enough


def test_the_latest_of_the_earlier_errors_is_returned() -> None:
    assert final_error(SILENT, REFUSED, TOO_SMALL) is REFUSED
    assert final_error(REFUSED, SILENT, TOO_SMALL) is SILENT


def test_a_request_too_long_for_all_models_gets_the_length_error() -> None:
    assert final_error(BudgetTooSmall(needed=900, budget=700), TOO_SMALL) is TOO_SMALL
