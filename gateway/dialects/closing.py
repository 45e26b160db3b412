"""Write the last call of a session, in each API: an instruction at the end, and no tool calls.

Only what follows the last message, and fields outside the messages, change. So the provider's prompt cache is used, and
thinking blocks stay valid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.conversation.message import encode
from gateway.core.counting.measure import Wire
from gateway.core.counting.request import ITEMS
from gateway.dialects.fields import UNREADABLE, AnyFields, decode, join

#: the beta without which Claude refuses a task budget, and the smallest total that it accepts:
#: https://platform.claude.com/docs/en/build-with-claude/task-budgets
TASK_BUDGET_BETA: Final = b"task-budgets-2026-03-13"
_LEAST_TASK_BUDGET: Final = 20_000
TASK_BUDGET_FIELD: Final = "output_config"
_TASK_BUDGET: Final = "task_budget"
#: words of a refusal, in lower case, and the field that it is about
_REFUSALS: Final = (
    *((word, TASK_BUDGET_FIELD) for word in (b"task_budget", b"task-budget", b"task budget")),
    *((word, "tool_choice") for word in (b"tool_choice", b"toolchoice", b"tool choice")),
    (b"function_call", "function_call"),
)
#: fields that list tools, with the field and the value that forbid to call them, by format
_NO_CALLS: Final[Mapping[Wire, tuple[tuple[str, str, object], ...]]] = {
    "chat": (("tools", "tool_choice", "none"), ("functions", "function_call", "none")),
    "responses": (("tools", "tool_choice", "none"),),
    "messages": (("tools", "tool_choice", {"type": "none"}),),
}
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESULT_ROLES: Final = frozenset({"tool", "function"})
_EMPTY_LIST: Final = b"[]"


def without_tool_calls(fields: AnyFields, wire: Wire) -> dict[str, object]:
    """Return the fields that forbid the model to call tools. The list of tools stays, as the cache begins with it."""
    return {
        choice: value
        for tools, choice, value in _NO_CALLS.get(wire, ())
        if _has_entries(fields.get(tools, _EMPTY_LIST))
    }


def _has_entries(raw: bytes | msgspec.Raw) -> bool:
    try:
        return bool(_LIST.decode(raw))
    except UNREADABLE:
        return False


def with_instruction(
    fields: AnyFields, wire: Wire, messages: Sequence[bytes] | None, text: str, *, is_strict: bool
) -> msgspec.Raw:
    """Return the messages or input items with an instruction of the operator at their end, as a field's value.

    Args:
        fields: the request as the client sent it.
        wire: its format.
        messages: the messages to send; None for those in `fields`.
        text: the instruction.
        is_strict: the model may refuse a user message after another one or after a tool result.
    """
    given = bytes(fields.get(ITEMS[wire], _EMPTY_LIST))
    if messages is None and wire == "responses" and given.startswith(b'"'):
        messages = [b'{"role":"user","content":' + given + b"}"]
    elif messages is None and not given.startswith(b"["):
        return msgspec.Raw(given)  # no messages, which the provider refuses
    sent = list(messages) if messages is not None else [bytes(raw) for raw in _LIST.decode(given)]
    if wire == "responses":
        return join([*sent, encode(_input_item(text))])
    last = _extended(sent[-1], wire, text, is_strict=is_strict) if sent else None
    if last is not None:
        return join([*sent[:-1], last])
    return join([*sent, encode({"role": "user", "content": text})])


def _input_item(text: str) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def _extended(raw: bytes, wire: Wire, text: str, *, is_strict: bool) -> bytes | None:
    """Return the last message with the text after its content; None if a message of its own is better."""
    try:
        message = _MESSAGE.decode(raw)
    except UNREADABLE:
        return None
    role = decode(message.get("role", b"null"))
    if role != "user" and not (is_strict and wire == "chat" and role in _RESULT_ROLES):
        return None
    content = _with_text(bytes(message.get("content", b"")), text, is_block=wire == "messages")
    return msgspec.json.encode({**message, "content": msgspec.Raw(content)}) if content is not None else None


def _with_text(content: bytes, text: str, *, is_block: bool) -> bytes | None:
    """Return the content of a message with a text at its end. `is_block`: as a block of its own."""
    part = encode({"type": "text", "text": text})
    if content.startswith(b'"'):
        if is_block:
            return b"".join((b'[{"type":"text","text":', content, b"},", part, b"]"))
        return content[:-1] + encode(f"\n\n{text}")[1:]
    if content.startswith(b"[") and content.endswith(b"]"):
        before = content[:-1].rstrip()
        return before + (b"" if before == b"[" else b",") + part + b"]"
    return None


def refused_field(body: bytes, refused: Collection[str]) -> str | None:
    """Return the field of a closing call that a provider's error is about; None if it is about another one.

    `refused`: the fields that were left out already, which are not returned.
    """
    text = body.lower()
    return next((field for word, field in _REFUSALS if word in text and field not in refused), None)


def with_task_budget(fields: AnyFields, remaining: int) -> dict[str, object]:
    """Return the field with the tokens that the response may still use; empty if the client sets a task budget."""
    config: Any = decode(fields[TASK_BUDGET_FIELD]) if TASK_BUDGET_FIELD in fields else {}
    if not isinstance(config, dict) or _TASK_BUDGET in config:
        return {}
    budget = {"type": "tokens", "total": max(_LEAST_TASK_BUDGET, remaining), "remaining": remaining}
    return {TASK_BUDGET_FIELD: {**config, _TASK_BUDGET: budget}}
