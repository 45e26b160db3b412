"""Check aider, headless, on /v1/chat/completions; the path names its session. PyPI: aider-chat."""

from __future__ import annotations

import json
from functools import cache

from checks import GATEWAY, KEY, MODEL, run, settled
from programs import ASK, SLOW_ANSWER, Program, check_session

NAME = "aider-task"
FLAGS = (
    f"--model=openai/{MODEL}",
    "--yes-always",
    "--no-git",
    "--no-check-update",
    "--analytics-disable",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-pretty",
)


@cache
def program() -> Program:
    return Program("aider", OPENAI_API_BASE=f"{GATEWAY}/s/{NAME}/v1", OPENAI_API_KEY=KEY)


def chat() -> None:
    assert "You said: Say hello." in program().run(*FLAGS, "--no-stream", "--message", ASK)


def chat_stream() -> None:
    assert "You said: Say hello." in program().run(*FLAGS, "--message", ASK)


def session() -> None:
    check_session(NAME, least_calls=2)
    settled()


def cancel() -> None:
    headers = {"extra_headers": {"x-mock": SLOW_ANSWER}}
    settings = program().folder / "settings.yml"
    settings.write_text(json.dumps([{"name": f"openai/{MODEL}", "edit_format": "whole", "extra_params": headers}]))
    program().leave(*FLAGS, f"--model-settings-file={settings}", "--message", ASK)
    settled()
    check_session(NAME, least_calls=3)


run(chat, chat_stream, session, cancel)
