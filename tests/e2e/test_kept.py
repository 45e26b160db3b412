"""Reserve tokens of conversations stored at the provider, so that sessions with stored context keep their budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.mock import MockProvider, MockServer
from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayThread
from tests.support.web import Web

#: some 6,000 tokens
TEXT = "The boat went up the river, past the mill. " * 550
TURNS = 6
#: The cost of the first five turns and a part of the sixth. The sixth turn fits by its own 8,192 tokens, but not by
#: what it is billed.
BUDGET = 110_000
INSTRUCTIONS = "You are a helpful assistant. " * 200

Next = Callable[[Any], dict[str, Any]]


def by_response(answer: Any) -> dict[str, Any]:
    return {"previous_response_id": answer.id} if answer is not None else {}


def by_conversation(_: Any) -> dict[str, Any]:
    return {"conversation": {"id": "conv_river"}}


@contextmanager
def sdk(gateway: GatewayThread, session: str) -> Iterator[openai.OpenAI]:
    headers = {"x-session-id": session}
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0, default_headers=headers) as made:
        yield made


def ask(client: openai.OpenAI, *, stream: bool = False, **fields: Any) -> tuple[Any, int]:
    """Return the response, and its expected input tokens."""
    fields = {"model": "mock-small", "input": TEXT, "max_output_tokens": 50, **fields}
    raw: Any = client.responses.with_raw_response.create(**fields, stream=stream)
    parsed: Any = raw.parse()
    answer = [event for event in parsed if event.type.startswith("response.")][-1].response if stream else parsed
    return answer, int(raw.headers["x-context-tokens"])


def converse(
    gateway: GatewayThread, going_on: Next, *, stream: bool = False, turns: int = TURNS, last: Any = None, **fields: Any
) -> tuple[Any, openai.BadRequestError | None, int]:
    """Return the last response, the refusal, and the number of completed turns, after checking their tokens."""
    answer = last
    with sdk(gateway, "river") as client:
        for number in range(turns):
            try:
                answer, expected = ask(client, stream=stream, **going_on(answer), **fields)
            except openai.BadRequestError as refused:
                return answer, refused, number
            assert answer.usage.input_tokens == pytest.approx(expected, rel=0.03)
    return answer, None, turns


def assert_kept_within(web: Web, mock: MockProvider, refused: openai.BadRequestError | None, answered: int) -> None:
    assert refused is not None
    assert refused.code == "budget_exhausted"
    assert answered == TURNS - 1 == len(mock.calls)
    used = web.get("/api/sessions/river").json["budget"]["used"]["tokens"]
    assert used == mock.billed().total_tokens
    # The session used neither more than its budget, nor was it refused too early.
    assert BUDGET - 8 * len(TEXT) // 4 < used <= BUDGET


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("going_on", [by_response, by_conversation])
def test_a_session_with_stored_context_is_refused_before_it_exceeds_its_budget(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, going_on: Next, stream: bool
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": BUDGET})
    _, refused, answered = converse(gateway, going_on, stream=stream)
    assert_kept_within(gateway.web, mock, refused, answered)


def test_instructions_repeated_in_each_request_are_not_counted_twice(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    _, refused, _ = converse(gateway, by_response, turns=3, input="And then?", instructions=INSTRUCTIONS)
    assert refused is None


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_stored_tokens_are_known_after_a_restart(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, tmp_path: Path, kind: str
) -> None:
    redis = RedisServer(tmp_path) if kind == "redis" else None
    flags: dict[str, object] = {"budget.tokens": BUDGET}
    flags |= {"store": {"url": redis.url, "timeout_ms": 5000}} if redis is not None else {}
    try:
        first = gateway_server(mock_server.url, **flags)
        answer, refused, answered = converse(first, by_response, turns=3)
        assert (refused, answered) == (None, 3)
        first.stop()
        second = gateway_server(mock_server.url, folder=first.folder, **flags)
        _, refused, answered = converse(second, by_response, last=answer)
        assert_kept_within(second.web, mock, refused, 3 + answered)
        second.stop()
    finally:
        if redis is not None:
            redis.kill()


def test_two_branches_can_continue_from_the_same_response(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url)
    with sdk(gateway, "branches") as client:
        root, _ = ask(client)
        for _ in range(2):
            other, _ = ask(client, previous_response_id=root.id)
            _, expected = ask(client, previous_response_id=root.id, input="Short.")
            assert expected == pytest.approx(root.usage.total_tokens + 6, rel=0.03)
        _, expected = ask(client, previous_response_id=other.id, input="Short.")
        assert expected == pytest.approx(other.usage.total_tokens + 6, rel=0.03)


def test_stored_tokens_are_reported_but_cause_no_trim_and_no_refusal(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": 9_000, "context.recall": "off"})
    with sdk(gateway, "shown") as client:
        answer, _ = ask(client)
        for given in (TEXT, [{"role": "user", "content": TEXT}]):
            answer, expected = ask(client, previous_response_id=answer.id, input=given)
            assert expected == pytest.approx(answer.usage.input_tokens, rel=0.03)
            assert expected > 9_000
    body = {"model": "mock-small", "input": "Short.", "previous_response_id": answer.id}
    counted = gateway.web.post("/api/count?session=shown&wire=responses", body).json
    assert counted["kept_tokens"] == pytest.approx(answer.usage.total_tokens, abs=8)
    assert counted["tokens"] - counted["kept_tokens"] < 20
    context = gateway.web.post("/api/context?session=shown&wire=responses", body).json
    assert context["remaining"] == 0
    call = gateway.web.get("/api/sessions/shown/calls").json["calls"][0]
    assert call["context"]["kept_tokens"] > 9_000


@pytest.mark.parametrize(
    ("first", "second"),
    [({"store": False}, {}), ({}, {"extra_headers": {"x-session-id": "another"}}), ({}, {"model": "elsewhere/m"})],
)
def test_responses_that_are_not_stored_or_stored_by_others_count_no_tokens(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, first: Any, second: Any
) -> None:
    provider = {"base_url": mock_server.url, "auth": "none", "retries": 0}
    providers = dict.fromkeys(("upstream", "elsewhere"), provider)
    gateway = gateway_server(mock_server.url, providers=providers)
    with sdk(gateway, "none") as client:
        answer, _ = ask(client, **first)
        _, expected = ask(client, previous_response_id=answer.id, input="Short.", **second)
        assert expected < 100


def test_a_usd_budget_includes_stored_tokens(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "priced", "provider": "upstream", "price": {"input": 1, "output": 10}}]
    gateway = gateway_server(mock_server.url, models=models, **{"budget.usd": BUDGET / 1e6})
    _, refused, answered = converse(gateway, by_response, model="priced")
    assert refused is not None
    assert refused.code == "budget_exhausted"
    assert answered == TURNS - 1
    assert mock.billed().calls == TURNS - 1


def test_stored_tokens_do_not_lower_the_output_limit_of_the_window(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    models = [{"match": "small", "provider": "upstream", "window": 14_000}]
    gateway = gateway_server(mock_server.url, models=models, **{"budget.tokens": 1_000_000})
    limits = []
    with sdk(gateway, "limits") as client:
        answer, _ = ask(client, model="small")
        for known in ("resp_unknown", answer.id):
            client.responses.create(model="small", input=TEXT, previous_response_id=known)
            limits.append(json.loads(mock.calls[-1].body)["max_output_tokens"])
    assert limits[0] == limits[1] > 4_096


def test_a_request_without_input_reserves_the_stored_tokens(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 12_000})
    with sdk(gateway, "silent") as client:
        answer, _ = ask(client)
        with pytest.raises(openai.BadRequestError, match="budget") as refused:
            client.responses.create(model="mock-small", previous_response_id=answer.id, max_output_tokens=50)
    assert refused.value.code == "budget_exhausted"
    assert mock.billed().calls == 1
