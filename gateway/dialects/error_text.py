"""Read the provider's own message from an error body, without the labels that SDKs and proxies put before it.

An error that quotes the request begins with other words. Other modules therefore accept a sentence only at the start of
the provider's message, so that text of a user cannot change what the gateway learns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

#: bytes of a body that are read
_MAX_BODY: Final = 65_536
#: Characters of a message that are read. The longest known error has 300, and 600 nested in a proxy's error.
_MAX_TEXT: Final = 2_000
#: Nested errors that are parsed as JSON. Deeper ones are read as printed text.
_MAX_DEPTH: Final = 2
_MAX_LABELS: Final = 8
_FLAGS: Final = re.IGNORECASE | re.ASCII
_NO_FIELDS: Final[Mapping[str, object]] = {}


class ErrorText(NamedTuple):
    """A message of an error: its text, the labels before it, and the fields of the object that holds it.

    The messages of an object are followed by an `ErrorText` with the fields and an empty text.
    """

    text: str
    labels: str = ""
    fields: Mapping[str, object] = _NO_FIELDS


#: labels that SDKs, proxies and clouds put before the message of another system
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
#: The text before a message that was printed into another error, as JSON or in Python's notation. Only fields without
#: text of the request may precede the message. Backslashes are already removed; of "\n" the "n" remains.
_PRINTED: Final = re.compile(
    r"""b?["']?\[?n? ?\{n? {0,3}"""
    r"""(?:["'](?:type|object|code|status|param|error|error_type)["']: ?"""
    r"""(?:\{n? {0,3}|(?:["'][\w .-]{0,80}["']|\w{1,12}),n? {0,3})){0,8}"""
    r"""["']message["']: ?b?["']""",
    _FLAGS,
)


def messages_in(body: bytes) -> Iterator[ErrorText]:
    """Yield the messages of an error body, the innermost error first."""
    yield from _messages(body[:_MAX_BODY].decode("utf-8", "replace").lstrip("\ufeff \t\r\n"), 0, _NO_FIELDS)


def _messages(text: str, depth: int, fields: Mapping[str, object]) -> Iterator[ErrorText]:
    value = parse_json(text) if depth < _MAX_DEPTH else None
    if value is None:
        yield _sentence(text, fields)
        return
    for error in _errors(value):
        metadata = error.get("metadata")
        raw = metadata.get("raw") if isinstance(metadata, dict) else None
        for words in (error.get("message"), error.get("Message"), error.get("error"), error.get("detail"), raw):
            if isinstance(words, str):
                yield from _messages(words, depth + 1, error)
        yield ErrorText("", "", error)


def parse_json(text: str) -> object:
    """Return a JSON object or array, or None for anything else, such as one that is incomplete or too deep."""
    if not text.startswith(("{", "[")):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _errors(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the objects of a body that describe the error, the inner one first."""
    if isinstance(value, list):
        value = value[0] if value else None
    if not isinstance(value, dict):
        return
    inner = value.get("error")
    if isinstance(inner, dict):
        yield inner
    yield value


def _sentence(text: str, fields: Mapping[str, object]) -> ErrorText:
    """Split a message into its labels and its text."""
    # Text that was printed twice has backslashes before quotes. Some proxies use typographic apostrophes.
    text = text[:_MAX_TEXT].replace("\\", "").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = " ".join(text.split())
    start = 0
    for _ in range(_MAX_LABELS):
        label = _LABEL.match(text, start) or _PRINTED.match(text, start)
        if label is None:
            break
        start = label.end()
    return ErrorText(text[start:], text[:start], fields)
