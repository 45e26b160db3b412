"""Recognize requests for a compaction in the Responses API, write the gateway's own result, and expand it again.

Two requests ask for a compaction. `POST /responses/compact` returns the output that replaces the conversation. In
version 2 an ordinary `/responses` request ends with an item of the type `compaction_trigger`. Its response has exactly
one `compaction` item (https://developers.openai.com/api/docs/guides/compaction, and Codex, compact_remote_v2.rs).

The gateway's own compaction item holds no text. Its `encrypted_content` is a handle: a keyed hash of the compacted
items, which are in the store. Only an item with the prefix of a handle is expanded; items of providers stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

import msgspec

from gateway.core.counting.parts import COMPACTIONS
from gateway.core.errors import InvalidRequest
from gateway.core.http.sse import data_of_events
from gateway.core.values import dataclass
from gateway.dialects.base import Call, named_event
from gateway.dialects.contents import TOO_LARGE, is_too_large
from gateway.dialects.fields import UNREADABLE, decode, join, write_fields
from gateway.dialects.openai_responses import SKELETON

#: path of the request in version 1
COMPACT_PATH: Final = "responses/compact"
_TRIGGER: Final = "compaction_trigger"
_TRIGGER_MARK: Final = b'"compaction_trigger"'
#: prefix of a handle
_PREFIX: Final = "gwc1_"
_PREFIX_MARK: Final = b'"gwc1_'
_HANDLE_BYTES: Final = 32
_ID_DIGITS: Final = 32
#: Roles of messages that clients keep in addition to a compaction item. Codex keeps user messages, up to 64,000 tokens.
_KEPT_ROLES: Final = frozenset({"user", "developer", "system"})
#: statuses of hosts without the compaction path
_NO_SUCH_PATH: Final = frozenset({404, 405, 501})
#: statuses of hosts that do not know the compaction item
_NO_SUCH_ITEM: Final = frozenset({400, 404, 422, 501})
_MODEL_MISSING: Final = b"model_not_found"
_ABOUT_COMPACTION: Final = b"compact"
_NO_USAGE: Final[Mapping[str, object]] = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Item(msgspec.Struct):
    """Fields of an input item that are read."""

    type: str | None = None
    encrypted_content: str | None = None


class _Output(msgspec.Struct):
    """Fields of a response that are read."""

    output: list[_Item] = []
    usage: dict[str, Any] | None = None
    error: Any = None


class _Event(msgspec.Struct):
    """Fields of a stream event that are read."""

    type: str | None = None
    item: _Item | None = None
    response: _Output | None = None


_ITEM: Final = msgspec.json.Decoder(_Item)


@dataclass(frozen=True, slots=True)
class MadeCompaction:
    """A compaction by the gateway. `usage`: the usage of a provider that was called first and returned none."""

    handle: str
    response_id: str
    model: str
    created_at: int
    usage: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class FoundCompaction:
    """Compaction in a provider's response. `items`: number of its compaction items; `usage`: as reported."""

    items: int
    is_error: bool
    usage: Mapping[str, object] | None


def asks_for_compaction(call: Call) -> bool:
    """Return whether the last item of a request is a compaction trigger."""
    # A search for the mark is fast. Hardly any request has it, and the body may be large.
    if _TRIGGER_MARK not in call.body:
        return False
    items = _items(_input(call))
    return bool(items) and _read(items[-1]).type == _TRIGGER


def items_to_compact(call: Call) -> tuple[bytes, ...]:
    """Return the input items of a request without its compaction trigger; a text becomes a user message.

    Raises:
        InvalidRequest: there are no items, or too many to be parsed.
    """
    array = _input(call)
    if array.startswith(b'"'):
        return (msgspec.json.encode({"type": "message", "role": "user", "content": decode(array)}),)
    if is_too_large(array):
        raise InvalidRequest(f"{TOO_LARGE} cannot be compacted.", param="input")
    items = [bytes(item) for item in _items(array)]
    kept_items = tuple([item for item in items if _TRIGGER_MARK not in item or _read(item).type != _TRIGGER])
    if not kept_items:
        raise InvalidRequest("The input has no items to compact. Send the conversation as a list.", param="input")
    return kept_items


def handle_of(namespace: str, text: str) -> str:
    """Return the handle of compacted items: a hash of their text, keyed with the session namespace.

    A retry gives the same handle. The 256 bits cannot be guessed, and a changed handle matches no stored text.
    """
    key = blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=_HANDLE_BYTES).digest()
    hashed = blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=_HANDLE_BYTES)
    return f"{_PREFIX}{hashed.hexdigest()}"


def handles_in(call: Call) -> tuple[str, ...]:
    """Return the handles of the gateway's own compaction items in a request, in order.

    Raises:
        InvalidRequest: the input has such an item and is too large to be parsed.
    """
    if _PREFIX_MARK not in call.body:
        return ()
    array = _input(call)
    if is_too_large(array):
        raise InvalidRequest(f"{TOO_LARGE} cannot be parsed, so its compaction item is not expanded.", param="input")
    return tuple([handle for item in _items(array) if (handle := _handle(item)) is not None])


