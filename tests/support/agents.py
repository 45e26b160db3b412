"""Play agent sessions in Anthropic's Messages format: a client with full history and a model that calls tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic

from gateway.mock import MockProvider, ToolCall, Turn

TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"Do {name}.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
    for name in ("read", "search", "edit", "run")
]
#: the model must read, search and read again; only then may it run something
STEPS = [
    {
        "name": "look",
        "is_default": True,
        "enforce": "require",
        "available_tools": {"allowed": ["read", "search", "edit"]},
        "sequence": ["read", "search", "read"],
    },
    {
        "name": "act",
        "conditions": [{"sequence_match": ["read", "search", "read"]}],
        "enforce": "require",
        "available_tools": {"allowed": ["run", "edit"]},
    },
]
SYSTEM = "You repair a large program. Work file by file."


@dataclass
class Session:
    """A finished session: the status of each call, its response headers, and the messages at the end."""

    statuses: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)


def script(
    turns: int, *, every: int = 0, seed: int = 1, thinking_lines: int = 6, names: Sequence[str] = ()
) -> Iterator[Turn]:
    """Yield the model's turns: each thinks and calls a tool; every `every`-th one sends text to the user instead.

    `names`: the tools to call, in a cycle; random tools if empty.
    """
    chance = random.Random(seed)
    for number in range(1, turns + 1):
        thought = "\n".join(
            f"Step {number}.{line}: I look at part {chance.randrange(10**6)} next." for line in range(thinking_lines)
        )
        if every and number % every == 0:
            yield Turn(text=f"Part {number} is done.", thinking=(thought,), tool_calls=())
        else:
            name = names[(number - 1) % len(names)] if names else chance.choice(TOOLS)["name"]
            call = ToolCall(name, json.dumps({"path": f"src/part_{number}.py"}))
            yield Turn(text=f"I look at part {number}.", thinking=(thought,), tool_calls=(call,))


def result(number: int, lines: int = 40) -> str:
    """Return the text of a tool's result."""
    return "\n".join(
        f"{number}:{line} value_{number * 1000 + line} = compute({line}, 'item {number}-{line}')"
        for line in range(lines)
    )


def marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with a cache mark at the end of the last one, where clients of this API put it."""
    *before, last = messages
    content = last["content"] if isinstance(last["content"], list) else [{"type": "text", "text": last["content"]}]
    return [*before, {**last, "content": [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}]}]


def play(
    base_url: str,
    provider: MockProvider,
    turns: int,
    *,
    model: str = "claude-fable-5-2",
    headers: Mapping[str, str] | None = None,
    stream: bool = False,
    every: int = 0,
    lines: int = 40,
    seed: int = 1,
    body: Mapping[str, Any] | None = None,
    messages: list[dict[str, Any]] | None = None,
    strips_thinking: bool = False,
    caches: bool = False,
    names: Sequence[str] = (),
) -> Session:
    """Play a session against a running gateway and return it; it ends at the first error."""
    provider.push(*script(turns, every=every, seed=seed, names=names))
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)
    session = Session(messages=messages or [{"role": "user", "content": "Repair the program, part by part."}])
    for number in range(1, turns + 1):
        request: dict[str, Any] = {
            "model": model,
            "max_tokens": 1000,
            "system": SYSTEM,
            "tools": TOOLS,
            "messages": marked(session.messages) if caches else session.messages,
            "thinking": {"type": "adaptive"},
            "extra_headers": dict(headers or {}),
            **(body or {}),
        }
        try:
            if stream:
                with client.messages.stream(**request) as events:
                    message = events.get_final_message()
                    session.headers.append(dict(events.response.headers))
            else:
                raw = client.messages.with_raw_response.create(**request)
                session.headers.append(dict(raw.headers))
                message = raw.parse()
        except anthropic.APIStatusError as error:
            session.statuses.append(error.status_code)
            session.errors.append(f"turn {number}: {error.message}")
            return session
        session.statuses.append(200)
        content = [block.model_dump(mode="json", exclude_none=True) for block in message.content]
        if strips_thinking:
            content = [block for block in content if block["type"] != "thinking"]
        session.messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        answers = [{"type": "tool_result", "tool_use_id": one["id"], "content": result(number, lines)} for one in calls]
        session.messages.append({"role": "user", "content": answers or f"Go on with part {number + 1}."})
    return session
