"""Define response modes: how tool results are shown as a session's budget shrinks.

Raw as they came; as tables, with nothing left out; as summaries, with the way to the full text; as that way alone. Each
message is shown for itself and always the same way in the same mode, so that a provider's prompt cache holds for as
long as the mode does. What is shown shorter names the handle under which the caller keeps the original. Results that
the model has not read yet are the exception, see `gateway.core.modes.unread`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, get_args

from gateway.core.conversation.message import RESULT_ROLES, Message, decode, encode, is_signed, read
from gateway.core.fitting.blocks import render, slice_message
from gateway.core.modes.extract import LONGEST, ends, extract, limit_of, tokens_of
from gateway.core.modes.handle import described, pointer, points
from gateway.core.modes.parts import ResultContent
from gateway.core.modes.summary import SummaryLimits, summing
from gateway.core.modes.table import is_tabled, tabled
from gateway.core.values import dataclass

ResponseMode = Literal["raw", "table", "summary", "handle_only"]

#: mildest first
MODES: Final[tuple[ResponseMode, ...]] = get_args(ResponseMode)
#: the modes in force while more than this share of the budget is left
_ABOVE: Final[tuple[tuple[float, ResponseMode], ...]] = ((0.5, "raw"), (0.2, "table"), (0.05, "summary"))

#: A result of up to so many characters is never changed: the line that stands for it would be about as long.
SHORTEST: Final = 300
#: what is shown has at most this share of the characters of what came: less is not worth another form
_WORTH: Final = 0.9
#: and so much where something is left out
_WORTH_LOSS: Final = 0.75
#: characters of the line that names the handle, without the handle and what it says
_LINE: Final = 66
#: a character of that line weighs as many tokens as so many of other texts
_DENSE: Final = 2
#: Characters of a result that an extract by the question is chosen from: the first and the last ones.
_MOST_READ: Final = 1_000_000
#: More characters than this were not shown by us, whatever they look like: a summary and its gap marks have fewer.
_SHOWN_MOST: Final = 3 * LONGEST


def stricter(one: ResponseMode, other: ResponseMode) -> ResponseMode:
    """The one that shows less."""
    return max(one, other, key=MODES.index)


def milder(one: ResponseMode, other: ResponseMode) -> ResponseMode:
    """Return the one that shows more."""
    return min(one, other, key=MODES.index)


def mode_for(remaining_fraction: float) -> ResponseMode:
    """The mode while this share of the budget is left, 1 for all of it."""
    return next((mode for above, mode in _ABOVE if remaining_fraction > above), "handle_only")


@dataclass(frozen=True, slots=True)
class ShownResult:
    """One tool result as it is sent.

    Attributes:
        raw: the message's JSON bytes.
        form: how it is shown, which may be milder than the mode asked for.
        handle: under which the original is to be stored; None where nothing is left out.
        content: that original: the text, or where more than plain text is left out, these parts as a JSON list.
        summing: what a model's summary may take in the place of the extract; None where it is not worth a call.
    """

    raw: bytes
    form: ResponseMode
    handle: str | None = None
    content: str | None = None
    summing: SummaryLimits | None = None


def show(raw: bytes, mode: ResponseMode, handle_of: Callable[[str], str]) -> ShownResult | None:
    """A message as it is sent in a mode; None if it is sent as it came.

    Args:
        raw: JSON bytes of a chat message.
        mode: the strictest form it may get.
        handle_of: the handle of a text; letters, digits, `_` and `-`.
    """
    if mode == "raw" or len(raw) <= SHORTEST:
        return None
    message = _result(raw)
    if message is None:
        return None
    content = _content(message, mode)
    text = content.text
    if len(text) + content.media_size <= SHORTEST or _was_shown(content, mode):
        return None
    # A short form stands for all texts as one: where there are several, it is not compared with tables of each.
    shaped = content.shaped(_lossless) if mode == "table" or len(content.texts) == 1 else message.get("content")
    whole = ResultContent(shaped).text
    if mode != "table":
        short = _short(message, content, whole, mode, handle_of)
        if short is not None:
            return short
    is_worth = bool(text) and len(whole) <= _WORTH * len(text)
    return ShownResult(encode({**message, "content": shaped}), "table") if is_worth else None


def extractable(raw: bytes) -> str | None:
    """Return the text of a result that `show_blocks` can shorten; None if it stays as it is."""
    message = _result(raw) if len(raw) > SHORTEST else None
    content = _content(message, "summary") if message is not None else None
    if content is None or len(content.text) <= SHORTEST or _was_shown(content, "summary"):
        return None
    return ends(content.text, _MOST_READ)


def show_blocks(raw: bytes, blocks: Sequence[int], handle_of: Callable[[str], str]) -> ShownResult | None:
    """Return a result as these blocks of it and its handle; without blocks, as in `handle_only`.

    None if it cannot be shown so. `blocks`: numbers of the blocks that `slice_message` makes of `extractable`.
    """
    if not blocks:
        return show(raw, "handle_only", handle_of)
    text, message = extractable(raw), _result(raw)
    if text is None or message is None:
        return None
    whole: Message = {"role": "tool", "content": text}
    says = str(render(whole, slice_message(whole), blocks)["content"]).rstrip("\n")
    content = _content(message, "summary")
    handle = handle_of(content.original)
    return ShownResult(_summarized(message, content, says, handle), "summary", handle, content.original)


def _result(raw: bytes) -> Message | None:
    """The message, where it is a tool result that can be written anew."""
    message, is_odd = read(raw)
    if is_odd or not isinstance(message, dict) or str(message.get("role")) not in RESULT_ROLES:
        return None
    return None if is_signed(message) else message


def _content(message: Message, mode: ResponseMode) -> ResultContent:
    return ResultContent(message.get("content"), with_media=mode == "handle_only")


def original(raw: bytes, form: ResponseMode) -> str:
    """The original that a message stands for once it is shown in this form; `raw`: the message as it came."""
    return _content(decode(raw), form).original


def readable(raw: bytes) -> str:
    """The text of a message that a summary is to be made of."""
    return _content(decode(raw), "summary").text


def _was_shown(content: ResultContent, mode: ResponseMode) -> bool:
    """Whether a text has the form of what we show.

    Anybody can give a text this form, and it then stays as it came. Longer texts than ours are never taken for ours, so
    that no long text stays whole by that.
    """
    text = content.text
    if len(text) > _SHOWN_MOST:
        return False
    return points(text) or (mode != "table" and is_tabled(content.texts[0] if len(content.texts) == 1 else text))


def _lossless(text: str) -> str:
    table = tabled(text) if len(text) > SHORTEST else None
    return table if table is not None and len(table) <= _WORTH * len(text) else text


def _short(
    message: Message, content: ResultContent, whole: str, mode: ResponseMode, handle_of: Callable[[str], str]
) -> ShownResult | None:
    """A message in part; None where the `whole` text with nothing left out is about as short.

    The limits are taken from `whole`, which is the same once a text is shown as its table, so that a text that was left
    whole stays whole.
    """
    limit = limit_of(whole)
    enough = LONGEST if mode == "summary" and tokens_of(whole) <= limit else SHORTEST
    size = len(whole) + content.media_size
    if size <= enough:
        return None
    says = extract(content.text, limit) if mode == "summary" else _line(content)
    kept = content.original
    handle = handle_of(kept)
    if len(says) + _DENSE * (len(handle) + _LINE) > _WORTH_LOSS * size:
        return None
    if mode == "summary":
        raw = _summarized(message, content, says, handle)
        return ShownResult(raw, mode, handle, kept, summing(content.text, whole, says))
    short = pointer(f"{says};", len(kept), handle)
    return ShownResult(encode({**message, "content": content.shortened(short)}), mode, handle, kept)


def _line(content: ResultContent) -> str:
    """What a content is, in a line."""
    return ", ".join(filter(None, (described(content.text) if content.text else "", content.media)))


def with_summary(raw: bytes, says: str, handle: str) -> bytes:
    """A message that is shown as a summary, with this one."""
    message = decode(raw)
    return _summarized(message, _content(message, "summary"), says, handle)


def _summarized(message: Message, content: ResultContent, says: str, handle: str) -> bytes:
    short = f"{says}\n{pointer('summary of', len(content.original), handle)}"
    return encode({**message, "content": content.shortened(short)})
