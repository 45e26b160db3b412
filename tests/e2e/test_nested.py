"""Nested calls: tools that call the model themselves, sub-agents, and the gateway's own summaries."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from gateway.client import Counts
from gateway.mock import MockProvider, MockServer, ToolCall, Turn
from tests.conftest import StartGateway
from tests.support.conversations import TOOLS, agent
from tests.support.formats import Format
from tests.support.gateways import GatewayThread
from tests.support.web import parse_usage

ASK: Any = [
    {
        "type": "function",
        "function": {
            "name": "ask_expert",
            "description": "Asks an expert.",
            "parameters": {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]},
        },
    }
]
QUESTION = '{"question": "What is two and two?"}'

Expert = Callable[[str], str]


def client_of(gateway: GatewayThread, session: str, **headers: str) -> openai.OpenAI:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return openai.OpenAI(
        base_url=gateway.base_url, api_key="any", max_retries=0, default_headers={"x-session-id": session, **named}
    )


def usage_of(gateway: GatewayThread, session: str) -> tuple[int, int, int]:
    """Return input tokens, output tokens and calls of a session."""
    shown = gateway.web.get(f"/api/sessions/{session}").json
    assert shown["usage_source"] == "provider"
    usage = shown["cumulative_token_usage"]
    return usage["input_tokens"], usage["output_tokens"], shown["calls"]


def billed_by(mock: MockProvider) -> tuple[int, int, int]:
    billed = mock.billed()
    return billed.input_tokens, billed.output_tokens, billed.calls


def run(client: openai.OpenAI, expert: Expert) -> tuple[str, Any]:
    """Run an agent with one tool that asks an expert; return its last text and the headers of that response."""
    messages: list[Any] = [{"role": "user", "content": "What is two and two? Ask the expert."}]
    while True:
        raw = client.chat.completions.with_raw_response.create(model="gpt-4o", messages=messages, tools=ASK)
        answer = raw.parse().choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        if not answer.tool_calls:
            return answer.content or "", raw.headers
        with ThreadPoolExecutor(4) as threads:
            expert_texts = list(threads.map(lambda _: expert("What is two and two?"), answer.tool_calls))
        for call, text in zip(answer.tool_calls, expert_texts, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def by_chat(client: openai.OpenAI, question: str) -> str:
    answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": question}])
    return answer.choices[0].message.content or ""


def by_stream(client: openai.OpenAI, question: str) -> str:
    chunks = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": question}], stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_responses(client: openai.OpenAI, question: str) -> str:
    return client.responses.create(model="gpt-4o", input=question).output_text


def by_messages(client: openai.OpenAI, question: str) -> str:
    base = str(client.base_url).removesuffix("/v1/")
    session = {"x-session-id": str(client.default_headers["x-session-id"])}
    with anthropic.Anthropic(base_url=base, api_key="any", max_retries=0, default_headers=session) as other:
        answer = other.messages.create(
            model="mock-small", max_tokens=99, messages=[{"role": "user", "content": question}]
        )
    [block] = answer.content
    return block.text if block.type == "text" else ""


@pytest.mark.parametrize("way", [by_chat, by_stream, by_responses, by_messages])
def test_a_tool_that_calls_the_model_adds_to_the_totals_of_its_session(
    way: Callable[[openai.OpenAI, str], str], gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    mock.push(Turn(tool_calls=(ToolCall("ask_expert", QUESTION),)), Turn("It is four."), Turn("Four."))
    with client_of(gateway, session) as client:
        words, headers = run(client, lambda question: way(client, question))
    assert words == "Four."
    assert '"It is four."' in mock.calls[-1].body.decode()
    assert usage_of(gateway, session) == billed_by(mock)
    assert mock.billed().calls == 3
    assert parse_usage(headers["x-session-cumulative-token-usage"])[2] == mock.billed().total_tokens


def test_concurrent_tools_that_call_the_model_are_counted_once(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    mock.push(Turn(tool_calls=(ToolCall("ask_expert", QUESTION),) * 4), *[Turn("It is four.")] * 4, Turn("Four."))
    with client_of(gateway, session) as client:
        words, headers = run(client, lambda question: by_chat(client, question))
    assert words == "Four."
    assert usage_of(gateway, session) == billed_by(mock)
    assert headers["x-session-cumulative-calls"] == "6"


def test_the_context_counts_of_an_agent_exclude_the_calls_of_its_tools(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    mock.push(Turn(tool_calls=(ToolCall("ask_expert", QUESTION),)), Turn("It is four."), Turn("Four."))
    seen: list[Counts] = []

    def expert(question: str) -> str:
        long = [{"role": "user", "content": f"{question} {'Think it over. ' * 500}"}]
        raw = client.chat.completions.with_raw_response.create(model="gpt-4o", messages=long)  # type: ignore[arg-type]
        seen.append(Counts.of(raw.headers))
        return raw.parse().choices[0].message.content or ""

    with client_of(gateway, session) as client:
        _, headers = run(client, expert)
    assert seen[0].conversation_tokens > 1500
    assert Counts.of(headers).conversation_tokens < 100
    assert Counts.of(headers).session_tokens == mock.billed().total_tokens > 1500


def test_a_child_session_has_its_own_totals_and_uses_the_budget_of_its_parent(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"budget.tokens": 100_000})
    mock.push(Turn(tool_calls=(ToolCall("ask_expert", QUESTION),) * 2), *[Turn("It is four.")] * 2, Turn("Four."))
    with client_of(gateway, "main") as client, client_of(gateway, "expert", x_parent_session_id="main") as child:
        words, headers = run(client, lambda question: by_chat(child, question))
    assert words == "Four."
    main, expert = (usage_of(gateway, name) for name in ("main", "expert"))
    assert tuple(map(sum, zip(main, expert, strict=True))) == billed_by(mock)
    assert (main[2], expert[2]) == (2, 2)
    shown = gateway.web.get("/api/sessions/main").json
    budget = shown["budget"]
    assert (budget["used"]["tokens"], budget["used"]["calls"]) == (mock.billed().total_tokens, 4)
    assert shown["used_with_children"] == {"tokens": mock.billed().total_tokens, "calls": 4}
    # The next response reports the remaining budget, so a tool is given less.
    left = 100_000 - mock.billed().total_tokens
    assert headers["x-session-budget-remaining-tokens"] == str(left) == str(budget["remaining"])


def test_a_session_without_a_budget_shows_the_usage_of_its_children(
    gateway: GatewayThread, mock: MockProvider, session: str
) -> None:
    inner, innermost = f"{session}-inner", f"{session}-innermost"
    with (
        client_of(gateway, session) as client,
        client_of(gateway, inner, x_parent_session_id=session) as child,
        client_of(gateway, innermost, x_parent_session_id=inner) as grandchild,
    ):
        for one in (client, child, grandchild, child):
            by_chat(one, "What is two and two?")
    sums = [gateway.web.get(f"/api/sessions/{name}").json["used_with_children"] for name in (session, inner, innermost)]
    assert sums[0] == {"tokens": mock.billed().total_tokens, "calls": 4}
    assert [one["calls"] for one in sums] == [4, 3, 1]


def test_a_summary_by_the_gateway_is_in_the_totals_of_the_session(
    gateway_server: StartGateway, mock_server: MockServer, mock: MockProvider
) -> None:
    gateway = gateway_server(
        mock_server.url,
        models=[{"match": "short", "provider": "upstream", "name": "short-1"}],
        **{"context.strategies": ["summarize", "drop"], "context.summary": {"model": "short", "max_tokens": 300}},
    )
    mock.push(Turn("The expert says so."), Turn("Parcels were listed."), Turn("Hall 7."))
    with client_of(gateway, "main", x_context_budget="2500") as client:
        by_chat(client, "Which depot?")
        raw = client.chat.completions.with_raw_response.create(
            model="gpt-4o",
            messages=agent(12),  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
        )
    assert raw.parse().choices[0].message.content == "Hall 7."
    assert "summarize" in raw.headers["x-context-trimmed"]
    assert [call.model for call in mock.calls] == ["gpt-4o", "short-1", "gpt-4o"]
    assert usage_of(gateway, "main") == billed_by(mock)
    assert parse_usage(raw.headers["x-session-cumulative-token-usage"])[2] == mock.billed().total_tokens


@pytest.mark.parametrize("wire", ["chat", "messages", "responses"])
def test_the_totals_comment_of_a_chained_gateway_is_removed_from_streams(
    mock_server: MockServer, gateway_server: StartGateway, wire: str
) -> None:
    inner = gateway_server(mock_server.url)
    outer = gateway_server(inner.url)
    form = Format(wire)
    body = form.body([{"role": "user", "content": "hello"}], stream=True)
    for gateway in (inner, outer):
        reply = gateway.web.post(form.path, body, {"x-session-id": "s"})
        assert reply.body.count(b": x-session-cumulative-token-usage") == 1
    assert usage_of(outer, "s")[2] == 1
    assert b": x-session-cumulative-calls: 1\n" in reply.body
