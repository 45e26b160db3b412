"""Read the top level of a JSON body with each value as raw bytes, and write it back."""

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

from gateway.core.counting.request import decode_piece
from gateway.core.errors import InvalidRequest

Fields = Mapping[str, msgspec.Raw]
#: the same, with some fields replaced
AnyFields = Mapping[str, bytes | msgspec.Raw]
_ANY_DECODER: Final = msgspec.json.Decoder()
#: digits of a whole number; one with more is read as None
_MAX_DIGITS: Final = 400
#: characters that may precede a value
_BLANK: Final = " \t\r\n\0"
#: Bytes whose encoding is checked at once. The decoded text may take four times as much memory.
_CHECKED_AT_ONCE: Final = 2**20
#: the errors of data that is not JSON or not UTF-8
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: Limit of top-level fields of a body. No API has a hundred.
_MAX_FIELDS: Final = 4096
#: A body of at most this many bytes cannot exceed `_MAX_FIELDS`, because a field takes at least five (`"":1,`).
_FEW_FIELDS: Final = 4 * _MAX_FIELDS

#: the field that names the session for the gateway, at the top level or in `metadata`
_SESSION_ID: Final = "session_id"
_METADATA: Final = "metadata"
#: Fields that decide the cost of a call, so that other spellings of their names are refused. Some servers ignore the
#: case of names, and use the last of two fields.
_COST_FIELDS: Final = frozenset(
    {
        *("model", "models", "fallbacks", "stream", "stream_options", "background", "deferred"),
        *("messages", "input", "prompt", "n", "best_of"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"),
    }
)
#: Size limit in bytes of the fields that are decoded, above any real request. Decoding a longer value would delay all
#: other calls. First numbers, then names and switches, then fields that may hold a schema or a list of tools.
_MAX_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("n", "best_of", "n_predict", "min_tokens"), 64),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 64),
    # Every new model name is looked up in all tables, and is stored with what is learned about the model.
    "model": 1024,
    **dict.fromkeys(("models", "fallbacks"), 64 * 1024),
    **dict.fromkeys(("stream", "stream_options", "background", "deferred"), 64 * 1024),
    **dict.fromkeys(("service_tier", "speed", "inference_geo", "thinking", "reasoning"), 64 * 1024),
    **dict.fromkeys(("metadata", "session_id", "conversation", "prompt_cache_key"), 64 * 1024),
    **dict.fromkeys(("tool_choice", "function_call"), 2**20),
    **dict.fromkeys(("response_format", "output_config", "output_format", "text", "client_metadata"), 2**20),
}
#: an escaped half of a surrogate pair without its other half; escaped backslashes are masked before the search
_HALF: Final = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


class _Name:
    """A key of the body. Two equal keys stay two different objects, so that duplicates can be detected."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _counting_decoder() -> msgspec.json.Decoder[dict[_Name, msgspec.Raw]]:
    """Return a decoder for one body that counts keys, so that it fails before it keeps millions of them."""
    count = itertools.count(1)

    def name(_: type, text: str) -> _Name:
        if next(count) > _MAX_FIELDS:
            raise InvalidRequest(f"The request body has more than {_MAX_FIELDS} fields.")
        return _Name(text)

    return msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=name)


_FIELDS_DECODER: Final = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=operator.call)


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object, with the values as raw bytes.

    Raises:
        InvalidRequest: the body is not UTF-8, not JSON, not an object or nested too deep; or it has a duplicate key,
            too many keys, or a field that is too long.
    """
    _check_encoding(body)
    try:
        decoder = _FIELDS_DECODER if len(body) <= _FEW_FIELDS else _counting_decoder()
        named = decoder.decode(body)
    except msgspec.ValidationError:
        raise InvalidRequest('The request body is JSON, but not an object. Send an object like {"model": …}.') from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(_invalid_json_message(body, error)) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deep to be read.") from None
    fields = {name.text: raw for name, raw in named.items()}
    if len(fields) != len(named):
        _refuse_duplicates([name.text for name in named])
    for name in _MAX_BYTES.keys() & fields:
        check_length(name, fields[name], _MAX_BYTES[name])
    refuse_other_spellings(fields, _COST_FIELDS)
    return fields


def _check_encoding(body: bytes) -> None:
    """Refuse a body that is not UTF-8, without decoding all of it into one string.

    Raises:
        InvalidRequest: it is not UTF-8.
    """
    if body.isascii():
        return
    decoder, view, at = codecs.getincrementaldecoder("utf-8")(), memoryview(body), 0
    try:
        for at in range(0, len(body), _CHECKED_AT_ONCE):
            pending = len(decoder.getstate()[0])
            decoder.decode(view[at : at + _CHECKED_AT_ONCE], final=at + _CHECKED_AT_ONCE >= len(body))
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid UTF-8 (byte {at - pending + error.start}). Send JSON encoded as UTF-8."
        ) from None


def refuse_other_spellings(names: Collection[str], known: Container[str]) -> None:
    """Refuse a name that differs from a known one only by upper or lower case.

    Raises:
        InvalidRequest: there is such a name.
    """
    joined = "".join(names)
    if joined.isascii() and joined.islower():
        return
    for name in names:
        if (meant := name.casefold()) in known and name != meant:
            raise InvalidRequest(f'The field "{name}" must be written "{meant}".', param=name)


