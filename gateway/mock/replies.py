"""Choose the content of a response, text or tool calls, independent of the wire format."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import msgspec

from gateway.mock import tokens
from gateway.mock.schemas import Schema, sample
from gateway.mock.turns import Behaviour, ToolCall, Turn
from gateway.mock.wire import ApiError

#: Characters of the user's message or of a tool result that a response quotes.
QUOTED: Final = 200


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the client offers. `schema`: the schema of its arguments."""

    name: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The parts of a request that decide the response, independent of the wire format."""

    user_text: str = ""
    """The last user message."""
    tool_result: str | None = None
    """The last message, if it is a tool result."""
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None
    """The tool that the client requires to be called."""
    parallel: bool = True
    """Several tool calls in one response are allowed."""
    schema: Schema | None = None
    """The schema of the JSON that the text must be; None: any text."""
    max_tokens: int | None = None


class _Function(msgspec.Struct):
    name: str | None = None


class _AllowedTool(msgspec.Struct):
    """A tool of an `allowed_tools` choice: with `name` in Responses, with `function` in chat."""

    name: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _AllowedTools(msgspec.Struct):
    """An `allowed_tools` choice."""

    tools: list[_AllowedTool] = []
    mode: str = "auto"


def tool_choice_of(
    choice: object, tools: tuple[Tool, ...]
) -> tuple[Literal["auto", "none", "required"], tuple[Tool, ...]]:
    """Return whether OpenAI's `tool_choice` requires a tool call, and the tools that may be called.

    Raises:
        ApiError: 400, the list of `allowed_tools` is not valid.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        listed = choice.get("allowed_tools", choice)
        try:
            allowed = msgspec.convert(listed, _AllowedTools)
        except msgspec.ValidationError as error:
            raise ApiError(400, str(error), param="tool_choice") from None
        names = [entry.name or entry.function.name for entry in allowed.tools]
        return ("required" if allowed.mode == "required" else "auto"), tuple(t for t in tools if t.name in names)
    return ("none" if choice == "none" else "required" if choice == "required" else "auto"), tools


@dataclass(frozen=True, slots=True)
class Reply:
    """The content of a response, before it is rendered in a wire format."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """A finish reason of OpenAI's API."""
    output_tokens: int
    reasoning: str = ""
    """The reasoning before the text; its tokens are a part of `output_tokens`."""
    reasoning_tokens: int = 0


def decide(model_input: ModelInput, turn: Turn | None, behaviour: Behaviour, index: int = 0) -> Reply:
    """Return the content of a response.

    Args:
        model_input: the request.
        turn: the scripted turn; None to make the content from the request.
        behaviour: how long the text must be.
        index: the number of the choice, if the response has several choices.

    Raises:
        ApiError: 400, the client requires a tool that it does not offer.
    """
    calls = _tool_calls(model_input) if turn is None or (turn.text is None and not turn.tool_calls) else turn.tool_calls
    scripted = turn.text if turn else None
    if calls:
        text, is_cut = scripted or "", False
    else:
        text, is_cut = tokens.truncate(_text(model_input, scripted, behaviour, index), model_input.max_tokens)
    finish_reason = "tool_calls" if calls else "length" if is_cut else "stop"
    output_tokens = tokens.count(text) + sum(tokens.count(call.name) + tokens.count(call.arguments) for call in calls)
    return Reply(text, calls, (turn and turn.finish_reason) or finish_reason, output_tokens)


def chunked(text: str, chunks: int | None) -> list[str]:
    """Split a text for a stream: into tokens, or into `chunks` parts of similar size.

    There are never more parts than the text has characters.
    """
    if chunks is None:
        return tokens.pieces(text)
    parts = max(1, min(chunks, len(text)))
    bounds = [index * len(text) // parts for index in range(parts + 1)]
    return [text[start:end] for start, end in pairwise(bounds)]


def _tool_calls(model_input: ModelInput) -> tuple[ToolCall, ...]:
    chosen = _chosen(model_input)
    if not chosen:
        return ()
    if model_input.parallel and model_input.named is None and "parallel" in model_input.user_text.lower():
        # If only one tool is offered, it is called twice, so that "parallel" always means two calls.
        chosen = model_input.tools[:2] if len(model_input.tools) > 1 else (chosen[0], chosen[0])
    return tuple(ToolCall(tool.name, msgspec.json.encode(sample(tool.schema)).decode()) for tool in chosen)


def _chosen(model_input: ModelInput) -> tuple[Tool, ...]:
    """Return the tool to call, or nothing."""
    if model_input.named is not None:
        for tool in model_input.tools:
            if tool.name == model_input.named:
                return (tool,)
        raise ApiError(
            400,
            f"Tool choice '{model_input.named}' is not among the tools of the request.",
            param="tool_choice",
        )
    if model_input.choice == "none" or (model_input.choice == "auto" and model_input.tool_result is not None):
        return ()
    return model_input.tools[:1]


def _text(model_input: ModelInput, scripted: str | None, behaviour: Behaviour, index: int) -> str:
    if scripted is None and model_input.schema is not None:
        return msgspec.json.encode(sample(model_input.schema)).decode()
    text = scripted if scripted is not None else _quote(model_input) + (f" (choice {index + 1})" if index else "")
    if behaviour.pad:
        text += (" " + "x" * (behaviour.pad - 1))[: behaviour.pad]
    if behaviour.chunks is None or scripted is not None:
        return text
    missing = behaviour.chunks - tokens.count(text)
    return text + " word" * missing


def _quote(model_input: ModelInput) -> str:
    if model_input.tool_result is not None:
        return f"The tool answered: {model_input.tool_result[:QUOTED]}"
    return f"You said: {model_input.user_text[:QUOTED]}"
