"""Clients for Azure OpenAI: their paths, their key header, and their API version in the query."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.gateways import GatewayThread
from tests.support.web import Web

KEY = "azure-client-key-0123456789"
VERSION = "2024-10-21"


@pytest.fixture(params=["azure_endpoint", "azure_deployment", "base_url"])
def azure(request: pytest.FixtureRequest, gateway: GatewayThread, session: str) -> Iterator[openai.AzureOpenAI]:
    root = f"{gateway.url}/s/{session}"
    common: dict[str, Any] = {"api_version": VERSION, "api_key": "any", "max_retries": 0}
    made = {
        "azure_endpoint": lambda: openai.AzureOpenAI(azure_endpoint=root, **common),
        "azure_deployment": lambda: openai.AzureOpenAI(azure_endpoint=root, azure_deployment="mock-small", **common),
        "base_url": lambda: openai.AzureOpenAI(base_url=f"{root}/v1", **common),
    }[request.param]()
    with made as client:
        yield client


def test_azure_clients_are_metered_on_every_endpoint(
    azure: openai.AzureOpenAI, web: Web, mock: MockProvider, session: str
) -> None:
    hi: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    assert azure.chat.completions.create(model="mock-small", messages=hi).usage is not None
    with azure.chat.completions.create(model="mock-small", messages=hi, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert azure.embeddings.create(model="mock-small", input="hi").data
    # With its own deployment, this client appends any path to the deployment path.
    assert azure.responses.create(model="mock-small", input="hi").output_text
    assert [call.path for call in mock.calls] == [
        *["/v1/chat/completions"] * 2,
        "/v1/embeddings",
        "/v1/responses",
    ], "the paths of other clients, without an API version"
    found = web.get(f"/api/sessions/{session}").json
    assert found["calls"] == 4
    assert found["cumulative_token_usage"]["total_tokens"] == mock.billed().total_tokens


def test_the_deployment_in_the_path_replaces_the_model(web: Web, mock: MockProvider) -> None:
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    bodies: list[dict[str, Any]] = [hi, {"model": "gpt-4o", **hi}]
    for body in bodies:
        path = f"/openai/deployments/mock-small/chat/completions?api-version={VERSION}"
        assert web.post(path, body).json["model"] == "mock-small"
        assert json.loads(mock.calls[-1].body) == {**body, "model": "mock-small"}


def test_the_deployment_in_the_path_replaces_the_model_of_a_form(gateway: GatewayThread, mock: MockProvider) -> None:
    root = f"{gateway.url}/openai/deployments/mock-small"
    with openai.AzureOpenAI(base_url=root, api_version=VERSION, api_key="any", max_retries=0) as client:
        assert client.audio.transcriptions.create(model="whisper-1", file=("a.wav", b"RIFF")).text
    assert mock.calls[-1].path == "/v1/audio/transcriptions"
    assert b'name="model"\r\n\r\nmock-small\r\n' in mock.calls[-1].body


def test_keys_in_the_azure_header_are_checked(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    keys = [{"name": "azure", "key": KEY, "models": ["mock-small"]}]
    gateway = gateway_server(mock_server.url, **{"auth.keys": keys})
    hi: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
    with openai.AzureOpenAI(azure_endpoint=gateway.url, api_version=VERSION, api_key=KEY, max_retries=0) as client:
        assert client.chat.completions.create(model="mock-small", messages=hi).choices
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="mock-large", messages=hi)
    with (
        openai.AzureOpenAI(azure_endpoint=gateway.url, api_version=VERSION, api_key="no", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model="mock-small", messages=hi)
    path = "/v1/OPENAI/Deployments/mock-large/chat/completions"
    known = len(mock.calls)
    refused = gateway.web.post(path, {"model": "mock-small", "messages": hi}, {"api-key": KEY})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert len(mock.calls) == known, "Azure would go by the path"
