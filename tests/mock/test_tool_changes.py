"""System messages inside a conversation that withdraw tools or offer them again, at the built-in provider."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.mock import CLAUDE_RULES, MockProvider
from tests.mock.conftest import Http

BETA = "mid-conversation-tool-changes-2026-07-01"
REMOVAL = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "lookup"}}
CHANGE = {"role": "system", "content": [REMOVAL]}
USER = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "yes"}


def status(web: Http, *messages: dict[str, Any], model: str = "claude-opus-5-5", beta: str = BETA) -> int:
    tool = {"name": "lookup", "description": "finds", "input_schema": {"type": "object", "properties": {}}}
    body = {"model": model, "max_tokens": 300, "messages": [*messages], "tools": [tool]}
    return web.send("POST", "/v1/messages", body, {"anthropic-beta": beta} if beta else {}).status


@pytest.fixture(autouse=True)
def _rules(provider: MockProvider) -> None:
    provider.claude = CLAUDE_RULES


@pytest.mark.parametrize("beta", [BETA, f"other, {BETA}", "inline-tools-2026-09-15"])
def test_a_change_after_the_user_is_accepted(web: Http, beta: str) -> None:
    assert status(web, USER, CHANGE, beta=beta) == 200
    assert status(web, USER, CHANGE, SAID, USER, beta=beta) == 200


@pytest.mark.parametrize("messages", [(CHANGE, USER), (USER, CHANGE, USER), (USER, SAID, CHANGE)])
def test_a_change_in_another_place_is_refused(web: Http, messages: tuple[dict[str, Any], ...]) -> None:
    assert status(web, *messages) == 400


def test_a_change_needs_the_beta_a_model_that_accepts_it_and_a_tool_of_the_list(web: Http) -> None:
    unknown = {"role": "system", "content": [{**REMOVAL, "tool": {"type": "tool_reference", "name": "other"}}]}
    assert status(web, USER, CHANGE, beta="") == 400
    assert status(web, USER, CHANGE, model="claude-sonnet-5") == 400
    assert status(web, USER, unknown) == 400


def test_a_withdrawn_tool_is_not_called_until_it_is_offered_again(web: Http) -> None:
    addition = {"role": "system", "content": [{**REMOVAL, "type": "tool_addition"}]}
    tool = {"name": "lookup", "description": "finds", "input_schema": {"type": "object", "properties": {}}}

    def calls(*messages: dict[str, Any]) -> list[str]:
        body = {"model": "claude-opus-5-5", "max_tokens": 300, "messages": [*messages], "tools": [tool]}
        answer = web.send("POST", "/v1/messages", body, {"anthropic-beta": BETA})
        return [block["name"] for block in answer.json["content"] if block["type"] == "tool_use"]

    assert calls(USER) == ["lookup"]
    assert calls(USER, CHANGE) == []
    assert calls(USER, CHANGE, SAID, USER, addition) == ["lookup"]
