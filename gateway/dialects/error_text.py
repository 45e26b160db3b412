"""Read the provider's own words from an error body, without the labels that SDKs and proxies write before them.

An error that quotes the request says something of its own first. Whoever reads a sentence believes it only where it
begins the provider's message, so that the text of a user teaches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

#: bytes of a body that are read
_MAX_BODY: Final = 65_536
#: Characters of a message that are read; the longest known refusal has 300, nested in a proxy's 600.
_MAX_TEXT: Final = 2_000
#: Errors in the text of errors that are read as JSON; what is deeper is read as printed text.
_MAX_DEPTH: Final = 2
_MAX_LABELS: Final = 8
_FLAGS: Final = re.IGNORECASE | re.ASCII
_NO_FIELDS: Final[Mapping[str, object]] = {}


class ErrorText(NamedTuple):
    """A message of an error: its words, the labels before them, and the fields of the object that holds it.

    After the messages of an object comes one without words.
    """

    text: str
    labels: str = ""
    fields: Mapping[str, object] = _NO_FIELDS


#: what SDKs, proxies and clouds write before the words of another
_LABEL: Final = re.compile(
    r"(?:litellm\.)?\w{0,60}(?:Error|Exception)(?:: | - )"
    r"|Error code: \d{3} - "
    r"|<LM Studio error> "
    r"|<\d{3}> "
    r"|InternalError\.[\w.]{1,60}: "
    r"|\d{3} (?:Bad Request: )?"
    r"|(?:Bad|Invalid) request: "
    r"|Input validation error: "
    r"|invalid params, "
    r"|An error occurred \(\w{1,60}\) when calling the \w{1,60} operation: "
    r"|The model returned the following errors: "
    r"|Malformed input request: "
    r"|\[address=[^\]]{1,60}\] ",
    _FLAGS,
)
#: The way to the message of an error printed into another's, as JSON or as Python prints it. Only fields that hold no
#: words of the request may stand before it. Backslashes are gone by then, of a line break its "n" is left.
_PRINTED: Final = re.compile(
    r"""b?["']?\[?n? ?\{n? {0,3}"""
    r"""(?:["'](?:type|object|code|status|param|error|error_type)["']: ?"""
    r"""(?:\{n? {0,3}|(?:["'][\w .-]{0,80}["']|\w{1,12}),n? {0,3})){0,8}"""
    r"""["']message["']: ?b?["']""",
    _FLAGS,
)


def said_in(body: bytes) -> Iterator[ErrorText]:
    """Yield what an error body says, the innermost error first."""
    yield from _said(body[:_MAX_BODY].decode("utf-8", "replace").lstrip("\ufeff \t\r\n"), 0, _NO_FIELDS)


def _said(text: str, depth: int, fields: Mapping[str, object]) -> Iterator[ErrorText]:
    value = parsed(text) if depth < _MAX_DEPTH else None
    if value is None:
        yield _sentence(text, fields)
        return
    for error in _errors(value):
        metadata = error.get("metadata")
        raw = metadata.get("raw") if isinstance(metadata, dict) else None
        for words in (error.get("message"), error.get("Message"), error.get("error"), error.get("detail"), raw):
            if isinstance(words, str):
                yield from _said(words, depth + 1, error)
        yield ErrorText("", "", error)


def parsed(text: str) -> object:
    """Return a JSON object or array, or None for anything else, such as one that is cut or too deep."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _errors(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the objects of a body that say what is wrong, the inner one first."""
    if isinstance(value, list):
        value = value[0] if value else None
    if not isinstance(value, dict):
        return
    inner = value.get("error")
    if isinstance(inner, dict):
        yield inner
    yield value


def _sentence(text: str, fields: Mapping[str, object]) -> ErrorText:
    """Return a message in prose, and the labels before it."""
    # Twice printed, quotes have backslashes; some proxies make apostrophes round.
    text = text[:_MAX_TEXT].replace("\\", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = " ".join(text.split())
    start = 0
    for _ in range(_MAX_LABELS):
        label = _LABEL.match(text, start) or _PRINTED.match(text, start)
        if label is None:
            break
        start = label.end()
    return ErrorText(text[start:], text[:start], fields)
