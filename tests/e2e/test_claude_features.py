"""Sessions that use Anthropic's own context features while the gateway trims, limits and restricts them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import httpx  # noqa: F401  # before a gateway in this process imports it in a thread: two must not do so at a time
import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer
from tests.conftest import StartGateway
from tests.support.agents import STEPS
from tests.support.claude_sessions import Agent, Feature, Played, dumped
from tests.support.gateways import GatewayThread

pytestmark = pytest.mark.long

TURNS = 40
ON_DEMAND, THRESHOLD, EDITING = "compact-2026-09-04", "compact-2026-01-12", "context-management-2025-06-27"
BUDGETS, FALLBACK = "task-budgets-2026-03-13", "server-side-fallback-2026-07-01"
EDITS = [
    {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 6}},
    {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 6_000}},
]
COMPACT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}
TASK_BUDGET = {"type": "tokens", "total": 200_000}
FEATURES = {
    "on demand": Feature([ON_DEMAND], compacts_every=12),
    "on demand, kept turns": Feature([ON_DEMAND], compacts_every=12, keeps=4),
    "threshold": Feature([THRESHOLD], {"context_management": {"edits": [COMPACT]}}, lines=200),
    "task budget": Feature([BUDGETS], {"output_config": {"task_budget": TASK_BUDGET}}, remaining_at=20),
    "fallbacks": Feature(
        [FALLBACK], {"fallbacks": [{"model": "claude-opus-4-8"}]}, model="claude-fable-5-1", refuses_every=5
    ),
    "fallbacks, streamed": Feature(
        [FALLBACK], {"fallbacks": "default"}, model="claude-fable-5-1", refuses_every=5, stream=True
    ),
    "edits": Feature([EDITING], {"context_management": {"edits": EDITS}}),
    "edits, streamed": Feature([EDITING], {"context_management": {"edits": EDITS}}, stream=True),
}
#: Input tokens. The API compacts nothing below 50,000, and a client that compacts has shorter conversations.
CONTEXT_BUDGETS = {"threshold": 60_000, "on demand": 8_000, "on demand, kept turns": 8_000}
#: Tokens: about a third more than the session needs, so that results are shortened towards its end.
SESSION_BUDGETS = {
    "on demand": 260_000, "on demand, kept turns": 320_000, "threshold": 1_300_000, "task budget": 850_000,
    "fallbacks": 900_000, "fallbacks, streamed": 900_000, "edits": 200_000, "edits, streamed": 200_000,
}  # fmt: skip
PRICES = {"claude-fable-5-1": (10, 50), "claude-opus-4-8": (5, 25), "claude-opus-5-5": (4, 20)}
MODELS = [
    {"match": name, "provider": "upstream", "price": {"input": first, "output": second}}
    for name, (first, second) in PRICES.items()
]
SETUPS = ("context budget", "session budget with modes", "steps")


@pytest.fixture
def claude(mock: MockProvider) -> Iterator[MockProvider]:
    """Yield the built-in provider with today's rules of Claude models."""
    mock.claude = CLAUDE_RULES
    yield mock
    mock.claude = ()


