"""Encode call records as msgpack in a seventh of the bytes of their JSON, and decode both forms.

An encoded record is one byte, then msgpack: the values of `_FIELDS`, in their order. The byte is 1, or 2 if the msgpack
is compressed because it is long. These rules save bytes:

- The call id and the session are left out, because the store has them in other columns or keys.
- Frequent words are numbers.
- A name that begins with the name of the model is a list with the rest of the name.
- Times are whole microseconds where that is exact.

The order of the fields and of the words is part of the format. New ones are added at the end; nothing else changes. The
values of an older record end earlier, and the missing ones have their defaults.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import msgspec

from gateway.core.ledger.arithmetic import AccountKey
from gateway.core.ledger.session_key import SessionKey
from gateway.core.record import CallRecord

_PLAIN: Final = b"\x01"
_COMPRESSED: Final = b"\x02"
_JSON_START: Final = b"{"
#: Longer msgpack is compressed, such as that of a trimmed call with many messages. Compressing a short one takes longer
#: than all the rest.
_LONG: Final = 512
#: the fields of a record
_FIELDS: Final = (
    "request_id", "session", "derived_session", "started_at", "dialect", "operation", "provider", "model",
    "response_model", "stream", "status", "outcome", "error_code", "finish_reason", "tools", "charge", "overhead_s",
    "first_byte_s", "duration_s", "request_bytes", "response_bytes", "notes", "context", "accounts", "spent", "mode",
    "step", "kept", "answer", "unread_thinking", "lesson", "error", "declared", "labels", "agent",
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
#: words that are numbers in fields of `_WORD_FIELDS`
_WORDS: Final = (
    "chat", "responses", "messages", "completions", "embeddings", "openai", "anthropic", "gemini", "azure", "bedrock",
    "vertex", "openrouter", "mistral", "deepseek", "groq", "xai", "ok", "refused", "provider_error", "upstream_failed",
    "upstream_broken", "budget_end", "client_left", "client_stalled", "cut_at_shutdown", "too_slow", "internal_error",
    "worker_lost", "pending", "stop", "tool_calls", "length", "content_filter", "end_turn", "tool_use", "max_tokens",
    "completed", "incomplete", "provider", "estimated", "mixed", "raw", "table", "summary", "handle_only",
)  # fmt: skip
_NUMBERS: Final = {word: number for number, word in enumerate(_WORDS)}
_LEVEL: Final = 1
_MICRO: Final = 1e6
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_JSON: Final = msgspec.json.Decoder(CallRecord)
_encode_json: Final = msgspec.json.Encoder().encode
#: numbers for the accounts of the client key and the session
_KEY_ACCOUNT: Final = 0
_SESSION_ACCOUNT: Final = 1


_values_of_record: Final = attrgetter(*_FIELDS)
_values_of_context: Final = attrgetter(*_CONTEXT)
_values_of_usage: Final = attrgetter(*_USAGE)
_PLACE: Final = {name: place for place, name in enumerate(_FIELDS)}
_TIMES: Final = tuple(_PLACE[name] for name in ("started_at", "overhead_s", "first_byte_s", "duration_s"))
_WORD_FIELDS: Final = tuple(
    _PLACE[name] for name in ("dialect", "operation", "provider", "outcome", "finish_reason", "mode")
)
_REQUEST_ID, _SESSION, _MODEL, _RESPONSE_MODEL, _CHARGE, _CONTEXT_AT, _ACCOUNTS = (
    _PLACE[name] for name in ("request_id", "session", "model", "response_model", "charge", "context", "accounts")
)
_KEY: Final = _CONTEXT.index("key")
_FATES: Final = _CONTEXT.index("message_fates")


def encode_record(record: CallRecord) -> bytes:
    """Return a record as a store keeps it."""
    values = list(_values_of_record(record))
    if record.request_id == record.call_id:
        values[_REQUEST_ID] = None
    values[_SESSION] = None
    for place in _TIMES:
        seconds = values[place]
        if seconds is not None:
            micros = round(seconds * _MICRO)
            values[place] = micros if micros / _MICRO == seconds else float(seconds)
    for place in _WORD_FIELDS:
        word = values[place]
        values[place] = _NUMBERS.get(word, word)
    values[_RESPONSE_MODEL] = _rest_of(record.response_model, record.model)
    charge, context, key = record.charge, record.context, record.session
    if charge is not None:
        values[_CHARGE] = (_values_of_usage(charge.usage), _NUMBERS.get(charge.source), charge.cost_usd)
    if context is not None:
        values[_CONTEXT_AT] = counts = list(_values_of_context(context))
        counts[_KEY] = _rest_of(context.key, _learning_key(record.provider, record.model))
        if not context.message_fates:
            counts[_FATES] = None
    if key is not None:
        own = {("key", key.namespace, ""): _KEY_ACCOUNT, ("session", key.namespace, key.id): _SESSION_ACCOUNT}
        values[_ACCOUNTS] = [own.get(account, account) for account in record.accounts]
    try:
        encoded = _encode(values)
    except OverflowError:
        return _encode_json(record)  # a provider reported a number of more than 64 bits
    return _PLAIN + encoded if len(encoded) <= _LONG else _COMPRESSED + zlib.compress(encoded, _LEVEL)


def decode_record(value: bytes, call_id: str, key: SessionKey | None) -> CallRecord:
    """Return the record of a call and its session, from either form.

    Raises:
        msgspec.MsgspecError, ValueError, TypeError, LookupError, zlib.error: it is damaged or of a newer version.
    """
    kind = value[:1]
    if kind == _JSON_START:
        return _JSON.decode(value)
    if kind not in (_PLAIN, _COMPRESSED):
        raise ValueError(f"its first byte is {kind!r}, which a newer version may have written")
    found = _named(_FIELDS, _decode(value[1:] if kind == _PLAIN else zlib.decompress(value[1:])))
    found["call_id"], found["session"] = call_id, key
    if found["request_id"] is None:
        found["request_id"] = call_id
    for place in _TIMES:
        seconds = found[_FIELDS[place]]
        if isinstance(seconds, int):
            found[_FIELDS[place]] = seconds / _MICRO
    for place in _WORD_FIELDS:
        found[_FIELDS[place]] = _word(found[_FIELDS[place]])
    found["response_model"] = _whole_of(found["response_model"], found["model"])
    if found["charge"] is not None:
        usage, source, cost_usd = found["charge"]
        found["charge"] = {"usage": _named(_USAGE, usage), "source": _word(source), "cost_usd": cost_usd}
    if found["context"] is not None:
        found["context"] = _context_of(found["context"], _learning_key(found["provider"], found["model"]))
    if key is not None:
        own = (AccountKey("key", key.namespace), key.account)
        found["accounts"] = [own[one] if isinstance(one, int) else one for one in found["accounts"]]
    return msgspec.convert(found, CallRecord)


def _context_of(values: Sequence[Any], key_begin: str) -> dict[str, Any]:
    """Return the fields of the token counts by name."""
    context = _named(_CONTEXT, values)
    context["key"] = _whole_of(context["key"], key_begin)
    if context["message_fates"] is None:
        del context["message_fates"]
    return context


def _learning_key(provider: str, model: str) -> str:
    """Return how most keys begin under which corrections are learned."""
    return f"{provider}\n{model}\n"


def _rest_of(text: str | None, begin: str) -> str | tuple[str] | None:
    """Return the rest of a text in a tuple if it begins in this way, otherwise the text."""
    return (text[len(begin) :],) if text is not None and text.startswith(begin) else text


def _whole_of(stored: Any, begin: str) -> Any:
    return begin + stored[0] if isinstance(stored, list) else stored


def _word(stored: Any) -> Any:
    return _WORDS[stored] if isinstance(stored, int) else stored


def _named(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    """Return values by name. Those of an older version are fewer."""
    return dict(zip(names, values, strict=False))
