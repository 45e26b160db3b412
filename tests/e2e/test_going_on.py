"""Conversations chained by `previous_response_id` with OpenAI's SDK, for a model that two accounts share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayThread
from tests.support.scripted import SSE_HEAD, ByteServer, Connection

USAGE = {
    "input_tokens": 10, "output_tokens": 2, "total_tokens": 12,
    "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip
CONVERSATIONS = 8


class Account:
    """A provider that knows only its own responses."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ids = set[str]()
        self._numbers = count()

    def __call__(self, connection: Connection) -> None:
        request = connection.request
        asked = request.path.split("/")[3:4]
        body = request.json if request.body else {}
        known: str | None = asked[0] if asked else body.get("previous_response_id")
        if known is not None and known not in self._ids:
            error = {"message": f"{known} not found.", "type": "invalid_request_error", "param": None, "code": None}
            connection.whole(json.dumps({"error": error}).encode(), status=b"404 Not Found")
        elif asked and known is not None:
            found = {"object": "list", "data": [], "has_more": False} if "input_items" in request.path else None
            connection.whole(json.dumps(found or self._answer(known)).encode())
        else:
            self._make(connection, is_stream=bool(body.get("stream")))

    def _make(self, connection: Connection, *, is_stream: bool) -> None:
        answer_id = f"resp_{self._name}_{next(self._numbers)}"
        self._ids.add(answer_id)
        answer = self._answer(answer_id)
        if not is_stream:
            connection.whole(json.dumps(answer).encode())
            return
        begun = {**answer, "status": "in_progress", "usage": None}
        connection.send(SSE_HEAD)
        for number, (kind, said) in enumerate([("created", begun), ("completed", answer)]):
            event = {"type": f"response.{kind}", "sequence_number": number, "response": said}
            connection.send(b"data: " + json.dumps(event).encode() + b"\n\n")

    @staticmethod
    def _answer(answer_id: str) -> dict[str, object]:
        return {
            "id": answer_id, "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": USAGE,
        }  # fmt: skip


@pytest.fixture
def accounts() -> Iterator[tuple[ByteServer, ByteServer]]:
    with ByteServer(Account("a")) as first, ByteServer(Account("b")) as second:
        yield first, second


def flags_of(accounts: tuple[ByteServer, ByteServer]) -> dict[str, object]:
    rows = {name: {"base_url": f"{one.url}/v1", "key": "held"} for name, one in zip("ab", accounts, strict=True)}
    shared = {"match": "shared", "provider": {"a": 1, "b": 1}}
    return {"providers": rows, "default_provider": "a", "models": [shared]}


def ask(client: openai.OpenAI, text: str, previous: str | None = None, *, stream: bool = False) -> tuple[str, str]:
    """Return the id of the response, and the session that it was charged to."""
    raw: Any = client.responses.with_raw_response.create(
        model="shared", input=text, previous_response_id=previous, stream=stream
    )
    parsed: Any = raw.parse()
    answer = [*parsed][-1].response if stream else parsed
    return answer.id, raw.headers["x-session-id"]


def client_of(gateway: GatewayThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_each_turn_keeps_its_session_and_its_account_even_after_a_restart(
    accounts: tuple[ByteServer, ByteServer], gateway_server: StartGateway, tmp_path: Path, kind: str, stream: bool
) -> None:
    redis = RedisServer(tmp_path) if kind == "redis" else None
    flags = flags_of(accounts) | ({"store": {"url": redis.url, "timeout_ms": 5000}} if redis is not None else {})
    try:
        gateway = gateway_server(accounts[0].url, **flags)
        with client_of(gateway) as client:
            first = [ask(client, f"begin {number}", stream=stream) for number in range(CONVERSATIONS)]
            second = [ask(client, f"on {number}", known, stream=stream) for number, (known, _) in enumerate(first)]
        gateway.stop()
        again = gateway_server(accounts[0].url, folder=gateway.folder, **flags)
        with client_of(again) as client:
            third = [ask(client, f"and {number}", known, stream=stream) for number, (known, _) in enumerate(second)]
            for known, session in third:
                assert again.web.get(f"/api/sessions/{session}").json["calls"] == 3
                assert client.responses.retrieve(known).id == known
                assert client.responses.input_items.list(known).data == []
                client.responses.delete(known)
        again.stop()
    finally:
        if redis is not None:
            redis.kill()
    assert len({session for _, session in first}) == CONVERSATIONS
    assert [session for _, session in first] == [session for _, session in second] == [session for _, session in third]
    assert {known.split("_")[1] for known, _ in first} == {"a", "b"}


def test_counting_a_chained_request_uses_the_numbers_of_its_session(
    accounts: tuple[ByteServer, ByteServer], gateway_server: StartGateway
) -> None:
    models = [{"match": "shared", "provider": "a"}]
    gateway = gateway_server(accounts[0].url, **(flags_of(accounts) | {"models": models}))
    with client_of(gateway) as client:
        known, _ = ask(client, "begin")
    body = {"model": "shared", "input": "on"}
    chained, unknown = (
        gateway.web.post("/api/count?wire=responses", {**body, "previous_response_id": one}).json
        for one in (known, "resp_?")
    )
    assert 0 < chained["kept_tokens"] == chained["tokens"] - unknown["tokens"] <= 12
