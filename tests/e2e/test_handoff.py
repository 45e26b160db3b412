"""Agents that pass token counts to retrieval tools: run the recipes of docs/guides/token-counts.md unchanged."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.client import Counts, Handed, fetch_counts
from gateway.mock import MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway
from tests.support.conversations import agent
from tests.support.gateways import ROOT, GatewayThread
from tests.support.web import CHAT

Played = Callable[[str], Any]

#: tokens of the model for the request and its output
WINDOW = 4_000
TASK = "Who keeps parcels in hall 7?"
SESSION = "report-42"
#: 60 documents of about 120 tokens each; a search finds more than fit into the window
INDEX = [
    {
        "id": f"document-{number}",
        "text": " ".join(f"Parcel {number}-{line} stands in row {line * 3} of hall {number}." for line in range(8)),
    }
    for number in range(60)
]


def search(query: str) -> list[dict[str, str]]:
    """Return 40 documents, best first, starting at the number in the query."""
    first = int(query)
    return INDEX[first : first + 40]


def call(*queries: int) -> Turn:
    return Turn(tool_calls=tuple(ToolCall("retrieve", json.dumps({"query": str(first)})) for first in queries))


#: what the model asks for: overlapping documents, two concurrent searches, and the first one again
TURNS = (call(0), call(5, 5), call(0), call(12, 20), call(3), Turn("Nobody."))


def recipe(heading: str) -> str:
    """Return the code block below a heading of the document."""
    text = (ROOT / "docs/guides/token-counts.md").read_text("utf-8")
    found = re.search(rf"^## {heading}$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found, heading
    return found[1]


@pytest.fixture
def strict(mock_server: MockServer, mock: MockProvider) -> Iterator[MockProvider]:
    """Yield the provider; it refuses requests over the window by its own count."""
    mock_server.provider.windows = {"gpt-5.1": WINDOW}
    yield mock
    mock_server.provider.windows = {}


@pytest.fixture
def small(strict: MockProvider, mock_server: MockServer, gateway_server: StartGateway) -> GatewayThread:
    """Return a gateway that knows the model's window."""
    return gateway_server(mock_server.url, models=[{"match": "gpt-5.1", "provider": "upstream", "window": WINDOW}])


