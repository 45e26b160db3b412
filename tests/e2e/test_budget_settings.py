"""Each configuration key of budgets has its documented effect on the provider's or the client's side."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from gateway import config
from gateway.config.policies import provider_of
from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread, until
from tests.support.web import CHAT, Reply, Web


def call(web: Web, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    """Send a call whose input is long enough for the provider's cache."""
    messages = [{"role": "system", "content": "be brief " * 100}, {"role": "user", "content": "hi"}]
    body = {"model": "mock-small", "messages": messages, "max_tokens": 10, **fields}
    return web.post(CHAT, body, {"x-session-id": "s", **(headers or {})})


def view(gateway: GatewayThread) -> Any:
    return gateway.web.get("/api/sessions/s").json


@pytest.mark.parametrize(("weight", "counted"), [(1.0, 1.0), (0.0, 0.0)])
def test_count_cached_is_the_share_at_which_cached_tokens_count(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, weight: float, counted: float
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 100_000, "budget.count_cached": weight})
    for _ in range(3):
        assert call(gateway.web).status == 200
    usage, used = view(gateway)["cumulative_token_usage"], view(gateway)["budget"]["used"]["tokens"]
    assert usage["cache_read_tokens"] > 100
    assert used == usage["total_tokens"] - usage["cache_read_tokens"] * (1 - counted)


@pytest.mark.parametrize(("warn_at", "warned"), [(0.0, True), (1.0, False)])
def test_warn_at_is_the_used_share_from_which_responses_warn(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, warn_at: float, warned: bool
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 10_000, "budget.warn_at": warn_at})
    assert (call(gateway.web).header("x-session-budget-warning") is not None) is warned


@pytest.mark.parametrize("status", [400, 402, 429])
def test_exhausted_status_is_the_status_of_an_exhausted_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, status: int
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.calls": 1, "budget.exhausted_status": status})
    assert call(gateway.web).status == 200
    refused = call(gateway.web)
    assert (refused.status, refused.error["code"]) == (status, "budget_exhausted")
    assert refused.header("x-should-retry") == "false"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limit_field_is_the_field_of_the_output_limit(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, name: str
) -> None:
    provider = {"base_url": mock_server.url, "auth": "none", "limit_field": name}
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 1_000, "providers": {"upstream": provider}})
    assert call(gateway.web, max_tokens=None).status == 200
    body = json.loads(mock.calls[-1].body)
    assert 0 < body[name] < 1_000
    assert [key for key in body if body[key] is not None and key.endswith("_tokens")] == [name]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "max_completion_tokens"),
        ("https://eu.api.openai.com/v1", "max_completion_tokens"),
        ("https://NAME.openai.azure.com/openai/v1", "max_completion_tokens"),
        ("https://api.deepseek.com/v1", "max_tokens"),
        ("https://api.openai.com.example/v1", "max_tokens"),
        ("http://127.0.0.1:8000/v1", "max_tokens"),
    ],
)
def test_the_limit_field_defaults_by_the_host(url: str, name: str) -> None:
    assert provider_of("own", config.Provider(base_url=url)).limit_field == name
    assert provider_of("own", config.Provider(base_url=url, limit_field="max_tokens")).limit_field == "max_tokens"


@pytest.mark.parametrize("dearer", [{"service_tier": "priority"}, {"service_tier": "fast"}, {"speed": "fast"}])
def test_a_service_tier_without_a_known_price_is_refused_under_a_usd_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, dearer: dict[str, Any]
) -> None:
    models = [{"match": "priced", "provider": "upstream", "price": {"input": 1, "output": 10}}]
    gateway = gateway_server(mock_server.url, models=models, **{"budget.usd": 1})
    refused = call(gateway.web, model="priced", **dearer)
    assert (refused.status, refused.error["code"]) == (400, "price_unknown")
    assert mock.calls == []
    assert call(gateway.web, model="priced", service_tier="flex").status == 200


def test_all_calls_are_refused_if_client_keys_are_required_and_none_exists(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"auth.required": True})
    refused = call(gateway.web)
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert mock.calls == []


@pytest.mark.parametrize("journal", ["auto", "elsewhere", "off"])
def test_records_wait_in_the_configured_journal_while_the_store_is_locked(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, tmp_path: Path, journal: str
) -> None:
    named = str(tmp_path / "elsewhere") if journal == "elsewhere" else journal
    flags: dict[str, object] = {"store.on_failure": "open", "store.journal": named, "store.timeout_ms": 500}
    gateway = gateway_server(mock_server.url, **flags)
    assert call(gateway.web).status == 200
    with contextlib.closing(sqlite3.connect(gateway.store, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        assert call(gateway.web).status == 200
        found = {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*.journal")}
        overhead = gateway.folder.relative_to(tmp_path).parts[0]
        assert found == {"auto": {overhead}, "elsewhere": {"elsewhere"}, "off": set()}[journal]
        db.execute("ROLLBACK")
    until(lambda: view(gateway)["calls"] == 2)
    assert list(tmp_path.rglob("*.journal")) == []
