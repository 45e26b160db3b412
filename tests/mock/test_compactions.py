"""Compaction of a Claude model's conversation: on demand, with a signed block, and at a threshold, without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, ToolCall, Turn
from tests.mock.conftest import Http, Reply
from tests.support.thinking import BETA

Json = dict[str, Any]

PATH = "/v1/messages"
ON_DEMAND, THRESHOLD = "compact-2026-09-04", "compact-2026-01-12"
TOOL = {"name": "lookup", "input_schema": {"type": "object", "properties": {}}}
SUMMARIZE: Json = {"compaction": {"type": "summarize"}}
COMPACT: Json = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}}
COMPACTS: Json = {"context_management": {"edits": [COMPACT]}}
CALL = {"type": "tool_use", "id": "t1", "name": "lookup", "input": {}}


class Agent:
    """An agent that thinks and sends its history back."""

    def __init__(self, web: Http, model: str = "claude-opus-5-5") -> None:
        self._web = web
        self.model = model
        self.betas = [ON_DEMAND, BETA]
        self.messages: list[Any] = []

    def send(self, messages: list[Any] | None = None, path: str = PATH, **fields: object) -> Reply:
        sent = self.messages if messages is None else messages
        body = {"model": self.model, "max_tokens": 500, "system": "be brief", "tools": [TOOL], "messages": sent}
        return self._web.send("POST", path, {**body, **fields}, {"anthropic-beta": ",".join(self.betas)})

    def step(self, text: str, **fields: Any) -> Json:
        self.messages.append({"role": "user", "content": text})
        answer = self.send(**fields)
        assert answer.status == 200, answer.json
        self.messages.append({"role": "assistant", "content": answer.json["content"]})
        found: Json = answer.json
        return found

    def compact(self, count: int, **fields: object) -> Json:
        """Replace the first messages with their summary."""
        answer = self.send(self.messages[:count], **{**SUMMARIZE, **fields})
        assert answer.json["stop_reason"] == "compaction", answer.json
        self.messages[:count] = [{"role": "assistant", "content": answer.json["content"]}]
        found: Json = answer.json
        return found


@pytest.fixture
def agent(web: Http, provider: MockProvider) -> Agent:
    """An agent after three turns: six messages, each response with thinking and a text."""
    provider.claude = CLAUDE_RULES
    provider.push(*(Turn(text=f"answer {number}", thinking=(f"I think {number}",)) for number in range(20)))
    made = Agent(web)
    for number in range(3):
        made.step(f"question {number}")
    return made


def error(answer: Reply) -> str:
    assert answer.status == 400, answer.json
    return str(answer.json["error"]["message"])


def code(answer: Reply) -> object:
    return answer.json["error"].get("details", {}).get("error_code")


def test_a_summary_is_a_signed_block_alone_and_billed_as_an_iteration(agent: Agent, provider: MockProvider) -> None:
    before = provider.billed()
    prompt = agent.send(path=f"{PATH}/count_tokens", max_tokens=None).json["input_tokens"]
    answer = agent.send(**SUMMARIZE).json
    (block,) = answer["content"]
    assert block.keys() == {"type", "content", "signature"}
    (once,) = answer["usage"]["iterations"]
    assert (once["type"], once["input_tokens"]) == ("compaction", prompt)
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (0, 0)
    billed = provider.billed()
    assert billed.input_tokens - before.input_tokens == prompt
    assert billed.output_tokens - before.output_tokens == once["output_tokens"] > 0


def test_a_streamed_summary_arrives_whole(agent: Agent) -> None:
    events = agent.send(**SUMMARIZE, stream=True).events
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    block = next(event["content_block"] for event in events if event["type"] == "content_block_start")
    assert block["content"]
    assert block["signature"]
    assert [one["type"] for one in events[-2]["usage"]["iterations"]] == ["compaction"]


KEEP = (2, 3, 4, 6)


@pytest.mark.parametrize("count", KEEP)
def test_kept_turns_keep_their_thinking(agent: Agent, count: int) -> None:
    # The third message is a user message, so the kept turns start with the response to it.
    agent.compact(count)
    for number in range(2):
        assert agent.step(f"and now {number}")["input_transformations"] == []


def test_thinking_stays_valid_through_a_second_compaction(agent: Agent) -> None:
    agent.compact(2)
    agent.step("and now")
    agent.compact(3)
    assert agent.step("and then")["input_transformations"] == []
    old = agent.messages[0]
    agent.compact(4)
    assert agent.step("in the end")["input_transformations"] == []
    # Thinking created after the newest block is bound to that block.
    agent.messages[0] = old
    agent.messages.append({"role": "user", "content": "and again"})
    assert "bound to a different conversation" in error(agent.send())


def change(place: str, value: object) -> Callable[[Agent], None]:
    def apply(agent: Agent) -> None:
        *steps, last = place.split("/")
        found: Any = agent.messages
        for step in steps:
            found = found[int(step) if step.isdecimal() else step]
        found[int(last) if last.isdecimal() else last] = value

    return apply


def insert(number: int, message: Json) -> Callable[[Agent], None]:
    return lambda agent: agent.messages.insert(number, message)


CHANGES: dict[str, Callable[[Agent], Any]] = {
    "a kept message is edited": change("1/content", "other words"),
    "a kept message is skipped": lambda agent: agent.messages.pop(1),
    "a message is added before the kept turns": insert(1, {"role": "system", "content": "The user is away."}),
    "the block is left out": lambda agent: agent.messages.pop(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_kept_thinking_is_invalid_after_a_change(agent: Agent, name: str) -> None:
    agent.compact(2)
    CHANGES[name](agent)
    agent.messages.append({"role": "user", "content": "go on"})
    assert "bound to a different conversation" in error(agent.send())
    binding = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    dropped = agent.send(thinking=binding).json["input_transformations"]
    assert {one["reason"] for one in dropped} == {"prefix_binding_mismatch"}


@pytest.mark.parametrize("fields", [{"system": "be long"}, {"tools": []}], ids=["system", "tools"])
def test_a_compaction_with_another_system_prompt_or_other_tools_invalidates_kept_thinking(
    agent: Agent, fields: Json
) -> None:
    # The check of the request itself would refuse the thinking in it.
    for message in agent.messages[:2]:
        message["content"] = [{"type": "text", "text": "hm"}]
    agent.messages[2:] = []
    agent.step("question")
    agent.compact(2, **fields)
    agent.messages.append({"role": "user", "content": "go on"})
    assert "bound to a different conversation" in error(agent.send())


def test_a_compaction_by_a_model_without_the_check_invalidates_kept_thinking(agent: Agent) -> None:
    agent.model = "claude-opus-5"
    agent.compact(2)
    agent.model = "claude-opus-5-5"
    agent.messages.append({"role": "user", "content": "go on"})
    assert "bound to a different conversation" in error(agent.send())


def test_kept_turns_that_begin_with_the_role_of_the_last_summarized_message_lose_their_thinking(agent: Agent) -> None:
    agent.messages[2:] = [{"role": "assistant", "content": "One more thing."}]
    agent.step("question")
    # The last summarized message is an assistant message, and the kept turns start with one too.
    agent.compact(2)
    agent.messages.append({"role": "user", "content": "go on"})
    assert "bound to a different conversation" in error(agent.send())


PLACES: dict[str, tuple[Callable[[Json], list[Json]], str | None, str]] = {
    "after a message": (
        lambda block: [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}],
        "compaction_block_misplaced",
        "must be sent first",
    ),
    "twice": (lambda block: [{"role": "assistant", "content": [block, block]}], None, "one `compaction` block at most"),
    "edited": (
        lambda block: [{"role": "assistant", "content": [{**block, "content": "Other."}]}],
        "compaction_content_mismatch",
        "differs from the signed one",
    ),
    "forged": (
        lambda block: [{"role": "assistant", "content": [{**block, "signature": "Zm9yZ2Vk"}]}],
        "compaction_signature_invalid",
        "Invalid `signature` in `compaction` block",
    ),
    "with a field of the client's": (
        lambda block: [{"role": "assistant", "content": [{**block, "citations": None}]}],
        None,
        "messages.0.content.0.compaction.citations: Extra inputs are not permitted",
    ),
    "without its signature": (
        lambda block: [{"role": "assistant", "content": [{"type": "compaction", "content": block["content"]}]}],
        None,
        "a `compaction` block with `content` requires its `signature`",
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_signed_block_comes_first_and_unchanged(agent: Agent, name: str) -> None:
    place, wanted, words = PLACES[name]
    agent.compact(6)
    block = agent.messages[0]["content"][0]
    answer = agent.send([*place(block), {"role": "user", "content": "go on"}])
    assert words in error(answer)
    assert code(answer) == wanted


def test_a_signed_block_may_begin_the_first_message_and_carry_a_cache_mark(agent: Agent) -> None:
    agent.compact(6)
    block = {**agent.messages[0]["content"][0], "cache_control": {"type": "ephemeral"}}
    said = {"type": "text", "text": "go on"}
    assert agent.send([{"role": "user", "content": [block, said]}]).status == 200


@pytest.mark.parametrize(
    ("betas", "words"),
    [
        ([], "does not match any of the expected tags"),
        ([THRESHOLD], "`signature` requires anthropic-beta: compact-2026-09-04"),
    ],
    ids=["no beta", "the other beta"],
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
def test_later_requests_need_the_beta(agent: Agent, betas: list[str], words: str, path: str) -> None:
    agent.compact(6)
    agent.messages.append({"role": "user", "content": "go on"})
    agent.betas = betas
    assert words in error(agent.send(path=path))
    if not betas:
        assert "requires anthropic-beta: compact-2026-09-04" in error(agent.send([], **SUMMARIZE))


BUDGET = {"type": "tokens", "total": 50_000, "remaining": 9_000}
REFUSED: dict[str, Json] = {
    "context_management": {"context_management": {"edits": []}},
    "stop_sequences": {"stop_sequences": ["x"]},
    "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    "tool_choice": {"tool_choice": {"type": "any"}},
    "output_config.task_budget.remaining": {"output_config": {"task_budget": BUDGET}},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_for_a_summary_takes_no_field_that_would_do_nothing(agent: Agent, name: str) -> None:
    agent.betas += ["task-budgets-2026-03-13", "context-management-2025-06-27"]
    assert error(agent.send(**SUMMARIZE, **REFUSED[name])).startswith(f"{name}: cannot be combined with")


def test_a_task_budget_without_its_rest_goes_with_a_summary_and_never_with_it(agent: Agent) -> None:
    agent.betas.append("task-budgets-2026-03-13")
    agent.compact(6, output_config={"task_budget": {"type": "tokens", "total": 50_000}})
    agent.messages.append({"role": "user", "content": "go on"})
    assert "remaining" in error(agent.send(output_config={"task_budget": BUDGET}))


def test_an_open_tool_call_and_an_empty_conversation_are_not_summarized(agent: Agent) -> None:
    open_call = [{"role": "user", "content": "find it"}, {"role": "assistant", "content": [CALL]}]
    assert "ends in a tool call with no result" in error(agent.send(open_call, **SUMMARIZE))
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "found"}]}
    assert agent.send([*open_call, result], **SUMMARIZE).status == 200
    nothing = agent.send([], **SUMMARIZE)
    assert error(nothing)
    assert code(nothing) == "compaction_nothing_to_summarize"


@pytest.mark.parametrize(
    ("turn", "limit", "reason"),
    [
        (Turn(text="a very long summary"), 2, "max_tokens"),
        (Turn(text="I look", tool_calls=(ToolCall("lookup", "{}"),)), 500, "tool_use"),
        (Turn(refusals=("cyber",)), 500, "refusal"),
        (Turn(text=""), 500, "end_turn"),
    ],
    ids=["cut short", "a tool call", "refused", "empty"],
)
def test_without_a_summary_the_response_is_empty(
    turn: Turn, limit: int, reason: str, agent: Agent, provider: MockProvider
) -> None:
    provider.reset()
    provider.push(turn)
    answer = agent.send(**SUMMARIZE, max_tokens=limit).json
    assert (answer["content"], answer["stop_reason"]) == ([], reason)
    assert [one["type"] for one in answer["usage"]["iterations"]] == ["compaction"]
    assert provider.billed().calls == (reason != "refusal")


def test_haiku_does_not_compact(agent: Agent) -> None:
    agent.model = "claude-haiku-5-5"
    agent.messages = [{"role": "user", "content": "hi"}]
    assert error(agent.send(**SUMMARIZE)) == "compaction: This model does not support compaction."
    agent.betas = [THRESHOLD]
    assert "does not support `compact_20260112`" in error(agent.send(**COMPACTS))


# Compaction at a threshold.


@pytest.fixture
def long(agent: Agent) -> Agent:
    """An agent whose conversation is over 50,000 tokens."""
    agent.betas = [THRESHOLD, BETA]
    agent.messages.append({"role": "user", "content": "word " * 51_000})
    return agent


def test_a_long_conversation_is_compacted_within_the_response(long: Agent, provider: MockProvider) -> None:
    before = provider.billed()
    answer = long.send(**COMPACTS).json
    assert [block["type"] for block in answer["content"]] == ["compaction", "thinking", "text"]
    assert answer["content"][0].keys() == {"type", "content"}
    usage = answer["usage"]
    summary, message = usage["iterations"]
    assert (summary["type"], message["type"]) == ("compaction", "message")
    assert summary["input_tokens"] > 50_000 > message["input_tokens"] == usage["input_tokens"]
    assert usage["output_tokens"] == message["output_tokens"]
    billed = provider.billed()
    assert billed.input_tokens - before.input_tokens == summary["input_tokens"] + message["input_tokens"]
    assert billed.output_tokens - before.output_tokens == summary["output_tokens"] + message["output_tokens"]
    assert answer["context_management"] == {"applied_edits": []}


def test_messages_before_an_unsigned_block_are_ignored_and_not_billed(long: Agent) -> None:
    answer = long.send(**COMPACTS).json
    long.messages.append({"role": "assistant", "content": answer["content"]})
    whole = long.step("go on", **COMPACTS)
    assert (whole["input_transformations"], whole["usage"]["input_tokens"] < 1_000) == ([], True)
    shorter = copy.deepcopy(long.messages[7:])
    assert long.send([*shorter, {"role": "user", "content": "more"}], **COMPACTS).json["input_transformations"] == []
    shorter[0]["content"][0]["content"] = "Other."
    assert "bound to a different conversation" in error(
        long.send([*shorter, {"role": "user", "content": "more"}], **COMPACTS)
    )


def test_a_pause_returns_the_block_alone_and_the_next_request_goes_on(long: Agent, provider: MockProvider) -> None:
    edit: Json = {"context_management": {"edits": [{**COMPACT, "pause_after_compaction": True}]}}
    answer = long.send(**edit).json
    assert (answer["stop_reason"], [block["type"] for block in answer["content"]]) == ("compaction", ["compaction"])
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (0, 0)
    long.messages.append({"role": "assistant", "content": answer["content"]})
    after = long.send(**edit).json
    assert [block["type"] for block in after["content"]] == ["thinking", "text"]


def test_an_unsigned_block_is_streamed_in_one_delta(long: Agent) -> None:
    events = long.send(**COMPACTS, stream=True).events
    begun = next(event for event in events if event["type"] == "content_block_start")
    assert begun["content_block"] == {"type": "compaction", "content": None}
    deltas = [event["delta"] for event in events if event.get("delta", {}).get("type") == "compaction_delta"]
    assert len(deltas) == 1
    assert deltas[0]["content"]
    closing = events[-2]
    assert [one["type"] for one in closing["usage"]["iterations"]] == ["compaction", "message"]
    assert closing["context_management"] == {"applied_edits": []}


def test_requests_with_an_unsigned_block_need_its_beta_and_its_edit(long: Agent) -> None:
    answer = long.send(**COMPACTS).json
    long.messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "go on"}]
    assert error(long.send()) == (
        "`compaction` blocks require a `compact_20260112` strategy in `context_management.edits`."
    )
    long.betas = []
    assert "does not match any of the expected tags" in error(long.send())


@pytest.mark.parametrize(
    ("betas", "edit", "words"),
    [
        ([THRESHOLD], {**COMPACT, "trigger": {"type": "input_tokens", "value": 49_999}}, "must be at least 50000"),
        ([THRESHOLD], {**COMPACT, "trigger": {"type": "tool_uses", "value": 50_000}}, "context_management: "),
        ([THRESHOLD], {**COMPACT, "keep": 3}, "context_management: "),
        (["context-management-2025-06-27"], COMPACT, "Input tag 'compact_20260112'"),
        ([], COMPACT, "context_management: Extra inputs are not permitted"),
    ],
)
def test_the_edit_is_checked(betas: list[str], edit: Json, words: str, agent: Agent) -> None:
    agent.betas = betas
    agent.messages = [{"role": "user", "content": "hi"}]
    assert words in error(agent.send(context_management={"edits": [edit]}))


def test_a_threshold_does_not_go_with_a_signed_block(agent: Agent) -> None:
    agent.compact(6)
    agent.messages.append({"role": "user", "content": "go on"})
    agent.betas.append(THRESHOLD)
    assert "cannot run with a signed `compaction` block" in error(agent.send(**COMPACTS))