def _invalid_json_message(body: bytes, error: msgspec.DecodeError) -> str:
    """Return the error message for a body that is not valid JSON."""
    half = _HALF.search(body.replace(rb"\\", b"__"))
    if half is None:
        return f"The request body is not valid JSON: {error}."
    return (
        f"The JSON of the request body has half a character: {half[1].decode()} at byte {half.start(1)} is a lone "
        "surrogate, which is invalid in UTF-8. Split texts only between whole characters, or replace such halves "
        "(JavaScript: text.toWellFormed())."
    )


def check_length(name: str, raw: bytes | msgspec.Raw, most: int) -> None:
    """Refuse a value that is too long.

    Raises:
        InvalidRequest: it has more than `most` bytes.
    """
    size = memoryview(raw).nbytes
    if size > most:
        raise InvalidRequest(f'The field "{name}" has {size:,} bytes; it may have {most:,}.', param=name)


def _refuse_duplicates(names: list[str]) -> None:
    """Raise an error for a duplicate key: the gateway and the provider could read different values."""
    name = min(name for name, times in Counter(names).items() if times > 1)
    raise InvalidRequest(
        f'The field "{name[:80]}" appears more than once in the request body. Send it once.', param=name[:80]
    )


def write_fields(fields: Fields, changes: Mapping[str, object]) -> bytes:
    """Return the JSON object with some top-level fields replaced or added; all others keep their bytes and order.

    Fields with the value `UNSET` are removed.
    """
    merged: dict[str, object] = {**fields, **changes}
    if msgspec.UNSET in changes.values():
        merged = {name: value for name, value in merged.items() if value is not msgspec.UNSET}
    return msgspec.json.encode(merged)


def without_session_id(fields: Fields, *, in_metadata: bool) -> dict[str, object]:
    """Return the fields to set so that no `session_id` is sent; only the gateway uses it.

    `in_metadata`: remove it from `metadata` too, for formats that accept no custom metadata fields.
    """
    changes: dict[str, object] = {_SESSION_ID: msgspec.UNSET} if _SESSION_ID in fields else {}
    metadata = decode(fields[_METADATA]) if in_metadata and _METADATA in fields else None
    if isinstance(metadata, dict) and _SESSION_ID in metadata:
        del metadata[_SESSION_ID]
        changes[_METADATA] = metadata or msgspec.UNSET
    return changes


def without_escapes(text: bytes) -> bytes:
    """Return JSON without the escapes in its strings, so that every remaining quote begins or ends a string."""
    # Searching first is faster than replacing when there is no backslash.
    return text.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in text else text


def join(items: Sequence[bytes]) -> msgspec.Raw:
    """Return the JSON array of these encoded values."""
    return msgspec.Raw(b"[" + b",".join(items) + b"]")


def decode(raw: bytes | msgspec.Raw) -> Any:
    """Decode any JSON value; return None if it cannot be read. For values from outside, which may be anything."""
    try:
        return _ANY_DECODER.decode(raw)
    except UNREADABLE:
        pass
    try:
        # Reads NaN, numbers too large for a double (some providers send them) and invalid UTF-8.
        return json.loads(bytes(raw).decode("utf-8", "replace"), parse_int=_int)
    except (ValueError, RecursionError):
        return None


def parse_piece(raw: bytes) -> Any:
    """Decode a piece of JSON like `gateway.core.counting.request.decode_piece`, in a third of the time."""
    try:
        return _ANY_DECODER.decode(raw)
    except UNREADABLE:
        return decode_piece(raw)


def decode_response(raw: bytes) -> Any:
    """Decode a response like `decode`, but accept flaws that clients accept; None if a second value follows.

    Accepted flaws: a byte order mark, raw control characters in strings, and extra bytes after the value.
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
    """Return an integer, or None if it has more digits than Python reads."""
    return int(digits) if len(digits) < _MAX_DIGITS else None


_LENIENT_DECODER: Final = json.JSONDecoder(strict=False, parse_int=_int)


def string_field(fields: Fields, name: str) -> str | None:
    """Return a top-level string, or None if it is absent or null.

    Raises:
        InvalidRequest: the value is not a string.
    """
    if not is_given(fields, name):
        return None
    value = decode(fields[name])
    if not isinstance(value, str):
        raise InvalidRequest(f'The field "{name}" must be a string.', param=name)
    return value


def model_field(fields: Fields) -> str:
    """Return the model to call.

    Raises:
        InvalidRequest: the model is missing or not a string.
    """
    model = string_field(fields, "model")
    if not model:
        raise InvalidRequest('The field "model" is missing. Name the model to call.', param="model")
    return model


def messages_field(fields: Fields) -> msgspec.Raw:
    """Return the array of messages.

    Raises:
        InvalidRequest: it is missing or not an array.
    """
    messages = fields.get("messages")
    if messages is None or memoryview(messages)[0] != ord("["):
        raise InvalidRequest('The field "messages" must be an array of messages.', param="messages")
    return messages


def is_given(fields: Fields, name: str) -> bool:
    """Return True if a field is present and not null."""
    return name in fields and bytes(fields[name]) != b"null"


def flag_field(fields: Fields, name: str) -> bool:
    """Return a top-level boolean; absent and null are False.

    Raises:
        InvalidRequest: the value is not a boolean.
    """
    raw = fields.get(name)
    if raw is None:
        return False
    value = bytes(raw)
    if value not in (b"true", b"false", b"null"):
        raise InvalidRequest(f'The field "{name}" must be true or false.', param=name)
    return value == b"true"
