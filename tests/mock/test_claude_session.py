"""A session with a model that binds its thinking, through the official SDK and a real port."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from gateway.mock import CLAUDE_RULES, MockProvider, MockServer
from tests.support.thinking import BETA, without_thinking

LOOKUP: Any = {
    "name": "lookup",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
DROP = {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}


class Session:
    """An agent that sends its history back and appends to it."""

    def __init__(self, client: anthropic.Anthropic) -> None:
        self._client = client
        self.history: list[Any] = []
        self.extra: dict[str, Any] = {}

    def ask(self) -> Any:
        return self._client.beta.messages.create(
            model="claude-opus-5-5",
            max_tokens=500,
            system="be brief",
            tools=[LOOKUP],
            messages=self.history,
            **self.extra,
        )

    def step(self, text: str) -> None:
        """Send a message, and return results for the tool calls of the response."""
        self.history.append({"role": "user", "content": text})
        while True:
            response = self.ask()
            content = [block.model_dump(exclude_unset=True) for block in response.content]
            self.history.append({"role": "assistant", "content": content})
            calls = [block for block in response.content if block.type == "tool_use"]
            if not calls:
                return
            found = [{"type": "tool_result", "tool_use_id": call.id, "content": "a b c " * 50} for call in calls]
            self.history.append({"role": "user", "content": found})

    def shorten_the_first_result(self) -> None:
        result = next(m["content"][0] for m in self.history[4:] if m["role"] == "user")
        result["content"] = "a b c"


@pytest.fixture
def session() -> Iterator[Session]:
    provider = MockProvider(claude=CLAUDE_RULES)
    with (
        MockServer(provider) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        made = Session(client)
        made.history.append({"role": "user", "content": [{"type": "text", "text": "good day"}]})
        made.history.append({"role": "assistant", "content": [{"type": "text", "text": "hello"}]})
        for number in range(4):
            made.step(f"find number {number}")
        yield made


def test_an_append_only_session_is_accepted_and_thinks_in_every_response(session: Session) -> None:
    answers = [message["content"] for message in session.history if message["role"] == "assistant"]
    assert len(answers) == 9
    assert all(content[0]["type"] == "thinking" and content[0]["signature"] for content in answers[1:])
    session.step("and another")


def test_shortening_an_old_tool_result_is_refused(session: Session) -> None:
    session.shorten_the_first_result()
    session.history.append({"role": "user", "content": "go on"})
    with pytest.raises(anthropic.BadRequestError) as refused:
        session.ask()
    # The thinking before the tool result is valid; the first block after it is named.
    assert refused.value.body["error"]["message"] == (  # type: ignore[index]
        "messages.5.content.0: Invalid `signature` in `thinking` block. The block is bound to a different "
        "conversation. Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "
        '"drop_block". That setting requires the `thinking-binding-controls-2026-08-01` value in the '
        "`anthropic-beta` header. Content before this block differs from when it was created, first at "
        "`messages.4.content.0`."
    )


def test_removing_all_thinking_heals_the_session(session: Session) -> None:
    session.shorten_the_first_result()
    session.history = without_thinking(session.history)
    session.step("go on")
    session.step("and again")


def test_dropping_blocks_heals_the_session(session: Session) -> None:
    session.shorten_the_first_result()
    session.extra = {"thinking": DROP, "betas": [BETA]}
    session.step("go on")
    session.history.append({"role": "user", "content": "and again"})
    reports = session.ask().input_transformations
    assert {report.reason for report in reports} == {"prefix_binding_mismatch"}
    # The thinking before the changed result and the thinking created after the change are kept.
    assert [report.path for report in reports] == [f"messages.{n}.content.0" for n in (5, 7, 9, 11, 13, 15, 17)]


def test_the_sdk_builds_up_a_streamed_thinking_block() -> None:
    with (
        MockServer(MockProvider(claude=CLAUDE_RULES)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
    ):
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        whole = client.messages.create(model="claude-opus-5-5", max_tokens=100, messages=asked)
        with client.messages.stream(model="claude-opus-5-5", max_tokens=100, messages=asked) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.content[0].thinking == whole.content[0].thinking == "The request says: hi"  # type: ignore[union-attr]
        asked += [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": "more"}]
        assert client.messages.create(model="claude-opus-5-5", max_tokens=100, messages=asked).content
