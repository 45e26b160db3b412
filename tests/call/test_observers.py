"""What observers are told, also behind one that fails."""

from __future__ import annotations

import logging

import pytest

from gateway.call.observers import tell


def test_each_is_told_though_one_before_it_fails_and_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, int]] = []

    def failing(name: str, *, number: int) -> None:
        raise ValueError(f"{name} {number}")

    def listening(name: str, *, number: int) -> None:
        heard.append((name, number))

    with caplog.at_level(logging.ERROR, "gateway"):
        tell([failing, listening, failing, listening], "call", number=2)
    assert heard == [("call", 2)] * 2
    assert [record.getMessage() for record in caplog.records] == ["an observer failed"] * 2
    assert "ValueError: call 2" in caplog.text


def test_who_ends_the_process_is_not_held_back() -> None:
    def stopping() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        tell([stopping])
