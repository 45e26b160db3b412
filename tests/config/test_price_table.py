"""Test the dated table of prices: what it keeps of litellm's file, and which table is used."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
from datetime import date
from pathlib import Path

import msgspec
import pytest

from gateway.config.model_catalog import Catalog
from gateway.config.price_table import LEAST_PRICED, PriceTable, compressed_table, fetched_file, load_price_table
from gateway.core.routing import Route

ENTRIES = {f"model-{number}": {"input_cost_per_token": 1e-06} for number in range(LEAST_PRICED)}


def packed(day: str = "2026-01-02", **entries: object) -> bytes:
    return compressed_table(json.dumps(ENTRIES | entries).encode(), "a test", day)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the place of the fetched table, in a new home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = fetched_file()
    file.parent.mkdir(parents=True)
    return file


def test_table_keeps_what_the_gateway_reads_and_the_text_of_numbers() -> None:
    text = b'{"mode": "chat", "supports_vision": true, "max_tokens": 9, "input_cost_per_token": 1.10e-06}'
    content = json.dumps(ENTRIES).encode()[:-1] + b', "own": ' + text + b', "no object": [1]}'
    table = PriceTable(compressed_table(content, "a test", "2026-01-02"))
    assert bytes(table["own"]) == b'{"mode":"chat","max_tokens":9,"input_cost_per_token":1.10e-06}'
    assert (table.name, len(table)) == ("a test (2026-01-02)", LEAST_PRICED + 2)
    assert bytes(table["no object"]) == b"{}"


def test_package_has_the_prices_and_limits_of_the_litellm_that_it_names() -> None:
    table = PriceTable((Path(__file__).parents[2] / "config" / "prices.json.gz").read_bytes())
    version = importlib.metadata.version("litellm")
    if table.source != f"litellm {version}":
        pytest.skip(f"the package's table is from {table.source}, and litellm {version} is installed")
    assert date.fromisoformat(table.date)
    spec = importlib.util.find_spec("litellm")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "model_prices_and_context_window_backup.json"
    theirs = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
    assert table.keys() == theirs.keys()
    ours, whole = Catalog({}, table), Catalog({}, theirs)
    for name, raw in theirs.items():
        provider = msgspec.json.decode(raw).get("litellm_provider", "openai")
        assert ours.facts(Route(provider, name)) == whole.facts(Route(provider, name)), name


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "not JSON"),
        (b'{"gpt-5": {"input_cost_per_token": 1}}', "prices of 1 models, and at least 500"),
        (json.dumps(ENTRIES).encode()[:-5], "not JSON"),
    ],
    ids=["a page", "a list", "few", "cut off"],
)
def test_other_content_makes_no_table(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compressed_table(content, "a test", "2026-01-02")


def test_fetched_table_is_used_unless_the_package_has_a_newer_one(fetched: Path) -> None:
    assert load_price_table().source.startswith("litellm")
    fetched.write_bytes(packed("2999-01-01"))
    assert load_price_table().name == "a test (2999-01-01)"
    fetched.write_bytes(packed("2001-01-01"))
    assert load_price_table().source.startswith("litellm")


@pytest.mark.parametrize(
    "content", [b"", b"no table", packed("2999-01-01")[:-9], packed("tomorrow")], ids=["empty", "text", "cut", "date"]
)
def test_damaged_fetched_table_is_ignored_with_a_warning(
    fetched: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    fetched.write_bytes(content)
    with caplog.at_level(logging.WARNING, "gateway"):
        assert load_price_table().source.startswith("litellm")
    assert "gateway models update" in caplog.text


@pytest.mark.parametrize("home", ["/dev/null", "~nobody-has-this-name"], ids=["no folder", "unknown"])
def test_without_a_home_folder_nothing_was_fetched_and_no_warning_says_so(
    home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", home)
    with caplog.at_level(logging.WARNING, "gateway"):
        assert load_price_table().source.startswith("litellm")
    assert caplog.text == ""
