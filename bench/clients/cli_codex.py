"""Check Codex CLI, headless, on /v1/responses. npm: @openai/codex."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from checks import GATEWAY, KEY, MODEL, get, run, settled
from programs import ASK, SLOW_ANSWER, Program, check_session

CONFIG = f"""
model = "{MODEL}"
model_provider = "gateway"

[model_providers.gateway]
name = "gateway"
base_url = "{GATEWAY}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
EXEC = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


@cache
def program() -> Program:
    codex = Program("codex", OPENAI_API_KEY=KEY, CODEX_API_KEY=KEY)
    (codex.home / ".codex").mkdir()
    (codex.home / ".codex/config.toml").write_text(CONFIG)
    return codex


@cache
def first_turn() -> list[dict[str, Any]]:
    return [json.loads(line) for line in program().run(*EXEC, ASK).splitlines()]


def thread() -> str:
    return next(str(event["thread_id"]) for event in first_turn() if event["type"] == "thread.started")


def responses_stream_tools() -> None:
    """Check that it runs the command in the provider's first tool call, and sends the result."""
    items = [event["item"] for event in first_turn() if event["type"] == "item.completed"]
    assert any(item["type"] == "command_execution" for item in items), items
    assert items[-1]["type"] == "agent_message"
    assert items[-1]["text"].startswith("The tool answered")


def session() -> None:
    check_session(thread(), least_calls=2)
    settled()


def session_resumed() -> None:
    program().run(*EXEC, "resume", thread(), "And again.")
    check_session(thread(), least_calls=4)
    settled()


def cancel() -> None:
    slow = f'model_providers.gateway.http_headers={{"x-mock" = "{SLOW_ANSWER}"}}'
    program().leave(*EXEC, "-c", slow, "resume", thread(), "Wait.")
    settled()
    check_session(thread(), least_calls=5)


def compaction() -> None:
    """Check compaction: the built-in provider refuses to compact, and the gateway compacts."""
    provider = (
        f'model_providers.compacting={{name="OpenAI", base_url="{GATEWAY}/v1", wire_api="responses", '
        'env_key="OPENAI_API_KEY", http_headers={"x-mock" = "compaction=refused"}}'
    )
    options = ("-c", provider, "-c", 'model_provider="compacting"', "-c", "model_auto_compact_token_limit=1000")
    begun = program().run(*EXEC, *options, ASK)
    thread = next(json.loads(line)["thread_id"] for line in begun.splitlines() if "thread.started" in line)
    said = program().run(*EXEC, *options, "resume", thread, "And again.")
    assert "turn.completed" in said, said
    notes = [call["notes"] for call in get(f"{GATEWAY}/api/sessions/{thread}/calls", KEY)["calls"]]
    assert any("made by the gateway" in one.get("compaction", "") for one in notes), notes
    settled()


def base_url() -> None:
    """Check the base URL setting of its own provider, which uses a WebSocket."""
    address = f'openai_base_url="{GATEWAY}/v1"'
    said = program().run(*EXEC, "-c", 'model_provider="openai"', "-c", address, ASK)
    assert "turn.completed" in said, said
    assert "Reconnecting" not in said, said
    assert "Falling back" not in said, said
    settled()


run(responses_stream_tools, session, session_resumed, cancel, compaction, base_url)
