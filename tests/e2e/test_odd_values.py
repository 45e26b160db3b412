"""Send unusual values in every field: the provider responds or the request is refused, without an internal error."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from tests.support.timing import in_time
from tests.support.web import CHAT, Web

pytestmark = pytest.mark.long

#: Values of each JSON type, including unhashable ones and nested ones.
ODD: Final[tuple[Any, ...]] = (
    None,
    -1,
    10**400,
    "",
    "x",
    "\ud83d",
    [],
    {},
    [None],
    [{"type": "x"}],
    {"type": []},
)

SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
PIXEL: Final = "data:image/png;base64,iVBORw0KGgo="

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    CHAT: {
        "model": "gpt-4o",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "finds", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "q", "schema": SCHEMA}},
        "max_tokens": 50,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
        "x_gateway": {"priority": 1},
    },
    "/v1/responses": {
        "model": "gpt-5",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "look"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "compaction", "encrypted_content": "abc"},
            {"type": "item_reference", "id": "m_1"},
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "q", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 40,
        "context_management": [{"type": "compaction", "compact_threshold": 100_000}],
        "store": True,
    },
    "/v1/messages": {
        "model": "claude-sonnet-4-5",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": "s"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "found"}]},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                ],
            },
            {"role": "user", "content": "go on"},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
    },
    # the newest model, with everything that its beta headers allow
    "/v1/messages?beta=true": {
        "model": "claude-fable-5-2",
        "max_tokens": 64,
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "system",
                "content": [
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
                ],
            },
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "x"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "found"}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "thinking": {"type": "adaptive", "block_binding": {"prefix_mismatch_behavior": "drop_block"}},
        "output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 50_000}},
        "context_management": {
            "edits": [
                {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 30_000}},
                {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50_000}},
            ]
        },
        "fallbacks": [{"model": "claude-opus-5-5"}],
    },
    "/v1/completions": {"model": "gpt-3.5-turbo-instruct", "prompt": ["a", [1, 2]], "max_tokens": 5, "n": 1},
    "/v1/embeddings": {"model": "text-embedding-3-small", "input": ["a", [1, 2]], "dimensions": 8},
}


def places(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the position of each value in a body. Schemas are tested in tests/core/counting."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*above, key)
        if one is not SCHEMA:
            yield from places(one, (*above, key))


def changed(body: dict[str, Any], place: tuple[str | int, ...], odd: object) -> dict[str, Any]:
    found = copy.deepcopy(body)
    holder: Any = found
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = odd
    return found


#: input tokens; a part of the request fits
TIGHT: Final = {"/v1/messages": "640", "/v1/messages?beta=true": "640"}
BETAS: Final = (
    "thinking-binding-controls-2026-08-01",
    "compact-2026-01-12",
    "context-management-2025-06-27",
    "mid-conversation-tool-changes-2026-07-01",
    "task-budgets-2026-03-13",
    "server-side-fallback-2026-06-01",
)
#: the gateway forwards the request, or trims it and shortens its tool results
ASKED: Final = ("nothing", "trim")


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("path", REQUESTS)
def test_an_unusual_value_anywhere_in_a_request_causes_no_internal_error(
    path: str, asked: str, *, web: Web, session: str
) -> None:
    headers = {"content-type": "application/json", "x-session-id": session, "anthropic-beta": ",".join(BETAS)}
    if asked == "trim":
        headers |= {"x-context-budget": TIGHT.get(path, "150"), "x-response-mode": "summary"}
    failed, answered = [], 0
    connection = http.client.HTTPConnection(urlsplit(web.url).netloc, timeout=60)
    for place in places(REQUESTS[path]):
        for odd in ODD:
            # ASCII, so half a surrogate pair is written as its escape
            body = json.dumps(changed(REQUESTS[path], place, odd))
            with in_time():
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            answered += answer.status == 200
            if answer.status >= 500:
                failed.append((place, odd, content[:200]))
    connection.close()
    assert not failed
    assert answered > 10, "most requests were refused"
