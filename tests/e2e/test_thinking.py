"""Sessions with models that bind thinking to its prefix are trimmed and never refused because of thinking."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import anthropic
import httpx  # noqa: F401  # before a gateway in this process imports it in a thread: two must not do so at a time
import openai
import pytest

from gateway.mock import CLAUDE_RULES, Behaviour, MockProvider, MockServer
from tests.conftest import StartGateway, StartUpstream
from tests.support.agents import STEPS, SYSTEM, TOOLS, play, result, script
from tests.support.thinking import BETA

pytestmark = pytest.mark.long

TURNS = 28
#: Input tokens. The sessions grow to three times this number.
BUDGET = 12_000
REFUSED = "bound to a different conversation"
#: headers of a client that leaves refusals to the gateway, and of a client that handles refusals of its own blocks
CLIENTS = pytest.mark.parametrize(
    "headers", [{}, {"x-claude-code-session-id": "one"}], ids=["any client", "Claude Code"]
)


@pytest.fixture
def claude(mock: MockProvider) -> Iterator[MockProvider]:
    """Yield the built-in provider with today's rules of Claude models."""
    mock.claude = CLAUDE_RULES
    yield mock
    mock.claude = ()


def refusals(provider: MockProvider) -> int:
    """Return how many calls the provider refused. Each refusal is an internal repair or an error for the client."""
    return sum(call.status == 400 for call in provider.calls)


def sent(provider: MockProvider) -> list[dict[str, Any]]:
    """Return the bodies that the provider accepted."""
    return [json.loads(call.body) for call in provider.calls if call.status == 200 and call.path == "/v1/messages"]


