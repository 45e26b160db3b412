"""Check a chat request against the rules of its model, and create reasoning and signatures for responses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from gateway.mock import tokens
from gateway.mock.strict import StrictRules, matches, seal, unseal
from gateway.mock.wire import ApiError, JsonObject, encode

if TYPE_CHECKING:
    from gateway.mock.replies import ModelInput, Reply

#: Accepted instead of a signature, for calls that another model made (ai.google.dev, thought-signatures).
ANY_SIGNATURE: Final = "skip_thought_signature_validator"

_UNSIGNED: Final = (
    "Function call is missing a thought_signature in functionCall parts. This is required for tools to work correctly, "
    "and missing thought_signature may lead to degraded model performance. Additional data, function call "
    "`default_api:{name}` , position {position}. Please refer to https://ai.google.dev/gemini-api/docs/"
    "thought-signatures for more details."
)
_MISSING_RESULT: Final = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
    "(insufficient tool messages following tool_calls message)"
)
_MISSING_CALL: Final = "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
_TOOL_ID_LENGTH: Final = 9


def check(rules: StrictRules, model: str, body: JsonObject, messages: Sequence[JsonObject]) -> None:
    """Refuse a request that breaks a rule of its model. `body` is the whole request.

    Raises:
        ApiError: 400, with the message of the real API.
    """
    if not rules.models:
        return
    thinks = rules.reasoning and is_thinking(body)
    check_fields(rules, body)
    if thinks and rules.forced_choice and (choice := _forced(body.get("tool_choice"))):
        raise _refusal(rules, rules.forced_choice.format(choice=choice), param="tool_choice")
    _check_order(rules, messages)
    _check_pairs(rules, messages)
    _check_tool_ids(rules, messages)
    if thinks:
        _check_reasoning(rules, messages)
    if rules.signatures:
        _check_signatures(rules, model, messages)


def is_thinking(body: JsonObject) -> bool:
    """Return False if the request turns thinking off; thinking is on by default."""
    thinking = body.get("thinking")
    is_disabled = isinstance(thinking, dict) and thinking.get("type") == "disabled"
    return not is_disabled and body.get("enable_thinking") is not False and body.get("reasoning_effort") != "none"


def check_fields(rules: StrictRules, body: JsonObject) -> None:
    """Refuse a field, or a value of a field, that the model does not accept.

    Raises:
        ApiError: 400.
    """
    for rule in rules.refused_fields:
        path, _, refused = rule.partition("=")
        value: object = body
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if refused and value == refused:
            message = f"Unsupported value: '{refused}' is not supported with this model."
            raise ApiError(400, message, param=path, code="unsupported_value")
        if not refused and value is not None:
            message = f"Unsupported parameter: '{path}' is not supported with this model."
            raise ApiError(400, message, param=path, code="unsupported_parameter")


def with_reasoning(rules: StrictRules, body: JsonObject, model_input: ModelInput, reply: Reply) -> Reply:
    """Return the reply with reasoning added, if the model thinks."""
    if not rules.reasoning or not is_thinking(body):
        return reply
    text = reasoning_about(model_input)
    size = tokens.count(text)
    return replace(reply, reasoning=text, reasoning_tokens=size, output_tokens=reply.output_tokens + size)


def reasoning_about(model_input: ModelInput) -> str:
    """Return the text of the reasoning for a request."""
    return (
        f"I read the tool's result of {len(model_input.tool_result)} characters."
        if model_input.tool_result
        else "I read the task."
    )


def call_id(rules: StrictRules, number: int, choice: int, index: int) -> str:
    """Return the id of a tool call, in the form that the model's API requires."""
    name = f"call_mock{number}_{choice}_{index}"
    return hashlib.sha256(name.encode()).hexdigest()[:_TOOL_ID_LENGTH] if rules.tool_id else name


def signature(rules: StrictRules, model: str, number: int, index: int) -> JsonObject:
    """Return the signature field of a tool call. Only the first call of a response has one."""
    if not rules.signatures or index:
        return {}
    return {"extra_content": {"google": {"thought_signature": seal(model, str(number))}}}


def _forced(choice: object) -> str | None:
    """Return how a `tool_choice` forces a call: `required`, `specified` for one tool, or None."""
    if choice == "required":
        return "required"
    return "specified" if isinstance(choice, dict) and choice.get("type") == "function" else None


