"""Fixtures: one mock server for all tests of this folder, reset between tests, and a plain HTTP client."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from gateway.mock import Behaviour, MockProvider, MockServer

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data_lines(self) -> list[str]:
        """Return the data of each event."""
        body = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line) for line in self.data_lines if line != "[DONE]"]


class Http:
    def __init__(self, url: str) -> None:
        self._netloc = urlsplit(url).netloc

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._netloc, timeout=60)

    def send(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> Reply:
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def chat(self, mock: str = "", **fields: object) -> Reply:
        """Send a chat request with the message "hi" and an `x-mock` header."""
        body = {"model": "mock-small", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.send("POST", CHAT, body, {"x-mock": mock})

    def stream(self, mock: str = "", **fields: object) -> Reply:
        return self.chat(mock, stream=True, **fields)


@pytest.fixture(scope="session")
def server() -> Iterator[MockServer]:
    with MockServer() as running:
        yield running


@pytest.fixture
def provider(server: MockServer) -> MockProvider:
    server.provider.reset()
    server.provider.behaviour = Behaviour()
    server.provider.windows = {}
    server.provider.claude = ()
    return server.provider


@pytest.fixture
def web(server: MockServer, provider: MockProvider) -> Http:
    return Http(server.url)


@pytest.fixture
def client(server: MockServer, provider: MockProvider) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made