def thinking(messages: list[dict[str, Any]]) -> list[str]:
    """Return the signatures of the thinking blocks in some messages."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [block["signature"] for content in contents for block in content if block["type"] == "thinking"]


def client_of(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)


@pytest.mark.parametrize("model", ["claude-fable-5-2", "claude-opus-5-5", "claude-haiku-5-5"])
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"context.budget": BUDGET}, {}),
        ({"context.budget": BUDGET}, {"stream": True}),
        ({"context.budget": BUDGET}, {"every": 4}),
        ({"context.budget": BUDGET}, {"headers": {"anthropic-beta": BETA}}),
        ({}, {"headers": {"x-session-budget-tokens": "640000"}}),
        ({"steps": STEPS}, {}),
        ({"steps": STEPS, "context.budget": BUDGET}, {}),
    ],
    ids=[
        "untrimmed",
        "context budget",
        "streamed",
        "turns of the user's",
        "client sends the beta",
        "session budget",
        "required steps",
        "required steps and context budget",
    ],
)
def test_no_call_of_a_session_is_refused_for_its_thinking(
    settings: Mapping[str, object], options: Mapping[str, Any], model: str, *, gateway_server: StartGateway,
    mock_server: MockServer, claude: MockProvider,
) -> None:  # fmt: skip
    gateway = gateway_server(mock_server.url, **settings)
    session = play(gateway.base_url, claude, TURNS, model=model, **options)
    assert (session.errors, refusals(claude)) == ([], 0)
    assert session.statuses == [200] * TURNS
    reasons = {one.get("x-context-thinking") for one in session.headers}
    assert reasons <= ({None, "trim", "earlier"} if "context.budget" in settings else {None})


def test_thinking_since_a_trim_is_sent_and_thinking_before_it_is_not(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, TURNS)
    made = thinking(session.messages)
    kept = [thinking(body["messages"]) for body in sent(claude)]
    assert kept[5] == made[:5]
    trims = [number for number, headers in enumerate(session.headers) if "thinking=" in headers["x-context-trimmed"]]
    first = trims[0]
    # From the first trim on, removed blocks are never sent again.
    removed = set(made[:first]) - set(kept[first])
    assert removed
    assert all(removed.isdisjoint(blocks) for blocks in kept[first:])
    assert made[first] in kept[first + 1]
    # The sent blocks are all blocks that were not removed, without gaps.
    for blocks in kept:
        left = [block for block in made if block in blocks]
        assert blocks == left


def test_a_call_record_has_the_number_of_removed_thinking_blocks_and_the_reason(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, 25)
    trimmed = [one for one in session.headers if "thinking=" in one["x-context-trimmed"]]
    records = [
        gateway.web.get(f"/api/calls/{one['x-gateway-request-id']}").json["context"]["thinking"] for one in trimmed
    ]
    assert records[0]["reason"] == "trim"
    assert records[0]["received"] > records[0]["sent"]
    assert records[1] == {"received": records[0]["received"] + 1, "sent": records[0]["sent"] + 1, "reason": "earlier"}


def test_the_received_tokens_include_thinking_that_is_not_sent(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, 30)
    sizes = [int(headers["x-context-tokens-original"]) for headers in session.headers]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 20_000
    assert all(int(headers["x-context-tokens"]) <= BUDGET for headers in session.headers)


def test_a_second_worker_sends_the_same_thinking(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    one = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(one.base_url, claude, 22, headers={"x-session-id": "shared"})
    assert any("thinking=" in headers["x-context-trimmed"] for headers in session.headers)
    one.stop()
    other = gateway_server(mock_server.url, folder=one.folder, **{"context.budget": BUDGET})
    more = play(other.base_url, claude, 3, headers={"x-session-id": "shared"}, messages=session.messages)
    assert (more.errors, refusals(claude)) == ([], 0)
    bodies = sent(claude)
    # The messages of the second worker start with the messages that the first worker sent.
    assert bodies[22]["messages"][: len(bodies[21]["messages"])] == bodies[21]["messages"]


def test_a_raised_budget_does_not_restore_trimmed_messages(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    low = {"x-session-id": "raised", "x-context-budget": str(BUDGET)}
    session = play(gateway.base_url, claude, 22, headers=low)
    more = play(gateway.base_url, claude, 3, headers={"x-session-id": "raised"}, messages=session.messages)
    assert (more.errors, refusals(claude)) == ([], 0)
    bodies = sent(claude)
    assert bodies[22]["messages"][: len(bodies[21]["messages"])] == bodies[21]["messages"]


def test_a_refused_request_is_repaired_once_and_later_calls_are_accepted(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """The store that knew the sent messages is lost, and the messages of the client are no longer trimmed."""
    one = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(one.base_url, claude, 22)
    one.stop()
    other = gateway_server(mock_server.url)
    more = play(other.base_url, claude, 6, messages=session.messages)
    assert (more.errors, refusals(claude)) == ([], 1)
    first = other.web.get(f"/api/calls/{more.headers[0]['x-gateway-request-id']}").json
    assert first["context"]["thinking"]["reason"] == "refused"
    assert [headers["x-context-thinking"] for headers in more.headers[:2]] == ["refused", "earlier"]
    assert first["notes"]["thinking"] == "refused by the provider, removed, and sent again"
    assert all("thinking=" in headers["x-context-trimmed"] for headers in more.headers)


@CLIENTS
def test_a_provider_that_requires_thinking_of_an_open_tool_round_drops_blocks_itself(
    headers: dict[str, str], gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """Claude Code cannot repair this either: the gateway removed the thinking, not the client."""
    claude.claude = tuple(replace(rules, keeps_open_round=True) for rules in CLAUDE_RULES)
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, TURNS, headers=headers)
    assert (session.errors, refusals(claude)) == ([], 1)
    last = sent(claude)[-1]
    assert last["thinking"]["block_binding"] == {"prefix_mismatch_behavior": "drop_block"}
    assert [one.get("x-context-thinking") for one in session.headers].count("refused") == 1


@pytest.mark.parametrize(
    "headers", [{"x-claude-code-session-id": "one"}, {"anthropic-beta": BETA, "x-own": "block_binding"}], ids=["Claude Code", "block_binding"]
)  # fmt: skip
def test_a_client_that_handles_refusals_itself_receives_them(
    headers: dict[str, str], gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    session = play(gateway.base_url, claude, 3)
    changed = [{"role": "user", "content": "Another task."}, *session.messages[1:]]
    body: dict[str, Any] = {}
    if "x-own" in headers:
        body = {"thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}}
    again = play(gateway.base_url, claude, 1, headers=headers, messages=changed, body=body)
    assert again.statuses == [400]
    assert REFUSED in again.errors[0]
    assert refusals(claude) == 1


def test_a_changed_history_is_repaired_once(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    session = play(gateway.base_url, claude, 5)
    changed = [{"role": "user", "content": "Another task."}, *session.messages[1:]]
    again = play(gateway.base_url, claude, 5, messages=changed)
    assert (again.errors, refusals(claude)) == ([], 1)


@CLIENTS
def test_a_model_not_listed_as_binding_is_repaired_once_and_remembered(
    headers: dict[str, str], gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider, tmp_path: Any
) -> None:
    families = tmp_path / "families.yaml"
    families.write_text("families: {old: {models: ['claude-fable-5-2'], like: claude-new}}")
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET, "context.families": str(families)})
    session = play(gateway.base_url, claude, TURNS, headers=headers)
    assert session.errors == []
    assert refusals(claude) == 1


def test_older_models_keep_their_thinking(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, TURNS, model="claude-opus-4-8")
    assert (session.errors, refusals(claude)) == ([], 0)
    assert not any("thinking" in headers["x-context-trimmed"] for headers in session.headers)


@CLIENTS
def test_tokens_of_a_trimmed_conversation_can_be_counted(
    headers: dict[str, str], gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    session = play(gateway.base_url, claude, 22, headers=headers)
    client = client_of(gateway.base_url).with_options(default_headers=headers)
    tools: Any = TOOLS
    messages: Any = session.messages
    counted = client.messages.count_tokens(model="claude-fable-5-2", messages=messages, tools=tools, system=SYSTEM)
    assert counted.input_tokens > BUDGET


@pytest.mark.filterwarnings("ignore:Accessing the")
@pytest.mark.filterwarnings("ignore:.*ReadOnly. qualifier")
def test_a_chat_session_that_is_translated_for_claude_keeps_its_thinking_valid(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    provider = {
        "adapter": "litellm",
        "litellm": "anthropic",
        "base_url": mock_server.url,
        "key": "sk-held",
        "retries": 0,
    }
    gateway = gateway_server(
        mock_server.url, providers={"claude": provider}, default_provider="claude", **{"context.budget": 9_000}
    )
    claude.push(*script(20))
    tools: Any = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS
    ]
    messages: Any = [{"role": "user", "content": "Repair the program, part by part."}]
    trimmed = []
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        for number in range(20):
            raw = client.chat.completions.with_raw_response.create(
                model="claude-opus-5-5", messages=messages, tools=tools, max_tokens=800
            )
            trimmed.append(raw.headers["x-context-trimmed"])
            message = raw.parse().choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            for call in message.get("tool_calls", []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result(number)})
    assert refusals(claude) == 0
    first_trim = next(number for number, one in enumerate(trimmed) if "thinking=" in one)
    assert any(thinking(body["messages"]) for body in sent(claude)[first_trim + 1 :])


def test_a_fallback_and_the_return_send_no_thinking_with_another_prefix(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """Both providers represent one account. The first one fails for some calls."""
    spare = MockProvider(claude=CLAUDE_RULES)
    spare.prefix_memory = claude.prefix_memory
    row = {"auth": "none", "retries": 0, "breaker": {"failures": 1000}}
    with MockServer(spare) as spare_server:
        gateway = gateway_server(
            mock_server.url,
            providers={
                "upstream": {**row, "base_url": mock_server.url}, "second": {**row, "base_url": spare_server.url},
            },
            models=[
                {"match": "claude-fable-5-2", "provider": "upstream", "fallback": ["spare"]},
                {"match": "spare", "provider": "second", "name": "claude-fable-5-2"},
            ],
            **{"context.budget": BUDGET},
        )  # fmt: skip
        headers = {"x-session-id": "moving"}
        session = play(gateway.base_url, claude, 18, headers=headers)
        for _ in range(2):
            claude.behaviour = Behaviour(status=529)
            session = play(gateway.base_url, spare, 3, headers=headers, messages=session.messages)
            assert session.errors == []
            claude.behaviour = Behaviour()
            session = play(gateway.base_url, claude, 4, headers=headers, messages=session.messages)
            assert session.errors == []
        assert (refusals(claude), refusals(spare)) == (0, 0)
        assert len(sent(spare)) == 6


@pytest.mark.parametrize("kind", ["between_tools", "disabled"])
def test_a_request_that_cannot_carry_block_binding_is_not_repaired(
    kind: str, gateway_server: StartGateway, byte_server: StartUpstream
) -> None:
    """The refusal reaches the client unchanged, and nothing is stored for the conversation."""
    text = (
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `text`. When `thinking` is "
        "enabled, a final `assistant` message must start with a thinking block."
    )
    error = json.dumps({"type": "error", "error": {"type": "invalid_request_error", "message": text}}).encode()
    upstream = byte_server(lambda connection: connection.whole(error, status=b"400 Bad Request"))
    gateway = gateway_server(upstream.url)
    messages: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
        {"role": "user", "content": "go on"},
    ]
    with (
        client_of(gateway.base_url) as client,
        pytest.raises(anthropic.BadRequestError, match="must start with") as found,
    ):
        client.messages.create(
            model="claude-sonnet-5-5", max_tokens=10, messages=messages, extra_body={"thinking": {"type": kind}}
        )
    assert found.value.status_code == 400
    assert len(upstream.requests) == 1


def test_a_mode_that_changes_with_every_call_removes_no_thinking(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url)
    session = play(gateway.base_url, claude, 1, headers={"x-session-id": "modes"}, lines=15)
    for number in range(80):
        headers = {"x-session-id": "modes", "x-response-mode": ("table", "summary")[number % 2]}
        session = play(gateway.base_url, claude, 1, headers=headers, messages=session.messages, lines=15, seed=number)
        assert session.errors == []
        assert "thinking" not in session.headers[0]["x-context-trimmed"]
    assert refusals(claude) == 0


def test_the_provider_drops_refused_blocks_itself_if_newer_blocks_are_valid(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """The stored list of removed thinking is damaged, but what was sent since the last trim is intact."""
    gateway = gateway_server(mock_server.url, **{"context.budget": BUDGET})
    headers = {"x-session-id": "damaged"}
    session = play(gateway.base_url, claude, 18, headers=headers)
    before = thinking(sent(claude)[-1]["messages"])
    assert before
    gateway.stop()
    with contextlib.closing(sqlite3.connect(gateway.store)) as db, db:
        ((value,),) = db.execute("SELECT value FROM states WHERE id = 'damaged'").fetchall()
        state = json.loads(value)
        for prefix in state["sent_prefixes"].values():
            # The last reply before the trim is still sent, and would be sent with its thinking.
            prefix["removed"] = [[start, stop - 2] for start, stop in prefix["removed"]]
        db.execute("UPDATE states SET value = ? WHERE id = 'damaged'", (json.dumps(state).encode(),))
    again = gateway_server(mock_server.url, folder=gateway.folder, **{"context.budget": BUDGET})
    more = play(again.base_url, claude, 2, headers=headers, messages=session.messages)
    assert (more.errors, refusals(claude)) == ([], 1)
    body = sent(claude)[-1]
    assert body["thinking"]["block_binding"] == {"prefix_mismatch_behavior": "drop_block"}
    assert set(before) < set(thinking(body["messages"]))