@pytest.fixture
def played(small: GatewayThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Yield a function that runs a recipe against the gateway as a module. Its clients are closed at the end."""
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    modules: list[Any] = []

    def run(code: str) -> Any:
        file = tmp_path / "recipe.py"
        file.write_text(code.replace("http://127.0.0.1:8484", small.url))
        spec = importlib.util.spec_from_file_location("recipe", file)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "recipe", module)
        module.search = search
        spec.loader.exec_module(module)
        modules.append(module)
        return module

    yield run
    for value in [value for module in modules for value in vars(module).values()]:
        client = getattr(value, "root_client", value)  # of LangChain's models
        if isinstance(client, openai.OpenAI):
            client.close()


def said(client: str, module: Any) -> str:
    """Return the last text of a recipe's agent."""
    if client == "OpenAI SDK":
        return str(module.run(TASK))
    if client == "LangGraph":
        return str(module.graph.invoke({"messages": [("user", TASK)]})["messages"][-1].content)
    return streamed(module.graph)


def streamed(graph: Any) -> str:
    """Return the last text of the same graph with streaming."""
    pieces = [piece for piece, _ in graph.stream({"messages": [("user", TASK)]}, stream_mode="messages")]
    last = [piece for piece in pieces if piece.type == "AIMessageChunk"]
    assert len(last) > len(TURNS), "it was not streamed"
    return "".join(piece.text for piece in last)


def code_for(client: str) -> str:
    if client != "OpenAI SDK":
        pytest.importorskip("langgraph")
        pytest.importorskip("langchain_openai")
    return recipe(client.removesuffix(", streamed"))


def without_numbers(code: str) -> str:
    """Return the recipe with a tool that returns all that it finds."""
    found, count = re.subn(r'given\["remaining_tokens"\]|counts\.share\(len\(.*?\)\)', "None", code)
    assert count == 1
    return found


def results(provider: MockProvider) -> list[str]:
    """Return the tool results in the last request to the provider."""
    messages = json.loads(provider.calls[-1].body)["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


def records(gateway: GatewayThread) -> list[Any]:
    """Return the session's calls, oldest first."""
    found: list[Any] = gateway.web.get(f"/api/sessions/{SESSION}/calls").json["calls"]
    return found[::-1]


CLIENTS = ("OpenAI SDK", "LangGraph", "LangGraph, streamed")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_retrieval_tool_that_reads_the_token_counts_stays_within_the_window(
    client: str, small: GatewayThread, strict: MockProvider, played: Played
) -> None:
    strict.push(*TURNS)
    assert said(client, played(code_for(client))) == "Nobody."
    assert [call.status for call in strict.calls] == [200] * len(TURNS)
    seen = records(small)
    assert [call["context"]["trimmed"] for call in seen] == [{}] * len(TURNS)
    # The agent uses the window and does not return almost nothing.
    billed = [call.billed.input_tokens for call in strict.calls if call.billed]
    assert max(billed) > 0.6 * seen[-1]["context"]["budget"]


@pytest.mark.parametrize("client", CLIENTS)
def test_no_document_is_sent_twice(client: str, small: GatewayThread, strict: MockProvider, played: Played) -> None:
    strict.push(*TURNS)
    said(client, played(code_for(client)))
    items = [item for result in results(strict) for item in json.loads(result)]
    whole = [item["id"] for item in items if "text" in item]
    assert len(whole) == len(set(whole)) > 10
    named = {name for item in items for name in item.get("given_before", ())}
    assert named
    assert named <= set(whole)


@pytest.mark.parametrize("client", CLIENTS)
def test_all_calls_of_the_agent_are_in_the_session_totals(
    client: str, small: GatewayThread, strict: MockProvider, played: Played
) -> None:
    strict.push(*TURNS)
    said(client, played(code_for(client)))
    billed, shown = strict.billed(), small.web.get(f"/api/sessions/{SESSION}").json
    usage = shown["cumulative_token_usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (billed.input_tokens, billed.output_tokens)
    assert shown["calls"] == billed.calls == len(TURNS)
    assert shown["usage_source"] == "provider"


@pytest.mark.parametrize("client", CLIENTS[:2])
def test_without_the_token_counts_the_same_agent_is_refused(
    client: str, small: GatewayThread, strict: MockProvider, played: Played
) -> None:
    strict.push(*TURNS)
    with pytest.raises(openai.BadRequestError) as refused:
        said(client, played(without_numbers(code_for(client))))
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("client", CLIENTS[:2])
def test_without_the_token_counts_results_fetched_in_parts_are_trimmed(
    client: str, small: GatewayThread, strict: MockProvider, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = played(without_numbers(code_for(client)))
    monkeypatch.setattr(module, "search", lambda query: search(query)[:7])
    strict.push(*(call(first) for first in (0, 7, 14, 21, 28)), Turn("Nobody."))
    assert said(client, module) == "Nobody."
    assert any(record["context"]["trimmed"] for record in records(small))


def test_a_checkpointer_remembers_the_returned_documents(
    small: GatewayThread, strict: MockProvider, played: Played
) -> None:
    module = played(code_for("LangGraph"))
    memory = pytest.importorskip("langgraph.checkpoint.memory")
    graph = module.builder.compile(checkpointer=memory.InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    strict.push(call(0), Turn("Nobody."), call(0), Turn("Still nobody."))
    for _ in range(2):
        graph.invoke({"messages": [("user", TASK)]}, thread)
    first, second = map(json.loads, results(strict))
    names = {item["id"] for item in first if "id" in item}
    assert names
    assert names.isdisjoint({item.get("id") for item in second})
    assert set(second[-1]["given_before"]) <= names


def test_returned_documents_count_as_known_until_the_next_trim(small: GatewayThread, strict: MockProvider) -> None:
    cuts, handed = [], Handed()
    for steps in range(10, 22):
        headers = {"x-session-id": "cuts", "x-context-budget": "2500"}
        reply = small.web.post(CHAT, {"model": "gpt-4o", "messages": agent(steps, 12)}, headers)
        counts = Counts.of(dict(reply.headers))
        handed.turn(counts).take([{"id": str(steps)}], None)
        cuts.append((counts.cut, len(handed.state()["ids"])))
    kept = [known for _, known in cuts]
    assert max(kept) > 2, cuts
    assert kept.count(1) > 1, cuts
    assert len({cut for cut, _ in cuts}) == kept.count(1), cuts


def test_the_headers_of_a_call_match_the_counts_of_the_same_unsent_body(
    small: GatewayThread, strict: MockProvider
) -> None:
    body = {"model": "gpt-5.1", "messages": agent(3)}
    asked = fetch_counts(small.base_url, body)
    counted = Counts.of(dict(small.web.post(CHAT, body).headers), 0)
    assert (counted.conversation_tokens, counted.tool_tokens) == (asked.conversation_tokens, asked.tool_tokens)
    assert (counted.budget, counted.remaining, counted.room) == (asked.budget, asked.remaining, asked.room)
    assert 0 < (asked.remaining or 0) < WINDOW
