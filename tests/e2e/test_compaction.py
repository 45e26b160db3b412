"""Conversations are compacted by their provider or else by the gateway, which expands its own items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx  # noqa: F401  # before a gateway in this process imports it in a thread, see test_translation.py
import openai
import pytest
from websockets.sync.client import connect

from gateway import config
from gateway.config.policies import provider_of
from gateway.mock import Behaviour, MockProvider, MockServer, Turn
from gateway.mock.strict import unseal
from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.gateways import GatewayThread
from tests.support.timing import LIMIT_S
from tests.support.web import Web

pytestmark = pytest.mark.long

TRIGGER: Any = {"type": "compaction_trigger"}
TASK = {"role": "user", "content": "Count the parcels of all halls, and say where parcel 7-11 is."}
TOOLS = [{"type": "function", "name": "list_hall", "parameters": {"type": "object", "properties": {}}}]
HALLS = 20
SECRET = "parcel 19-3 weight 57"
BY_GATEWAY = {"providers.upstream.compaction": False}
BY_PROVIDER = {"providers.upstream.compaction": True}


def conversation() -> list[Any]:
    items: list[dict[str, Any]] = [TASK]
    for hall in range(HALLS):
        rows = "\n".join(f"row {row} parcel {hall}-{row} weight {row * hall}" for row in range(60))
        name = f"call_{hall}"
        items.append({"type": "function_call", "call_id": name, "name": "list_hall", "arguments": f'{{"hall":{hall}}}'})
        items.append({"type": "function_call_output", "call_id": name, "output": rows})
    return items


@contextmanager
def sdk(gateway: GatewayThread, session: str = "s", **headers: str) -> Iterator[openai.OpenAI]:
    named = {"session-id": session, **{name.replace("_", "-"): value for name, value in headers.items()}}
    with openai.OpenAI(base_url=gateway.base_url, api_key="k", max_retries=0, default_headers=named) as client:
        yield client


def compact(client: openai.OpenAI, items: Any = None, *, version: int = 2, **fields: Any) -> tuple[Any, Any]:
    """Return the compaction item, as the client sends it back, and the usage."""
    items = conversation() if items is None else items
    made: Any
    if version == 1:
        made = client.responses.compact(model="gpt-4o", input=items, **fields)
        usage = made.usage
    else:
        events: Any = client.responses.create(model="gpt-4o", input=[*items, TRIGGER], stream=True, **fields)
        seen = list(events)
        done = [event for event in seen if event.type == "response.output_item.done"]
        assert seen[-1].type == "response.completed"
        made, usage = seen[-1].response, seen[-1].response.usage
        assert [event.item for event in done] == made.output
    [item] = made.output
    assert item.type == "compaction"
    return item.model_dump(exclude_none=True), usage


def go_on(client: openai.OpenAI, *items: Any, stream: bool = False) -> None:
    answer: Any = client.responses.create(model="gpt-4o", input=list(items), stream=stream)
    if stream:
        assert list(answer)[-1].type == "response.completed"


def sent(mock: MockProvider) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(mock.calls[-1].body)["input"]
    return found


def calls(web: Web, session: str = "s") -> list[Any]:
    return list(reversed(web.get(f"/api/sessions/{session}/calls").json["calls"]))


def holds_the_conversation(items: list[dict[str, Any]]) -> bool:
    """Return True if the provider got the last facts of the conversation in less than half of its length."""
    text = json.dumps(items)
    return SECRET in text and TASK["content"] in text and len(text) < len(json.dumps(conversation())) / 2


# --- by the gateway --------------------------------------------------------------------------------------------------


def test_a_compacted_long_message_is_expanded_in_full(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    rules = {"role": "developer", "content": "Say each number in words. " * 20_000}
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        item, _ = compact(client, [rules])
        go_on(client, item)
    assert sent(mock) == [rules]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_the_gateway_compacts_if_the_provider_does_not_and_expands_the_item(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, version: int, stream: bool
) -> None:
    gateway = gateway_server(mock_server.url, **BY_GATEWAY)
    with sdk(gateway) as client:
        item, usage = compact(client, version=version)
        assert mock.calls == []
        assert usage.total_tokens == 0
        assert SECRET not in json.dumps(item)
        go_on(client, TASK, item, {"role": "user", "content": "Go on."}, stream=stream)
    items = sent(mock)
    assert holds_the_conversation(items)
    assert items[0] == TASK
    assert items.count(TASK) == 1
    assert items[-1] == {"role": "user", "content": "Go on."}
    made, after = calls(gateway.web)
    assert made["usage"]["total_tokens"] == 0
    assert made["notes"]["compaction"].startswith("made by the gateway: ")
    assert after["usage"]["total_tokens"] == mock.billed().total_tokens


def test_a_trigger_without_a_stream_gets_a_whole_response(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        made: Any = client.responses.create(model="gpt-4o", input=[*conversation(), TRIGGER])
    assert [item.type for item in made.output] == ["compaction"]
    assert made.status == "completed"
    assert mock.calls == []


def test_a_compaction_survives_a_restart(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_GATEWAY)
    with sdk(gateway) as client:
        item, _ = compact(client)
    gateway.stop()
    with sdk(gateway_server(mock_server.url, folder=gateway.folder, **BY_GATEWAY)) as client:
        go_on(client, item)
    assert holds_the_conversation(sent(mock))


def test_another_worker_with_the_same_redis_expands_a_compaction(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, tmp_path: Path
) -> None:
    redis = RedisServer(tmp_path)
    try:
        flags = {**BY_GATEWAY, "store.url": redis.url}
        with sdk(gateway_server(mock_server.url, **flags)) as client:
            item, _ = compact(client)
        with sdk(gateway_server(mock_server.url, **flags)) as client:
            go_on(client, item)
    finally:
        redis.kill()
    assert holds_the_conversation(sent(mock))


@pytest.mark.filterwarnings("ignore:Accessing the")
@pytest.mark.filterwarnings("ignore:.*ReadOnly. qualifier")
def test_a_conversation_with_a_translated_provider_is_compacted(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    row = {"adapter": "litellm", "litellm": "anthropic", "base_url": mock_server.url, "key": "held"}
    gateway = gateway_server(mock_server.url, providers={"claude": row}, default_provider="claude")
    with sdk(gateway) as client:
        for version in (1, 2):
            item, usage = compact(client, version=version)
            assert usage.total_tokens == 0
            assert mock.calls == []
        go_on(client, TASK, item, {"role": "user", "content": "Go on."})
        # The translation would leave out an item of another provider, and with it the conversation.
        foreign = {"type": "compaction", "encrypted_content": "gAAAAABn"}
        assert refused(client, foreign)["code"] == "invalid_encrypted_content"
    assert mock.calls[-1].path == "/v1/messages"
    assert holds_the_conversation(json.loads(mock.calls[-1].body)["messages"])


def test_a_compaction_can_be_compacted_again(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        first, _ = compact(client)
        second, _ = compact(client, [first, *conversation()[1:]])
        assert first["encrypted_content"] != second["encrypted_content"]
        go_on(client, second)
    assert holds_the_conversation(sent(mock))
    assert "encrypted_content" not in json.dumps(sent(mock))


def test_a_retry_gives_the_same_item(gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider) -> None:
    del mock
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        assert compact(client) == compact(client)


def test_another_session_can_use_a_compaction_even_after_its_session_is_deleted(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_GATEWAY)
    with sdk(gateway, "first") as client:
        item, _ = compact(client)
    with sdk(gateway, "fork") as client:
        go_on(client, item)
        gateway.web.send("DELETE", "/api/sessions/first")
        go_on(client, item, {"role": "user", "content": "More."})
    assert holds_the_conversation(sent(mock))


def test_the_input_is_expanded_before_the_provider_counts_it(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        item, _ = compact(client)
        client.responses.input_tokens.count(model="gpt-4o", input=[item])
    assert holds_the_conversation(sent(mock))


def test_a_short_conversation_is_kept_whole(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        item, _ = compact(client, conversation()[:3])
        go_on(client, item)
    assert sent(mock) == conversation()[:3]


def test_pinned_messages_are_kept_although_they_are_most_of_the_conversation(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    rules = {"role": "developer", "content": "Say each number in words. " * 2000}
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        item, _ = compact(client, [rules, *conversation()])
        go_on(client, item)
    assert sent(mock)[0] == rules
    assert holds_the_conversation(sent(mock)[1:])


def test_an_exhausted_budget_still_allows_a_free_compaction(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    del mock
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY), x_session_budget_tokens="100") as client:
        with pytest.raises(openai.BadRequestError, match="budget"):
            go_on(client, *conversation())
        assert compact(client)[1].total_tokens == 0


# --- items that cannot be opened -------------------------------------------------------------------------------------


def refused(client: openai.OpenAI, item: Any) -> dict[str, Any]:
    with pytest.raises(openai.BadRequestError) as caught:
        go_on(client, item)
    body = caught.value.body
    assert isinstance(body, dict)
    return body


def test_an_item_of_another_deployment_is_refused_with_a_remedy(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        item, _ = compact(client)
    with sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client:
        error = refused(client, item)
    assert error["code"] == "invalid_encrypted_content"
    assert error["param"] == "input"
    assert "Start a new conversation" in error["message"]
    assert mock.calls == []


def test_a_changed_item_and_an_item_of_a_deleted_session_are_refused(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_GATEWAY)
    with sdk(gateway) as client:
        item, _ = compact(client)
        last = item["encrypted_content"][-1]
        changed = {**item, "encrypted_content": item["encrypted_content"][:-1] + ("0" if last != "0" else "1")}
        assert refused(client, changed)["code"] == "invalid_encrypted_content"
        gateway.web.send("DELETE", "/api/sessions/s")
        assert refused(client, item)["code"] == "invalid_encrypted_content"
    assert mock.calls == []


def test_a_client_key_cannot_open_the_item_of_another_key(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    del mock
    keys = [{"name": name, "key": f"client-key-of-{name}"} for name in ("ada", "bob")]
    gateway = gateway_server(mock_server.url, **BY_GATEWAY, **{"auth.keys": keys})
    with sdk(gateway) as client:
        item, _ = compact(client.with_options(api_key="client-key-of-ada"))
        assert refused(client.with_options(api_key="client-key-of-bob"), item)["code"] == "invalid_encrypted_content"
        go_on(client.with_options(api_key="client-key-of-ada"), item)


def test_an_item_repeated_thousands_of_times_is_refused(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_GATEWAY)
    with sdk(gateway) as client:
        item, _ = compact(client)
    # The SDK would need seconds to build this request.
    refused = gateway.web.post("/v1/responses", {"model": "gpt-4o", "input": [item] * 20_000}, {"session-id": "s"})
    assert refused.status == 400
    assert b"they may hold" in refused.body
    assert mock.calls == []


def test_a_compaction_without_storage_space_is_refused_with_the_setting_to_raise(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    del mock
    gateway = gateway_server(mock_server.url, **BY_GATEWAY, **{"sessions.results_max_mb": 0})
    with sdk(gateway) as client, pytest.raises(openai.BadRequestError, match=r"Raise sessions\.results_max_mb"):
        compact(client)


def test_a_conversation_stored_at_the_provider_cannot_be_compacted_by_the_gateway(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    del mock
    with (
        sdk(gateway_server(mock_server.url, **BY_GATEWAY)) as client,
        pytest.raises(openai.BadRequestError, match="Send the whole input"),
    ):
        compact(client, previous_response_id="resp_1")


# --- with a summary --------------------------------------------------------------------------------------------------


def test_a_configured_model_summarizes_what_is_left_out_at_the_cost_of_the_session(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.push(Turn("All halls were listed; parcel 7-11 stands in row 11 of hall 7."))
    gateway = gateway_server(
        mock_server.url,
        **BY_GATEWAY,
        **{
            "context.strategies": ["dedupe", "summarize", "condense", "drop"],
            "context.summary": {"model": "writer", "max_tokens": 300},
        },
    )
    with sdk(gateway) as client:
        item, usage = compact(client)
        assert usage.total_tokens == 0
        made, summary = sorted(calls(gateway.web), key=lambda call: str(call["operation"]))
        assert (made["operation"], summary["operation"]) == ("chat", "summary")
        assert summary["usage"]["total_tokens"] == mock.billed().total_tokens > 0
        assert made["notes"]["summary"].endswith(summary["call_id"])
        go_on(client, item)
    assert "parcel 7-11 stands in row 11 of hall 7" in json.dumps(sent(mock))


# --- by the provider -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("flags", [BY_PROVIDER, {}], ids=["known", "asked"])
def test_a_provider_compacts_the_untrimmed_input_without_a_limit_and_is_metered(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, version: int, flags: dict[str, Any]
) -> None:
    gateway = gateway_server(mock_server.url, **flags, **{"context.budget": 3000, "budget.tokens": 1_000_000})
    with sdk(gateway, x_response_mode="handle_only") as client:
        item, usage = compact(client, version=version)
        assert unseal(item["encrypted_content"]) is not None
        assert sent(mock) == conversation() + ([TRIGGER] if version == 2 else [])
        assert "max_output_tokens" not in json.loads(mock.calls[-1].body)
        assert usage.total_tokens == mock.billed().total_tokens > 3000
        [record] = calls(gateway.web)
        assert record["usage"]["total_tokens"] == mock.billed().total_tokens
        go_on(client, TASK, item, {"role": "user", "content": "Go on."})
    # The provider's own item is sent back to it unchanged.
    assert sent(mock)[1] == item


def test_a_compaction_is_reserved_in_the_budget_like_any_call(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_PROVIDER, **{"budget.tokens": 1000})
    with sdk(gateway) as client, pytest.raises(openai.BadRequestError, match="has used 0 of its"):
        compact(client)
    assert mock.calls == []


def test_a_compaction_has_no_output_limit_even_if_little_budget_is_left(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **BY_PROVIDER)
    with sdk(gateway) as client:
        compact(client)
        budget = str(2 * mock.billed().input_tokens + 1000)
    with sdk(gateway, "limited", x_session_budget_tokens=budget) as client:
        go_on(client, *conversation())
        assert json.loads(mock.calls[-1].body)["max_output_tokens"] > 0
        compact(client)
    assert "max_output_tokens" not in json.loads(mock.calls[-1].body)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("flags", [BY_PROVIDER, {}], ids=["known", "asked"])
def test_a_refusal_to_compact_is_remembered_and_the_gateway_compacts(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, version: int, flags: dict[str, Any]
) -> None:
    mock.behaviour = Behaviour(compaction="refused")
    gateway = gateway_server(mock_server.url, **flags)
    with sdk(gateway) as client:
        item, usage = compact(client, version=version)
        assert usage.total_tokens == 0
        assert len(mock.calls) == 1
        # Tokens that were counted for the provider are not compared with the 0 tokens that are reported.
        assert calls(gateway.web)[0]["context"] is None
        compact(client, version=version)
        # The provider is not asked again.
        assert len(mock.calls) == 1
        go_on(client, item)
    assert holds_the_conversation(sent(mock))


def test_a_provider_that_returns_a_message_is_charged_and_the_gateway_compacts(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.behaviour = Behaviour(compaction="ignored")
    gateway = gateway_server(mock_server.url)
    with sdk(gateway) as client:
        item, usage = compact(client)
        assert item["encrypted_content"].startswith("gwc1_")
        assert usage.total_tokens == mock.billed().total_tokens > 0
        [record] = calls(gateway.web)
        assert record["usage"]["total_tokens"] == mock.billed().total_tokens
        compact(client)
        assert len(mock.calls) == 1


def test_a_conversation_that_is_too_long_for_its_provider_is_compacted_by_the_gateway(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    mock.behaviour = Behaviour(window=5000)
    with sdk(gateway_server(mock_server.url, **BY_PROVIDER)) as client:
        item, _ = compact(client)
        assert item["encrypted_content"].startswith("gwc1_")
        assert len(mock.calls) == 1
        go_on(client, item)
    assert holds_the_conversation(sent(mock))


@pytest.mark.parametrize("flags", [BY_PROVIDER, {}], ids=["known", "asked"])
def test_any_other_refusal_of_a_compaction_is_forwarded(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, flags: dict[str, Any]
) -> None:
    mock.behaviour = Behaviour(status=403)
    with sdk(gateway_server(mock_server.url, **flags)) as client, pytest.raises(openai.PermissionDeniedError):
        compact(client)


def test_steps_do_not_restrict_the_tools_of_a_compaction(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    steps = [{"name": "only", "is_default": True, "available_tools": {"allowed": ["list_hall"]}}]
    gateway = gateway_server(mock_server.url, **BY_PROVIDER, steps=steps)
    tools = [*TOOLS, {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}}]
    with sdk(gateway) as client:
        compact(client, tools=tools)
    assert json.loads(mock.calls[-1].body)["tools"] == tools


@pytest.mark.parametrize(
    ("row", "compacts"),
    [
        ({"base_url": "https://api.openai.com/v1"}, True),
        ({"base_url": "https://name.openai.azure.com/openai/v1"}, True),
        ({"base_url": "https://api.openai.com/v1", "compaction": False}, False),
        ({"base_url": "https://api.example/v1"}, None),
        ({"base_url": "https://api.example/v1", "compaction": True}, True),
        ({"adapter": "litellm", "litellm": "azure"}, False),
        ({"adapter": "litellm", "base_url": "https://name.openai.azure.com"}, False),
    ],
)
def test_hosts_of_openai_compact_translated_providers_do_not_and_others_are_asked(
    row: dict[str, Any], compacts: bool | None
) -> None:
    assert provider_of("own", config.Provider(**row)).compaction is compacts


def test_a_translated_provider_cannot_be_configured_to_compact() -> None:
    with pytest.raises(ValueError, match="does not work with adapter: litellm"):
        config.Provider(adapter="litellm", compaction=True)


# --- over a WebSocket ------------------------------------------------------------------------------------------------


def asked(socket: Any, **fields: Any) -> list[Any]:
    socket.send(json.dumps({"type": "response.create", "model": "gpt-4o", "store": False, **fields}))
    events = [json.loads(socket.recv(LIMIT_S))]
    while events[-1]["type"] not in ("response.completed", "error"):
        events.append(json.loads(socket.recv(LIMIT_S)))
    return events


@pytest.mark.parametrize("flags", [BY_GATEWAY, BY_PROVIDER], ids=["gateway", "provider"])
def test_a_conversation_is_compacted_over_a_websocket(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider, flags: dict[str, Any]
) -> None:
    gateway = gateway_server(mock_server.url, **flags)
    with connect(gateway.url.replace("http", "ws") + "/v1/responses", additional_headers={"session-id": "s"}) as socket:
        events = asked(socket, input=[*conversation(), TRIGGER])
        [item] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert item["type"] == "compaction"
        more = {"role": "user", "content": "Go on."}
        asked(socket, input=[TASK, item, more])
        whole = sent(mock)
        # The connection remembers the item of a compaction, which replaces all earlier items.
        previous = asked(socket, input=[*conversation(), TRIGGER])[-1]["response"]["id"]
        asked(socket, input=[more], previous_response_id=previous)
    if flags is BY_PROVIDER:
        assert whole == [TASK, item, more]
        assert [one.get("type") for one in sent(mock)] == ["compaction", None]
    else:
        assert holds_the_conversation(whole)
        assert holds_the_conversation(sent(mock))
        assert not any(one.get("type") == "compaction_trigger" for one in sent(mock))