def expand(call: Call, texts: Mapping[str, str]) -> Call:
    """Return a request with the compacted items instead of the gateway's own compaction items.

    A client may keep some of the compacted messages before the item. These are removed there, so that the model reads
    each message once, in its original position.

    `texts`: the compacted items for each handle, as a JSON array.
    """
    items: list[bytes] = []
    for item in _items(_input(call)):
        handle = _handle(item)
        if handle is None:
            items.append(bytes(item))
            continue
        compacted = [bytes(raw) for raw in _items(texts[handle].encode("utf-8", "surrogatepass"))]
        known = {key for raw in compacted if (key := _identity(raw)) is not None}
        items = [raw for raw in items if _identity(raw) not in known]
        items += compacted
    fields = {**call.fields, "input": join(items)}
    return replace(call, fields=fields, body=write_fields(fields, {}))


def whole_response(made: MadeCompaction) -> bytes:
    """Return the response to a request of version 2 that is not streamed."""
    return msgspec.json.encode(_response(made, "completed", [_item(made)]))


def compacted_response(made: MadeCompaction) -> bytes:
    """Return the response to a request of version 1: the output that replaces the conversation."""
    return msgspec.json.encode(
        {
            "id": made.response_id,
            "object": "response.compaction",
            "created_at": made.created_at,
            "output": [_item(made)],
            "usage": made.usage or _NO_USAGE,
        }
    )


def streamed_response(made: MadeCompaction) -> bytes:
    """Return the events of the response to a request of version 2."""
    item, started = _item(made), _response(made, "in_progress", [])
    events: list[dict[str, object]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": _response(made, "completed", [item])},
    ]
    return b"".join(named_event({**event, "sequence_number": number}) for number, event in enumerate(events))


def compaction_in(body: bytes) -> FoundCompaction:
    """Read the compaction in a complete provider response, streamed or not."""
    if body.lstrip().startswith(b"{"):
        response = _output(body)
        return _found(response.output, response, is_error=response.error is not None)
    done: list[_Item] = []
    last, is_error = _Output(), False
    for data in data_of_events(body):
        try:
            event = msgspec.json.decode(data, type=_Event)
        except UNREADABLE:
            continue
        is_error = is_error or event.type in ("error", "response.failed")
        if event.type == "response.output_item.done" and event.item is not None:
            done.append(event.item)
        if event.response is not None:
            last = event.response
    return _found(done, last, is_error=is_error)


def is_unsupported(status: int, body: bytes, *, is_path: bool) -> bool:
    """Return whether an error says that the host has no compaction. `is_path`: the path was called (version 1)."""
    if is_path and status in _NO_SUCH_PATH:
        return _MODEL_MISSING not in body
    return status in _NO_SUCH_ITEM and _ABOUT_COMPACTION in body


def _found(items: Sequence[_Item], response: _Output, *, is_error: bool) -> FoundCompaction:
    count = sum(item.type in COMPACTIONS for item in items)
    return FoundCompaction(count, is_error, response.usage)


def _output(body: bytes) -> _Output:
    try:
        return msgspec.json.decode(body, type=_Output)
    except UNREADABLE:
        return _Output()


def _response(made: MadeCompaction, status: str, output: Sequence[Mapping[str, object]]) -> dict[str, object]:
    usage = (made.usage or _NO_USAGE) if status == "completed" else None
    known = {"id": made.response_id, "created_at": made.created_at, "model": made.model, "store": False}
    return {**SKELETON, "incomplete_details": None, **known, "status": status, "output": output, "usage": usage}


def _item(made: MadeCompaction) -> dict[str, object]:
    name = made.handle.removeprefix(_PREFIX)[:_ID_DIGITS]
    return {"id": f"cmp_{name}", "type": "compaction", "encrypted_content": made.handle}


def _input(call: Call) -> bytes:
    return bytes(call.fields.get("input", b"[]"))


def _items(array: bytes) -> list[msgspec.Raw]:
    if is_too_large(array):
        return []
    try:
        return _LIST.decode(array)
    except UNREADABLE:
        return []


def _read(item: bytes | msgspec.Raw) -> _Item:
    try:
        return _ITEM.decode(item)
    except UNREADABLE:
        return _Item()


def _handle(item: msgspec.Raw) -> str | None:
    if _PREFIX_MARK not in bytes(item):
        return None
    read = _read(item)
    content = read.encrypted_content
    return content if read.type in COMPACTIONS and content is not None and content.startswith(_PREFIX) else None


def _identity(item: bytes) -> str | None:
    """Return what identifies a message: its role and content; None for the model's messages and other items."""
    if b'"role"' not in item:
        return None
    message = decode(item)
    if not isinstance(message, dict) or message.get("role") not in _KEPT_ROLES:
        return None
    content = message.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return json.dumps([message["role"], parts], sort_keys=True)
