"""A client that compacts its own conversation: the request has room, is marked, and decides nothing for later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.mock import MockProvider, MockServer, Turn
from tests.conftest import StartGateway
from tests.stores.redis_servers import RedisServer
from tests.support.conversations import TOOLS, agent
from tests.support.gateways import GatewayThread
from tests.support.web import CHAT, Web

pytestmark = pytest.mark.long

BUDGET, WINDOW = 3_000, 40_000
CLAUDE = "CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of the conversation so far."
OPENCODE = "Provide a detailed prompt for continuing our conversation above.\nDo not call any tools."
CODEX = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
PLAIN = "Sum up what you have done."
CLAUDE_HINT = {"x-claude-code-request-class": "compaction"}
CODEX_HINT = {"x-codex-turn-metadata": json.dumps({"turn_id": "t", "request_kind": "compaction"})}
MODELS = [
    {
        "match": "mock-small",
        "provider": "upstream",
        "window": WINDOW,
        "output": 8_000,
        "price": {"input": 1, "output": 2},
    }
]


@pytest.fixture
def gateway(mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway) -> GatewayThread:
    """Return a gateway whose context budget is far below the window of the model."""
    return gateway_server(mock_server.url, models=MODELS, **{"context.budget": BUDGET})


def talk(steps: int, prompt: str | None = None) -> list[dict[str, Any]]:
    return [*agent(steps), *([{"role": "user", "content": prompt}] if prompt is not None else [])]


def ask(
    web: Web, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
) -> tuple[int, list[dict[str, Any]]]:
    body = {"model": "mock-small", "messages": messages, "tools": TOOLS, **fields}
    reply = web.post(CHAT, body, {"x-session-id": "s", **(headers or {})})
    return reply.status, reply.json.get("choices", [])


def last_record(web: Web) -> dict[str, Any]:
    found: dict[str, Any] = web.get("/api/calls?session=s").json["calls"][0]
    return found


def sent(mock: MockProvider) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(mock.calls[-1].body)["messages"]
    return found


@pytest.mark.parametrize(
    ("prompt", "headers"),
    [(OPENCODE, {}), (CLAUDE, {}), (CODEX, {}), (PLAIN, CLAUDE_HINT), (PLAIN, {"x-claude-code-compaction": "auto"})],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_context_budget_does_not_trim_what_a_client_summarizes(
    gateway: GatewayThread, mock: MockProvider, prompt: str, headers: dict[str, str], *, stream: bool
) -> None:
    web, lowered = gateway.web, {"x-session-id": "s", "x-context-budget": "2500", **headers}
    assert ask(web, talk(12))[0] == 200
    assert len(sent(mock)) < len(talk(12)), "an ordinary call is trimmed"
    body = {"model": "mock-small", "messages": talk(12, prompt), "tools": TOOLS, "stream": stream}
    reply = web.post(CHAT, body, lowered)
    assert reply.status == 200
    assert sent(mock) == talk(12, prompt)
    record = last_record(web)
    assert record["request_class"] == "compaction"
    assert record["context"]["trimmed"] == {}
    assert record["context"]["budget"] > 30_000


def test_an_ordinary_call_is_trimmed_and_not_marked(gateway: GatewayThread, mock: MockProvider) -> None:
    assert ask(gateway.web, talk(12, PLAIN))[0] == 200
    assert len(sent(mock)) < len(talk(12, PLAIN))
    assert last_record(gateway.web)["request_class"] is None


def test_what_exceeds_the_window_is_trimmed_by_the_rules_with_the_whole_window_as_room(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    web = gateway.web
    ask(web, talk(40))
    before = last_record(web)["context"]
    assert ask(web, talk(120, CLAUDE))[0] == 200
    record = last_record(web)["context"]
    assert record["original_tokens"] > WINDOW
    assert before["tokens"] <= BUDGET < 20_000 < record["tokens"] < WINDOW
    assert sent(mock)[-1]["content"] == CLAUDE


def test_a_failed_compaction_leaves_the_trim_decision_of_the_conversation(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    web = gateway.web
    ask(web, talk(12))
    before = sent(mock)
    assert ask(web, talk(12, CLAUDE), {"x-mock": "status=500"})[0] == 500
    ask(web, [*talk(12), {"role": "user", "content": "Go on."}])
    assert sent(mock)[: len(before)] == before


def test_the_conversation_after_a_compaction_is_trimmed_by_a_new_decision(
    gateway: GatewayThread, mock: MockProvider
) -> None:
    web = gateway.web
    ask(web, talk(12))
    ask(web, talk(12, CLAUDE))
    summary = {"role": "user", "content": "This session is continued. Summary: depots 0 to 11 were looked at."}
    after = [talk(0)[0], summary, *talk(3)[2:]]
    assert ask(web, after)[0] == 200
    assert sent(mock) == after, "it fits, so nothing of the old history's decision applies"
    assert ask(web, [talk(0)[0], summary, *talk(12)[2:]])[0] == 200
    assert summary in sent(mock)
    assert last_record(web)["context"]["tokens"] <= BUDGET


def test_the_sdks_of_all_formats_are_recognized(gateway: GatewayThread, mock: MockProvider) -> None:
    long = "Parcel 7-11 stands in row 3 of hall 8. " * 1_500
    with anthropic.Anthropic(base_url=gateway.url, api_key="any", max_retries=0) as claude:
        messages: Any = [
            {"role": "user", "content": long},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [{"type": "text", "text": CLAUDE}]},
        ]
        claude.messages.create(
            model="mock-small", max_tokens=4_000, messages=messages, extra_headers={"x-session-id": "s"}
        )
    assert json.loads(mock.calls[-1].body)["messages"] == messages
    assert last_record(gateway.web)["request_class"] == "compaction"
    with openai.OpenAI(base_url=gateway.base_url, api_key="any", max_retries=0) as client:
        for prompt, headers in ((CODEX, {}), (PLAIN, CODEX_HINT)):
            items: Any = [*messages[:2], {"role": "user", "content": prompt}]
            client.responses.create(model="mock-small", input=items, extra_headers={"x-session-id": "s", **headers})
            assert json.loads(mock.calls[-1].body)["input"] == items
            assert last_record(gateway.web)["request_class"] == "compaction"


def test_compactions_of_the_responses_api_are_marked(gateway: GatewayThread) -> None:
    items = [{"role": "user", "content": "hi"}, {"type": "compaction_trigger"}]
    gateway.web.post("/v1/responses", {"model": "mock-small", "input": items}, {"x-session-id": "s"})
    assert last_record(gateway.web)["request_class"] == "compaction"
    gateway.web.post("/v1/responses/compact", {"model": "mock-small", "input": "hi"}, {"x-session-id": "s"})
    assert last_record(gateway.web)["request_class"] == "compaction"


# --- with little budget left ---------------------------------------------------------------------------------------


def test_a_compaction_is_trimmed_to_the_budget_that_is_left_and_keeps_output_for_a_summary(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"budget.tokens": 9_000, "budget.modes": False})
    status, _ = ask(gateway.web, talk(40, CLAUDE), max_tokens=4_000)
    assert status == 200
    body = json.loads(mock.calls[-1].body)
    assert 2_048 <= body["max_tokens"] <= 4_000
    assert last_record(gateway.web)["context"]["tokens"] < 7_000


def test_a_compaction_is_refused_before_its_summary_would_be_cut_short(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"budget.tokens": 2_000})
    assert ask(gateway.web, talk(0), max_tokens=4_000)[0] == 200
    assert ask(gateway.web, talk(0, CLAUDE), max_tokens=4_000)[0] == 400
    assert len(mock.calls) == 1


def test_a_compaction_summarizes_full_results_where_an_ordinary_call_gets_shorter_ones(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS, **{"budget.tokens": 40_000})
    rows = json.dumps([{"id": number, "hall": number % 7, "state": "open"} for number in range(150)])
    call, result = talk(1)[2:]
    shown = [*talk(0), call, {**result, "content": rows}, {"role": "assistant", "content": "Seen."}]
    while len(mock.calls) < 30 and (not mock.calls or sent(mock)[3]["content"] == rows):
        assert ask(gateway.web, [*shown, {"role": "user", "content": "Go on."}], max_tokens=300)[0] == 200
    assert sent(mock)[3]["content"] != rows
    ask(gateway.web, [*shown, {"role": "user", "content": CLAUDE}], max_tokens=3_000)
    assert sent(mock)[3]["content"] == rows


def test_a_step_does_not_force_a_tool_call_instead_of_a_summary(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    steps = [{"name": "look", "is_default": True, "enforce": "require", "sequence": ["list_depot"]}]
    gateway = gateway_server(mock_server.url, models=MODELS, steps=steps)
    ask(gateway.web, talk(0))
    assert json.loads(mock.calls[-1].body)["tool_choice"] not in (None, "auto")
    ask(gateway.web, talk(0, CLAUDE), {"x-session-id": "other"})
    assert json.loads(mock.calls[-1].body).get("tool_choice", "auto") == "auto"


def test_a_large_conversation_is_recognized(gateway: GatewayThread, mock: MockProvider) -> None:
    words = [{"role": "user", "content": "x" * 600_000}, {"role": "assistant", "content": "Yes."}]
    ask(gateway.web, [*words, {"role": "user", "content": CLAUDE}], max_tokens=100)
    assert last_record(gateway.web)["request_class"] == "compaction"


def test_the_reported_tokens_of_a_compaction_do_not_correct_later_counts(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway
) -> None:
    gateway = gateway_server(mock_server.url, models=MODELS)

    def count() -> int:
        body = {"model": "mock-small", "messages": talk(4), "tools": TOOLS}
        return int(gateway.web.post("/api/count?session=s", body).json["tokens"])

    ask(gateway.web, talk(3))
    before = count()
    mock.push(Turn("A summary.", usage=(20_000, 10)))
    ask(gateway.web, talk(30, CLAUDE))
    assert count() == before
    mock.push(Turn("An answer.", usage=(20_000, 10)))
    ask(gateway.web, talk(30))
    assert count() != before, "an ordinary call corrects them"


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store_flags(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the settings of each kind of store."""
    if request.param != "redis":
        yield {"store.url": "memory://"} if request.param == "memory" else {}
        return
    redis = RedisServer(tmp_path)
    yield {"store.url": redis.url}
    redis.kill()


