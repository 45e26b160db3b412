"""Tables in a terminal of 80 columns: no line is wider and no row is wrapped. A pipe gets all columns."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gateway.core.audit import AuditEntry
from gateway.core.ledger.arithmetic import Limits
from gateway.core.ledger.session_key import SessionKey
from gateway.core.stored import StoredKey
from gateway.core.usage import Charge, Usage
from gateway.stores.sqlite import SqliteStore
from tests.support import records
from tests.support.commands import Commands
from tests.support.terminals import Terminal

pytestmark = pytest.mark.long

COLUMNS = 80
LARGEST = 2**53
LONG = "n" * 255
SESSIONS = (LONG, "agent-run-2026-11-28-customer-4711-refactor-the-billing-service-7f3c9a", "short", "alice/coder")
MODEL = "accounts/fireworks/models/llama-v3p1-405b-instruct-long-context-turbo-2026-11-28"
TOOLS = ("mcp__github__create_pull_request_review_comment", "search_orders", "b" * 64)
KEYS = ("a-team-with-a-very-long-name-for-its-key-in-the-store", "alice")
CONFIGURED = """
budget: {tokens: 9007199254740992, window: 30d}
auth: {keys: [{name: configured, key: "0123456789abcdef", budget: {usd: 20, window: 1d}}]}
providers: {own-provider-with-a-long-name: {base_url: "http://127.0.0.1:1", auth: none}}
models:
  - {match: a-model-with-a-name-that-is-long-enough-to-be-shortened-somewhere, provider: own-provider-with-a-long-name,
     window: 10000000, output: 1000000, price: {input: 1234.56, output: 6543.21, cache_read: 0.000123}}
