"""Long conversations of an agent with tools, in the format of chat requests."""

from __future__ import annotations

from typing import Any

SYSTEM = {"role": "system", "content": "You answer questions about a warehouse."}
TASK = {"role": "user", "content": "Which depot holds parcel 7-11? Look at every depot."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "list_depot",
            "description": "Parcels of a depot.",
            "parameters": {"type": "object", "properties": {"depot": {"type": "integer"}}, "required": ["depot"]},
        },
    }
]


def step(number: int, lines: int = 30) -> list[dict[str, Any]]:
    """Return a call and its result, about 16 tokens per line."""
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "list_depot", "arguments": f'{{"depot": {number}}}'},
    }
    content = "\n".join(f"Parcel {number}-{line} stands in row {line * 3} of hall {number}." for line in range(lines))
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": content},
    ]


def agent(steps: int, lines: int = 30) -> list[dict[str, Any]]:
    """Return the conversation after this number of steps."""
    return [SYSTEM, TASK, *(message for number in range(steps) for message in step(number, lines))]
