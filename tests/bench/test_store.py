"""Test the store measurement of the bench."""

from __future__ import annotations

from pathlib import Path

from gateway.bench.store import pair_us, record_of
from gateway.core.ledger.session_key import SessionKey
from gateway.mock import MockServer
from gateway.stores.sqlite import SqliteStore
from tests.conftest import StartGateway


async def test_pairs_are_held_and_settled_as_the_call_of_a_gateway(
    gateway_server: StartGateway, mock_server: MockServer, tmp_path: Path
) -> None:
    gateway = gateway_server(mock_server.url)
    assert gateway.web.chat(session="real").status == 200
    gateway.stop()
    key = SessionKey("default", "real")
    record = await record_of(gateway.store, key)
    assert record is not None
    assert await pair_us(tmp_path / "pairs.db", record, 3) > 0
    store = SqliteStore(tmp_path / "pairs.db", timeout_s=5)
    totals = await store.totals(key)
    await store.aclose()
    assert record.charge is not None
    assert (totals.calls, totals.total_tokens) == (18, 18 * record.charge.usage.total_tokens)


async def test_there_is_no_record_of_an_unknown_session(tmp_path: Path) -> None:
    assert await record_of(tmp_path / "new.db", SessionKey("default", "nobody")) is None
