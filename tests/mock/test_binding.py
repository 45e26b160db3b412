"""Test how thinking blocks in a request are treated: the rows of the table in Claude's documentation.

https://platform.claude.com/docs/en/build-with-claude/preserved-thinking, "What counts as a change".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, Turn
from tests.mock.conftest import Http, Reply
from tests.support.thinking import BETA, without_thinking

PATH = "/v1/messages"
Body = dict[str, Any]
Change = Callable[[Body], object]
TOOL_CHANGES = "mid-conversation-tool-changes-2026-07-01"

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PICTURE = {"type": "image", "source": {"type": "url", "url": "https://files.example/a.png?signature=1"}}
REMINDER = {"role": "system", "content": "the user is away", "clear_at": "next_user_message"}
TOOL = {"name": "lookup", "description": "finds", "input_schema": {"type": "object", "properties": {}}}
DEFERRED = {**TOOL, "name": "later", "defer_loading": True}
ADDITION = {
    "role": "system",
    "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}],
}

BOUND = (
    "Invalid `signature` in `thinking` block. The block is bound to a different conversation. Remove the block, or set "
    '`thinking.block_binding.prefix_mismatch_behavior` to "drop_block".'
)
NEEDS_BETA = " That setting requires the `thinking-binding-controls-2026-08-01` value in the `anthropic-beta` header."
COMPACTS = {"edits": [{"type": "compact_20260112"}]}
SYSTEM = " The `system` prompt differs from the one this block was created with."
TOOLS = " The `tools` list differs from the one this block was created with."
MISSING = " The `thinking` block that preceded this one when it was created is missing from this request."


def first(name: str) -> str:
    return f" Content before this block differs from when it was created, first at `{name}`."


class Agent:
    """An agent that sends its history back, changed or unchanged."""

    def __init__(self, web: Http, model: str = "claude-opus-5-5", mock: str = "") -> None:
        self._web = web
        self.mock = mock
        self.body: Body = {"model": model, "max_tokens": 300, "messages": [], "tools": [TOOL], "system": "be brief"}

    @property
    def messages(self) -> list[Any]:
        found: list[Any] = self.body["messages"]
        return found

    def send(self, body: Body | None = None, *, path: str = PATH, beta: bool = False, **fields: object) -> Reply:
        betas = [
            "other-2025-01-01",
            "context-management-2025-06-27",
            "compact-2026-01-12",
            TOOL_CHANGES,
            *([BETA] if beta else []),
        ]
        headers = {"x-mock": self.mock, "anthropic-beta": ", ".join(betas)}
        return self._web.send("POST", path, {**(body or self.body), **fields}, headers)

    def step(self, *added: Body, **fields: object) -> Any:
        """Add messages, then the response to them."""
        self.messages.extend(added)
        answer = self.send(**fields)  # type: ignore[arg-type]
        assert answer.status == 200, answer.json
        self.messages.append({"role": "assistant", "content": answer.json["content"]})
        return answer.json

    def result(self) -> Body:
        """Answer the tool calls of the last response."""
        calls = [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        found = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a b c " * 9} for call in calls]
        return {"role": "user", "content": found}

    def changed(self, change: Change) -> Body:
        """Return the body of the next request after `change` of what was sent before."""
        body = copy.deepcopy(self.body)
        change(body)
        body["messages"].append({"role": "user", "content": "go on"})
        return body


def user(text: str, *blocks: Body) -> Body:
    return {"role": "user", "content": [{"type": "text", "text": text}, *blocks]}


@pytest.fixture
def agent(web: Http, provider: MockProvider) -> Agent:
    """An agent with thinking in messages 1, 3, 6 and 8."""
    provider.claude = CLAUDE_RULES
    made = Agent(web)
    made.body["tools"] = [TOOL, DEFERRED]
    made.step(user("find it", IMAGE, PICTURE))  # 0, 1
    made.step(made.result())  # 2, 3
    made.step(user("again"), REMINDER)  # 4, 5, 6
    made.step(made.result())  # 7, 8
    return made


def edit(place: str, value: object) -> Change:
    """Set a value in the body, by a path of keys and numbers."""

    def change(body: Body) -> None:
        *steps, last = place.split("/")
        found: Any = body
        for step in steps:
            found = found[int(step) if step.isdecimal() else step]
        found[int(last) if last.isdecimal() else last] = value

    return change


def thinking(*numbers: int) -> Change:
    """Remove the thinking of these messages."""

    def change(body: Body) -> None:
        for number in numbers:
            body["messages"][number : number + 1] = without_thinking(body["messages"][number : number + 1])

    return change


def remove(number: int) -> Change:
    return lambda body: body["messages"].pop(number)


def move_reminder(body: Body) -> None:
    body["system"] += body["messages"].pop(5)["content"]


def split_message(body: Body) -> None:
    first, *rest = body["messages"][0]["content"]
    body["messages"][0:1] = [{"role": "user", "content": [first]}, {"role": "user", "content": rest}]


def mark_for_caching(body: Body) -> None:
    mark = {"type": "ephemeral"}
    body["messages"][2]["content"][0]["cache_control"] = mark
    body["messages"][2]["content"][0]["content"] = [{"type": "text", "text": "a b c " * 9, "cache_control": mark}]
    body["messages"][0]["content"][0]["cache_control"] = mark
    body["tools"][0]["cache_control"] = mark
    body["system"] = [{"type": "text", "text": "be brief", "cache_control": mark}]


def other_key_order(body: Body) -> None:
    for message in body["messages"]:
        message["content"] = [
            dict(reversed(block.items())) if isinstance(block, dict) else block for block in message["content"]
        ] if isinstance(message["content"], list) else message["content"]  # fmt: skip
    body["tools"][0]["input_schema"] = {"properties": {}, "type": "object"}


VALID: dict[str, Change] = {
    "append messages": lambda body: body["messages"].append(user("and more")),
    "move cache marks": mark_for_caching,
    "change the order of keys": other_key_order,
    "send a null": edit("messages/0/content/0/citations", None),
    "change max_tokens": edit("max_tokens", 250),
    "change the effort": edit("output_config", {"effort": "low"}),
    "change tool_choice": edit("tool_choice", {"type": "none"}),
    "change metadata": edit("metadata", {"user_id": "u"}),
    "change the thinking configuration": edit("thinking", {"type": "adaptive", "display": "summarized"}),
    "ask for server-side context editing": edit(
        "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}
    ),
    "renew a signed URL": edit("messages/0/content/2/source/url", "https://files.example/a.png?signature=2"),
    "add a deferred tool": lambda body: body["tools"].append({**DEFERRED, "name": "unused"}),
    "change a deferred tool": edit("tools/1/description", "finds more"),
    "edit the visible text of thinking": edit("messages/3/content/0/thinking", "shorter"),
    "remove all thinking": thinking(1, 3, 6, 8),
    "remove the oldest thinking": thinking(1),
    "remove the two oldest": thinking(1, 3),
    "remove the newest thinking": thinking(8),
    "remove all but a run in the middle": thinking(1, 8),
}
#: the change -> the first block that becomes invalid, and the end of the error
INVALID: dict[str, tuple[Change, str, str]] = {
    "change the system text": (edit("system", "be brief!"), "1", SYSTEM),
    "add a system block": (
        edit("system", [{"type": "text", "text": "be brief"}, {"type": "text", "text": "now"}]), "1", SYSTEM,
    ),
    "add a tool": (lambda body: body["tools"].append({**TOOL, "name": "other"}), "1", TOOLS),
    "remove a tool": (lambda body: body["tools"].pop(0), "1", TOOLS),
    "rename a tool": (edit("tools/0/name", "find"), "1", TOOLS),
    "edit a tool": (edit("tools/0/description", "found"), "1", TOOLS),
    "send a deferred tool at once": (lambda body: body["tools"][1].pop("defer_loading"), "1", TOOLS),
    "edit the first message": (edit("messages/0/content/0/text", "find"), "1", first("messages.0.content.0")),
    "encode an image again": (
        edit("messages/0/content/1/source/data", "BBBB"), "1", first("messages.0.content.1"),
    ),
    "name another file": (
        edit("messages/0/content/2/source/url", "https://files.example/b.png"), "1", first("messages.0.content.2"),
    ),
    "change the input of a tool call": (
        edit("messages/1/content/1/input", {"key": "k"}), "3", first("messages.1.content.1"),
    ),
    "shorten a tool result": (edit("messages/2/content/0/content", "a"), "3", first("messages.2.content.0")),
    "clear a tool result": (edit("messages/2/content/0/content", ""), "3", first("messages.2.content.0")),
    "edit an assistant's text": (edit("messages/3/content/1/text", "no"), "6", first("messages.3.content.1")),
    "add a text block to an old turn": (
        lambda body: body["messages"][4]["content"].append({"type": "text", "text": "be quick"}),
        "6", first("messages.4.content.1"),
    ),
    "remove a message": (remove(4), "5", first("messages.4.content.0")),
    "swap two messages": (
        lambda body: body["messages"].insert(4, body["messages"].pop(5)), "6", first("messages.4.content.0"),
    ),
    "split a message in two": (split_message, "2", first("messages.1.content.0")),
    "change the role of a message": (edit("messages/5/role", "user"), "6", first("messages.5.content.0")),
    "reword a turn-scoped message": (edit("messages/5/content", "gone"), "6", first("messages.5.content.0")),
    "remove a turn-scoped message": (remove(5), "5", ""),
    "move a system message to the top": (move_reminder, "1", SYSTEM),
    "remove thinking in the middle": (thinking(3), "6", MISSING),
    "remove two in the middle": (thinking(3, 6), "8", MISSING),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID)
def test_what_does_not_count_as_a_change(name: str, agent: Agent) -> None:
    answer = agent.send(agent.changed(VALID[name]))
    assert (answer.status, answer.json.get("error")) == (200, None)


@pytest.mark.parametrize("name", INVALID)
def test_what_counts_as_a_change(name: str, agent: Agent) -> None:
    change, number, cause = INVALID[name]
    body = agent.changed(change)
    answer = agent.send(body)
    path = f"messages.{number}.content.0"
    assert answer.status == 400
    assert answer.json["error"] == {"type": "invalid_request_error", "message": f"{path}: {BOUND}{NEEDS_BETA}{cause}"}
    counted = {key: value for key, value in body.items() if key != "max_tokens"}
    assert agent.send(counted, path=f"{PATH}/count_tokens").json["error"] == answer.json["error"]


def test_with_the_beta_the_error_does_not_mention_it(agent: Agent) -> None:
    answer = agent.send(agent.changed(edit("system", "")), beta=True)
    assert answer.json["error"]["message"] == f"messages.1.content.0: {BOUND}{SYSTEM}"


def test_error_has_no_cause_if_the_old_prefix_is_no_longer_stored(agent: Agent, provider: MockProvider) -> None:
    provider.reset()
    answer = agent.send(agent.changed(edit("system", "")))
    assert answer.json["error"]["message"] == f"messages.1.content.0: {BOUND}{NEEDS_BETA}"


def places(answer: Any) -> list[tuple[str, str, str]]:
    """Return what a response reports: the type, the message's number and the reason."""
    return [(entry["type"], entry["path"].split(".")[1], entry["reason"]) for entry in answer["input_transformations"]]


