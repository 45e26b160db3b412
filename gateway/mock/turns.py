"""Scripted turns and behaviours (delays, faults, usage) that a test can request from the mock provider."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where usage appears in a response.
#:
#: - `trailing`: where the API itself reports it
#: - `none`: nowhere
#:
#: The others are habits of OpenAI-compatible servers. They report usage in a stream even if the client does not ask:
#:
#: - `finish`: on the chunk with the finish reason
#: - `running`: on every chunk, cumulative
#: - `groq`: only under `x_groq.usage` of the last chunk
#: - `groq_both`: under `x_groq.usage` and under the usual key
#: - `twice`: on the chunk with the finish reason, and again on a trailing chunk
UsagePlacement = Literal["trailing", "none", "finish", "running", "groq", "groq_both", "twice"]

#: `made`: compact as OpenAI does. `refused`: return the error of servers without compaction. `ignored`: ignore it.
Compaction = Literal["made", "refused", "ignored"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Timing and faults of one response. Each field is also a key of the `x-mock` header."""

    delay: float = 0.0
    """Seconds before the first byte."""
    interval: float = 0.0
    """Seconds between two content chunks of a stream."""
    chunks: int | None = None
    """Number of content chunks; None: one per token. Text that is too short for it is extended."""
    status: int | None = None
    """Respond with this status and an error in the format of the API."""
    retry_after: str | None = None
    """Value of the `retry-after` header sent with `status`."""
    usage: UsagePlacement = "trailing"
    tokens: tuple[int, int] | None = None
    """(input, output) tokens to report and bill instead of the counted tokens."""
    window: int | None = None
    """Refuse a chat, response or message request with more input tokens; None: use the provider's `windows`."""
    refuse_stream_options: bool = False
    """Refuse a body with the field `stream_options`, as some servers do."""
    refuse_allowed_tools: bool = False
    """Refuse a `tool_choice` of type `allowed_tools`, as servers do that do not support it."""
    compaction: Compaction = "made"
    gzip: bool = False
    """Compress the response, even if the client does not accept compression."""
    die: int | None = None
    """Close the connection after this many content chunks; 0: before the first byte of the response."""
    hang: bool = False
    """Never respond; wait until the client disconnects."""
    no_done: bool = False
    """Omit the event that ends a stream."""
    malformed: bool = False
    """Insert a broken event in the middle of a stream, or truncate a response so that its JSON is not valid."""
    html: bool = False
    """Respond with status 502 and an HTML page."""
    cookie: bool = False
    """Set a cookie."""
    echo_headers: bool = False
    """Add the received headers to a JSON response, as `received_headers`."""
    pad: int = 0
    """Bytes of content to add to the text."""
    account: str = "account"
    """The account that sends a request to a Claude model; some thinking blocks are valid in one account only."""
    old_account: bool = False
    """That account was created before 2026-08-31, when Claude's check of thinking blocks became the default."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One scripted response. A field that is None is chosen as without a script."""

    text: str | None = None
    thinking: tuple[str, ...] = ()
    """The text of each thinking block, if the model thinks."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    """OpenAI's finish reason: `stop`, `length`, `tool_calls` or `content_filter`. Other formats translate it."""
    usage: tuple[int, int] | None = None
    """(input, output) tokens to report and bill; `behaviour.tokens` takes precedence."""
    behaviour: Behaviour | None = None
    """None: the provider's default behaviour."""
    refusals: tuple[str | None, ...] = ()
    """Messages API: the categories with which the first models refuse the request, one per model in order."""
    refused_text: str = ""
    """Messages API: the text that the first model sends before it refuses."""


class BadBehaviourError(ValueError):
    """An `x-mock` header with an unknown key or a wrong value."""


def _flag(value: str) -> bool:
    return {"1": True, "0": False}[value]


def _pair(value: str) -> tuple[int, int]:
    first, second = value.split("/")
    return int(first), int(second)


def _placement(value: str) -> UsagePlacement:
    if value not in get_args(UsagePlacement):
        raise ValueError(value)
    return cast("UsagePlacement", value)


def _compaction(value: str) -> Compaction:
    if value not in get_args(Compaction):
        raise ValueError(value)
    return cast("Compaction", value)


_READERS: Final[dict[str, Callable[[str], object]]] = {
    "delay": float,
    "interval": float,
    "chunks": int,
    "status": int,
    "retry_after": str,
    "usage": _placement,
    "compaction": _compaction,
    "tokens": _pair,
    "window": int,
    "die": int,
    "pad": int,
    "account": str,
    **{item.name: _flag for item in fields(Behaviour) if item.type == "bool"},
}


@lru_cache(maxsize=1024)
def with_header(base: Behaviour, header: str) -> Behaviour:
    """Return the behaviour with the fields of an `x-mock` header replaced.

    The header holds `key=value` items, separated by `;` or `,`.

    Raises:
        BadBehaviourError: a key is unknown, or a value has the wrong type.
    """
    overrides: dict[str, object] = {}
    for item in header.replace(",", ";").split(";"):
        if not item.strip():
            continue
        key, _, value = (part.strip() for part in item.partition("="))
        try:
            overrides[key] = _READERS[key](value)
        except (KeyError, ValueError):
            raise BadBehaviourError(f"x-mock: cannot read {item.strip()!r}") from None
    return replace(base, **overrides)  # type: ignore[arg-type]  # each reader returns its field's type
