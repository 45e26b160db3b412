"""Wire formats: one pure file each, and the table that says which path speaks which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.core.counting.measure import Wire
from gateway.dialects.base import Dialect
from gateway.dialects.openai_chat import OpenAIChat
from gateway.dialects.passthrough import PassThrough

CHAT: Final = OpenAIChat()

#: path -> operation, for what is known well enough to be estimated where the provider reports nothing
_OPERATIONS: Final = {
    "completions": "text_completion",
    "embeddings": "embeddings",
    "responses": "chat",
    "messages": "chat",
}
_WIRES: Final[Mapping[str, Wire]] = {
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
}
#: A POST below one of these reads or changes what an earlier, already counted call made; its answer may repeat that
#: call's usage. Compaction and the runs of a thread are calls of their own.
_STORED: Final = re.compile(
    r"(?:chat/completions|responses|threads|batches|fine_tuning|conversations|files|vector_stores)/."
)
_BILLED_BELOW_STORED: Final = re.compile(r"responses/compact$|threads/(?:.+/)?runs(?:/.+/submit_tool_outputs)?$")
#: Counting is free at every provider that offers it, and answers with `input_tokens` of no call.
_COUNTING: Final = re.compile(r"(?:^|/)(?:count_tokens|input_tokens)$")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one path is spoken.

    `metered`: the usage in an answer is added to a session. `estimated`: so is an estimate where there is none.
    `anthropic`: the client speaks Anthropic's API. `wire`: the format of its requests, where they can be weighed.
    """

    dialect: Dialect
    operation: str
    metered: bool
    estimated: bool
    anthropic: bool = False
    wire: Wire | None = None


_CHAT_ENDPOINT: Final = Endpoint(CHAT, "chat", metered=True, estimated=True, wire="chat")


def endpoint(method: str, path: str, *, anthropic: bool = False) -> Endpoint:
    """The endpoint of a path relative to `/v1/`, such as `chat/completions`; `anthropic`: its headers say so."""
    path = path.rstrip("/")
    if path == "chat/completions" and method == "POST":
        return _CHAT_ENDPOINT
    known = _OPERATIONS.get(path)
    operation = known or path.partition("/")[0] or "other"
    anthropic = anthropic or path == "messages" or path.startswith("messages/")
    metered = method == "POST" and _is_billed(path)
    wire = _WIRES.get(path) if metered else None
    dialect = PassThrough(operation, anthropic=anthropic, is_read=metered and known is not None)
    estimated = metered and known is not None
    return Endpoint(dialect, operation, metered=metered, estimated=estimated, anthropic=anthropic, wire=wire)


def _is_billed(path: str) -> bool:
    if _BILLED_BELOW_STORED.match(path):
        return True
    return not _STORED.match(path) and not _COUNTING.search(path)