def settings_of(setup: str, name: str) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings of the gateway and the headers of the client."""
    common: dict[str, object] = {
        "models": MODELS,
        "providers.upstream.billed_refusals": ["bio", "frontier_llm", "reasoning_extraction"],
    }
    headers = {"x-session-id": "one"}
    if setup == "context budget":
        return {**common, "context.budget": CONTEXT_BUDGETS.get(name, 12_000)}, headers
    if setup == "steps":
        return {**common, "steps": STEPS}, headers
    return common, {**headers, "x-session-budget-tokens": str(SESSION_BUDGETS[name])}


def refusals(provider: MockProvider) -> list[str]:
    """Return the bodies of the requests that the provider refused."""
    return [call.body.decode()[:300] for call in provider.calls if call.status == 400]


def cost(provider: MockProvider) -> Decimal:
    """Return what the provider charges at the rates of each model, in USD."""
    billed = provider.billed_by_model()
    dollars = sum(
        Decimal(used.input_tokens) * PRICES[name][0] + Decimal(used.output_tokens) * PRICES[name][1]
        for name, used in billed.items()
    )
    return Decimal(dollars) / 1_000_000


def settled(gateway: GatewayThread) -> tuple[int, int, Decimal]:
    session = gateway.web.get("/api/sessions/one").json
    usage = session["cumulative_token_usage"]
    return usage["input_tokens"], usage["output_tokens"], Decimal(session["cost_usd"])


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", FEATURES)
def test_a_session_is_never_refused_and_is_charged_what_the_provider_bills(
    name: str, setup: str, gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    settings, headers = settings_of(setup, name)
    gateway = gateway_server(mock_server.url, **settings)
    feature = FEATURES[name]
    if setup == "context budget" and name == "threshold":
        # The budget starts later, because no request below the threshold is compacted.
        feature = replace(feature, lowers=(20, 20_000))
    played = Agent(gateway.base_url, claude, feature, headers).play(TURNS)
    assert (played.errors, refusals(claude)) == ([], [])
    billed = claude.billed()
    assert settled(gateway)[:2] == (billed.input_tokens, billed.output_tokens)
    assert settled(gateway)[2] == cost(claude).quantize(Decimal("0.000001"))
    _check_setup(setup, name, played)
    _check_bytes(feature, claude, played)


def _check_setup(setup: str, name: str, played: Played) -> None:
    """Check that the gateway and the API both had something to do."""
    if setup == "context budget":
        assert any("thinking=" in headers["x-context-trimmed"] for headers in played.headers)
    if setup == "session budget with modes":
        assert {headers["x-response-mode"] for headers in played.headers} > {"raw"}
    usages = [response["usage"] for response in played.responses]
    kinds = {one["type"] for usage in usages for one in usage.get("iterations") or ()}
    if "threshold" in name or "on demand" in name:
        assert "compaction" in kinds
    if "fallbacks" in name:
        assert "fallback_message" in kinds
    if "edits" in name:
        edits = [response["context_management"]["applied_edits"] for response in played.responses]
        assert any(edits)


def _check_bytes(feature: Feature, claude: MockProvider, played: Played) -> None:
    """Check that values that must not be rewritten arrived as the client sent them."""
    bodies = [call.body.decode() for call in claude.calls]
    ordinary = [body for body in bodies if '"compaction":{"type":"summarize"}' not in body]
    assert len(ordinary) == TURNS
    for key, value in feature.fields.items():
        text = f'"{key}":{dumped(value)}'
        assert sum(text not in body for body in ordinary) == bool(feature.remaining_at)
    for block in played.blocks[:-1]:
        # The unsigned blocks are from a stream or a whole response. They are sent back as the SDK writes them.
        assert any(block in body for body in ordinary)
    for body in map(json.loads, bodies):
        places = [
            (number, index)
            for number, message in enumerate(body["messages"])
            for index, part in enumerate(message["content"] if isinstance(message["content"], list) else ())
            if part["type"] == "compaction" and "signature" in part
        ]
        assert places in ([], [(0, 0)])


def thinking_in(body: bytes) -> list[str]:
    """Return the signatures of the thinking blocks that a request sends."""
    contents = [message["content"] for message in json.loads(body)["messages"]]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return [block["signature"] for block in blocks if block["type"] == "thinking"]


KEEPING = Feature([ON_DEMAND], compacts_every=12, keeps=4)


@pytest.mark.parametrize(
    ("settings", "counts"), [({}, [2, 3]), ({"context.budget": 6_000}, [0, 1])], ids=["unchanged", "trimmed before"]
)
def test_thinking_in_kept_turns_is_sent_if_the_conversation_was_untrimmed(
    settings: dict[str, object],
    counts: list[int],
    gateway_server: StartGateway,
    mock_server: MockServer,
    claude: MockProvider,
) -> None:
    """The client keeps two responses. After the first one, each new response adds its own thinking."""
    gateway = gateway_server(mock_server.url, **settings)
    played = Agent(gateway.base_url, claude, KEEPING, {"x-session-id": "one"}).play(14)
    assert (played.errors, refusals(claude)) == ([], [])
    assert [len(thinking_in(call.body)) for call in claude.calls[-2:]] == counts


def test_a_summary_request_has_results_in_the_mode_that_the_kept_turns_saw(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """The response mode changes between the last call and the request for a summary."""
    gateway = gateway_server(mock_server.url)
    agent = Agent(gateway.base_url, claude, KEEPING, {"x-session-id": "one"})
    agent.play(10)
    agent.headers = {"x-response-mode": "handle_only"}
    agent.compact()
    assert len(thinking_in(claude.calls[-1].body)) == 8, "the summary is made of the earlier thinking as well"
    agent.headers = {}
    agent.play(1)
    assert (agent.played.errors, refusals(claude)) == ([], [])
    assert len(thinking_in(claude.calls[-1].body)) == 2


def test_a_conversation_that_continues_while_it_is_summarized_keeps_its_thinking(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    gateway = gateway_server(mock_server.url, **{"context.budget": 8_000})
    agent = Agent(gateway.base_url, claude, Feature([ON_DEMAND]), {"x-session-id": "one"})
    agent.play(12)
    before = thinking_in(claude.calls[-1].body)
    assert before
    agent.ask_for_summary(agent.messages)
    agent.play(1)
    assert (agent.played.errors, refusals(claude)) == ([], [])
    assert set(before) < set(thinking_in(claude.calls[-1].body))


def test_a_client_may_omit_the_messages_that_an_unsigned_compaction_replaces(
    gateway_server: StartGateway, mock_server: MockServer, claude: MockProvider
) -> None:
    """The turns after the compaction were trimmed before it, so their thinking is bound to what was left."""
    gateway = gateway_server(mock_server.url)
    feature = replace(FEATURES["threshold"], lowers=(18, 14_000))
    agent = Agent(gateway.base_url, claude, feature, {"x-session-id": "one"})
    agent.play(24)
    assert any("thinking=" in headers["x-context-trimmed"] for headers in agent.played.headers)
    place = next(n for n, one in enumerate(agent.messages) if "compaction" in dumped(one))
    agent.messages = agent.messages[place:]
    agent.headers = {}
    agent.play(3)
    assert (agent.played.errors, refusals(claude)) == ([], [])
    assert len(thinking_in(claude.calls[-1].body)) == 2
