"""Read the error by which a provider refuses an output limit: the maximum, or the name of the right field.

Hosts word this error in many ways, so numbers and key terms are read, not whole sentences. A message is used only if
the field is named near its start and all words before it are known error words. This prevents text that is quoted from
the request from being read as an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gateway.core.http.retry_policy import EXPLAINED
from gateway.core.values import dataclass
from gateway.dialects.error_text import ErrorText, messages_in

#: the two names of the output limit in a chat request
NAMES: Final = ("max_tokens", "max_completion_tokens")
#: the smallest number that is accepted as a limit, and not as the start of a range or a code
_MIN_LIMIT: Final = 64
#: characters of a message that are read
_MAX_CHARACTERS: Final = 400
#: bytes of a body that are searched for a list of refused fields
_MAX_BYTES: Final = 65_536
_FLAGS: Final = re.IGNORECASE
#: names of an output limit at different hosts
_FIELD: Final = re.compile(
    r"\b(?:max[_ ]?(?:completion|output|new|gen(?:erated)?)?[_ ]?tokens?(?:_to_sample)?|max_?(?:gen|new)_len"
    r"|maxOutputTokens|n(?:um)?_predict|max_length|maximum (?:output |completion |number of )?tokens"
    r"|(?:output|completion) tokens)\b",
    _FLAGS,
)
#: Words and marks that may precede the field: error words that fit any parameter.
_BEFORE: Final = re.compile(
    r"(?:[\s:,.;#/\[\](){}<>|*=-]|\b(?:the|a|an|of|for|in|on|to|with|is|it|has|have|was|not|be|this|that|your|and|or|by"
    r"|invalid|valid|value|values|range|parameters?|params?|arguments?|fields?|property|body|option|input|inputs"
    r"|unsupported|unknown|unrecognized|unexpected|extra|incorrect|illegal|bad|malformed|wrong|supplied|specified"
    r"|requests?|requested|unable|submit|because|error|errors|validation|model|does|support|supported|exceeds|exceeded"
    r"|too|many|large|tokens|please|use|set|reduce|default|setting|generation|config|root|generationconfig|configuration"
    r"|failed|deserialize|messages?|code|type|status|api|at|\d{3})\b|[\u3000-\u303f\u4e00-\u9fff\uff00-\uff0f\uff1a])*",
    _FLAGS,
)
_QUOTES: Final = "'\"`\u201c\u201d\u2018\u2019"
#: The error is about the context window, which `length_error` reads, or about thinking or a rate limit.
_OTHER: Final = re.compile(
    r"context (?:length|limit|size)|context window (?:of|is|limit)|model length|max_model_len|max_seq_len|input length"
    r"|(?:prompt|input)s?`? (?:tokens?|length)|`inputs`|the prompt|your (?:prompt|messages)|budget|rate limit"
    r"|per (?:min|sec|day|hour)",
    _FLAGS,
)
#: the error says that the limit is too small
_TOO_SMALL: Final = re.compile(
    r"below|too (?:small|low)|(?:greater|more|larger|higher) than|at least|minimum|must be positive|>= ?\d", _FLAGS
)
#: a range that begins with 0 or 1, or a phrase with "not" before it: such text does not mean "too small"
_NOT_SMALL: Final = re.compile(
    r"at least 1\b|minimum(?: value)? (?:of |is )?1\b|(?:greater|more|larger) than(?: or equal to)? [01]\b|>= ?[01]\b"
    r"|(?:cannot|not|no)(?: be)? (?:greater|more|larger|higher) than",
    _FLAGS,
)
_TOO_LARGE: Final = re.compile(
    r"exceed|too (?:large|high|big|many)|less (?:than|or)|lower than|smaller than|above|at most|maximum|\bmax\b|\blimit"
    r"|up to|not be (?:more|greater)|no (?:more|greater) than|range|between|<|\d ?> ?\d|[_s] ?> ?\d"
    r"|\u8303\u56f4|\u6700\u5927|\u8d85\u8fc7|\u8d85\u51fa|\u5927\u4e8e|\u5c0f\u4e8e",
    _FLAGS,
)
#: a number of tokens that is not part of a name or a date
_NUMBER: Final = re.compile(r"(?<![\w.-])\d[\d,_]{0,12}(?![\w.-]?[\w-])")
_EXCLUSIVE: Final = re.compile(
    r"(?:(?:less|fewer|lower|smaller) than|below|(?<![<\w])<)\s*`?(?P<strict>\d[\d,]*)(?!\s*=)"
    r"|[\[(] ?\d+, ?(?P<open>\d+) ?\)|(?P<end>\d[\d,]*) \(exclusive\)",
    _FLAGS,
)
_NOT_TAKEN: Final = re.compile(
    r"unsupported|not supported|unrecognized|unknown|unexpected|extra (?:inputs|fields)|not permitted|not allowed"
    r"|deprecated|does not support|no longer|\buse\b.{0,40}\binstead\b",
    _FLAGS,
)
#: the name of the output limit of a chat request, as a whole word
_NAME: Final = re.compile(r"(?<!\w)max_(?:completion_)?tokens(?!\w)")
_DETAIL: Final = re.compile(rb'"extra_forbidden"')


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """Content of an error that refused an output limit.

    Attributes:
        numbers: the numbers of tokens in the message; the limit is the largest one below the sent value.
        field_to_use: the name of the field to use instead; empty if the name was not refused.
    """

    numbers: tuple[int, ...] = ()
    field_to_use: str = ""

    def largest_below(self, sent: int) -> int | None:
        """Return the output limit to send instead of a refused one; None if the message has no such number."""
        return max((number for number in self.numbers if _MIN_LIMIT <= number < sent), default=None)


class OutputRule(NamedTuple):
    """Rule for the output limit of a model: field name in a chat request, and maximum; None: the default applies."""

    field: str | None = None
    maximum: int | None = None

    def after(self, refusal: LimitRefusal, sent: int) -> OutputRule | None:
        """Return the rule to use after an output limit was refused, or None if the error adds nothing.

        Args:
            refusal: the content of the error.
            sent: the limit that was refused.
        """
        if refusal.field_to_use:
            return OutputRule(refusal.field_to_use, self.maximum) if self.field is None else None
        most = refusal.largest_below(sent)
        if most is None and sent == self.maximum and sent in refusal.numbers:
            # The provider refuses the number that it names, probably because it adds some tokens. Send a bit less.
            most = sent * 15 // 16
        return OutputRule(self.field, most) if most is not None else None


NO_OUTPUT_RULE: Final = OutputRule()


def limit_refusal(status: int, body: bytes) -> LimitRefusal | None:
    """Return what an error says about an output limit; None if it is about something else."""
    if status not in EXPLAINED:
        return None
    refused = _forbidden(body)
    if refused is not None:
        return LimitRefusal(field_to_use=_other_name(refused))
    return next(filter(None, map(_read, _sentences(body))), None)


def _sentences(body: bytes) -> Iterator[ErrorText]:
    """Yield the messages of an error; some proxies put them into `param`."""
    for message in messages_in(body):
        param = message.fields.get("param")
        if message.text:
            yield message
        elif isinstance(param, str) and " " in param:
            yield ErrorText(param)


def _read(message: ErrorText) -> LimitRefusal | None:
    text, param = message.text[:_MAX_CHARACTERS], message.fields.get("param")
    if isinstance(param, str) and param and _FIELD.search(param) is None and _is_name(param):
        return None
    if not _is_named_first(text):
        return None
    named = list(dict.fromkeys(_NAME.findall(text)))
    if _NOT_TAKEN.search(text) and named:
        return LimitRefusal(field_to_use=named[1] if len(named) > 1 else _other_name(named[0]))
    if _OTHER.search(text) or not _TOO_LARGE.search(text) or _TOO_SMALL.search(_NOT_SMALL.sub("", text)):
        return None
    numbers = tuple(_numbers(text))
    return LimitRefusal(numbers) if numbers else None


def _is_name(param: str) -> bool:
    """Return whether `param` is a field name; some hosts put other text there."""
    return re.fullmatch(r"[\w.\[\]]+", param) is not None


def _is_named_first(text: str) -> bool:
    """Return whether a message names an output limit before any words that may come from a user."""
    field = _FIELD.search(text)
    if field is None:
        return False
    head, following = text[: field.start()], text[field.end() : field.end() + 1]
    bare = head.rstrip(_QUOTES)
    return (bare == head or following in _QUOTES) and _BEFORE.fullmatch(bare) is not None


def _numbers(text: str) -> Iterator[int]:
    strict = {match["strict"] or match["open"] or match["end"] for match in _EXCLUSIVE.finditer(text)}
    numbers = _NUMBER.findall(text)
    for digits in numbers:
        number = int(re.sub(r"[,_]", "", digits))
        is_repeated = numbers.count(digits) > 1 and f"{digits} (exclusive)" not in text
        yield number - 1 if digits in strict and not is_repeated else number


def _other_name(name: str) -> str:
    return NAMES[0] if name == NAMES[1] else NAMES[1]


def _forbidden(body: bytes) -> str | None:
    """Return the name of the output limit that a list of validation errors forbids (pydantic: Mistral, FastAPI)."""
    if not _DETAIL.search(body[:_MAX_BYTES]):
        return None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return next((name for error in _details(value) if (name := _forbids(error))), None)


def _details(value: Any) -> Sequence[Any]:
    """Return the list of validation errors of a body: its `detail`, or that of its `message` or `error`."""
    for _ in range(3):
        if isinstance(value, Mapping):
            value = next((value[name] for name in ("detail", "message", "error") if name in value), None)
    return value if isinstance(value, list) else ()


def _forbids(error: Any) -> str:
    if not isinstance(error, Mapping) or error.get("type") != "extra_forbidden":
        return ""
    place = error.get("loc")
    last = place[-1] if isinstance(place, list) and place else None
    return last if len(place or ()) <= 2 and last in NAMES else ""  # noqa: PLR2004
