"""Observers are notified, even if another one fails."""

from __future__ import annotations

import logging

import pytest

from gateway.call.observers import notify


def test_all_observers_are_notified_and_a_failing_one_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, int]] = []

    def failing(name: str, *, number: int) -> None:
        raise ValueError(f"{name} {number}")

    def listening(name: str, *, number: int) -> None:
        heard.append((name, number))

    with caplog.at_level(logging.ERROR, "gateway"):
        notify([failing, listening, failing, listening], "call", number=2)
    assert heard == [("call", 2)] * 2
    assert [record.getMessage() for record in caplog.records] == ["an observer failed"] * 2
    assert "ValueError: call 2" in caplog.text


def test_an_observer_can_end_the_process() -> None:
    def stopping() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        notify([stopping])
