"""Records as the pipeline would make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gateway.core.ids import call_id
from gateway.core.ports import CallRecord, SessionKey
from gateway.core.usage import Charge, Usage

MakeRecord = Callable[..., CallRecord]

_TEMPLATE = CallRecord(
    call_id="",
    request_id="",
    session=SessionKey("alice", "s"),
    derived_session=False,
    started_at=0.0,
    dialect="chat",
    operation="chat",
    provider="openai",
    model="gpt-5",
    response_model="gpt-5-2025-08-07",
    stream=True,
    status=200,
    outcome="ok",
    error_code=None,
    finish_reason="stop",
    tools=("search", "search"),
    charge=Charge(Usage(10, 5, 15, 4, 3, 2, 1, 1), "provider", Decimal("0.000123")),
    overhead_s=0.001,
    first_byte_s=0.25,
    duration_s=2.0,
    request_bytes=100,
    response_bytes=200,
    notes={"stream_usage": "refused"},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store in a file may be: the folder is not there yet."""
    return tmp_path / "data" / "gateway.db"


@pytest.fixture
def record() -> MakeRecord:
    """Makes a record; `at`: when the call began, in seconds, also the time in its id."""
    numbers = count()

    def make(session: str | None = "s", *, namespace: str = "alice", at: float = 1_000.0, **fields: Any) -> CallRecord:
        fields.setdefault("call_id", call_id(int(at * 1000), next(numbers).to_bytes(10, "big")))
        fields.setdefault("request_id", fields["call_id"])
        key = SessionKey(namespace, session) if session is not None else None
        return replace(_TEMPLATE, session=key, started_at=at, **fields)

    return make
