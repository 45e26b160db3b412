"""Read the top level of a JSON body with each value as bytes, and write it again."""

from __future__ import annotations

import codecs
import itertools
import json
import operator
import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, Final

import msgspec

from gateway.core.counting.request import decoded
from gateway.core.errors import InvalidRequest

Fields = Mapping[str, msgspec.Raw]
#: the same, some of them set anew
AnyFields = Mapping[str, bytes | msgspec.Raw]
_ANY_DECODER: Final = msgspec.json.Decoder()
#: digits of a whole number; one with more is read as None
_MOST_DIGITS: Final = 400
#: what may stand before a value
_BLANK: Final = " \t\r\n\0"
#: bytes whose encoding is checked at once: the text that is made of them takes up to four times as many
_CHECKED_AT_ONCE: Final = 2**20
#: raised for what is no JSON, also where it is no text
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: top-level fields of a body; no API has a hundred
_MAX_FIELDS: Final = 4096
#: a body of so many bytes cannot have more fields than that: each takes five (`"":1,`)
_FEW_FIELDS: Final = 4 * _MAX_FIELDS

#: what names the session for the gateway, in the body or in its metadata
_SESSION_ID: Final = "session_id"
_METADATA: Final = "metadata"
#: Fields that decide what a call may cost. Some servers read keys without regard to case, and take the last of two.
_MEANT: Final = frozenset(
    {
        *("model", "models", "fallbacks", "stream", "stream_options", "background", "deferred"),
        *("messages", "input", "prompt", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    }
)
#: Bytes of the fields that are built to be looked at, more than any real request has; a longer one would keep all other
#: calls waiting while it is. Numbers, then names and switches, then what may hold a schema or a list of tools.
_MOST_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("n", "best_of", "n_predict", "min_tokens"), 64),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 64),
    # Each that was not seen before is looked up in all tables, and kept with what is learned of it.
    "model": 1024,
    **dict.fromkeys(("models", "fallbacks"), 64 * 1024),
    **dict.fromkeys(("stream", "stream_options", "background", "deferred"), 64 * 1024),
    **dict.fromkeys(("service_tier", "speed", "inference_geo", "thinking", "reasoning"), 64 * 1024),
    **dict.fromkeys(("metadata", "session_id", "conversation", "prompt_cache_key"), 64 * 1024),
    **dict.fromkeys(("tool_choice", "function_call"), 2**20),
    **dict.fromkeys(("response_format", "output_config", "output_format", "text", "client_metadata"), 2**20),
}
#: in JSON whose escaped backslashes are masked: an escape that is half of a surrogate pair without its other half
_HALF: Final = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


class _Name:
    """A key as it stands in the body: two of the same spelling are still two."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _counting_decoder() -> msgspec.json.Decoder[dict[_Name, msgspec.Raw]]:
    """Reads one body and counts its keys, so that millions of them are refused before they are held."""
    count = itertools.count(1)

    def name(_: type, text: str) -> _Name:
        if next(count) > _MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {_MAX_FIELDS} fields.")
        return _Name(text)

    return msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=name)


_FIELDS_DECODER: Final = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=operator.call)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """The top level of a JSON object.

    Raises:
        InvalidRequest: not UTF-8, not JSON, not an object, nested too deep, a key stands twice, far too many keys, or
            far too much in a field that says little.
    """
    _check_encoding(body)
    try:
        decoder = _FIELDS_DECODER if len(body) <= _FEW_FIELDS else _counting_decoder()
        named = decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest('The request body is JSON, but not an object. Send an object like {"model": …}.') from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(_told(body, error)) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deep to be read.") from None
    fields = {name.text: raw for name, raw in named.items()}
    if len(fields) != len(named):
        _refuse_duplicates([name.text for name in named])
    for name in _MOST_BYTES.keys() & fields:
        check_length(name, fields[name], _MOST_BYTES[name])
    refuse_other_spellings(fields, _MEANT)
    return fields


def _check_encoding(body: bytes) -> None:
    """Refuse a body that is not UTF-8, without a text being made of all of it.

    Raises:
        InvalidRequest: it is not.
    """
    if body.isascii():
        return
    decoder, view, at = codecs.getincrementaldecoder("utf-8")(), memoryview(body), 0
    try:
        for at in range(0, len(body), _CHECKED_AT_ONCE):
            kept = len(decoder.getstate()[0])
            decoder.decode(view[at : at + _CHECKED_AT_ONCE], final=at + _CHECKED_AT_ONCE >= len(body))
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid UTF-8 (byte {at - kept + error.start}). Send JSON encoded as UTF-8."
        ) from None


def refuse_other_spellings(names: Collection[str], of: Container[str]) -> None:
    """Refuse a name that is one of these but for the case of its letters.

    Raises:
        InvalidRequest: there is one.
    """
    joined = "".join(names)
    if joined.isascii() and joined.islower():
        return
    for name in names:
        if (meant := name.casefold()) in of and name != meant:
            raise InvalidRequest(f'The field "{name}" is written "{meant}".', param=name)


def _told(body: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong with a body that cannot be read."""
    half = _HALF.search(body.replace(rb"\\", b"__"))
    if half is None:
        return f"The request body is not valid JSON: {error}."
    return (
        f"The JSON of the request body holds half a character: {half[1].decode()} at byte {half.start(1)} is a lone "
        "surrogate, which no UTF-8 text can hold. Cut texts between whole characters, or replace such halves "
        "(JavaScript: text.toWellFormed())."
    )