def _check_order(rules: StrictRules, messages: Sequence[JsonObject]) -> None:
    roles = [str(message.get("role")) for message in messages]
    for before, after in pairwise(roles):
        if (before, after) in rules.refused_order:
            raise _refusal(rules, f"Unexpected role '{after}' after role '{before}'", code="3230")
    if roles and roles[-1] in rules.refused_last and not messages[-1].get("prefix"):
        message = f"Expected last role User or Tool (or Assistant with prefix True) for serving but got {roles[-1]}"
        raise _refusal(rules, message, code="3230")


def _check_pairs(rules: StrictRules, messages: Sequence[JsonObject]) -> None:
    """Refuse a tool call without results and a result without its call. Results must directly follow their call."""
    open_calls: set[str] = set()
    for message in messages:
        if message.get("role") == "tool":
            name = str(message.get("tool_call_id"))
            if name not in open_calls:
                raise _refusal(rules, _MISSING_CALL, code="3230", param="messages")
            open_calls.discard(name)
            continue
        if open_calls:
            break
        open_calls = {str(call.get("id")) for call in calls_of(message)}
    if open_calls:
        raise _refusal(rules, _MISSING_RESULT, code="3230", param="messages")


def _check_tool_ids(rules: StrictRules, messages: Sequence[JsonObject]) -> None:
    for message in messages if rules.tool_id else ():
        names = [call.get("id") for call in calls_of(message)]
        if message.get("role") == "tool":
            names.append(message.get("tool_call_id"))
        for name in names:
            if not matches(rules.tool_id, name):
                text = f"Tool call id was {name} but must be a-z, A-Z, 0-9, with a length of 9."
                raise _refusal(rules, text, code="3280")


def _check_reasoning(rules: StrictRules, messages: Sequence[JsonObject]) -> None:
    for index in _messages_with_reasoning(rules, messages):
        if not isinstance(messages[index].get("reasoning_content"), str):
            raise _refusal(rules, rules.reasoning_missing.format(index=index))


def _messages_with_reasoning(rules: StrictRules, messages: Sequence[JsonObject]) -> Iterator[int]:
    """Yield the indexes of the messages that must contain their reasoning."""
    if rules.reasoning_back == "none":
        return
    turns = list(_turns(messages))
    for turn in turns[-1:] if rules.reasoning_back == "turn" else turns:
        of_assistant = [index for index in turn if messages[index].get("role") == "assistant"]
        with_calls = [index for index in of_assistant if calls_of(messages[index])]
        yield from of_assistant if with_calls and rules.reasoning_back == "turns" else with_calls


def _turns(messages: Sequence[JsonObject]) -> Iterator[range]:
    """Yield the indexes of each turn. Each turn starts with a user message."""
    starts = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    yield from (range(start, stop) for start, stop in pairwise([0, *starts, len(messages)]))


def _check_signatures(rules: StrictRules, model: str, messages: Sequence[JsonObject]) -> None:
    current = list(_turns(messages))[-1]
    for index, message in enumerate(messages):
        for number, call in enumerate(calls_of(message)):
            sent = _signature_of(call)
            if sent is not None and sent != ANY_SIGNATURE and (unseal(sent) or [""])[0] != model:
                raise _refusal(rules, "Corrupted thought signature.")
            if sent is None and number == 0 and index in current:
                function = call.get("function")
                name = function.get("name") if isinstance(function, dict) else None
                raise _refusal(rules, _UNSIGNED.format(name=name, position=index))


def _signature_of(call: JsonObject) -> str | None:
    value: object = call
    for key in ("extra_content", "google", "thought_signature"):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None


def calls_of(message: JsonObject) -> list[JsonObject]:
    """Return the tool calls of a message."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _refusal(rules: StrictRules, message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error in the format of the model's own API."""
    match rules.errors:
        case "google":
            body = [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]
            return ApiError(400, message, body=encode(body))
        case "mistral":
            kind = "invalid_function_call" if code == "3280" else "invalid_request_message_order"
            flat = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
            return ApiError(400, message, body=encode(flat))
        case _:
            return ApiError(400, message, param=param, code="invalid_request_error")
