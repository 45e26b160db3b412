"""Read which agent of a session makes a call, from the headers and the body that its client sends anyway.

This is the calling agent: the main agent of the session, or one of its subagents. It has nothing to do with the agents
of `agents:`, whose steps a call chooses with `x-session-agent`. Values that are not valid names are ignored, as with
session ids.

| client | what it sends |
|---|---|
| own agents | `x-agent-id`, `x-agent-type` |
| Claude Code | `x-claude-code-agent-id`, `-parent-agent-id`, `-agent-type`, `-request-class`, `-compaction` |
| Codex | `thread-id`, `x-codex-parent-thread-id`, `x-openai-subagent`, `x-codex-turn-metadata`, also in the body |
| Copilot | `x-interaction-type` |
| opencode | `x-parent-session-id`: each of its subagents has a session of its own |
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from gateway.core.http.gateway_headers import AGENT_ID, AGENT_TYPE, PARENT
from gateway.core.identity import is_valid
from gateway.core.values import dataclass

#: `compaction`: the client asks for a summary of its conversation. `auxiliary`: a small task, such as a title.
RequestClass = Literal["main", "subagent", "workflow", "compaction", "auxiliary"]
REQUEST_CLASSES: Final[tuple[RequestClass, ...]] = get_args(RequestClass)
#: the id of the main agent of every session
MAIN: Final = "main"
#: request classes of calls that a subagent makes
_OF_SUBAGENTS: Final = frozenset[RequestClass]({"subagent", "workflow"})

_CLAUDE: Final = b"x-claude-code-"
_CLAUDE_AGENT: Final = _CLAUDE + b"agent-id"
_CLAUDE_PARENT: Final = _CLAUDE + b"parent-agent-id"
_CLAUDE_TYPE: Final = _CLAUDE + b"agent-type"
_CLAUDE_CLASS: Final = _CLAUDE + b"request-class"
_CLAUDE_COMPACTION: Final = _CLAUDE + b"compaction"
_CODEX_THREAD: Final = b"thread-id"
_CODEX_SESSION: Final = b"session-id"
_CODEX_PARENT: Final = b"x-codex-parent-thread-id"
_CODEX_SUBAGENT: Final = b"x-openai-subagent"
_CODEX_TURN: Final = b"x-codex-turn-metadata"
_COPILOT_TYPE: Final = b"x-interaction-type"
#: headers of clients that say something about agents; `thread-id` of Codex alone does not
CLIENT_HEADERS: Final = (
    _CLAUDE_AGENT, _CLAUDE_PARENT, _CLAUDE_TYPE, _CLAUDE_CLASS, _CLAUDE_COMPACTION,
    _CODEX_PARENT, _CODEX_SUBAGENT, _CODEX_TURN, _COPILOT_TYPE,
)  # fmt: skip
_NAMES: Final = frozenset({AGENT_ID, AGENT_TYPE, PARENT, *CLIENT_HEADERS})
#: the field of the body in which Codex repeats its headers; over a WebSocket only this field is of the call itself
BODY_FIELD: Final = "client_metadata"
#: largest JSON of Codex that is decoded; real ones have a few hundred characters
_MOST_JSON: Final = 16_384
#: kinds of Codex's subagents that are not agents with a task, and its kinds of requests
_CODEX_CLASSES: Final[Mapping[str, RequestClass]] = {
    "compact": "compaction",
    "compaction": "compaction",
    "memory_consolidation": "auxiliary",
    "memory": "auxiliary",
    "prewarm": "auxiliary",
}
_COPILOT_CLASSES: Final[Mapping[str, RequestClass]] = {
    "conversation-subagent": "subagent",
    "conversation-background": "auxiliary",
}
#: the id of subagents about which nothing else is known
_UNNAMED: Final = "subagent"
_Headers = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class CallingAgent:
    """The agent of a session that makes a call.

    Attributes:
        id: unique within its session. `MAIN` for the main agent, and for the only agent of a child session.
        parent: the id of the agent that started it; None for the main agent, or if the client does not say.
        type: what kind of agent it is, such as `Explore`; None if the client does not say.
        request_class: what the call is for.
    """

    id: str = MAIN
    parent: str | None = None
    type: str | None = None
    request_class: RequestClass = "main"

    @property
    def is_subagent(self) -> bool:
        """Return whether it is not the main agent of its session, or works for another session."""
        return self.id != MAIN or self.request_class in _OF_SUBAGENTS


def calling_agent(headers: Mapping[bytes, bytes], metadata: object) -> CallingAgent | None:
    """Return the agent that makes a call, or None if the client says nothing about agents.

    Args:
        headers: the first value of each header, with names in lower case.
        metadata: the decoded value of `BODY_FIELD`; None if the body has none.
    """
    if not isinstance(metadata, dict) and _NAMES.isdisjoint(headers):
        return None
    return (
        _own_agent(headers)
        or _claude_code(headers)
        or _codex(headers, metadata if isinstance(metadata, dict) else {})
        or _copilot(headers)
        or _child_session(headers)
    )


def _own_agent(headers: _Headers) -> CallingAgent | None:
    return _agent(_name(headers, AGENT_ID), None, _name(headers, AGENT_TYPE), None)


def _claude_code(headers: _Headers) -> CallingAgent | None:
    request_class = _request_class(_name(headers, _CLAUDE_CLASS))
    if _name(headers, _CLAUDE_COMPACTION) is not None:
        request_class = "compaction"
    kind = _name(headers, _CLAUDE_TYPE)
    return _agent(_name(headers, _CLAUDE_AGENT), _name(headers, _CLAUDE_PARENT), kind, request_class)


def _codex(headers: _Headers, metadata: Mapping[str, Any]) -> CallingAgent | None:
    """Return the agent of a call of Codex. Its main thread has the id of the session; each subagent has its own."""
    parent = _of_codex(headers, metadata, _CODEX_PARENT, "parent_thread_id")
    kind = _of_codex(headers, metadata, _CODEX_SUBAGENT, "subagent")
    request_class = _CODEX_CLASSES.get(kind or "") or _CODEX_CLASSES.get(_request_kind(headers, metadata))
    if kind == "compact":
        kind = None  # a thread that compacts its own conversation is the same agent
    session = _of_codex(headers, metadata, _CODEX_SESSION, "session_id")
    thread = _of_codex(headers, metadata, _CODEX_THREAD, "thread_id")
    is_own_thread = thread is not None and thread != session and (parent is not None or kind is not None)
    if parent is not None and parent == session:
        parent = MAIN
    return _agent(thread if is_own_thread else None, parent, kind, request_class)


def _of_codex(headers: _Headers, metadata: Mapping[str, Any], header: bytes, field: str) -> str | None:
    """Return a value of Codex. Over a WebSocket the headers are those of the first call, so the body is preferred."""
    for name in (field, header.decode()):
        value = metadata.get(name)
        if isinstance(value, str) and is_valid(value):
            return value
    return _name(headers, header)


def _request_kind(headers: _Headers, metadata: Mapping[str, Any]) -> str:
    """Return `request_kind` of Codex: `turn`, `prewarm`, `compaction` or `memory`; empty if it cannot be read."""
    kind = metadata.get("request_kind")
    text = metadata.get(_CODEX_TURN.decode())
    if kind is None and (text is not None or _CODEX_TURN in headers):
        text = text if isinstance(text, str) else headers.get(_CODEX_TURN, b"").decode("latin-1")
        try:
            turn = json.loads(text) if len(text) <= _MOST_JSON else None
        except (ValueError, RecursionError):
            turn = None
        kind = turn.get("request_kind") if isinstance(turn, dict) else None
    return kind if isinstance(kind, str) else ""


def _copilot(headers: _Headers) -> CallingAgent | None:
    return _agent(None, None, None, _COPILOT_CLASSES.get(_name(headers, _COPILOT_TYPE) or ""))


def _child_session(headers: _Headers) -> CallingAgent | None:
    return CallingAgent(request_class="subagent") if _name(headers, PARENT) is not None else None


def _agent(
    id_: str | None, parent: str | None, kind: str | None, request_class: RequestClass | None
) -> CallingAgent | None:
    """Return the agent with these values, as far as a client sends them; None if it sends none.

    An agent without an id is known by its type: all agents of this type are counted as one.
    """
    if id_ is None and parent is None and kind is None and request_class is None:
        return None
    if id_ is None and request_class not in ("main", "compaction"):
        id_ = kind or (_UNNAMED if parent is not None or request_class == "subagent" else None)
    if id_ is None or id_ == MAIN:
        return CallingAgent(request_class=request_class or "main")
    return CallingAgent(id_, parent if parent != id_ else None, kind, request_class or "subagent")


def _name(headers: _Headers, name: bytes) -> str | None:
    """Return the value of a header if it is a valid name, else None."""
    value = headers.get(name)
    if value is None:
        return None
    text = value.strip(b" \t").decode("latin-1")
    return text if is_valid(text) else None


def _request_class(text: str | None) -> RequestClass | None:
    return next((known for known in REQUEST_CLASSES if known == text), None)
