"""Define what a test can ask of the provider: scripted turns, delays and faults."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

#: Where usage appears in an answer. `trailing`: as the API itself does it. `none`: nowhere. The others are habits of
#: OpenAI-compatible servers and send usage in a stream whether it was asked for or not: `finish` on the chunk with the
#: finish reason; `running` on every chunk, cumulative; `groq` only under `x_groq.usage` of the last chunk; `groq_both`
#: there and at the usual key; `twice` on the finish chunk and again on a trailing one.
UsagePlacement = Literal["trailing", "none", "finish", "running", "groq", "groq_both", "twice"]

Compaction = Literal["made", "refused", "ignored"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Timing and faults of one answer. Each field is also a key of the `x-mock` header."""

    delay: float = 0.0
    """Seconds before the first byte."""
    interval: float = 0.0
    """Seconds between two content chunks of a stream."""
    chunks: int | None = None
    """Number of content chunks; None: one per token. Free text is lengthened where it is too short."""
    status: int | None = None
    """Answer with this status and an error in the API's shape."""
    retry_after: str | None = None
    """Value of the `retry-after` header that goes with `status`."""
    usage: UsagePlacement = "trailing"
    tokens: tuple[int, int] | None = None
    """(input, output) tokens to report and bill instead of the counted ones."""
    window: int | None = None
    """Refuse a chat, response or message request whose counted input is over this; None: as the provider does."""
    refuse_stream_options: bool = False
    """Refuse a body with the field `stream_options`, as some servers do."""
    refuse_allowed_tools: bool = False
    """Refuse a `tool_choice` among some tools, as servers do that do not know it."""
    compaction: Compaction = "made"
    """Compact a conversation as OpenAI does, refuse to as servers do that do not know it, or ignore the trigger."""
    gzip: bool = False
    """Compress the answer, whatever the client accepts."""
    die: int | None = None
    """Close the connection after this many content chunks; 0: before any byte of the answer."""
    hang: bool = False
    """Never answer; wait until the client leaves."""
    no_done: bool = False
    """Leave out the event that ends a stream."""
    malformed: bool = False
    """Put a broken event in the middle of a stream, or cut a whole answer short of valid JSON."""
    html: bool = False
    """Answer 502 with an HTML page."""
    cookie: bool = False
    """Set a cookie."""
    echo_headers: bool = False
    """Put the received headers under `received_headers` of a whole JSON answer."""
    pad: int = 0
    """Bytes of content to add to the text."""
    account: str = "account"
    """The account that a request to a Claude model comes from; some thinking blocks work in one account only."""
    old_account: bool = False
    """That account was created before 2026-08-31, when Claude's check of thinking blocks became the default."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One scripted answer. A field left None is decided as without a script."""

    text: str | None = None
    thinking: tuple[str, ...] = ()
    """The text of each thinking block, where the model thinks."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    """In OpenAI's words (`stop`, `length`, `tool_calls`, `content_filter`); other formats translate it."""
    usage: tuple[int, int] | None = None
    """(input, output) tokens to report and bill; `behaviour.tokens` goes before it."""
    behaviour: Behaviour | None = None
    """None: the provider's default."""
    refusals: tuple[str | None, ...] = ()
    """Messages: the categories with which models refuse the request, one for each of the first models asked."""
    refused_text: str = ""
    """Messages: what the first of them said before it refused."""


class BadBehaviourError(ValueError):
    """An `x-mock` header that cannot be read."""


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
    """`base` with the keys of an `x-mock` header (`key=value` items between `;` or `,`) laid over it.

    Raises:
        BadBehaviourError: an unknown key or a value of the wrong kind.
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
