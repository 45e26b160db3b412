"""Check Claude Code, headless, on /v1/messages. npm: @anthropic-ai/claude-code."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from checks import GATEWAY, KEY, MODEL, run, settled
from programs import ASK, SLOW_ANSWER, Program, check_session

PRINT = ("-p", f"--model={MODEL}", "--output-format=stream-json", "--verbose", "--tools=Bash", "--allowedTools=Bash")


@cache
def program(**more: str) -> Program:
    return Program(
        "claude",
        ANTHROPIC_BASE_URL=GATEWAY,
        ANTHROPIC_API_KEY=KEY,
        # With tool search, the first offered tool, which the provider calls, would not be a real one.
        ENABLE_TOOL_SEARCH="false",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        **more,
    )


@cache
def first_turn() -> list[dict[str, Any]]:
    return [json.loads(line) for line in program().run(*PRINT, ASK).splitlines() if line.startswith("{")]


def own_name() -> str:
    return str(first_turn()[0]["session_id"])


def messages_stream_tools() -> None:
    """Check that it runs the command in the provider's first tool call, and sends the result."""
    blocks = [block for event in first_turn() if event["type"] == "assistant" for block in event["message"]["content"]]
    assert [block["name"] for block in blocks if block["type"] == "tool_use"] == ["Bash"], blocks
    assert first_turn()[-1]["result"].startswith("The tool answered")


def usage() -> None:
    """Check that it reports the settled usage."""
    (used,) = first_turn()[-1]["modelUsage"].values()
    found = settled().settled
    assert found.output == used["outputTokens"]
    assert found.input == used["inputTokens"] + used["cacheReadInputTokens"] + used["cacheCreationInputTokens"]


def session() -> None:
    check_session(own_name(), least_calls=2)
    settled()


def session_resumed() -> None:
    program().run(*PRINT, "--resume", own_name(), "And again.")
    check_session(own_name(), least_calls=4)
    settled()


def cancel() -> None:
    slow = program(ANTHROPIC_CUSTOM_HEADERS=f"x-mock: {SLOW_ANSWER}")
    slow.leave(*PRINT, "--resume", own_name(), "Wait.")
    settled()
    check_session(own_name(), least_calls=5)


run(messages_stream_tools, session, usage, session_resumed, cancel)