"""


@pytest.fixture
async def folder(gateway_command: Commands) -> Path:
    """A folder with a store, a configuration that names it, requests and a body: long names, large numbers."""
    folder = gateway_command.folder
    gateway_command.file(f"{CONFIGURED}store: {{url: 'sqlite://{folder / 's.db'}'}}\n", "gateway.yaml")
    store, began = SqliteStore(folder / "s.db", timeout_s=5), time.time() - 100
    for name in SESSIONS:
        key = SessionKey(*name.split("/")) if "/" in name else SessionKey("default", name)
        for number in range(30):
            one = records.record("", began + number)
            charge = Charge(Usage.of(123_456_789, 98_765_432), "provider", Decimal("1234.567891"))
            await store.settle(replace(one, session=key, model=MODEL, charge=charge, tools=TOOLS, duration_s=12345.6))
        await store.override_limits(key.account, {"tokens": LARGEST, "nano_usd": 20 * 10**9, "calls": 1_000_000})
    for name in KEYS:
        limits = Limits(tokens=LARGEST, nano_usd=1_234_567_890_123_456_789, calls=LARGEST, window=30 * 86_400.0)
        models = ("gpt-4o*", "claude-*", "accounts/fireworks/*")
        await store.add_key(StoredKey(name, name.encode(), began, models, limits, LARGEST))
    for name in (LONG, f"{KEYS[0]}/{LONG}", "short", "alice"):
        old, new = {"tokens": LARGEST, "usd": "1234567890.123456"}, {"tokens": None, "usd": "0.000001"}
        author = ("this machine without a key", "fe80:0000:0000:0000:0202:b3ff:fe1e:8329")
        await store.record_change(AuditEntry(began, "session.budget", name, *author, old, new))
    await store.aclose()
    body = {"model": "gpt-4o", "messages": conversation()}
    (folder / "body.json").write_text(json.dumps(body))
    lines = [{"session": name, "body": body} for name in SESSIONS for _ in range(3)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def conversation() -> list[dict[str, object]]:
    """Return a conversation with long tool names."""
    found: list[dict[str, object]] = [{"role": "user", "content": "How much? " * 50}]
    for number, name in enumerate(TOOLS):
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"c{number}", "content": "a line of a result\n" * 200})
    return [*found, {"role": "user", "content": "And now?"}]


#: commands, and the number of rows of the longest table, including its header
TABLES: list[tuple[tuple[str, ...], int]] = [
    (("sessions",), 5),
    (("sessions", "list", "--sort", "tokens"), 5),
    (("sessions", "show", "short"), 20),
    (("sessions", "show", LONG), 20),
    (("sessions", "show", "alice/coder"), 20),
    (("keys",), 4),
    (("keys", "list"), 4),
    (("top", "--once"), 5),
    (("models", "a-model"), 2),
    (("models", "gpt-4o", "--limit", "20"), 21),
    (("models", "--limit", "3000"), 900),
    (("count", "body.json", "--items", "--tools"), 9),
    (("trim", "body.json", "--budget", "600", "--explain"), 9),
    (("replay", "requests.jsonl"), 6),
    (("replay", "--records"), 6),
    (("replay", "--records", "--session-budget", "500k"), 6),
    (("demo",), 10),
    (("bench", "--quick"), 13),
]


@pytest.mark.parametrize(("args", "rows"), TABLES, ids=[" ".join(args)[:40] for args, _ in TABLES])
def test_a_table_fits_80_columns_and_no_row_is_wrapped(folder: Path, args: tuple[str, ...], rows: int) -> None:
    done = Terminal(folder, COLUMNS, *args).done()
    assert done.code == 0, done.err
    table = [line for line in done.lines if not is_sentence(line)]
    assert max(map(len, table)) <= COLUMNS
    assert len(table) >= rows
    # The rest of a wrapped row would start with spaces.
    assert [line for line in table if line.strip() and line.startswith(" ") and not is_numbered(line)] == []


def is_sentence(line: str) -> bool:
    """Return True for a sentence below the table of `demo`, which a terminal wraps itself."""
    return line.startswith(("Trimmed to", "Not trimmed", "Not sent", "Call ", "The "))


def is_numbered(line: str) -> bool:
    """Return True for a row that starts with a number, which is aligned to the right."""
    return line.split(maxsplit=1)[0].isdecimal() or line.split(maxsplit=1)[0] in {"item", "started"}


def test_the_rows_of_a_table_are_those_that_a_pipe_gets(folder: Path, gateway_command: Commands) -> None:
    for args in (("sessions",), ("keys",), ("models", "gpt-4o")):
        piped = gateway_command.process(*args).lines
        shown = Terminal(folder, COLUMNS, *args).done().lines
        assert len(shown) == len(piped)
        assert [line.split()[0].rstrip("…") for line in shown[1:]] == [
            line.split()[0][: len(row.split()[0].rstrip("…"))] for line, row in zip(piped[1:], shown[1:], strict=True)
        ]


def test_a_pipe_gets_every_column_and_every_name_whole(gateway_command: Commands, folder: Path) -> None:
    assert folder.exists()
    done = gateway_command.process("sessions", env={"COLUMNS": str(COLUMNS)})
    head, *rows = done.lines
    for name in ("session", "calls", "input", "output", "total", "budget left", "cost", "usage", "last call"):
        assert name in head
    assert {row.split()[0] for row in rows} == {*SESSIONS}
    assert "…" not in done.out
    assert all("3,703,703,670" in row and "$37,037.04" in row for row in rows)


def test_durations_shares_and_dollars_are_readable(gateway_command: Commands, folder: Path) -> None:
    assert folder.exists()
    row = next(line for line in gateway_command("keys").lines if line.startswith("configured"))
    assert row.split()[1:6] == ["all", "$20", "1d", "0", "%"]
    row = next(line for line in gateway_command("keys").lines if line.startswith("alice"))
    assert "$1,234,567,890.123457" in row
    assert " 30d " in row
    shown = {line[:30].strip(): line[30:].strip() for line in gateway_command("sessions", "show", "short").lines}
    assert shown["budget usd"] == "$0 of $20 used"
    assert shown["budget used"] == "0.0 %"
    assert shown["budget refills in"] in {"30d", "29d 23h"}


def test_the_audit_log_fits_80_columns_and_shows_whole_names(folder: Path) -> None:
    done = Terminal(folder, COLUMNS, "audit").done()
    assert done.code == 0, done.err
    assert max(map(len, done.lines)) <= COLUMNS
    assert sum(not line.startswith(" ") for line in done.lines) == 4
    text = "".join(line.strip() for line in done.lines)
    assert text.count(LONG) == 2
    assert text.count("by this machine without a key from fe80:0000:0000:0000:0202:b3ff:fe1e:8329") == 4
    assert "$1,234,567,890.12" in text
