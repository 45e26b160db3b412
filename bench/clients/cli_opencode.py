"""Check opencode, headless, on /v1/chat/completions. npm: opencode-ai."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from checks import GATEWAY, KEY, MODEL, run, settled
from programs import ASK, SLOW_ANSWER, Program, check_session

RUN = ("run", "--format", "json", "--model", f"gateway/{MODEL}")


def configure(opencode: Program, headers: dict[str, str]) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{GATEWAY}/v1", "apiKey": "{env:OPENAI_API_KEY}", "headers": headers},
        "models": {MODEL: {}},
    }
    config = {"provider": {"gateway": provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}
    (opencode.folder / "opencode.json").write_text(json.dumps(config))


@cache
def program() -> Program:
    opencode = Program("opencode", OPENAI_API_KEY=KEY)
    configure(opencode, {})
    return opencode


@cache
def first_turn() -> list[dict[str, Any]]:
    return [json.loads(line) for line in program().run(*RUN, ASK).splitlines() if line.startswith("{")]


def own_name() -> str:
    return str(first_turn()[0]["sessionID"])


def chat_stream_tools() -> None:
    """Check that it runs the command in the provider's first tool call, and sends the result."""
    parts = [event["part"] for event in first_turn() if "part" in event]
    assert any(part["type"] == "tool" for part in parts), parts
    assert [part["text"] for part in parts if part["type"] == "text"][-1].startswith("The tool answered")


def session() -> None:
    check_session(own_name(), least_calls=3)
    settled()


def session_resumed() -> None:
    program().run(*RUN, "--session", own_name(), "And again.")
    check_session(own_name(), least_calls=5)
    settled()


def cancel() -> None:
    configure(program(), {"x-mock": SLOW_ANSWER})
    program().leave(*RUN, "--session", own_name(), "Wait.")
    settled()
    check_session(own_name(), least_calls=6)


run(chat_stream_tools, session, session_resumed, cancel)