def check_length(name: str, raw: bytes | msgspec.Raw, most: int) -> None:
    """Refuse a value that is longer than it may be.

    Raises:
        InvalidRequest: it is.
    """
    size = memoryview(raw).nbytes
    if size > most:
        raise InvalidRequest(f'The field "{name}" has {size:,} bytes; it may have {most:,}.', param=name)


def _refuse_duplicates(names: list[str]) -> None:
    """A body whose keys stand twice means one thing to us and may mean another to the provider."""
    name = min(name for name, times in Counter(names).items() if times > 1)
    raise InvalidRequest(
        f'The field "{name[:80]}" stands more than once in the request body. Send it once.', param=name[:80]
    )


def write_fields(fields: Fields, changes: Mapping[str, object]) -> bytes:
    """The object again, with some top-level fields replaced or added; all others keep their bytes and their order.

    Those that are to be `UNSET` are left out.
    """
    merged: dict[str, object] = {**fields, **changes}
    if msgspec.UNSET in changes.values():
        merged = {name: value for name, value in merged.items() if value is not msgspec.UNSET}
    return msgspec.json.encode(merged)


def without_session_id(fields: Fields, *, in_metadata: bool) -> dict[str, object]:
    """Return the fields to set so that no `session_id` is sent, which names the session for the gateway alone.

    `in_metadata`: also none in `metadata`, where a format takes no fields of the caller's own.
    """
    changes: dict[str, object] = {_SESSION_ID: msgspec.UNSET} if _SESSION_ID in fields else {}
    metadata = decode(fields[_METADATA]) if in_metadata and _METADATA in fields else None
    if isinstance(metadata, dict) and _SESSION_ID in metadata:
        del metadata[_SESSION_ID]
        changes[_METADATA] = metadata or msgspec.UNSET
    return changes


def unescaped(text: bytes) -> bytes:
    """JSON without the escapes in its strings: every quote that is left begins or ends one."""
    # To look for one is quicker than to replace none.
    return text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text


def join(items: Sequence[bytes]) -> msgspec.Raw:
    """The JSON array of these values."""
    return msgspec.Raw(b"[" + b",".join(items) + b"]")


def decode(raw: bytes | msgspec.Raw) -> Any:
    """Any JSON value; None where it cannot be read. For foreign values that may be anything."""
    try:
        return _ANY_DECODER.decode(raw)
    except UNREADABLE:
        pass
    try:
        # Knows NaN and numbers beyond a double, which some providers send, and bytes that are no UTF-8.
        return json.loads(bytes(raw).decode("utf-8", "replace"), parse_int=_int)
    except (ValueError, RecursionError):
        return None


def read_piece(raw: bytes) -> Any:
    """What `gateway.core.counting.request.decoded` says of a piece, in a third of the time."""
    try:
        return _ANY_DECODER.decode(raw)
    except UNREADABLE:
        return decoded(raw)


def decode_answer(raw: bytes) -> Any:
    """The same of an answer, also where it has a flaw that clients read over; None where it holds a second value.

    A byte order mark, raw control characters in a text, bytes behind the value: it says what it says all the same.
    """
    value = decode(raw)
    if value is not None:
        return value
    text = bytes(raw).decode("utf-8-sig", "replace").lstrip(_BLANK)
    try:
        value, end = _LENIENT_DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return None if text.find("{", end) >= 0 else value


def _int(digits: str) -> int | None:
    """A whole number; none of so many digits that Python does not read them."""
    return int(digits) if len(digits) < _MOST_DIGITS else None


_LENIENT_DECODER: Final = json.JSONDecoder(strict=False, parse_int=_int)


def string_field(fields: Fields, name: str) -> str | None:
    """A top-level string, or None where it is absent or null.

    Raises:
        InvalidRequest: it is there and is something else.
    """
    if not is_given(fields, name):
        return None
    value = decode(fields[name])
    if not isinstance(value, str):
        raise InvalidRequest(f'The field "{name}" must be a string.', param=name)
    return value


def model_field(fields: Fields) -> str:
    """The model to call.

    Raises:
        InvalidRequest: none is named, or by something that is no string.
    """
    model = string_field(fields, "model")
    if not model:
        raise InvalidRequest('The field "model" is missing. Name the model to call.', param="model")
    return model


def messages_field(fields: Fields) -> msgspec.Raw:
    """The array of messages.

    Raises:
        InvalidRequest: it is absent, or is none.
    """
    messages = fields.get("messages")
    if messages is None or memoryview(messages)[0] != ord("["):
        raise InvalidRequest('The field "messages" must be an array of messages.', param="messages")
    return messages


def is_given(fields: Fields, name: str) -> bool:
    """Whether a field is there and is not null."""
    return name in fields and bytes(fields[name]) != b"null"


def flag_field(fields: Fields, name: str) -> bool:
    """A top-level boolean; absent and null are False.

    Raises:
        InvalidRequest: it is there and is something else.
    """
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequest(f'The field "{name}" must be true or false.', param=name)
    return value == b"true"