def prefix_drops(*numbers: int) -> list[tuple[str, str, str]]:
    return [("thinking_dropped", str(number), "prefix_binding_mismatch") for number in numbers]


DROP = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
ERROR = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "error"}}
BOTH = {"beta": True, "thinking": DROP}


def test_thinking_before_a_change_and_after_it_stays_valid(agent: Agent) -> None:
    agent.body = agent.changed(edit("messages/2/content/0/content", "a"))
    agent.body["messages"] = [*agent.messages[:2], *without_thinking(agent.messages[2:])]
    agent.step()
    agent.step(user("more"))
    kept = [m["content"][0]["type"] == "thinking" for m in agent.messages if m["role"] == "assistant"]
    assert kept == [True, False, False, False, True, True]


def test_thinking_that_was_removed_must_not_come_back(agent: Agent) -> None:
    whole = copy.deepcopy(agent.messages)
    agent.body["messages"] = without_thinking(agent.messages)
    agent.step(user("more"))  # 10
    agent.step(user("and more"))  # 12
    answer = agent.send(messages=[*whole, *agent.messages[len(whole) :], user("go on")], **BOTH)  # type: ignore[arg-type]
    assert places(answer.json) == prefix_drops(10, 12)


def test_the_oldest_thinking_that_was_removed_must_not_come_back(agent: Agent) -> None:
    oldest = agent.messages[1]
    agent.body["messages"][1:2] = without_thinking([oldest])
    agent.step(user("more"))  # 10
    agent.messages[1] = oldest
    refused = agent.send(agent.changed(lambda _: None))
    assert refused.json["error"]["message"] == f"messages.10.content.0: {BOUND}{NEEDS_BETA}"


