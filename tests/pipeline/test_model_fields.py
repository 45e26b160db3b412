"""Windows, output limits and prices in the list of models: what clients read, next to what the provider says."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from gateway.core.context_budget import ContextPolicy
from gateway.core.pricing import price_per_million
from gateway.core.routing import ModelFacts
from gateway.mock import MockServer
from gateway.pipeline.model_fields import model_fields, with_fields
from tests.conftest import StartGateway, StartUpstream
from tests.support.scripted import ByteServer, Connection
from tests.support.web import Web

PRICE = {"input": 2, "output": 10, "cache_read": 0.2, "cache_write": 2.5, "search": 0.01}
FACTS = {"window": 400_000, "input": 272_000, "output": 128_000, "price": PRICE}
MODELS = [{"match": "fast", "provider": "upstream", "name": "mock-small", **FACTS}]
PRICING = {
    "prompt": "0.000002",
    "completion": "0.00001",
    "input_cache_read": "0.0000002",
    "input_cache_write": "0.0000025",
    "web_search": "0.01",
}
DESCRIBED = {
    "context_length": 400_000,
    "max_context_length": 400_000,
    "max_input_tokens": 272_000,
    "max_tokens": 128_000,
    "top_provider": {"context_length": 400_000, "max_completion_tokens": 128_000},
    "pricing": PRICING,
}


def raw(model: dict[str, Any]) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(json.dumps(model).encode(), type=dict[str, msgspec.Raw])


def shown(model: dict[str, Any], fields: dict[str, Any]) -> Any:
    return json.loads(msgspec.json.encode(with_fields(raw(model), fields)))


def test_only_known_facts_are_shown() -> None:
    assert model_fields(ModelFacts(), ContextPolicy()) == {}
    assert model_fields(ModelFacts(output=9), ContextPolicy()) == {
        "max_tokens": 9,
        "top_provider": {"max_completion_tokens": 9},
    }
    price = price_per_million(
        input=Decimal(1), output=Decimal(2), cache_read=None, cache_write=None, cache_write_1h=None
    )
    assert model_fields(ModelFacts(price=price), ContextPolicy()) == {
        "pricing": {"prompt": "0.000001", "completion": "0.000002"}
    }


@pytest.mark.parametrize(("trim", "window"), [("auto", 50_000), ("off", 200_000), ("shadow", 200_000)])
def test_the_window_is_what_the_gateway_allows(trim: Any, window: int) -> None:
    fields = model_fields(ModelFacts(window=200_000), ContextPolicy(trim=trim, budget=50_000))
    assert (fields["context_length"], fields["max_context_length"], fields["max_input_tokens"]) == (window,) * 3
    assert model_fields(ModelFacts(window=200_000), ContextPolicy(budget=500_000))["context_length"] == 200_000
    assert model_fields(ModelFacts(), ContextPolicy(budget=50_000))["context_length"] == 50_000


def test_fields_of_the_provider_stay_unless_its_window_is_too_large() -> None:
    theirs = {
        "context_length": 1_000_000,
        "max_context_length": 8_000,
        "max_input_tokens": None,
        "max_tokens": 7,
        "pricing": {"prompt": "9"},
        "top_provider": {"context_length": 1_000_000, "max_completion_tokens": 5, "is_moderated": True},
        "x": 1.5,
    }
    assert shown(theirs, DESCRIBED) == theirs | {
        "context_length": 400_000,
        "max_input_tokens": 272_000,
        "top_provider": {"context_length": 400_000, "max_completion_tokens": 5, "is_moderated": True},
    }


@pytest.mark.parametrize("odd", ["many", [], {}, True, {"context_length": "x"}, {"context_length": None}])
def test_odd_fields_of_the_provider_stay(odd: Any) -> None:
    theirs = {"context_length": odd, "top_provider": odd, "pricing": odd}
    found = with_fields(raw(theirs), DESCRIBED)
    assert {name: bytes(found[name]) for name in theirs} == {name: bytes(raw(theirs)[name]) for name in theirs}


# --- with the SDKs -------------------------------------------------------------------------------------------------


def test_the_openai_sdk_sees_windows_and_prices(mock_server: MockServer, gateway_server: StartGateway) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS)
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        listed = {model.id: model.to_dict() for model in client.models.list()}
        assert {name: listed["fast"][name] for name in DESCRIBED} == DESCRIBED
        assert listed["fast"]["owned_by"] == "upstream"
        assert client.models.retrieve("fast").to_dict() == listed["fast"]


def test_the_anthropic_sdk_sees_the_window_and_the_longest_output(
    mock_server: MockServer, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"context.budget": 100_000})
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as client:
        model = next(iter(client.models.list(limit=1000)))
        assert (model.id, model.max_input_tokens, model.max_tokens) == ("fast", 100_000, 128_000)
        assert client.models.retrieve("fast") == model


# --- a model of the provider ---------------------------------------------------------------------------------------


@pytest.fixture
def upstream(byte_server: StartUpstream) -> ByteServer:
    """Return a provider whose model says more than one of the gateway's own."""
    row = b'{"id": "claude-opus-5-5",  "object":"model", "created": 1.50, "context_length": 1000000, "y": {"z" :1}}'
    body = {b"/v1/models": b'{"object": "list", "data": [%s]}' % row}
    return byte_server(lambda connection: connection.whole(body.get(connection.request.path.encode(), row)))


def test_a_model_of_the_provider_gets_what_the_tables_know(upstream: ByteServer, gateway_server: StartGateway) -> None:
    web = gateway_server(upstream.url, **{"context.budget": 90_000}).web
    answers = [web.get("/v1/models"), web.get("/v1/models/claude-opus-5-5")]
    rows = [answers[0].json["data"][0], answers[1].json]
    assert rows[0] == rows[1] | {"owned_by": "upstream"}
    assert (rows[0]["context_length"], rows[0]["max_input_tokens"], rows[0]["max_tokens"]) == (90_000, 90_000, 128_000)
    assert all(b"1.50," in answer.body and b'{"z" :1}' in answer.body for answer in answers)


def test_a_response_that_is_no_model_is_forwarded(upstream: ByteServer, gateway_server: StartGateway) -> None:
    web: Web = gateway_server(upstream.url).web
    for body in (b"no json", b"[]", b'{"id": 5}', b"{}", b'{"id": "unknown-model",  "object": "model"}'):
        upstream.script = partial(Connection.whole, body=body)
        assert web.get("/v1/models/some-model").body == body
