"""Check a Responses request against the rules of its model, and create the encrypted items of responses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from gateway.mock import tokens
from gateway.mock.chat_rules import check_fields, reasoning_about
from gateway.mock.strict import StrictRules, seal, unseal
from gateway.mock.wire import ApiError, JsonObject

if TYPE_CHECKING:
    from gateway.mock.provider import MockProvider
    from gateway.mock.replies import ModelInput, Reply

_OWN_ID: Final = re.compile(r"(?:msg|fc)_mock(\d+)_\d+")
_OWN_REASONING: Final = re.compile(r"rs_mock(\d+)_0")
_SEALED: Final = ("reasoning", "compaction")


def check(rules: StrictRules, provider: MockProvider, body: JsonObject, items: Sequence[JsonObject]) -> None:
    """Refuse a request that breaks a rule of its model.

    Problems that only degrade the response are added to `provider.degraded`.

    Args:
        rules: of the model.
        provider: receives the problems.
        body: the whole request.
        items: the input of the request.

    Raises:
        ApiError: 400, with the message of the real API.
    """
    check_fields(rules, body)
    if rules.reasoning_items:
        _check_ciphertext(items)
        _check_reasoning(items)
        has_history = body.get("previous_response_id") is not None or body.get("conversation") is not None
        _check_pairs(items, has_history=has_history)
    if rules.phases:
        provider.degraded.extend(_without_phase(items))


def with_reasoning(rules: StrictRules, model_input: ModelInput, reply: Reply) -> Reply:
    """Return the reply with the tokens of its reasoning added. The text of the reasoning is never shown."""
    if not rules.reasoning_items:
        return reply
    size = tokens.count(reasoning_about(model_input))
    return replace(reply, reasoning_tokens=size, output_tokens=reply.output_tokens + size)


def reasoning_item(number: int, *, is_sealed: bool, is_done: bool) -> JsonObject:
    """Return the reasoning item at the start of a response. `is_sealed`: the client asked for its ciphertext."""
    name = f"rs_mock{number}_0"
    item: JsonObject = {"id": name, "type": "reasoning", "summary": []}
    return {**item, "encrypted_content": seal("reasoning", name)} if is_sealed and is_done else item


def _check_ciphertext(items: Sequence[JsonObject]) -> None:
    """Refuse ciphertext that was changed, or that belongs to another item or another provider."""
    for item in items:
        kind, text, name = item.get("type"), item.get("encrypted_content"), item.get("id")
        if kind not in _SEALED or not text:
            continue
        sealed = unseal(text) if isinstance(text, str) else None
        if sealed is None or sealed[0] != kind or (name is not None and sealed[1:] != [name]):
            message = (
                f"The encrypted content for item {name} could not be verified. "
                "Reason: Encrypted content could not be decrypted or parsed."
            )
            raise ApiError(400, message, code="invalid_encrypted_content")


def _check_reasoning(items: Sequence[JsonObject]) -> None:
    """Refuse a reasoning item without its following item, and an item without the reasoning before it."""
    for item, following in pairwise([*items, {}]):
        if item.get("type") == "reasoning" and not _may_follow(item, following):
            message = f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
            raise ApiError(400, message, param="input")
    earlier_ids = set[object]()
    for item in items:
        earlier_ids.add(item.get("id"))
        own = _OWN_ID.fullmatch(str(item.get("id")))
        needed = f"rs_mock{own[1]}_0" if own else None
        if needed is not None and needed not in earlier_ids:
            kind = item.get("type", "message")
            message = (
                f"Item '{item.get('id')}' of type '{kind}' was provided without its required 'reasoning' item: "
                f"'{needed}'."
            )
            raise ApiError(400, message, param="input")


def _may_follow(reasoning: JsonObject, item: JsonObject) -> bool:
    """Return True if the item may be the result of the reasoning before it."""
    kind = str(item.get("type", "message"))
    if kind in {"reasoning", "item_reference"}:
        return True
    if not (kind.endswith("_call") or (kind == "message" and item.get("role") == "assistant")):
        return False
    own, before = _OWN_ID.fullmatch(str(item.get("id"))), _OWN_REASONING.fullmatch(str(reasoning.get("id")))
    return own is None or before is None or own[1] == before[1]


def _check_pairs(items: Sequence[JsonObject], *, has_history: bool) -> None:
    """Refuse a tool call without its output, and an output without its call.

    `has_history`: the request continues a stored conversation, which may contain the call.
    """
    outputs = {item.get("call_id") for item in items if item.get("type") == "function_call_output"}
    called = set[object]()
    for item in items:
        name = item.get("call_id")
        if item.get("type") == "function_call":
            called.add(name)
            if name not in outputs:
                raise ApiError(400, f"No tool output found for function call {name}.", param="input")
        elif item.get("type") == "function_call_output" and name not in called and not has_history:
            message = f"No tool call found for function call output with call_id {name}."
            raise ApiError(400, message, param="input")


def _without_phase(items: Sequence[JsonObject]) -> Iterator[str]:
    for index, item in enumerate(items):
        is_of_assistant = item.get("role") == "assistant" and item.get("type", "message") == "message"
        if is_of_assistant and item.get("phase") not in {"commentary", "final_answer"}:
            yield f"input[{index}]: an assistant message without phase"
