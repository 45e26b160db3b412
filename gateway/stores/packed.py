"""Pack call records into a tenth of their JSON, and read both forms.

A packed record is a byte 1, then raw deflate of msgpack. The msgpack is a list: a number whose bits say which fields
follow, and their values in the order of `_FIELDS`. Fields with their default values are left out, and so is what the
store knows already: the call id and the session. Times are whole microseconds where that is exact.

The order of the fields and the dictionary are part of the format. New fields are added at the end; nothing else
changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from typing import Any, Final

import msgspec

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord, ContextRecord
from gateway.core.usage import Usage

_VERSION: Final = b"\x01"
_JSON_START: Final = b"{"
#: the fields of a record by their bits; `usage`, `source` and `cost` are its charge
_FIELDS: Final = (
    "request_id", "session", "derived_session", "started_at", "dialect", "operation", "provider", "model",
    "response_model", "stream", "status", "outcome", "error_code", "finish_reason", "tools", "charge", "overhead_s",
    "first_byte_s", "duration_s", "request_bytes", "response_bytes", "notes", "context", "accounts", "spent", "mode",
    "step", "kept", "answer", "unread_thinking", "lesson", "error", "declared", "labels",
)  # fmt: skip
_CONTEXT: Final = (
    "tokens", "original_tokens", "source", "budget", "conversation_tokens", "tool_tokens", "key", "estimate", "frames",
    "before", "trimmed", "saved", "shadow", "message_fates", "tool_weights", "margin", "kept", "beyond", "thinking",
    "newest",
)  # fmt: skip
_USAGE: Final = (
    "input_tokens", "output_tokens", "total_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens",
    "audio_input_tokens", "audio_output_tokens", "cache_write_1h_tokens",
)  # fmt: skip
#: what many records contain. The likeliest is at the end.
_DICTIONARY: Final = (
    b"client_stalled cut_at_shutdown too_slow provider_error upstream_failed upstream_broken budget_end client_left "
    b"internal_error worker_lost pending refused budget_exhausted rate_limited context_length_exceeded traceparent "
    b"fallback retries price unbilled embeddings completions content_filter max_tokens length mistral deepseek groq "
    b"xai bedrock vertex azure openrouter gemini claude-haiku-4-5 claude-opus-4-5 claude-sonnet-4-5 -20250929 "
    b"gemini-2.5-flash gemini-2.5-pro gpt-4o-mini gpt-4.1-mini gpt-5.1 gpt-5-nano gpt-5-mini -2025-08-07 tag search "
    b"read_file write_file bash edit heuristic exact counted calibrated learned estimated mixed table summary raw "
    b"namesrolesrulesbeforeafterkeyresidualframesaddedoverreceivedsentreason system user assistant tool "
    b"end_turn tool_use completed messages anthropic\nclaude responses ok tool_calls stop provider "
    b"openai\ngpt-5\nchat\n"
)
_COMPRESSION: Final = 1
_WINDOW_BITS: Final = -12
_MEMORY: Final = 5
#: Copying a compressor that knows the dictionary costs less than preparing one.
_COMPRESSOR: Final = zlib.compressobj(
    _COMPRESSION, zlib.DEFLATED, _WINDOW_BITS, _MEMORY, zlib.Z_DEFAULT_STRATEGY, _DICTIONARY
)
_MICRO: Final = 1e6
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_JSON: Final = msgspec.json.Decoder(CallRecord)
#: stand for the accounts of the client key and the session
_KEY_ACCOUNT: Final = 0
_SESSION_ACCOUNT: Final = 1


class _Fields:
    """Converts an object to the list of its fields that differ from their defaults, and back."""

    def __init__(self, kind: type, names: Sequence[str]) -> None:
        defaults = {field.name: _default(field) for field in fields(kind)}
        self._names = names
        self._defaults = [defaults[name] for name in names]
        self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)

    def pack(self, values: Iterable[Any]) -> list[Any]:
        """Return the bits of the fields and their values."""
        bits, bit, packed = 0, 1, list[Any]((0,))
        for value, default in zip(values, self._defaults, strict=True):
            if value != default:
                bits |= bit
                packed.append(value)
            bit <<= 1
        packed[0] = bits
        return packed

    def unpack(self, packed: Sequence[Any]) -> dict[str, Any]:
        """Return the fields by name. Those with default values are missing, unless the default is None or zero."""
        bits, place, found = packed[0], 1, dict[str, Any]()
        for number, name in enumerate(self._names):
            if bits >> number & 1:
                found[name] = packed[place]
                place += 1
            elif self._defaults[number] is None:
                found[name] = None
        return found


def _default(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


_OF_RECORD: Final = _Fields(CallRecord, _FIELDS)
_OF_CONTEXT: Final = _Fields(ContextRecord, _CONTEXT)
_OF_USAGE: Final = _Fields(Usage, _USAGE)
_PLACE: Final = {name: place for place, name in enumerate(_FIELDS)}
_TIMES: Final = tuple(_PLACE[name] for name in ("started_at", "overhead_s", "first_byte_s", "duration_s"))
_REQUEST_ID, _SESSION, _CHARGE, _CONTEXT_AT, _ACCOUNTS = (
    _PLACE[name] for name in ("request_id", "session", "charge", "context", "accounts")
)


def pack(record: CallRecord) -> bytes:
    """Return a record as a store keeps it."""
    values = list(_OF_RECORD.values(record))
    if record.request_id == record.call_id:
        values[_REQUEST_ID] = None
    values[_SESSION] = None
    for place in _TIMES:
        values[place] = _as_micros(values[place])
    charge, context, key = record.charge, record.context, record.session
    if charge is not None:
        values[_CHARGE] = (_OF_USAGE.pack(_OF_USAGE.values(charge.usage)), charge.source, charge.cost_usd)
    if context is not None:
        values[_CONTEXT_AT] = _OF_CONTEXT.pack(_OF_CONTEXT.values(context))
    if key is not None:
        own = {AccountKey("key", key.namespace): _KEY_ACCOUNT, key.account: _SESSION_ACCOUNT}
        values[_ACCOUNTS] = [own.get(account, account) for account in record.accounts]
    compressor = _COMPRESSOR.copy()
    return _VERSION + compressor.compress(_encode(_OF_RECORD.pack(values))) + compressor.flush()


def unpack(value: bytes, call_id: str, key: SessionKey | None) -> CallRecord:
    """Return the record of a call and its session, from either form.

    Raises:
        msgspec.MsgspecError, ValueError, TypeError, LookupError, zlib.error: it is damaged or of a newer version.
    """
    if value[:1] == _JSON_START:
        return _JSON.decode(value)
    if value[:1] != _VERSION:
        raise ValueError(f"its first byte is {value[:1]!r}, which a newer version may have written")
    decompressor = zlib.decompressobj(_WINDOW_BITS, zdict=_DICTIONARY)
    found = _OF_RECORD.unpack(_decode(decompressor.decompress(value[1:])))
    found["call_id"], found["session"] = call_id, key
    if found["request_id"] is None:
        found["request_id"] = call_id
    for place in _TIMES:
        found[_FIELDS[place]] = _as_seconds(found[_FIELDS[place]])
    if found["charge"] is not None:
        usage, source, cost_usd = found["charge"]
        found["charge"] = {"usage": _OF_USAGE.unpack(usage), "source": source, "cost_usd": cost_usd}
    if found["context"] is not None:
        found["context"] = _OF_CONTEXT.unpack(found["context"])
    if key is not None:
        own = (AccountKey("key", key.namespace), key.account)
        found["accounts"] = [own[one] if isinstance(one, int) else one for one in found.get("accounts", ())]
    return msgspec.convert(found, CallRecord)


def _as_micros(seconds: float | None) -> float | None:
    """Return whole microseconds if they are exact, otherwise the seconds."""
    if seconds is None:
        return None
    micros = round(seconds * _MICRO)
    return micros if micros / _MICRO == seconds else float(seconds)


def _as_seconds(stored: float | None) -> float | None:
    return stored / _MICRO if isinstance(stored, int) else stored
