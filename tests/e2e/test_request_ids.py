"""Request ids: SDKs show the id of the provider, and the gateway's id is the key of the call record."""

from __future__ import annotations

import anthropic
import openai
import pytest

from gateway.mock import MockProvider
from gateway.mock.turns import Behaviour, Turn
from tests.support.web import CHAT, HI, Web


def test_openai_sdk_shows_the_request_id_of_the_provider(web: Web, mock: MockProvider) -> None:
    with openai.OpenAI(base_url=f"{web.url}/v1", api_key="any", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="mock-small", messages=[{"role": "user", "content": "hi"}], extra_headers={"x-request-id": "mine"}
        )
        assert raw.parse()._request_id == raw.headers["x-request-id"]
        assert raw.headers["x-request-id"].startswith("req_mock")
        assert raw.headers["x-gateway-request-id"] == "mine"
        mock.push(Turn(behaviour=Behaviour(status=400)))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="mock-small", messages=[{"role": "user", "content": "hi"}])
    assert (refused.value.request_id or "").startswith("req_mock")


def test_anthropic_sdk_shows_the_request_id_of_the_provider(web: Web) -> None:
    with anthropic.Anthropic(base_url=web.url, api_key="any", max_retries=0) as client:
        answer = client.messages.create(model="mock-small", max_tokens=16, messages=[{"role": "user", "content": "hi"}])
    assert (answer._request_id or "").startswith("req_mock")


@pytest.mark.parametrize("own", [{}, {"x-request-id": "mine"}])
def test_gateway_request_id_is_the_key_of_the_call_record(web: Web, own: dict[str, str]) -> None:
    answer = web.post(CHAT, {"model": "mock-small", "messages": HI}, own)
    key = answer.header("x-gateway-request-id")
    assert key == own.get("x-request-id", key)
    record = web.get(f"/api/calls/{key}").json
    assert record["request_id"] == key
    assert web.get(f"/api/calls/{record['call_id']}").json["call_id"] == record["call_id"]


def test_refusal_of_the_gateway_has_its_own_request_id_only(web: Web) -> None:
    refused = web.post(CHAT, {"messages": HI})
    assert refused.status == 400
    assert refused.header("x-gateway-request-id")
    assert refused.header("x-request-id") is None
