from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from gateway.stores.sqlite.transaction import transact


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE numbers (number INTEGER PRIMARY KEY)")
    yield connection
    connection.close()


def numbers(database: sqlite3.Connection) -> list[int]:
    return [number for (number,) in database.execute("SELECT number FROM numbers")]


def test_transaction_commits_and_returns_the_result(database: sqlite3.Connection) -> None:
    assert transact(database, lambda db: db.execute("INSERT INTO numbers VALUES (1), (2)").rowcount) == 2
    assert not database.in_transaction
    assert numbers(database) == [1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_transaction_that_raises_is_rolled_back(database: sqlite3.Connection, error: type[BaseException]) -> None:
    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO numbers VALUES (1)")
        raise error

    with pytest.raises(error):
        transact(database, half)
    assert not database.in_transaction
    assert numbers(database) == []


def test_an_error_that_ended_the_transaction_is_the_one_that_is_raised(database: sqlite3.Connection) -> None:
    database.execute("INSERT INTO numbers VALUES (1)")
    with pytest.raises(sqlite3.IntegrityError):
        transact(database, lambda db: db.execute("INSERT OR ROLLBACK INTO numbers VALUES (2), (1)"))
    assert not database.in_transaction
    assert numbers(database) == [1]