@pytest.mark.parametrize("name", INVALID)
def test_failing_blocks_are_dropped_on_request_and_reported(name: str, agent: Agent) -> None:
    change, number, _ = INVALID[name]
    body = agent.changed(change)
    kinds = {n: m["content"][0].get("type") for n, m in enumerate(body["messages"]) if isinstance(m["content"], list)}
    answer = agent.send(body, **BOTH)  # type: ignore[arg-type]
    assert answer.status == 200
    assert places(answer.json) == prefix_drops(*(n for n in kinds if kinds[n] == "thinking" and n >= int(number)))


def test_dropped_blocks_are_not_billed(agent: Agent) -> None:
    agent.messages[1]["content"][0]["thinking"] = "w " * 500
    whole = agent.send(agent.changed(lambda _: None), **BOTH).json  # type: ignore[arg-type]
    without = agent.send(agent.changed(edit("system", "be quick")), **BOTH).json  # type: ignore[arg-type]
    assert (whole["input_transformations"], len(without["input_transformations"])) == ([], 4)
    assert whole["usage"]["input_tokens"] - without["usage"]["input_tokens"] > 500


@pytest.mark.parametrize("change", [edit("max_tokens", 200), edit("system", "be quick")])
def test_counting_gives_what_a_call_is_billed(change: Change, agent: Agent) -> None:
    body = agent.changed(change)
    billed = agent.send(body, **BOTH).json["usage"]["input_tokens"]  # type: ignore[arg-type]
    counted = agent.send(body, path=f"{PATH}/count_tokens", **BOTH).json  # type: ignore[arg-type]
    assert counted == {"input_tokens": billed}


