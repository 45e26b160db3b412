"""Define response modes: how tool results are shown as a session's budget shrinks.

| mode | what is sent for a tool result |
|---|---|
| `raw` | the result, unchanged |
| `table` | the result with its JSON lists written as tables; nothing is left out |
| `summary` | an extract or a model's summary, with the handle of the full text |
| `handle_only` | one line that describes the result, with the handle |

Each result is rendered by itself and always the same way in the same mode. So the provider's prompt cache stays valid
as long as the mode does not change. A shortened result names the handle under which the caller stores the original.
Results that the model has not read yet follow the rules of `gateway.core.modes.unread`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from gateway.core.conversation.message import RESULT_ROLES, Message, decode, encode, is_signed, parse_bytes
from gateway.core.modes.extract import MAX_EXTRACT_CHARS, extract, extract_limit, head_and_tail, tokens_of
from gateway.core.modes.handle import describe, ends_with_handle, handle_line
from gateway.core.modes.parts import ResultContent
from gateway.core.modes.summary import SummaryLimits, summary_limits
from gateway.core.modes.table import is_table, write_as_table
from gateway.core.trimming.blocks import render, slice_message
from gateway.core.values import dataclass

ResponseMode = Literal["raw", "table", "summary", "handle_only"]

#: ordered from the mode that shows most to the mode that shows least
MODES: Final[tuple[ResponseMode, ...]] = get_args(ResponseMode)
#: A mode applies while more than this share of the budget is left. With less than all of these: `handle_only`.
_MODES_ABOVE: Final[tuple[tuple[float, ResponseMode], ...]] = ((0.5, "raw"), (0.2, "table"), (0.05, "summary"))

#: Results of up to this many characters never change: the line that replaces them would be about as long.
SHORTEST: Final = 300
#: A lossless form is used only if it has at most this share of the original's characters.
_MAX_SHARE: Final = 0.9
#: A form that leaves something out must be shorter: at most this share.
_MAX_SHARE_WITH_LOSS: Final = 0.75
#: Characters of the line with the handle, without the handle and the description.
_HANDLE_LINE_CHARS: Final = 66
#: One character of that line costs as many tokens as this many characters of other text.
_HANDLE_LINE_DENSITY: Final = 2
#: Only so many characters at the two ends of a result are considered when blocks are chosen by the question.
_MAX_READ_CHARS: Final = 1_000_000
#: No longer text was written by the gateway: its summaries, with their gap marks, are shorter.
_MAX_SHOWN_CHARS: Final = 3 * MAX_EXTRACT_CHARS


def stricter(first: ResponseMode, second: ResponseMode) -> ResponseMode:
    """Return the mode that shows less."""
    return max(first, second, key=MODES.index)


def milder(first: ResponseMode, second: ResponseMode) -> ResponseMode:
    """Return the mode that shows more."""
    return min(first, second, key=MODES.index)


def mode_for(remaining_fraction: float) -> ResponseMode:
    """Return the mode for the share of the budget that is left: 1 means all of it."""
    return next((mode for above, mode in _MODES_ABOVE if remaining_fraction > above), "handle_only")


@dataclass(frozen=True, slots=True)
class ShownResult:
    """A tool result in the form in which it is sent.

    Attributes:
        raw: the message's JSON bytes.
        form: the mode of this form. It may show more than the mode that was asked for.
        handle: the key under which the caller must store the original; None if nothing is left out.
        content: the original to store: its text, or a JSON list of parts if more than plain text is left out.
        summary_limits: limits for a model's summary that could replace the extract; None if it is not worth a call.
    """

    raw: bytes
    form: ResponseMode
    handle: str | None = None
    content: str | None = None
    summary_limits: SummaryLimits | None = None


def show(raw: bytes, mode: ResponseMode, handle_of: Callable[[str], str]) -> ShownResult | None:
    """Return a message in the form of a response mode, or None if it is sent unchanged.

    Args:
        raw: JSON bytes of a chat message.
        mode: the strictest form that is allowed.
        handle_of: returns the handle of a text, made of letters, digits, `_` and `-`.
    """
    if mode == "raw" or len(raw) <= SHORTEST:
        return None
    message = _rewritable_result(raw)
    if message is None:
        return None
    content = _result_content(message, mode)
    text = content.text
    if len(text) + content.media_size <= SHORTEST or _was_shown(content, mode):
        return None
    # A short form replaces all texts as one. If there are several, it is not compared with a table of each.
    rendered = content.shaped(_lossless) if mode == "table" or len(content.texts) == 1 else message.get("content")
    lossless = ResultContent(rendered).text
    if mode != "table":
        shortened = _shortened(message, content, lossless, mode, handle_of)
        if shortened is not None:
            return shortened
    is_shorter = bool(text) and len(lossless) <= _MAX_SHARE * len(text)
    return ShownResult(encode({**message, "content": rendered}), "table") if is_shorter else None


def extractable_text(raw: bytes) -> str | None:
    """Return the text of a result that `show_blocks` can shorten, or None if the result stays unchanged."""
    message = _rewritable_result(raw) if len(raw) > SHORTEST else None
    content = _result_content(message, "summary") if message is not None else None
    if content is None or len(content.text) <= SHORTEST or _was_shown(content, "summary"):
        return None
    return head_and_tail(content.text, _MAX_READ_CHARS)


def show_blocks(raw: bytes, blocks: Sequence[int], handle_of: Callable[[str], str]) -> ShownResult | None:
    """Return a result reduced to some of its blocks and its handle; without blocks, as in `handle_only`.

    Returns None if the result cannot be shortened this way. `blocks` are numbers of the blocks that `slice_message`
    makes of the text that `extractable_text` returns.
    """
    if not blocks:
        return show(raw, "handle_only", handle_of)
    text, message = extractable_text(raw), _rewritable_result(raw)
    if text is None or message is None:
        return None
    lossless: Message = {"role": "tool", "content": text}
    shown_text = str(render(lossless, slice_message(lossless), blocks)["content"]).rstrip("\n")
    content = _result_content(message, "summary")
    handle = handle_of(content.original)
    return ShownResult(_with_text(message, content, shown_text, handle), "summary", handle, content.original)


def _rewritable_result(raw: bytes) -> Message | None:
    """Return the decoded message if it is a tool result that may be rewritten, else None."""
    message, is_odd = parse_bytes(raw)
    if is_odd or not isinstance(message, dict) or str(message.get("role")) not in RESULT_ROLES:
        return None
    return None if is_signed(message) else message


def _result_content(message: Message, mode: ResponseMode) -> ResultContent:
    return ResultContent(message.get("content"), with_media=mode == "handle_only")


def original_of(raw: bytes, form: ResponseMode) -> str:
    """Return what the caller stores for a message that was shown in this form; for `raw`, its text."""
    return _result_content(decode(raw), form).original


def summarizable_text(raw: bytes) -> str:
    """Return the text of a message for a model to summarize."""
    return _result_content(decode(raw), "summary").text


def _was_shown(content: ResultContent, mode: ResponseMode) -> bool:
    """Return whether a text looks like a form that the gateway writes.

    A client can imitate this form, and its text then stays unchanged. Texts longer than any form of the gateway are
    never treated as one, so no long text can avoid shortening this way.
    """
    text = content.text
    if len(text) > _MAX_SHOWN_CHARS:
        return False
    return ends_with_handle(text) or (
        mode != "table" and is_table(content.texts[0] if len(content.texts) == 1 else text)
    )


def _lossless(text: str) -> str:
    table = write_as_table(text) if len(text) > SHORTEST else None
    return table if table is not None and len(table) <= _MAX_SHARE * len(text) else text


def _shortened(
    message: Message, content: ResultContent, lossless: str, mode: ResponseMode, handle_of: Callable[[str], str]
) -> ShownResult | None:
    """Return a message in part, or None if its `lossless` text is about as short.

    The limits are taken from `lossless`, which is the same before and after a text is written as a table. So a text
    that was left whole once stays whole.
    """
    limit = extract_limit(lossless)
    enough = MAX_EXTRACT_CHARS if mode == "summary" and tokens_of(lossless) <= limit else SHORTEST
    size = len(lossless) + content.media_size
    if size <= enough:
        return None
    shown_text = extract(content.text, limit) if mode == "summary" else _description(content)
    original_text = content.original
    handle = handle_of(original_text)
    if len(shown_text) + _HANDLE_LINE_DENSITY * (len(handle) + _HANDLE_LINE_CHARS) > _MAX_SHARE_WITH_LOSS * size:
        return None
    if mode == "summary":
        raw = _with_text(message, content, shown_text, handle)
        return ShownResult(raw, mode, handle, original_text, summary_limits(content.text, lossless, shown_text))
    shortened = handle_line(f"{shown_text};", len(original_text), handle)
    return ShownResult(encode({**message, "content": content.shortened(shortened)}), mode, handle, original_text)


def _description(content: ResultContent) -> str:
    """Return one line that describes a content."""
    return ", ".join(filter(None, (describe(content.text) if content.text else "", content.media)))


def with_summary(raw: bytes, summary: str, handle: str) -> bytes:
    """Return a message that shows this summary instead of its extract."""
    message = decode(raw)
    return _with_text(message, _result_content(message, "summary"), summary, handle)


def _with_text(message: Message, content: ResultContent, shown_text: str, handle: str) -> bytes:
    shortened = f"{shown_text}\n{handle_line('summary of', len(content.original), handle)}"
    return encode({**message, "content": content.shortened(shortened)})
