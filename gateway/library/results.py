"""Render a tool result in a response mode, and keep the full text of what is left out.

The forms are those of `gateway.core.modes`. The last line of a shortened result names its handle, for example
`[summary of 1,704 characters; full text: handle tr_da5dc3e7…]`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from hashlib import blake2b

from gateway.core.conversation.message import decode, encode
from gateway.core.modes import MODES, ResponseMode, milder, show
from gateway.core.trimming.blocks import FULL_TEXT_AT, FULL_TEXT_IN_PROGRAM
from gateway.core.values import dataclass

__all__ = ["RenderedResult", "ResponseMode", "render_result"]


@dataclass(frozen=True, slots=True)
class RenderedResult:
    """A tool result as the model sees it.

    Attributes:
        text: the text for the model.
        mode: how the result is shown. It may show more than the mode that was asked for.
        handle: the key of the full text; None if nothing is left out.
    """

    text: str
    mode: ResponseMode = "raw"
    handle: str | None = None


def render_result(
    result: str, mode: ResponseMode, full_texts: MutableMapping[str, str] | None = None
) -> RenderedResult:
    """Return a tool result in a response mode.

    The same result in the same mode is always rendered in the same way. A result of up to 300 characters, and one that
    was shortened before, is returned unchanged.

    Args:
        result: the full text.
        mode: the strictest mode that is allowed.
        full_texts: keeps the full text of a shortened result under its handle, for example a dict. None: nothing is
            left out, so the result is shown as a table at most.

    Raises:
        ValueError: the mode is unknown.
    """
    check_mode(mode)
    shown_mode = mode if full_texts is not None else milder(mode, "table")
    shown = show(encode({"role": "tool", "content": result}), shown_mode, handle_of)
    if shown is None:
        return RenderedResult(result)
    text = str(decode(shown.raw)["content"])
    if shown.handle is None or full_texts is None:
        return RenderedResult(text, shown.form)
    full_texts[shown.handle] = result
    return RenderedResult(FULL_TEXT_IN_PROGRAM.join(text.rsplit(FULL_TEXT_AT, 1)), shown.form, shown.handle)


def check_mode(mode: str) -> None:
    """Raise a ValueError if this is not the name of a response mode."""
    if mode not in MODES:
        raise ValueError(f"unknown response mode {mode!r}; the known ones are {', '.join(MODES)}")


def handle_of(text: str) -> str:
    """Return the handle of a text, which depends on the text alone."""
    return f"tr_{blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
