"""Choose the response: text or tool calls.

Pure; the wire formats only render it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import msgspec

from gateway.mock import tokens
from gateway.mock.schemas import Schema, sample
from gateway.mock.turns import Behaviour, ToolCall, Turn
from gateway.mock.wire import ApiError

#: Characters of the user's message or a tool's result that an answer quotes.
QUOTED: Final = 200


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool the client offers; `schema` is that of its arguments."""

    name: str
    schema: Schema


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, stripped of its wire format."""

    user_text: str = ""
    """The last user message."""
    tool_result: str | None = None
    """The last message, where that is a tool's result."""
    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required"] = "auto"
    named: str | None = None
    """The one tool to call, where the client says so."""
    parallel: bool = True
    """Whether several calls in one answer are allowed."""
    schema: Schema | None = None
    """Of the JSON the answer's text must be; None: free text."""
    max_tokens: int | None = None


class _Named(msgspec.Struct):
    """What has a name."""

    name: str | None = None


class _Entry(_Named):
    """A tool that may be called, as Responses write it or as chat does."""

    function: _Named = msgspec.field(default_factory=_Named)


class _Allowed(msgspec.Struct):
    """The tools of an `allowed_tools` choice."""

    tools: list[_Entry] = []
    mode: str = "auto"


def among(choice: object, tools: tuple[Tool, ...]) -> tuple[Literal["auto", "none", "required"], tuple[Tool, ...]]:
    """What a `tool_choice` of OpenAI says: whether a tool must be called, and which may be (`allowed_tools`).

    Raises:
        ApiError: 400, it lists them in a way that no API takes.
    """
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        said = choice.get("allowed_tools", choice)
        try:
            allowed = msgspec.convert(said, _Allowed)
        except msgspec.ValidationError as error:
            raise ApiError(400, str(error), param="tool_choice") from None
        names = [entry.name or entry.function.name for entry in allowed.tools]
        return ("required" if allowed.mode == "required" else "auto"), tuple(t for t in tools if t.name in names)
    return ("none" if choice == "none" else "required" if choice == "required" else "auto"), tools


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, before it has a wire format."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """In OpenAI's words."""
    output_tokens: int
    reasoning: str = ""
    """What a reasoning model thought before; its tokens are a part of `output_tokens`."""
    reasoning_tokens: int = 0


def decide(ask: Ask, turn: Turn | None, behaviour: Behaviour, index: int = 0) -> Reply:
    """The answer to `ask`; `index` tells the choices of one answer apart.

    Raises:
        ApiError: the client insists on a tool it does not offer.
    """
    calls = _tool_calls(ask) if turn is None or (turn.text is None and not turn.tool_calls) else turn.tool_calls
    scripted = turn.text if turn else None
    if calls:
        text, cut = scripted or "", False
    else:
        text, cut = tokens.truncate(_text(ask, scripted, behaviour, index), ask.max_tokens)
    finish = "tool_calls" if calls else "length" if cut else "stop"
    spent = tokens.count(text) + sum(tokens.count(call.name) + tokens.count(call.arguments) for call in calls)
    return Reply(text, calls, (turn and turn.finish_reason) or finish, spent)


def chunked(text: str, chunks: int | None) -> list[str]:
    """`text` cut for a stream: into `chunks` parts of like size (never more than it has characters), or by token."""
    if chunks is None:
        return tokens.pieces(text)
    parts = max(1, min(chunks, len(text)))
    edges = [index * len(text) // parts for index in range(parts + 1)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def _tool_calls(ask: Ask) -> tuple[ToolCall, ...]:
    chosen = _chosen(ask)
    if not chosen:
        return ()
    if ask.parallel and ask.named is None and "parallel" in ask.user_text.lower():
        # One tool is called twice, so that "parallel" always means two calls.
        chosen = ask.tools[:2] if len(ask.tools) > 1 else (chosen[0], chosen[0])
    return tuple(ToolCall(tool.name, msgspec.json.encode(sample(tool.schema)).decode()) for tool in chosen)


def _chosen(ask: Ask) -> tuple[Tool, ...]:
    """The tool to call, or nothing."""
    if ask.named is not None:
        for tool in ask.tools:
            if tool.name == ask.named:
                return (tool,)
        raise ApiError(400, f"Tool choice '{ask.named}' is not among the tools of the request.", param="tool_choice")
    if ask.choice == "none" or (ask.choice == "auto" and ask.tool_result is not None):
        return ()
    return ask.tools[:1]


def _text(ask: Ask, scripted: str | None, behaviour: Behaviour, index: int) -> str:
    if scripted is None and ask.schema is not None:
        return msgspec.json.encode(sample(ask.schema)).decode()
    text = scripted if scripted is not None else _quote(ask) + (f" (choice {index + 1})" if index else "")
    if behaviour.pad:
        text += (" " + "x" * (behaviour.pad - 1))[: behaviour.pad]
    if behaviour.chunks is None or scripted is not None:
        return text
    missing = behaviour.chunks - tokens.count(text)
    return text + " word" * missing


def _quote(ask: Ask) -> str:
    if ask.tool_result is not None:
        return f"The tool answered: {ask.tool_result[:QUOTED]}"
    return f"You said: {ask.user_text[:QUOTED]}"
