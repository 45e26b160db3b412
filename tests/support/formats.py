"""A conversation of an agent in the request format of each API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.conversations import agent

Json = dict[str, Any]
MODEL = {"messages": "claude-opus-4-6", "responses": "gpt-4.1", "chat": "gpt-4o"}
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat": "/v1/chat/completions"}
_ARRAYS = {"messages": "messages", "responses": "input", "chat": "messages"}
_LIMITS = {"messages": "max_tokens", "responses": "max_output_tokens", "chat": "max_completion_tokens"}


@dataclass(frozen=True)
class Format:
    """An API: the path of its requests and their format."""

    wire: str

    @property
    def path(self) -> str:
        return PATHS[self.wire]

    @property
    def array(self) -> str:
        return _ARRAYS[self.wire]

    def body(self, messages: Sequence[Json], *, limit: int | None = 200, **fields: Any) -> Json:
        """Return a request; `messages` are in chat format."""
        limits = {} if limit is None else {_LIMITS[self.wire]: limit}
        return {"model": MODEL[self.wire], **limits, **self.written(messages), **fields}

    def agent(self, steps: int, **fields: Any) -> Json:
        """Return a request of an agent after this number of steps."""
        return self.body(agent(steps), **fields)

    def written(self, messages: Sequence[Json]) -> Json:
        """Return the fields that hold the messages."""
        if self.wire == "chat":
            return {"messages": list(messages)}
        system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        spoken = [message for message in messages if message["role"] != "system"]
        if self.wire == "responses":
            return {"instructions": system, "input": [item for message in spoken for item in _items(message)]}
        return {"system": system, "messages": [_anthropic(message) for message in spoken]}

    def sent(self, body: bytes) -> list[Json]:
        """Return the messages of a body that reached the provider."""
        found: list[Json] = json.loads(body)[self.array]
        return found

    def pairs(self, elements: Sequence[Json]) -> tuple[list[str], list[str]]:
        """Return the ids of the tool calls and of the tool results, in order."""
        if self.wire == "responses":
            return (
                [item["call_id"] for item in elements if item.get("type") == "function_call"],
                [item["call_id"] for item in elements if item.get("type") == "function_call_output"],
            )
        if self.wire == "chat":
            calls = [call["id"] for message in elements for call in message.get("tool_calls") or ()]
            return calls, [message["tool_call_id"] for message in elements if message["role"] == "tool"]
        blocks = [b for element in elements if isinstance(element["content"], list) for b in element["content"]]
        return (
            [block["id"] for block in blocks if block["type"] == "tool_use"],
            [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"],
        )


def _items(message: Mapping[str, Any]) -> list[Json]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    said = [{"role": message["role"], "content": message["content"]}] if message.get("content") else []
    calls = [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in message.get("tool_calls") or ()
    ]
    marks = {"x_gateway": message["x_gateway"]} if "x_gateway" in message else {}
    return [{**item, **marks} for item in (*said, *calls)]


def _anthropic(message: Mapping[str, Any]) -> Json:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return dict(message)
    said = [{"type": "text", "text": message["content"]}] if message.get("content") else []
    return {"role": "assistant", "content": [*said, *calls]}
