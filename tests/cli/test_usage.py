"""`gateway usage` and `gateway export` on a store that was filled by real calls."""

from __future__ import annotations

import csv
import io
import json

import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.commands import Commands


@pytest.fixture
def store(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> str:
    """The URL of a store with three calls of two sessions."""
    gateway = gateway_server(mock_server.url)
    for session, tokens in (("small", "10/5"), ("large", "500/70"), ("small", "20/7")):
        assert gateway.web.chat(session, f"tokens={tokens}").status == 200
    return f"sqlite://{gateway.store}"


def test_usage_has_bars_and_fits_into_80_columns(store: str, gateway_command: Commands) -> None:
    done = gateway_command("usage", "--by", "key,model", "--last", "30d", "--store", store)
    assert done.code == 0, done.err
    header, row = done.out.splitlines()
    assert header.split()[:3] == ["key", "model", "calls"]
    assert "530" in row
    assert "100 % ████████████" in row
    shown = gateway_command.process("usage", "--bucket", "day", "--store", store, env={"COLUMNS": "80"})
    assert shown.code == 0


def test_usage_as_json_and_csv(store: str, gateway_command: Commands) -> None:
    [line] = json.loads(gateway_command("usage", "--by", "model", "--json", "--store", store).out)
    assert (line["model"], line["calls"], line["input_tokens"], line["output_tokens"]) == ("mock-small", 3, 530, 82)
    [row] = csv.DictReader(io.StringIO(gateway_command("usage", "--by", "model", "--csv", "--store", store).out))
    assert row == {name: str(value) for name, value in line.items()}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--by", "color"), "--by must be one of key, group"),
        (("--last", "soon"), "--last"),
        (("--bucket", "week"), "--bucket must be one of hour, day, total"),
        (("--bucket", "hour", "--last", "900d"), "1,000"),
    ],
)
def test_wrong_options_are_explained(store: str, gateway_command: Commands, words: tuple[str, ...], error: str) -> None:
    done = gateway_command("usage", *words, "--store", store)
    assert done.code == 2
    assert error in done.err


def test_records_are_exported_as_json_lines_and_csv(store: str, gateway_command: Commands) -> None:
    done = gateway_command("export", "--since", "1h", "--store", store)
    calls = [json.loads(line) for line in done.out.splitlines()]
    assert [(call["session"], call["usage"]["input_tokens"]) for call in calls] == [
        ("small", 10), ("large", 500), ("small", 20),
    ]  # fmt: skip
    rows = [*csv.DictReader(io.StringIO(gateway_command("export", "--format", "csv", "--store", store).out))]
    assert [(row["call_id"], row["output_tokens"]) for row in rows] == [
        (call["call_id"], str(call["usage"]["output_tokens"])) for call in calls
    ]
    assert gateway_command("export", "--since", "2099-01-01", "--store", store).out == ""
    assert gateway_command("export", "--since", "never", "--store", store).code == 2
    assert gateway_command("export", "--format", "xml", "--store", store).code == 2