def test_a_compaction_may_use_what_is_kept_for_the_closing_call(
    mock_server: MockServer, mock: MockProvider, gateway_server: StartGateway, store_flags: dict[str, str]
) -> None:
    budget = {"budget.tokens": 20_000, "budget.closing": {"reserve": 0.5}, "budget.clamp_output": False}
    gateway = gateway_server(mock_server.url, models=MODELS, **budget, **store_flags)
    mock.push(Turn("An answer.", usage=(120, 9_000)))
    assert ask(gateway.web, talk(0), max_tokens=100)[0] == 200
    before = len(mock.calls)
    # A subagent that compacts leaves it to the main agent.
    assert ask(gateway.web, talk(2, CLAUDE), {"x-agent-id": "finder"}, max_tokens=4_000)[0] == 400
    assert ask(gateway.web, talk(2, CLAUDE), max_tokens=4_000)[0] == 200
    body = json.loads(mock.calls[-1].body)
    assert (len(mock.calls), body["max_tokens"], body["messages"]) == (before + 1, 4_000, talk(2, CLAUDE))
    assert last_record(gateway.web)["request_class"] == "compaction"
    # An ordinary call of the same size does not fit into the other half: it becomes the closing call.
    assert ask(gateway.web, talk(2, PLAIN), max_tokens=4_000)[0] == 200
    assert json.loads(mock.calls[-1].body)["messages"] != talk(2, PLAIN)