def test_a_thinking_block_is_billed_as_its_text(agent: Agent) -> None:
    whole, without = (
        agent.send(agent.changed(change)).json["usage"]["input_tokens"] for change in (thinking(), thinking(1))
    )
    assert agent.messages[1]["content"][0]["thinking"] == "The request says: find it"
    assert whole - without == 6


def test_a_stream_reports_in_its_first_event(agent: Agent) -> None:
    events = agent.send(agent.changed(edit("system", "")), stream=True, **BOTH).events  # type: ignore[arg-type]
    assert events[0]["type"] == "message_start"
    assert places(events[0]["message"]) == prefix_drops(1, 3, 6, 8)
    kinds = [event.get("delta", {}).get("type") for event in events if event.get("index") == 0]
    assert kinds[0] is None
    assert set(kinds[1:-2]) == {"thinking_delta"}
    assert kinds[-2:] == ["signature_delta", None]
    assert events[1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_dropping_must_be_requested_in_each_request(agent: Agent) -> None:
    agent.body = agent.changed(edit("system", "be quick"))
    agent.step(**BOTH)
    body = agent.changed(lambda _: None)
    assert agent.send(body).status == 400
    again = agent.send(body, **BOTH).json  # type: ignore[arg-type]
    # The block created after the change, in message 10, is valid.
    assert places(again) == prefix_drops(1, 3, 6, 8)


#: (model, account is old, `thinking`) -> result of a changed system prompt, with the beta
UNSET: dict[tuple[str, bool, str], str] = {
    (model, old, setting): outcome
    for model, old, outcomes in [
        ("claude-fable-5-2", False, ("400", "400", "dropped")),
        ("claude-fable-5-2", True, ("400", "400", "dropped")),
        ("claude-mythos-5-2", True, ("400", "400", "dropped")),
        ("claude-mythos-5-1", True, ("400", "400", "dropped")),
        ("claude-fable-5-1", False, ("400", "400", "dropped")),
        ("claude-fable-5-1", True, ("allowed", "400", "dropped")),
        ("claude-opus-5-5", False, ("400", "400", "dropped")),
        ("claude-opus-5-5", True, ("allowed", "400", "dropped")),
        ("claude-sonnet-5-5", True, ("allowed", "400", "dropped")),
        ("claude-haiku-5-5", True, ("allowed", "400", "dropped")),
        ("claude-haiku-5-5", False, ("400", "400", "dropped")),
        ("claude-opus-5", False, ("clean", "clean", "clean")),
        ("claude-fable-5", False, ("clean", "clean", "clean")),
        ("claude-sonnet-5", False, ("clean", "clean", "clean")),
        ("claude-opus-4-8", False, ("clean", "clean", "clean")),
    ]
    for setting, outcome in zip(("unset", "error", "drop_block"), outcomes, strict=True)
}


@pytest.mark.parametrize(("model", "old", "setting"), UNSET)
def test_result_of_a_mismatch_by_setting_and_account(
    model: str, old: bool, setting: str, web: Http, provider: MockProvider
) -> None:
    provider.claude = CLAUDE_RULES
    agent = Agent(web, model, "old_account=1" if old else "")
    config = {"unset": {"type": "adaptive"}, "error": ERROR, "drop_block": DROP}[setting]
    agent.step(user("hi"), thinking={"type": "adaptive"})
    assert agent.messages[1]["content"][0]["type"] == "thinking"
    answer = agent.send(agent.changed(edit("system", "")), beta=True, thinking=config)
    kinds = {
        "400": "400",
        "allowed": [("thinking_mismatch_allowed", "1", "prefix_binding_mismatch")],
        "dropped": prefix_drops(1),
        "clean": [],
    }
    assert (places(answer.json) if answer.status == 200 else "400") == kinds[UNSET[model, old, setting]]


def test_an_old_account_without_the_beta_gets_no_report(web: Http, provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES
    agent = Agent(web, mock="old_account=1")
    agent.step(user("hi"))
    answer = agent.send(agent.changed(edit("system", "")))
    assert (answer.status, "input_transformations" in answer.json) == (200, False)


def test_a_gap_that_is_allowed_is_reported_for_every_later_block_but_those_created_after_it(
    web: Http, provider: MockProvider
) -> None:
    provider.claude = CLAUDE_RULES
    agent = Agent(web, mock="old_account=1")
    for number in range(4):
        agent.step(user(f"question {number}"))
    del agent.messages[3]["content"][0]
    answer = agent.step(user("question 4"), beta=True)
    allowed = [(f"messages.{number}.content.0", "thinking_mismatch_allowed") for number in (5, 7)]
    assert [(one["path"], one["type"]) for one in answer["input_transformations"]] == allowed
    answer = agent.step(user("question 5"), beta=True)
    assert [(one["path"], one["type"]) for one in answer["input_transformations"]] == allowed


MODELS = (
    "fable-5-2",
    "mythos-5-1",
    "fable-5-1",
    "opus-5-5",
    "sonnet-5-5",
    "haiku-5-5",
    "opus-5",
    "sonnet-5",
    "fable-5",
)
#: the model that created a block -> the models that read it
READERS = {
    "fable-5-2": {"fable-5-2", "mythos-5-2"},
    "fable-5-1": {"fable-5-1", "mythos-5-1", "fable-5-2"},
    "opus-5-5": {"opus-5-5", "fable-5-1", "mythos-5-1", "fable-5-2"},
    "sonnet-5-5": {"sonnet-5-5", "opus-5-5"},
    "haiku-5-5": set(MODELS),
    "opus-5": {"opus-5", "opus-5-5", "fable-5", "fable-5-1", "mythos-5-1", "fable-5-2"},
    "sonnet-5": {"sonnet-5", "sonnet-5-5", "opus-5", "opus-5-5", "fable-5", "fable-5-1", "mythos-5-1", "fable-5-2"},
}


@pytest.mark.parametrize("creator", READERS)
def test_a_model_reads_its_own_blocks_and_those_of_some_others(creator: str, web: Http, provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES
    agent = Agent(web, f"claude-{creator}")
    agent.step(user("hi"))
    for model in MODELS:
        answer = agent.send(agent.changed(lambda _: None), model=f"claude-{model}", beta=True)
        unread = [("thinking_dropped", "1", "model_binding_mismatch")]
        assert places(answer.json) == ([] if model in READERS[creator] else unread), model


def test_a_block_that_another_model_cannot_read_revives(agent: Agent) -> None:
    agent.step(user("other model"), model="claude-sonnet-5-5")
    agent.step(user("back"))
    answer = agent.send(agent.changed(lambda _: None), beta=True)
    assert (answer.status, answer.json["input_transformations"]) == (200, [])


@pytest.mark.parametrize(
    ("model", "is_dropped"), [("sonnet-5-5", True), ("haiku-5-5", True), ("opus-5-5", False), ("fable-5-1", False)]
)
def test_some_blocks_work_in_one_account_only(model: str, is_dropped: bool, web: Http, provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES
    agent = Agent(web, f"claude-{model}", "account=first")
    agent.step(user("hi"))
    agent.mock = "account=second"
    # A changed system prompt is no error for a block that is dropped for another reason.
    answer = agent.send(agent.changed(edit("system", "") if is_dropped else lambda _: None), beta=True)
    dropped = [("thinking_dropped", "1", "organization_binding_mismatch")]
    assert (answer.status, places(answer.json)) == (200, dropped if is_dropped else [])


@pytest.mark.parametrize("config", [{"type": "adaptive"}, DROP])
@pytest.mark.parametrize("signature", ["c2lnbmF0dXJl", "?", ""])
def test_forged_signature_is_always_refused(signature: str, config: Body, agent: Agent) -> None:
    body = agent.changed(edit("messages/3/content/0/signature", signature))
    answer = agent.send(body, beta=True, thinking=config)
    assert answer.json["error"]["message"] == "messages.3.content.0: Invalid `signature` in `thinking` block"


def test_a_changed_signature_is_forged(agent: Agent) -> None:
    signature = agent.messages[3]["content"][0]["signature"]
    other = ("AAAA" if signature[:4] != "AAAA" else "BBBB") + signature[4:]
    refused = agent.send(agent.changed(edit("messages/3/content/0/signature", other)))
    assert refused.json["error"]["message"] == "messages.3.content.0: Invalid `signature` in `thinking` block"


def test_a_missing_signature_and_unknown_redacted_thinking_are_refused(agent: Agent) -> None:
    def message(block: Body) -> str:
        return str(agent.send(agent.changed(edit("messages/1/content/0", block))).json["error"]["message"])

    assert message({"type": "thinking", "thinking": "x"}) == "messages.1.content.0.thinking.signature: Field required"
    assert message({"type": "redacted_thinking", "data": "AAAA"}) == (
        "messages.1.content.0: Invalid `data` in `redacted_thinking` block"
    )


#: numbers of the blocks that are sent back, in order -> accepted
LATEST = {(): True, (0, 1, 2): True, (0, 1): False, (1, 2): False, (0, 2): False, (2,): False, (1, 0, 2): False}


@pytest.mark.parametrize("kept", LATEST)
@pytest.mark.parametrize("model", ["claude-opus-5-5", "claude-opus-5"])
def test_thinking_in_the_latest_assistant_message_is_kept_whole_or_not_at_all(
    model: str, kept: tuple[int, ...], web: Http, provider: MockProvider
) -> None:
    provider.claude = CLAUDE_RULES
    provider.push(Turn(text="ok", thinking=("one", "two", "three")))
    agent = Agent(web, model)
    agent.step(user("hi"))
    content = agent.messages[1]["content"]
    assert [block["type"] for block in content] == ["thinking", "thinking", "thinking", "text"]
    agent.messages[1]["content"] = [*(content[number] for number in kept), content[3]]
    answer = agent.send(agent.changed(lambda _: None))
    assert (answer.status == 200) == LATEST[kept]
    if not LATEST[kept]:
        assert answer.json["error"]["message"] == (
            "messages.1.content.0: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
            "modified. These blocks must remain as they were in the original response."
        )


def test_an_older_message_may_lose_the_oldest_of_its_blocks(web: Http, provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES
    provider.push(Turn(text="ok", thinking=("one", "two")), Turn(text="ok"))
    agent = Agent(web)
    agent.step(user("hi"))
    agent.step(user("more"))
    assert agent.send(agent.changed(lambda body: body["messages"][1]["content"].pop(0))).status == 200
    assert agent.send(agent.changed(lambda body: body["messages"][1]["content"].pop(1))).status == 400


def test_a_deferred_tool_counts_from_where_it_is_referenced(agent: Agent) -> None:
    agent.step(user("use another tool"), ADDITION)  # 9, 10, 11
    answer = agent.send(agent.changed(edit("tools/1/description", "finds more")))
    assert answer.json["error"]["message"].startswith("messages.11.content.0: ")
    assert answer.json["error"]["message"].endswith(first("messages.10.content.0"))


def test_the_prefix_restarts_at_the_newest_compaction(agent: Agent) -> None:
    agent.body["context_management"] = COMPACTS
    agent.step(user("more"))  # 9, 10
    agent.messages[10]["content"].insert(0, {"type": "compaction", "content": "it was found"})
    agent.messages[10]["content"].pop(1)
    agent.step(user("and more"))  # 11, 12
    assert agent.send(agent.changed(edit("messages/0/content/0/text", "other"))).status == 200
    shortened = agent.changed(lambda body: body["messages"].__delitem__(slice(0, 10)))
    assert agent.send(shortened).status == 200
    assert agent.send(agent.changed(edit("messages/10/content/0/content", "not found"))).status == 400
    assert agent.send(agent.changed(edit("system", ""))).status == 400


def test_thinking_before_a_compaction_is_ignored(agent: Agent) -> None:
    agent.body["context_management"] = COMPACTS
    agent.messages.append({"role": "assistant", "content": [{"type": "compaction", "content": "it was found"}]})
    body = agent.changed(edit("messages/3/content/0/signature", "forged"))
    assert agent.send(body).status == 200


def test_a_split_response_counts_as_one_latest_message(web: Http, provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES
    provider.push(Turn(text="ok", thinking=("one", "two")))
    agent = Agent(web)
    agent.step(user("hi"))
    one, two, text = agent.messages.pop()["content"]
    agent.messages.extend({"role": "assistant", "content": [block]} for block in (one, two, text))
    body = agent.changed(lambda _: None)
    assert agent.send(body).status == 200
    del body["messages"][2]
    assert "cannot be modified" in agent.send(body).json["error"]["message"]


def test_thinking_stays_valid_after_a_reset_of_the_provider(agent: Agent, provider: MockProvider) -> None:
    provider.reset()
    assert agent.send(agent.changed(lambda _: None)).status == 200
